start web --ca embedded --ca-dir ca --cert-dir none --dns-san web.example --common-name web --output-dir out

title 'DNS names for ordinary TLS clients'
run attache get default --socket web.sock
exits 0
prints web.example
run attache run --ca-address istiod:15012 --dns-san 'web example'
exits 2
says '--dns-san'
