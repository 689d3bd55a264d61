//! Manifests of Kubernetes with the agent's sidecar in them.
//!
//! The text is not written anew: what is added goes in between, at places that the parser names, and all other bytes
//! stay. The result is read again; it has to be the original and the sidecar, and nothing else.

mod document;
mod edit;
mod istio;
mod pod;
mod render;
mod sidecar;

use std::collections::BTreeSet;

use self::document::{Kind, Node};
use self::edit::Edits;
use self::pod::PodPlan;
pub use self::sidecar::{Purpose, Sidecar, Volume};

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
