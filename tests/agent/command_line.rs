//! Completions and manual pages.

use std::process::Stdio;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::support::process::{failure, output};

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
