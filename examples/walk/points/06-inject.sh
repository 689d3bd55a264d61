cat >web.yaml <<'END'
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}   # stays
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - name: web
          image: web:1
        - name: envoy
          image: envoyproxy/envoy:v1.36.0
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{port: 80}]}
END
sed 's,^\( *\)image: envoyproxy/envoy.*,&\n\1securityContext: {runAsUser: 1337},' web.yaml >good.yaml

title 'envoyproxy/envoy switches to its own user: a warning; each workload has a line'
shell 'attache inject --image attache:1 web.yaml -- --ca-address istiod.istio-system.svc:15012 >injected.yaml'
exits 0
says 'web.yaml: Deployment shop/web: sidecar attache added, socket in envoy, volumes attache-token, attache-ca-root'
says '1 other object without Pods: unchanged'
says 'container envoy runs as user 101'
says 'set runAsUser: 1337 in its securityContext, or give --run-as 101'

title 'With the same user there is none'
shell 'attache inject --image attache:1 good.yaml -- --ca-address istiod.istio-system.svc:15012 >injected.yaml'
exits 0
says_not 'runs as user'
shell 'diff good.yaml injected.yaml | grep -c "^<"'
prints 0

title 'A second run changes nothing'
shell 'attache inject --image attache:1 injected.yaml -- --ca-address istiod.istio-system.svc:15012 | cmp - injected.yaml'
exits 0
says 'sidecar attache unchanged'

title 'Without an Envoy, no container gets the socket unless told'
shell 'sed /envoy/d web.yaml | attache inject --image attache:1 -- --ca-address istiod.istio-system.svc:15012 >none.yaml'
exits 0
says 'sidecar attache added, socket in no container'
says 'no container gets the socket, since none of web is an Envoy by its name or image; name those that get it with --container'

title 'What the container would not have is refused'
run attache inject --image attache:1 good.yaml -- --ca-address istiod.istio-system.svc:15012 --crl /etc/crl/ca.pem
exits 2
says '--crl /etc/crl/ca.pem: no volume is mounted there; mount one of the Pods'\'' volumes with --mount VOLUME=/etc/crl'
run attache inject --image attache:1 good.yaml -- --ca none
exits 2
says '--cert-dir /etc/certs (the default): no volume is mounted there'
run attache inject --image attache:1 good.yaml -- --ca vault --ca-address https://vault:8200 --vault-role mesh \
    --vault-token-file /vault/token
exits 2
says '--vault-token-file /vault/token: no volume is mounted there'
says "the root of the CA's TLS certificate is missing: name it with --ca-root FILE"
run attache inject --image attache:1 good.yaml -- --ca-address istiod.istio-system.svc:15012 --output-dir /out \
    --output-hook 'nginx -s reload'
exits 2
says '--output-hook runs a command by /bin/sh, and the agent'\''s image has no programs besides the agent'
says 'give --image-has /bin/sh'

title 'The audience of the token is that of the CA'
run attache inject --image attache:1 good.yaml -- --ca vault --ca-address http://vault:8200 --vault-role mesh --vault-auth-role mesh
exits 0
prints 'audience: vault'
prints_not 'audience: istio-ca'

title 'A forgotten --'
run attache inject --image attache:1 good.yaml --ca-address istiod.istio-system.svc:15012
exits 2
says '--ca-address is an option of attache run: put -- before'

title 'JSON with an escape beyond the basic plane'
shell "echo '{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"\\ud83d\\ude80\"}, \"spec\": {\"containers\": [{\"name\": \"a\"}]}}' >pod.json"
shell 'attache inject --image attache:1 --container a pod.json -- --ca-address istiod.istio-system.svc:15012 >injected.json'
exits 0
says_not 'not YAML'
shell 'python3 -m json.tool --no-ensure-ascii injected.json'
exits 0
prints '🚀'
