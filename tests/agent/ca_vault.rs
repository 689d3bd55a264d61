//! `--ca vault`: the requests to Vault, the login, and how responses are handled.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use attache::auth::token_file::TokenFile;
use attache::base::clock::Clock;
use attache::ca::vault::{Access, Vault, VaultSettings};
use attache::ca::{CertificateAuthority as _, Class, SigningRequest};
use attache::fs::disk::Disk;
use attache::net::endpoint::Endpoint;
use attache::net::tls::Roots;
use attache::pki::csr;
use attache::pki::key::{KeyType, SigningKey};

use crate::support::fake_vault::{FakeVault, Mood};
use crate::support::files::spiffe;
use crate::support::process::{Agent, strs};
use crate::support::sds::served;

const LOGIN: &str = "/v1/auth/kubernetes/login";
const RENEW: &str = "/v1/auth/token/renew-self";
const SIGN: &str = "/v1/mesh/pki/sign/web";

/// Renewal is due almost at once, long before expiry.
fn busy(vault: &FakeVault, directory: &Path, more: &[&str]) -> Vec<String> {
    vault.change(|rules| rules.ttl = "20s");
    let mut options = vault.client(directory);
    let fixed = ["--cert-ttl", "20s", "--grace-ratio", "0.99", "--grace-jitter", "0", "--ca-timeout", "1s"];
    options.extend(fixed.iter().chain(more).map(|text| (*text).to_owned()));
    options
}

fn assert_silent(agent: &Agent, secrets: impl IntoIterator<Item = String>) {
    let log = agent.process.log();
    for secret in secrets {
        for part in secret.split('.').filter(|part| part.len() > 8) {
            assert!(!log.contains(part), "a token is in the log:\n{log}");
        }
    }
}

#[tokio::test]
async fn one_login_serves_many_certificates_signed_by_the_role() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    vault.change(|rules| {
        rules.namespace = Some("team-a/");
        rules.headers = vec![("x-tenant", "blue")];
        rules.warnings = serde_json::json!(["TTL \"24h\" is longer than permitted maxTTL \"1h\""]);
    });
    let more = ["--vault-namespace", "team-a/", "--ca-header", "x-tenant=blue", "--log-level", "debug"];
    let mut agent =
        Agent::ready(directory.path(), "web", &strs(&busy(&vault, directory.path(), &more))).await;
    agent.process.wait_log_times("certificate issued", 3).await;

    let calls = vault.calls();
    assert_eq!(calls[..4], [LOGIN, SIGN, SIGN, SIGN]);
    assert_eq!(vault.count(LOGIN), 1);
    let chain = served(&agent.socket, "default").await;
    assert_eq!(chain.len(), 2, "without the root");
    assert_eq!(chain[0].uris, [spiffe("web")]);
    let roots = served(&agent.socket, "ROOTCA").await;
    assert!(roots.len() == 1 && roots[0].subject == roots[0].issuer);
    let log = agent.process.log();
    let remarks: Vec<_> = log.lines().filter(|line| line.contains("longer than permitted")).collect();
    assert_eq!(remarks.iter().filter(|line| line.contains(" INFO ")).count(), 1, "{remarks:#?}");
    assert_silent(&agent, vault.tokens().into_iter().chain([vault.jwt.clone()]));
}

