//! Manifests of Kubernetes with the agent's sidecar in them.
//!
//! The text is not written anew: what is added goes in between, at places that the parser names, and all other bytes
//! stay. The result is read again; it has to be the original and the sidecar, and nothing else.

mod document;
mod edit;
mod istio;
mod render;

use std::collections::BTreeSet;

use serde_json::{Value, json};

use document::{Kind, Node};
use edit::{At, Edits};

use crate::limits;

/// The workloads, the group of their API, and where the spec of their Pods is.
const WORKLOADS: [(&str, &str, &[&str]); 7] = [
    ("v1", "Pod", &["spec"]),
    ("apps/v1", "Deployment", &["spec", "template", "spec"]),
    ("apps/v1", "StatefulSet", &["spec", "template", "spec"]),
    ("apps/v1", "DaemonSet", &["spec", "template", "spec"]),
    ("apps/v1", "ReplicaSet", &["spec", "template", "spec"]),
    ("batch/v1", "Job", &["spec", "template", "spec"]),
    ("batch/v1", "CronJob", &["spec", "jobTemplate", "spec", "template", "spec"]),
];

/// Both lists of a Pod's containers.
const LISTS: [&str; 2] = ["initContainers", "containers"];

/// The agent's sidecar, as it goes into a Pod.
#[derive(Clone, Debug)]
pub struct Sidecar {
    /// The container's name, and the beginning of its volumes' names.
    pub name: String,
    /// The agent's image.
    pub image: String,
    /// Its arguments, from `run` on.
    pub args: Vec<String>,
    /// An init container that goes on running.
    pub is_native: bool,
    /// User and group; none where the platform gives them out.
    pub run_as: Option<u32>,
    /// The folder of the socket.
    pub socket_folder: String,
    /// The socket in it.
    pub socket: String,
    /// Its mode lets every user in.
    pub is_open: bool,
    /// The admin socket, if there is one.
    pub admin_socket: Option<String>,
    /// The port of the probes, if there are any.
    pub status_port: Option<u16>,
    /// Which containers get the socket; where there are none, Envoys, and where there are none of these, all.
    pub containers: Vec<String>,
    /// What the agent needs but its socket.
    pub volumes: Vec<Volume>,
    /// Volumes that the Pod has already, and where the agent finds them.
    pub mounts: Vec<(String, String)>,
}

/// A volume that comes with the sidecar.
#[derive(Clone, Debug)]
pub struct Volume {
    /// What it is for.
    pub purpose: Purpose,
    /// Kubernetes' description of what is in it.
    pub source: Value,
    /// Where the agent finds it.
    pub path: String,
}

/// What a volume is for; its name ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The folder of the socket.
    Socket,
    /// The token for the CA.
    Token,
    /// The root of the CA's own certificate.
    CaRoot,
    /// What is kept across restarts of the container.
    State,
    /// The embedded CA's files.
    Ca,
    /// Files for other programs: the containers that get the socket get these, too.
    Output,
}

impl Purpose {
    const ALL: [Self; 6] = [Self::Socket, Self::Token, Self::CaRoot, Self::State, Self::Ca, Self::Output];

    /// How its folder came about, for people.
    pub fn words(self) -> &'static str {
        match self {
            Self::Socket => "the folder of --socket",
            Self::Token => "the folder of the token",
            Self::CaRoot => "the folder of the CA's root",
            Self::State => "--state-dir",
            Self::Ca => "--ca-dir",
            Self::Output => "--output-dir",
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Token => "token",
            Self::CaRoot => "ca-root",
            Self::State => "state",
            Self::Ca => "ca",
            Self::Output => "output",
        }
    }

    /// What Kubernetes calls volumes like it.
    fn kind(self) -> &'static str {
        match self {
            Self::Token => "projected",
            Self::CaRoot => "configMap",
            Self::Socket | Self::State | Self::Ca | Self::Output => "emptyDir",
        }
    }

    /// Whether the agent writes there.
    pub fn is_writable(self) -> bool {
        !matches!(self, Self::Token | Self::CaRoot)
    }
}

