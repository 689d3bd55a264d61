start_ca
attache ca token default web >web.token

title 'Plaintext for a port that expects TLS'
attache run --socket web.sock --status-address none --cert-dir none --ca-address "http://$address" --token-file web.token 2>web.log </dev/null &
command='attache run'
logs web 'https://'

title 'JSON logs have durations as numbers'
attache run --socket json.sock --status-address none --cert-dir none --ca embedded --ca-dir ca --log-format json 2>json.log </dev/null &
command='attache run --log-format json'
logs json '"after_ms":'
