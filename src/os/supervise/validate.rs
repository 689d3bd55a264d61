//! Has Envoy check its configuration, in a process of its own.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::time::timeout;

use super::launch;
use crate::base::text;
use crate::os::command::CapturedOutput;
use crate::os::command::orphans::OwnChild;

/// How long it may take while an Envoy runs.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of what it prints that are looked at.
const OUTPUT_BYTES: usize = 1 << 20;
/// Of a long message the beginning and the end are shown: the end of a path names the field.
const HALF: usize = 180;
/// Envoy's log line about a configuration that it refuses.
const REFUSAL: &str = "error initializing configuration '";

/// Envoy's verdict, with its words if it refuses. An error says why there is none. A check that crashes says nothing about the
/// configuration. One that has not ended after `patience` is killed.
pub async fn validate(words: &[String], patience: Duration) -> Result<Result<(), String>, String> {
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
    let Ok(status) = timeout(patience, exited).await else {
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait().await;
        return Err(format!("the check did not end within {} s", patience.as_secs()));
    };
    match status.map_err(failed)?.code() {
        Some(0) | None => Ok(Ok(())),
        Some(code) => {
            let printed = output.into_bytes().unwrap_or_default();
            Ok(Err(match words_of(&String::from_utf8_lossy(&printed)) {
                words if words.is_empty() => format!("exit status {code} without a message"),
                words => words,
            }))
        }
    }
}

/// Envoy's own words, for the log. It may print a whole configuration, keys included.
pub(super) fn words_of(printed: &str) -> String {
    let verdict = verdict(printed);
    if verdict.contains("PRIVATE KEY") {
        return "its message has a private key in it, and is not repeated".to_owned();
    }
    let count = verdict.chars().count();
    if count <= 2 * HALF {
        return text::sanitize_for_log(&verdict);
    }
    let head: String = verdict.chars().take(HALF).collect();
    let tail: String = verdict.chars().skip(count - HALF).collect();
    text::sanitize_for_log(&format!("{head} \u{2026} {tail}"))
}

/// What follows Envoy's last line about its configuration, or else the last line that is no log line: why it exits.
fn verdict(printed: &str) -> String {
    let lines: Vec<_> = printed.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let of_configuration = lines.iter().rposition(|line| line.contains(REFUSAL));
    if let Some((line, rest)) = of_configuration.and_then(|at| lines.get(at..)?.split_first()) {
        let said = line.split_once(REFUSAL).map_or("", |(_, said)| said);
        let said = said.split_once("': ").map_or(said, |(_path, said)| said);
        // A message may have line breaks.
        let more = rest.iter().take_while(|line| !line.starts_with('['));
        return std::iter::once(&said).chain(more).copied().collect::<Vec<_>>().join(" ");
    }
    let own = lines.iter().rev().find(|line| !line.starts_with('[')).or(lines.last());
    own.copied().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envoys_own_words_are_found_among_its_log() {
        let printed =
            "[2026][1][info][main] [a:1] x\n[2026][1][critical][main] [a:2] error\nno such field: 'a'\n\n";
        assert_eq!(verdict(printed), "no such field: 'a'");
        let refused = "[2026][1][critical][main] [a:2] error initializing configuration '/a/b.json': Invalid duration: \
            Expected positive duration:\nseconds: -1\n\n[2026][1][info][main] [a:3] exiting\n";
        assert_eq!(words_of(refused), "Invalid duration: Expected positive duration: seconds: -1");
        let long = format!("error initializing configuration 'x': {}the end", "long ".repeat(200));
        assert!(words_of(&long).ends_with("the end") && words_of(&long).len() < 400);
        let key = "error initializing configuration 'x': {-----BEGIN PRIVATE KEY-----\nMIG";
        assert!(!words_of(key).contains("MIG"));
        assert_eq!(verdict("[1] only\n[2] log lines\n"), "[2] log lines");
        assert_eq!(verdict(""), "");
    }
}
