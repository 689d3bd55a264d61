//! Each cause of a failure can be looked up: it is named in the log, in the status JSON, in a metric, and in
//! `docs/troubleshooting.md`, with the agent's own words.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::support::envoy::Envoy;
use crate::support::fake_ca::{FakeCa, Mood, Tls};
use crate::support::files::{Mounted, spiffe, token};
use crate::support::kube_cluster::{Draft, KubeCluster, Rule};
use crate::support::mesh::bootstrap;
use crate::support::process::{Agent, PATIENCE, output, strs};
use crate::support::sds::{Stream, on_connection, request};

fn page() -> String {
    std::fs::read_to_string(format!("{}/docs/troubleshooting.md", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// One section of the page.
fn section(page: &str, heading: &str) -> String {
    let (_, behind) = page.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("{heading}"));
    behind.split("\n## ").next().unwrap().to_owned()
}

/// The agent's words, and the other places where they are found.
struct Cause<'a> {
    section: &'a str,
    /// Quoted in that section.
    words: &'a str,
    /// A sample that is not 0.
    metric: &'a str,
    /// JSON pointer to the words in the status.
    state: &'a str,
}

impl Cause<'_> {
    async fn is_found(&self, agent: &mut Agent) {
        let Self { section, words, metric, state } = self;
        assert!(self::section(&page(), section).contains(words), "{words:?} is not in {section:?}");
        agent.process.wait_log(words).await;
        let socket = agent.socket.to_str().unwrap().to_owned();
        let mut seen = (Value::Null, 0.0);
        let found = async {
            loop {
                let status = output(&["status", "--output", "json", "--admin-socket", &admin(&socket)]).await;
                let report: Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
                seen = (report.pointer(state).cloned().unwrap_or(report), agent.metric(metric).await);
                if seen.0.as_str().is_some_and(|state| state.contains(words)) && seen.1 > 0.0 {
                    return;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        let is_found = timeout(PATIENCE, found).await.is_ok();
        assert!(is_found, "{words:?} in {state}, {metric}: {seen:?}\n{}", agent.process.log());
    }
}

fn admin(socket: &str) -> String {
    socket.replace(".sock", ".admin")
}

/// An agent with an admin socket of its own.
fn start(directory: &Path, name: &str, options: &[&str]) -> Agent {
    let admin = admin(directory.join(format!("{name}.sock")).to_str().unwrap());
    Agent::start(directory, name, &[options, &["--admin-socket", &admin]].concat())
}

const NO_NEW: &str = "No new certificate comes";

/// Looks up `words` of a failed call.
async fn no_certificate(directory: &Path, words: &str, outcome: &str, options: &[&str]) {
    let mut agent = start(directory, "web", options);
    let metric = format!("attache_ca_requests_total{{provider=\"citadel\",outcome=\"{outcome}\"}}");
    let cause = Cause { section: NO_NEW, words, metric: &metric, state: "/secrets/0/error" };
    cause.is_found(&mut agent).await;
    assert!(agent.metric("attache_renewal_consecutive_failures").await > 0.0);
    agent.process.kill().await;
}

#[tokio::test]
async fn why_the_ca_issues_nothing_can_be_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let mut options = ca.client(directory);
    // A certificate issued two hours ago has expired.
    options.extend(["--cert-ttl", "1h"].map(str::to_owned));
    let cases = [
        (Mood::Refuse(Code::PermissionDenied), "PermissionDenied", "refused"),
        (Mood::Refuse(Code::InvalidArgument), "InvalidArgument", "refused"),
        (Mood::Refuse(Code::Unavailable), "Unavailable", "refused"),
        (Mood::Refuse(Code::ResourceExhausted), "ResourceExhausted", "refused"),
        (Mood::Hang, "the CA gave no answer within", "timeout"),
        (Mood::Junk, "holds no PEM certificate", "junk"),
        (Mood::ForeignKey, "the certificate is for another key than the one in the request", "foreign_key"),
        (Mood::OtherIdentity, "either the CA knows this workload by another name", "wrong_identity"),
        (Mood::Expired, "the certificate expired at", "expired"),
        (Mood::NotYetValid, "the certificate is valid only from", "not_yet_valid"),
        (Mood::Unchained, "does not chain to a root that came with it", "unchained"),
    ];
    for (mood, words, outcome) in cases {
        ca.set(mood);
        let timeout: &[&str] = if mood == Mood::Hang { &["--ca-timeout", "200ms"] } else { &[] };
        no_certificate(directory, words, outcome, &[&strs(&options)[..], timeout].concat()).await;
    }
    ca.set(Mood::Refuse(Code::Unauthenticated));
    let path = directory.join("token");
    for (token, words) in
        [(token("web", "istio-ca", -60), "EXPIRED at"), (token("web", "vault", 3600), "audience")]
    {
        std::fs::write(&path, token).unwrap();
        no_certificate(directory, words, "refused", &strs(&options)).await;
    }
    no_certificate(directory, "Unauthenticated", "refused", &strs(&options)).await;
    std::fs::write(&path, "two\nlines").unwrap();
    no_certificate(directory, "holds no token", "credential", &strs(&options)).await;
    std::fs::write(&path, "").unwrap();
    let words = "its writer has not written it yet, or failed";
    no_certificate(directory, words, "credential", &strs(&options)).await;
    std::fs::remove_file(&path).unwrap();
    let words = "mount the token there, or set its path with";
    no_certificate(directory, words, "credential", &strs(&options)).await;
}

#[tokio::test]
async fn why_the_ca_is_unreachable_can_be_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Never).await;
    let plain = FakeCa::start(directory, &spiffe("web")).await;
    let options = ca.client(directory);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let own = directory.join("fake-ca/root-cert.pem");
    let other = directory.join("stranger/root-cert.pem");
    let missing = directory.join("nowhere.pem");
    let token = &options[2..];
    let cases = [
        (free.to_string(), &own, "is it running, and is --ca-address right?", "unreachable"),
        (ca.address.to_string(), &other, "its certificate is not signed by", "tls"),
        (plain.address.to_string(), &own, "is this a TLS port? Plaintext needs http:// in", "tls"),
        (ca.address.to_string(), &missing, "the CA's roots can't be read", "roots"),
    ];
    for (address, root, words, outcome) in cases {
        let options = ["--ca-address", &address, "--ca-root", root.to_str().unwrap()];
        no_certificate(directory, words, outcome, &[&options, &strs(token)[..]].concat()).await;
    }
    let address = ca.address.to_string();
    let options = ["--ca-address", &address, "--ca-root", own.to_str().unwrap()];
    let name = ["--ca-server-name", "istiod.istio-system.svc"];
    let words = "set --ca-server-name to the name it has";
    no_certificate(directory, words, "tls", &[&options[..], &name, &strs(token)].concat()).await;
}

