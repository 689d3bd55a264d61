//! Several outputs, and the programs that read each format: Java, OpenSSL, HAProxy.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use attache::pki::key::PrivateKey;
use attache::pki::pem;
use attache::secret::KeyPair;
use rustix::process::{Pid, Signal, kill_process_group};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio_rustls::TlsConnector;

use crate::support::installed::installed;
use crate::support::process::{Agent, output, strs};
use crate::support::wait::{wait_for, wait_until};

const PASSWORD: &str = "s3cret words";

/// Starts an agent with a CA of its own, and with `options`, in which `@` stands for `directory`.
fn start(directory: &Path, options: &[&str]) -> Agent {
    let place = format!("{}/", directory.display());
    let own = ["--ca", "embedded", "--ca-dir", "@ca"];
    let options: Vec<_> = own.iter().chain(options).map(|option| option.replace('@', &place)).collect();
    Agent::start(directory, "agent", &strs(&options))
}

/// What a program prints, which must exit with 0.
async fn printed(program: &Path, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("LC_ALL", "C").output().await;
    let output = output.unwrap_or_else(|error| panic!("{}: {error}; install it", program.display()));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{} {arguments:?}:\n{out}{err}", program.display());
    out
}

/// The key pair in a PKCS#12 file, as OpenSSL reads it.
async fn key_pair(file: &Path, password: &str) -> KeyPair {
    let (file, password) = (file.to_str().unwrap(), format!("pass:{password}"));
    let read = async |what| {
        let arguments = ["pkcs12", "-in", file, "-passin", &password, "-nodes", what];
        printed(Path::new("openssl"), &arguments).await.into_bytes()
    };
    let mut chain = pem::certificates(&read("-clcerts").await).unwrap();
    let key = PrivateKey::from_pem(&read("-nocerts").await).unwrap();
    chain.truncate(1);
    KeyPair::new(chain, key).unwrap()
}

/// A keystore as the test expects it.
struct Expected {
    directory: PathBuf,
    kind: &'static str,
    suffix: &'static str,
    alias: &'static str,
    password: &'static str,
}

impl Expected {
    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.{}", self.suffix))
    }

    /// Java finds the key with its chain and the root, and takes the key out.
    async fn is_read_by_java(&self, keytool: &Path, serial: &str) {
        let list = async |name| {
            let file = self.file(name);
            let arguments = ["-list", "-keystore", file.to_str().unwrap(), "-storetype", self.kind];
            printed(keytool, &[&arguments[..], &["-storepass", self.password]].concat()).await
        };
        let whole = list("keystore").await;
        let has = |line_start: &str, kind: &str| {
            whole.lines().any(|line| line.starts_with(line_start) && line.contains(kind))
        };
        assert!(whole.contains("2 entries") && has("root-1, ", "trustedCertEntry"), "{whole}");
        assert!(has(&format!("{}, ", self.alias), "PrivateKeyEntry"), "{whole}");
        let trust = list("truststore").await;
        assert!(
            trust.contains("1 entry") && trust.contains("root-1, ") && !trust.contains("PrivateKey"),
            "{trust}"
        );

        let (from, to) = (self.file("keystore"), self.directory.join("taken.p12"));
        let arguments = ["-importkeystore", "-noprompt", "-srckeystore", from.to_str().unwrap()];
        let source = ["-srcstoretype", self.kind, "-srcstorepass", self.password, "-srcalias", self.alias];
        let target = ["-destkeystore", to.to_str().unwrap(), "-deststoretype", "PKCS12"];
        let password = ["-deststorepass", "changed", "-destkeypass", "changed"];
        printed(keytool, &[&arguments[..], &source, &target, &password].concat()).await;
        assert_eq!(key_pair(&to, "changed").await.leaf().serial, serial);
    }
}

