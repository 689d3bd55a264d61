//! Starting, stopping, and the errors when that is not possible.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use rustix::process::Signal;
use tokio::process::Command;
use tonic::Code;

use crate::support::files::{Mounted, silent_server};
use crate::support::process::{Agent, Ca, failure, output, strs};
use crate::support::sds::{Stream, on_connection};

async fn embedded(directory: &std::path::Path, name: &str) -> Agent {
    let ca_dir = directory.join("ca");
    Agent::ready(directory, name, &["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap()]).await
}

#[tokio::test]
async fn all_mistakes_are_in_one_report_with_exit_code_2() {
    let (code, report) = failure(&["run", "--sokcet", "x", "--nonsense", "--cert-ttl", "soon"]).await;
    assert_eq!(code, 2);
    for words in [
        "unknown option --sokcet; did you mean --socket?",
        "unknown option --nonsense",
        "--cert-ttl: \"soon\" is not a duration",
        "no CA is configured",
        "--help",
    ] {
        assert!(report.contains(words), "{words}:\n{report}");
    }
    let (_, report) = failure(&["--bogus", "run", "--ca", "none"]).await;
    assert!(report.contains("unknown option --bogus"), "{report}");
    // A value that may be a secret is never shown, whatever is wrong with it.
    let (_, report) = failure(&["run", "--ca", "none", "--ca-header", "authorization: Bearer s3cret"]).await;
    assert!(report.contains("--ca-header authorization") && !report.contains("s3cret"), "{report}");
    let long = format!("/tmp/{}", "x".repeat(200));
    let cases: [(&[&str], &str); 4] = [
        (
            &["--ca", "embedded", "--socket", &long],
            "has 205 bytes: Unix sockets take 107 at most; choose a shorter",
        ),
        (&["--cert-dir", "/nowhere"], "choose with --ca one of citadel"),
        (
            &["--ca", "embedded", "--ca-address", "istiod:15012"],
            "contradict each other: the first has no address",
        ),
        (
            &["--ca", "citadel", "--ca-address", "a:1", "--file-mounted-certs"],
            "no CA is used; drop one of them",
        ),
    ];
    for (options, words) in cases {
        let arguments: Vec<_> = ["run"].iter().chain(options).copied().collect();
        let (code, report) = failure(&arguments).await;
        assert_eq!(code, 2, "{report}");
        assert!(report.contains(words), "{report}");
    }
}

#[tokio::test]
async fn what_prevents_the_start_is_reported_with_the_remedy_and_exit_code_1() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = embedded(directory.path(), "first").await;
    let taken_status = first.status_address().await.to_string();
    let ca_dir = directory.path().join("ca").display().to_string();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (taken, free, missing) = (path("first.sock"), path("free.sock"), path("no/directory.sock"));
    let file = path("file");
    std::fs::write(&file, "precious").unwrap();
    let pid = format!("(process {})", first.process.pid().as_raw_nonzero());
    let cases: [(&str, &str, &str, &[&str]); 5] = [
        (&taken, "none", &ca_dir, &["belongs to a live agent", &pid, "--socket"]),
        (&missing, "none", &ca_dir, &["create or mount", "--socket"]),
        (&file, "none", &ca_dir, &["is not a socket", "--socket"]),
        (&free, &taken_status, &ca_dir, &["in use", "--status-address"]),
        (&free, "none", &file, &["development CA's directory", "--ca-dir"]),
    ];
    for (socket, status, ca_dir, words) in cases {
        let arguments =
            ["run", "--ca", "embedded", "--ca-dir", ca_dir, "--socket", socket, "--status-address", status];
        let (code, report) = failure(&arguments).await;
        assert_eq!(code, 1, "{report}");
        for word in words {
            assert!(report.contains(word), "{word}: {report}");
        }
    }
    assert!(std::fs::read_to_string(&file).unwrap() == "precious");
    assert!(!std::path::Path::new(&free).exists(), "a failed start leaves no socket");
    let shown = output(&["get", "--socket", &taken, "default"]).await;
    assert!(shown.status.success(), "the live agent is unharmed");
}

#[tokio::test]
async fn sigterm_and_sigint_end_the_streams_remove_the_socket_and_exit_0() {
    let directory = tempfile::tempdir().unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        let mut agent = embedded(directory.path(), "agent").await;
        let mode = std::fs::metadata(&agent.socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        on_connection(&agent.socket.clone(), async |client| {
            let mut stream = Stream::open(&client, &["default"]).await.unwrap();
            stream.next().await.unwrap();
            agent.process.signal(signal);
            let end = stream.next().await.unwrap_err();
            assert_eq!((end.code(), end.message()), (Code::Unavailable, "the agent is stopping"));
        })
        .await;
        assert_eq!(agent.process.ended().await.code(), Some(0));
        agent.process.wait_log("stopped").await;
        assert!(!agent.socket.exists());
    }
}

#[tokio::test]
async fn a_connection_that_stays_open_does_not_delay_the_exit() {
    let directory = tempfile::tempdir().unwrap();
    let ca_dir = directory.path().join("ca");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap(), "--drain-timeout", "200ms"];
    let mut agent = Agent::ready(directory.path(), "agent", &options).await;
    // It connects and sends nothing, not even the HTTP/2 preface.
    let _silent = tokio::net::UnixStream::connect(&agent.socket).await.unwrap();
    let garbage = tokio::net::UnixStream::connect(&agent.socket).await.unwrap();
    garbage.try_write(&[0xff; 4096]).unwrap();
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn a_client_that_has_sent_nothing_does_not_delay_the_exit() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = embedded(directory.path(), "agent").await;
    let _silent = tokio::net::UnixStream::connect(&agent.socket).await.unwrap();
    agent.wait_metric("attache_connections", 1).await;
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    assert_eq!(
        agent.process.count("drain timeout exceeded, closing connections"),
        0,
        "{}",
        agent.process.log()
    );
}

