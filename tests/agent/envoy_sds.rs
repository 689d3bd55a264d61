//! The protocol with real Envoys, the newest and the oldest, in both dialects.

use std::path::Path;

use serde_json::{Value, json};
use tonic::Code;

use crate::support::envoy::{Envoy, NEWEST, OLDEST, http_get};
use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::{Mounted, spiffe, swap};
use crate::support::mesh::{Traffic, bootstrap, caller_envoy, wait_success};
use crate::support::process::{Agent, failure, strs};

/// Adds a listener file to `bootstrap`: Envoy opens the listeners that are written to it later.
fn with_listener_file(mut bootstrap: Value, directory: &Path) -> Value {
    let file = directory.join("listeners.json");
    write_listeners(directory, &[]);
    bootstrap["dynamic_resources"] = json!({
        "lds_config": { "resource_api_version": "V3", "path_config_source": { "path": file } },
    });
    bootstrap
}

fn write_listeners(directory: &Path, listeners: &[Value]) {
    let typed = listeners.iter().map(|listener| {
        let mut listener = listener.clone();
        listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
        listener
    });
    let content =
        json!({ "version_info": listeners.len().to_string(), "resources": typed.collect::<Vec<_>>() });
    // Envoy reads the file when it is renamed into place.
    std::fs::write(directory.join("listeners.new"), content.to_string()).unwrap();
    std::fs::rename(directory.join("listeners.new"), directory.join("listeners.json")).unwrap();
}

/// The inbound listener of `bootstrap` under another name. Another `timeout` for its secrets makes its sds_config a
/// different one.
fn another_listener(bootstrap: &Value, name: &str, timeout: Option<&str>) -> Value {
    let mut listener = bootstrap["static_resources"]["listeners"][0].clone();
    listener["name"] = json!(name);
    if let Some(timeout) = timeout {
        let text = listener.to_string().replace(
            "\"initial_fetch_timeout\":\"15s\"",
            &format!("\"initial_fetch_timeout\":\"{timeout}\""),
        );
        assert_ne!(text, listener.to_string());
        listener = serde_json::from_str(&text).unwrap();
    }
    listener
}

async fn wait_serial(envoy: &Envoy, mounted: &Mounted) {
    let serial = mounted.serial();
    envoy
        .wait_until("Envoy uses the newest certificate", async || {
            envoy.certs().await.to_string().contains(&serial)
        })
        .await;
}

async fn the_whole_protocol(version: &str, delta: bool) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (ca, certs) = (directory.join("ca"), directory.join("certs"));
    let mount = |mounted: Mounted| {
        mounted.write(&certs);
        mounted
    };
    let mount_good = || mount(Mounted::new(&ca, "web"));
    let first = mount_good();
    let mut agent = Agent::ready(directory, "web", &["--cert-dir", certs.to_str().unwrap()]).await;
    let plain = bootstrap(&agent.socket, if delta { &["--delta"] } else { &[] }).await;
    let envoy =
        Envoy::start_version(version, with_listener_file(plain.clone(), directory), directory, "envoy").await;
    envoy.wait_listeners(&["inbound"]).await;
    wait_serial(&envoy, &first).await;
    assert_eq!(agent.metric("attache_streams{name=\"default\"}").await, 1.0);

    // Renewal.
    let second = mount_good();
    wait_serial(&envoy, &second).await;

    // Envoy rejects a key that it can't read, and keeps the old one. The rejection is reported once, and not repeated.
    let refused = mount(Mounted::bad_for_envoy(&ca, "web"));
    let (_, line) = agent.process.wait_log("Envoy rejected a secret").await;
    assert!(line.contains("name=\"default\"") && line.contains("envoy"), "{line}");
    envoy.wait_stat("sds.default.update_rejected", 1).await;
    assert!(!envoy.certs().await.to_string().contains(&refused.serial()));
    assert_eq!(agent.metric("attache_secret_rejected{name=\"default\"}").await, 1.0);

    // The next good key pair is accepted.
    let third = mount_good();
    wait_serial(&envoy, &third).await;
    assert_eq!(envoy.stat("sds.default.update_rejected").await, 1);
    envoy
        .wait_until("the agent has received the ACK", async || {
            agent.metric("attache_secret_rejected{name=\"default\"}").await == 0.0
        })
        .await;

    // The agent restarts with the same bytes: Envoy holds them and is not sent them again.
    let received = envoy.stat("sds.default.update_success").await;
    agent.process.kill().await;
    agent.restart();
    agent.process.wait_log(" ready ").await;
    envoy
        .wait_until("Envoy is back", async || {
            agent.metric("attache_streams{name=\"default\"}").await == 1.0
                && agent.metric("attache_streams{name=\"ROOTCA\"}").await == 1.0
        })
        .await;

    // A listener that is added later uses what Envoy holds, although nothing was sent since the restart.
    write_listeners(directory, &[another_listener(&plain, "later", None)]);
    envoy.wait_listeners(&["later"]).await;
    envoy.wait_stat("listener_manager.total_listeners_active", 2).await;
    assert_eq!(envoy.stat("sds.default.update_success").await, received);
    assert_eq!(agent.metric("attache_pushes_total{name=\"default\"}").await, 0.0);
    assert_eq!(
        agent.metric("attache_streams{name=\"default\"}").await,
        1.0,
        "the listener shares the stream"
    );

    // A listener with its own configuration opens its own streams, which are answered.
    let apart = another_listener(&plain, "apart", Some("16s"));
    write_listeners(directory, &[another_listener(&plain, "later", None), apart]);
    envoy.wait_stat("listener_manager.total_listeners_active", 3).await;
    assert_eq!(agent.metric("attache_streams{name=\"default\"}").await, 2.0);
    assert_eq!(agent.metric("attache_pushes_total{name=\"default\"}").await, 1.0);

    // The next change reaches both.
    let fourth = mount_good();
    wait_serial(&envoy, &fourth).await;
    envoy
        .wait_until("both streams have it", async || {
            agent.metric("attache_acks_total{name=\"default\"}").await == 3.0
        })
        .await;
    assert_eq!(agent.process.count("WARN Envoy rejected"), 0, "{}", agent.process.log());
}

