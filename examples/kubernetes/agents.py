"""The agent with real API servers, and an Envoy that it serves: the rows of `run` about them."""

import json
import os
import pathlib
import random
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.request

from clusters import ADMIN, ROOT, NotRun, free_ports, secret, until

HOSTS = 500
MANY = 5000


def agent_binary():
    named = os.environ.get("ATTACHE")
    built = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/attache"
    binary = pathlib.Path(named) if named else built
    if not binary.is_file():
        raise NotRun("there is no attache; build it, or set ATTACHE")
    shown = subprocess.run([binary, "run", "--help"], stdout=subprocess.PIPE, text=True).stdout
    if "--kubernetes-secrets" not in shown:
        raise NotRun("this attache has no --kubernetes-secrets")
    return binary


class Agent:
    """An agent that serves the Secrets that an account of a cluster may read."""

    def __init__(self, cluster, *options, account="gateway", namespace="shop"):
        binary, self.directory = agent_binary(), pathlib.Path(tempfile.mkdtemp(dir=cluster.directory))
        self.socket = self.directory / "sds.sock"
        fixed = ["--ca", "none", "--kubernetes-secrets", "--kubeconfig", cluster.kubeconfig(account), "--namespace", namespace]
        fixed += ["--socket", self.socket, "--status-address", "none", *options]
        self.binary, self.log = binary, self.directory / "log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([binary, "run", *fixed], stdout=log, stderr=log, env={})
        until("the agent serves", lambda: self.socket.exists() or self.process.poll() is not None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(20)

    def get(self, name):
        """What `attache get` prints: the certificates, or the error."""
        command = [self.binary, "get", "--socket", self.socket, "--output", "pem", "--timeout", "5s", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={})
        return done.stdout if done.returncode == 0 else done.stderr

    def status(self):
        """What `attache status` says of its own cluster."""
        command = [self.binary, "status", "--output", "json", "--socket", self.socket]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={}).stdout)["clusters"][0]

    def memory(self):
        """Its anonymous memory, in kB."""
        [line] = [line for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if "RssAnon" in line]
        return int(line.split()[1])

    def wait(self, name, holds):
        try:
            return until(f"{name} is as expected", lambda: holds(text := self.get(name)) and (text or "empty"))
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.get(name)}\n{self.log.read_text()[-3000:]}") from None


def put_pair(cluster, name, host):
    """A Secret with a new self-signed certificate for a host; the certificate."""
    files = [cluster.directory / f"{name}.key", cluster.directory / f"{name}.crt"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    made += ["-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}", "-keyout", files[0], "-out", files[1]]
    subprocess.run(made, check=True, stderr=subprocess.DEVNULL)
    key, certificate = (file.read_text() for file in files)
    cluster.put_secret(name, {"tls.crt": certificate, "tls.key": key}, kind="kubernetes.io/tls")
    return certificate


class Envoy:
    """An Envoy that asks an agent for the certificate of each host that a client names, or for some names at its start."""

    def __init__(self, agent, prefetched=(), cluster_id=None):
        self.admin, self.port = free_ports(2)
        options = ["--admin", f"127.0.0.1:{self.admin}", "--listen", f"127.0.0.1:{self.port}"]
        command = [agent.binary, "bootstrap", "--gateway", "--socket", agent.socket, *options]
        config = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}).stdout)
        tls = config["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"]["typed_config"]
        selector = tls["common_tls_context"]["custom_tls_certificate_selector"]["typed_config"]
        selector["prefetch_secret_names"] = list(prefetched)
        if cluster_id:
            config["node"]["metadata"] = {"CLUSTER_ID": cluster_id}
        got = subprocess.run([ROOT / "examples/get-envoy"], stdout=subprocess.PIPE, text=True)
        if got.returncode:
            raise NotRun("there is no Envoy")
        file = agent.directory / f"envoy-{self.port}.json"
        file.write_text(json.dumps(config))
        started = [got.stdout.strip(), "-c", file, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
        with open(agent.directory / f"envoy-{self.port}.log", "w") as log:
            self.process = subprocess.Popen(started, stdout=log, stderr=log)

    def __enter__(self):
        until("Envoy is ready", self.is_ready)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}{path}", timeout=20) as answer:
            return answer.read().decode()

    def is_ready(self):
        try:
            return "LIVE" in self.get("/ready")
        except OSError:
            return False

    def fetched(self):
        """How many certificates it has fetched."""
        lines = self.get("/stats?usedonly&filter=^sds.*update_success").splitlines()
        return sum(not line.endswith(": 0") for line in lines)

    def handshake(self, host):
        """The certificate that a client of the host gets."""
        context = ssl._create_unverified_context()
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as io:
            with context.wrap_socket(io, server_hostname=host) as tls:
                return tls.getpeercert(binary_form=True)


