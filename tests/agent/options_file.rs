//! The options file: at the start, on SIGHUP, and in other commands.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use crate::support::process::{PATIENCE, Process, attache, failure, output};

/// Writes an options file for an agent in `directory`, with `more` at its end.
fn write(directory: &Path, more: &str) -> PathBuf {
    let file = directory.join("attache.toml");
    let shown = directory.display();
    let options = format!(
        "# An agent in one directory.\n\
         socket = \"{shown}/sds.sock\"\n\
         ca = \"embedded\"\n\
         ca-dir = \"{shown}/ca\"\n\
         cert-dir = \"{shown}/no-files\"\n\
         status-address = \"none\"\n"
    );
    std::fs::write(&file, options + more).unwrap();
    file
}

fn start(arguments: &[&str], environment: &[(&str, &str)]) -> Process {
    let mut command = attache(&[&["run"], arguments].concat());
    command.envs(environment.iter().copied());
    Process::start(command)
}

#[tokio::test]
async fn an_agent_is_started_by_its_options_file_alone_and_found_by_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "cert-ttl = \"1h\"\n");
    let file = file.to_str().unwrap();
    // The variable names the file, and everything else in the environment and on the command line wins.
    let mut agent = start(&[], &[("ATTACHE_CONFIG", file), ("SECRET_TTL", "2h")]);
    let (_, line) = agent.wait_log("attache serves").await;
    assert!(line.contains(&format!("config={file}")) && line.contains("ca embedded (line 3 of "), "{line}");
    agent.wait_log("ready").await;
    let (_, note) = agent.wait_log("cert-ttl (line 7 of ").await;
    assert!(note.contains("is not used: SECRET_TTL is set"), "{note}");
    let status = attache(&["status"]).env("ATTACHE_CONFIG", file).output().await.unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let shown = attache(&["get", "default"]).env("ATTACHE_CONFIG", file).output().await.unwrap();
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));

    let check = output(&["check", "--config", file]).await;
    let check = String::from_utf8(check.stdout).unwrap();
    let options = "ca, ca-dir, cert-dir, cert-ttl, socket, status-address";
    assert!(check.contains(&format!("in force from {file}: {options}")), "{check}");
}

#[tokio::test]
async fn a_mistake_in_the_options_file_is_reported_with_its_line_by_run_and_by_check() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "cert-tll = '1h'\nlandlock = 'on'\ngrace-ratio = 2\n");
    let file = file.to_str().unwrap();
    for command in ["run", "check"] {
        let (code, report) = failure(&[command, "--config", file, "--sokcet", "x"]).await;
        assert_eq!(code, 2, "{report}");
        for words in [
            "4 mistakes in the options",
            "unknown option --sokcet; did you mean --socket?",
            &format!("cert-tll (line 7 of {file}) is not an option; did you mean cert-ttl?"),
            &format!("landlock (line 8 of {file}) takes true or false, without quotes"),
            &format!("grace-ratio (line 9 of {file}): \"2\" is not between 0 and 1"),
        ] {
            assert!(report.contains(words), "{words}:\n{report}");
        }
        let (code, report) = failure(&[command, "--config", "/nowhere/attache.toml"]).await;
        assert!(
            code == 2 && report.contains("reading the options file /nowhere/attache.toml failed"),
            "{report}"
        );
    }
    let image = ["--image", "attache", "--", "--config", file];
    let (code, report) = failure(&[&["inject"], &image[..]].concat()).await;
    assert!(code == 2 && report.contains("give its options after --"), "{report}");
}

#[tokio::test]
async fn a_reload_applies_the_log_level_and_names_the_options_that_need_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "");
    let mut agent = start(&["--config", file.to_str().unwrap()], &[]);
    agent.wait_log("ready").await;
    let level = async || {
        let socket = directory.path().join("sds.sock");
        let shown = output(&["log", "--socket", socket.to_str().unwrap()]).await;
        String::from_utf8(shown.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(level().await, "info");
    agent.signal(Signal::HUP);
    agent.wait_log("options file unchanged").await;

    write(directory.path(), "log-level = 'warn'\ncert-ttl = '1h'\nlandlock = true\n");
    agent.signal(Signal::HUP);
    let (_, line) = agent.wait_log("options changed, restart the agent to apply them").await;
    assert!(line.contains("options=\"cert-ttl, landlock\""), "{line}");
    agent.wait_log("log level set level=\"warn\"").await;
    assert_eq!(level().await, "warn");

    // A level that a person has set stays until the file names another one.
    let socket = directory.path().join("sds.sock").display().to_string();
    assert!(output(&["log", "--socket", &socket, "debug"]).await.status.success());
    agent.signal(Signal::HUP);
    agent.wait_log_times("options changed, restart", 2).await;
    assert_eq!(level().await, "debug");

    // What the next start would refuse is not applied in part.
    write(directory.path(), "log-level = 'info'\ncert-ttl = 'soon'\n");
    agent.signal(Signal::HUP);
    let (_, line) = agent.wait_log("options file not used, the options stay as they are").await;
    assert!(line.contains("cert-ttl (line 8 of ") && line.contains("is not a duration"), "{line}");
    assert_eq!(level().await, "debug");
    std::fs::remove_file(&file).unwrap();
    agent.signal(Signal::HUP);
    agent.wait_log("No such file or directory").await;

    // The agent is as it was.
    write(directory.path(), "");
    agent.signal(Signal::HUP);
    agent.wait_log("log level set level=\"info\"").await;
    assert_eq!(level().await, "info");
    agent.signal(Signal::TERM);
    assert_eq!(tokio::time::timeout(PATIENCE, agent.ended()).await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn an_options_file_that_others_can_change_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let file = write(directory.path(), "ca-header = \"authorization=Bearer s3cret\"\n");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    let mut agent = start(&["--config", file.to_str().unwrap()], &[]);
    agent.wait_log(&format!("every local user can write to {}, the options file", file.display())).await;
    agent.wait_log(&format!("every local user can read {}, which contains headers", file.display())).await;
    assert!(!agent.log().contains("s3cret"), "{}", agent.log());
}