#[tokio::test]
async fn the_newest_envoy_speaks_state_of_the_world() {
    the_whole_protocol(NEWEST, false).await;
}

#[tokio::test]
async fn the_newest_envoy_speaks_delta() {
    the_whole_protocol(NEWEST, true).await;
}

#[tokio::test]
async fn the_oldest_envoy_speaks_state_of_the_world() {
    the_whole_protocol(OLDEST, false).await;
}

#[tokio::test]
async fn the_oldest_envoy_speaks_delta() {
    the_whole_protocol(OLDEST, true).await;
}

/// Envoy builds its TLS context when both secrets have arrived, and blames the later one: it rejects the roots because
/// of the key pair. It keeps the roots nevertheless, and uses them once the key pair is repaired.
async fn a_bad_key_pair_at_first_does_not_cost_the_roots(delta: bool) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (ca, certs, callers) = (directory.join("ca"), directory.join("certs"), directory.join("callers"));
    Mounted::bad_for_envoy(&ca, "api").write(&certs);
    let mut agent = Agent::ready(directory, "api", &["--cert-dir", certs.to_str().unwrap()]).await;
    let plain = bootstrap(&agent.socket, if delta { &["--delta"] } else { &[] }).await;
    let envoy = Envoy::start(plain, directory, "api").await;
    let (_, line) = agent.process.wait_log("Envoy rejected a secret").await;
    assert!(line.contains("Failed to load private key"), "{line}");

    let good = Mounted::new(&ca, "api");
    good.write(&certs);
    wait_serial(&envoy, &good).await;
    envoy.wait_listeners(&["inbound"]).await;
    Mounted::new(&ca, "web").write(&callers);
    let caller = Agent::ready(directory, "web", &["--cert-dir", callers.to_str().unwrap()]).await;
    let inbound = envoy.listener_address("inbound").await;
    let caller = caller_envoy(directory, "web", &caller, inbound, &spiffe("api")).await;
    wait_success(&caller, caller.listener_address("outbound").await).await;
}

#[tokio::test]
async fn a_bad_key_pair_at_first_does_not_cost_the_roots_of_state_of_the_world() {
    a_bad_key_pair_at_first_does_not_cost_the_roots(false).await;
}

#[tokio::test]
async fn a_bad_key_pair_at_first_does_not_cost_the_roots_of_delta() {
    a_bad_key_pair_at_first_does_not_cost_the_roots(true).await;
}

