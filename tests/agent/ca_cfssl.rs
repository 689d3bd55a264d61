//! `--ca cfssl`: the requests, and how responses are handled; with a fake and with a real cfssl.

use std::path::Path;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::pem;

use crate::support::cfssl::{Cfssl, FakeCfssl, KEY, Mood};
use crate::support::files::spiffe;
use crate::support::issuer::{Issuer, root_alone};
use crate::support::process::{Agent, strs};
use crate::support::sds::{served, served_serial};

/// The options for a server at `address`.
fn options(address: &str, more: &[&str]) -> Vec<String> {
    let fixed = ["--ca", "cfssl", "--ca-address", address, "--spiffe-id", &spiffe("web")];
    fixed.iter().chain(more).map(|text| (*text).to_owned()).collect()
}

fn path(directory: &Path, name: &str) -> String {
    directory.join(name).display().to_string()
}

#[tokio::test]
async fn every_bad_answer_of_cfssl_is_reported_and_a_good_answer_recovers() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCfssl::start(Issuer::new(directory.path())).await;
    let bundle = path(directory.path(), "issuer/root-cert.pem");
    // Renewal is due almost at once, long before expiry.
    let more = ["--cfssl-bundle", &bundle, "--grace-ratio", "0.998", "--cfssl-label", "north"];
    let mut options = options(&format!("http://{}", ca.address), &more);
    options.extend(["--ca-header", "x-tenant=blue"].map(str::to_owned));
    let mut agent = Agent::ready(directory.path(), "web", &strs(&options)).await;

    let not_found =
        Mood::Say("404 Not Found\r\nContent-Type: text/plain; charset=utf-8", "404 page not found\n".into());
    let busy = Mood::Say("503 Service Unavailable\r\nRetry-After: 1", "<html>busy</html>".into());
    let said = |text: &str| Mood::Say("200 OK\r\nContent-Type: application/json", text.to_owned());
    let failures = [
        (not_found, "404 page not found; where all its profiles have an auth_key", "refused"),
        (busy, "503 Service Unavailable: <html>busy</html>", "refused"),
        (Mood::CutOff, "broke before it had answered", "unreachable"),
        (Mood::TooShort, "no JSON with success and result", "junk"),
        (Mood::Huge, "it is longer than 1048576 bytes", "junk"),
        (said("<html>"), "no JSON with success and result in the answer of sign; is it cfssl?", "junk"),
        (said(r#"{"success":true,"result":null}"#), "there is no result.certificate", "junk"),
    ];
    for (mood, words, label) in failures {
        let metric = format!("attache_ca_requests_total{{provider=\"cfssl\",outcome=\"{label}\"}}");
        let before = agent.metric(&metric).await;
        ca.set(mood.clone());
        let (_, line) = agent.process.wait_next_log("no new certificate").await;
        assert!(line.contains("WARN") && line.contains(words), "{mood:?}: {line}");
        assert!(agent.metric(&metric).await > before, "{mood:?}");
        ca.set(Mood::Good);
        agent.process.wait_next_log("the CA signs again").await;
    }
    // Odd responses that are no reason for a refusal.
    for mood in [Mood::Slow, Mood::OtherType] {
        ca.set(mood);
        agent.process.wait_next_log("certificate issued").await;
        agent.process.wait_next_log("certificate issued").await;
    }
    let signed = ca.signed();
    for request in &signed {
        assert_eq!(
            (request.endpoint.as_str(), &request.headers),
            ("sign", &vec!["x-tenant: blue".to_owned()])
        );
        assert_eq!((&request.body["label"], &request.body["profile"]), (&"north".into(), &"".into()));
    }
    let keys: std::collections::HashSet<_> =
        signed.iter().map(|one| one.body["certificate_request"].to_string()).collect();
    assert_eq!(keys.len(), signed.len(), "each with a key of its own");
}

#[tokio::test]
async fn a_root_that_signs_is_the_root_and_an_intermediate_needs_the_bundle() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCfssl::start(Issuer::of(directory.path(), &root_alone(directory.path()))).await;
    let alone = options(&format!("http://{}", ca.address), &[]);
    let mut agent = Agent::ready(directory.path(), "alone", &strs(&alone)).await;
    let (_, line) = agent.process.wait_log("in plain text are trusted").await;
    assert!(line.contains("WARN") && line.contains("--cfssl-bundle"), "{line}");

    let ca = FakeCfssl::start(Issuer::new(directory.path())).await;
    let address = format!("http://{}", ca.address);
    let mut agent = Agent::start(directory.path(), "without", &strs(&options(&address, &[])));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("signs with an intermediate") && line.contains("--cfssl-bundle"), "{line}");
    assert_eq!(agent.metric("attache_ca_requests_total{provider=\"cfssl\",outcome=\"no_root\"}").await, 1.0);

    // The file appears later; its root may be one of several.
    let bundle = path(directory.path(), "bundle.pem");
    let with = options(&address, &["--cfssl-bundle", &bundle]);
    let mut agent = Agent::start(directory.path(), "with", &strs(&with));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains(&format!("--cfssl-bundle {bundle} can't be used")), "{line}");
    let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
    std::fs::write(&bundle, [read("issuer/ca-cert.pem"), read("issuer/root-cert.pem")].concat()).unwrap();
    agent.process.wait_log("ready").await;
    assert_eq!(agent.process.count("in plain text are trusted"), 0);
}

