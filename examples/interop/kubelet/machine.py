"""A node of Kubernetes on this machine: an API server, containerd, a kubelet, and the agent as its CSI driver."""

import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "kubernetes"))

from clusters import ADMIN, ROOT, Cluster, NotRun, free_ports, until

NODE = "node-1"
DRIVER = "csi.attache.dev"
NAMESPACE = "shop"
# Where programs write in any case: in here these are not the machine's own.
OWN = ["/var/log", "/var/lib/kubelet", "/run/containerd"]
PEERS = ["containerd", "containerd-shim-runc-v2", "ctr", "kubelet"]

PAUSE = """package main
import ("os"; "os/signal"; "syscall")
func main() { c := make(chan os.Signal, 1); signal.Notify(c, syscall.SIGTERM, syscall.SIGINT); <-c }
"""


def peer(name):
    """The path of a program in PEERS_DIR."""
    path = pathlib.Path(os.environ.get("PEERS_DIR", ROOT / "target/peers")) / "bin" / name
    if not path.is_file():
        raise NotRun(f"there is no {name}: examples/interop/kubelet/build makes it, and PEERS_DIR names where")
    return path


def attache():
    built = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/attache"
    path = pathlib.Path(os.environ.get("ATTACHE", built)).absolute()
    if not path.is_file():
        raise NotRun("there is no attache; build it, or set ATTACHE")
    return path


def docker_archive(path, name, files):
    """An image of one layer; `files` maps paths in it to files."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for inside, outside in files.items():
            entry = tar.gettarinfo(pathlib.Path(outside).resolve(), inside.lstrip("/"))
            entry.mode, entry.uid, entry.gid = 0o755, 0, 0
            with open(outside, "rb") as content:
                tar.addfile(entry, content)
    layer = layer.getvalue()
    digest = "sha256:" + hashlib.sha256(layer).hexdigest()
    config = json.dumps({"architecture": "amd64" if os.uname().machine == "x86_64" else "arm64", "os": "linux", "config": {"Entrypoint": [next(iter(files))]},
                         "rootfs": {"type": "layers", "diff_ids": [digest]}}).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(path, "w") as tar:
        for inside, text in [("layer.tar", layer), ("config.json", config), ("manifest.json", manifest)]:
            entry = tarfile.TarInfo(inside)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))


def with_libraries(binary):
    """A program and what its dynamic loader loads, as files of an image."""
    listed = subprocess.run(["ldd", binary], stdout=subprocess.PIPE, text=True, check=True).stdout
    libraries = re.findall(r"(/\S+) \(0x", listed)
    return {f"/{pathlib.Path(binary).name}": binary, **{library: library for library in libraries}}


class Machine:
    """All that runs. It is alone in its namespaces for mounts and processes, and ends with them."""

    def __init__(self, directory):
        self.directory, self.processes = directory, {}
        self.kubelet_dir, self.state = directory / "k", directory / "state"
        self.cluster = Cluster("api", directory)
        self.kubelet_port, self.healthz, self.status, self.ca_port = free_ports(4)
        self.ca_dir = directory / "ca"
        self.options, self.ca_options = [], []

    def spawn(self, name, command, env=None):
        with open(self.log(name), "a") as log:
            environment = {**os.environ, **(env or {})}
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command], cwd=self.directory, stdout=log, stderr=log, env=environment
            )
        return self.processes[name]

    def end(self, name, by=signal.SIGTERM):
        process = self.processes[name]
        process.send_signal(by)
        process.wait(60)

    def log(self, name):
        return self.directory / f"{name}.log"

    def log_since(self, name, start=0):
        return self.log(name).read_text(errors="replace")[start:] if self.log(name).exists() else ""

    def log_end(self, name):
        return len(self.log_since(name))

    # The parts, in the order of their start.

    def open(self):
        for name in PEERS:
            peer(name)
        attache()
        if not shutil.which("runc"):
            raise NotRun("there is no runc; install it")
        envoy = subprocess.run([ROOT / "examples/get-envoy"], stdout=subprocess.PIPE, text=True)
        if envoy.returncode:
            raise NotRun("there is no Envoy")
        self.kubelet_dir.mkdir()
        # What is mounted in it reaches containers, as on a node whose mounts are shared.
        subprocess.run(["mount", "--bind", self.kubelet_dir, self.kubelet_dir], check=True)
        subprocess.run(["mount", "--make-rshared", self.kubelet_dir], check=True)
        for directory in OWN:
            pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
        self.cluster.open()
        for account in ["default", "web", "db"]:
            self.cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": NAMESPACE}})
        self.put_driver()
        self.start_ca()
        self.start_containerd()
        self.images(envoy.stdout.strip())
        self.start_kubelet()
        self.start_agent()

    def put_driver(self, **more):
        """The CSIDriver, with the shortest life of tokens that Kubernetes knows."""
        spec = {"attachRequired": False, "podInfoOnMount": True, "volumeLifecycleModes": ["Ephemeral"], "fsGroupPolicy": "None",
                "requiresRepublish": True, "tokenRequests": [{"audience": "istio-ca", "expirationSeconds": 600}], **more}
        self.cluster.apply({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER}, "spec": spec})

    def start_ca(self):
        self.spawn("ca", [attache(), "ca", "--listen", f"127.0.0.1:{self.ca_port}", "--ca-dir", self.ca_dir])
        until("the CA has a root", (self.ca_dir / "root-cert.pem").exists)

    def start_containerd(self):
        state = self.directory / "containerd"
        state.mkdir(exist_ok=True)
        (state / "config.toml").write_text(f"""version = 3