/// Manifests with the sidecar in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injected {
    /// The manifests.
    pub text: String,
    /// How many workloads have the sidecar.
    pub workloads: usize,
    /// What is likely to go wrong all the same.
    pub warnings: Vec<Problem>,
}

/// What is wrong with a workload: why nothing was injected, or a warning.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("document {document}, line {line}: {what}")]
pub struct Problem {
    /// The document's number in its file, from 1.
    pub document: usize,
    /// The line in the file, from 1.
    pub line: usize,
    /// What is wrong, and what can be done.
    pub what: String,
}

/// `manifests` with the sidecar in each of its workloads.
///
/// # Errors
///
/// When this is not YAML, or a workload is written in a way that leaves no place for the sidecar.
pub fn inject(manifests: &str, sidecar: &Sidecar) -> Result<Injected, Problem> {
    let before = document::read(manifests)?;
    let mut plan = Plan { edits: Edits::new(manifests), workloads: 0, warnings: Vec::new() };
    for (number, root) in (1..).zip(&before) {
        plan.add(number, root.as_ref(), sidecar)?;
    }
    let Plan { edits, workloads, warnings } = plan;
    if edits.is_empty() {
        return Ok(Injected { text: manifests.to_owned(), workloads, warnings });
    }
    let text = edits.apply();
    check(&before, &text, sidecar)?;
    Ok(Injected { text, workloads, warnings })
}

/// What has to change, in how many workloads, and what is to be said of them.
struct Plan<'a> {
    edits: Edits<'a>,
    workloads: usize,
    warnings: Vec<Problem>,
}

impl Plan<'_> {
    /// Adds what has to change in a document.
    fn add(&mut self, number: usize, root: Option<&Node>, sidecar: &Sidecar) -> Result<(), Problem> {
        let Some(root) = root else { return Ok(()) };
        let mut aliased = BTreeSet::new();
        collect_aliases(root, &mut aliased);
        Document { number, aliased }.plan(root, sidecar, self)
    }
}

/// Sees to it that `injected` is what was there before, with the sidecar, and nothing else.
fn check(before: &[Option<Node>], injected: &str, sidecar: &Sidecar) -> Result<(), Problem> {
    let stripped = |node: &Option<Node>| {
        let mut node = node.clone();
        node.iter_mut().for_each(|node| strip(node, sidecar));
        node
    };
    let is_settled = |number, root: &Option<Node>| {
        let mut plan = Plan { edits: Edits::new(injected), workloads: 0, warnings: Vec::new() };
        plan.add(number, root.as_ref(), sidecar).is_ok() && plan.edits.is_empty()
    };
    let bad = match document::read(injected) {
        Err(problem) => Some(problem.document),
        Ok(after) if after.len() != before.len() => Some(1),
        Ok(after) => (1..).zip(before.iter().zip(&after)).find_map(|(number, (before, after))| {
            let is_good = stripped(before) == stripped(after) && is_settled(number, after);
            (!is_good).then_some(number)
        }),
    };
    let Some(document) = bad else { return Ok(()) };
    let line = before.get(document.saturating_sub(1)).and_then(Option::as_ref).map_or(1, |node| node.line);
    let what = "the sidecar can't be added to this document without changing something else in it; write the lists of its \
                Pods (containers, volumes, volumeMounts) in blocks, an item to a line"
        .to_owned();
    Err(Problem { document, line, what })
}

fn collect_aliases(node: &Node, aliased: &mut BTreeSet<usize>) {
    if let Kind::Alias(anchor) = node.kind {
        aliased.insert(anchor);
    }
    node.items().iter().for_each(|item| collect_aliases(item, aliased));
    for (key, value) in node.entries() {
        collect_aliases(key, aliased);
        collect_aliases(value, aliased);
    }
}