#[tokio::test]
async fn why_files_are_not_used_can_be_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = directory.join("ca");
    let (one, other) = (Mounted::new(&ca, "web"), Mounted::new(&ca, "web"));
    let certs = directory.join("certs");
    let half_pem = one.key[..one.key.len() / 2].to_vec();
    let chain = String::from_utf8(one.chain.clone()).unwrap();
    let (leaf, above) = chain.split_at(chain[1..].find("-----BEGIN").unwrap() + 1);
    let reversed = format!("{above}{leaf}").into_bytes();
    let encrypted =
        b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n".to_vec();
    let der = attache::pki::pem::certificates(&one.chain).unwrap()[0].to_vec();
    let expired = Mounted::expired(&ca, "web");
    let cases = [
        (&one.chain, Some(&other.key), "the private key does not match the certificate of", "mismatch"),
        (&reversed, Some(&one.key), "the leaf must come first", "mismatch"),
        (&one.chain, None, "exists, but", "incomplete"),
        (&one.key, Some(&one.key), "it holds no PEM certificate", "not_parsed"),
        (&one.chain, Some(&one.chain), "it holds no PEM private key", "not_parsed"),
        (&one.chain, Some(&encrypted), "its private key is encrypted", "not_parsed"),
        (&one.chain, Some(&half_pem), "its PEM is damaged", "not_parsed"),
        (&der, Some(&one.key), "it is DER, not PEM", "not_parsed"),
        (&expired.chain, Some(&expired.key), "expired at", "not_valid"),
    ];
    for (chain, key, words, reason) in cases {
        let _ = std::fs::remove_dir_all(&certs);
        one.write(&certs);
        std::fs::write(certs.join("cert-chain.pem"), chain).unwrap();
        match key {
            Some(key) => std::fs::write(certs.join("key.pem"), key).unwrap(),
            None => std::fs::remove_file(certs.join("key.pem")).unwrap(),
        }
        let mut agent =
            start(directory, "web", &["--cert-dir", certs.to_str().unwrap(), "--file-mounted-certs"]);
        let metric = format!("attache_source_failures_total{{source=\"files\",reason=\"{reason}\"}}");
        let section = "Mounted files are not used";
        Cause { section, words, metric: &metric, state: "/secrets/0/error" }.is_found(&mut agent).await;
        assert_eq!(agent.metric("attache_secret_failing{name=\"default\"}").await, 1.0, "{words}");
        agent.process.kill().await;
    }
}