#[tokio::test]
async fn probes_name_what_is_missing_and_metrics_when_it_expires() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("certs");
    std::fs::create_dir(&dir).unwrap();
    let options = ["--file-mounted-certs", "--cert-dir", dir.to_str().unwrap()];
    let mut agent = Agent::start(directory.path(), "agent", &options);
    assert_eq!(agent.status("/livez").await, (200, "alive\n".to_owned()));
    assert_eq!(agent.status("/elsewhere").await.0, 404);
    // The first look may take a moment.
    for name in ["default", "ROOTCA"] {
        agent.wait_metric(&format!("attache_secret_failing{{name=\"{name}\"}}"), 1).await;
    }
    let (status, body) = agent.status("/readyz").await;
    let dir_name = dir.display();
    let absent = |name: &str, file: &str| format!("{name}: none of {dir_name}/{file}, ");
    assert_eq!(status, 503);
    for (line, expected) in
        body.lines().zip([absent("default", "cert-chain.pem"), absent("ROOTCA", "root-cert.pem")])
    {
        assert!(line.starts_with(&expected), "{body}");
    }
    assert_eq!(body.lines().count(), 2, "{body}");
    assert_eq!(agent.metric("attache_ready").await, 0.0);

    Mounted::new(&directory.path().join("ca"), "web").write(&dir);
    agent.process.wait_log(" ready ").await;
    assert_eq!(agent.status("/readyz").await, (200, "ready\n".to_owned()));
    assert_eq!(agent.metric("attache_ready").await, 1.0);
    #[expect(clippy::disallowed_methods, reason = "compared with the agent's own clock")]
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let end = Duration::from_secs_f64(
        agent.metric("attache_secret_not_after_timestamp_seconds{name=\"default\"}").await,
    );
    assert!(end > now && end <= now + Duration::from_secs(3600), "{end:?}");
}

/// Opening a FIFO blocks until its other end is opened: on the only thread that would stop the agent.
#[tokio::test]
async fn fifos_and_devices_in_place_of_files_block_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let certs = directory.path().join("certs");
    std::fs::create_dir(&certs).unwrap();
    for name in ["cert-chain.pem", "key.pem", "root-cert.pem"] {
        std::os::unix::fs::symlink(&fifo, certs.join(name)).unwrap();
    }
    let token = directory.path().join("token");
    std::fs::write(&token, "token").unwrap();
    let text = |path: &std::path::Path| path.display().to_string();
    let zero = "/dev/zero".to_owned();
    for (token, root) in [(text(&fifo), text(&token)), (text(&token), text(&fifo)), (text(&token), zero)] {
        let (listener, port) = silent_server().await;
        let address = format!("127.0.0.1:{port}");
        let options = [
            "--ca-address",
            &address,
            "--token-file",
            &token,
            "--ca-root",
            &root,
            "--cert-dir",
            &text(&certs),
        ];
        let mut agent = Agent::start(directory.path(), "agent", &options);
        let (_, line) = agent.process.wait_log("no new certificate").await;
        assert!(line.contains("not a regular file"), "{line}");
        agent.process.wait_log("mounted files are not used").await;
        assert_eq!(agent.status("/livez").await.0, 200);
        agent.process.signal(Signal::TERM);
        assert_eq!(agent.process.ended().await.code(), Some(0));
        drop(listener);
    }
}

