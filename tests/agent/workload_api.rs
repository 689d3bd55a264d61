//! Real clients of the SPIFFE Workload API.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::proto::{JwtBundlesResponse, X509BundlesResponse, X509svid, X509svidResponse};
use prost::Message;
use rustix::process::Signal;
use tokio::process::Command;
use tokio::time::timeout;

use crate::support::fake_ca::FakeCa;
use crate::support::files::spiffe;
use crate::support::installed::installed;
use crate::support::process::{Agent, PATIENCE, Process, strs};

async fn python() -> Command {
    let mut python = Command::new(installed("get-spiffe", &[]).await);
    python.kill_on_drop(true).stdin(Stdio::piped());
    python
}

/// A Python program that uses the package as it comes, and logs what it gets.
async fn client(socket: &Path) -> Process {
    let mut python = python().await;
    python.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/workload_api.py")).arg(socket);
    Process::start(python)
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

    let mut client = client(&agent.socket).await;
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

/// What the original writes is what the subset in `proto/` writes.
#[tokio::test]
async fn the_messages_are_those_of_the_workload_api() {
    const WRITE: &str = r#"
from spiffe._proto import workload_pb2 as api
one = api.X509SVID(spiffe_id="a", x509_svid=b"b", x509_svid_key=b"c", bundle=b"d")
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
