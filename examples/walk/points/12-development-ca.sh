title 'A development token, without a cluster'
start_ca
shell 'attache ca token shop cart >cart.token'
exits 0
start cart --ca-address "$address" --ca-root attache-ca/root-cert.pem --cert-dir none --token-file cart.token
run attache get default --socket cart.sock --expect spiffe://cluster.local/ns/shop/sa/cart
exits 0