#[tokio::test]
async fn problems_between_envoy_and_the_agent_can_be_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (certs, prefix) = (directory.join("certs"), directory.join("prefix"));
    let mounted = Mounted::new(&directory.join("ca"), "web");
    mounted.write(&certs);
    std::fs::create_dir(&prefix).unwrap();
    let options = ["--cert-dir", certs.to_str().unwrap(), "--file-prefix", prefix.to_str().unwrap()];
    let mut agent = start(directory, "web", &options);
    agent.process.wait_log("ready").await;
    let refused = "The agent refuses Envoy";
    let unknown = "attache_refusals_total{reason=\"unknown_name\"}";
    let no_node = "attache_refusals_total{reason=\"no_node\"}";
    let foreign = "attache_refusals_total{reason=\"foreign_type\"}";
    let outside = format!("file-root:{}", certs.join("root-cert.pem").display());
    let socket = agent.socket.clone();
    on_connection(&socket, async |client| {
        let cause = |section, words, metric, state| Cause { section, words, metric, state };
        let _stream = Stream::open(&client, &["defualt"]).await.unwrap();
        cause(refused, "unknown resource name", unknown, "/refusal").is_found(&mut agent).await;
        let mut first = request(&["default"]);
        first.node = None;
        let mut stream = Stream::open_with(&client, first).await.unwrap();
        stream.next().await.unwrap_err();
        cause(refused, "must carry a node id", no_node, "/refusal").is_found(&mut agent).await;
        let mut first = request(&["default"]);
        first.type_url = "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned();
        let mut stream = Stream::open_with(&client, first).await.unwrap();
        stream.next().await.unwrap_err();
        let words = "unsupported type_url";
        cause(refused, words, foreign, "/refusal").is_found(&mut agent).await;

        let _stream = Stream::open(&client, &[&outside]).await.unwrap();
        let words = "outside the directories that --file-prefix allows";
        let metric = "attache_refusals_total{reason=\"forbidden\"}";
        cause(refused, words, metric, "/refusal").is_found(&mut agent).await;

        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        let response = stream.next().await.unwrap();
        stream.reject(&response, "Failed to load private key").await;
        let metric = "attache_secret_rejected{name=\"default\"}";
        let state = "/secrets/0/rejection/reason";
        let words = "Failed to load private key";
        cause("Envoy rejects a secret", words, metric, state).is_found(&mut agent).await;
    })
    .await;
}

#[tokio::test]
async fn problems_with_crls_output_and_state_can_be_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let options = ca.client(directory);
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    for name in ["crls", "state"] {
        std::fs::write(path(name), "something else").unwrap();
    }
    std::fs::create_dir_all(path("out/key.pem")).unwrap();
    let (crls, state, out) = (path("crls"), path("state/below"), path("out"));
    let more = ["--crl", &crls, "--state-dir", &state, "--output-dir", &out];
    let mut agent = start(directory, "web", &[&strs(&options)[..], &more].concat());
    let not_written = "The output directory or the state is not written";
    agent.process.wait_log("CRL file not used").await;
    let causes = [
        (not_written, "check that disk", "attache_state_failing", "/state/error"),
        (not_written, "move it away, or choose another", "attache_output_failing", "/output/error"),
        ("CRLs are left out", "no PEM", "attache_crls_failing", "/crls/error"),
    ];
    for (section, words, metric, state) in causes {
        Cause { section, words, metric, state }.is_found(&mut agent).await;
    }
    agent.process.kill().await;

    std::fs::remove_dir(path("out/key.pem")).unwrap();
    let more = ["--output-dir", &out, "--output-hook", "echo broken; exit 3"];
    let mut agent = start(directory, "web", &[&strs(&options)[..], &more].concat());
    agent.process.wait_log("output hook failed").await;
    assert_eq!(agent.metric("attache_output_failing").await, 1.0);
    let socket = agent.socket.to_str().unwrap();
    let status = output(&["status", "--output", "json", "--admin-socket", &admin(socket)]).await;
    let report: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(report["output"]["hook_failing"], true, "{report}");
}

