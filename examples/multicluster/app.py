"""helloworld: responds with its version, and with the identity of the caller that the sidecar has verified.

Usage: app.py VERSION. Prints the address on which it listens.
"""

import http.server
import sys


class Hello(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        certificate = self.headers.get("x-forwarded-client-cert", "")
        fields = dict(field.split("=", 1) for field in certificate.split(";") if "=" in field)
        body = f"Hello version: {sys.argv[1]}, asked by {fields.get('URI', 'a stranger')}\n".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
print(f"127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