class Traffic:
    """Clients that make handshakes for hosts, one after the other, until they are stopped."""

    def __init__(self, envoy, hosts):
        self.envoy, self.hosts, self.failures, self.count, self.is_over = envoy, hosts, [], 0, False
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def run(self):
        while not self.is_over:
            host = random.choice(self.hosts)
            try:
                self.envoy.handshake(host)
                self.count += 1
            except OSError as error:
                self.failures.append(f"{host}: {error}")

    def stop(self):
        self.is_over = True
        for thread in self.threads:
            thread.join()


class Issuer:
    """Makes self-signed certificates with one key."""

    def __init__(self, directory):
        self.key = directory / "hosts.key"
        made = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", self.key]
        subprocess.run(made, check=True, stderr=subprocess.DEVNULL)

    def pair(self, host):
        made = ["openssl", "req", "-x509", "-key", self.key, "-days", "2", "-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}"]
        certificate = subprocess.run(made, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        return {"tls.crt": certificate, "tls.key": self.key.read_text()}


def put_hosts(cluster, issuer, hosts):
    """A Secret with a new certificate for each host, in the namespace `edge`; the certificates."""
    pairs = {host: issuer.pair(host) for host in hosts}
    cluster.put_secrets(secret(host, pair, "edge", "kubernetes.io/tls") for host, pair in pairs.items())
    return {host: ssl.PEM_cert_to_DER_cert(pair["tls.crt"]) for host, pair in pairs.items()}


def quantiles(seconds):
    times = sorted(one * 1e3 for one in seconds)
    return f"median {times[len(times) // 2]:.0f} ms, 99 % {times[len(times) * 99 // 100]:.0f} ms"


def the_agent_serves_a_secret_and_its_changes(east, _):
    with Agent(east) as agent:
        for _ in range(2):
            certificate = put_pair(east, "api", "api.example.com")
            agent.wait("kubernetes://api", lambda text: certificate.strip() in text)


def what_rbac_refuses_is_not_served(east, _):
    put_pair(east, "other", "other.example.com")
    certificate = put_pair(east, "api", "api.example.com")
    with Agent(east) as agent:
        answer = agent.get("kubernetes://other")
        assert "BEGIN CERTIFICATE" not in answer, answer
        until("the log says why", lambda: 'secrets "other" is forbidden' in agent.log.read_text().replace("\\", ""))
        agent.wait("kubernetes://api", lambda text: certificate.strip() in text)


def a_restart_of_the_api_server_takes_nothing_and_hides_nothing(east, _):
    certificate = put_pair(east, "api", "api.example.com")
    with Agent(east) as agent:
        agent.wait("kubernetes://api", lambda text: certificate.strip() in text)
        east.end("kube-apiserver")
        assert certificate.strip() in agent.get("kubernetes://api")
        east.start()
        certificate = put_pair(east, "api", "api.example.com")
        agent.wait("kubernetes://api", lambda text: certificate.strip() in text)


def a_deleted_secret_is_no_longer_served(east, _):
    certificate = put_pair(east, "api", "api.example.com")
    with Agent(east) as agent:
        agent.wait("kubernetes://api", lambda text: certificate.strip() in text)
        east.delete_secret("api")
        agent.wait("kubernetes://api", lambda text: "BEGIN CERTIFICATE" not in text)


def fill_token(cluster, account):
    """Does what a cluster's token controller does, which does not run here."""
    path = f"/api/v1/namespaces/istio-system/secrets/{account}-istio-remote-secret-token"
    until("the Secret for the token is there", lambda: cluster.call("GET", path)[0] == 200)
    token, root = cluster.token(account, "istio-system"), (cluster.directory / "tls/apiserver.crt").read_text()
    data = secret("", {"token": token, "ca.crt": root, "namespace": "istio-system"}, "", "")["data"]
    status, answer = cluster.call("PATCH", path, {"data": data}, kind="application/merge-patch+json")
    assert status == 200, answer


def a_remote_cluster_serves_its_own_workloads(east, west):
    reader = "attache-remote-reader"
    for cluster in [east, west]:
        cluster.kubectl("create", "namespace", "istio-system")
    west.kubectl("-n", "istio-system", "create", "serviceaccount", reader)
    west.kubectl("-n", "shop", "create", "role", "remote", "--verb=get,watch", "--resource=secrets", "--resource-name=api.example.com")
    west.kubectl("-n", "shop", "create", "rolebinding", "remote", "--role=remote", f"--serviceaccount=istio-system:{reader}")
    east.account("mesh", "shop", "get,watch")
    east.kubectl("-n", "istio-system", "create", "role", "clusters", "--verb=list,watch", "--resource=secrets")
    east.kubectl("-n", "istio-system", "create", "rolebinding", "clusters", "--role=clusters", "--serviceaccount=shop:mesh")
    host = "api.example.com"
    at_home, elsewhere = (ssl.PEM_cert_to_DER_cert(put_pair(cluster, host, host)) for cluster in [east, west])

    binary = agent_binary()
    from_west, into_east = ["--kubeconfig", west.kubeconfig(ADMIN)], ["--to-kubeconfig", east.kubeconfig(ADMIN)]
    create = [binary, "remote-secret", "create", "--name", "west", *from_west, *into_east, "--apply"]
    with Agent(east, "--remote-clusters", "--kubernetes-bare-names", account="mesh") as agent:
        with Envoy(agent, cluster_id="west") as envoy, Envoy(agent, cluster_id="Kubernetes") as local:
            assert local.handshake(host) == at_home
            creating = subprocess.Popen(create, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={})
            fill_token(west, reader)
            printed = creating.communicate(timeout=60)[0]
            assert creating.returncode == 0, printed
            until("the log names the cluster", lambda: 'cluster added cluster="west"' in agent.log.read_text())
            assert until("the host of west is served", lambda: tried(envoy, host)) == elsewhere, "the certificate of the other cluster"
            assert local.handshake(host) == at_home
            changed = ssl.PEM_cert_to_DER_cert(put_pair(west, host, host))
            until("the change is served", lambda: envoy.handshake(host) == changed)
            # The other cluster goes; what it delivered stays.
            west.end("kube-apiserver")
            assert (envoy.handshake(host), local.handshake(host)) == (changed, at_home)
            west.start()
            delete = [binary, "remote-secret", "delete", "--name", "west", *into_east]
            subprocess.run(delete, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={})
            until("the cluster is removed", lambda: "remote cluster removed" in agent.log.read_text())


def tried(envoy, host):
    try:
        return envoy.handshake(host)
    except OSError:
        return None


def a_gateway_with_500_hosts_gets_them_on_demand(east, _):
    agent_binary()
    issuer, hosts = Issuer(east.directory), [f"h{number}.example.com" for number in range(HOSTS)]
    certificates = put_hosts(east, issuer, hosts)
    with Agent(east, "--kubernetes-bare-names", account="edge", namespace="edge") as agent, Envoy(agent) as envoy:
        times, unknown = [], []
        for host in hosts:
            begun = time.monotonic()
            assert envoy.handshake(host) == certificates[host], host
            times.append(time.monotonic() - begun)
        for number in range(100):
            begun = time.monotonic()
            assert tried(envoy, f"unknown-{number}.example.com") is None
            unknown.append(time.monotonic() - begun)
        traffic = Traffic(envoy, hosts)
        for _ in range(2):
            certificates = put_hosts(east, issuer, hosts)
            until("all hosts have changed", lambda: all(envoy.handshake(host) == certificates[host] for host in hosts))
        # An API server that restarts in between costs no handshake.
        east.restart()
        certificates = put_hosts(east, issuer, hosts)
        until("all hosts have changed", lambda: all(envoy.handshake(host) == certificates[host] for host in hosts))
        traffic.stop()
        assert not traffic.failures, traffic.failures[:5]
        return f"cold hosts: {quantiles(times)}; unknown ones: {quantiles(unknown)}; {traffic.count} handshakes while 3 x {HOSTS} changed"


def five_thousand_secrets_are_served(east, _):
    agent_binary()
    hosts, pair = [f"m{number}.example.com" for number in range(MANY)], Issuer(east.directory).pair("all.example.com")
    east.put_secrets(secret(host, pair, "edge", "kubernetes.io/tls") for host in hosts)
    found = []
    for account, what in [("edge", "a watch for each name"), ("edge-lister", "one watch")]:
        with Agent(east, "--kubernetes-bare-names", account=account, namespace="edge") as agent:
            before, begun = agent.memory(), time.monotonic()
            with Envoy(agent, hosts) as envoy:
                until("all are served", lambda: envoy.fetched() >= MANY, 120)
                took, status = time.monotonic() - begun, agent.status()
                assert (status["names"], status["errors"] <= 1) == (MANY, True), status
                memory = (agent.memory() - before) / MANY
                found.append(f"{what}: {took:.1f} s from the start of Envoy, {status['calls']} calls, {memory:.1f} kB for each name")
    return "; ".join(found)
