//! YAML documents as trees whose nodes know their positions in the text.

use std::borrow::Cow;
use std::ops::Range;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};

use super::json::{EscapedPair, escaped_pairs};
use super::problem::Problem;

/// The limit of nesting. Manifests are flat.
const MAX_DEPTH: usize = 100;

/// A value and its position. Two nodes with the same content are equal, whatever their positions.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) kind: Kind,
    /// The first byte; that of the anchor or tag if there is one.
    pub(super) start: usize,
    /// The byte after the last one; of a block, the byte after its last value.
    pub(super) end: usize,
    /// The line in the file, from 1.
    pub(super) line: usize,
    /// The number of the node's anchor; 0 for none.
    pub(super) anchor: usize,
    tag: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Scalar(Scalar),
    /// The number of the anchor.
    Alias(usize),
    Sequence(Vec<Node>, Style),
    Mapping(Vec<(Node, Node)>, Style),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scalar {
    pub(super) text: String,
    pub(super) is_plain: bool,
    /// `|` or `>`: the lines after its last one may belong to it.
    pub(super) is_block: bool,
}

/// How a collection is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum Style {
    Block,
    /// In brackets; the byte after the opening bracket.
    Flow(usize),
}

/// The position of the bracket does not matter.
impl PartialEq for Style {
    fn eq(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Block, Self::Block) | (Self::Flow(_), Self::Flow(_)))
    }
}

impl Eq for Style {}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        (&self.kind, self.anchor, &self.tag) == (&other.kind, other.anchor, &other.tag)
    }
}

impl Eq for Node {}

impl Node {
    /// The text of a scalar.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.kind {
            Kind::Scalar(scalar) => Some(&scalar.text),
            _ => None,
        }
    }

    pub(super) fn is_null(&self) -> bool {
        match &self.kind {
            Kind::Scalar(scalar) => {
                scalar.is_plain && matches!(scalar.text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            _ => false,
        }
    }

    pub(super) fn items(&self) -> &[Node] {
        match &self.kind {
            Kind::Sequence(items, _) => items,
            _ => &[],
        }
    }

    pub(super) fn entries(&self) -> &[(Node, Node)] {
        match &self.kind {
            Kind::Mapping(entries, _) => entries,
            _ => &[],
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        let found = self.entries().iter().find(|(known, _)| known.text() == Some(key));
        found.map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        let Kind::Mapping(entries, _) = &mut self.kind else { return None };
        let found = entries.iter_mut().find(|(known, _)| known.text() == Some(key));
        found.map(|(_, value)| value)
    }

    /// The text under `key`.
    pub(super) fn text_of(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Node::text)
    }

    /// The value as Kubernetes reads it. Aliases and numbers with a fraction do not occur where this is used.
    pub(super) fn value(&self) -> serde_json::Value {
        use serde_json::Value;
        match &self.kind {
            Kind::Scalar(scalar) if scalar.is_plain && self.tag.is_none() => match scalar.text.as_str() {
                _ if self.is_null() => Value::Null,
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                text => text.parse::<i64>().map_or_else(|_| Value::from(text), Value::from),
            },
            Kind::Scalar(scalar) => Value::from(scalar.text.as_str()),
            Kind::Alias(anchor) => serde_json::json!({ "*": anchor }),
            Kind::Sequence(items, _) => items.iter().map(Node::value).collect(),
            Kind::Mapping(entries, _) => {
                let pairs = entries.iter();
                pairs.map(|(key, value)| (key.text().unwrap_or_default().to_owned(), value.value())).collect()
            }
        }
    }
}

/// Parses all documents of `text`. An empty document has no node.
pub(super) fn read(text: &str) -> Result<Vec<Option<Node>>, Problem> {
    let (parsed, positions) = Positions::new(text);
    let mut tree = TreeBuilder { positions, documents: Vec::new(), open: Vec::new() };
    for event in Parser::new_from_str(&parsed) {
        let (event, span) = event.map_err(|error| {
            let hint = if text.contains("{{") { "; render the template first" } else { "" };
            let message = format!("this is not YAML: {}{hint}", error.info());
            Problem { document: tree.documents.len().max(1), line: error.marker().line(), message }
        })?;
        tree.add(event, span)?;
    }
    Ok(tree.documents)
}

struct TreeBuilder<'a> {
    positions: Positions<'a>,
    documents: Vec<Option<Node>>,
    /// The collections that are not closed yet, each with the key that waits for its value.
    open: Vec<(Node, Option<Node>)>,
}

