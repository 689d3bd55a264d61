//! Looks an option up on its three levels, and collects mistakes.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The environment's variables.
pub type Environment = BTreeMap<String, String>;

/// Everything that is wrong with the options.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigErrors(pub Vec<String>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(all) = self;
        match all.as_slice() {
            [one] => write!(f, "{one}"),
            all => {
                write!(f, "{} mistakes in the options:", all.len())?;
                all.iter().try_for_each(|mistake| write!(f, "\n  - {mistake}"))
            }
        }
    }
}

/// Reads `24h`, `90s`, `100ms`, and Go's `24h0m0s` and `1.5h`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    /// Longer ones would leave what a clock can show.
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    let duration = humantime::parse_duration(text).ok().filter(|duration| *duration <= LONGEST);
    duration.ok_or_else(|| format!("{text:?} is not a duration; the shape is 24h, 90s, 100ms or 1h30m"))
}

/// Reads `true`, `false`, and what Go takes for them.
pub(super) fn parse_switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "t" => Ok(true),
        "false" | "0" | "f" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// Where an option was found, the strongest last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Istio,
    Attache,
    Flag,
}

/// What became of one option.
#[derive(Clone, Debug)]
pub(super) struct Found<T> {
    /// None where nobody set it, or it was wrong.
    pub(super) value: Option<T>,
    pub(super) level: Option<Level>,
    /// What was set, as the user knows it: `--ca none`, `CA_ADDR`.
    pub(super) from: String,
    pub(super) was_wrong: bool,
}

impl<T> Found<T> {
    /// On which level it was set, and as what.
    pub(super) fn set(&self) -> (Option<Level>, &str) {
        (self.level, &self.from)
    }

    pub(super) fn or(self, default: impl Into<T>) -> T {
        self.value.unwrap_or_else(|| default.into())
    }
}

pub(super) struct Reader<'a> {
    environment: &'a Environment,
    mistakes: Vec<String>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(environment: &'a Environment) -> Self {
        Self { environment, mistakes: Vec::new() }
    }

    pub(super) fn mistake(&mut self, mistake: String) {
        self.mistakes.push(mistake);
    }

    pub(super) fn finish<T>(self, value: T) -> Result<T, ConfigErrors> {
        if self.mistakes.is_empty() { Ok(value) } else { Err(ConfigErrors(self.mistakes)) }
    }

    /// A variable that no flag stands for.
    pub(super) fn variable(&self, name: &str) -> Option<&'a str> {
        self.environment.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Variables whose names start with `prefix`.
    pub(super) fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let prefix = prefix.to_owned();
        let all = self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        all.filter(move |(name, _)| name.starts_with(&prefix))
    }

    /// The option `flag` as text: typed, else `ATTACHE_<FLAG>`, else the first of `others`. A variable that is
    /// empty counts as not set: manifests often leave them so.
    pub(super) fn text(&mut self, flag: &str, typed: &Option<String>, others: &[&str]) -> Found<String> {
        if let Some(value) = typed {
            let from = format!("--{flag}");
            if value.is_empty() {
                self.mistake(format!("{from} is empty: give it a value, or leave it out"));
                return Found { value: None, level: None, from, was_wrong: true };
            }
            return Found { value: Some(value.clone()), level: Some(Level::Flag), from, was_wrong: false };
        }
        let own = format!("ATTACHE_{}", flag.to_ascii_uppercase().replace('-', "_"));
        let mut names = std::iter::once(own.as_str()).chain(others.iter().copied());
        let Some((name, value)) = names.find_map(|name| Some((name, self.variable(name)?))) else {
            return Found { value: None, level: None, from: String::new(), was_wrong: false };
        };
        let level = if name.starts_with("ATTACHE_") { Level::Attache } else { Level::Istio };
        Found { value: Some(value.to_owned()), level: Some(level), from: name.to_owned(), was_wrong: false }
    }

    /// The option made into a `T`.
    pub(super) fn parsed<T, E: fmt::Display>(
        &mut self,
        flag: &str,
        typed: &Option<String>,
        others: &[&str],
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Found<T> {
        let Found { value, level, from, was_wrong } = self.text(flag, typed, others);
        let Some(text) = value else { return Found { value: None, level, from, was_wrong } };
        let named = format!("{from} {text}");
        match parse(&text) {
            Ok(value) => Found { value: Some(value), level, from: named, was_wrong },
            Err(error) => {
                self.mistake(format!("{from}: {error}"));
                Found { value: None, level, from: named, was_wrong: true }
            }
        }
    }

    /// An option that may be there several times; in the environment with `separator` between its values.
    pub(super) fn list<T, E: fmt::Display>(
        &mut self,
        flag: &str,
        typed: &[String],
        others: &[&str],
        separator: char,
        mut parse: impl FnMut(&str) -> Result<T, E>,
    ) -> Found<Vec<T>> {
        let (texts, level, from) = if typed.is_empty() {
            let Found { value, level, from, was_wrong } = self.text(flag, &None, others);
            let Some(text) = value else { return Found { value: None, level, from, was_wrong } };
            let texts: Vec<_> = text.split(separator).map(|one| one.trim().to_owned()).collect();
            (texts, level, from)
        } else {
            // No address and no number has a comma in it, but a folder may well have a colon.
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
        let was_wrong = values.len() < texts.len();
        Found { value: (!was_wrong).then_some(values), level, from: named, was_wrong }
    }

    /// The option as a duration of `least` or more.
    pub(super) fn duration(
        &mut self,
        flag: &str,
        typed: &Option<String>,
        others: &[&str],
        least: Duration,
    ) -> Found<Duration> {
        self.parsed(flag, typed, others, |text| match parse_duration(text)? {
            value if value < least => Err(format!("{text:?} is too short: {least:?} is the least")),
            value => Ok(value),
        })
    }

    /// A flag without a value; in the environment `true` or `false`.
    pub(super) fn switch(&mut self, flag: &str, typed: bool, others: &[&str]) -> Found<bool> {
        if typed {
            let from = format!("--{flag}");
            return Found { value: Some(true), level: Some(Level::Flag), from, was_wrong: false };
        }
        self.parsed(flag, &None, others, parse_switch)
    }
}
