title 'Mistakes have a suggestion'
run attache get --show-key
exits 2
says '--output'
run attache run --ca embedded --log-level info,attache::sourse=debug
exits 2
says 'did you mean attache::source?'
shell 'ATTACHE_CA_ADRESS=istiod:15012 attache run'
exits 2
says 'did you mean ATTACHE_CA_ADDRESS?'
shell 'attache run --help >/dev/full'
exits 1

title 'A name that the agent does not know'
start web --ca embedded --ca-dir ca --cert-dir none
run attache watch defualt --socket web.sock
exits 1
says defualt
