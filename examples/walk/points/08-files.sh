start issuer --ca embedded --ca-dir ca --cert-dir none --output-dir out
appears out/key.pem

title 'The files of a TLS Secret'
shell 'mkdir secret; cp -L out/cert-chain.pem secret/tls.crt; cp -L out/key.pem secret/tls.key; cp -L out/root-cert.pem secret/ca.crt'
start secret --ca none --cert-dir secret
run attache get --socket secret.sock
exits 0

title 'One file with key and chain'
shell 'mkdir bundle; cat out/key.pem out/cert-chain.pem >bundle/bundle.pem; cp -L out/root-cert.pem bundle/roots.pem'
start bundle --ca none --cert-dir bundle --cert-file bundle.pem --root-file roots.pem
run attache get --socket bundle.sock
exits 0