#[tokio::test]
async fn java_and_openssl_read_the_keystores() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    std::fs::write(directory.join("password"), format!("{PASSWORD}\n")).unwrap();
    // A key in a form that keystores don't have.
    let key = ["--key-type", "rsa-2048", "--key-format", "traditional", "--log-level", "trace"];
    let outputs = [
        "--output=@plain,format=pkcs12",
        "--output=@p12,format=pkcs12,alias=Web,password-file=@password",
        "--output=@jks,format=jks,alias=web,password-file=@password",
    ];
    let mut agent = start(directory, &[&key[..], &outputs].concat());
    agent.process.wait_log(" ready ").await;
    let serial = agent.serials().pop().unwrap();
    let expected = |directory_name: &str, kind, suffix, alias, password| Expected {
        directory: directory.join(directory_name),
        kind,
        suffix,
        alias,
        password,
    };
    let all = [
        expected("plain", "PKCS12", "p12", "default", "changeit"),
        expected("p12", "PKCS12", "p12", "web", PASSWORD),
        expected("jks", "JKS", "jks", "web", PASSWORD),
    ];
    let keytool = installed("get-keytool", &[]).await;
    for keystore in &all {
        keystore.is_read_by_java(&keytool, &serial).await;
    }
    // OpenSSL 3 reads PKCS#12 without its legacy provider.
    for keystore in &all[..2] {
        assert_eq!(key_pair(&keystore.file("keystore"), keystore.password).await.leaf().serial, serial);
    }
    let log = agent.process.log();
    assert!(!log.contains(PASSWORD) && !log.contains("s3cret"), "{log}");
    // Equal content is not written again.
    agent.process.kill().await;
    let generations = || all.each_ref().map(|it| std::fs::read_link(it.directory.join("..data")).unwrap());
    let before = generations();
    let mut again = start(directory, &[&["--state-dir", "@state"], &key[..], &outputs].concat());
    again.process.wait_log_times("output files written", 3).await;
    assert_ne!(generations(), before, "another certificate");
    again.wait_metric("attache_state_failing", 0).await;
    let before = generations();
    again.process.kill().await;
    again.restart();
    again.process.wait_log_times("output files already up to date", 3).await;
    assert_eq!(generations(), before);
}

#[tokio::test]
async fn a_password_file_that_cannot_be_used_is_reported_and_the_repair_is_picked_up() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let mut agent = start(directory, &["--output=@out,format=jks,password-file=@password", "--output=@pem"]);
    let (_, line) = agent.process.wait_log("output write failed").await;
    let words = format!("reading the password file {} failed: ", directory.join("password").display());
    assert!(line.contains("WARN") && line.contains(&words), "{line}");
    agent.wait_metric("attache_output_failing", 1).await;
    wait_until("the other is written", || directory.join("pem/key.pem").exists()).await;
    std::fs::write(directory.join("password"), "changed-it").unwrap();
    agent.process.wait_log("output directory writable again").await;
    agent.process.wait_log(" ready ").await;
    agent.wait_metric("attache_output_failing", 0).await;
}

#[tokio::test]
async fn a_failing_output_is_named_and_the_others_are_written() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    std::fs::write(directory.join("one"), "in the way").unwrap();
    let hook = "test \"$ATTACHE_OUTPUT_DIRS\" = \"$ATTACHE_OUTPUT_DIR:@two\" && echo . >> @runs";
    let outputs = ["--output-dir", "@one", "--output", "@two,cert-file=tls.crt,key-file=tls.key,mode=0640"];
    let mut agent = start(directory, &[&outputs[..], &["--output-hook", hook]].concat());
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
    assert!(
        ["tls.crt", "tls.key", "root-cert.pem"].iter().all(|name| directory.join("two").join(name).exists())
    );
    let (status, body) = agent.status("/readyz").await;
    let one = directory.join("one").display().to_string();
    assert!(status == 503 && body.starts_with(&format!("output: {one}: not written yet: ")), "{body}");
    assert!(body.contains("move it away, or choose another --output-dir"), "{body}");
    assert_eq!(agent.metric("attache_output_failing").await, 1.0);
    let series = |name: &str| {
        format!("attache_output_directory_failing{{directory=\"{}/{name}\"}}", directory.display())
    };
    assert_eq!(agent.metric(&series("one")).await, 1.0);
    assert_eq!(agent.metric(&series("two")).await, 0.0);
    let socket = agent.socket.display().to_string();
    let report = async || -> Value {
        let shown = output(&["status", "--socket", &socket, "--output", "json"]).await.stdout;
        serde_json::from_slice(&shown).unwrap()
    };
    let shown = report().await["output"].take();
    let directories = shown["directories"].as_array().unwrap();
    assert_eq!(directories[0]["path"], one.as_str());
    assert!(directories[0]["error"].is_string() && directories[0]["not_after"].is_null(), "{shown}");
    assert!(directories[1]["error"].is_null() && directories[1]["not_after"].is_string(), "{shown}");
    for field in ["failing_since", "next_try"] {
        assert!(directories[0][field].is_string() && directories[1][field].is_null(), "{shown}");
        assert_eq!(shown[field], directories[0][field]);
    }
    assert!(shown["not_after"].is_null() && shown["error"] == directories[0]["error"], "{shown}");
    let table = String::from_utf8(output(&["status", "--socket", &socket]).await.stdout).unwrap();
    let row = |words: &str| {
        table.lines().any(|line| line.trim_start().starts_with("directory") && line.contains(words))
    };
    assert!(row(&format!("{one}  nothing written yet")) && row("/two  "), "{table}");
    let (_, shown) = table.split_once("output directory").unwrap();
    let labels = shown.lines().skip(1).filter_map(|line| line.trim_start().split("  ").next());
    let labels: Vec<_> = labels.collect();
    assert_eq!(labels, ["directory", "last error", "since", "next try", "directory"], "{table}");

    std::fs::remove_file(directory.join("one")).unwrap();
    agent.process.wait_log(" ready ").await;
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 2).await;
    assert_eq!(agent.metric(&series("one")).await, 0.0);
    assert_eq!(std::fs::read_to_string(directory.join("runs")).unwrap(), ".\n.\n");
}

