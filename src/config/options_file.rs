//! The options file: which one it is, and its content.

use std::path::Path;
use std::time::Duration;

use clap::{Args as _, Command};

use super::args::RunArgs;
use crate::base::limits;
use crate::fs::{disk, file};
use crate::options::{ConfigErrors, Environment, OptionsFile, Reader};

/// How long its disk may take to answer: there is no start without it.
const PATIENCE: Duration = Duration::from_secs(5);

/// The options in the file that `--config` or `ATTACHE_CONFIG` names, and the mistakes in it.
pub(super) fn read(
    args: &RunArgs,
    environment: &Environment,
) -> Result<Option<(OptionsFile, Vec<String>)>, ConfigErrors> {
    read_for(&args.config, environment, &|| RunArgs::augment_args(Command::new("attache run")))
}

/// The same for the command that has the options `known`; `typed` is the flag.
pub(super) fn read_for(
    typed: &Option<String>,
    environment: &Environment,
    known: &dyn Fn() -> Command,
) -> Result<Option<(OptionsFile, Vec<String>)>, ConfigErrors> {
    let mut reader = Reader::new(environment, None);
    let setting = reader.text("config", typed, &[]);
    let from = setting.from.clone();
    let Some(path) = reader.finish(setting.value)? else { return Ok(None) };
    let read = {
        let path = path.clone();
        disk::attempt(PATIENCE, move || file::read(Path::new(&path), limits::OPTIONS_FILE_BYTES))
    };
    let failed =
        |reason: String| ConfigErrors(vec![format!("reading the options file {path} failed: {reason}")]);
    match read {
        Some(Ok(content)) => OptionsFile::parse(Path::new(&path), &content, &known()).map(Some),
        Some(Err(error)) => {
            Err(failed(format!("{error}; make it readable for the agent's user, or change {from}")))
        }
        None => Err(failed(format!("its file system has not answered within {PATIENCE:?}; change {from}"))),
    }
}

/// The option `name` in the options file of an agent with this environment, for commands that look for that agent.
pub fn agents_option(environment: &Environment, name: &str) -> Option<String> {
    let (file, _) = read(&RunArgs::default(), environment).ok()??;
    file.get(name)?.values.first().cloned()
}

/// The options in `content`, and the mistakes in it.
#[cfg(any(test, fuzzing))]
pub(super) fn parse(path: &Path, content: &[u8]) -> Result<(OptionsFile, Vec<String>), ConfigErrors> {
    OptionsFile::parse(path, content, &RunArgs::augment_args(Command::new("attache run")))
}