#[tokio::test]
async fn a_directory_locked_by_another_process_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let lock = std::fs::File::open(directory.path()).unwrap();
    lock.lock().unwrap();
    let socket = directory.path().join("agent.sock").display().to_string();
    let (code, error) =
        failure(&["run", "--ca", "none", "--socket", &socket, "--status-address", "none"]).await;
    assert_eq!(code, 1);
    assert!(error.contains("holds its lock"), "{error}");
    assert_eq!(error.matches("holds its lock").count(), 1, "reported once: {error}");
}

#[tokio::test]
async fn idle_connections_to_the_status_address_cost_envoy_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = embedded(directory.path(), "agent").await;
    let status = agent.status_address().await;
    let mut idle = Vec::new();
    for _ in 0..500 {
        idle.push(tokio::net::TcpStream::connect(status).await.unwrap());
    }
    let shown = output(&["get", "--socket", agent.socket.to_str().unwrap()]).await;
    assert!(shown.status.success());
    let descriptors = format!("/proc/{}/fd", agent.process.pid().as_raw_nonzero());
    let open = std::fs::read_dir(descriptors).unwrap().count();
    assert!(open < 150, "{open} descriptors are open");
    drop(idle);
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
}

/// A command line without the rights of an administrator, also where the test has them.
async fn unprivileged(arguments: &[&str]) -> String {
    let mut command = Command::new("unshare");
    command.arg("--user").arg(env!("CARGO_BIN_EXE_attache")).args(arguments).env_clear().kill_on_drop(true);
    let failed = command.output().await.expect("this test needs unshare, of util-linux");
    assert!(!failed.status.success());
    String::from_utf8(failed.stderr).unwrap()
}

#[tokio::test]
async fn a_denied_permission_is_reported_with_mode_owner_and_the_callers_ids() {
    let directory = tempfile::tempdir().unwrap();
    let agent = embedded(directory.path(), "agent").await;
    let socket = agent.socket.to_str().unwrap();
    let admin = format!("{socket}.admin");
    for path in [socket, &admin] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o000)).unwrap();
    }
    let cases: [(&[&str], &str); 2] =
        [(&["get", "--socket", socket], socket), (&["status", "--socket", socket], &admin)];
    for (arguments, path) in cases {
        let error = unprivileged(arguments).await;
        let denied = format!("Permission denied (os error 13); {path} has mode 0000, user ");
        assert!(error.contains(&denied) && error.contains("and this process is user "), "{error}");
        assert!(error.contains("run the command as that user"), "{error}");
    }
    // A directory that exists and is not writable.
    let closed = directory.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o555)).unwrap();
    let (closed, ca_dir) = (closed.to_str().unwrap(), directory.path().join("ca").display().to_string());
    let run = ["run", "--ca", "embedded", "--ca-dir", &ca_dir, "--status-address", "none", "--socket"];
    let error = unprivileged(&[&run[..], &[&format!("{closed}/sds.sock")]].concat()).await;
    assert!(error.contains(&format!("{closed} has mode 0555, user ")), "{error}");
    assert!(
        error.contains("give it write permission on the directory, or choose another path with --socket"),
        "{error}"
    );
    assert!(!error.contains("create or mount"), "{error}");
}

#[tokio::test]
async fn plaintext_for_a_tls_port_is_recognized() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let address = format!("http://{}", ca.address);
    let mut options = ca.client("web");
    let at = options.iter().position(|option| option == "--ca-address").unwrap();
    options[at + 1] = address.clone();
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("is this a TLS port? Use https:// in --ca-address"), "{line}");
}
