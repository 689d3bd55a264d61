//! The options file: TOML, whose keys are the options' names.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use clap::{ArgAction, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::ConfigErrors;
use crate::base::text;

/// Mistakes of the TOML itself that are reported: most of them follow from the first.
const SYNTAX_ERRORS: usize = 5;

/// The options that a file sets.
#[derive(Clone, PartialEq, Eq)]
pub struct OptionsFile {
    path: PathBuf,
    options: BTreeMap<String, FileOption>,
}

/// An option as a file sets it.
#[derive(Clone, PartialEq, Eq)]
pub struct FileOption {
    /// One, unless the option is repeatable.
    pub values: Vec<String>,
    pub line: usize,
}

/// The values that an option takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arity {
    Switch,
    One,
    Several,
}

impl OptionsFile {
    /// The options in `content` that `known` has, and the mistakes about others, each with its line. An error holds what
    /// makes the content no TOML.
    pub fn parse(path: &Path, content: &[u8], known: &Command) -> Result<(Self, Vec<String>), ConfigErrors> {
        let mut file = Self { path: path.to_owned(), options: BTreeMap::new() };
        let text = std::str::from_utf8(content).map_err(|error| {
            let line = line_at(content, error.valid_up_to());
            ConfigErrors(vec![format!("{} is not UTF-8", file.place(line))])
        })?;
        let (table, errors) = DeTable::parse_recoverable(text);
        let errors = errors.iter().take(SYNTAX_ERRORS).map(|error| {
            let line = line_at(content, error.span().unwrap_or_default().start);
            format!("{}: {}", file.place(line), text::one_line(error.message()))
        });
        let errors: Vec<_> = errors.collect();
        if !errors.is_empty() {
            return Err(ConfigErrors(errors));
        }
        // Sorted by their lines: the table is sorted by its keys.
        let mut mistakes = BTreeSet::new();
        for (key, value) in table.into_inner() {
            let (line, name) = (line_at(content, key.span().start), key.into_inner());
            match read(known, &name, &value) {
                Ok(values) => drop(file.options.insert(name.into_owned(), FileOption { values, line })),
                Err(reason) => {
                    let shown = text::one_line(&name);
                    mistakes.insert((line, format!("{shown} ({}) {reason}", file.place(line))));
                }
            }
        }
        Ok((file, mistakes.into_iter().map(|(_, mistake)| mistake).collect()))
    }

    /// Options that no file sets: `of` is what they describe. Each counts as a line, in their order.
    pub fn described(of: &Path, options: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let option = |(index, (name, value)): (usize, (&str, String))| {
            (name.to_owned(), FileOption { values: vec![value], line: index + 1 })
        };
        Self { path: of.to_owned(), options: options.into_iter().enumerate().map(option).collect() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn get(&self, option: &str) -> Option<&FileOption> {
        self.options.get(option)
    }

    /// The names of the options in the file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.options.keys().map(String::as_str)
    }

    /// Where an option is set, for people.
    pub fn place(&self, line: usize) -> String {
        format!("line {line} of {}", text::one_line(&self.path.display().to_string()))
    }

    /// The file without these options.
    pub fn without(mut self, options: &BTreeSet<String>) -> Self {
        self.options.retain(|name, _| !options.contains(name));
        self
    }

    /// Takes over from `other` whether and how it sets `option`.
    pub fn adopt(&mut self, option: &str, other: &Self) {
        match other.get(option) {
            Some(found) => drop(self.options.insert(option.to_owned(), found.clone())),
            None => drop(self.options.remove(option)),
        }
    }

    /// The names of the options that `other` sets in another way, or does not set, and of those that only it sets.
    pub fn differences(&self, other: &Self) -> BTreeSet<String> {
        let values = |file: &Self, name: &str| file.get(name).map(|option| option.values.clone());
        let names = self.names().chain(other.names());
        names.filter(|name| values(self, name) != values(other, name)).map(str::to_owned).collect()
    }
}

impl fmt::Debug for OptionsFile {
    /// Without the values: a header may be a credential.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.names().collect();
        f.debug_struct("OptionsFile").field("path", &self.path).field("options", &names).finish()
    }
}

/// The values of the option `name`, or what is wrong with it, as the rest of a sentence.
fn read(known: &Command, name: &str, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, String> {
    let Some(arity) = arity(known, name) else {
        if let DeValue::Table(_) = value.get_ref() {
            return Err("is a section: the file has none, and each option stands at its start".to_owned());
        }
        let hint = suggestion(known, name).map(|known| format!("; did you mean {known}?"));
        return Err(format!("is not an option{}", hint.unwrap_or_default()));
    };
    let values = match (arity, value.get_ref()) {
        (Arity::Switch, DeValue::Boolean(value)) => return Ok(vec![value.to_string()]),
        (Arity::Switch, _) => return Err("takes true or false, without quotes".to_owned()),
        (Arity::Several, DeValue::Array(items)) => items.iter().map(|item| scalar(item.get_ref())).collect(),
        (Arity::One, DeValue::Array(_)) => return Err("takes one value, not a list".to_owned()),
        (_, value) => vec![scalar(value)],
    };
    let values: Vec<_> = values.into_iter().collect::<Result<_, _>>()?;
    if values.is_empty() || values.iter().any(String::is_empty) {
        return Err("is empty: give it a value, or leave it out".to_owned());
    }
    Ok(values)
}

/// None if the file can't set `name`.
fn arity(known: &Command, name: &str) -> Option<Arity> {
    // The file does not name another one. What the help hides is not for this command.
    let is_meant = |arg: &&clap::Arg| arg.get_long() == Some(name) && !arg.is_hide_set();
    let found = known.get_arguments().find(is_meant).filter(|_| name != "config")?;
    match found.get_action() {
        ArgAction::SetTrue => Some(Arity::Switch),
        ArgAction::Set => Some(Arity::One),
        ArgAction::Append => Some(Arity::Several),
        _ => None,
    }
}

fn scalar(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) if text.contains('\0') => Err("contains a NUL character".to_owned()),
        DeValue::String(text) => Ok(text.clone().into_owned()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        _ => Err("takes a text in quotes, written like the flag's value".to_owned()),
    }
}

/// The option whose name is almost `name`, as the command line would suggest it.
fn suggestion(known: &Command, name: &str) -> Option<String> {
    let flag = name.replace('_', "-");
    if arity(known, &flag).is_some() {
        return Some(flag);
    }
    let error = known.clone().try_get_matches_from(["attache", &format!("--{flag}")]).err()?;
    match error.get(ContextKind::SuggestedArg)? {
        ContextValue::String(known) => Some(known.trim_start_matches('-').to_owned()),
        _ => None,
    }
}

/// The number of the line that holds the byte `at`.
fn line_at(content: &[u8], at: usize) -> usize {
    let before = content.get(..at).unwrap_or(content);
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}
