"""The rows of `run`: what a kubelet and the agent do together."""

import base64
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

from machine import DRIVER, NAMESPACE, NODE, NotRun, attache, free_ports, peer, until


def registered_again(machine, restart):
    """A restart, after which volumes can be made; what the agent says of it."""
    before = machine.log_end("agent")
    restart()
    until("the driver is registered", lambda: "driver registered" in machine.log_since("agent", before), 90)
    until("the node has the driver", machine.is_registered)


def the_kubelet_registers_the_driver(machine):
    until("the driver is registered", lambda: "driver registered" in machine.log_since("agent"), 90)
    until("the node has the driver", machine.is_registered)


def a_pod_with_an_envoy_has_its_identity(machine):
    machine.mtls, machine.plain, server_admin, client_admin = free_ports(4)
    server = machine.envoy_pod("server", "web", ["--listen", f"127.0.0.1:{machine.mtls}", "--admin", f"127.0.0.1:{server_admin}"])
    client = machine.envoy_pod("client", "db", [
        "--outbound-listen", f"127.0.0.1:{machine.plain}", "--outbound-to", f"127.0.0.1:{machine.mtls}",
        "--outbound-peer", f"spiffe://cluster.local/ns/{NAMESPACE}/sa/web", "--outbound-requests-per-connection", "5",
        "--listen", f"127.0.0.1:{free_ports(1)[0]}", "--admin", f"127.0.0.1:{client_admin}"])
    machine.admins = {"server": server_admin, "client": client_admin}
    machine.run(server, client)
    until("a request passes", lambda: answered(machine) == 200)
    for name, account in [("server", "web"), ("client", "db")]:
        served = json.loads(fetch(machine.admins[name], "certs"))["certificates"]
        names = [san["uri"] for one in served for chain in one["cert_chain"] for san in chain["subject_alt_names"]]
        assert names and set(names) == {f"spiffe://cluster.local/ns/{NAMESPACE}/sa/{account}"}, names


def fetch(port, path):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5).read().decode()


def answered(machine):
    """The status of a request through both Envoys, or None."""
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{machine.plain}/", timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


class Traffic:
    """Requests through both Envoys, one after the other, as long as it is entered."""

    def __enter__(self):
        self.count, self.failed, self.stop = 0, [], threading.Event()
        self.thread = threading.Thread(target=self.send)
        self.thread.start()
        return self

    def __init__(self, machine):
        self.machine = machine

    def send(self):
        while not self.stop.is_set():
            status = answered(self.machine)
            self.count += 1
            if status != 200:
                self.failed.append(status)
            self.stop.wait(0.01)

    def more(self, count=100):
        wanted = self.count + count
        until("more requests are sent", lambda: self.count >= wanted)

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


def updates(machine):
    """How often each Envoy has taken a secret that was another one."""
    found = {}
    for name, port in machine.admins.items():
        for line in fetch(port, "stats?filter=sds.*(update_success|update_rejected)").splitlines():
            found[f"{name} {line.split(': ')[0]}"] = int(line.split(": ")[1])
    assert found, "Envoy has statistics of secrets"
    return found


def serials(machine):
    return [re.findall(r'"serial_number": "(\w+)"', fetch(port, "certs")) for port in machine.admins.values()]


def undisturbed(machine, disturb):
    """Disturbs the traffic; no request fails, and no Envoy is sent anything new."""
    before, certificates = updates(machine), serials(machine)
    with Traffic(machine) as traffic:
        traffic.more()
        disturb()
        traffic.more()
    assert not traffic.failed, f"{len(traffic.failed)} of {traffic.count} requests failed: {traffic.failed[:5]}"
    assert serials(machine) == certificates, "the certificates are others"
    after = updates(machine)
    assert after == before, f"Envoys were sent something: {before} {after}"
    return f"{traffic.count} requests"


def serving(machine, since, words="driver registered"):
    until("the agent is registered", lambda: words in machine.log_since("agent", since), 90)


def an_agent_that_is_killed_and_started_disturbs_nothing(machine):
    def disturb():
        for by in [signal.SIGKILL, signal.SIGTERM]:
            since = machine.log_end("agent")
            machine.end("agent", by)
            machine.start_agent()
            serving(machine, since)

    return undisturbed(machine, disturb)