/// Where the spec of the Pods of `object` is, if it is a workload.
fn path_of(object: &Node) -> Option<(&'static str, &'static [&'static str])> {
    let (group, kind) = (object.text_of("apiVersion")?, object.text_of("kind")?);
    let (_, kind, path) = WORKLOADS.into_iter().find(|(of, name, _)| (*of, *name) == (group, kind))?;
    Some((kind, path))
}

fn is_list(object: &Node) -> bool {
    object.text_of("apiVersion") == Some("v1") && object.text_of("kind") == Some("List")
}

struct Document {
    number: usize,
    /// Anchors that something refers to: who changes what has one changes that, too.
    aliased: BTreeSet<usize>,
}

impl Document {
    fn problem(&self, line: usize, what: impl Into<String>) -> Problem {
        Problem { document: self.number, line, what: what.into() }
    }

    fn plan(&self, object: &Node, sidecar: &Sidecar, plan: &mut Plan<'_>) -> Result<(), Problem> {
        if is_list(object) {
            let items = self.get(object, "items")?.map_or(&[][..], Node::items);
            return items.iter().try_for_each(|item| self.plan(item, sidecar, plan));
        }
        let Some((kind, path)) = path_of(object) else { return Ok(()) };
        self.is_own(object)?;
        let (mut pod, mut spec) = (object, object);
        for key in path {
            let Some(next) = self.get(spec, key)? else {
                let what =
                    format!("this {kind} has no {}: there is no Pod to put the sidecar in", path.join("."));
                return Err(self.problem(object.line, what));
            };
            (pod, spec) = (spec, next);
        }
        plan.workloads += 1;
        PodPlan { document: self, sidecar, pod, spec, kind }.make(plan)
    }

    /// Nothing else refers to `node`, and it refers to nothing else.
    fn is_own(&self, node: &Node) -> Result<(), Problem> {
        let way_out = "write it out here";
        if let Kind::Alias(_) = node.kind {
            return Err(self.problem(node.line, format!("the sidecar would go into an alias; {way_out}")));
        }
        if node.anchor != 0 && self.aliased.contains(&node.anchor) {
            let what = "the sidecar would go into what an alias repeats elsewhere; write it out there";
            return Err(self.problem(node.line, what));
        }
        Ok(())
    }

    /// The value under `key`, to be changed or at least to be relied on.
    fn get<'n>(&self, node: &'n Node, key: &str) -> Result<Option<&'n Node>, Problem> {
        let mut found = node.entries().iter().filter(|(known, _)| known.text() == Some(key));
        let first = found.next();
        if let Some((again, _)) = found.next() {
            return Err(
                self.problem(again.line, format!("{key} is here for the second time; drop one of them"))
            );
        }
        let Some((_, value)) = first else {
            if node.get("<<").is_some() {
                let what = format!("{key} may come from a merge (<<); write it out here");
                return Err(self.problem(node.line, what));
            }
            return Ok(None);
        };
        self.is_own(value)?;
        Ok(Some(value).filter(|value| !value.is_null()))
    }

    /// The items of a list that may be missing.
    fn list<'n>(&self, node: &'n Node, key: &str) -> Result<&'n [Node], Problem> {
        let Some(list) = self.get(node, key)? else { return Ok(&[]) };
        if !matches!(list.kind, Kind::Sequence(..)) {
            return Err(self.problem(list.line, format!("{key} is not a list")));
        }
        list.items().iter().try_for_each(|item| self.is_own(item))?;
        Ok(list.items())
    }
}

/// The changes in one Pod.
struct PodPlan<'a> {
    document: &'a Document,
    sidecar: &'a Sidecar,
    /// What has the metadata and the spec.
    pod: &'a Node,
    spec: &'a Node,
    kind: &'static str,
}

