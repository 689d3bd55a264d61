start_ca
attache ca token default web >web.token
start web --ca-address "127.0.0.1:1,$address" --ca-root attache-ca/root-cert.pem --cert-dir none --token-file web.token

title 'Which CA signed, and which one fails'
run attache status --socket web.sock
exits 0
prints "$address"
prints '127.0.0.1:1'
prints 'failing'
shell 'attache status --socket web.sock --output json | grep signed_by'
prints "$address"
