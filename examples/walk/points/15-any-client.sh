start web --ca embedded --ca-dir ca --cert-dir none

cat >call.py <<'END'
"""Calls FetchSecrets as gRPC's clients for Python, Ruby and Java do: with the socket's path as :authority."""
import socket, struct, sys

def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

def text(value):
    return bytes([len(value)]) + value.encode()

# HPACK: indexed fields, and literals with indexed or new names.
fields = b"\x83\x86" + b"\x04" + text("/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets")
fields += b"\x01" + text(sys.argv[2]) + b"\x0f\x10" + text("application/grpc") + b"\x00" + text("te") + text("trailers")
# A node with an id, and the resource name ROOTCA.
request = b"\x12\x06\x0a\x04walk" + b"\x1a\x06ROOTCA"
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, fields)
               + frame(0, 1, 1, b"\0" + struct.pack(">I", len(request)) + request))
received = b""
while True:
    while len(received) < 9 or len(received) < 9 + int.from_bytes(received[:3], "big"):
        received += client.recv(65536) or sys.exit("the connection was closed")
    length, kind = int.from_bytes(received[:3], "big"), received[3]
    payload, received = received[9:9 + length], received[9 + length:]
    if kind == 3:
        sys.exit("the call was reset")
    if kind == 0 and b"ROOTCA" in payload:
        sys.exit(print("ROOTCA"))
END

title 'A client that sends the path of the socket as its authority'
run python3 call.py web.sock "$PWD/web.sock"
exits 0
prints ROOTCA
run python3 call.py web.sock '%2Frun%2Fweb.sock'
exits 0
prints ROOTCA