#[tokio::test]
async fn every_bad_answer_of_vault_is_reported_and_a_good_answer_recovers() {
    let uri = "URI Subject Alternative Names were provided via CSR which are not valid for this role";
    let sealed = "503 Service Unavailable: mesh/pki/sign/web: Vault is sealed: it is sealed";
    let cases = [
        (Mood::Huge, "it is longer than 1048576 bytes", "junk"),
        (Mood::Html, "it is not JSON; is --ca-address that of a Vault?", "junk"),
        (Mood::OtherJson, "it has no data.certificate", "junk"),
        (Mood::Slow, "gave no answer within 1s", "timeout"),
        (Mood::Cut, "broke before it had answered: ", "unreachable"),
        (Mood::Short, "broke before it had answered: ", "unreachable"),
        (Mood::Refuse(400, uri), "its allowed_uri_sans must allow", "refused"),
        (Mood::Refuse(429, "rate limit quota exceeded"), "it is called too often", "refused"),
        (Mood::Refuse(503, "Vault is sealed"), sealed, "refused"),
    ];
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    let mut agent = Agent::ready(directory.path(), "web", &strs(&busy(&vault, directory.path(), &[]))).await;
    for (mood, words, label) in cases {
        let metric = format!("attache_ca_requests_total{{provider=\"vault\",outcome=\"{label}\"}}");
        let before = agent.metric(&metric).await;
        vault.change(|rules| rules.sign = mood);
        let (_, line) = agent.process.wait_next_log("no new certificate").await;
        assert!(line.contains("WARN") && line.contains(words), "{mood:?}: {line}");
        assert!(agent.metric(&metric).await > before, "{mood:?}");
        vault.change(|rules| rules.sign = Mood::Good);
        agent.process.wait_next_log("the CA signs again").await;
    }
    assert_silent(&agent, vault.tokens().into_iter().chain([vault.jwt.clone()]));
}

#[tokio::test]
async fn a_vault_that_refuses_the_login_at_first_is_retried_until_it_accepts() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    vault.change(|rules| rules.login = Mood::Cut);
    let mut agent = Agent::start(directory.path(), "web", &strs(&vault.client(directory.path())));
    agent.process.wait_log("broke before it had answered").await;
    let sealed = "503 Service Unavailable: auth/kubernetes/login: Vault is sealed: it is sealed";
    let foreign = "the token is for system:serviceaccount:default:web, audience [vault]";
    let cases = [
        (Mood::Refuse(503, "Vault is sealed"), sealed),
        (Mood::Refuse(403, "service account name not authorized"), foreign),
    ];
    for (mood, words) in cases {
        vault.change(|rules| rules.login = mood);
        let (_, line) = agent.process.wait_log(words).await;
        assert!(line.contains("WARN"), "{line}");
    }
    assert_eq!(vault.count(SIGN), 0);
    assert_eq!(agent.status("/readyz").await.0, 503);
    vault.change(|rules| rules.login = Mood::Good);
    agent.process.wait_log("ready").await;
}

#[tokio::test]
async fn vaults_own_token_can_be_missing_refused_and_rotated() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start_at(directory.path(), "127.0.0.1:0".parse().unwrap(), false).await;
    let file = directory.path().join("vault-token");
    let path = file.display().to_string();
    let options = ["--ca", "vault", "--ca-address", &vault.origin(), "--vault-role", "web"];
    let more = ["--vault-pki-mount", "mesh/pki", "--vault-token-file", &path, "--token-file", "/nowhere/jwt"];
    let nameless = [&options[..], &more].concat();
    let mut agent = Agent::start(directory.path(), "nameless", &nameless);
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("requests to Vault need an identity") && line.contains("--spiffe-id"), "{line}");
    drop(agent);

    let name = spiffe("web");
    let mut agent = Agent::start(directory.path(), "web", &[&nameless[..], &["--spiffe-id", &name]].concat());
    agent.process.wait_log("and Vault's go to http://127.0.0.1").await;
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(
        line.contains(&path) && line.contains("can't be read") && line.contains("--vault-token-file"),
        "{line}"
    );
    assert!(vault.calls().is_empty());
    std::fs::write(&file, "hvs.outdatedtoken\n").unwrap();
    let (_, line) = agent.process.wait_log("permission denied").await;
    assert!(line.contains(&format!("the token in {path} has expired")), "{line}");
    vault.admit("hvs.rotatedtoken");
    std::fs::write(&file, "hvs.rotatedtoken\n").unwrap();
    agent.process.wait_log("ready").await;
    assert_eq!(vault.count(LOGIN), 0);
    assert_silent(&agent, ["hvs.outdatedtoken", "hvs.rotatedtoken"].map(str::to_owned));
}

