//! Manifests of Kubernetes with the agent's sidecar in them.
//!
//! The text is not written anew: what is added goes in between, at places that the parser names, and all other bytes
//! stay. The result is read again; it has to be the original and the sidecar, and nothing else.

mod document;
mod edit;
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
    /// User and group.
    pub run_as: u32,
    /// The folder of the socket.
    pub socket_folder: String,
    /// The socket in it.
    pub socket: String,
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

    /// Whether the agent writes there.
    fn is_writable(self) -> bool {
        !matches!(self, Self::Token | Self::CaRoot)
    }
}

/// Why nothing was injected.
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

/// `manifests` with the sidecar in each of its workloads, and how many there are.
///
/// # Errors
///
/// When this is not YAML, or a workload is written in a way that leaves no place for the sidecar.
pub fn inject(manifests: &str, sidecar: &Sidecar) -> Result<(String, usize), Problem> {
    let before = document::read(manifests)?;
    let (edits, workloads) = plan(manifests, &before, sidecar)?;
    if edits.is_empty() {
        return Ok((manifests.to_owned(), workloads));
    }
    let injected = edits.apply();
    check(&before, &injected, sidecar)?;
    Ok((injected, workloads))
}

/// What has to change, and in how many workloads.
fn plan<'a>(
    manifests: &'a str,
    documents: &[Option<Node>],
    sidecar: &Sidecar,
) -> Result<(Edits<'a>, usize), Problem> {
    let mut edits = Edits::new(manifests);
    let mut workloads = 0;
    for (index, root) in documents.iter().enumerate() {
        let Some(root) = root else { continue };
        let mut aliased = BTreeSet::new();
        collect_aliases(root, &mut aliased);
        let document = Document { number: index + 1, aliased };
        workloads += document.plan(root, sidecar, &mut edits)?;
    }
    Ok((edits, workloads))
}

/// Sees to it that `injected` is what was there before, with the sidecar, and nothing else.
fn check(before: &[Option<Node>], injected: &str, sidecar: &Sidecar) -> Result<(), Problem> {
    let is_as_before = |after: &[Option<Node>]| {
        before.len() == after.len()
            && before.iter().zip(after).all(|(before, after)| {
                let stripped = |node: &Option<Node>| {
                    let mut node = node.clone();
                    node.iter_mut().for_each(|node| strip(node, sidecar));
                    node
                };
                stripped(before) == stripped(after)
            })
    };
    let is_good = document::read(injected).is_ok_and(|after| {
        is_as_before(&after) && plan(injected, &after, sidecar).is_ok_and(|(edits, _)| edits.is_empty())
    });
    if is_good {
        return Ok(());
    }
    let line = before.iter().flatten().next().map_or(1, |node| node.line);
    let what = "the sidecar can't be added to this file without changing something else in it; write the lists of its \
                Pods (containers, volumes, volumeMounts) in blocks, an item to a line"
        .to_owned();
    Err(Problem { document: 1, line, what })
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

    fn plan(&self, object: &Node, sidecar: &Sidecar, edits: &mut Edits<'_>) -> Result<usize, Problem> {
        if is_list(object) {
            let items = self.get(object, "items")?.map_or(&[][..], Node::items);
            return items.iter().map(|item| self.plan(item, sidecar, edits)).sum();
        }
        let Some((kind, path)) = path_of(object) else { return Ok(0) };
        self.is_own(object)?;
        let mut spec = object;
        for key in path {
            let Some(next) = self.get(spec, key)? else {
                let what =
                    format!("this {kind} has no {}: there is no Pod to put the sidecar in", path.join("."));
                return Err(self.problem(object.line, what));
            };
            spec = next;
        }
        PodPlan { document: self, sidecar, spec, kind }.make(edits)?;
        Ok(1)
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

/// The changes in one Pod's spec.
struct PodPlan<'a> {
    document: &'a Document,
    sidecar: &'a Sidecar,
    spec: &'a Node,
    kind: &'static str,
}

impl PodPlan<'_> {
    fn make(&self, edits: &mut Edits<'_>) -> Result<(), Problem> {
        let Self { sidecar, spec, .. } = self;
        let others = self.others()?;
        let ends = matches!(spec.text_of("restartPolicy"), Some("Never" | "OnFailure"));
        if !sidecar.is_native && (ends || matches!(self.kind, "Job" | "CronJob")) {
            let what = "an ordinary sidecar would keep this Pod from ending; drop --native=false";
            return Err(self.document.problem(spec.line, what));
        }
        self.check_mounts()?;
        let shared = self.shared_volume(&others)?;
        let is_istio = others.iter().any(|other| other.name == "istio-proxy");
        let container = sidecar.container(shared, is_istio);
        let step = edits.step(spec, "containers");

        let is_ours = |item: &Node| item.text_of("name") == Some(&sidecar.name);
        let (native, ordinary) =
            if sidecar.is_native { (Some(container), None) } else { (None, Some(container)) };
        let is_own_volume = |item: &Node| sidecar.is_own_volume(item);
        let volumes = sidecar.own_volumes(shared.is_some());
        let mut sync = |mapping, key, ours: &dyn Fn(&Node) -> bool, wanted: Vec<Value>, at, neighbour| {
            let list = List { mapping, key, at, neighbour, step };
            self.sync(edits, &list, ours, wanted)
        };
        sync(spec, "initContainers", &is_ours, native.into_iter().collect(), At::Start, Some("containers"))?;
        sync(spec, "volumes", &is_own_volume, volumes, At::End, Some("containers"))?;
        for Other { container, is_target, .. } in others {
            let mounts = if is_target { sidecar.target_mounts(shared.is_some()) } else { Vec::new() };
            sync(container, "volumeMounts", &is_own_volume, mounts, At::End, None)?;
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
            match missing.iter().position(|wanted| *wanted == value) {
                Some(known) => drop(missing.remove(known)),
                None => stale.push(index),
            }
        }
        // What has to go makes room for what has to come.
        let mut missing = missing.into_iter();
        let change = || -> Result<(), edit::NoPlace> {
            let Some((_, list)) = at.mapping.entries().iter().find(|(key, _)| key.text() == Some(at.key))
            else {
                let new: Vec<_> = missing.by_ref().collect();
                return if new.is_empty() { Ok(()) } else { at.add(edits, &new) };
            };
            for index in stale {
                match missing.next() {
                    Some(new) => edits.replace(list, index, &new, at.step)?,
                    None => edits.remove(list, index)?,
                }
            }
            let new: Vec<_> = missing.by_ref().collect();
            if new.is_empty() { Ok(()) } else { at.add(edits, &new) }
        };
        change().map_err(|no_place| {
            let edit::NoPlace { line, what } = no_place;
            let what = format!(
                "{what} is written in a way that leaves no place for the sidecar; give each item and each \
                                key a line of its own"
            );
            self.document.problem(line, what)
        })
    }

    fn check_mounts(&self) -> Result<(), Problem> {
        let volumes = self.document.list(self.spec, "volumes")?;
        for (name, _) in &self.sidecar.mounts {
            if volumes.iter().all(|volume| volume.text_of("name") != Some(name)) {
                let what =
                    format!("--mount {name}: this Pod has no volume of that name; add it to its volumes");
                return Err(self.document.problem(self.spec.line, what));
            }
        }
        Ok(())
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
            others.extend(containers.filter(|other| other.name != sidecar.name));
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
                .filter(|mount| !self.sidecar.is_own_volume(mount))
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
        self.name == "istio-proxy" || self.name.contains("envoy") || image.contains("envoy")
    }
}

