//! Two trust domains that federate: each agent has the other's roots, and real Envoys know whose roots are whose.

use std::path::{Path, PathBuf};
use std::time::Duration;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};

use crate::support::envoy::{Envoy, http_get};
use crate::support::files::Mounted;
use crate::support::mesh::{bootstrap, named, wait_success};
use crate::support::process::{Agent, failure};

const ONE: &str = "spiffe://one.example/web";
const TWO: &str = "spiffe://two.example/web";

/// The roots of the CA in `directory`.
fn roots(directory: &Path) -> Vec<u8> {
    pem::of_certificates([DevelopmentCa::open(directory, Clock::system()).unwrap().chain()[1]])
}

/// Replaces the file at once.
fn swap(file: &Path, content: &[u8]) {
    let beside = file.with_extension("new");
    std::fs::write(&beside, content).unwrap();
    std::fs::rename(beside, file).unwrap();
}

/// A directory with the CAs of both trust domains, and the files that each has of the other.
struct Federation {
    directory: tempfile::TempDir,
}

impl Federation {
    fn new() -> Self {
        let federation = Self { directory: tempfile::tempdir().unwrap() };
        for name in ["one", "two"] {
            swap(&federation.bundle(name), &roots(&federation.ca(name)));
        }
        federation
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn ca(&self, name: &str) -> PathBuf {
        self.path().join(format!("{name}-ca"))
    }

    /// The file in which others have the roots of `name`.
    fn bundle(&self, name: &str) -> PathBuf {
        self.path().join(format!("{name}.pem"))
    }

    /// An agent of `identity` with the CA in the directory `ca`, which federates with `other`.
    async fn agent(&self, name: &str, identity: &str, ca: &Path, other: &str) -> Agent {
        let federated = format!("{other}.example={}", self.bundle(other).display());
        let options = ["--ca", "embedded", "--ca-dir", ca.to_str().unwrap(), "--spiffe-id", identity];
        Agent::ready(self.path(), name, &[&options[..], &["--federated-bundle", &federated]].concat()).await
    }

    /// An Envoy that these may call, and which takes its trust bundles by the name `roots`.
    async fn callee(&self, name: &str, agent: &Agent, roots: &str, allowed: &[&str]) -> Envoy {
        let options: Vec<_> = allowed.iter().flat_map(|id| ["--allow", id]).collect();
        let bootstrap = named(&bootstrap(&agent.socket, &options).await, roots);
        Envoy::start(bootstrap, self.path(), name).await
    }

    /// An Envoy that calls `callee`, which must have the identity `peer`.
    async fn caller(&self, name: &str, agent: &Agent, roots: &str, callee: &Envoy, peer: &str) -> Envoy {
        callee.wait_listeners(&["inbound"]).await;
        let to = callee.listener_address("inbound").await.to_string();
        let options = ["--outbound-listen", "127.0.0.1:0", "--outbound-to", &to, "--outbound-peer", peer];
        let bootstrap = named(&bootstrap(&agent.socket, &options).await, roots);
        Envoy::start(bootstrap, self.path(), name).await
    }
}

async fn succeeds(caller: &Envoy) {
    caller.wait_listeners(&["outbound"]).await;
    wait_success(caller, caller.listener_address("outbound").await).await;
}

/// How many peers the callee has refused because of their chain.
async fn refused(callee: &Envoy) -> u64 {
    let stats = callee.stats().await;
    stats.iter().filter(|(name, _)| name.ends_with(".ssl.fail_verify_error")).map(|(_, count)| count).sum()
}

/// Waits until `callee` has refused one more connection of `caller`.
async fn wait_refused(caller: &Envoy, callee: &Envoy) {
    caller.wait_listeners(&["outbound"]).await;
    let (before, outbound) = (refused(callee).await, caller.listener_address("outbound").await);
    let is_refused = async || {
        let answer = http_get(outbound, "/").await;
        assert!(!matches!(answer, Ok((200, ..))), "{answer:?}");
        refused(callee).await > before
    };
    caller.wait_until("its certificate is refused", is_refused).await;
}

#[tokio::test]
async fn envoys_of_two_trust_domains_trust_each_others_roots_for_the_own_domain_of_each_alone() {
    let federation = Federation::new();
    let one = federation.agent("one", ONE, &federation.ca("one"), "two").await;
    let two = federation.agent("two", TWO, &federation.ca("two"), "one").await;
    let callee_of_one = federation.callee("callee-one", &one, "ALL", &[ONE, TWO]).await;
    let callee_of_two = federation.callee("callee-two", &two, "spiffe://one.example", &[ONE]).await;
    succeeds(&federation.caller("two-to-one", &two, "spiffe://one.example", &callee_of_one, ONE).await).await;
    succeeds(&federation.caller("one-to-two", &one, "ALL", &callee_of_two, TWO).await).await;

    // An identity of one trust domain that the CA of the other one has signed.
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let request = csr::request(&key, None, &csr::Names::default()).unwrap();
    let ca = DevelopmentCa::open(&federation.ca("two"), Clock::system()).unwrap();
    let leaf = ca.issue(&request, &ONE.parse().unwrap(), Duration::from_secs(3600)).unwrap();
    let forged = Mounted {
        chain: pem::of_certificates([&leaf, ca.chain()[0]]),
        key: key.to_private_key().to_pem().to_vec(),
        root: roots(&federation.ca("one")),
    };
    let certs = federation.path().join("forged-certs");
    forged.write(&certs);
    let options = ["--file-mounted-certs", "--cert-dir", certs.to_str().unwrap()];
    let forger = Agent::ready(federation.path(), "forger", &options).await;
    let forger = federation.caller("forger", &forger, "ROOTCA", &callee_of_one, ONE).await;
    wait_refused(&forger, &callee_of_one).await;
}

#[tokio::test]
async fn a_changed_bundle_of_another_trust_domain_is_used_without_a_restart() {
    let federation = Federation::new();
    let mut one = federation.agent("one", ONE, &federation.ca("one"), "two").await;
    let new = federation.path().join("new-ca");
    let two = federation.agent("two", TWO, &new, "one").await;
    let callee = federation.callee("callee", &one, "ALL", &[TWO]).await;
    let caller = federation.caller("caller", &two, "spiffe://one.example", &callee, ONE).await;
    wait_refused(&caller, &callee).await;

    let file = federation.bundle("two");
    swap(&file, b"-----BEGIN CERTIFICATE-----\nhalf");
    let (_, line) =
        one.process.wait_log("mounted files are not used; the previous secret is still served").await;
    assert!(line.contains("spiffe://two.example"), "{line}");
    assert_eq!(one.status("/readyz").await.0, 200, "readiness does not depend on it");
    swap(&file, &[roots(&federation.ca("two")), roots(&new)].concat());
    succeeds(&caller).await;
    let (_, metrics) = one.status("/metrics").await;
    assert!(metrics.contains("name=\"spiffe://two.example\""), "{metrics}");
}

#[tokio::test]
async fn a_bundle_of_the_own_trust_domain_is_a_mistake() {
    let options = ["run", "--ca", "embedded", "--spiffe-id", ONE, "--federated-bundle", "one.example=/a.pem"];
    let (code, message) = failure(&options).await;
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("names one.example, which is the workload's own trust domain"), "{message}");
}
