start one --ca embedded --ca-dir ca --cert-dir none --spiffe-id spiffe://example.org/one
start two --ca embedded --ca-dir ca --cert-dir none --spiffe-id spiffe://example.org/two

title 'Each agent in one directory answers for itself'
run attache status --socket one.sock
exits 0
prints one.sock
prints spiffe://example.org/one
prints_not spiffe://example.org/two
run attache status --socket two.sock
prints spiffe://example.org/two
prints_not spiffe://example.org/one
run attache renew --socket two.sock
exits 0
logs two 'renewal requested'