impl TreeBuilder<'_> {
    fn add(&mut self, event: Event<'_>, span: Span) -> Result<(), Problem> {
        match event {
            Event::DocumentStart(_) => self.documents.push(None),
            Event::Scalar(text, style, anchor, tag) => {
                let is_plain = style == ScalarStyle::Plain;
                let is_block = matches!(style, ScalarStyle::Literal | ScalarStyle::Folded);
                let scalar = Scalar { text: text.into_owned(), is_plain, is_block };
                let node = self.node(Kind::Scalar(scalar), span, anchor, tag);
                self.place(node);
            }
            Event::Alias(anchor) => {
                let node = self.node(Kind::Alias(anchor), span, 0, None);
                self.place(node);
            }
            Event::SequenceStart(anchor, tag) => {
                let kind = Kind::Sequence(Vec::new(), self.positions.style(span));
                let node = self.node(kind, span, anchor, tag);
                self.open(node)?;
            }
            Event::MappingStart(anchor, tag) => {
                let kind = Kind::Mapping(Vec::new(), self.positions.style(span));
                let node = self.node(kind, span, anchor, tag);
                self.open(node)?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some((mut node, _)) = self.open.pop() {
                    node.end = self.end_of(&node, span);
                    self.place(node);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn node(&self, kind: Kind, span: Span, anchor: usize, tag: Option<Cow<'_, Tag>>) -> Node {
        Node {
            kind,
            start: self.positions.byte(span.start.index()),
            end: self.positions.byte(span.end.index()),
            line: span.start.line(),
            anchor,
            tag: tag.map(|tag| tag.to_string()),
        }
    }

    fn open(&mut self, collection: Node) -> Result<(), Problem> {
        let line = collection.line;
        self.open.push((collection, None));
        if self.open.len() <= MAX_DEPTH {
            return Ok(());
        }
        let message = format!("this is nested more than {MAX_DEPTH} levels deep and can't be a manifest");
        Err(Problem { document: self.documents.len(), line, message })
    }

    /// The end of a collection whose last event has this `span`. The span's own end is the next token, after comments that
    /// do not belong to the collection.
    fn end_of(&self, collection: &Node, span: Span) -> usize {
        let last = match &collection.kind {
            Kind::Sequence(items, Style::Block) => items.last(),
            Kind::Mapping(entries, Style::Block) => entries.last().map(|(_, value)| value),
            Kind::Sequence(_, Style::Flow(_)) | Kind::Mapping(_, Style::Flow(_)) => {
                return self.positions.byte(span.start.index()) + 1;
            }
            _ => None,
        };
        last.map_or_else(|| self.positions.byte(span.end.index()), |last| last.end)
    }

    /// Puts a complete node into the innermost open collection.
    fn place(&mut self, node: Node) {
        match self.open.last_mut() {
            None => {
                if let Some(document) = self.documents.last_mut() {
                    *document = Some(node);
                }
            }
            Some((Node { kind: Kind::Sequence(items, _), .. }, _)) => items.push(node),
            Some((Node { kind: Kind::Mapping(entries, _), .. }, key)) => match key.take() {
                // A missing value ends where its key does.
                Some(key) => entries.push((key, node)),
                None => *key = Some(node),
            },
            Some(_) => {}
        }
    }
}

/// Turns the parser's positions, in characters, into bytes.
struct Positions<'a> {
    text: &'a str,
    /// The first byte of each character that the parser sees; empty where these are the bytes of the text.
    starts: Vec<usize>,
}

impl<'a> Positions<'a> {
    /// `text` as the parser takes it, and the positions in it.
    fn new(text: &'a str) -> (Cow<'a, str>, Self) {
        let pairs = escaped_pairs(text);
        if pairs.is_empty() {
            let starts =
                if text.is_ascii() { Vec::new() } else { text.char_indices().map(|(at, _)| at).collect() };
            return (text.into(), Self { text, starts });
        }
        let (mut parsed, mut starts) = (String::with_capacity(text.len()), Vec::with_capacity(text.len()));
        let mut from = 0;
        for pair in pairs {
            Self::copy(text, from..pair.start, &mut parsed, &mut starts);
            let escape = pair.in_yaml();
            starts.extend((0..escape.len()).map(|at| pair.start + at));
            parsed.push_str(&escape);
            from = pair.start + EscapedPair::LENGTH;
        }
        Self::copy(text, from..text.len(), &mut parsed, &mut starts);
        (parsed.into(), Self { text, starts })
    }

    /// Adds a part of `text`, and the positions of its characters.
    fn copy(text: &str, part: Range<usize>, parsed: &mut String, starts: &mut Vec<usize>) {
        let from = part.start;
        let part = text.get(part).unwrap_or_default();
        starts.extend(part.char_indices().map(|(at, _)| from + at));
        parsed.push_str(part);
    }

    fn byte(&self, character: usize) -> usize {
        if self.starts.is_empty() {
            return character.min(self.text.len());
        }
        self.starts.get(character).copied().unwrap_or(self.text.len())
    }

    /// The style of a collection. The span of its first event has the opening bracket, if any, and blanks and comments after it.
    fn style(&self, span: Span) -> Style {
        let (start, end) = (self.byte(span.start.index()), self.byte(span.end.index()));
        let bracket = self.text.get(start..end).unwrap_or_default().find(['[', '{']);
        bracket.map_or(Style::Block, |bracket| Style::Flow(start + bracket + 1))
    }
}
