//! One agent on several sockets.

use std::os::unix::fs::PermissionsExt as _;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::process::{Agent, failure, output};
use crate::support::sds::{Stream, on_connection};

#[tokio::test]
async fn each_socket_serves_the_same_and_all_are_removed_at_exit() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::create_dir(path("credential-uds")).unwrap();
    let (first, second) = (path("agent.sock"), path("credential-uds/socket"));
    // What a dead agent has left.
    drop(std::os::unix::net::UnixListener::bind(&second).unwrap());
    let options = ["--ca", "embedded", "--ca-dir", &path("ca"), "--socket", &second];
    let mut agent = Agent::ready(
        directory.path(),
        "agent",
        &[&options[..], &["--socket-mode", "0600", "--landlock"]].concat(),
    )
    .await;
    let (_, line) = agent.process.wait_log("attache serves").await;
    assert!(line.contains(&format!("socket={first}, {second} ")), "{line}");
    let mut served = Vec::new();
    for socket in [&first, &second] {
        let mode = std::fs::metadata(socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
        let push = on_connection(socket.as_ref(), async |client| {
            let mut stream = Stream::open(&client, &["default"]).await.unwrap();
            stream.next().await.unwrap()
        });
        served.push(push.await.version_info);
    }
    assert_eq!(served[0], served[1]);

    // Admin commands go by the first one, and know the others.
    let status = output(&["status", "--output", "json", "--socket", &first]).await;
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(
        (&status["socket"], &status["other_sockets"][0]["socket"]),
        (&first.clone().into(), &second.clone().into())
    );
    let admin = format!("{first}.admin");
    assert!(output(&["status", "--socket", &second, "--admin-socket", &admin]).await.status.success());
    let (_, error) = failure(&["status", "--socket", &second]).await;
    assert!(error.contains(&format!("has no admin socket {second}.admin")), "{error}");
    // In the agent's container the variable names both.
    for command in ["get", "status"] {
        let mut command = crate::support::process::attache(&[command]);
        let done = command.env("ATTACHE_SOCKET", format!("{first}:{second}")).output().await.unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    let check = [&["check", "--status-address", "none", "--socket", &first], &options[..]].concat();
    let checked = String::from_utf8(output(&check).await.stdout).unwrap();
    assert_eq!(checked.matches("an agent is running there").count(), 2, "{checked}");

    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    let left = [first, second, admin].map(|socket| std::path::Path::new(&socket).exists());
    assert_eq!(left, [false; 3], "{}", agent.process.log());
}

#[tokio::test]
async fn an_agent_that_wants_a_live_agents_socket_among_others_is_refused_and_leaves_none() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (taken, free, ca_dir) = (path("second.sock"), path("free.sock"), path("ca"));
    let options = ["--ca", "embedded", "--ca-dir", &ca_dir, "--socket", &taken];
    let _live = Agent::ready(directory.path(), "live", &options).await;
    let other = ["run", "--status-address", "none", "--socket", &free];
    let (code, error) = failure(&[&other, &options[..]].concat()).await;
    assert!(code == 1 && error.contains(&format!("the socket {taken} belongs to a live agent")), "{error}");
    assert!(!std::path::Path::new(&free).exists(), "a failed start leaves no socket");
    let shown = output(&["get", "--socket", &taken]).await;
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    let check = [&["check", "--status-address", "none", "--socket", &free], &options[..]].concat();
    let checked = String::from_utf8(output(&check).await.stdout).unwrap();
    assert!(checked.contains(&format!("{taken}: the agent there does not serve {free}")), "{checked}");
}