impl PodPlan<'_> {
    fn make(&self, plan: &mut Plan<'_>) -> Result<(), Problem> {
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

    fn no_place(&self, edit::NoPlace { line, what }: edit::NoPlace) -> Problem {
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
struct Other<'a> {
    container: &'a Node,
    name: &'a str,
    /// Among `containers`, not among `initContainers`.
    is_ordinary: bool,
    /// It gets the socket.
    is_target: bool,
}

impl Other<'_> {
    fn is_envoy(&self) -> bool {
        let image = self.container.text_of("image").unwrap_or_default();
        self.name == istio::PROXY || self.name.contains("envoy") || image.contains("envoy")
    }
}

/// A list in a manifest, and how to add to it.
struct List<'a> {
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

impl Sidecar {
    fn volume_name(&self, purpose: Purpose) -> String {
        format!("{}-{}", self.name, purpose.suffix())
    }

    fn is_container(&self, item: &Node) -> bool {
        item.text_of("name") == Some(&self.name)
    }

    /// What the volume of that name is for, if it is one of ours.
    pub fn purpose(&self, volume: &str) -> Option<Purpose> {
        Purpose::ALL.into_iter().find(|purpose| volume == self.volume_name(*purpose))
    }

    /// What a volume or a mount is for, if it is one of ours.
    fn purpose_of(&self, item: &Node) -> Option<Purpose> {
        self.purpose(item.text_of("name")?)
    }

    fn own_volumes(&self, has_shared: bool) -> Vec<Value> {
        let socket = json!({
            "name": self.volume_name(Purpose::Socket),
            "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" },
        });
        let further = self.volumes.iter().map(|volume| {
            let mut described = json!({ "name": self.volume_name(volume.purpose) });
            if let (Some(described), Some(source)) = (described.as_object_mut(), volume.source.as_object()) {
                described.extend(source.clone());
            }
            described
        });
        Some(socket).filter(|_| !has_shared).into_iter().chain(further).collect()
    }

    /// What the containers get that talk to the agent.
    fn target_mounts(&self, has_shared: bool) -> Vec<Value> {
        let socket = (Purpose::Socket, self.socket_folder.as_str());
        let outputs = self.volumes.iter().filter(|volume| volume.purpose == Purpose::Output);
        let outputs = outputs.map(|volume| (volume.purpose, volume.path.as_str()));
        let all = Some(socket).filter(|_| !has_shared).into_iter().chain(outputs);
        all.map(|(purpose, path)| json!({ "name": self.volume_name(purpose), "mountPath": path, "readOnly": true }))
            .collect()
    }

    fn container(&self, shared: Option<&str>, is_istio: bool) -> Value {
        let socket = shared.map_or_else(|| self.volume_name(Purpose::Socket), str::to_owned);
        let mut mounts = vec![json!({ "name": socket, "mountPath": self.socket_folder })];
        for volume in &self.volumes {
            let mut mount = json!({ "name": self.volume_name(volume.purpose), "mountPath": volume.path });
            if !volume.purpose.is_writable() {
                set(&mut mount, "readOnly", json!(true));
            }
            mounts.push(mount);
        }
        let further = self.mounts.iter();
        mounts
            .extend(further.map(|(name, path)| json!({ "name": name, "mountPath": path, "readOnly": true })));

        let mut container = json!({ "name": self.name, "image": self.image });
        if self.is_native {
            set(&mut container, "restartPolicy", json!("Always"));
        }
        set(&mut container, "args", json!(self.args));
        if let Some(port) = self.status_port {
            let port = json!([{ "name": "attache-status", "containerPort": port }]);
            set(&mut container, "ports", port);
        }
        let mut context = json!({ "runAsNonRoot": true });
        if let Some(id) = self.run_as {
            set(&mut context, "runAsUser", json!(id));
            set(&mut context, "runAsGroup", json!(id));
        }
        set(&mut context, "allowPrivilegeEscalation", json!(false));
        set(&mut context, "readOnlyRootFilesystem", json!(true));
        set(&mut context, "capabilities", json!({ "drop": ["ALL"] }));
        set(&mut context, "seccompProfile", json!({ "type": "RuntimeDefault" }));
        set(&mut container, "securityContext", context);
        // 6 MB at rest, 16 kB for each stream; a start takes 10 ms of CPU, and there are 20 in each 100.
        let (requests, limits) =
            (json!({ "cpu": "5m", "memory": "16Mi" }), json!({ "cpu": "200m", "memory": "64Mi" }));
        set(&mut container, "resources", json!({ "requests": requests, "limits": limits }));
        for (name, probe) in self.probes(is_istio) {
            set(&mut container, name, probe);
        }
        set(&mut container, "volumeMounts", Value::Array(mounts));
        container
    }

    /// For start, life and readiness.
    fn probes(&self, is_istio: bool) -> Vec<(&'static str, Value)> {
        let (mut ready, alive) = if is_istio {
            // The proxy takes what comes in by the network, and would want mutual TLS of it.
            let command = |words: &[&str]| json!({ "exec": { "command": words } });
            let socket = format!("--socket={}", self.socket);
            // Who has no admin socket is not asked: that there are no secrets is no reason to restart.
            let admin = self.admin_socket.as_ref().map(|path| format!("--admin-socket={path}"));
            let alive = admin.map(|admin| command(&["/attache", "log", &admin]));
            (command(&["/attache", "get", "--timeout=500ms", &socket]), alive)
        } else if let Some(port) = self.status_port {
            let get = |path| json!({ "httpGet": { "path": path, "port": port } });
            (get("/readyz"), Some(get("/livez")))
        } else {
            return Vec::new();
        };
        let readiness = ready.clone();
        set(&mut ready, "periodSeconds", json!(1));
        set(&mut ready, "failureThreshold", json!(300));
        let startup = self.is_native.then_some(("startupProbe", ready));
        let liveness = alive.map(|alive| ("livenessProbe", alive));
        startup.into_iter().chain(liveness).chain([("readinessProbe", readiness)]).collect()
    }
}

