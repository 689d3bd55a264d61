//! Pods that the sidecar does not fit, and warnings.

use super::access;
use super::pod::{Container, ISTIO_PROXY, Pod};
use super::problem::Problem;
use super::sidecar::{NodeVolume, Purpose};
use super::workload::CONTAINER_LISTS;
use super::yaml::Node;
use crate::base::text;

/// Checks that an ordinary sidecar works in this Pod, if one is wanted.
pub(super) fn check_sidecar_kind(pod: &Pod<'_>, containers: &[Container<'_>]) -> Result<(), Problem> {
    if pod.sidecar.is_native {
        return Ok(());
    }
    let completes = matches!(pod.spec.text_of("restartPolicy"), Some("Never" | "OnFailure"));
    if completes || matches!(pod.kind, "Job" | "CronJob") {
        let message = "an ordinary sidecar would keep this Pod from completing; drop --native=false";
        return Err(pod.problem(pod.spec.line, message));
    }
    let mut targets = containers.iter().filter(|container| container.is_target);
    if let Some(proxy) = targets.find(|container| container.name == ISTIO_PROXY) {
        let message = "Istio's proxy looks for the socket once, at its start, and an ordinary sidecar may start too late; \
                       drop --native=false";
        return Err(pod.problem(proxy.node.line, message));
    }
    Ok(())
}

/// Checks that Kubernetes mounts the token of the Pod's service account, if the agent needs it.
pub(super) fn check_service_account(pod: &Pod<'_>) -> Result<(), Problem> {
    let is_unmounted = pod.spec.text_of("automountServiceAccountToken") == Some("false");
    if !pod.sidecar.reads_service_account || !is_unmounted {
        return Ok(());
    }
    let message = "the agent reads the token or the root of the Pod's service account, which Kubernetes does not mount with \
                   automountServiceAccountToken: false; remove that, or mount a volume with both at \
                   /var/run/secrets/kubernetes.io/serviceaccount with --mount";
    Err(pod.problem(pod.spec.line, message))
}

/// Checks that volumes with the sidecar's names belong to it, and that the volumes of `--mount` exist.
pub(super) fn check_volumes(pod: &Pod<'_>, volumes: &[Node]) -> Result<(), Problem> {
    let sidecar = pod.sidecar;
    let mut has_sidecar = false;
    for list in CONTAINER_LISTS {
        has_sidecar |= pod.document.list(pod.spec, list)?.iter().any(|item| sidecar.is_container(item));
    }
    for volume in volumes {
        let Some(purpose) = sidecar.purpose_of(volume) else { continue };
        // A Pod may move from its own agent to the node's, and back.
        let is_nodes = matches!(purpose, Purpose::Socket(_)) && volume.get("csi").is_some();
        if !is_nodes && (!has_sidecar || volume.get(purpose.kind()).is_none()) {
            let name = sidecar.volume_name(purpose);
            let message = format!(
                "this Pod has a volume {name} of its own; rename it, or give the sidecar another --name"
            );
            return Err(pod.problem(volume.line, message));
        }
    }
    for (name, _) in &sidecar.mounts {
        if volumes.iter().all(|volume| volume.text_of("name") != Some(name)) {
            let message =
                format!("--mount {name}: this Pod has no volume of that name; add it to its volumes");
            return Err(pod.problem(pod.spec.line, message));
        }
    }
    Ok(())
}

/// Checks that the volume `name`, which a container has where the socket is to be, is one of the node's agent, if the Pod has it
/// already.
pub(super) fn check_nodes_volume(
    pod: &Pod<'_>,
    node: &NodeVolume,
    volumes: &[Node],
    name: &str,
) -> Result<(), Problem> {
    let present = volumes.iter().find(|volume| volume.text_of("name") == Some(name));
    match present.filter(|volume| !node.is_of_driver(volume)) {
        Some(other) => {
            let message = format!(
                "the volume {name} is mounted at {}, and is none of the driver {}: remove it",
                NodeVolume::DIRECTORY,
                node.driver
            );
            Err(pod.problem(other.line, message))
        }
        None => Ok(()),
    }
}

/// Checks that no other agent serves on the same socket.
pub(super) fn check_agents(
    pod: &Pod<'_>,
    containers: &[Container<'_>],
    shared_volume: &str,
) -> Result<(), Problem> {
    for Container { node, name, .. } in containers {
        let args = node.get("args").map_or(&[][..], Node::items);
        let is_agent = args.first().and_then(Node::text) == Some("run");
        let mounts = pod.document.list(node, "volumeMounts")?;
        let is_writable = |mount: &Node| {
            mount.text_of("name") == Some(shared_volume) && mount.text_of("readOnly") != Some("true")
        };
        if is_agent && mounts.iter().any(is_writable) {
            let message = format!(
                "container {name} is already an agent with the same socket; to update it, give --name {name}"
            );
            return Err(pod.problem(node.line, message));
        }
    }
    Ok(())
}

/// What is allowed, but likely to fail.
pub(super) fn warnings(pod: &Pod<'_>, containers: &[Container<'_>], is_injected_later: bool) -> Vec<Problem> {
    let mut warnings: Vec<_> = host_network(pod).into_iter().collect();
    let has_target = is_injected_later || containers.iter().any(|container| container.is_target);
    warnings.extend((!has_target).then(|| unused_socket(pod, containers)));
    warnings.extend(access::closed_sockets(pod, containers));
    warnings
}

fn host_network(pod: &Pod<'_>) -> Option<Problem> {
    let port = pod.sidecar.status_port.filter(|_| pod.spec.text_of("hostNetwork") == Some("true"))?;
    let message = format!(
        "this Pod uses the node's network: the agent takes port {port} on the node, and serves its metrics on all of the \
         node's addresses; choose another address with --status-address"
    );
    Some(pod.problem(pod.spec.line, message))
}

fn unused_socket(pod: &Pod<'_>, containers: &[Container<'_>]) -> Problem {
    let names = text::listed(containers.iter().map(|container| container.name), ", ");
    let message = format!(
        "no container gets the socket, since none of {names} is an Envoy by its name or image; name those that get it \
         with --container"
    );
    pod.problem(pod.spec.line, message)
}
