//! Changes to a text at the positions of its nodes. All other bytes stay.

use std::ops::Range;

use serde_json::Value;

use super::render;
use super::yaml::{Kind, Node, Style};

/// Where a new item goes in its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    Start,
    End,
}

/// A node that can't be changed without changing something else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NoPlace {
    pub(super) line: usize,
    /// What the node is, for the error message.
    pub(super) node: &'static str,
}

#[derive(Debug)]
struct Change {
    at: Range<usize>,
    /// A key with its list, which goes after new items of the list above it.
    is_entry: bool,
    new: String,
}

/// Pending changes, with positions in the original text.
#[derive(Debug)]
pub(super) struct Edits<'a> {
    text: &'a str,
    end_of_line: &'static str,
    changes: Vec<Change>,
}

impl<'a> Edits<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let end_of_line = if text.contains("\r\n") { "\r\n" } else { "\n" };
        Self { text, end_of_line, changes: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// How many changes there are so far.
    pub(super) fn count(&self) -> usize {
        self.changes.len()
    }

    /// The text with all changes. Changes at the same position keep the order in which they were added.
    pub(super) fn apply(mut self) -> String {
        self.changes.sort_by_key(|change| (change.at.start, change.is_entry, change.at.end));
        let mut out = String::with_capacity(self.text.len() + 4096);
        let mut from = 0;
        for Change { at, new, .. } in &self.changes {
            out.push_str(self.text.get(from..at.start).unwrap_or_default());
            out.push_str(new);
            from = from.max(at.end);
        }
        out.push_str(self.text.get(from..).unwrap_or_default());
        out
    }

    /// How far the list under `key` is indented from its key.
    pub(super) fn step(&self, mapping: &Node, key: &str) -> usize {
        let entry = mapping.entries().iter().find(|(known, _)| known.text() == Some(key));
        let first = entry.and_then(|(known, list)| Some((known, self.dash(list.items().first()?).ok()?)));
        first.map_or(0, |(known, dash)| self.column(dash).saturating_sub(self.column(known.start)))
    }

    /// Adds items to the list under `key` of `mapping`. A missing list is created before `neighbour`, or wherever there
    /// is room. `step` is how far lists are indented from their keys.
    pub(super) fn add(
        &mut self,
        mapping: &Node,
        key: &str,
        items: &[Value],
        at: At,
        neighbour: Option<&str>,
        step: usize,
    ) -> Result<(), NoPlace> {
        let Some((known, list)) = mapping.entries().iter().find(|(known, _)| known.text() == Some(key))
        else {
            return self.add_entry(mapping, key, &Value::Array(items.to_vec()), neighbour, step);
        };
        match &list.kind {
            Kind::Sequence(present, Style::Flow(open)) => {
                let new: Vec<_> = items.iter().map(Value::to_string).collect();
                let new = new.join(", ");
                match (present.last(), at) {
                    (None, _) => self.insert(*open, new),
                    (Some(_), At::Start) => self.insert(*open, format!("{new}, ")),
                    (Some(last), At::End) => self.insert(last.end, format!(", {new}")),
                }
                Ok(())
            }
            Kind::Sequence(present, Style::Block) => {
                let (Some(first), Some(last)) = (present.first(), present.last()) else {
                    return Err(NoPlace { line: list.line, node: "this list" });
                };
                let column = self.column(self.dash(first)?);
                let lines = self.lines(items, column, step);
                match at {
                    // Above comments, which belong to the item below them.
                    At::Start => self.insert_lines(self.next_line(known.end), lines),
                    At::End => self.insert_lines(self.line_after(last)?, lines),
                }
                Ok(())
            }
            _ if list.is_null() && list.start == list.end => {
                if matches!(mapping.kind, Kind::Mapping(_, Style::Flow(_))) {
                    return Err(NoPlace { line: list.line, node: "this empty value" });
                }
                let lines = self.lines(items, self.column(known.start) + step, step);
                self.insert_lines(self.next_line(known.end), lines);
                Ok(())
            }
            _ if list.is_null() => {
                let new = Value::Array(items.to_vec()).to_string();
                self.change(list.start..list.end, new);
                Ok(())
            }
            _ => Err(NoPlace { line: list.line, node: "a value that is not a list" }),
        }
    }

    /// Adds an entry whose key is missing.
    pub(super) fn add_entry(
        &mut self,
        mapping: &Node,
        key: &str,
        value: &Value,
        neighbour: Option<&str>,
        step: usize,
    ) -> Result<(), NoPlace> {
        let Kind::Mapping(entries, style) = &mapping.kind else {
            return Err(NoPlace { line: mapping.line, node: "a value that is not a mapping" });
        };
        if let Style::Flow(open) = style {
            let comma = if entries.is_empty() { "" } else { ", " };
            self.insert(*open, format!("{}: {value}{comma}", Value::from(key)));
            return Ok(());
        }
        let no_place = NoPlace { line: mapping.line, node: "this mapping" };
        let (Some((first, _)), Some((_, last))) = (entries.first(), entries.last()) else {
            return Err(no_place);
        };
        let column = self.column(first.start);
        let lines = render::entry(key, value, column, step).replace('\n', self.end_of_line);
        // After all others, or before its neighbour. The lines after a text block may belong to it.
        let is_block = matches!(&last_leaf(last).kind, Kind::Scalar(scalar) if scalar.is_block);
        let alone = |known: &&(Node, Node)| self.column(known.0.start) == self.indent(known.0.start);
        let before = match neighbour {
            Some(neighbour) => {
                entries.iter().filter(alone).find(|(known, _)| known.text() == Some(neighbour))
            }
            None if is_block => entries.iter().rfind(alone),
            None => None,
        };
        if let Some((before, _)) = before {
            let at = self.above_comments(before.start);
            self.changes.push(Change { at: at..at, is_entry: true, new: lines });
        } else {
            self.insert_lines(self.line_after(last)?, lines);
        }
        Ok(())
    }

    /// Replaces an item of a list.
    pub(super) fn replace(
        &mut self,
        list: &Node,
        index: usize,
        new: &Value,
        step: usize,
    ) -> Result<(), NoPlace> {
        let Some(item) = list.items().get(index) else { return Ok(()) };
        if let Kind::Sequence(_, Style::Flow(_)) = list.kind {
            self.change(item.start..item.end, new.to_string());
            return Ok(());
        }
        let column = self.column(self.dash(item)?);
        let lines = self.lines(std::slice::from_ref(new), column, step);
        let range = self.whole_lines(item)?;
        // A last line without a newline does not get one.
        let keeps_end = self.text.get(range.clone()).is_some_and(|old| old.ends_with('\n'));
        let lines = if keeps_end { lines } else { lines.trim_end().to_owned() };
        self.change(range, lines);
        Ok(())
    }

    /// Removes items from their list; `gone` holds their indexes, in order.
    pub(super) fn remove(&mut self, list: &Node, gone: &[usize]) -> Result<(), NoPlace> {
        let all = list.items().iter().enumerate();
        let gone_items = all.clone().filter(|(index, _)| gone.contains(index));
        let Kind::Sequence(items, Style::Flow(open)) = &list.kind else {
            for (_, item) in gone_items {
                let lines = self.whole_lines(item)?;
                self.change(lines, String::new());
            }
            return Ok(());
        };
        // An item is removed with the comma after it; those after the last one that stays, with the comma before them.
        let (Some(last), false) = (items.last(), gone.is_empty()) else { return Ok(()) };
        let kept = all.rev().find(|(index, _)| !gone.contains(index));
        for (index, item) in gone_items.filter(|(index, _)| kept.is_some_and(|(kept, _)| kept > *index)) {
            let end = items.get(index + 1).map_or(item.end, |next| next.start);
            self.change(item.start..end, String::new());
        }
        let (from, to) = kept.map_or((*open, list.end - 1), |(_, kept)| (kept.end, last.end));
        self.change(from..to, String::new());
        Ok(())
    }

    fn change(&mut self, at: Range<usize>, new: String) {
        self.changes.push(Change { at, is_entry: false, new });
    }

    fn insert(&mut self, at: usize, new: String) {
        self.change(at..at, new);
    }

    /// Inserts whole lines at the start of a line, or after a last line without a newline.
    fn insert_lines(&mut self, at: usize, lines: String) {
        let is_line_start = at == 0 || self.text.get(..at).is_some_and(|before| before.ends_with('\n'));
        if is_line_start {
            self.insert(at, lines);
        } else {
            let lines = format!("{}{}", self.end_of_line, lines.trim_end_matches(['\r', '\n']));
            self.insert(at, lines);
        }
    }

    /// `items` as lines of a list with its dashes in `column`.
    fn lines(&self, items: &[Value], column: usize, step: usize) -> String {
        render::items(items, column, step).replace('\n', self.end_of_line)
    }

    /// The lines of an item of a block list.
    fn whole_lines(&self, item: &Node) -> Result<Range<usize>, NoPlace> {
        Ok(self.line_start(self.dash(item)?)..self.line_after(item)?)
    }

    /// The position of the dash before an item, which has to be the first character on its line.
    fn dash(&self, item: &Node) -> Result<usize, NoPlace> {
        let before = self.text.get(..item.start).unwrap_or_default().trim_end();
        let dash = before.len().saturating_sub(1);
        if before.ends_with('-') && self.column(dash) == self.indent(dash) {
            Ok(dash)
        } else {
            Err(NoPlace { line: item.line, node: "this list" })
        }
    }

    /// The start of the line after all lines of `node`.
    fn line_after(&self, node: &Node) -> Result<usize, NoPlace> {
        let last = last_leaf(node);
        let Kind::Scalar(scalar) = &last.kind else { return Ok(self.next_line(last.end)) };
        if !scalar.is_block {
            return Ok(self.next_line(last.end));
        }
        // It ends with its own text, with empty lines, or with the blanks before the next token.
        let start = self.line_start(last.end);
        let is_blank = self.text.get(start..last.end).is_some_and(|line| line.trim().is_empty());
        let next = if is_blank && start > last.start { start } else { self.next_line(last.end) };
        if next == self.text.len() && !self.text.ends_with('\n') {
            return Err(NoPlace {
                line: last.line,
                node: "a text block that ends the file without a newline",
            });
        }
        Ok(next)
    }

    /// The start of the comment lines above `at` in the same column; of the line of `at` if there are none.
    fn above_comments(&self, at: usize) -> usize {
        let column = self.column(at);
        let mut start = self.line_start(at);
        while let Some(before) = self.text.get(..start).filter(|before| !before.is_empty()) {
            let above = self.line_start(before.len() - 1);
            let line = self.text.get(above..start).unwrap_or_default();
            let is_comment = line.trim_start_matches(' ').starts_with('#');
            if !is_comment || line.len() - line.trim_start_matches(' ').len() != column {
                break;
            }
            start = above;
        }
        start
    }

    fn line_start(&self, at: usize) -> usize {
        self.text.get(..at).and_then(|before| before.rfind('\n')).map_or(0, |newline| newline + 1)
    }

    fn next_line(&self, at: usize) -> usize {
        let newline = self.text.get(at..).and_then(|rest| rest.find('\n'));
        newline.map_or(self.text.len(), |newline| at + newline + 1)
    }

    /// The column of `at`, from 0. Only spaces and dashes, of one byte each, stand before indented nodes.
    fn column(&self, at: usize) -> usize {
        at - self.line_start(at)
    }

    /// The number of spaces at the start of the line of `at`.
    fn indent(&self, at: usize) -> usize {
        let line = self.text.get(self.line_start(at)..).unwrap_or_default();
        line.len() - line.trim_start_matches(' ').len()
    }
}

fn last_leaf(node: &Node) -> &Node {
    let last = match &node.kind {
        Kind::Sequence(items, Style::Block) => items.last(),
        // A key without a value is its own last leaf.
        Kind::Mapping(entries, Style::Block) => {
            entries.last().map(|(key, value)| if value.end <= key.end { key } else { value })
        }
        _ => None,
    };
    last.map_or(node, last_leaf)
}