#[tokio::test]
async fn requests_are_authenticated_with_a_key_that_may_appear_later() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCfssl::start(Issuer::of(directory.path(), &root_alone(directory.path()))).await;
    let key = path(directory.path(), "key");
    let more = ["--cfssl-auth-key-file", &key, "--cfssl-profile", "mesh"];
    let options = options(&format!("http://{}", ca.address), &more);
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains(&key) && line.contains("--cfssl-auth-key-file"), "{line}");
    assert_eq!(ca.signed().len(), 0);
    std::fs::write(&key, format!("{KEY}\n")).unwrap();
    agent.process.wait_log("ready").await;
    let [signed] = &ca.signed()[..] else { panic!("not one request") };
    assert_eq!((signed.endpoint.as_str(), &signed.body["profile"]), ("authsign", &"mesh".into()));
    assert!(!agent.process.log().contains(KEY));
}

#[tokio::test]
async fn a_real_cfssl_signs_unless_it_is_too_old_to_name_the_identity() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let keys = [("good-key", KEY), ("bad-key", "ffeeddccbbaa99887766554433221100")];
    for (name, content) in keys {
        std::fs::write(place.join(name), content).unwrap();
    }
    let (good_key, bad_key) = (path(place, "good-key"), path(place, "bad-key"));

    let plain = place.join("plain");
    std::fs::create_dir(&plain).unwrap();
    let cfssl = Cfssl::start(&plain, &root_alone(place)).await;
    let address = format!("http://{}", cfssl.address);
    let refused: [(&[&str], &str); 4] = [
        (&["--cfssl-profile", "mesh"], "authentication required (code 400); the profile has an auth_key"),
        (
            &["--cfssl-auth-key-file", &good_key],
            "no authentication provider (code 400); the profile has no auth_key",
        ),
        (
            &["--cfssl-profile", "mesh", "--cfssl-auth-key-file", &bad_key],
            "invalid token (code 400); the key in",
        ),
        (&["--ca-address", &address.replace("http:", "https:")], "Plaintext needs http://"),
    ];
    for (index, (more, words)) in refused.into_iter().enumerate() {
        let mut all = options(&address, more);
        if more[0] == "--ca-address" {
            all.drain(2..4);
            let root = path(place, "root-alone/root-cert.pem");
            all.extend(["--ca-root".to_owned(), root]);
        }
        let mut agent = Agent::start(place, &format!("refused-{index}"), &strs(&all));
        let (_, line) = agent.process.wait_log("no new certificate").await;
        assert!(line.contains(words), "{more:?}: {line}");
    }

    // Over TLS, with an intermediate.
    let tls = place.join("tls");
    std::fs::create_dir(&tls).unwrap();
    let ca = DevelopmentCa::open(&place.join("issuer"), Clock::system()).unwrap();
    let (chain, key) = ca.issue_server(&[], &[[127, 0, 0, 1].into()]).unwrap();
    std::fs::write(tls.join("tls.pem"), pem::of_certificates(&chain)).unwrap();
    std::fs::write(tls.join("tls-key.pem"), key.to_pem()).unwrap();
    let cfssl_tls = Cfssl::start(&tls, &place.join("issuer")).await;
    let root = path(place, "issuer/root-cert.pem");
    let over_tls = ["--ca-root", &root, "--cfssl-bundle", &root];
    let over_tls = [&over_tls[..], &["--cfssl-profile", "mesh", "--cfssl-auth-key-file", &good_key]].concat();
    let with_names = [&over_tls[..], &["--dns-san", "web.example", "--common-name", "web"]].concat();
    let agents = [options(&address, &[]), options(&cfssl_tls.address.to_string(), &with_names)];
    for (index, options) in agents.iter().enumerate() {
        let mut agent = Agent::start(place, &format!("agent-{index}"), &strs(options));
        if cfssl.is_old {
            let (_, line) = agent.process.wait_log("no new certificate").await;
            assert!(line.contains("names no SPIFFE ID") && line.contains("cfssl before 1.4"), "{line}");
        } else {
            agent.process.wait_log("ready").await;
            assert_eq!(served_serial(&agent.socket).await, agent.serials()[0]);
            let leaf = &served(&agent.socket, "default").await[0];
            let names: &[&str] = if index == 0 { &[] } else { &["web.example"] };
            assert_eq!(leaf.dns_names, names);
            assert_eq!(leaf.common_names, names.first().map(|_| "web".to_owned()).as_slice());
        }
    }
}
