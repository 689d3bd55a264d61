//! The YAML, or JSON, of a kubeconfig as a tree. Its texts may be credentials: they are wiped when dropped.

use saphyr_parser::{Event, Parser, ScalarStyle};
use zeroize::Zeroizing;

use crate::base::text;

/// The limit of nesting. Without the extensions of other programs, which may hold anything, there are 6 levels.
const MAX_DEPTH: usize = 50;

pub(super) enum Node {
    Null,
    Text {
        text: Zeroizing<String>,
        /// Without quotes.
        is_plain: bool,
    },
    List(Vec<Node>),
    Map(Vec<(Zeroizing<String>, Node)>),
}

/// An open collection, and the key that waits for its value.
struct Open {
    node: Node,
    key: Option<Zeroizing<String>>,
}

impl Node {
    /// The one document of `text`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (mut root, mut open) = (None, Vec::<Open>::new());
        for event in Parser::new_from_str(text) {
            let (event, span) = event.map_err(|error| {
                let reason = text::sanitize_for_log(error.info());
                format!("line {}: this is not YAML: {reason}", error.marker().line())
            })?;
            let at = |reason: &str| format!("line {}: {reason}", span.start.line());
            let node = match event {
                Event::Scalar(text, style, ..) => {
                    Self::scalar(text.into_owned(), style == ScalarStyle::Plain)
                }
                Event::Alias(_) => return Err(at("aliases (*name) are not supported in a kubeconfig")),
                Event::SequenceStart(..) | Event::MappingStart(..) if open.len() >= MAX_DEPTH => {
                    return Err(at(&format!("this is nested more than {MAX_DEPTH} levels deep")));
                }
                Event::SequenceStart(..) => {
                    open.push(Open { node: Self::List(Vec::new()), key: None });
                    continue;
                }
                Event::MappingStart(..) => {
                    open.push(Open { node: Self::Map(Vec::new()), key: None });
                    continue;
                }
                Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                    Some(Open { node, .. }) => node,
                    None => continue,
                },
                _ => continue,
            };
            match open.last_mut() {
                Some(parent) => parent.add(node).map_err(|reason| at(&reason))?,
                None if root.is_some() => {
                    return Err(at("a second document begins here; a kubeconfig is one"));
                }
                None => root = Some(node),
            }
        }
        Ok(root.unwrap_or(Self::Null))
    }

    fn scalar(text: String, is_plain: bool) -> Self {
        match text.as_str() {
            "" | "~" | "null" | "Null" | "NULL" if is_plain => Self::Null,
            _ => Self::Text { text: Zeroizing::new(text), is_plain },
        }
    }

    /// The value under `key`; none for `null`.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Map(entries) = self else { return None };
        let found = entries.iter().find(|(known, _)| **known == key);
        found.map(|(_, node)| node).filter(|node| !matches!(node, Self::Null))
    }

    /// The text under `key`; none where it is empty.
    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, String> {
        match self.get(key) {
            Some(Self::Text { text, .. }) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
            Some(_) => Err(format!("its {key} is not a text")),
            None => Ok(None),
        }
    }

    /// The switch under `key`.
    pub(super) fn is_set(&self, key: &str) -> Result<bool, String> {
        match self.get(key) {
            Some(Self::Text { text, is_plain: true }) if text.as_str() == "true" => Ok(true),
            Some(Self::Text { text, is_plain: true }) if text.as_str() == "false" => Ok(false),
            Some(_) => Err(format!("its {key} is neither true nor false")),
            None => Ok(false),
        }
    }
}

impl Open {
    fn add(&mut self, node: Node) -> Result<(), String> {
        match (&mut self.node, self.key.take()) {
            (Node::List(items), _) => items.push(node),
            (Node::Map(entries), Some(key)) => {
                // Programs differ in which of the two they take.
                if entries.iter().any(|(known, _)| *known == key) {
                    return Err(format!("{:?} is set twice", text::sanitize_for_log(&key)));
                }
                entries.push((key, node));
            }
            (Node::Map(_), None) => match node {
                Node::Text { text, .. } => self.key = Some(text),
                Node::Null => self.key = Some(Zeroizing::default()),
                _ => return Err("a key is not a text".to_owned()),
            },
            _ => {}
        }
        Ok(())
    }
}
