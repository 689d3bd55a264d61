//! Real clients of the SPIFFE Workload API.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::net::http2::with_connection;
use attache::pki::pem;
use attache::proto::spiffe_workload_api_client::SpiffeWorkloadApiClient;
use attache::proto::{JwtBundlesResponse, X509BundlesResponse, X509svid, X509svidRequest, X509svidResponse};
use prost::Message;
use rustix::process::Signal;
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio::time::timeout;
use tonic::Code;

use crate::support::fake_ca::FakeCa;
use crate::support::files::{Mounted, spiffe};
use crate::support::installed::installed;
use crate::support::node::Node;
use crate::support::process::{Agent, PATIENCE, Process, strs};
use crate::support::wait::wait_until;

async fn python() -> Command {
    let mut python = Command::new(installed("get-spiffe", &[]).await);
    python.kill_on_drop(true).stdin(Stdio::piped());
    python
}

/// A Python program that uses the package as it comes, and logs what it gets.
async fn client(socket: &Path, federated: &[&str]) -> Process {
    let mut python = python().await;
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/workload_api.py")).arg(socket);
    python.args(federated);
    Process::start(python)
}

#[tokio::test]
async fn a_python_client_gets_bundles_of_other_trust_domains_and_their_changes() {
    let directory = tempfile::tempdir().unwrap();
    let root = |name: &str| {
        let ca = DevelopmentCa::open(&directory.path().join(name), Clock::system()).unwrap();
        pem::of_certificates([ca.chain()[1]])
    };
    let (first, second, file) = (root("first"), root("second"), directory.path().join("two.pem"));
    std::fs::write(&file, &first).unwrap();
    let (ca, federated) = (directory.path().join("ca"), format!("two.example={}", file.display()));
    let options = ["--ca", "embedded", "--ca-dir", ca.to_str().unwrap(), "--federated-bundle", &federated];
    let agent = Agent::ready(directory.path(), "web", &options).await;
    let mut client = client(&agent.socket, &["two.example"]).await;
    client.wait_log("of two.example: roots=1 keys=0").await;
    client.wait_log("federated: two.example roots=1").await;
    let beside = file.with_extension("new");
    std::fs::write(&beside, [first, second].concat()).unwrap();
    std::fs::rename(beside, file).unwrap();
    client.wait_log("federated: two.example roots=2").await;
}

#[tokio::test]
async fn a_python_client_gets_identity_renewals_and_roots_across_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let root =
        |name: &str| Arc::new(DevelopmentCa::open(&directory.path().join(name), Clock::system()).unwrap());
    let (old, new) = (root("old"), root("new"));
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.switch(&old, &[&old]);
    let mut options = ca.client(directory.path());
    let state = directory.path().join("state");
    let more = ["--cert-ttl", "12s", "--grace-ratio", "0.8", "--state-dir", state.to_str().unwrap()];
    options.extend(more.map(str::to_owned));
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    agent.process.wait_log("attache serves").await;

    let mut client = client(&agent.socket, &[]).await;
    client.wait_log("jwt keys: 0").await;
    client.wait_log("bundle: 1").await;
    client.wait_log("no JWT: ").await;
    let first = format!("update: {} serial=", spiffe("web"));
    let (_, line) = client.wait_log(&first).await;
    assert!(line.ends_with("roots=1 key=True"), "{line}");
    client.wait_log_times(&first, 3).await;

    ca.switch(&new, &[&new, &old]);
    client.wait_log("roots=2 key=True").await;

    agent.process.signal(Signal::TERM);
    assert!(agent.process.ended().await.success());
    agent.restart();
    agent.process.wait_log("ready").await;
    let serials = agent.process.wait_log("certificate issued").await.1;
    let serial = serials.split_once("serial=\"").unwrap().1.split('"').next().unwrap();
    let serial = serial.replace(':', "");
    let serial = serial.trim_start_matches('0');
    client.wait_log(&format!("serial={serial} ")).await;
    assert_eq!(client.count("roots=0"), 0);
    agent.wait_metric("attache_streams{name=\"default\"}", 1).await;
}