def an_agent_that_is_upgraded_disturbs_nothing(machine):
    """The new one takes over while the old one still runs, as with a DaemonSet's surge."""
    def disturb():
        old, since = machine.processes["agent"], machine.log_end("agent")
        machine.start_agent(is_second=True)
        serving(machine, since)
        old.terminate()
        old.wait(60)
        # The kubelet still finds the one that runs.
        machine.run(machine.pod("after-upgrade"))

    result = undisturbed(machine, disturb)
    uid = machine.uid("after-upgrade")
    assert machine.identity(uid) == f"spiffe://cluster.local/ns/{NAMESPACE}/sa/web"
    for pod in ["server", "client"]:
        assert machine.certificate(machine.uid(pod)), f"the socket of {pod} is served"
    gone(machine, "after-upgrade")
    since = machine.log_end("agent")
    machine.end("agent")
    machine.start_agent()
    serving(machine, since)
    return result


def a_kubelet_that_is_restarted_disturbs_nothing(machine):
    def disturb():
        def restart():
            machine.end("kubelet")
            machine.start_kubelet()

        registered_again(machine, restart)

    return undisturbed(machine, disturb)


def an_agent_and_a_kubelet_restarted_in_either_order_find_each_other(machine):
    def agent_first():
        machine.end("agent")
        machine.end("kubelet")
        machine.start_agent()
        machine.start_kubelet()

    def kubelet_first():
        machine.end("agent")
        machine.end("kubelet")
        machine.start_kubelet()
        machine.start_agent()

    for restart in [agent_first, kubelet_first]:
        registered_again(machine, restart)
    machine.run(machine.pod("later"))
    gone(machine, "later")


def a_reason_is_shown_when_the_ca_is_down(machine):
    machine.end("ca")
    machine.cluster.apply(machine.pod("waits"))
    shown = until("the Pod's events say why", lambda: reason(machine, "waits", "has no certificate yet"), 90)
    machine.start_ca()
    until("the Pod is ready", lambda: machine.is_running("waits"), 240)
    gone(machine, "waits")
    return shown


def reason(machine, pod, words):
    lines = [line for line in machine.describe(pod).splitlines() if "FailedMount" in line and words in line]
    return lines and re.sub(r".*rpc error: ", "", lines[0])


def a_reason_is_shown_for_a_wrong_attribute(machine):
    machine.cluster.apply(machine.pod("wrong", attributes={"key-typ": "rsa-2048"}))
    shown = until("the Pod's events say why", lambda: reason(machine, "wrong", "did you mean key-type?"), 60)
    gone(machine, "wrong", has_volume=False)
    return shown


def a_volume_with_files_has_them(machine):
    machine.run(machine.pod("files", attributes={"files": "true"}))
    target = machine.target(machine.uid("files"))
    names = sorted(path.name for path in target.iterdir())
    assert {"key.pem", "cert-chain.pem", "root-cert.pem", "socket"} <= set(names), names
    kind = subprocess.run(["findmnt", "-n", "-o", "FSTYPE", target], stdout=subprocess.PIPE, text=True).stdout.split()
    assert kind == ["tmpfs"], kind
    # The container sees the same.
    process = container(machine, "files")
    seen = sorted(os.listdir(f"/proc/{process}/root/run/attache"))
    assert seen == names, seen
    since = machine.log_end("agent")
    machine.end("agent", signal.SIGKILL)
    machine.start_agent()
    serving(machine, since)
    kind = subprocess.run(["findmnt", "-n", "-o", "FSTYPE", target], stdout=subprocess.PIPE, text=True).stdout.split()
    assert kind == ["tmpfs"], f"after a restart: {kind}"
    gone(machine, "files")