root = "{state}/root"
state = "{state}/state"
[grpc]
address = "{self.containerd_socket()}"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "docker.io/local/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
""")
        path = f"{peer('containerd').parent}:{os.environ['PATH']}"
        self.spawn("containerd", [peer("containerd"), "--config", state / "config.toml"], {"PATH": path})
        until("containerd answers", lambda: self.ctr("version").returncode == 0)

    def containerd_socket(self):
        return self.directory / "containerd/c.sock"

    def ctr(self, *arguments):
        command = [peer("ctr"), "--address", self.containerd_socket(), "-n", "k8s.io", *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def images(self, envoy):
        source = self.directory / "pause.go"
        source.write_text(PAUSE)
        pause = self.directory / "pause"
        environment = {**os.environ, "CGO_ENABLED": "0", "GO111MODULE": "off"}
        subprocess.run(["go", "build", "-o", pause, source], check=True, env=environment)
        for name, files in [("pause", {"/pause": pause}), ("envoy", with_libraries(envoy))]:
            archive = self.directory / f"{name}.tar"
            docker_archive(archive, f"docker.io/local/{name}:1", files)
            imported = self.ctr("images", "import", archive)
            assert imported.returncode == 0, imported.stderr
            archive.unlink()

    def start_kubelet(self):
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": "127.0.0.1", "port": self.kubelet_port, "healthzPort": self.healthz,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs", "cgroupsPerQOS": False, "enforceNodeAllocatable": [], "failCgroupV1": False,
            "failSwapOn": False, "makeIPTablesUtilChains": False, "localStorageCapacityIsolation": False,
            "containerRuntimeEndpoint": f"unix://{self.containerd_socket()}",
            # The machine's own disk may be nearly full.
            "evictionHard": {name: "0%" for name in ["memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"]},
            "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
            "podLogsDir": str(self.directory / "pod-logs"), "volumePluginDir": str(self.directory / "flex"),
            "resolvConf": "", "shutdownGracePeriod": "0s",
        }
        file = self.directory / "kubelet.json"
        file.write_text(json.dumps(config))
        kubeconfig = self.cluster.kubeconfig(ADMIN)
        self.spawn("kubelet", [peer("kubelet"), "--config", file, "--kubeconfig", kubeconfig, "--root-dir", self.kubelet_dir,
                               "--cert-dir", self.directory / "kubelet-tls", "--hostname-override", NODE, "--v=2"])
        until("the kubelet is healthy", self.is_kubelet_healthy)

    def is_kubelet_healthy(self):
        if self.processes["kubelet"].poll() is not None:
            raise AssertionError(self.log_since("kubelet")[-3000:])
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.healthz}/healthz", timeout=2).status == 200
        except OSError:
            return False

    def csi_socket(self):
        return self.kubelet_dir / "plugins" / DRIVER / "csi.sock"

    def agent_command(self, is_second):
        """`is_second`: another one runs, and has its addresses."""
        own = ["none", "none"] if is_second else [self.directory / "admin.sock", f"127.0.0.1:{self.status}"]
        return [
            attache(), "node", "--csi-socket", self.csi_socket(), "--kubelet-dir", self.kubelet_dir, "--state-dir", self.state,
            "--node-name", NODE, *(self.ca_options or ["--ca-address", f"localhost:{self.ca_port}", "--ca-root", self.ca_dir / "root-cert.pem"]),
            "--admin-socket", own[0], "--status-address", own[1], "--log-level", "info,attache::csi=debug", *self.options,
        ]

    def start_agent(self, is_second=False):
        self.csi_socket().parent.mkdir(parents=True, exist_ok=True)
        self.spawn("agent", self.agent_command(is_second))

    # What a Pod is, and what becomes of it.

    def pod(self, name, account="web", image="pause", arguments=(), attributes=None, volumes=(), mounts=(), read_only=True):
        """A Pod on this node with a volume of the agent's."""
        volume = {"name": "v", "csi": {"driver": DRIVER, "readOnly": read_only, "volumeAttributes": attributes or {}}}
        return {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "nodeName": NODE, "hostNetwork": True, "automountServiceAccountToken": False, "serviceAccountName": account,
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "main", "image": f"docker.io/local/{image}:1", "imagePullPolicy": "Never",
                    "command": [f"/{image}", *arguments],
                    "volumeMounts": [{"name": "v", "mountPath": "/run/attache", "readOnly": True}, *mounts],
                }],
                "volumes": [volume, *volumes],
            },
        }

    def envoy_pod(self, name, account, arguments):
        """A Pod with an Envoy whose bootstrap `attache bootstrap` prints."""
        printed = subprocess.run([attache(), "bootstrap", "--socket", "/run/attache/socket", *arguments],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=True)
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": NAMESPACE},
                  "data": {"envoy.json": printed.stdout}}
        self.cluster.apply(config)
        return self.pod(
            name, account, "envoy", ["--config-path", "/etc/envoy/envoy.json", "--disable-hot-restart", "--concurrency", "1"],
            volumes=[{"name": "envoy", "configMap": {"name": name}}],
            mounts=[{"name": "envoy", "mountPath": "/etc/envoy", "readOnly": True}],
        )

    def get(self, name):
        status, pod = self.cluster.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")
        return pod if status == 200 else None

    def is_running(self, name):
        pod = self.get(name)
        conditions = (pod or {}).get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def run(self, *pods, patience=90):
        self.cluster.apply(*pods)
        for pod in pods:
            name = pod["metadata"]["name"]
            until(f"{name} is ready", lambda: self.is_running(name), patience)

    def describe(self, name):
        return self.cluster.kubectl("-n", NAMESPACE, "describe", "pod", name)

    def delete(self, name, *options):
        self.cluster.kubectl("-n", NAMESPACE, "delete", "pod", name, "--wait=false", *options)

    def target(self, uid):
        return self.kubelet_dir / "pods" / uid / "volumes/kubernetes.io~csi/v/mount"

    def uid(self, name):
        return self.get(name)["metadata"]["uid"]

    def volume_id(self, uid):
        return json.loads((self.target(uid).parent / "vol_data.json").read_text())["volumeHandle"]

    def left(self, uid, volume):
        """What there still is of a Pod that is gone."""
        found = [path for path in [self.kubelet_dir / "pods" / uid, self.state / volume, *self.state.glob(f"**/{volume}*")] if path.exists()]
        mounts = [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if uid in line]
        return [str(path) for path in found] + mounts

    def certificate(self, uid, names=("default",)):
        """What `attache get` prints of a volume's socket."""
        command = [attache(), "get", "--socket", self.target(uid) / "socket", "--output", "pem", "--timeout", "5s", *names]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return done.stdout if done.returncode == 0 else None

    def identity(self, uid):
        """The SPIFFE ID of the certificate on a volume's socket."""
        pem = self.certificate(uid)
        text = subprocess.run(["openssl", "x509", "-noout", "-ext", "subjectAltName"], input=pem or "", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        found = re.search(r"URI:(\S+)", text)
        return found and found[1]

    def metrics(self):
        return urllib.request.urlopen(f"http://127.0.0.1:{self.status}/metrics", timeout=5).read().decode()

    def is_registered(self):
        status, node = self.cluster.call("GET", f"/apis/storage.k8s.io/v1/csinodes/{NODE}")
        return status == 200 and any(one["name"] == DRIVER for one in node["spec"].get("drivers") or [])

    def kill_containers(self):
        """Ends every container and shim, as a loss of power does."""
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in {1, os.getpid()}:
                try:
                    text = (entry / "cmdline").read_bytes() + os.readlink(entry / "exe").encode()
                except OSError:
                    continue
                if b"containerd-shim" in text or b"/pause" in text or text.startswith(b"/envoy"):
                    try:
                        os.kill(int(entry.name), signal.SIGKILL)
                    except ProcessLookupError:
                        pass

    def unmount_all(self):
        """Leaves directories without what was mounted in them, as after a reboot."""
        lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        points = [line.split()[4] for line in lines]
        for point in sorted(points, key=len, reverse=True):
            if point.startswith(f"{self.kubelet_dir}/") or point.startswith(f"{self.directory}/containerd/"):
                subprocess.run(["umount", "-l", point], stderr=subprocess.DEVNULL)
