cat >web.toml <<'END'
ca = "embedded"
ca-dir = "ca"
cert-dir = "none"
cert-ttl = "1h"
END
printf 'ca = "embedded"\ncert-tll = "1h"\n' >wrong.toml

title 'Options in a file'
start web --config web.toml
run attache status --socket web.sock
exits 0
run attache run --config wrong.toml
exits 2
says 'line 2 of'
says 'cert-ttl'
