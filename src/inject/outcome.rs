//! What was done to a workload, in a line.

use std::fmt;

use super::pod::Pod;
use super::workload::CONTAINER_LISTS;
use super::yaml::Node;
use crate::base::text::{listed, one_line};

/// What was done to one workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Kind, namespace and name.
    workload: String,
    /// The sidecar's name.
    sidecar: String,
    /// Whether it is a volume of the node's agent alone.
    is_of_node: bool,
    change: Change,
    socket: SocketMounts,
    /// Names of the volumes that the sidecar brings along.
    volumes: Vec<String>,
}

/// The containers that get the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SocketMounts {
    In(Vec<String>),
    /// The proxy that Istio injects later.
    InjectedLater,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Added,
    Updated,
    Unchanged,
}

impl Outcome {
    /// The outcome for `object`, whose Pod was planned before any edit is made.
    pub(super) fn new(object: &Node, pod: &Pod<'_>, socket: SocketMounts, is_changed: bool) -> Self {
        let lists = CONTAINER_LISTS.into_iter().filter_map(|list| pod.spec.get(list));
        let had_sidecar = match pod.sidecar.node {
            Some(_) => pod
                .spec
                .get("volumes")
                .into_iter()
                .flat_map(Node::items)
                .any(|item| item.get("csi").is_some() && pod.sidecar.purpose_of(item).is_some()),
            None => lists.flat_map(Node::items).any(|item| pod.sidecar.is_container(item)),
        };
        let change = match (is_changed, had_sidecar) {
            (false, _) => Change::Unchanged,
            (true, true) => Change::Updated,
            (true, false) => Change::Added,
        };
        let volumes = pod.sidecar.volumes.iter().map(|volume| pod.sidecar.volume_name(volume.purpose));
        Self {
            workload: format!("{} {}", pod.kind, name(object)),
            sidecar: pod.sidecar.name.clone(),
            is_of_node: pod.sidecar.node.is_some(),
            change,
            socket,
            volumes: volumes.collect(),
        }
    }
}

/// Namespace and name of an object, as far as they are known.
fn name(object: &Node) -> String {
    let metadata = object.get("metadata");
    let text = |key| metadata.and_then(|metadata| metadata.text_of(key)).filter(|text| !text.is_empty());
    let name = text("name").or(text("generateName")).unwrap_or("without a name");
    match text("namespace") {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workload, sidecar, is_of_node, change, socket, volumes } = self;
        let what =
            if *is_of_node { "volume of the node's agent".to_owned() } else { format!("sidecar {sidecar}") };
        let change = match change {
            Change::Added => format!("{what} added"),
            Change::Updated => format!("{what} updated"),
            Change::Unchanged => format!("{what} unchanged"),
        };
        let socket = match socket {
            SocketMounts::In(names) if names.is_empty() => "socket in no container".to_owned(),
            SocketMounts::In(names) => format!("socket in {}", listed(names, ", ")),
            SocketMounts::InjectedLater => "socket for the proxy that Istio injects".to_owned(),
        };
        let volumes = match volumes.as_slice() {
            [] => String::new(),
            volumes => format!(", volumes {}", listed(volumes, ", ")),
        };
        f.write_str(&one_line(&format!("{workload}: {change}, {socket}{volumes}")))
    }
}
