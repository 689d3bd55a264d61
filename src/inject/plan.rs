//! The changes to be made, Pod by Pod.

use serde_json::Value;

use super::document::Document;
use super::edit::{At, Edits, NoPlace};
use super::outcome::{Outcome, SocketMounts};
use super::pod::{Container, ISTIO_PROXY, Pod};
use super::problem::Problem;
use super::sidecar::{Purpose, Sidecar};
use super::yaml::Node;
use super::{checks, istio, workload};

/// All changes to a file, and the warnings about it.
pub(super) struct Plan<'a> {
    pub(super) edits: Edits<'a>,
    pub(super) workloads: Vec<Outcome>,
    /// How many objects have no Pods.
    pub(super) others: usize,
    pub(super) warnings: Vec<Problem>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { edits: Edits::new(text), workloads: Vec::new(), others: 0, warnings: Vec::new() }
    }

    /// Plans the changes to a document; `number` is its place in the file, from 1.
    pub(super) fn add(
        &mut self,
        number: usize,
        root: Option<&Node>,
        sidecar: &Sidecar,
    ) -> Result<(), Problem> {
        let Some(root) = root else { return Ok(()) };
        self.add_object(&Document::new(number, root), root, sidecar)
    }

    fn add_object(&mut self, document: &Document, object: &Node, sidecar: &Sidecar) -> Result<(), Problem> {
        if workload::is_list(object) {
            let items = document.get(object, "items")?.map_or(&[][..], Node::items);
            return items.iter().try_for_each(|item| self.add_object(document, item, sidecar));
        }
        let Some((kind, path)) = workload::path_of(object) else {
            self.others += usize::from(object.text_of("kind").is_some());
            return Ok(());
        };
        document.check_unshared(object)?;
        let (mut pod, mut spec) = (object, object);
        for key in path {
            let Some(next) = document.get(spec, key)? else {
                let message = format!("this {kind} has no {}, and so no Pod for the sidecar", path.join("."));
                return Err(document.problem(object.line, message));
            };
            (pod, spec) = (spec, next);
        }
        let pod = Pod { document, sidecar, object: pod, spec, kind };
        let earlier_edits = self.edits.count();
        let socket = self.add_pod(&pod)?;
        let is_changed = self.edits.count() > earlier_edits;
        self.workloads.push(Outcome::new(object, &pod, socket, is_changed));
        Ok(())
    }

    /// Plans the changes to a Pod, and returns the containers that get the socket.
    fn add_pod(&mut self, pod: &Pod<'_>) -> Result<SocketMounts, Problem> {
        let volumes = pod.document.list(pod.spec, "volumes")?;
        let mut containers = pod.containers()?;
        let is_injected_later = istio::is_injected_later(pod.object, &containers, volumes);
        if is_injected_later {
            if pod.sidecar.node.is_none() {
                istio::check_options(pod)?;
            } else {
                istio::check_no_containers(pod)?;
            }
            // Istio mounts the volume into its proxy, and no other container uses the socket.
            containers.iter_mut().for_each(|container| container.is_target = false);
        }
        checks::check_sidecar_kind(pod, &containers)?;
        checks::check_volumes(pod, volumes)?;
        checks::check_service_account(pod)?;
        let shared = match is_injected_later {
            true => istio::volumes(pod.sidecar),
            false => pod.shared_volumes(&containers)?,
        };
        for shared in shared.iter().flatten() {
            match &pod.sidecar.node {
                Some(node) => checks::check_nodes_volume(pod, node, volumes, shared)?,
                None => checks::check_agents(pod, &containers, shared)?,
            }
        }
        self.warnings.extend(checks::warnings(pod, &containers, is_injected_later));
        let step = self.edits.step(pod.spec, "containers");
        if is_injected_later && pod.sidecar.node.is_none() {
            istio::annotate(pod, &mut self.edits, step)?;
        }
        let has_istio = is_injected_later || containers.iter().any(|container| container.name == ISTIO_PROXY);
        let mut own_volumes = pod.sidecar.own_volumes(&shared);
        if is_injected_later {
            let is_there = |name: &str| volumes.iter().any(|volume| volume.text_of("name") == Some(name));
            let missing = shared.iter().flatten().filter(|name| !is_there(name));
            own_volumes.splice(
                ..0,
                missing.map(|name| match &pod.sidecar.node {
                    Some(node) => node.volume(name),
                    None => istio::volume(name),
                }),
            );
        }
        let container = pod.sidecar.node.is_none().then(|| pod.sidecar.container(&shared, has_istio));
        let wanted = Wanted { container, volumes: own_volumes };
        PodEdits { pod, step, edits: &mut self.edits }.make(&containers, wanted, &shared)?;
        if is_injected_later {
            return Ok(SocketMounts::InjectedLater);
        }
        let targets = containers.iter().filter(|container| container.is_target);
        Ok(SocketMounts::In(targets.map(|container| container.name.to_owned()).collect()))
    }
}

