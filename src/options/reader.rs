//! Looks options up on their three levels, and collects mistakes and notes.

use std::fmt;
use std::time::Duration;

use super::{ConfigErrors, Environment, Level, Setting, parse_duration, parse_switch};

/// Reads options, and collects what is wrong with them.
#[derive(Debug)]
pub struct Reader<'a> {
    environment: &'a Environment,
    mistakes: Vec<String>,
    notes: Vec<String>,
}

impl<'a> Reader<'a> {
    pub fn new(environment: &'a Environment) -> Self {
        Self { environment, mistakes: Vec::new(), notes: Vec::new() }
    }

    /// Adds a mistake to the report: the agent does not start.
    pub fn mistake(&mut self, mistake: impl Into<String>) {
        self.mistakes.push(mistake.into());
    }

    /// Adds a warning about options that are valid.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// The notes so far.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// `value`, unless there are mistakes.
    pub fn finish<T>(self, value: T) -> Result<T, ConfigErrors> {
        if self.mistakes.is_empty() { Ok(value) } else { Err(ConfigErrors(self.mistakes)) }
    }

    /// A variable without a flag.
    pub fn variable(&self, name: &str) -> Option<&'a str> {
        self.environment.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Variables whose names start with `prefix`.
    pub fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let prefix = prefix.to_owned();
        let all = self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        all.filter(move |(name, _)| name.starts_with(&prefix))
    }

    /// The option `flag` as text: typed, else `ATTACHE_<FLAG>`, else the first of `others`. An empty variable counts
    /// as not set: manifests often leave them empty.
    pub fn text(&mut self, flag: &str, typed: &Option<String>, others: &[&str]) -> Setting<String> {
        if let Some(value) = typed {
            let from = format!("--{flag}");
            if value.is_empty() {
                self.mistake(format!("{from} is empty: give it a value, or leave it out"));
                return Setting { from, is_invalid: true, ..Setting::unset() };
            }
            let (value, level) = (Some(value.clone()), Some(Level::Flag));
            return Setting { value, level, from, is_invalid: false };
        }
        let own = format!("ATTACHE_{}", flag.to_ascii_uppercase().replace('-', "_"));
        let mut names = std::iter::once(own.as_str()).chain(others.iter().copied());
        let Some((name, value)) = names.find_map(|name| Some((name, self.variable(name)?))) else {
            return Setting::unset();
        };
        let level = if name.starts_with("ATTACHE_") { Level::Attache } else { Level::Istio };
        let (value, level) = (Some(value.to_owned()), Some(level));
        Setting { value, level, from: name.to_owned(), is_invalid: false }
    }

    /// The option parsed into a `T`.
    pub fn parsed<T, E: fmt::Display>(
        &mut self,
        flag: &str,
        typed: &Option<String>,
        others: &[&str],
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Setting<T> {
        let Setting { value, level, from, is_invalid } = self.text(flag, typed, others);
        let Some(text) = value else { return Setting { value: None, level, from, is_invalid } };
        let named = format!("{from} {text}");
        match parse(&text) {
            Ok(value) => Setting { value: Some(value), level, from: named, is_invalid },
            Err(error) => {
                self.mistake(format!("{from}: {error}"));
                Setting { value: None, level, from: named, is_invalid: true }
            }
        }
    }

    /// An option that can be repeated; in the environment its values are separated by `separator`.
    pub fn list<T, E: fmt::Display>(
        &mut self,
        flag: &str,
        typed: &[String],
        others: &[&str],
        separator: char,
        mut parse: impl FnMut(&str) -> Result<T, E>,
    ) -> Setting<Vec<T>> {
        let (texts, level, from) = if typed.is_empty() {
            let Setting { value, level, from, is_invalid } = self.text(flag, &None, others);
            let Some(text) = value else { return Setting { value: None, level, from, is_invalid } };
            let texts: Vec<_> = text.split(separator).map(|one| one.trim().to_owned()).collect();
            (texts, level, from)
        } else {
            // No address or number contains a comma, but a path may well contain a colon.
            let split = |text: &String| match separator {
                ',' => text.split(',').map(|one| one.trim().to_owned()).collect(),
                _ => vec![text.clone()],
            };
            (typed.iter().flat_map(split).collect(), Some(Level::Flag), format!("--{flag}"))
        };
        let named = format!("{from} {}", texts.join(&separator.to_string()));
        let mut values = Vec::new();
        for text in &texts {
            match parse(text) {
                Ok(value) => values.push(value),
                Err(error) => self.mistake(format!("{from}: {error}")),
            }
        }
        let is_invalid = values.len() < texts.len();
        Setting { value: (!is_invalid).then_some(values), level, from: named, is_invalid }
    }

    /// The option as a duration of `least` or more.
    pub fn duration(
        &mut self,
        flag: &str,
        typed: &Option<String>,
        others: &[&str],
        least: Duration,
    ) -> Setting<Duration> {
        self.parsed(flag, typed, others, |text| match parse_duration(text)? {
            value if value < least => Err(format!("{text:?} is too short: {least:?} is the least")),
            value => Ok(value),
        })
    }

    /// A flag without a value; in the environment `true` or `false`.
    pub fn switch(&mut self, flag: &str, typed: bool, others: &[&str]) -> Setting<bool> {
        if typed {
            let from = format!("--{flag}");
            return Setting { value: Some(true), level: Some(Level::Flag), from, is_invalid: false };
        }
        self.parsed(flag, &None, others, parse_switch)
    }
}