/// Envoy would accept it silently, and open listeners whose peers all refuse it.
#[tokio::test]
async fn an_expired_certificate_is_sent_to_no_new_stream_and_taken_from_no_old_one() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let mut options = ca.client(directory);
    options.extend(["--cert-ttl", "4s"].map(str::to_owned));
    let mut agent = Agent::ready(directory, "web", &strs(&options)).await;
    let old = Envoy::start(bootstrap(&agent.socket, &["--delta"]).await, directory, "old").await;
    old.wait_listeners(&["inbound"]).await;
    ca.set(Mood::Refuse(Code::Unavailable));
    old.wait_until("the certificate has expired", async || agent.status("/readyz").await.0 == 503).await;
    let (_, body) = agent.status("/readyz").await;
    assert!(body.starts_with("default: expired at") && body.contains("Unavailable"), "{body}");

    let new = Envoy::start(bootstrap(&agent.socket, &["--delta"]).await, directory, "new").await;
    new.wait_stat("sds.ROOTCA.update_success", 1).await;
    let socket = agent.socket.to_str().unwrap();
    let (_, error) = failure(&["get", "--socket", socket, "default", "--timeout", "300ms"]).await;
    assert!(error.contains("expired at"), "{error}");
    assert_eq!(new.stat("sds.default.update_success").await, 0);
    assert_ne!(old.certs().await["certificates"], json!([]), "what it has stays");
    assert_eq!(old.stat("sds.default.update_rejected").await, 0);

    ca.set(Mood::Good);
    new.wait_listeners(&["inbound"]).await;
    agent.process.wait_log("the CA signs again").await;
    let newest = agent.serials().last().unwrap().clone();
    for envoy in [&old, &new] {
        let is_used = async || envoy.certs().await.to_string().contains(&newest);
        envoy.wait_until("Envoy has the newest certificate", is_used).await;
    }
}

/// A name that no agent knows is reported as removed; Envoy waits as configured, then continues.
#[tokio::test]
async fn an_unknown_name_delays_nothing_else() {
    for delta in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let certs = directory.join("certs");
        Mounted::new(&directory.join("ca"), "web").write(&certs);
        let mut agent = Agent::ready(directory, "web", &["--cert-dir", certs.to_str().unwrap()]).await;
        let mut plain = bootstrap(&agent.socket, if delta { &["--delta"] } else { &[] }).await;
        let mut unknown = another_listener(&plain, "unknown", None);
        unknown = serde_json::from_str(&unknown.to_string().replace("\"default\"", "\"unknown\"")).unwrap();
        plain["static_resources"]["listeners"].as_array_mut().unwrap().push(unknown);
        let envoy = Envoy::start(plain, directory, "envoy").await;
        let (_, line) = agent.process.wait_log("resource names refused").await;
        assert!(line.contains("unknown resource name") && line.contains("unknown"), "{line}");
        envoy.wait_stat("sds.default.update_success", 1).await;
        envoy.wait_stat("sds.ROOTCA.update_success", 1).await;
        assert_eq!(agent.metric("attache_refusals_total{reason=\"unknown_name\"}").await, 1.0);
        assert_eq!(agent.metric("attache_streams{name=\"default\"}").await, 1.0);
        if delta {
            envoy.wait_stat("sds.unknown.update_attempt", 2).await;
        }
        assert_eq!(envoy.stat("sds.unknown.update_rejected").await, 0, "{}", envoy.log());
    }
}

/// Envoy's next listener would use the rejected secret: the old one must be sent again when it is the newest again.
#[tokio::test]
async fn the_secret_before_a_rejected_one_can_be_restored() {
    for delta in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let (ca, certs) = (directory.join("ca"), directory.join("certs"));
        let good = Mounted::new(&ca, "web");
        good.write(&certs);
        let mut agent = Agent::ready(directory, "web", &["--cert-dir", certs.to_str().unwrap()]).await;
        let plain = bootstrap(&agent.socket, if delta { &["--delta"] } else { &[] }).await;
        let envoy = Envoy::start(with_listener_file(plain.clone(), directory), directory, "envoy").await;
        envoy.wait_listeners(&["inbound"]).await;
        Mounted::bad_for_envoy(&ca, "web").write(&certs);
        agent.process.wait_log("Envoy rejected a secret").await;
        good.write(&certs);
        envoy.wait_stat("sds.default.update_success", 2).await;
        let another = another_listener(&plain, "later", None);
        write_listeners(directory, std::slice::from_ref(&another));
        envoy.wait_listeners(&["later"]).await;
        // A caller is accepted by the new listener.
        let caller = Agent::ready(directory, "caller", &["--cert-dir", certs.to_str().unwrap()]).await;
        let later = envoy.listener_address("later").await;
        let caller = caller_envoy(directory, "caller", &caller, later, &spiffe("web")).await;
        wait_success(&caller, caller.listener_address("outbound").await).await;
    }
}

