//! The changes in one Pod.

use serde_json::Value;

use super::document::Node;
use super::edit::{self, At, Edits};
use super::sidecar::{Purpose, Sidecar};
use super::{Document, LISTS, Plan, Problem, istio};
use crate::base::limits;

/// The changes in one Pod.
pub(super) struct PodPlan<'a> {
    pub(super) document: &'a Document,
    pub(super) sidecar: &'a Sidecar,
    /// What has the metadata and the spec.
    pub(super) pod: &'a Node,
    pub(super) spec: &'a Node,
    pub(super) kind: &'static str,
}

impl PodPlan<'_> {
    pub(super) fn make(&self, plan: &mut Plan<'_>) -> Result<(), Problem> {
        let Self { sidecar, spec, .. } = self;
        let volumes = self.document.list(spec, "volumes")?;
        let mut others = self.others()?;
        let is_injected_later = istio::is_injected_later(self.pod, &others, volumes);
        if is_injected_later {
            self.check_for_istio()?;
            // Istio mounts the volume into its proxy, and nobody else has business there.
            others.iter_mut().for_each(|other| other.is_target = false);
        }
        let has_istio = is_injected_later || others.iter().any(|other| other.name == istio::PROXY);
        self.check_kind(&others)?;
        self.check_volumes(volumes)?;
        let shared = if is_injected_later { Some(istio::VOLUME) } else { self.shared_volume(&others)? };
        if let Some(shared) = shared {
            self.check_agents(&others, shared)?;
        }
        self.warn(&others, &mut plan.warnings);

        let edits = &mut plan.edits;
        let step = edits.step(spec, "containers");
        if is_injected_later {
            self.have_order_kept(edits, step)?;
        }
        let container = sidecar.container(shared, has_istio);
        let (native, ordinary) =
            if sidecar.is_native { (Some(container), None) } else { (None, Some(container)) };
        let mut own_volumes = sidecar.own_volumes(shared.is_some());
        if is_injected_later && !volumes.iter().any(|volume| volume.text_of("name") == shared) {
            own_volumes.insert(0, istio::volume());
        }
        let is_ours = |item: &Node| sidecar.is_container(item);
        let is_own_volume = |item: &Node| sidecar.purpose_of(item).is_some();
        let is_late = self.is_late(&others)?;
        let mut sync = |mapping, key, ours: &dyn Fn(&Node) -> bool, wanted: Vec<Value>, at, neighbour| {
            let moves = is_late && key == "initContainers";
            let list = List { mapping, key, at, neighbour, step, moves };
            self.sync(edits, &list, ours, wanted)
        };
        sync(spec, "initContainers", &is_ours, native.into_iter().collect(), At::Start, Some("containers"))?;
        sync(spec, "volumes", &is_own_volume, own_volumes, At::End, Some("containers"))?;
        let has_output = sidecar.volumes.iter().any(|volume| volume.purpose == Purpose::Output);
        for Other { container, is_target, .. } in others {
            let mounts = if is_target { sidecar.target_mounts(shared.is_some()) } else { Vec::new() };
            // Others may read the output, too: who has it mounted there has done so by hand.
            let is_own_mount = |item: &Node| match sidecar.purpose_of(item) {
                Some(Purpose::Socket) => true,
                Some(Purpose::Output) => is_target || !has_output,
                _ => false,
            };
            sync(container, "volumeMounts", &is_own_mount, mounts, At::End, None)?;
        }
        sync(spec, "containers", &is_ours, ordinary.into_iter().collect(), At::End, None)
    }

    /// Makes those items of a list that are ours the wanted ones. Equal ones are left alone.
    fn sync(
        &self,
        edits: &mut Edits<'_>,
        at: &List<'_>,
        is_ours: &dyn Fn(&Node) -> bool,
        wanted: Vec<Value>,
    ) -> Result<(), Problem> {
        let present = self.document.list(at.mapping, at.key)?;
        let mut missing = wanted;
        let mut stale = Vec::new();
        for (index, item) in present.iter().enumerate().filter(|(_, item)| is_ours(item)) {
            let value = item.value();
            match missing.iter().position(|wanted| *wanted == value && !at.moves) {
                Some(known) => drop(missing.remove(known)),
                None => stale.push(index),
            }
        }
        // What has to go makes room for what has to come.
        let replaced = if at.moves { 0 } else { missing.len().min(stale.len()) };
        let gone = stale.split_off(replaced);
        let mut missing = missing.into_iter();
        let mut change = || -> Result<(), edit::NoPlace> {
            let Some((_, list)) = at.mapping.entries().iter().find(|(key, _)| key.text() == Some(at.key))
            else {
                let new: Vec<_> = missing.by_ref().collect();
                return if new.is_empty() { Ok(()) } else { at.add(edits, &new) };
            };
            for (index, new) in stale.iter().zip(missing.by_ref().take(replaced)) {
                edits.replace(list, *index, &new, at.step)?;
            }
            edits.remove(list, &gone)?;
            let new: Vec<_> = missing.by_ref().collect();
            if new.is_empty() { Ok(()) } else { at.add(edits, &new) }
        };
        change().map_err(|no_place| self.no_place(no_place))
    }

    pub(super) fn no_place(&self, edit::NoPlace { line, what }: edit::NoPlace) -> Problem {
        let what = format!(
            "{what} is written in a way that leaves no place for the sidecar; give each item and each key a line of its \
             own"
        );
        self.document.problem(line, what)
    }

    /// Whether an ordinary sidecar will do, where one is wanted.
    fn check_kind(&self, others: &[Other<'_>]) -> Result<(), Problem> {
        if self.sidecar.is_native {
            return Ok(());
        }
        let ends = matches!(self.spec.text_of("restartPolicy"), Some("Never" | "OnFailure"));
        if ends || matches!(self.kind, "Job" | "CronJob") {
            let what = "an ordinary sidecar would keep this Pod from ending; drop --native=false";
            return Err(self.document.problem(self.spec.line, what));
        }
        if let Some(proxy) = others.iter().find(|other| other.is_target && other.name == istio::PROXY) {
            let what = "Istio's proxy looks for the socket once, when it starts, and an ordinary sidecar may come too late; \
                        drop --native=false";
            return Err(self.document.problem(proxy.container.line, what));
        }
        Ok(())
    }

    /// Volumes with names like ours are ours, and those of `--mount` are there.
    fn check_volumes(&self, volumes: &[Node]) -> Result<(), Problem> {
        let mut has_sidecar = false;
        for list in LISTS {
            has_sidecar |=
                self.document.list(self.spec, list)?.iter().any(|item| self.sidecar.is_container(item));
        }
        for volume in volumes {
            let Some(purpose) = self.sidecar.purpose_of(volume) else { continue };
            if !has_sidecar || volume.get(purpose.kind()).is_none() {
                let name = self.sidecar.volume_name(purpose);
                let what = format!(
                    "this Pod has a volume {name} of its own; rename it, or give the sidecar another --name"
                );
                return Err(self.document.problem(volume.line, what));
            }
        }
        for (name, _) in &self.sidecar.mounts {
            if volumes.iter().all(|volume| volume.text_of("name") != Some(name)) {
                let what =
                    format!("--mount {name}: this Pod has no volume of that name; add it to its volumes");
                return Err(self.document.problem(self.spec.line, what));
            }
        }
        Ok(())
    }

    /// Nobody else serves at the same socket.
    fn check_agents(&self, others: &[Other<'_>], shared: &str) -> Result<(), Problem> {
        for Other { container, name, .. } in others {
            let args = container.get("args").map_or(&[][..], Node::items);
            let is_agent = args.first().and_then(Node::text) == Some("run");
            let mounts = self.document.list(container, "volumeMounts")?;
            let writes = |mount: &Node| {
                mount.text_of("name") == Some(shared) && mount.text_of("readOnly") != Some("true")
            };
            if is_agent && mounts.iter().any(writes) {
                let what =
                    format!("container {name} is an agent already, with the same socket: give --name {name}");
                return Err(self.document.problem(container.line, what));
            }
        }
        Ok(())
    }

    /// Whether the sidecar is behind an init container that gets the socket.
    fn is_late(&self, others: &[Other<'_>]) -> Result<bool, Problem> {
        let present = self.document.list(self.spec, "initContainers")?;
        let is_target = |item: &Node| {
            let mut targets = others.iter().filter(|other| other.is_target && !other.is_ordinary);
            targets.any(|other| std::ptr::eq(other.container, item))
        };
        let own = present.iter().position(|item| self.sidecar.is_container(item));
        let target = present.iter().position(is_target);
        Ok(own.zip(target).is_some_and(|(own, target)| own > target))
    }

    /// What is allowed, and is likely to go wrong.
    fn warn(&self, others: &[Other<'_>], warnings: &mut Vec<Problem>) {
        let Self { sidecar, spec, .. } = self;
        if let Some(port) = sidecar.status_port.filter(|_| spec.text_of("hostNetwork") == Some("true")) {
            let what = format!(
                "this Pod has the node's network: port {port} is taken on the node, and the metrics are at all of its \
                 addresses; --status-address chooses others"
            );
            warnings.push(self.document.problem(spec.line, what));
        }
        let Some(run_as) = sidecar.run_as.filter(|_| !sidecar.is_open) else { return };
        let of_pod = spec.get("securityContext");
        let number = |node: &Node| node.text()?.parse::<u32>().ok();
        let groups =
            of_pod.and_then(|context| context.get("supplementalGroups")).map_or(&[][..], Node::items);
        // With an fsGroup the socket belongs to that group, and everybody is in it.
        let is_let_in = of_pod.is_some_and(|context| context.get("fsGroup").is_some())
            || groups.iter().any(|group| number(group) == Some(run_as));
        for target in others.iter().filter(|other| other.is_target && !is_let_in) {
            let contexts: Vec<_> =
                target.container.get("securityContext").into_iter().chain(of_pod).collect();
            // What an alias or a merge says is not known here.
            if contexts.iter().any(|context| context.entries().is_empty() || context.get("<<").is_some()) {
                continue;
            }
            let id = |key| contexts.iter().find_map(|context| context.get(key)).and_then(number);
            let user = id("runAsUser").filter(|user| *user != run_as && *user != 0);
            if let Some(user) = user.filter(|_| id("runAsGroup") != Some(run_as)) {
                let what = format!(
                    "container {} runs as user {user} and can't open the socket of {run_as}: give --run-as {user}",
                    target.name
                );
                warnings.push(self.document.problem(target.container.line, what));
            }
        }
    }

    /// All containers but the sidecar.
    fn others(&self) -> Result<Vec<Other<'_>>, Problem> {
        let Self { sidecar, spec, .. } = self;
        let mut others = Vec::new();
        for list in LISTS {
            let containers = self.document.list(spec, list)?.iter().map(|container| Other {
                name: container.text_of("name").unwrap_or_default(),
                is_ordinary: list == "containers",
                is_target: false,
                container,
            });
            others.extend(containers.filter(|other| !sidecar.is_container(other.container)));
        }
        if !others.iter().any(|other| other.is_ordinary) {
            return Err(self
                .document
                .problem(spec.line, "this Pod has no container that could use the sidecar"));
        }
        for wanted in &sidecar.containers {
            if others.iter().all(|other| other.name != wanted) {
                let known = limits::listed(others.iter().map(|other| other.name), ", ");
                let what = format!("--container {wanted}: the containers of this Pod are {known}");
                return Err(self.document.problem(spec.line, what));
            }
        }
        let has_envoy = others.iter().any(Other::is_envoy);
        for other in &mut others {
            other.is_target = match (sidecar.containers.is_empty(), has_envoy) {
                (false, _) => sidecar.containers.iter().any(|name| name == other.name),
                (true, true) => other.is_envoy(),
                (true, false) => other.is_ordinary,
            };
        }
        Ok(others)
    }

    /// The Pod's own volume for the socket, where the targets have one in that place.
    fn shared_volume<'n>(&self, others: &[Other<'n>]) -> Result<Option<&'n str>, Problem> {
        let mut shared = None;
        for (index, target) in others.iter().filter(|other| other.is_target).enumerate() {
            let mounts = self.document.list(target.container, "volumeMounts")?.iter();
            let folder = self.sidecar.socket_folder.trim_end_matches('/');
            let here = mounts
                .filter(|mount| self.sidecar.purpose_of(mount).is_none())
                .find(|mount| {
                    mount.text_of("mountPath").map(|path| path.trim_end_matches('/')) == Some(folder)
                })
                .and_then(|mount| mount.text_of("name"));
            if index > 0 && here != shared {
                let what = format!(
                    "this container has something else at {folder} than those before it; name those \
                                    that get the socket with --container"
                );
                return Err(self.document.problem(target.container.line, what));
            }
            shared = here;
        }
        Ok(shared)
    }
}

/// A container of the Pod's own.
pub(super) struct Other<'a> {
    pub(super) container: &'a Node,
    pub(super) name: &'a str,
    /// Among `containers`, not among `initContainers`.
    pub(super) is_ordinary: bool,
    /// It gets the socket.
    pub(super) is_target: bool,
}

impl Other<'_> {
    pub(super) fn is_envoy(&self) -> bool {
        let image = self.container.text_of("image").unwrap_or_default();
        self.name == istio::PROXY || self.name.contains("envoy") || image.contains("envoy")
    }
}

/// A list in a manifest, and how to add to it.
pub(super) struct List<'a> {
    mapping: &'a Node,
    key: &'static str,
    at: At,
    neighbour: Option<&'static str>,
    step: usize,
    /// What is there already goes where new items go.
    moves: bool,
}

impl List<'_> {
    fn add(&self, edits: &mut Edits<'_>, new: &[Value]) -> Result<(), edit::NoPlace> {
        edits.add(self.mapping, self.key, new, self.at, self.neighbour, self.step)
    }
}
