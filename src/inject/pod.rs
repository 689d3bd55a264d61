//! One Pod: its containers, and those that get the socket.

use super::document::Document;
use super::edit::NoPlace;
use super::problem::Problem;
use super::sidecar::Sidecar;
use super::workload::CONTAINER_LISTS;
use super::yaml::Node;
use crate::base::text;

/// The container of Istio's proxy.
pub(super) const ISTIO_PROXY: &str = "istio-proxy";

/// A Pod and the sidecar that it gets.
pub(super) struct Pod<'a> {
    pub(super) document: &'a Document,
    pub(super) sidecar: &'a Sidecar,
    /// The node with the Pod's metadata and spec.
    pub(super) object: &'a Node,
    pub(super) spec: &'a Node,
    /// The workload's kind.
    pub(super) kind: &'static str,
}

impl<'a> Pod<'a> {
    pub(super) fn problem(&self, line: usize, message: impl Into<String>) -> Problem {
        self.document.problem(line, message)
    }

    pub(super) fn no_place(&self, NoPlace { line, node }: NoPlace) -> Problem {
        let message =
            format!("{node} leaves no place for the sidecar; put each item and each key on its own line");
        self.problem(line, message)
    }

    /// All containers except the sidecar.
    pub(super) fn containers(&self) -> Result<Vec<Container<'a>>, Problem> {
        let Self { document, sidecar, spec, .. } = *self;
        let mut containers = Vec::new();
        for list in CONTAINER_LISTS {
            let all = document.list(spec, list)?.iter().map(|node| Container {
                name: node.text_of("name").unwrap_or_default(),
                is_ordinary: list == "containers",
                is_target: false,
                node,
            });
            containers.extend(all.filter(|container| !sidecar.is_container(container.node)));
        }
        if !containers.iter().any(|container| container.is_ordinary) {
            return Err(self.problem(spec.line, "this Pod has no container that could use the sidecar"));
        }
        for wanted in &sidecar.containers {
            if containers.iter().all(|container| container.name != wanted) {
                let known = text::listed(containers.iter().map(|container| container.name), ", ");
                let message = format!("--container {wanted}: the containers of this Pod are {known}");
                return Err(self.problem(spec.line, message));
            }
        }
        for container in &mut containers {
            container.is_target = match sidecar.containers.as_slice() {
                [] => container.is_envoy(),
                named => named.iter().any(|name| name == container.name),
            };
        }
        Ok(containers)
    }

    /// For each of the sockets' directories, the Pod's own volume that the targets mount there, if they do.
    pub(super) fn shared_volumes<'n>(
        &self,
        containers: &[Container<'n>],
    ) -> Result<Vec<Option<&'n str>>, Problem> {
        self.sidecar.socket_dirs.iter().map(|dir| self.shared_volume(containers, dir)).collect()
    }

    fn shared_volume<'n>(&self, containers: &[Container<'n>], dir: &str) -> Result<Option<&'n str>, Problem> {
        let dir = dir.trim_end_matches('/');
        let mut shared = None;
        for (index, target) in containers.iter().filter(|container| container.is_target).enumerate() {
            let mounts = self.document.list(target.node, "volumeMounts")?.iter();
            let volume = mounts
                .filter(|mount| self.sidecar.purpose_of(mount).is_none())
                .find(|mount| mount.text_of("mountPath").map(|path| path.trim_end_matches('/')) == Some(dir))
                .and_then(|mount| mount.text_of("name"));
            if index > 0 && volume != shared {
                let message = format!(
                    "this container mounts a different volume at {dir} than the containers before it; name the \
                     containers that get the socket with --container"
                );
                return Err(self.problem(target.node.line, message));
            }
            shared = volume;
        }
        Ok(shared)
    }
}

/// A container other than the sidecar.
pub(super) struct Container<'a> {
    pub(super) node: &'a Node,
    pub(super) name: &'a str,
    /// Listed under `containers`, not under `initContainers`.
    pub(super) is_ordinary: bool,
    /// Gets the socket.
    pub(super) is_target: bool,
}

impl Container<'_> {
    /// Whether this is an Envoy by its own name, or by that of its image. What only watches or configures an Envoy often
    /// has `envoy` in its name, too, and must not get the key.
    fn is_envoy(&self) -> bool {
        let image = self.node.text_of("image").unwrap_or_default();
        let image = image.split_once('@').map_or(image, |(name, _)| name);
        let image = image.rsplit_once('/').map_or(image, |(_, name)| name);
        let image = image.split_once(':').map_or(image, |(name, _)| name);
        [ISTIO_PROXY, "envoy"].contains(&self.name)
            || image.split(['-', '_', '.']).any(|word| word == "envoy")
    }
}