/// The sidecar's items at the level of the Pod.
struct Wanted {
    /// None if the node's agent is used.
    container: Option<Value>,
    volumes: Vec<Value>,
}

/// The edits of one Pod.
struct PodEdits<'a, 'e, 't> {
    pod: &'a Pod<'a>,
    /// How far lists are indented from their keys.
    step: usize,
    edits: &'e mut Edits<'t>,
}

impl PodEdits<'_, '_, '_> {
    fn make(
        &mut self,
        containers: &[Container<'_>],
        wanted: Wanted,
        shared: &[Option<&str>],
    ) -> Result<(), Problem> {
        let Pod { sidecar, spec, .. } = *self.pod;
        let (native, ordinary) = match sidecar.is_native {
            true => (wanted.container, None),
            false => (None, wanted.container),
        };
        let is_sidecar = |item: &Node| sidecar.is_container(item);
        let is_own_volume = |item: &Node| sidecar.purpose_of(item).is_some();
        let init = List {
            mapping: spec,
            key: "initContainers",
            at: At::Start,
            neighbour: Some("containers"),
            moves: self.is_late(containers)?,
        };
        self.sync(&init, &is_sidecar, native.into_iter().collect())?;
        let volumes = List::at_end(spec, "volumes", Some("containers"));
        self.sync(&volumes, &is_own_volume, wanted.volumes)?;
        for Container { node, is_target, .. } in containers {
            let mounts = if *is_target { sidecar.target_mounts(shared) } else { Vec::new() };
            // Another container may read the output, too, where its mount was written by hand.
            let is_own_mount = |item: &Node| match sidecar.purpose_of(item) {
                Some(Purpose::Socket(_)) => true,
                Some(purpose @ Purpose::Output(_)) => {
                    *is_target || sidecar.volumes.iter().all(|volume| volume.purpose != purpose)
                }
                _ => false,
            };
            self.sync(&List::at_end(node, "volumeMounts", None), &is_own_mount, mounts)?;
        }
        self.sync(&List::at_end(spec, "containers", None), &is_sidecar, ordinary.into_iter().collect())
    }

    /// Whether the sidecar comes after an init container that gets the socket.
    fn is_late(&self, containers: &[Container<'_>]) -> Result<bool, Problem> {
        let present = self.pod.document.list(self.pod.spec, "initContainers")?;
        let is_target = |item: &Node| {
            let mut targets =
                containers.iter().filter(|container| container.is_target && !container.is_ordinary);
            targets.any(|container| std::ptr::eq(container.node, item))
        };
        let own = present.iter().position(|item| self.pod.sidecar.is_container(item));
        let target = present.iter().position(is_target);
        Ok(own.zip(target).is_some_and(|(own, target)| own > target))
    }

    /// Turns the sidecar's items of a list into `wanted`. Equal ones are left alone.
    fn sync(
        &mut self,
        list: &List<'_>,
        is_ours: &dyn Fn(&Node) -> bool,
        wanted: Vec<Value>,
    ) -> Result<(), Problem> {
        let present = self.pod.document.list(list.mapping, list.key)?;
        let mut missing = wanted;
        let mut stale = Vec::new();
        for (index, item) in present.iter().enumerate().filter(|(_, item)| is_ours(item)) {
            let value = item.value();
            match missing.iter().position(|wanted| *wanted == value && !list.moves) {
                Some(known) => drop(missing.remove(known)),
                None => stale.push(index),
            }
        }
        self.change(list, &stale, missing).map_err(|no_place| self.pod.no_place(no_place))
    }

    /// Puts `missing` in the place of the `stale` items, then removes or adds the rest.
    fn change(&mut self, list: &List<'_>, stale: &[usize], missing: Vec<Value>) -> Result<(), NoPlace> {
        let mut missing = missing.into_iter();
        let mut entries = list.mapping.entries().iter();
        if let Some((_, node)) = entries.find(|(key, _)| key.text() == Some(list.key)) {
            let replaced = if list.moves { 0 } else { missing.len().min(stale.len()) };
            let (replaced, removed) = stale.split_at(replaced);
            for (index, new) in replaced.iter().zip(missing.by_ref()) {
                self.edits.replace(node, *index, &new, self.step)?;
            }
            self.edits.remove(node, removed)?;
        }
        let new: Vec<_> = missing.collect();
        if new.is_empty() {
            return Ok(());
        }
        self.edits.add(list.mapping, list.key, &new, list.at, list.neighbour, self.step)
    }
}

/// A list in a manifest, and how to add to it.
struct List<'a> {
    mapping: &'a Node,
    key: &'static str,
    at: At,
    /// The key before which a missing list is added.
    neighbour: Option<&'static str>,
    /// Present items move to the place of new ones.
    moves: bool,
}

impl<'a> List<'a> {
    fn at_end(mapping: &'a Node, key: &'static str, neighbour: Option<&'static str>) -> Self {
        Self { mapping, key, at: At::End, neighbour, moves: false }
    }
}