/// A list in a manifest, and how to add to it.
struct List<'a> {
    mapping: &'a Node,
    key: &'static str,
    at: At,
    neighbour: Option<&'static str>,
    step: usize,
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

    /// A volume of ours, or a mount of one.
    fn is_own_volume(&self, item: &Node) -> bool {
        let name = item.text_of("name");
        name.is_some() && Purpose::ALL.iter().any(|purpose| name == Some(&self.volume_name(*purpose)))
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
        set(
            &mut container,
            "securityContext",
            json!({
                "runAsNonRoot": true,
                "runAsUser": self.run_as,
                "runAsGroup": self.run_as,
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
                "seccompProfile": { "type": "RuntimeDefault" },
            }),
        );
        // 6 MB at rest, 16 kB for each stream; a start takes 10 ms of CPU, and there are 20 in each 100.
        let (requests, limits) =
            (json!({ "cpu": "5m", "memory": "16Mi" }), json!({ "cpu": "200m", "memory": "64Mi" }));
        set(&mut container, "resources", json!({ "requests": requests, "limits": limits }));
        if let Some([startup, liveness, readiness]) = self.probes(is_istio) {
            if self.is_native {
                set(&mut container, "startupProbe", startup);
            }
            set(&mut container, "livenessProbe", liveness);
            set(&mut container, "readinessProbe", readiness);
        }
        set(&mut container, "volumeMounts", Value::Array(mounts));
        container
    }

    /// For start, life and readiness.
    fn probes(&self, is_istio: bool) -> Option<[Value; 3]> {
        let port = self.status_port?;
        let [mut startup, liveness, readiness] = if is_istio {
            // The proxy takes what comes in by the network, and would want mutual TLS of it.
            let (get, log) = (["/attache", "get", "--timeout=500ms"], ["/attache", "log"]);
            let command = |words: &[&str]| {
                let socket = format!("--socket={}", self.socket);
                let words: Vec<_> = words.iter().copied().chain([socket.as_str()]).collect();
                json!({ "exec": { "command": words } })
            };
            [command(&get), command(&log), command(&get)]
        } else {
            ["/readyz", "/livez", "/readyz"].map(|path| json!({ "httpGet": { "path": path, "port": port } }))
        };
        set(&mut startup, "periodSeconds", json!(1));
        set(&mut startup, "failureThreshold", json!(300));
        Some([startup, liveness, readiness])
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
    let Some(spec) = path.iter().try_fold(object, |node, key| child(node, key)) else { return };
    strip_list(spec, "volumes", &|item| sidecar.is_own_volume(item));
    for list in LISTS {
        strip_list(spec, list, &|item| item.text_of("name") == Some(&sidecar.name));
        if let Some(Kind::Sequence(containers, _)) = child(spec, list).map(|list| &mut list.kind) {
            for container in containers {
                strip_list(container, "volumeMounts", &|item| sidecar.is_own_volume(item));
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
