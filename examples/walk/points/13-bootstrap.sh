title 'The bootstrap goes to standard output; standard error says how to start Envoy'
shell 'attache bootstrap --socket /run/attache/sds.sock >envoy.json'
exits 0
says 'start Envoy with this output in a file: envoy -c envoy.json'
says '--base-id 1'
says '--disable-hot-restart'
shell 'python3 -m json.tool envoy.json >/dev/null && echo valid JSON'
prints 'valid JSON'

title 'A reader that leaves early'
shell 'set -o pipefail; attache bootstrap 2>/dev/null | head -n 1'
exits 0
prints '{'