#[tokio::test]
async fn an_engine_that_does_not_know_its_root_needs_the_root_in_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    vault.change(|rules| rules.knows_root = false);
    let mut options = vault.client(directory.path());
    let mut agent = Agent::start(directory.path(), "rootless", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(
        line.contains("no root above CN=Attache development root") && line.contains("--vault-root FILE"),
        "{line}"
    );

    let file = directory.path().join("roots.pem");
    options.extend(["--vault-root".to_owned(), file.display().to_string()]);
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let at = |name: &str| std::fs::read(directory.path().join("fake-vault").join(name)).unwrap();
    let cases = [
        (vec![], "no PEM certificate"),
        (at("ca-cert.pem"), "none of its certificates is a self-issued root"),
    ];
    agent.process.wait_log("roots.pem: No such file").await;
    for (content, words) in cases {
        std::fs::write(&file, content).unwrap();
        let (_, line) = agent.process.wait_log(words).await;
        assert!(line.contains("roots.pem") && line.contains("--vault-root"), "{line}");
    }
    // A file with the whole chain, as people often keep it.
    std::fs::write(&file, [at("ca-cert.pem"), at("root-cert.pem")].concat()).unwrap();
    agent.process.wait_log("ready").await;
    let roots = served(&agent.socket, "ROOTCA").await;
    assert!(roots.len() == 1 && roots[0].subject == "CN=Attache development root", "{roots:?}");
}

/// The client alone, and a clock that the test sets.
fn client(vault: &FakeVault, directory: &Path) -> (Arc<Vault>, Clock) {
    let jwt = directory.join("jwt");
    std::fs::write(&jwt, &vault.jwt).unwrap();
    #[expect(clippy::disallowed_methods, reason = "certificates of now")]
    let clock = Clock::starting_at(SystemTime::now());
    let endpoint = Endpoint {
        address: vault.origin().parse().unwrap(),
        roots: Roots::File(directory.join("fake-vault/root-cert.pem")),
        server_name: None,
    };
    let settings = VaultSettings {
        mount: "mesh/pki".parse().unwrap(),
        role: "web".parse().unwrap(),
        namespace: None,
        access: Access::Login {
            mount: "kubernetes".parse().unwrap(),
            role: "app".to_owned(),
            jwt: TokenFile::new(jwt).into(),
        },
        roots: None,
    };
    (Arc::new(Vault::new(endpoint, settings, &[], clock.clone(), Disk::default())), clock)
}

fn a_request() -> SigningRequest {
    let identity = spiffe("web").parse().unwrap();
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::request(&key, Some(&identity), &csr::Names::default()).unwrap();
    SigningRequest {
        csr,
        identity: Some(identity),
        names: csr::Names::default(),
        ttl: Duration::from_secs(24 * 3600),
    }
}

#[tokio::test]
async fn a_session_is_kept_renewed_replaced_and_never_reused_after_a_refusal() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    let (client, clock) = client(&vault, directory.path());
    let mut known = 0;
    // The calls that one signature needs.
    let mut sign = async || {
        client.sign(&a_request()).await.unwrap();
        let calls = vault.calls();
        let new = calls[known..].to_vec();
        known = calls.len();
        new
    };
    assert_eq!(sign().await, [LOGIN, SIGN]);
    assert_eq!(sign().await, [SIGN]);
    clock.set_by(2_600_000);
    assert_eq!(sign().await, [SIGN], "a quarter of its hour is left, and a little more");
    clock.set_by(200_000);
    assert_eq!(sign().await, [RENEW, SIGN]);
    assert_eq!(sign().await, [SIGN]);
    // Near the end of its maximum lifetime a renewal gains little.
    vault.change(|rules| rules.lease = (3600, 500));
    clock.set_by(2_800_000);
    assert_eq!(sign().await, [RENEW, LOGIN, SIGN]);
    vault.change(|rules| rules.renew = Mood::Refuse(400, "lease is not renewable"));
    clock.set_by(2_800_000);
    assert_eq!(sign().await, [RENEW, LOGIN, SIGN]);
    clock.set_by(3_700_000);
    assert_eq!(sign().await, [LOGIN, SIGN], "it has ended");
    vault.revoke();
    assert_eq!(sign().await, [SIGN, LOGIN, SIGN]);
    vault.change(|rules| rules.is_renewable = false);
    vault.revoke();
    assert_eq!(sign().await, [SIGN, LOGIN, SIGN]);
    clock.set_by(2_800_000);
    assert_eq!(sign().await, [LOGIN, SIGN]);

    // A missing policy: one new login for each attempt, and no more.
    vault.change(|rules| rules.sign = Mood::Refuse(403, "permission denied"));
    let error = client.sign(&a_request()).await.unwrap_err();
    assert!(error.to_string().contains("none of its policies allows update"), "{error}");
    assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
    assert_eq!(vault.calls()[known..], [SIGN, LOGIN, SIGN]);
}

