//! The agent under systemd: its notifications, passed sockets, and the units in `examples/systemd`.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::net::UnixDatagram;
use tokio::process::Command;
use tokio::time::timeout;
use tonic::Code;

use crate::readiness::renew;
use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::spiffe;
use crate::support::installed::installed;
use crate::support::process::{Agent, PATIENCE, Process, attache, failure, output, strs};
use crate::support::sds::{Stream, on_connection};
use crate::support::wait::wait_until;

/// A service manager that records the agent's messages.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    messages: Vec<String>,
}

impl Manager {
    fn new(directory: &Path) -> Self {
        let path = directory.join("notify");
        Self { socket: UnixDatagram::bind(&path).unwrap(), path, messages: Vec::new() }
    }

    async fn next(&mut self) -> String {
        let mut buffer = [0; 4096];
        let received = timeout(PATIENCE, self.socket.recv(&mut buffer)).await;
        let length = received.unwrap_or_else(|_| panic!("no message after {:?}", self.messages)).unwrap();
        let message = String::from_utf8(buffer[..length].to_vec()).unwrap();
        self.messages.push(message.clone());
        message
    }

    /// Waits for a message with `words`.
    async fn wait(&mut self, words: &str) -> String {
        loop {
            let message = self.next().await;
            if message.contains(words) {
                return message;
            }
        }
    }

    fn start(&self, directory: &Path, options: &[String], watchdog: Option<&str>) -> Agent {
        Agent::start_as(directory, "agent", &strs(options), |mut command| {
            command.env("NOTIFY_SOCKET", &self.path).env("PATH", "/usr/bin:/bin");
            command.envs(watchdog.map(|period| ("WATCHDOG_USEC", period)));
            command
        })
    }
}

#[tokio::test]
async fn the_service_manager_is_notified_of_health_and_a_hook_cannot_speak_for_the_agent() {
    let directory = tempfile::tempdir().unwrap();
    let mut manager = Manager::new(directory.path());
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.set(Mood::Refuse(Code::PermissionDenied));
    let (out, seen) = (directory.path().join("out"), directory.path().join("seen"));
    let hook = format!("env > {0}.new && mv {0}.new {0}", seen.display());
    let mut options = ca.client(directory.path());
    options.extend(["--output-dir", out.to_str().unwrap(), "--output-hook", &hook].map(str::to_owned));
    let mut agent = manager.start(directory.path(), &options, None);
    let status = manager.wait("PermissionDenied").await;
    assert!(status.starts_with("STATUS=not ready: default: ") && status.lines().count() == 1, "{status}");
    ca.set(Mood::Good);
    let socket = agent.socket.to_str().unwrap().to_owned();
    renew(&socket).await;
    assert_eq!(manager.wait("READY=1").await, "READY=1\nSTATUS=ready");
    agent.process.wait_log(" ready ").await;
    // Services ordered after this one find the files.
    assert!(out.join("key.pem").exists());
    wait_until("the hook has run", || seen.exists()).await;
    let seen = std::fs::read_to_string(seen).unwrap();
    assert!(seen.contains("ATTACHE_OUTPUT_DIR") && !seen.contains("NOTIFY_SOCKET"), "{seen}");

    // The CA fails while the certificate is valid: the failure is reported, and the service stays ready.
    ca.set(Mood::Refuse(Code::PermissionDenied));
    assert_eq!(failure(&["renew", "--socket", &socket]).await.0, 1);
    let status = manager.next().await;
    assert!(status.starts_with("STATUS=ready; not renewed: default: "), "{status}");
    ca.set(Mood::Good);
    renew(&socket).await;
    assert_eq!(manager.next().await, "STATUS=ready");

    agent.process.signal(Signal::TERM);
    assert_eq!(manager.next().await, "STOPPING=1\nSTATUS=stopping");
    assert_eq!(agent.process.ended().await.code(), Some(0));
    assert!(!manager.messages.iter().any(|message| message.contains("WATCHDOG")), "{:?}", manager.messages);
}

