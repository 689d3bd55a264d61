//! The options for files that the agent writes.

mod spec;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::args::RunArgs;
use super::files::resolved;
use super::parse_mode;
use crate::export::output::{DirectorySettings, Format, Hook, OutputSettings, Owner};
use crate::options::{Reader, Setting};
use crate::source::issuer::StateDir;

/// The modes of the files with a key, and of the others, where no option sets them.
const KEY_MODE: u32 = 0o600;
const CERT_MODE: u32 = 0o644;

/// The files for other programs.
pub(super) fn output(r: &mut Reader<'_>, args: &RunArgs) -> Option<OutputSettings> {
    let several = r.list("output", &args.output, &[], ';', spec::parse);
    let plain = plain(r, args, !several.is_missing());
    let is_missing = plain.is_missing() && several.is_missing();
    let directories: Vec<_> = plain.value.into_iter().chain(several.value.unwrap_or_default()).collect();
    check_directories(r, &directories);
    let command = r.text("output-hook", &args.output_hook, &[]);
    let least = Duration::from_millis(100);
    let timeout = r.duration("output-hook-timeout", &args.output_hook_timeout, &[], least);
    if is_missing && command.value.is_some() {
        r.mistake(format!("{} needs a directory to write: --output-dir DIR or --output DIR", command.from));
    }
    let timeout = timeout.or(Duration::from_secs(30));
    let hook = command.value.map(|command| Hook { command: command.into(), timeout });
    (!directories.is_empty()).then_some(OutputSettings { directories, hook })
}

/// `--output-dir` with its own options, beside `--output` if `has_others`.
fn plain(r: &mut Reader<'_>, args: &RunArgs, has_others: bool) -> Setting<DirectorySettings> {
    let directory = r.text("output-dir", &args.output_dir, &["OUTPUT_CERTS"]);
    let key_mode = r.parsed("output-key-mode", &args.output_key_mode, &[], parse_mode);
    let cert_mode = r.parsed("output-cert-mode", &args.output_cert_mode, &[], parse_mode);
    if directory.is_missing() && has_others {
        for (from, key) in [(&key_mode.from, "mode"), (&cert_mode.from, "cert-mode")] {
            if !from.is_empty() {
                r.mistake(format!("{from} is for --output-dir alone: with --output DIR write {key}=MODE"));
            }
        }
    }
    let Setting { value, level, from, is_invalid } = directory;
    let settings = |directory| DirectorySettings {
        option: "--output-dir",
        // Absolute: the hook may run in another working directory.
        directory: absolute(directory),
        format: Format::default(),
        key_mode: key_mode.or(KEY_MODE),
        cert_mode: cert_mode.or(CERT_MODE),
        owner: Owner::default(),
    };
    Setting { value: value.map(settings), level, from, is_invalid }
}

/// Each set of files needs a directory of its own: it is swapped as a whole.
fn check_directories(r: &mut Reader<'_>, directories: &[DirectorySettings]) {
    if directories.len() < 2 {
        return;
    }
    let paths = resolved(directories.iter().map(|it| it.directory.as_path()));
    for (index, path) in paths.iter().enumerate() {
        let is_earlier = paths.iter().take(index).any(|earlier| earlier == path);
        if let Some(it) = directories.get(index).filter(|_| is_earlier) {
            r.mistake(format!(
                "{} {} names a directory for the second time: each output needs a directory of its own",
                it.option,
                it.directory.display()
            ));
        }
    }
}

/// The directory for what is kept across restarts.
pub(super) fn state(r: &mut Reader<'_>, args: &RunArgs) -> Option<StateDir> {
    let directory = r.text("state-dir", &args.state_dir, &[]).value?;
    Some(StateDir::new(absolute(directory)))
}

fn absolute(path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
