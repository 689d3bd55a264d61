//! The options for files that the agent writes.

use std::path::PathBuf;
use std::time::Duration;

use super::args::RunArgs;
use super::parse_mode;
use crate::export::output::{Hook, OutputSettings};
use crate::options::Reader;
use crate::source::issuer::StateDir;

/// The files for other programs.
pub(super) fn output(r: &mut Reader<'_>, args: &RunArgs) -> Option<OutputSettings> {
    let directory = r.text("output-dir", &args.output_dir, &["OUTPUT_CERTS"]);
    let key_mode = r.parsed("output-key-mode", &args.output_key_mode, &[], parse_mode);
    let cert_mode = r.parsed("output-cert-mode", &args.output_cert_mode, &[], parse_mode);
    let command = r.text("output-hook", &args.output_hook, &[]);
    let least = Duration::from_millis(100);
    let timeout = r.duration("output-hook-timeout", &args.output_hook_timeout, &[], least);
    if directory.is_missing() && command.value.is_some() {
        r.mistake(format!("{} needs a directory to write: --output-dir DIR", command.from));
    }
    let directory = directory.value?;
    let timeout = timeout.or(Duration::from_secs(30));
    Some(OutputSettings {
        // Absolute: the hook may run in another working directory.
        directory: absolute(directory),
        key_mode: key_mode.or(0o600_u32),
        cert_mode: cert_mode.or(0o644_u32),
        hook: command.value.map(|command| Hook { command: command.into(), timeout }),
    })
}

/// The directory for what is kept across restarts.
pub(super) fn state(r: &mut Reader<'_>, args: &RunArgs) -> Option<StateDir> {
    let directory = r.text("state-dir", &args.state_dir, &[]).value?;
    Some(StateDir::new(absolute(directory)))
}

fn absolute(path: String) -> PathBuf {
    std::path::absolute(&path).unwrap_or_else(|_| path.into())
}