def container(machine, pod):
    """The process of a Pod's container, as this machine counts them."""
    identifier = machine.get(pod)["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    for line in machine.ctr("tasks", "ls").stdout.splitlines():
        if line.startswith(identifier):
            return line.split()[1]
    raise AssertionError(f"no task of {pod}")


def gone(machine, pod, *options, has_volume=True):
    """Deletes a Pod; nothing of its volume is left."""
    uid = machine.uid(pod)
    volume = machine.volume_id(uid) if has_volume else "csi-none"
    machine.delete(pod, *options)
    is_gone(machine, pod, uid, volume)


def is_gone(machine, pod, uid, volume):
    until(f"{pod} is gone", lambda: machine.get(pod) is None, 120)
    until(f"nothing of {pod} is left: {machine.left(uid, volume)}", lambda: not machine.left(uid, volume), 150)


def a_deleted_pod_leaves_nothing(machine):
    machine.run(machine.pod("deleted"), machine.pod("forced", attributes={"files": "true"}))
    gone(machine, "deleted")
    gone(machine, "forced", "--force", "--grace-period=0")


def a_pod_deleted_while_the_agent_is_down_leaves_nothing(machine):
    pods = {"one": {}, "two": {"files": "true"}, "three": {}}
    machine.run(*(machine.pod(name, attributes=attributes) for name, attributes in pods.items()))
    found = {name: (machine.uid(name), machine.volume_id(machine.uid(name))) for name in pods}
    machine.end("agent", signal.SIGKILL)
    since = machine.log_end("kubelet")
    machine.delete("one")
    machine.delete("two")
    machine.delete("three", "--force", "--grace-period=0")
    # The kubelet has called in vain.
    until("the kubelet could not remove a volume", lambda: "UnmountVolume.TearDown failed" in machine.log_since("kubelet", since), 60)
    machine.start_agent()
    for name, (uid, volume) in found.items():
        is_gone(machine, name, uid, volume)


def a_pod_deleted_while_the_kubelet_is_down_leaves_nothing(machine):
    pods = {"one": {}, "two": {"files": "true"}}
    machine.run(*(machine.pod(name, attributes=attributes) for name, attributes in pods.items()))
    found = {name: (machine.uid(name), machine.volume_id(machine.uid(name))) for name in pods}
    machine.end("kubelet", signal.SIGKILL)
    machine.delete("one")
    machine.delete("two", "--force", "--grace-period=0")
    # An agent that starts meanwhile still finds them.
    machine.end("agent")
    machine.start_agent()
    machine.start_kubelet()
    for name, (uid, volume) in found.items():
        is_gone(machine, name, uid, volume)


def after_a_reboot_pods_come_back_and_what_is_gone_is_removed(machine):
    """As far as one machine without a reboot shows it: all processes are killed, all mounts gone, directories stay."""
    names = ["plain", "with-files", "goes"]
    machine.run(machine.pod("plain"), machine.pod("with-files", attributes={"files": "true"}), machine.pod("goes", attributes={"files": "true"}))
    found = {name: (machine.uid(name), machine.volume_id(machine.uid(name))) for name in names}
    for name in ["agent", "kubelet"]:
        machine.end(name, signal.SIGKILL)
    machine.kill_containers()
    machine.end("containerd", signal.SIGKILL)
    machine.unmount_all()
    machine.delete("goes", "--force", "--grace-period=0")
    assert not any(path.suffix == ".pem" for path in machine.target(found["with-files"][0]).iterdir()), "no key is on the disk"
    since = machine.log_end("agent")
    machine.start_containerd()
    machine.start_agent()
    machine.start_kubelet()
    serving(machine, since)
    is_gone(machine, "goes", *found["goes"])
    for name in names[:2]:
        uid, _ = found[name]
        until(f"{name} runs again", lambda: container_since(machine, name) and machine.is_running(name), 240)
        assert machine.identity(uid) == f"spiffe://cluster.local/ns/{NAMESPACE}/sa/web"
        seen = sorted(os.listdir(f"/proc/{container(machine, name)}/root/run/attache"))
        assert "socket" in seen and ("key.pem" in seen) == (name == "with-files"), seen
    for name in ["server", "client"]:
        until(f"{name} runs again", lambda: machine.is_running(name), 240)
    until("a request passes", lambda: answered(machine) == 200, 120)
    for name in names[:2]:
        gone(machine, name)


def container_since(machine, pod):
    status = machine.get(pod)["status"]["containerStatuses"][0]
    return status["restartCount"] > 0


def tokens_reach_the_agent_anew(machine):
    """The kubelet renews a token of 600 s after 480 s, and comes by 60 to 90 s later. The CA takes no token that has expired."""
    if not os.environ.get("LONG"):
        raise NotRun("it takes 12 minutes: set LONG=1")
    machine.run(machine.pod("renews", attributes={"cert-ttl": "1m"}))
    uid, end, last, pauses = machine.uid("renews"), time.monotonic() + 720, None, []
    changed = time.monotonic()
    while time.monotonic() < end:
        now = machine.certificate(uid)
        if now != last:
            pauses.append(time.monotonic() - changed)
            last, changed = now, time.monotonic()
        time.sleep(1)
    assert max(pauses[1:]) < 55, f"seconds between two certificates of 60 s: {pauses}"
    gone(machine, "renews")
    return f"{len(pauses)} certificates, at most {max(pauses[1:]):.0f} s apart"


def csi_sanity_passes(machine):
    program = peer("csi-sanity")
    directory = machine.directory / "sanity"
    directory.mkdir()
    (directory / "pods/sanity").mkdir(parents=True)
    socket, status = directory / "csi.sock", free_ports(1)[0]
    machine.spawn("sanity-agent", [
        attache(), "node", "--csi-socket", socket, "--kubelet-dir", directory, "--csi-registration-dir", directory,
        "--state-dir", directory / "state", "--ca", "embedded", "--ca-dir", directory / "ca", "--node-name", NODE,
        "--admin-socket", "none", "--status-address", f"127.0.0.1:{status}"])
    try:
        until("its socket is there", socket.exists)
        done = subprocess.run([program, f"--csi.endpoint={socket}", f"--csi.mountdir={directory}/pods/sanity/mount",
                               f"--csi.stagingdir={directory}/pods/sanity/stage", "--ginkgo.focus=Identity|Node Service", "--ginkgo.no-color",
                               "--ginkgo.skip=should remove target path"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        (machine.directory / "csi-sanity.log").write_text(done.stdout)
        summary = re.findall(r"Ran \d+ of.*|\d+ Passed.*", done.stdout)
        assert done.returncode == 0, done.stdout[-3000:]
        return "; ".join(summary) + '; without "should remove target path", which needs a controller'
    finally:
        machine.end("sanity-agent")


def tokens_may_come_among_secrets(machine):
    machine.put_driver(serviceAccountTokenInSecrets=True)
    since = machine.log_end("agent")
    machine.end("agent")
    machine.options = ["--csi-token-source", "secrets"]
    machine.start_agent()
    try:
        serving(machine, since)
        # The kubelet may take seconds to see the changed CSIDriver.
        machine.run(machine.pod("secrets", "db"))
        assert machine.identity(machine.uid("secrets")) == f"spiffe://cluster.local/ns/{NAMESPACE}/sa/db"
        gone(machine, "secrets")
    finally:
        machine.put_driver()
        machine.options = []
        since = machine.log_end("agent")
        machine.end("agent")
        machine.start_agent()
        serving(machine, since)


def istiod(machine):
    """Starts an istiod whose CA trusts the node's account; the options of an agent for it."""
    program, cluster = peer("pilot-discovery"), machine.cluster
    directory = machine.directory / "istiod"
    directory.mkdir()
    for namespace in ["istio-system", "attache-system"]:
        cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("-n", "attache-system", "create", "serviceaccount", "attache-node")
    http, grpc, secure, https, monitoring = free_ports(5)
    environment = {
        "POD_NAMESPACE": "istio-system", "POD_NAME": "istiod", "INJECTION_WEBHOOK_CONFIG_NAME": "", "VALIDATION_WEBHOOK_CONFIG_NAME": "",
        "ENABLE_LEADER_ELECTION": "false", "CA_TRUSTED_NODE_ACCOUNTS": "attache-system/attache-node",
    }
    command = [program, "discovery", f"--kubeconfig={cluster.directory / 'the-admin.kubeconfig'}", f"--httpAddr=127.0.0.1:{http}",
               f"--grpcAddr=127.0.0.1:{grpc}", f"--secureGRPCAddr=127.0.0.1:{secure}", f"--httpsAddr=127.0.0.1:{https}",
               f"--monitoringAddr=127.0.0.1:{monitoring}", "--ctrlz_port=0"]
    process = machine.processes["istiod"] = subprocess.Popen(
        [str(part) for part in command], cwd=directory, env={**os.environ, **environment},
        stdout=open(machine.log("istiod"), "a"), stderr=subprocess.STDOUT)
    def ready():
        assert process.poll() is None, machine.log_since("istiod")[-2000:]
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{http}/ready", timeout=2).status == 200
        except OSError:
            return False

    until("istiod is ready", ready, 90)
    _, kept = cluster.call("GET", "/api/v1/namespaces/istio-system/secrets/istio-ca-secret")
    (directory / "root.pem").write_bytes(base64.b64decode(kept["data"]["ca-cert.pem"]))
    # The agent's token is bound to a Pod on this node, as in a DaemonSet.
    own = machine.pod("agent", "attache-node")
    own["metadata"]["namespace"] = "attache-system"
    own["spec"]["volumes"], own["spec"]["containers"][0]["volumeMounts"] = [], []
    cluster.apply(own)
    bound = ["--audience=istio-ca", "--bound-object-kind=Pod", "--bound-object-name=agent"]
    (directory / "token").write_text(cluster.kubectl("-n", "attache-system", "create", "token", "attache-node", *bound))
    return ["--ca-address", f"localhost:{secure}", "--ca-server-name", "istiod.istio-system.svc", "--ca-root", directory / "root.pem",
            "--ca-impersonate", "--token-file", directory / "token"]


def istiod_issues_by_impersonation_and_refuses_who_has_no_pod_here(machine):
    workloads = machine.directory / "workloads"
    workloads.mkdir()
    options = istiod(machine)
    # No Pod of the account `default` runs on this node.
    (workloads / "ghost.toml").write_text(f'socket = "{machine.directory}/ghost.sock"\nspiffe-id = "spiffe://cluster.local/ns/{NAMESPACE}/sa/default"\n')
    machine.put_driver(tokenRequests=[])
    since = machine.log_end("agent")
    machine.end("agent")
    machine.options, machine.ca_options = ["--workloads", workloads], options
    machine.start_agent()
    try:
        serving(machine, since)
        machine.run(machine.pod("impersonated", "db"))
        uid = machine.uid("impersonated")
        assert machine.identity(uid) == f"spiffe://cluster.local/ns/{NAMESPACE}/sa/db"
        issuer = subprocess.run(["openssl", "x509", "-noout", "-issuer"], input=machine.certificate(uid), stdout=subprocess.PIPE, text=True).stdout
        assert "cluster.local" in issuer, issuer
        refusal = until("the other identity is refused", lambda: [line for line in machine.log_since("agent", since).splitlines() if "ghost" in line and "WARN" in line], 60)
        gone(machine, "impersonated")
        return refusal[0]
    finally:
        machine.options, machine.ca_options = [], []
        machine.put_driver()
        machine.end("istiod", signal.SIGKILL)
        since = machine.log_end("agent")
        machine.end("agent")
        machine.start_agent()
        serving(machine, since)


ROWS = [
    the_kubelet_registers_the_driver,
    a_pod_with_an_envoy_has_its_identity,
    an_agent_and_a_kubelet_restarted_in_either_order_find_each_other,
    a_reason_is_shown_for_a_wrong_attribute,
    a_reason_is_shown_when_the_ca_is_down,
    a_volume_with_files_has_them,
    an_agent_that_is_killed_and_started_disturbs_nothing,
    an_agent_that_is_upgraded_disturbs_nothing,
    a_kubelet_that_is_restarted_disturbs_nothing,
    a_deleted_pod_leaves_nothing,
    a_pod_deleted_while_the_agent_is_down_leaves_nothing,
    a_pod_deleted_while_the_kubelet_is_down_leaves_nothing,
    tokens_may_come_among_secrets,
    csi_sanity_passes,
    istiod_issues_by_impersonation_and_refuses_who_has_no_pod_here,
    after_a_reboot_pods_come_back_and_what_is_gone_is_removed,
    tokens_reach_the_agent_anew,
]