#[tokio::test]
async fn the_watchdog_is_fed_twice_per_period() {
    let directory = tempfile::tempdir().unwrap();
    let mut manager = Manager::new(directory.path());
    let ca_dir = directory.path().join("ca").display().to_string();
    let options = ["--ca", "embedded", "--ca-dir", &ca_dir].map(str::to_owned);
    let agent = manager.start(directory.path(), &options, Some("300000"));
    manager.wait("WATCHDOG=1").await;
    let first = Instant::now();
    for _ in 0..4 {
        manager.wait("WATCHDOG=1").await;
    }
    // A busy machine delays a message, never hastens it. The first one may have waited in the socket.
    assert!(first.elapsed() > Duration::from_millis(3 * 150 - 20), "{:?}", first.elapsed());
    // A stopped agent sends nothing.
    agent.process.signal(Signal::STOP);
    let drained = timeout(Duration::from_millis(450), async {
        loop {
            manager.next().await;
        }
    });
    assert!(drained.await.is_err());
    assert!(timeout(Duration::from_millis(300), manager.socket.readable()).await.is_err());
    agent.process.signal(Signal::CONT);
    manager.wait("WATCHDOG=1").await;

    for (name, value) in [("NOTIFY_SOCKET", "relative"), ("WATCHDOG_USEC", "often")] {
        let mut command = attache(&["run", "--ca", "none"]);
        command.env("NOTIFY_SOCKET", &manager.path).env(name, value);
        let failed = command.output().await.unwrap();
        let error = String::from_utf8(failed.stderr).unwrap();
        // Wrong use, after which the unit is not restarted.
        assert!(failed.status.code() == Some(2) && error.contains(&format!("{name}=\"{value}\"")), "{error}");
    }
}

/// The path of one of systemd's tools, which the first test that needs it downloads.
async fn tool(name: &str) -> PathBuf {
    installed("get-systemd", &[name]).await
}

/// Listens on sockets, and starts an agent on the first connection.
async fn activate(directory: &Path, listen: &[&str]) -> Process {
    let mut command = Command::new(tool("systemd-socket-activate").await);
    let (ca_dir, admin) = (directory.join("ca"), directory.join("elsewhere/admin"));
    command.env_clear().kill_on_drop(true).stdin(std::process::Stdio::null()).args(listen);
    command.arg(env!("CARGO_BIN_EXE_attache")).args(["run", "--ca", "embedded", "--ca-dir"]).arg(ca_dir);
    command.args(["--status-address", "none", "--cert-dir", "/nowhere", "--socket"]).arg(admin);
    Process::start(command)
}

/// Connects as soon as `activate` has logged that `path` has a listener. A connection of the standard library is
/// made once it waits to be accepted; one of tokio would also report that an agent has ended meanwhile.
async fn connect(activated: &mut Process, path: &str) -> UnixStream {
    activated.wait_log(&format!("Listening on {path} ")).await;
    UnixStream::connect(path).unwrap()
}

#[tokio::test]
async fn passed_sockets_are_served_and_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (sds, admin) = (path("sds"), path("admin"));
    let (sds_path, admin_path) = (sds.to_str().unwrap(), admin.to_str().unwrap());
    let cases: [(&[&str], PathBuf); 2] = [
        (&["-l", sds_path], path("sds.admin")),
        (&["-l", admin_path, "-l", sds_path, "--fdname=admin:sds"], admin.clone()),
    ];
    for (listen, admin) in cases {
        let mut agent = activate(directory.path(), listen).await;
        let _early = connect(&mut agent, sds_path).await;
        // The socket exists before the agent: early connections are served once the agent runs.
        on_connection(&sds, async |client| {
            let mut stream = Stream::open(&client, &["default"]).await.unwrap();
            stream.next().await.unwrap();
        })
        .await;
        let (_, line) = agent.wait_log("attache serves").await;
        assert!(line.contains(&format!("socket={sds_path}")), "{line}");
        let status = output(&["status", "--admin-socket", admin.to_str().unwrap()]).await;
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
        agent.signal(Signal::TERM);
        assert_eq!(agent.ended().await.code(), Some(0));
        assert!(sds.exists() && listen.contains(&admin_path) == admin.exists());
        std::fs::remove_file(&sds).unwrap();
    }
}

