//! Access to the parts of a document that are changed, or relied on.

use std::collections::BTreeSet;

use super::problem::Problem;
use super::yaml::{Kind, Node};

pub(super) struct Document {
    number: usize,
    /// Anchors that have an alias: a change of such a node also changes the other places.
    aliased: BTreeSet<usize>,
}

impl Document {
    /// `number` is the document's place in its file, from 1.
    pub(super) fn new(number: usize, root: &Node) -> Self {
        let mut aliased = BTreeSet::new();
        collect_aliases(root, &mut aliased);
        Self { number, aliased }
    }

    pub(super) fn problem(&self, line: usize, message: impl Into<String>) -> Problem {
        Problem { document: self.number, line, message: message.into() }
    }

    /// Fails if `node` is an alias, or has one elsewhere.
    pub(super) fn check_unshared(&self, node: &Node) -> Result<(), Problem> {
        if let Kind::Alias(_) = node.kind {
            let message = "the sidecar would go into an alias; replace the alias with its content";
            return Err(self.problem(node.line, message));
        }
        if node.anchor != 0 && self.aliased.contains(&node.anchor) {
            let message = "the sidecar would go into an anchor that an alias repeats elsewhere; replace that alias with its content";
            return Err(self.problem(node.line, message));
        }
        Ok(())
    }

    /// The value under `key`, to be changed or at least to be relied on.
    pub(super) fn get<'n>(&self, node: &'n Node, key: &str) -> Result<Option<&'n Node>, Problem> {
        let mut found = node.entries().iter().filter(|(known, _)| known.text() == Some(key));
        let first = found.next();
        if let Some((duplicate, _)) = found.next() {
            return Err(self.problem(duplicate.line, format!("duplicate key {key}; remove one of them")));
        }
        let Some((_, value)) = first else {
            if node.get("<<").is_some() {
                let message = format!("{key} may come from a merge key (<<); write it out here");
                return Err(self.problem(node.line, message));
            }
            return Ok(None);
        };
        self.check_unshared(value)?;
        Ok(Some(value).filter(|value| !value.is_null()))
    }

    /// The items of the list under `key`; none where it is missing.
    pub(super) fn list<'n>(&self, node: &'n Node, key: &str) -> Result<&'n [Node], Problem> {
        let Some(list) = self.get(node, key)? else { return Ok(&[]) };
        if !matches!(list.kind, Kind::Sequence(..)) {
            return Err(self.problem(list.line, format!("{key} is not a list")));
        }
        list.items().iter().try_for_each(|item| self.check_unshared(item))?;
        Ok(list.items())
    }
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
