//! Pods into which Istio puts its proxy when they are made.
//!
//! Its template mounts the volume `workload-socket` into the proxy, and keeps one that is there. pilot-agent looks for a socket in
//! it once, when it starts: the agent has to come first.

use serde_json::{Value, json};

use super::document::{Kind, Node};
use super::edit::Edits;
use super::pod::{Other, PodPlan};
use super::{Problem, child};

/// The proxy's container.
pub(super) const PROXY: &str = "istio-proxy";
/// The volume of the socket.
pub(super) const VOLUME: &str = "workload-socket";
/// Where it is mounted.
const FOLDER: &str = "/var/run/secrets/workload-spiffe-uds";
/// With "false" the proxy is an ordinary container. Native ones go before all others.
const NATIVE: &str = "sidecar.istio.io/nativeSidecar";
const INJECT: &str = "sidecar.istio.io/inject";
const REVISION: &str = "istio.io/rev";

/// Whether the proxy is to come, and is not there yet.
pub(super) fn is_injected_later(pod: &Node, others: &[Other<'_>], volumes: &[Node]) -> bool {
    // What has no image, or this one, only changes what Istio will put there.
    let is_whole = |other: &Other<'_>| other.container.text_of("image").is_some_and(|image| image != "auto");
    if others.iter().any(|other| other.name == PROXY && is_whole(other)) {
        return false;
    }
    let mark = |kind, key| pod.get("metadata")?.get(kind)?.text_of(key);
    match mark("labels", INJECT).or_else(|| mark("annotations", INJECT)) {
        Some(answer) => answer == "true",
        None => {
            mark("labels", REVISION).is_some()
                || mark("annotations", NATIVE).is_some()
                || volumes.iter().any(|volume| volume.text_of("name") == Some(VOLUME))
        }
    }
}

/// The volume, as Istio has it.
pub(super) fn volume() -> Value {
    json!({ "name": VOLUME, "emptyDir": {} })
}

impl PodPlan<'_> {
    /// Whether the options fit what the proxy will do.
    pub(super) fn check_for_istio(&self) -> Result<(), Problem> {
        let sidecar = self.sidecar;
        let way_out = if sidecar.socket_folder.trim_end_matches('/') != FOLDER {
            format!("looks for the socket in {FOLDER}: leave --socket out")
        } else if !sidecar.is_native {
            "looks for the socket once, when it starts: drop --native=false".to_owned()
        } else if !sidecar.containers.is_empty() {
            "gets the socket, and no other container: drop --container".to_owned()
        } else {
            return Ok(());
        };
        let what = format!("Istio puts its proxy into this Pod, which {way_out}");
        Err(self.document.problem(self.spec.line, what))
    }

    /// Has Istio put the proxy behind the agent.
    pub(super) fn have_order_kept(&self, edits: &mut Edits<'_>, step: usize) -> Result<(), Problem> {
        let way_out = format!("Istio would start its proxy before the agent; have {NATIVE}: \"false\" there");
        let Some(metadata) = self.document.get(self.pod, "metadata")? else {
            let what = format!("this Pod has no metadata with annotations: {way_out}");
            return Err(self.document.problem(self.pod.line, what));
        };
        let annotations = self.document.get(metadata, "annotations")?;
        let added = match annotations {
            Some(annotations) => match self.document.get(annotations, NATIVE)? {
                Some(native) if native.text() == Some("false") => return Ok(()),
                Some(native) => {
                    let what = format!("{NATIVE} is not \"false\": {way_out}");
                    return Err(self.document.problem(native.line, what));
                }
                None => edits.add_entry(annotations, NATIVE, &json!("false"), None, step),
            },
            None if metadata.get("annotations").is_some() => {
                let what = format!("annotations is empty: {way_out}");
                return Err(self.document.problem(metadata.line, what));
            }
            None => edits.add_entry(metadata, "annotations", &json!({ NATIVE: "false" }), None, step),
        };
        added.map_err(|no_place| self.no_place(no_place))
    }
}

/// Takes the annotation out, and the mapping if it holds nothing else.
pub(super) fn strip_annotation(pod: &mut Node) {
    let Some(metadata) = child(pod, "metadata") else { return };
    if let Some(Kind::Mapping(entries, _)) = child(metadata, "annotations").map(|node| &mut node.kind) {
        entries.retain(|(key, value)| key.text() != Some(NATIVE) || value.text() != Some("false"));
    }
    if let Kind::Mapping(entries, _) = &mut metadata.kind {
        entries.retain(|(key, value)| {
            let is_empty = matches!(&value.kind, Kind::Mapping(entries, _) if entries.is_empty());
            key.text() != Some("annotations") || !is_empty
        });
    }
}
