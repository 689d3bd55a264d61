//! Key types and key formats: what the agent generates, and what accepts it.

use std::path::Path;

use attache::pki::key::{KeyFormat, KeyType, PrivateKey, SigningKey};
use attache::pki::pem;
use serde_json::{Value, json};

use crate::support::envoy::{Envoy, NEWEST, OLDEST, http_get};
use crate::support::fake_ca::FakeCa;
use crate::support::files::{Mounted, spiffe};
use crate::support::mesh::bootstrap;
use crate::support::nginx::{Client, Nginx};
use crate::support::process::{Agent, strs};
use crate::support::sds::{content, fetch, on_connection, secrets};

/// An Envoy that calls itself over mutual TLS: at its listener `outbound` as configured by default, at `outbound-named`
/// with Ed25519 among the signature algorithms.
async fn envoy_alone(directory: &Path, version: &str, socket: &Path) -> Envoy {
    let web = spiffe("web");
    let arguments = [
        ["--outbound-listen", "127.0.0.1:0"],
        ["--outbound-to", "127.0.0.1:1"],
        ["--outbound-peer", &web],
        ["--allow", &web],
    ];
    let bootstrap = bootstrap(socket, &arguments.concat()).await;
    let calling_itself = |mut bootstrap: Value, name: &str| {
        let pipe = json!({ "pipe": { "path": directory.join(format!("{version}-{name}")) } });
        let resources = &mut bootstrap["static_resources"];
        let endpoint = &mut resources["clusters"][1]["load_assignment"]["endpoints"][0]["lb_endpoints"][0];
        endpoint["endpoint"]["address"] = pipe.clone();
        resources["listeners"][0]["address"] = pipe;
        bootstrap
    };
    let list = ["ed25519", "ecdsa_secp256r1_sha256", "ecdsa_secp384r1_sha384", "rsa_pss_rsae_sha256"];
    let list = format!("\"tls_params\":{{\"signature_algorithms\":{},", json!(list));
    let mut text = bootstrap.to_string().replace("\"tls_params\":{", &list);
    for name in ["inbound", "outbound", "peer"] {
        text = text.replace(&format!("\"{name}\""), &format!("\"{name}-named\""));
    }
    let named = calling_itself(serde_json::from_str(&text).unwrap(), "named");
    let mut both = calling_itself(bootstrap, "plain");
    for (kind, first) in [("listeners", 0), ("clusters", 1)] {
        let more = named["static_resources"][kind].as_array().unwrap()[first..].to_vec();
        both["static_resources"][kind].as_array_mut().unwrap().extend(more);
    }
    let envoy = Envoy::start_version(version, both, directory, version).await;
    envoy.wait_listeners(&["outbound", "outbound-named"]).await;
    envoy
}

/// Waits until a call through this listener is answered with `words`: in the body, or as the caller's serial number.
async fn wait_answer(envoy: &Envoy, listener: &str, words: &str) {
    let to = envoy.listener_address(listener).await;
    let is_answer = async || {
        let (_, headers, body) = http_get(to, "/").await.unwrap();
        body.contains(words) || headers.get("x-peer-serial").is_some_and(|serial| serial == words)
    };
    envoy.wait_until(&format!("{listener} is answered with {words}"), is_answer).await;
}

