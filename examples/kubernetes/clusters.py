"""API servers of Kubernetes with etcd, and what the rows of `run` ask of them."""

import base64
import http.client
import json
import pathlib
import socket
import ssl
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ADMIN = "the-admin"
SECRETS = "/api/v1/namespaces/shop/secrets"
NAME = "fieldSelector=metadata.name%3D"


class NotRun(Exception):
    """Why a row does not run."""


def until(what, holds, patience=60.0):
    end = time.monotonic() + patience
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"timed out after {patience:.0f} s waiting until {what}")
        time.sleep(0.02)


def free_ports(count):
    """Ports that are free now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def program(name):
    """The path of etcd, kube-apiserver or kubectl."""
    got = subprocess.run([ROOT / "examples/get-kubernetes", name], stdout=subprocess.PIPE, text=True)
    if got.returncode:
        raise NotRun(f"there is no {name}")
    return got.stdout.strip()


class Cluster:
    """An etcd and an API server with RBAC."""

    def __init__(self, name, directory):
        self.name, self.directory = name, directory / name
        self.directory.mkdir()
        self.store, self.peer, self.port = free_ports(3)
        self.processes = {}

    def open(self):
        (self.directory / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n')
        subprocess.run(["openssl", "genrsa", "-out", "accounts.key", "2048"], cwd=self.directory, check=True, stderr=subprocess.DEVNULL)
        self.spawn(
            "etcd",
            ["--data-dir", "etcd", "--unsafe-no-fsync"]
            + [f"--listen-client-urls=http://127.0.0.1:{self.store}", f"--advertise-client-urls=http://127.0.0.1:{self.store}"]
            + [f"--listen-peer-urls=http://127.0.0.1:{self.peer}"],
        )
        self.start()
        self.fill()

    def spawn(self, name, arguments):
        with open(self.directory / f"{name}.log", "a") as log:
            self.processes[name] = subprocess.Popen([program(name), *arguments], cwd=self.directory, stdout=log, stderr=log)

    def start(self):
        """Starts the API server, and waits until it is ready."""
        self.spawn(
            "kube-apiserver",
            [f"--etcd-servers=http://127.0.0.1:{self.store}", "--cert-dir=tls", "--bind-address=127.0.0.1"]
            + [f"--secure-port={self.port}", "--authorization-mode=RBAC", "--token-auth-file=tokens.csv"]
            + ["--service-account-issuer=https://kubernetes.default.svc", "--service-account-signing-key-file=accounts.key"]
            + ["--service-account-key-file=accounts.key", "--service-cluster-ip-range=10.0.0.0/24", "--advertise-address=127.0.0.1"],
        )
        until(f"the API server of {self.name} is ready", self.is_ready)

    def is_ready(self):
        if self.processes["kube-apiserver"].poll() is not None:
            raise AssertionError((self.directory / "kube-apiserver.log").read_text()[-2000:])
        try:
            return self.call("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def restart(self):
        """Kills the API server, and starts it at the same port. etcd goes on."""
        self.end("kube-apiserver")
        self.start()

    def end(self, name):
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self):
        for name in list(self.processes):
            self.end(name)

    def connect(self, timeout=60):
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=context)

    def request(self, method, path, body=None, token=ADMIN, kind="application/json"):
        connection = self.connect()
        headers = {"Authorization": f"Bearer {token}", "User-Agent": "attache/test"}
        if body is not None:
            headers["Content-Type"] = kind
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def call(self, method, path, body=None, token=ADMIN, kind="application/json"):
        """Status and body, parsed if it is JSON."""
        answer = self.request(method, path, body, token, kind)
        text = answer.read().decode()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def watch(self, query, token=ADMIN, namespace="shop"):
        """The status, and the events or the error of a watch of some seconds."""
        answer = self.request("GET", f"/api/v1/namespaces/{namespace}/secrets?watch=1&timeoutSeconds=5&{query}", token=token)
        return answer.status, (json.loads(line) for line in answer)

    def kubectl(self, *arguments, input=None):
        command = [program("kubectl"), f"--server=https://127.0.0.1:{self.port}", "--insecure-skip-tls-verify", f"--token={ADMIN}"]
        done = subprocess.run([*command, *arguments], input=input, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def apply(self, *objects):
        self.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def put_secret(self, name, data, namespace="shop", kind="Opaque"):
        self.apply(secret(name, data, namespace, kind))

    def put_secrets(self, secrets):
        """Creates or replaces many, over one connection."""
        connection = self.connect()
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json", "User-Agent": "attache/test"}
        for one in secrets:
            path, name = f"/api/v1/namespaces/{one['metadata']['namespace']}/secrets", one["metadata"]["name"]
            for method, where in [("PUT", f"{path}/{name}"), ("POST", path)]:
                connection.request(method, where, json.dumps(one), headers)
                answer = connection.getresponse()
                text = answer.read().decode()
                # A PUT does not create a Secret.
                if answer.status != 404:
                    break
            assert answer.status in [200, 201], text
        connection.close()

    def delete_secret(self, name, namespace="shop"):
        self.kubectl("-n", namespace, "delete", "secret", name)

    def version(self):
        return self.call("GET", SECRETS)[1]["metadata"]["resourceVersion"]

    def fill(self):
        """In `shop` an account that may read `web` and `api` there, one that may nothing, and two that may read all of `edge`."""
        for namespace in ["shop", "edge"]:
            self.kubectl("create", "namespace", namespace)
        for account in ["gateway", "stranger"]:
            self.kubectl("-n", "shop", "create", "serviceaccount", account)
        names = ["--resource-name=web", "--resource-name=api"]
        self.kubectl("-n", "shop", "create", "role", "reader", "--verb=get,watch", "--resource=secrets", *names)
        self.kubectl("-n", "shop", "create", "rolebinding", "reader", "--role=reader", "--serviceaccount=shop:gateway")
        self.account("edge", "edge", "get,watch")
        self.account("edge-lister", "edge", "get,list,watch")
        self.put_secret("web", {"a": "1"})

    def account(self, name, namespace, verbs):
        """An account of the namespace `shop` that has these rights on all Secrets of a namespace."""
        self.kubectl("-n", "shop", "create", "serviceaccount", name)
        self.kubectl("-n", namespace, "create", "role", name, f"--verb={verbs}", "--resource=secrets")
        self.kubectl("-n", namespace, "create", "rolebinding", name, f"--role={name}", f"--serviceaccount=shop:{name}")

    def token(self, account, namespace="shop"):
        return self.kubectl("-n", namespace, "create", "token", account)

    def kubeconfig(self, account):
        """A kubeconfig with a token of an account, or of the administrator; its path."""
        # The file also holds the CA that the API server has made for itself.
        encoded = base64.b64encode((self.directory / "tls/apiserver.crt").read_bytes()).decode()
        token = ADMIN if account == ADMIN else self.token(account)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": self.name,
            "clusters": [{"name": self.name, "cluster": {"server": f"https://127.0.0.1:{self.port}", "certificate-authority-data": encoded}}],
            "contexts": [{"name": self.name, "context": {"cluster": self.name, "user": account}}],
            "users": [{"name": account, "user": {"token": token}}],
        }
        path = self.directory / f"{account}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))
        return path


def secret(name, data, namespace, kind):
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": metadata, "data": encoded}


def kinds(events):
    return [(event["type"], event["object"]["metadata"].get("name")) for event in events]
