//! Looks options up on their levels, and collects mistakes and notes.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::{ConfigErrors, Environment, Level, OptionsFile, Setting, parse_duration, parse_switch};

/// Reads options, and collects what is wrong with them.
#[derive(Debug)]
pub struct Reader<'a> {
    environment: &'a Environment,
    file: Option<&'a OptionsFile>,
    /// What describes the workload whose options these are.
    workload: Option<&'a OptionsFile>,
    /// Options that the file sets in vain, because a flag or a variable sets them.
    overridden: BTreeSet<String>,
    mistakes: Vec<String>,
    notes: Vec<String>,
}

#[cfg(test)]
thread_local! {
    /// The options that were looked up in an options file on this thread.
    pub(crate) static LOOKED_UP: std::cell::RefCell<BTreeSet<String>> = const { std::cell::RefCell::new(BTreeSet::new()) };
}

/// What sets an option, as the user knows it: a flag, a variable, or a line of the options file.
#[derive(Clone, Debug)]
pub struct Place {
    name: String,
    /// Follows name and value; empty unless it is a line.
    line: String,
}

impl Place {
    fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), line: String::new() }
    }

    /// The values of `flag` in `file`, and its line there.
    fn in_file<'a>(file: &'a OptionsFile, flag: &str) -> Option<(Self, &'a [String])> {
        let option = file.get(flag)?;
        let line = format!(" ({})", file.place(option.line));
        Some((Self { name: flag.to_owned(), line }, &option.values))
    }

    /// With its value: `--ca none`, `CA_PROVIDER none`, `ca none (line 3 of /etc/attache.toml)`.
    pub fn with(&self, value: &str) -> String {
        format!("{} {value}{}", self.name, self.line)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name, self.line)
    }
}

/// An option that is set.
struct Found {
    values: Vec<String>,
    level: Level,
    place: Place,
}

/// An option with one value, as it was found.
#[derive(Default)]
struct Text {
    /// None if the option is not set, or is empty.
    value: Option<String>,
    level: Option<Level>,
    /// What sets it, without and with the value.
    from: String,
    named: String,
    is_invalid: bool,
}

/// An option with several values, as it was found.
struct List {
    texts: Vec<String>,
    level: Level,
    /// What sets it, without and with the values.
    from: String,
    named: String,
}

impl<'a> Reader<'a> {
    pub fn new(environment: &'a Environment, file: Option<&'a OptionsFile>) -> Self {
        let (overridden, mistakes, notes) = Default::default();
        Self { environment, file, workload: None, overridden, mistakes, notes }
    }