/// Every key is sent to two Envoys by SDS, and to nginx as a file.
#[tokio::test]
async fn envoys_and_nginx_accept_every_key_in_either_format_but_envoys_need_ed25519_named() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let (ca, certs, out) = (directory.join("ca"), directory.join("certs"), directory.join("out"));
    let first = Mounted::new(&ca, "web");
    first.write(&certs);
    first.write(&out);
    let nginx = Nginx::start(directory, "nginx", &out).await;
    let client = PrivateKey::from_pem(&first.key).unwrap().der().clone_key();
    let client = Client::new(pem::certificates(&first.chain).unwrap(), client);
    let options = [
        ["--cert-dir", certs.to_str().unwrap()],
        ["--output-dir", out.to_str().unwrap()],
        ["--output-hook", &nginx.reload],
    ];
    let mut agent = Agent::ready(directory, "web", &options.concat()).await;
    let envoys = tokio::join!(
        envoy_alone(directory, NEWEST, &agent.socket),
        envoy_alone(directory, OLDEST, &agent.socket),
    );
    let envoys = <[Envoy; 2]>::from(envoys);

    for (name, key_type) in KeyType::ALL {
        let key = SigningKey::generate(key_type).unwrap();
        for format in [KeyFormat::Pkcs8, KeyFormat::Traditional] {
            let Ok(written) = key.to_private_key().in_format(format) else {
                assert_eq!((key_type, format), (KeyType::Ed25519, KeyFormat::Traditional));
                continue;
            };
            let mounted = Mounted { key: written.to_pem().to_vec(), ..Mounted::of_key(&ca, "web", &key) };
            mounted.write(&certs);
            let serial = mounted.serial();
            let plain = if key_type == KeyType::Ed25519 { "upstream connect error" } else { &serial };
            for envoy in &envoys {
                wait_answer(envoy, "outbound-named", &serial).await;
                wait_answer(envoy, "outbound", plain).await;
            }
            let leaf = pem::certificates(&mounted.chain).unwrap().remove(0);
            let is_shown = async || client.ask(&nginx.socket).await.is_ok_and(|(shown, _)| shown == leaf);
            let what = format!("nginx shows the certificate of {name}, {format:?}");
            envoys[0].wait_until(&what, is_shown).await;
        }
    }
    for envoy in &envoys {
        assert!(envoy.stat("cluster.peer.ssl.connection_error").await > 0, "the handshake fails");
        assert_eq!(envoy.stat("cluster.peer-named.ssl.connection_error").await, 0);
    }
    assert_eq!(nginx.errors(), [""; 0]);
    assert_eq!(agent.metric("attache_nacks_total{name=\"default\"}").await, 0.0, "{}", agent.process.log());
}

#[tokio::test]
async fn keys_are_written_in_the_configured_type_and_format() {
    type Case<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case<'_>; 5] = [
        ("default", &[], &[], "PRIVATE KEY"),
        ("ed25519", &["--key-type", "ed25519"], &[("PKCS8_KEY", "false")], "PRIVATE KEY"),
        ("istio", &[], &[("PKCS8_KEY", "false")], "EC PRIVATE KEY"),
        ("p384", &["--key-type", "ecdsa-p384", "--key-format", "traditional"], &[], "EC PRIVATE KEY"),
        ("rsa", &["--key-type", "rsa-2048", "--key-format", "traditional"], &[], "RSA PRIVATE KEY"),
    ];
    let place = tempfile::tempdir().unwrap();
    for (name, arguments, environment, label) in cases {
        let directory = place.path();
        let (ca, out) = (directory.join("ca"), directory.join(format!("{name}-out")));
        let options = ["--ca", "embedded", "--ca-dir", ca.to_str().unwrap(), "--output-dir"];
        let options = [&options[..], &[out.to_str().unwrap()], arguments].concat();
        let mut agent = Agent::start_as(directory, name, &options, |mut command| {
            command.envs(environment.iter().copied());
            command
        });
        agent.process.wait_log("ready").await;
        let served = on_connection(&agent.socket, async |client| {
            let response = fetch(&client, &["default"]).await.unwrap();
            content(secrets(&response).remove(0)).1.unwrap()
        });
        let served = served.await;
        assert!(served.starts_with(&format!("-----BEGIN {label}-----\n")), "{name}");
        assert_eq!(std::fs::read_to_string(out.join("key.pem")).unwrap(), served, "{name}");
        assert_eq!(agent.process.count("signature_algorithms"), usize::from(name == "ed25519"), "{name}");
        let log = agent.process.log();
        assert!(served.lines().all(|line| !log.contains(line)), "the key of {name} is in the log");
    }
}

/// A slow key type takes half a second to generate. If the key is there before any stream could ask, the test starts
/// again.
#[tokio::test]
async fn streams_are_answered_while_a_slow_key_is_generated() {
    const ANSWERS: usize = 20;
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let certs = directory.join("certs");
    std::fs::create_dir(&certs).unwrap();
    std::fs::write(certs.join("root-cert.pem"), Mounted::new(&directory.join("ca"), "web").root).unwrap();
    let mut options = ca.client(directory);
    options.extend(["--cert-dir", certs.to_str().unwrap(), "--key-type", "rsa-4096"].map(str::to_owned));
    let mut most = 0;
    for start in 0..10 {
        let asked = ca.calls().len();
        let mut agent = Agent::start(directory, &format!("web{start}"), &strs(&options));
        agent.process.wait_log("attache serves").await;
        let answers = on_connection(&agent.socket, async |client| {
            let mut answers = 0;
            loop {
                fetch(&client, &["ROOTCA"]).await.unwrap();
                // The CA is called as soon as there is a key.
                if ca.calls().len() > asked {
                    return answers;
                }
                answers += 1;
            }
        });
        most = most.max(answers.await);
        if most >= ANSWERS {
            return;
        }
    }
    panic!("no more than {most} answers while a key is made");
}
