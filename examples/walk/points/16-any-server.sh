start web --ca embedded --ca-dir ca --cert-dir none --spiffe-id spiffe://example.org/web --cert-ttl 1h

title 'Expectations for scripts'
run attache get default --socket web.sock --expect spiffe://example.org/web --min-life 30m
exits 0
run attache get default --socket web.sock --expect spiffe://example.org/api
exits 1
says spiffe://example.org/api
run attache get default --socket web.sock --min-life 2h
exits 1
run attache get default --socket web.sock --output json --node-id probe-1
exits 0
prints not_after
