"""A client of the SPIFFE Workload API, for tests: prints what it has, and each update, to standard error."""

import sys

from cryptography.hazmat.primitives.serialization import Encoding
from spiffe import TrustDomain, WorkloadApiClient, X509Source
from spiffe.errors import PySpiffeError

domain = TrustDomain("cluster.local")
address = "unix://" + sys.argv[1]


def say(line):
    print(line, file=sys.stderr, flush=True)


with WorkloadApiClient(address) as client:
    for name in sys.argv[2:]:
        bundle = client.fetch_x509_bundles(timeout=50).get_bundle_for_trust_domain(TrustDomain(name))
        keys = client.fetch_jwt_bundles(timeout=50).get_bundle_for_trust_domain(TrustDomain(name))
        say(f"of {name}: roots={len(bundle.x509_authorities)} keys={len(keys.jwt_authorities)}")
    say(f"jwt keys: {len(client.fetch_jwt_bundles(timeout=50).get_bundle_for_trust_domain(domain).jwt_authorities)}")
    say(f"bundle: {len(client.fetch_x509_bundles(timeout=50).get_bundle_for_trust_domain(domain).x509_authorities)}")
    try:
        client.fetch_jwt_svid(audience={"web"}, timeout=50)
    except PySpiffeError as error:
        say(f"no JWT: {error}")


def show():
    context = source.get_x509_context()
    svid = context.default_svid
    bundle = context.x509_bundle_set.get_bundle_for_trust_domain(domain)
    key, certificate = svid.private_key.public_key(), svid.leaf.public_key()
    same = key.public_numbers() == certificate.public_numbers()
    roots = len(bundle.x509_authorities)
    # Java's and the agent's form: hexadecimal, in whole bytes.
    serial = svid.leaf.serial_number.to_bytes(20, "big").hex().lstrip("0")
    for name in sys.argv[2:]:
        federated = context.x509_bundle_set.get_bundle_for_trust_domain(TrustDomain(name))
        say(f"federated: {name} roots={len(federated.x509_authorities)}")
    say(f"update: {svid.spiffe_id} serial={serial} roots={roots} key={same}")


source = X509Source(socket_path=address, timeout_in_seconds=50)
source.subscribe_for_updates(show)
show()
# Until the test closes it.
sys.stdin.read()
