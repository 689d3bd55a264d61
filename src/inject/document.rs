//! YAML documents as trees whose nodes know where they stand in the text.

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::Problem;

/// Manifests are flat; what is deeper than this is not one.
const DEEPEST: usize = 100;

/// A value and its place. Two are equal if they say the same, wherever they stand.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) kind: Kind,
    /// The first byte, of an anchor or a tag if it has one.
    pub(super) start: usize,
    /// The byte behind the last one; of a block, behind its last value.
    pub(super) end: usize,
    /// In the file, from 1.
    pub(super) line: usize,
    /// Its number among the anchors; 0 for none.
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
    /// `|` or `>`: what follows its last line may belong to it.
    pub(super) is_block: bool,
}

/// How a collection is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum Style {
    Block,
    /// In brackets; the byte behind the opening one.
    Flow(usize),
}

/// Where the bracket stands does not matter.
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

    /// The value under `key`.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        let found = self.entries().iter().find(|(known, _)| known.text() == Some(key));
        found.map(|(_, value)| value)
    }

    /// The text under `key`.
    pub(super) fn text_of(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Node::text)
    }

    /// As Kubernetes would understand it. Aliases and numbers with a fraction are not of interest here.
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

/// Reads all documents of `text`. An empty one has no node.
pub(super) fn read(text: &str) -> Result<Vec<Option<Node>>, Problem> {
    let mut documents = Vec::new();
    // What is open: the node, and the key that waits for its value.
    let mut open: Vec<(Node, Option<Node>)> = Vec::new();
    let place = Places::new(text);
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let hint = if text.contains("{{") { "; a template is to be rendered first" } else { "" };
            let what = format!("this is not YAML: {}{hint}", error.info());
            Problem { document: documents.len().max(1), line: error.marker().line(), what }
        })?;
        let node = |kind, anchor, tag: Option<_>| Node {
            kind,
            start: place.of(span.start.index()),
            end: place.of(span.end.index()),
            line: span.start.line(),
            anchor,
            tag,
        };
        let tag = |tag: Option<std::borrow::Cow<'_, saphyr_parser::Tag>>| tag.map(|tag| tag.to_string());
        let done = match event {
            Event::DocumentStart(_) => {
                documents.push(None);
                continue;
            }
            Event::Scalar(text, style, anchor, name) => {
                let is_plain = style == ScalarStyle::Plain;
                let is_block = matches!(style, ScalarStyle::Literal | ScalarStyle::Folded);
                let scalar = Scalar { text: text.into_owned(), is_plain, is_block };
                node(Kind::Scalar(scalar), anchor, tag(name))
            }
            Event::Alias(anchor) => node(Kind::Alias(anchor), 0, None),
            Event::SequenceStart(anchor, name) => {
                let style = place.style(span);
                open.push((node(Kind::Sequence(Vec::new(), style), anchor, tag(name)), None));
                too_deep(open.len(), documents.len(), span)?;
                continue;
            }
            Event::MappingStart(anchor, name) => {
                let style = place.style(span);
                open.push((node(Kind::Mapping(Vec::new(), style), anchor, tag(name)), None));
                too_deep(open.len(), documents.len(), span)?;
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some((mut node, _)) = open.pop() else { continue };
                let last = match &node.kind {
                    Kind::Sequence(items, Style::Block) => items.last(),
                    Kind::Mapping(entries, Style::Block) => entries.last().map(|(_, value)| value),
                    _ => None,
                };
                let is_flow =
                    matches!(node.kind, Kind::Sequence(_, Style::Flow(_)) | Kind::Mapping(_, Style::Flow(_)));
                node.end = match last {
                    // A block's own end is the next token, behind comments that are not its own.
                    Some(last) => last.end,
                    // The same goes for what is behind a bracket.
                    None if is_flow => place.of(span.start.index()) + 1,
                    None => place.of(span.end.index()),
                };
                node
            }
            _ => continue,
        };
        match open.last_mut() {
            None => {
                if let Some(document) = documents.last_mut() {
                    *document = Some(done);
                }
            }
            Some((Node { kind: Kind::Sequence(items, _), .. }, _)) => items.push(done),
            Some((Node { kind: Kind::Mapping(entries, _), .. }, key)) => match key.take() {
                // A value that is not there ends where its key does.
                Some(key) => entries.push((key, done)),
                None => *key = Some(done),
            },
            Some(_) => {}
        }
    }
    Ok(documents)
}

fn too_deep(depth: usize, document: usize, span: Span) -> Result<(), Problem> {
    if depth <= DEEPEST {
        return Ok(());
    }
    let what = format!("this is nested more than {DEEPEST} deep: it is no manifest");
    Err(Problem { document, line: span.start.line(), what })
}

/// The parser counts characters, and slices are made of bytes.
struct Places<'a> {
    text: &'a str,
    /// Empty where all characters have one byte.
    starts: Vec<usize>,
}

impl<'a> Places<'a> {
    fn new(text: &'a str) -> Self {
        let starts =
            if text.is_ascii() { Vec::new() } else { text.char_indices().map(|(at, _)| at).collect() };
        Self { text, starts }
    }

    fn of(&self, character: usize) -> usize {
        if self.starts.is_empty() {
            return character.min(self.text.len());
        }
        self.starts.get(character).copied().unwrap_or(self.text.len())
    }

    /// The style of a collection: the opening bracket is in its first event if it has one, with blanks and comments behind it.
    fn style(&self, span: Span) -> Style {
        let (start, end) = (self.of(span.start.index()), self.of(span.end.index()));
        let bracket = self.text.get(start..end).unwrap_or_default().find(['[', '{']);
        bracket.map_or(Style::Block, |bracket| Style::Flow(start + bracket + 1))
    }
}
