//! Real shells.

use std::path::Path;
use std::time::Instant;

use rustix::process::{Pid, Signal};

use super::*;
use crate::base::limits;
use crate::os::command::TERM_GRACE;

const PATIENCE: Duration = Duration::from_secs(20);

fn hook(command: &str, timeout: Duration) -> Hook {
    Hook { command: command.into(), timeout }
}

/// Waits until the process has exited; a zombie counts as exited.
async fn wait_gone(pid: &str) {
    let stat = format!("/proc/{}/stat", pid.trim());
    timeout(PATIENCE, async {
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("process {pid} is still alive"));
}

#[tokio::test]
async fn the_output_of_a_hook_is_one_line_of_bounded_length() {
    let directory = Path::new("/some/directory");
    let printed = hook("echo one; echo two >&2; echo $ATTACHE_OUTPUT_DIR; cat", PATIENCE)
        .run(&[directory.to_owned()])
        .await;
    assert_eq!(printed.unwrap(), "one; two; /some/directory");
    let failed =
        hook("printf 'bad\\033[1m'; exit 3", PATIENCE).run(&[directory.to_owned()]).await.unwrap_err();
    assert_eq!(
        (failed.to_string().as_str(), failed.label()),
        ("the hook failed with exit status: 3", "failed")
    );
    assert_eq!(failed.output(), "bad\u{fffd}[1m");
    let long =
        hook("head -c 1000000 /dev/zero | tr '\\0' x", PATIENCE).run(&[directory.to_owned()]).await.unwrap();
    assert_eq!(long, "x".repeat(limits::FOREIGN_TEXT));
    let key = "echo before; echo '-----BEGIN EC PRIVATE KEY-----'; echo c2VjcmV0; exit 1";
    let shown = hook(key, PATIENCE).run(&[directory.to_owned()]).await.unwrap_err().output().to_owned();
    assert!(shown.starts_with("before; -----BEGIN EC (a private key"), "{shown}");
    assert!(!shown.contains("c2VjcmV0"), "{shown}");
    assert!(!format!("{:?}", hook("--password s3cret", PATIENCE)).contains("s3cret"));
}

#[tokio::test]
async fn a_background_process_of_a_hook_is_neither_waited_for_nor_killed() {
    let printed = hook("sleep 1000 & echo $!", PATIENCE).run(&["/".into()]).await.unwrap();
    let pid = Pid::from_raw(printed.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_background_process_of_a_hook_can_keep_printing() {
    let directory = tempfile::tempdir().unwrap();
    // More than a pipe buffers, so the agent has to keep reading.
    let command = "(sleep 0.2; head -c 300000 /dev/zero; echo word && echo > \"$ATTACHE_OUTPUT_DIR/ended\") & echo first";
    assert_eq!(hook(command, PATIENCE).run(&[directory.path().to_owned()]).await.unwrap(), "first");
    let exited = async {
        while !directory.path().join("ended").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, exited).await.unwrap();
}

#[tokio::test]
async fn a_hook_that_hangs_is_killed_with_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let pids = directory.path().join("pids");
    let limit = Duration::from_millis(300);
    // One exits on SIGTERM, the other does not.
    for (command, least) in [("", Duration::ZERO), ("trap '' TERM; ", TERM_GRACE)] {
        let command =
            format!("{command}sleep 1000 & echo $! $$ > \"$ATTACHE_OUTPUT_DIR/pids\"; echo waiting; wait");
        let started = Instant::now();
        let error = hook(&command, limit).run(&[directory.path().to_owned()]).await.unwrap_err();
        let took = started.elapsed();
        assert_eq!((error.label(), error.output()), ("timeout", "waiting"));
        assert!(error.to_string().contains("--output-hook-timeout"), "{error}");
        assert!(took >= limit + least && took < limit + least + PATIENCE / 4, "{took:?}");
        for pid in std::fs::read_to_string(&pids).unwrap().split_whitespace() {
            wait_gone(pid).await;
        }
    }
}

#[tokio::test]
async fn a_dropped_hook_is_killed_with_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let pids = directory.path().join("pids");
    let hook = hook("trap '' TERM; sleep 1000 & echo $! $$ > $ATTACHE_OUTPUT_DIR/pids; wait", PATIENCE);
    let is_written = async {
        while !std::fs::read_to_string(&pids).is_ok_and(|pids| pids.ends_with('\n')) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let directories = [directory.path().to_owned()];
    tokio::select! {
        outcome = hook.run(&directories) => panic!("{outcome:?}"),
        () = is_written => {}
    }
    for pid in std::fs::read_to_string(&pids).unwrap().split_whitespace() {
        wait_gone(pid).await;
    }
}

#[tokio::test]
async fn a_hook_that_prints_forever_does_not_block_the_thread() {
    let hook = hook("yes", Duration::from_millis(300));
    let mut ticks = tokio::time::interval(Duration::from_millis(10));
    let mut count = 0;
    let directories = [PathBuf::from("/")];
    let exited = async {
        tokio::select! {
            outcome = hook.run(&directories) => outcome,
            () = async { loop { ticks.tick().await; count += 1; } } => unreachable!(),
        }
    };
    assert_eq!(exited.await.unwrap_err().label(), "timeout");
    assert!(count >= 10, "the thread was blocked: {count} ticks");
}