fn set(object: &mut Value, key: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(key.to_owned(), value);
    }
}

/// Takes all that is the sidecar's out of `object`, and lists that hold nothing.
fn strip(object: &mut Node, sidecar: &Sidecar) {
    if is_list(object) {
        if let Some(Kind::Sequence(items, _)) = child(object, "items").map(|items| &mut items.kind) {
            items.iter_mut().for_each(|item| strip(item, sidecar));
        }
        return;
    }
    let Some((_, path)) = path_of(object) else { return };
    let Some((last, above)) = path.split_last() else { return };
    let Some(pod) = above.iter().try_fold(object, |node, key| child(node, key)) else { return };
    istio::strip_annotation(pod);
    let Some(spec) = child(pod, last) else { return };
    strip_list(spec, "volumes", &|item| {
        sidecar.purpose_of(item).is_some() || item.value() == istio::volume()
    });
    for list in LISTS {
        strip_list(spec, list, &|item| sidecar.is_container(item));
        if let Some(Kind::Sequence(containers, _)) = child(spec, list).map(|list| &mut list.kind) {
            for container in containers {
                strip_list(container, "volumeMounts", &|item| {
                    matches!(sidecar.purpose_of(item), Some(Purpose::Socket | Purpose::Output))
                });
            }
        }
    }
}

fn strip_list(mapping: &mut Node, key: &str, is_ours: &dyn Fn(&Node) -> bool) {
    if let Some(Kind::Sequence(items, _)) = child(mapping, key).map(|list| &mut list.kind) {
        items.retain(|item| !is_ours(item));
    }
    if let Kind::Mapping(entries, _) = &mut mapping.kind {
        entries.retain(|(known, list)| {
            let is_empty =
                list.is_null() || matches!(&list.kind, Kind::Sequence(items, _) if items.is_empty());
            known.text() != Some(key) || !is_empty
        });
    }
}

fn child<'a>(node: &'a mut Node, key: &str) -> Option<&'a mut Node> {
    let Kind::Mapping(entries, _) = &mut node.kind else { return None };
    let found = entries.iter_mut().find(|(known, _)| known.text() == Some(key));
    found.map(|(_, value)| value)
}

#[cfg(test)]
mod tests;