#[tokio::test]
async fn several_passed_sockets_serve_the_same_and_the_first_is_that_of_admin_commands() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (one, other) = (path("one"), path("other"));
    let mut agent = activate(directory.path(), &["-l", &one, "-l", &other, "--fdname=sds:sds"]).await;
    let _peer = connect(&mut agent, &other).await;
    agent.wait_log(" ready ").await;
    for socket in [&one, &other] {
        let shown = output(&["get", "--socket", socket]).await;
        assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    }
    assert!(output(&["status", "--socket", &one]).await.status.success());
    agent.signal(Signal::TERM);
    assert_eq!(agent.ended().await.code(), Some(0));
    assert!(Path::new(&one).exists() && Path::new(&other).exists());
}

#[tokio::test]
async fn an_unusable_passed_socket_is_named_in_the_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (one, other) = (path("one"), path("other"));
    let mut datagrams = activate(directory.path(), &["--datagram", "-l", &one]).await;
    wait_until("the socket is bound", || Path::new(&one).exists()).await;
    UnixDatagram::unbound().unwrap().send_to(b"wake up", &one).await.unwrap();
    let (_, line) = datagrams.wait_log("attache: ").await;
    assert!(line.contains("is not a Unix stream socket") && line.contains("ListenStream="), "{line}");
    assert_eq!(datagrams.ended().await.code(), Some(2));
    std::fs::remove_file(&one).unwrap();

    for names in ["--fdname=sds:third", "--fdname=admin:admin"] {
        let mut agent = activate(directory.path(), &["-l", &one, "-l", &other, names]).await;
        let _peer = connect(&mut agent, &other).await;
        let (_, line) = agent.wait_log("attache: ").await;
        assert!(line.contains("FileDescriptorName="), "{line}");
        assert_eq!(agent.ended().await.code(), Some(2));
        std::fs::remove_file(&one).unwrap();
        std::fs::remove_file(&other).unwrap();
    }
}

#[tokio::test]
async fn the_units_are_valid_and_expose_little() {
    let directory = tempfile::tempdir().unwrap();
    let analyze = tool("systemd-analyze").await;
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/systemd");
    for unit in ["attache.service", "attache-envoy.service", "attache.socket", "attache@.service"] {
        let text = std::fs::read_to_string(units.join(unit)).unwrap();
        // The programs must exist.
        let text = text.replace("/usr/local/bin/attache", env!("CARGO_BIN_EXE_attache"));
        let text = text.replace("/bin/kill", env!("CARGO_BIN_EXE_attache"));
        std::fs::write(directory.path().join(unit), text).unwrap();
    }
    // Where systemd is not installed, its package's units are beside the tool. The machine's own come after them.
    let home = analyze.parent().unwrap().display();
    let units_of_systemd = format!("{home}/root/lib/systemd/system:{home}/root/usr/lib/systemd/system:");
    let analyzed = async |arguments: &[&str]| {
        let mut command = Command::new(&analyze);
        command.args(arguments).current_dir(directory.path()).env("SYSTEMD_UNIT_PATH", &units_of_systemd);
        let output = command.output().await.unwrap();
        let printed = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(printed).unwrap())
    };
    let verified =
        ["./attache.service", "./attache-envoy.service", "./attache.socket", "./attache@web.service"];
    let verified = analyzed(&[&["verify"][..], &verified].concat()).await;
    assert_eq!(verified, (true, String::new()));
    // Envoy needs more rights.
    let path = "./attache-envoy.service";
    let (is_less, report) = analyzed(&["security", "--offline=yes", "--threshold=40", path]).await;
    assert!(is_less, "{report}");
    for unit in ["attache.service", "attache@.service"] {
        // The exposure level is 1.5; that of a unit without hardening is 9.6.
        let path = format!("./{unit}").replace("@.", "@web.");
        let (is_less, report) = analyzed(&["security", "--offline=yes", "--threshold=20", &path]).await;
        assert!(is_less && report.contains("Overall exposure level"), "{report}");
        check_service(&std::fs::read_to_string(units.join(unit)).unwrap()).await;
    }
}

