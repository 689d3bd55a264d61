title 'A root, and an intermediate for each cluster'
run attache ca init --root root
exits 0
prints 'root/root-key.pem: its key'
run attache ca intermediate --root root --name cluster1 --out cluster1
exits 0
shell 'ls cluster1'
prints cert-chain.pem

title 'No key is overwritten'
run attache ca init --root root
exits 1
says 'root/root-key.pem exists, and is never overwritten; choose another directory'

title "A root's directory where an intermediate's is needed"
run attache ca --listen 127.0.0.1:0 --ca-dir root
exits 1
says 'make an intermediate with `attache ca intermediate --root root`'

title 'A coming root, and one that still signs'
run attache ca init --root new-root
run attache ca announce --ca-dir cluster1 --root new-root
exits 0
run attache ca drop --ca-dir cluster1 --root root
exits 1
says 'which signs now'

title 'Another intermediate in the place of the first'
run attache ca intermediate --root new-root --name cluster1 --also-root cluster1 --out cluster1.next
run attache ca exchange --ca-dir cluster1 --with cluster1.next
exits 0
prints 'cluster1.next: what was there before'

title 'An agent serves both roots'
start web --ca embedded --ca-dir cluster1 --cert-dir none
run attache get ROOTCA --socket web.sock
prints '2 certificates'