#[tokio::test]
async fn a_rust_client_gets_identity_and_renewals_of_mounted_files_or_a_ca() {
    let directory = tempfile::tempdir().unwrap();
    let program = installed("get-spiffe-client", &[]).await;
    let ca = directory.path().join("ca");
    let options = ["--ca", "embedded", "--ca-dir", ca.to_str().unwrap(), "--cert-ttl", "6s"];
    let agent = Agent::ready(directory.path(), "web", &options).await;
    let start = |socket: &Path| {
        let mut client = Command::new(&program);
        client.env("SPIFFE_ENDPOINT_SOCKET", format!("unix://{}", socket.display()));
        client.kill_on_drop(true).stdin(Stdio::null());
        Process::start(client)
    };
    let line = format!("update: {} roots=1", spiffe("default"));
    start(&agent.socket).wait_log_times(&line, 2).await;

    let certs = directory.path().join("certs");
    Mounted::new(&ca, "files").write(&certs);
    let options = ["--file-mounted-certs", "--cert-dir", certs.to_str().unwrap()];
    let agent = Agent::ready(directory.path(), "files", &options).await;
    start(&agent.socket).wait_log(&format!("update: {} roots=1", spiffe("files"))).await;
}

#[tokio::test]
async fn each_workload_of_a_node_has_its_own_identity_and_its_streams_end_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca");
    let node = Node::start(directory.path(), &["--ca", "embedded", "--ca-dir", ca.to_str().unwrap()]).await;
    for name in ["web", "db"] {
        node.describe(name, name, "");
        wait_until("its socket", || node.socket(name).exists()).await;
    }
    for name in ["web", "db"] {
        let end = || std::fs::remove_file(node.file(name)).unwrap();
        timeout(PATIENCE, follow(&node.socket(name), &spiffe(name), end)).await.expect("the stream goes on");
    }
}

/// Gets `identity` from `socket`; then the stream ends, after `end`.
async fn follow(socket: &Path, identity: &str, end: impl FnOnce()) {
    let io = UnixStream::connect(socket).await.unwrap();
    let talk = async |connection| {
        let origin = http::Uri::from_static("http://attache");
        let mut request = tonic::Request::new(X509svidRequest {});
        request.metadata_mut().insert("workload.spiffe.io", "true".parse().unwrap());
        let mut client = SpiffeWorkloadApiClient::with_origin(connection, origin);
        let mut stream = client.fetch_x509svid(request).await.unwrap().into_inner();
        let first = stream.message().await.unwrap().unwrap();
        assert_eq!(first.svids[0].spiffe_id, identity);
        end();
        assert_eq!(stream.message().await.unwrap_err().code(), Code::Unavailable);
    };
    with_connection(io, talk).await.unwrap();
}

/// What the original writes is what the subset in `proto/` writes.
#[tokio::test]
async fn the_messages_are_those_of_the_workload_api() {
    const WRITE: &str = r#"
from spiffe._proto import workload_pb2 as api
one = api.X509SVID(spiffe_id="a", x509_svid=b"b", x509_svid_key=b"c", bundle=b"d", hint="h")
svids = api.X509SVIDResponse(svids=[one], crl=[b"e"], federated_bundles={"f": b"g"})
bundles = api.X509BundlesResponse(crl=[b"e"], bundles={"f": b"g"})
jwt = api.JWTBundlesResponse(bundles={"f": b"g"})
for message in [one, svids, bundles, jwt]:
    print(message.SerializeToString().hex())
"#;
    let output = timeout(PATIENCE, python().await.args(["-c", WRITE]).output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = String::from_utf8(output.stdout).unwrap();
    let bytes = |text: &'static str| text.into();
    let map = || [("f".to_owned(), bytes("g"))].into();
    let svid = X509svid {
        spiffe_id: "a".to_owned(),
        x509_svid: bytes("b"),
        x509_svid_key: bytes("c"),
        bundle: bytes("d"),
        hint: "h".to_owned(),
    };
    let ours = [
        svid.encode_to_vec(),
        X509svidResponse { svids: vec![svid], crl: vec![bytes("e")], federated_bundles: map() }
            .encode_to_vec(),
        X509BundlesResponse { crl: vec![bytes("e")], bundles: map() }.encode_to_vec(),
        JwtBundlesResponse { bundles: map() }.encode_to_vec(),
    ];
    let ours = ours.map(|message| message.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    assert_eq!(written.lines().collect::<Vec<_>>(), ours);
}