/// Checks what `systemd-analyze` can't know.
async fn check_service(service: &str) {
    // Not all versions of systemd include these in the system calls of ordinary services.
    let allowed: Vec<_> = service.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")).collect();
    let landlock = ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"];
    assert!(allowed.contains(&landlock.join(" ").as_str()), "{allowed:?}");
    assert!(service.contains("\nRestartPreventExitStatus=2\n"));
    assert!(service.contains("\nExecReload=/bin/kill -HUP $MAINPID\n"));

    // Its options exist.
    let help = String::from_utf8(output(&["run", "--help"]).await.stdout).unwrap();
    let (_, command) = service.split_once("\nExecStart=").unwrap();
    let command: String =
        command.lines().take_while(|line| line.contains("  --") || line.ends_with('\\')).collect();
    let options: Vec<_> = command.split_whitespace().filter(|word| word.starts_with("--")).collect();
    assert!(options.len() > 3, "{command}");
    for option in options {
        assert!(help.contains(option), "{option}");
    }
}

#[tokio::test]
async fn two_instances_of_the_template_run_side_by_side_with_their_options_files() {
    let directory = tempfile::tempdir().unwrap();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/systemd");
    let template = std::fs::read_to_string(units.join("attache@.service")).unwrap();
    let (_, command) = template.split_once("\nExecStart=/usr/local/bin/attache ").unwrap();
    let (command, _) = command.split_once("\nExecReload=").unwrap();
    let command: String = command.lines().filter(|line| !line.starts_with('#')).collect();
    let mut agents = Vec::new();
    for (instance, port) in [("web", "127.0.0.1:0"), ("db", "127.0.0.1:0")] {
        // Where systemd would make them.
        let root = directory.path().join("root");
        for parent in ["etc/attache", "run/attache", "var/lib/attache"] {
            std::fs::create_dir_all(root.join(parent).join(instance)).unwrap();
        }
        let options = std::fs::read_to_string(units.join("web.toml")).unwrap();
        assert!(options.contains("\nstatus-address = \"127.0.0.1:15061\"\n"), "{options}");
        // The example's CA does not exist: it is never reached.
        let options =
            options.replace("127.0.0.1:15061", port).replace("/host/web", &format!("/host/{instance}"));
        let options = options.replace("ca.example.com", "127.0.0.1").replace("ca-2.example.com", "127.0.0.2");
        std::fs::write(root.join(format!("etc/attache/{instance}.toml")), options).unwrap();
        let prefix = |path: &str| format!(" {}/{path}/", root.display());
        let command = command.replace('\\', " ").replace("%i", instance);
        let command = command.replace(" /etc/", &prefix("etc")).replace(" /run/", &prefix("run"));
        let command = command.replace(" /var/", &prefix("var")).replace("--landlock", "");
        let arguments: Vec<_> = command.split_whitespace().collect();
        let mut agent = Process::start(attache(&arguments));
        let (_, line) = agent.wait_log("attache serves").await;
        assert!(line.contains("run/attache/") && line.contains("\"config\":"), "{line}");
        agents.push((instance, root.join(format!("run/attache/{instance}/sds.sock")), agent));
    }
    for (instance, socket, agent) in &mut agents {
        agent.wait_log("127.0.0.2:15012").await;
        let status = output(&["status", "--output", "json", "--socket", socket.to_str().unwrap()]).await;
        let status = String::from_utf8(status.stdout).unwrap();
        assert!(status.contains(&format!("run/attache/{instance}/sds.sock")), "{status}");
    }
}
