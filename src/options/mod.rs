//! Options on their four levels: the flag, `ATTACHE_<FLAG>`, the variable that Istio's agent reads, and the options file. On
//! a node, what describes a workload is above them all. The highest level that sets an option wins, and every mistake goes into one report. No I/O: environment and content of
//! the file are inputs.

mod file;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod reader;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

pub use self::file::{FileOption, OptionsFile};
#[cfg(test)]
pub(crate) use self::reader::LOOKED_UP;
pub use self::reader::{Place, Reader};

/// The environment's variables.
pub type Environment = BTreeMap<String, String>;

/// Every mistake in the options.
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

/// The level on which an option is set, the strongest last. The environment describes one process, and many may share a
/// file: so all of it wins over the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    File,
    Istio,
    Attache,
    Flag,
    /// What describes one workload of a node's agent.
    Workload,
}

/// What sets an option: its level, and the flag, variable or line as the user knows it.
pub type SetBy<'a> = (Option<Level>, &'a str);

/// An option as it was found.
#[derive(Clone, Debug)]
pub struct Setting<T> {
    /// None if the option is not set, or its value is invalid.
    pub value: Option<T>,
    pub level: Option<Level>,
    /// The flag, variable or line that sets it, as the user knows it: `--ca none`, `CA_ADDR`.
    pub from: String,
    pub is_invalid: bool,
}

impl<T> Setting<T> {
    /// An option that is not set.
    fn unset() -> Self {
        Self { value: None, level: None, from: String::new(), is_invalid: false }
    }

    pub fn set_by(&self) -> SetBy<'_> {
        (self.level, &self.from)
    }

    /// Set for this agent, rather than for Istio's.
    pub fn is_own(&self) -> bool {
        self.level.is_some_and(|level| level != Level::Istio)
    }

    /// Not set at all, which is another mistake than an invalid value.
    pub fn is_missing(&self) -> bool {
        self.value.is_none() && !self.is_invalid
    }

    pub fn or(self, default: impl Into<T>) -> T {
        self.value.unwrap_or_else(|| default.into())
    }
}

/// Reads `24h`, `90s`, `100ms`, and Go's `24h0m0s` and `1.5h`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    /// Longer ones would exceed what a clock can represent.
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    let duration = humantime::parse_duration(text).ok().filter(|duration| *duration <= LONGEST);
    duration.ok_or_else(|| format!("{text:?} is not a duration; the shape is 24h, 90s, 100ms or 1h30m"))
}

/// Reads `true`, `false`, and the other spellings that Go accepts.
pub fn parse_switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "t" => Ok(true),
        "false" | "0" | "f" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}