    /// The same for the workload that `description` describes.
    pub fn for_workload(self, description: Option<&'a OptionsFile>) -> Self {
        Self { workload: description, ..self }
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

    /// The values of the option `flag` in the options file, and its line there.
    pub fn in_file(&self, flag: &str) -> Option<(Place, &'a [String])> {
        let file = self.file?;
        #[cfg(test)]
        LOOKED_UP.with_borrow_mut(|looked_up| looked_up.insert(flag.to_owned()));
        Place::in_file(file, flag)
    }

    /// Remembers that the options file sets `flag` in vain, if it does.
    fn override_file(&mut self, flag: &str) {
        if self.file.is_some_and(|file| file.get(flag).is_some()) {
            self.overridden.insert(flag.to_owned());
        }
    }

    /// Notes that the options file sets `flag` in vain, because `other` is set, an option or a variable of Istio's
    /// agent.
    pub fn note_overridden(&mut self, flag: &str, other: &str) {
        let Some((place, _)) = self.in_file(flag) else { return };
        self.override_file(flag);
        let note = format!("{place} is not used: {other} is set, and wins over the options file");
        if !self.notes.contains(&note) {
            self.note(note);
        }
    }

    /// The options file with what is in force.
    pub fn file_in_force(&self) -> Option<OptionsFile> {
        self.file.map(|file| file.clone().without(&self.overridden))
    }

    /// The option `flag`: typed, else `ATTACHE_<FLAG>`, else the first of `others`, else from the options file. An empty
    /// variable counts as not set: manifests often leave them empty.
    fn find(&mut self, flag: &str, typed: &[String], others: &[&str]) -> Option<Found> {
        if let Some((place, values)) = self.workload.and_then(|file| Place::in_file(file, flag)) {
            return Some(Found { values: values.to_vec(), level: Level::Workload, place });
        }
        if !typed.is_empty() {
            self.override_file(flag);
            let place = Place::new(format!("--{flag}"));
            return Some(Found { values: typed.to_vec(), level: Level::Flag, place });
        }
        let own = format!("ATTACHE_{}", flag.to_ascii_uppercase().replace('-', "_"));
        let mut names = std::iter::once(own.as_str()).chain(others.iter().copied());
        if let Some((name, value)) = names.find_map(|name| Some((name, self.variable(name)?))) {
            let level = if name.starts_with("ATTACHE_") { Level::Attache } else { Level::Istio };
            if level == Level::Istio {
                self.note_overridden(flag, name);
            }
            self.override_file(flag);
            return Some(Found { values: vec![value.to_owned()], level, place: Place::new(name) });
        }
        let (place, values) = self.in_file(flag)?;
        Some(Found { values: values.to_vec(), level: Level::File, place })
    }

    /// The option as text.
    #[inline(never)]
    pub fn text(&mut self, flag: &str, typed: &Option<String>, others: &[&str]) -> Setting<String> {
        let Text { value, level, from, is_invalid, .. } = self.find_text(flag, typed, others);
        Setting { value, level, from, is_invalid }
    }

    // Not inlined into what is generic: there are many callers.
    #[inline(never)]
    fn find_text(&mut self, flag: &str, typed: &Option<String>, others: &[&str]) -> Text {
        let Some(Found { values, level, place }) = self.find(flag, typed.as_slice(), others) else {
            return Text::default();
        };
        let from = place.to_string();
        match values.into_iter().next().filter(|value| !value.is_empty()) {
            Some(value) => {
                let named = place.with(&value);
                Text { value: Some(value), level: Some(level), from, named, is_invalid: false }
            }
            None => {
                self.mistake(format!("{from} is empty: give it a value, or leave it out"));
                Text { from, is_invalid: true, ..Text::default() }
            }
        }
    }

    #[inline(never)]
    fn invalid(&mut self, from: &str, error: &dyn fmt::Display) {
        self.mistake(format!("{from}: {error}"));
    }

    /// The option parsed into a `T`.
    pub fn parsed<T, E: fmt::Display>(
        &mut self,
        flag: &str,
        typed: &Option<String>,
        others: &[&str],
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Setting<T> {
        let Text { value, level, from, named, is_invalid } = self.find_text(flag, typed, others);
        let Some(text) = value else { return Setting { value: None, level, from, is_invalid } };
        match parse(&text) {
            Ok(value) => Setting { value: Some(value), level, from: named, is_invalid: false },
            Err(error) => {
                self.invalid(&from, &error);
                Setting { value: None, level, from: named, is_invalid: true }
            }
        }
    }

    #[inline(never)]
    fn find_list(&mut self, flag: &str, typed: &[String], others: &[&str], separator: char) -> Option<List> {
        let Found { values, level, place } = self.find(flag, typed, others)?;
        // No address or number contains a comma, but a path may well contain a colon.
        let is_split = separator == ',' || matches!(level, Level::Attache | Level::Istio);
        let split = |text: &String| match is_split {
            true => text.split(separator).map(|one| one.trim().to_owned()).collect(),
            false => vec![text.clone()],
        };
        let texts: Vec<String> = values.iter().flat_map(split).collect();
        let named = place.with(&texts.join(&separator.to_string()));
        Some(List { texts, level, from: place.to_string(), named })
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
        let Some(List { texts, level, from, named }) = self.find_list(flag, typed, others, separator) else {
            return Setting::unset();
        };
        let mut values = Vec::new();
        for text in &texts {
            match parse(text) {
                Ok(value) => values.push(value),
                Err(error) => self.invalid(&from, &error),
            }
        }
        let is_invalid = values.len() < texts.len();
        Setting { value: (!is_invalid).then_some(values), level: Some(level), from: named, is_invalid }
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

    /// A flag without a value; in the environment and in the options file `true` or `false`.
    pub fn switch(&mut self, flag: &str, typed: bool, others: &[&str]) -> Setting<bool> {
        if typed {
            self.override_file(flag);
            let from = format!("--{flag}");
            return Setting { value: Some(true), level: Some(Level::Flag), from, is_invalid: false };
        }
        self.parsed(flag, &None, others, parse_switch)
    }
}
