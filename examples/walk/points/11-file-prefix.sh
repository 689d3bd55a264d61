start closed --ca embedded --ca-dir ca --cert-dir none
start open --ca embedded --ca-dir ca --cert-dir none --file-prefix "$PWD"

title 'A file elsewhere is refused, and the message names the option that opens its directory'
run attache get "file-root:$PWD/ca/root-cert.pem" --socket closed.sock
exits 1
says '--file-prefix'
shell "mkdir roots; cp ca/root-cert.pem roots/"
run attache get "file-root:$PWD/roots/root-cert.pem" --socket open.sock
exits 0
