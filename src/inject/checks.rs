//! Pods that the sidecar does not fit, and warnings.

use super::pod::{Container, ISTIO_PROXY, Pod};
use super::problem::Problem;
use super::workload::CONTAINER_LISTS;
use super::yaml::Node;

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

/// Checks that volumes with the sidecar's names belong to it, and that the volumes of `--mount` exist.
pub(super) fn check_volumes(pod: &Pod<'_>, volumes: &[Node]) -> Result<(), Problem> {
    let sidecar = pod.sidecar;
    let mut has_sidecar = false;
    for list in CONTAINER_LISTS {
        has_sidecar |= pod.document.list(pod.spec, list)?.iter().any(|item| sidecar.is_container(item));
    }
    for volume in volumes {
        let Some(purpose) = sidecar.purpose_of(volume) else { continue };
        if !has_sidecar || volume.get(purpose.kind()).is_none() {
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
pub(super) fn warnings(pod: &Pod<'_>, containers: &[Container<'_>]) -> Vec<Problem> {
    let mut warnings: Vec<_> = host_network(pod).into_iter().collect();
    warnings.extend(closed_sockets(pod, containers));
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

/// Targets that run as another user than the sidecar, and can't open its socket.
fn closed_sockets(pod: &Pod<'_>, containers: &[Container<'_>]) -> Vec<Problem> {
    let Some(run_as) = pod.sidecar.run_as.filter(|_| !pod.sidecar.is_open) else { return Vec::new() };
    let pod_context = pod.spec.get("securityContext");
    let number = |node: &Node| node.text()?.parse::<u32>().ok();
    let groups = pod_context.and_then(|context| context.get("supplementalGroups"));
    // With an fsGroup the socket belongs to that group, and every container is in it.
    let has_group = pod_context.is_some_and(|context| context.get("fsGroup").is_some())
        || groups.map_or(&[][..], Node::items).iter().any(|group| number(group) == Some(run_as));
    let mut warnings = Vec::new();
    for target in containers.iter().filter(|container| container.is_target && !has_group) {
        let contexts: Vec<_> = target.node.get("securityContext").into_iter().chain(pod_context).collect();
        // The content of an alias or a merge key is not known here.
        if contexts.iter().any(|context| context.entries().is_empty() || context.get("<<").is_some()) {
            continue;
        }
        let id = |key| contexts.iter().find_map(|context| context.get(key)).and_then(number);
        let user = id("runAsUser").filter(|user| *user != run_as && *user != 0);
        if let Some(user) = user.filter(|_| id("runAsGroup") != Some(run_as)) {
            let message = format!(
                "container {} runs as user {user} and can't open the socket of user {run_as}: give --run-as {user}",
                target.name
            );
            warnings.push(pod.problem(target.node.line, message));
        }
    }
    warnings
}
