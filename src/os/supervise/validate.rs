//! Has Envoy check its configuration, in a process of its own.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::time::timeout;

use super::launch;
use crate::base::text;
use crate::os::command::CapturedOutput;
use crate::os::command::orphans::OwnChild;

/// How long it may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of what it prints that are looked at.
const OUTPUT_BYTES: usize = 1 << 20;

/// Envoy's verdict; an error has its words. A check that crashes says nothing about the configuration.
pub(super) async fn validate(words: &[String]) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("checking it failed: {error}");
    let (mut output, writer) = CapturedOutput::with_limit(OUTPUT_BYTES).map_err(failed)?;
    let spawned = launch::spawn(words, |command| {
        command.stdout(Stdio::null()).stderr(writer);
    });
    let mut child = spawned.map_err(failed)?;
    let _own = OwnChild::new(&child);
    let group = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
    let exited = async {
        tokio::select! {
            status = child.wait() => status,
            never = output.read_forever() => match never {},
        }
    };
    let Ok(status) = timeout(PATIENCE, exited).await else {
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait().await;
        return Err(format!("the check did not end within {} s", PATIENCE.as_secs()));
    };
    match status.map_err(failed)?.code() {
        Some(0) | None => Ok(()),
        Some(code) => {
            let printed = output.into_bytes().unwrap_or_default();
            Err(match words_of(&String::from_utf8_lossy(&printed)) {
                words if words.is_empty() => format!("exit status {code} without a message"),
                words => words,
            })
        }
    }
}

/// Envoy's own words, for the log.
pub(super) fn words_of(printed: &str) -> String {
    text::sanitize_for_log(verdict(printed))
}

/// The last line that is no log line: Envoy prints why it exits.
fn verdict(printed: &str) -> &str {
    let mut lines = printed.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let last = lines.clone().next().unwrap_or_default();
    lines.find(|line| !line.starts_with('[')).unwrap_or(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envoys_own_words_are_found_among_its_log() {
        let printed =
            "[2026][1][info][main] [a:1] x\n[2026][1][critical][main] [a:2] error\nno such field: 'a'\n\n";
        assert_eq!(verdict(printed), "no such field: 'a'");
        assert_eq!(verdict("[1] only\n[2] log lines\n"), "[2] log lines");
        assert_eq!(verdict(""), "");
    }
}