/// A real HAProxy, a master with workers, as a child process.
struct HaProxy {
    _master: Child,
    group: Pid,
}

impl HaProxy {
    async fn start(directory: &Path) -> Self {
        let place = directory.display();
        let configuration = format!(
            "global\n  pidfile {place}/pid\n\
             defaults\n  mode http\n  timeout client 10s\n  timeout server 10s\n  timeout connect 10s\n\
             frontend web\n  bind unix@{place}/https ssl crt {place}/out/combined.pem ca-file {place}/out/root-cert.pem verify optional\n  \
             http-request return status 200 content-type text/plain string served\n"
        );
        std::fs::write(directory.join("haproxy.cfg"), configuration).unwrap();
        let binary = installed("get-haproxy", &[]).await;
        let mut command = Command::new(&binary);
        command.args(["-W", "-f"]).arg(directory.join("haproxy.cfg")).arg("-p").arg(directory.join("pid"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        command.stderr(std::fs::File::create(directory.join("haproxy.log")).unwrap());
        let master = command.process_group(0).spawn().unwrap();
        let group = Pid::from_raw(master.id().unwrap().try_into().unwrap()).unwrap();
        Self { _master: master, group }
    }
}

impl Drop for HaProxy {
    fn drop(&mut self) {
        let _ = kill_process_group(self.group, Signal::KILL);
    }
}

/// A request of an ordinary TLS client, which knows the root and the server's name: the serial of the server's certificate.
async fn ask(socket: &Path, root: &Path) -> anyhow::Result<String> {
    let mut roots = RootCertStore::empty();
    for root in pem::certificates(&std::fs::read(root)?)? {
        roots.add(root)?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let io = UnixStream::connect(socket).await?;
    let mut stream =
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("web.example")?, io).await?;
    let leaf = stream.get_ref().1.peer_certificates().unwrap()[0].clone();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    anyhow::ensure!(answer.starts_with("HTTP/1.0 200 ") || answer.starts_with("HTTP/1.1 200 "), "{answer}");
    Ok(attache::pki::certificate::Certificate::parse(&leaf)?.serial)
}

#[tokio::test]
async fn haproxy_serves_ordinary_clients_with_the_combined_file_and_reloads_it_after_a_renewal() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let hook = "test ! -e @pid || kill -USR2 \"$(head -n 1 @pid)\"";
    let options = ["--dns-san", "web.example", "--output", "@out,format=combined", "--output-hook", hook];
    let mut agent = start(directory, &options);
    agent.process.wait_log(" ready ").await;
    let _haproxy = HaProxy::start(directory).await;
    let (socket, root) = (directory.join("https"), directory.join("out/root-cert.pem"));
    let log = || std::fs::read_to_string(directory.join("haproxy.log")).unwrap();
    let first = wait_for("HAProxy serves", async || ask(&socket, &root).await.ok()).await;
    assert_eq!(Some(&first), agent.serials().last(), "{}", log());
    let socket_of_agent = agent.socket.display().to_string();
    assert!(output(&["renew", "--socket", &socket_of_agent]).await.status.success());
    agent.process.wait_log_times("output files written", 2).await;
    let second = agent.serials().pop().unwrap();
    assert_ne!(first, second);
    wait_for("HAProxy serves the new certificate", async || {
        // No connection is refused meanwhile, and none fails the client's checks.
        let served = ask(&socket, &root).await.unwrap_or_else(|error| panic!("{error:#}\n{}", log()));
        (served == second).then_some(())
    })
    .await;
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 2).await;
}