/// Two Envoys get all their secrets from files that they name: the caller's key pair, the callee's, and the roots of
/// both. The files are swapped again and again. Every request is a handshake.
async fn files_that_envoy_names_are_rotated_under_traffic(delta: bool) {
    const ROTATIONS: usize = 5;
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let [ca, web, api, roots] = ["ca", "web-certs", "api-certs", "roots"].map(|name| directory.join(name));
    // Each rotation adds another root beside the one that counts.
    let rotate = |number: usize| {
        let pairs = [(&web, "web"), (&api, "api")].map(|(volume, account)| {
            let mounted = Mounted::new(&ca, account);
            swap(volume, mounted.files());
            mounted
        });
        let further = Mounted::new(&directory.join(format!("ca-{number}")), "unknown").root;
        swap(&roots, [("ca.pem", [&pairs[0].root[..], &further].concat().as_slice())]);
        pairs
    };
    rotate(0);
    let mut agent = Agent::ready(directory, "agent", &["--cert-dir", web.to_str().unwrap()]).await;
    let pair_name = |volume: &Path| format!("file-cert:{0}/cert-chain.pem~{0}/key.pem", volume.display());
    let (web_name, api_name) = (pair_name(&web), pair_name(&api));
    let roots_name = format!("file-root:{}/ca.pem", roots.display());
    let named = |bootstrap: Value, pair: &str| -> Value {
        let text = bootstrap.to_string().replace("\"default\"", &json!(pair).to_string());
        serde_json::from_str(&text.replace("\"ROOTCA\"", &json!(roots_name).to_string())).unwrap()
    };
    let dialect: &[&str] = if delta { &["--delta"] } else { &[] };

    let inbound = bootstrap(&agent.socket, dialect).await;
    let api_envoy = Envoy::start(named(inbound, &api_name), directory, "api").await;
    let peer = api_envoy.listener_address("inbound").await.to_string();
    let (callee, out) = (spiffe("api"), ["--outbound-listen", "127.0.0.1:0", "--outbound-to", &peer]);
    let outbound =
        bootstrap(&agent.socket, &[&out, &["--outbound-peer", &callee][..], dialect].concat()).await;
    let web_envoy = Envoy::start(named(outbound, &web_name), directory, "web").await;
    let outbound = web_envoy.listener_address("outbound").await;
    wait_success(&web_envoy, outbound).await;

    let traffic = Traffic::start(outbound);
    for number in 1..=ROTATIONS {
        let [newest_web, newest_api] = rotate(number);
        wait_serial(&web_envoy, &newest_web).await;
        wait_serial(&api_envoy, &newest_api).await;
        // The peer's view, on a new connection.
        let serial = newest_web.serial();
        let is_seen = async || http_get(outbound, "/").await.unwrap().1["x-peer-serial"].contains(&serial);
        web_envoy.wait_until("the peer sees the newest serial", is_seen).await;
    }
    for (name, streams) in [(&web_name, 1), (&api_name, 1), (&roots_name, 2)] {
        let label = |metric: &str| format!("attache_{metric}{{name=\"{name}\"}}");
        // The first secret, and one for each rotation.
        agent.wait_metric(&label("acks_total"), streams * (1 + ROTATIONS)).await;
        assert_eq!(agent.metric(&label("pushes_total")).await, (streams * (1 + ROTATIONS)) as f64);
        assert_eq!(agent.metric(&label("streams")).await, streams as f64);
    }
    let report = traffic.stop().await;
    assert!(report.failures.is_empty(), "{:#?}\n{}", report.failures, web_envoy.log());
    assert!(report.serials.len() >= ROTATIONS, "{:?}", report.serials);
    assert_eq!(report.identities, [spiffe("web")]);
    assert_eq!(agent.process.count("WARN"), 0, "{}", agent.process.log());
}

#[tokio::test]
async fn files_that_envoy_names_rotate_under_traffic_in_state_of_the_world() {
    files_that_envoy_names_are_rotated_under_traffic(false).await;
}

#[tokio::test]
async fn files_that_envoy_names_rotate_under_traffic_in_delta() {
    files_that_envoy_names_are_rotated_under_traffic(true).await;
}
