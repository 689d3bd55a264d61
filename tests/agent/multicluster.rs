//! `examples/multicluster/run`: two clusters with real Envoys, gateways between them, and a new root under traffic.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Command;
use tokio::time::timeout;

use crate::support::envoy::binary;

/// It takes half a minute on two cores.
const LONGEST: Duration = Duration::from_secs(240);

#[tokio::test]
async fn two_clusters_share_a_root_and_replace_it_without_a_failed_request() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/multicluster/run");
    let mut command = Command::new(example);
    command.arg("--quick").env("ATTACHE", env!("CARGO_BIN_EXE_attache")).env("ENVOY_BIN", binary().await);
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.kill_on_drop(true).spawn().unwrap();
    let group = Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
    let finished = timeout(LONGEST, child.wait_with_output()).await;
    // Whatever became of the script, its Envoys and agents are in its group.
    let _ = kill_process_group(group, Signal::KILL);
    let output = finished.expect("the example does not end").unwrap();
    let [printed, error] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{printed}{error}");
    for words in [
        "intermediate: O=Attache, CN=cluster1 intermediate CA, L=cluster1",
        "intermediate: O=Attache, CN=cluster2 intermediate CA, L=cluster2",
        "asked by spiffe://cluster.local/ns/sample/sa/sleep",
        "cluster1 asks: v1 v1 v1 v1 v1 v1 v1 v1 v1 v1",
        "cluster2 has an intermediate, and certificates, of the new root",
        ", 0 failed; ",
        "no request failed while the root was replaced, and no connection was refused",
    ] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
}
