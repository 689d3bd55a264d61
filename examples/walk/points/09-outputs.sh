start web --ca embedded --ca-dir ca --cert-dir none --output a --output b,format=combined --output c,format=pkcs12 --output-hook 'touch done'
appears done

title 'Formats for nginx, HAProxy and Java, and one hook after all'
shell 'ls a b c done'
exits 0
prints cert-chain.pem
prints .p12
run attache run --ca embedded --output d,fromat=jks
exits 2
says 'format'