#[tokio::test]
async fn concurrent_calls_share_a_login_and_a_cancelled_one_blocks_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    let (client, _) = client(&vault, directory.path());
    vault.change(|rules| rules.login = Mood::Hang);
    let given_up = tokio::time::timeout(Duration::from_millis(300), client.sign(&a_request())).await;
    assert!(given_up.is_err());
    vault.change(|rules| rules.login = Mood::Good);
    let before = vault.count(LOGIN);
    for refusals in 0..2 {
        let calls: Vec<_> = (0..8)
            .map(|_| {
                let client = Arc::clone(&client);
                tokio::spawn(async move { client.sign(&a_request()).await.map(drop) })
            })
            .collect();
        for call in calls {
            call.await.unwrap().unwrap();
        }
        assert_eq!(vault.count(LOGIN) - before, 1 + refusals);
        vault.revoke();
    }
}

#[tokio::test]
async fn a_token_without_an_identity_is_sent_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    let options = vault.client(directory.path());
    let jwt = directory.path().join("jwt");
    std::fs::remove_file(&jwt).unwrap();
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("jwt can't be read") && line.contains("--token-file"), "{line}");
    std::fs::write(&jwt, "opaque").unwrap();
    agent.process.wait_log("the token names no service account: set --spiffe-id").await;
    assert!(vault.calls().is_empty());
    std::fs::write(&jwt, &vault.jwt).unwrap();
    agent.process.wait_log("ready").await;
}

#[tokio::test]
async fn every_failed_login_is_reported_and_the_next_login_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let vault = FakeVault::start(directory.path()).await;
    let (client, _) = client(&vault, directory.path());
    let cases = [
        (Mood::Cut, "broke before it had answered", Class::Transient),
        (Mood::Short, "broke before it had answered", Class::Transient),
        (Mood::Huge, "longer than", Class::Permanent),
        (Mood::Html, "it is not JSON", Class::Permanent),
        (Mood::OtherJson, "it has no auth.client_token", Class::Permanent),
        (Mood::Refuse(307, ""), "the active node", Class::Transient),
        (Mood::Refuse(400, "invalid role name \"app\""), "--vault-auth-role", Class::Permanent),
        (Mood::Refuse(403, "permission denied"), "must be bound to this service account", Class::Permanent),
        (Mood::Refuse(404, "no handler for route"), "--vault-auth-mount", Class::Permanent),
        (Mood::Refuse(412, ""), "caught up", Class::Transient),
        (Mood::Refuse(429, ""), "too often", Class::Transient),
        (Mood::Refuse(472, ""), "the primary", Class::Transient),
        (Mood::Refuse(500, "namespace not authorized"), "must be bound to", Class::Transient),
        (Mood::Refuse(502, ""), "could not ask Kubernetes", Class::Transient),
    ];
    for (mood, words, class) in cases {
        vault.change(|rules| rules.login = mood);
        let error = client.sign(&a_request()).await.unwrap_err();
        assert!(error.to_string().contains(words) && error.class() == class, "{mood:?}: {error}");
        assert!(!error.to_string().contains(&vault.jwt) && !format!("{error:?}").contains(&vault.jwt));
    }
    assert_eq!(vault.count(SIGN), 0);
    vault.change(|rules| rules.login = Mood::Good);
    client.sign(&a_request()).await.unwrap();
}
