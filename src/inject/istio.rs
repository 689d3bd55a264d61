//! Pods that Istio injects its proxy into when they are created.
//!
//! Istio's template mounts the volumes `workload-socket` and `credential-socket` into the proxy, and keeps existing ones.
//! pilot-agent looks for a socket in them once, at its start, so the agent has to start first.

use serde_json::{Value, json};

use super::edit::Edits;
use super::pod::{Container, ISTIO_PROXY, Pod};
use super::problem::Problem;
use super::sidecar::Sidecar;
use super::yaml::{Kind, Node};

/// The volume of the workload's socket.
const VOLUME: &str = "workload-socket";
/// Where the proxy mounts that volume.
const SOCKET_DIR: &str = "/var/run/secrets/workload-spiffe-uds";
/// The volume of the socket that gateways ask for `credentialName: sds://NAME`.
const CREDENTIAL_VOLUME: &str = "credential-socket";
/// Where the proxy mounts that volume.
const CREDENTIAL_DIR: &str = "/var/run/secrets/credential-uds";
/// "false" makes the proxy an ordinary container. A native proxy starts before all other containers.
const NATIVE: &str = "sidecar.istio.io/nativeSidecar";
const INJECT: &str = "sidecar.istio.io/inject";
const REVISION: &str = "istio.io/rev";

/// Whether Istio will inject its proxy later: the Pod asks for it, and does not contain it yet.
pub(super) fn is_injected_later(object: &Node, containers: &[Container<'_>], volumes: &[Node]) -> bool {
    // A container without an image, or with the image "auto", only changes the proxy that Istio injects.
    let is_complete =
        |container: &Container<'_>| container.node.text_of("image").is_some_and(|image| image != "auto");
    if containers.iter().any(|container| container.name == ISTIO_PROXY && is_complete(container)) {
        return false;
    }
    let mark = |kind, key| object.get("metadata")?.get(kind)?.text_of(key);
    match mark("labels", INJECT).or_else(|| mark("annotations", INJECT)) {
        Some(value) => value == "true",
        None => {
            mark("labels", REVISION).is_some()
                || mark("annotations", NATIVE).is_some()
                || volumes.iter().any(|volume| volume.text_of("name") == Some(VOLUME))
        }
    }
}

/// Istio's volume at each of the sockets' directories, if it has one there.
pub(super) fn volumes(sidecar: &Sidecar) -> Vec<Option<&'static str>> {
    sidecar.socket_dirs.iter().map(|dir| volume_at(dir)).collect()
}

fn volume_at(dir: &str) -> Option<&'static str> {
    match dir.trim_end_matches('/') {
        SOCKET_DIR => Some(VOLUME),
        CREDENTIAL_DIR => Some(CREDENTIAL_VOLUME),
        _ => None,
    }
}

/// The volume `name` as Istio defines it.
pub(super) fn volume(name: &str) -> Value {
    json!({ "name": name, "emptyDir": {} })
}

/// Whether `value` is one of these volumes, or that of a node's agent in the place of one.
pub(super) fn is_volume(value: &Value) -> bool {
    let is_nodes = value.get("name") == Some(&json!(VOLUME)) && value.get("csi").is_some();
    is_nodes || [VOLUME, CREDENTIAL_VOLUME].iter().any(|name| *value == volume(name))
}

/// Checks that no container is named beside the proxy that Istio injects.
pub(super) fn check_no_containers(pod: &Pod<'_>) -> Result<(), Problem> {
    if pod.sidecar.containers.is_empty() {
        return Ok(());
    }
    let message =
        "Istio injects its proxy into this Pod, and only the proxy gets the socket: drop --container";
    Err(pod.problem(pod.spec.line, message))
}

/// Checks that the options suit the proxy that Istio injects.
pub(super) fn check_options(pod: &Pod<'_>) -> Result<(), Problem> {
    let sidecar = pod.sidecar;
    let conflict = if sidecar.socket_dirs.iter().any(|dir| volume_at(dir).is_none()) {
        format!(
            "which looks for sockets in {SOCKET_DIR} and, as a gateway, in {CREDENTIAL_DIR}, under the name socket: leave \
             --socket out, or give these paths"
        )
    } else if !sidecar.is_native {
        "which looks for the socket once, at its start: drop --native=false".to_owned()
    } else if !sidecar.containers.is_empty() {
        "and only the proxy gets the socket: drop --container".to_owned()
    } else {
        return Ok(());
    };
    let message = format!("Istio injects its proxy into this Pod, {conflict}");
    Err(pod.problem(pod.spec.line, message))
}

/// Adds the annotation that makes Istio's proxy start after the agent.
pub(super) fn annotate(pod: &Pod<'_>, edits: &mut Edits<'_>, step: usize) -> Result<(), Problem> {
    let remedy =
        format!("Istio would start its proxy before the agent; set the annotation {NATIVE}: \"false\"");
    let Some(metadata) = pod.document.get(pod.object, "metadata")? else {
        let message = format!("this Pod has no metadata with annotations: {remedy}");
        return Err(pod.problem(pod.object.line, message));
    };
    let annotations = pod.document.get(metadata, "annotations")?;
    let added = match annotations {
        Some(annotations) => match pod.document.get(annotations, NATIVE)? {
            Some(native) if native.text() == Some("false") => return Ok(()),
            Some(native) => {
                let message = format!("{NATIVE} is not \"false\": {remedy}");
                return Err(pod.problem(native.line, message));
            }
            None => edits.add_entry(annotations, NATIVE, &json!("false"), None, step),
        },
        None if metadata.get("annotations").is_some() => {
            let message = format!("annotations is empty: {remedy}");
            return Err(pod.problem(metadata.line, message));
        }
        None => edits.add_entry(metadata, "annotations", &json!({ NATIVE: "false" }), None, step),
    };
    added.map_err(|no_place| pod.no_place(no_place))
}

/// Removes the annotation, and then the mapping if it is empty.
pub(super) fn strip_annotation(object: &mut Node) {
    let Some(metadata) = object.get_mut("metadata") else { return };
    if let Some(Kind::Mapping(entries, _)) = metadata.get_mut("annotations").map(|node| &mut node.kind) {
        entries.retain(|(key, value)| key.text() != Some(NATIVE) || value.text() != Some("false"));
    }
    if let Kind::Mapping(entries, _) = &mut metadata.kind {
        entries.retain(|(key, value)| {
            let is_empty = matches!(&value.kind, Kind::Mapping(entries, _) if entries.is_empty());
            key.text() != Some("annotations") || !is_empty
        });
    }
}
