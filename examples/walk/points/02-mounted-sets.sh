start old --ca embedded --ca-dir old-ca --cert-dir none --output-dir old
start new --ca embedded --ca-dir new-ca --cert-dir none --output-dir new
appears old/key.pem
appears new/key.pem
cp -rL old certs
start web --ca none --cert-dir certs

title 'The roots of another CA beside a pair that does not fit wait for a usable pair'
shell 'cp -L new/key.pem new/root-cert.pem certs/'
logs web 'held back'
shell 'attache get ROOTCA --output pem --socket web.sock >served.pem; cmp served.pem old/root-cert.pem && echo the old roots'
prints 'the old roots'
run attache status --socket web.sock
prints 'held back'