/// The first column of the page's tables quotes the agent's sources.
#[test]
fn the_page_quotes_the_agents_messages() {
    fn sources(directory: &Path, all: &mut String) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, all);
            } else if path.extension().is_some_and(|it| it == "rs") {
                all.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut all = String::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    // Long messages continue on the next line.
    let said = all.split("\\\n").map(str::trim_start).collect::<String>().replace("\\\"", "\"");
    let mut quotes = 0;
    let page = page();
    for table in page.split("| the agent says |").skip(1) {
        let rows = table.lines().skip(2).take_while(|line| line.starts_with("| "));
        for cell in rows.map(|row| row[2..].split(" | ").next().unwrap()) {
            for quote in cell.split('`').skip(1).step_by(2) {
                // The kernel's words.
                let is_found = quote == "Permission denied" || said.contains(quote);
                assert!(is_found, "no source of the agent contains {quote:?}");
                quotes += 1;
            }
        }
    }
    assert!(quotes > 60, "{quotes} quotes are found");
}

#[tokio::test]
async fn a_real_envoy_shows_what_the_page_says() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let page = page();
    let quoted = |words: &str| assert!(page.contains(words), "{words}");
    let socket = directory.join("web.sock");
    let envoy = bootstrap(&socket, &["--initial-fetch-timeout", "500ms"]).await;
    let envoy = Envoy::start(envoy, directory, "envoy").await;
    for stat in [
        "cluster.attache_sds.upstream_cx_connect_fail",
        "sds.default.update_failure",
        "sds.default.init_fetch_timeout",
    ] {
        quoted(stat);
        envoy.wait_stat(stat, 1).await;
    }
    let words = "gRPC config: initial fetch timed out for \
                 type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
    quoted(words);
    envoy.wait_until(words, async || envoy.log().contains(words)).await;

    let certs = directory.join("certs");
    Mounted::bad_for_envoy(&directory.join("ca"), "web").write(&certs);
    let mut agent = start(directory, "web", &["--cert-dir", certs.to_str().unwrap()]);
    let (_, line) = agent.process.wait_log("Envoy rejected a secret").await;
    quoted("Failed to load private key");
    assert!(line.contains("Failed to load private key"), "{line}");
    let connected = "sds.default.control_plane.connected_state";
    quoted(connected);
    envoy.wait_stat(connected, 1).await;
    let rejected = ["sds.default.update_rejected", "sds.ROOTCA.update_rejected"];
    rejected.into_iter().for_each(quoted);
    let is_rejected = async || envoy.stat(rejected[0]).await + envoy.stat(rejected[1]).await > 0;
    envoy.wait_until("Envoy rejects one of the two", is_rejected).await;
}

#[tokio::test]
async fn why_secrets_of_kubernetes_are_not_served_can_be_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let cluster = KubeCluster::start(directory, "home").await;
    let token = cluster.account("shop", "gateway");
    cluster.allow_account("shop", "gateway", Rule::to(&["get", "watch"], "secrets").within("shop"));
    let kubeconfig = cluster.write_kubeconfig(&token).display().to_string();
    let options = ["--kubernetes-secrets", "--kubeconfig", &kubeconfig, "--namespace", "shop"];
    let (one, other) = (cluster.pair("one.example"), cluster.pair("other.example"));
    let draft = || Draft::secret("shop", "web");
    let mixed = draft().entry("tls.crt", &one.chain).entry("tls.key", &other.key);
    let swapped = draft().entry("tls.crt", &one.key).entry("tls.key", &one.chain);
    let cases = [
        (None, "kubernetes://web", "does not exist in cluster", "absent"),
        (None, "kubernetes://other/web", "answered 403", "refused"),
        (Some(mixed), "kubernetes://web", "the private key does not match the certificate of", "mismatch"),
        (Some(draft().entry("tls.crt", &one.chain)), "sds://web", "a key pair needs both", "incomplete"),
        (Some(draft()), "sds://web", "it has no key pair", "incomplete"),
        (Some(draft()), "sds://web-cacert", "it has no trust roots", "incomplete"),
        (Some(swapped), "sds://web", "it holds no PEM certificate", "not_parsed"),
    ];
    for (draft, name, words, reason) in cases {
        if let Some(draft) = &draft {
            cluster.put(draft);
        }
        let mut agent = start(directory, "web", &options);
        agent.process.wait_log(" ready ").await;
        let metric = format!("attache_source_failures_total{{source=\"kubernetes\",reason=\"{reason}\"}}");
        on_connection(&agent.socket.clone(), async |client| {
            let _stream = Stream::open(&client, &[name]).await.unwrap();
            let section = "Secrets of Kubernetes are not served";
            Cause { section, words, metric: &metric, state: "/secrets/0/error" }.is_found(&mut agent).await;
        })
        .await;
        agent.process.kill().await;
    }
}
