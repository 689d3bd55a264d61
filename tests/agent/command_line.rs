//! Help, completions and manual pages, and command lines with mistakes.

use std::process::Stdio;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::support::files::spiffe;
use crate::support::process::{Agent, attache, failure, output};

async fn printed(arguments: &[&str]) -> String {
    let output = output(arguments).await;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn bash_completes_options_and_commands() {
    let script = printed(&["completions", "bash"]).await;
    let ask = r#"
        COMP_WORDS=(attache run --ca-cl) COMP_CWORD=2
        _attache attache --ca-cl run && echo "${COMPREPLY[@]}"
        COMP_WORDS=(attache ch) COMP_CWORD=1
        _attache attache ch attache && echo "${COMPREPLY[@]}"
    "#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-s"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut bash = bash.spawn().expect("this test needs bash");
    bash.stdin.take().unwrap().write_all(format!("{script}{ask}").as_bytes()).await.unwrap();
    let answer = bash.wait_with_output().await.unwrap();
    let answer = String::from_utf8_lossy(&answer.stdout).into_owned();
    assert_eq!(answer.lines().collect::<Vec<_>>(), ["--ca-client-cert-dir", "check"]);
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(printed(&["completions", shell]).await.contains("ca-client-cert-dir"), "{shell}");
    }
    let (code, error) = failure(&["completions", "tcsh"]).await;
    assert!(code == 2 && error.contains("fish"), "{error}");
}

#[tokio::test]
async fn each_command_has_a_manual_page() {
    let all = printed(&["man"]).await;
    for command in ["run", "ca", "get", "watch", "status", "renew", "log", "bootstrap", "check"] {
        assert!(all.contains(&format!("attache\\-{command}(1)")), "{command}:\n{all}");
        let page = printed(&["man", command]).await;
        assert!(page.contains(".SH OPTIONS") && page.contains(".TH"), "{page}");
    }
    let page = printed(&["man", "run"]).await;
    assert!(page.contains("\\-\\-ca\\-address") && page.contains("CA_ADDR"), "{page}");
    let (code, error) = failure(&["man", "walk"]).await;
    assert!(code == 2 && error.contains("walk is not a command") && error.contains("bootstrap"), "{error}");
}

#[tokio::test]
async fn help_fits_the_terminal_and_a_full_disk_is_a_failure() {
    let longest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap();
    for command in [
        "run",
        "ca",
        "get",
        "watch",
        "status",
        "renew",
        "check",
        "log",
        "bootstrap",
        "inject",
        "man",
        "remote-secret",
    ] {
        let (short, long) = (printed(&[command, "-h"]).await, printed(&[command, "--help"]).await);
        assert!(longest(&short) <= 80 && longest(&long) <= 80, "{command}:\n{short}\n{long}");
        assert!(short.len() <= long.len(), "{command}");
    }
    let (short, long) = (printed(&["run", "-h"]).await, printed(&["run", "--help"]).await);
    assert!(short.lines().count() * 3 < long.lines().count() * 2, "{short}");
    assert!(long.contains("this agent alone; must not be readable") && !short.contains("this agent alone"));
    let wide = attache(&["run", "--help"]).env("COLUMNS", "95").output().await.unwrap();
    let wide = longest(&String::from_utf8(wide.stdout).unwrap());
    assert!((81..=95).contains(&wide), "{wide}");
    for arguments in [&["run", "--help"][..], &["--version"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let failed = attache(arguments).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        let failed = failed.wait_with_output().await.unwrap();
        let error = String::from_utf8(failed.stderr).unwrap();
        assert!(
            failed.status.code() == Some(1) && error.contains("writing to standard output failed"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_mistyped_word_is_named_with_a_suggestion() {
    let cases: [(&[&str], &str); 6] = [
        (&["--versoin"], "unknown option --versoin; did you mean --version?"),
        (&["statsu"], "'status'"),
        (&["run", "--ca-adress", "a:1"], "unknown option --ca-adress; did you mean --ca-address?"),
        (
            &["run", "--ca", "embedded", "--log-level", "info,attache::sourse=debug"],
            "no part of the agent logs as \"attache::sourse\"; did you mean attache::source?",
        ),
        (&["log", "source=debug"], "did you mean attache::source?"),
        (&["get", "--show-key"], "--show-key prints keys with --output pem or --output json alone"),
    ];
    for (arguments, words) in cases {
        let (code, error) = failure(arguments).await;
        assert!(code == 2 && error.contains(words), "{arguments:?}: {code} {error}");
    }
    let (_, error) = failure(&["--versoin"]).await;
    assert!(!error.contains("Usage:") && error.contains("See attache --help"), "{error}");
}

#[tokio::test]
async fn unknown_variables_are_mistakes_and_those_of_a_kubernetes_service_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let ca_dir = directory.path().join("ca");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap(), "--spiffe-id", &spiffe("web")];
    let wrong = [("ATTACHE_CA_ADRESS", "a:1"), ("ATTACHE_OTHER_THING", "1")];
    let mut agent = Agent::start_as(directory.path(), "wrong", &options, |mut command| {
        command.envs(wrong);
        command
    });
    agent.process.wait_log("unknown variable ATTACHE_CA_ADRESS; did you mean ATTACHE_CA_ADDRESS?").await;
    agent.process.wait_log("unknown variable ATTACHE_OTHER_THING").await;
    assert_eq!(agent.process.ended().await.code(), Some(2));
    let service = [
        ("ATTACHE_SERVICE_HOST", "10.0.0.1"),
        ("ATTACHE_SERVICE_PORT", "15012"),
        ("ATTACHE_SERVICE_PORT_GRPC", "15012"),
        ("ATTACHE_PORT", "tcp://10.0.0.1:15012"),
        ("ATTACHE_PORT_15012_TCP", "tcp://10.0.0.1:15012"),
        ("ATTACHE_PORT_15012_TCP_ADDR", "10.0.0.1"),
        ("ATTACHE_LOG", "debug"),
    ];
    let mut agent = Agent::start_as(directory.path(), "right", &options, |mut command| {
        command.envs(service);
        command
    });
    agent.process.wait_log(" ready ").await;
}
