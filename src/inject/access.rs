//! Containers that get the socket, but may be unable to open it.

use super::pod::{Container, Pod};
use super::problem::Problem;
use super::yaml::{Kind, Node};

/// The user and group to which the entry point of Envoy's images switches if it starts as root.
const ENVOY: u32 = 101;

/// A number that a securityContext may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Id {
    Set(u32),
    Unset,
    /// It may be in an alias, or come from a merge key.
    Unreadable,
}

/// The targets that are not known to run as the sidecar's user or group.
pub(super) fn closed_sockets(pod: &Pod<'_>, containers: &[Container<'_>]) -> Vec<Problem> {
    let Some(agent) = pod.sidecar.run_as.filter(|_| !pod.sidecar.is_open) else { return Vec::new() };
    let targets = containers.iter().filter(|container| container.is_target);
    let warning = |target: &Container<'_>| {
        let reason = Access { pod, target, agent }.doubt()?;
        Some(pod.problem(target.node.line, format!("container {} {reason}", target.name)))
    };
    targets.filter_map(warning).collect()
}

/// The access of one container to the socket of user and group `agent`.
struct Access<'a> {
    pod: &'a Pod<'a>,
    target: &'a Container<'a>,
    agent: u32,
}

impl Access<'_> {
    /// Why the container may be unable to open the socket; none if it is able to.
    fn doubt(&self) -> Option<String> {
        let agent = self.agent;
        let user = match self.id("runAsUser") {
            // The image's own user is root.
            Id::Unset if is_envoys_image(self.target.node) => Id::Set(0),
            user => user,
        };
        if user == Id::Set(0) && is_envoys_image(self.target.node) {
            return self.doubt_after_switch();
        }
        if self.id("runAsGroup") == Id::Set(agent) || self.has_group() {
            return None;
        }
        match user {
            Id::Set(user) if user == agent || user == 0 => None,
            Id::Set(user) => Some(format!(
                "runs as user {user} and can't open the socket of user {agent}: give --run-as {user}"
            )),
            Id::Unset => Some(format!(
                "runs as the user of its image, which may be unable to open the socket of user {agent}: set runAsUser: \
                 {agent} in its securityContext, or give --run-as with the image's user"
            )),
            Id::Unreadable => Some(format!(
                "has its user in an alias or a merge key, which is not followed; it must be {agent} to open the socket: \
                 write runAsUser out, or check it"
            )),
        }
    }

    /// The entry point of Envoy's images, started as root, switches to a user without the Pod's groups.
    fn doubt_after_switch(&self) -> Option<String> {
        let agent = self.agent;
        let number = |name: &str| match self.variable(name) {
            None => Some(ENVOY),
            Some(value) => value.parse().ok(),
        };
        let (Some(user), Some(group)) = (number("ENVOY_UID"), number("ENVOY_GID")) else {
            return Some(format!(
                "switches to the user in ENVOY_UID and ENVOY_GID, which are not known here; one of them must be {agent} \
                 to open the socket"
            ));
        };
        if user == agent || group == agent || user == 0 {
            return None;
        }
        Some(format!(
            "runs as user {user}, to which the entry point of its image switches, and can't open the socket of user \
             {agent}: set runAsUser: {agent} in its securityContext, or give --run-as {user}"
        ))
    }

    /// Whether the container is a member of a group that may open the socket.
    fn has_group(&self) -> bool {
        let Some(context) = self.pod.spec.get("securityContext") else { return false };
        let groups = context.get("supplementalGroups").map_or(&[][..], Node::items);
        // With an fsGroup the socket belongs to that group.
        context.get("fsGroup").is_some() || groups.iter().any(|group| number(group) == Some(self.agent))
    }

    /// The container's setting, else the Pod's.
    fn id(&self, key: &str) -> Id {
        let contexts = [self.target.node.get("securityContext"), self.pod.spec.get("securityContext")];
        for context in contexts.into_iter().flatten() {
            if let Some(id) = context.get(key) {
                return number(id).map_or(Id::Unreadable, Id::Set);
            }
            if matches!(context.kind, Kind::Alias(_)) || context.get("<<").is_some() {
                return Id::Unreadable;
            }
        }
        Id::Unset
    }

    /// An environment variable of the container, empty if its value is not in the manifest.
    fn variable(&self, name: &str) -> Option<&str> {
        let all = self.target.node.get("env").map_or(&[][..], Node::items);
        let variable = all.iter().find(|variable| variable.text_of("name") == Some(name))?;
        Some(variable.text_of("value").unwrap_or_default())
    }
}

fn number(node: &Node) -> Option<u32> {
    node.text()?.parse().ok()
}

/// Whether the container runs the entry point of one of Envoy's images. The distroless ones have none.
fn is_envoys_image(container: &Node) -> bool {
    let image = container.text_of("image").unwrap_or_default();
    let is_envoys = image.rsplit_once("envoyproxy/").is_some_and(|(_, name)| name.starts_with("envoy"));
    is_envoys && !image.contains("distroless") && container.get("command").is_none()
}
