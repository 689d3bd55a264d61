//! The proof that an injection changed nothing else.

use super::istio;
use super::plan::Plan;
use super::problem::Problem;
use super::sidecar::{Purpose, Sidecar};
use super::workload::{self, CONTAINER_LISTS};
use super::yaml::{self, Kind, Node};

/// Checks that `injected` is `before` with the sidecar, and nothing else.
pub(super) fn verify(before: &[Option<Node>], injected: &str, sidecar: &Sidecar) -> Result<(), Problem> {
    let stripped = |node: &Option<Node>| {
        let mut node = node.clone();
        node.iter_mut().for_each(|node| strip(node, sidecar));
        node
    };
    // One for all documents: it reads the whole text.
    let mut plan = Plan::new(injected);
    let mut is_complete = |number, root: &Option<Node>| {
        plan.add(number, root.as_ref(), sidecar).is_ok() && plan.edits.is_empty()
    };
    let bad = match yaml::read(injected) {
        Err(problem) => Some(problem.document),
        Ok(after) if after.len() != before.len() => Some(1),
        Ok(after) => (1..).zip(before.iter().zip(&after)).find_map(|(number, (before, after))| {
            let is_good = stripped(before) == stripped(after) && is_complete(number, after);
            (!is_good).then_some(number)
        }),
    };
    let Some(document) = bad else { return Ok(()) };
    let line = before.get(document.saturating_sub(1)).and_then(Option::as_ref).map_or(1, |node| node.line);
    let message = "the sidecar can't be added to this document without changing something else in it; write the lists of \
                   its Pods (containers, volumes, volumeMounts) in block style, one item per line"
        .to_owned();
    Err(Problem { document, line, message })
}

/// Removes all parts of the sidecar from `object`, and lists that are empty then.
fn strip(object: &mut Node, sidecar: &Sidecar) {
    if workload::is_list(object) {
        if let Some(Kind::Sequence(items, _)) = object.get_mut("items").map(|items| &mut items.kind) {
            items.iter_mut().for_each(|item| strip(item, sidecar));
        }
        return;
    }
    let Some((_, path)) = workload::path_of(object) else { return };
    let Some((last, above)) = path.split_last() else { return };
    let Some(pod) = above.iter().try_fold(object, |node, key| node.get_mut(key)) else { return };
    istio::strip_annotation(pod);
    let Some(spec) = pod.get_mut(last) else { return };
    strip_list(spec, "volumes", &|item| {
        sidecar.purpose_of(item).is_some() || istio::is_volume(&item.value())
    });
    for list in CONTAINER_LISTS {
        strip_list(spec, list, &|item| sidecar.is_container(item));
        if let Some(Kind::Sequence(containers, _)) = spec.get_mut(list).map(|list| &mut list.kind) {
            for container in containers {
                strip_list(container, "volumeMounts", &|item| {
                    matches!(sidecar.purpose_of(item), Some(Purpose::Socket(_) | Purpose::Output(_)))
                });
            }
        }
    }
}

fn strip_list(mapping: &mut Node, key: &str, is_ours: &dyn Fn(&Node) -> bool) {
    if let Some(Kind::Sequence(items, _)) = mapping.get_mut(key).map(|list| &mut list.kind) {
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
