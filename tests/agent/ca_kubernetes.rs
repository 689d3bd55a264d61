//! `--ca kubernetes`: the requests to the API server, how responses are handled, and how long a request may wait.

use std::path::Path;

use attache::pki::certificate::Certificate;
use attache::pki::pem;
use serde_json::json;

use crate::support::files::{spiffe, token};
use crate::support::kube_api::{KubeApi, Mood};
use crate::support::kube_cluster::{Call, Fault, status};
use crate::support::process::{Agent, strs};
use crate::support::sds::served;

/// Options of an agent that renews five times a second, although its certificates are valid for ten minutes.
const BUSY: [&str; 8] =
    ["--cert-ttl", "600s", "--grace-ratio", "0.9997", "--grace-jitter", "0", "--ca-timeout", "700ms"];

fn options(api: &KubeApi, more: &[&str]) -> Vec<String> {
    api.client().into_iter().chain(more.iter().map(|text| (*text).to_owned())).collect()
}

fn start(directory: &Path, api: &KubeApi, more: &[&str]) -> Agent {
    let options = options(api, more);
    Agent::start(directory, "web", &strs(&options))
}

fn posts(calls: &[Call]) -> usize {
    calls.iter().filter(|call| call.method == "POST").count()
}

fn root(api: &KubeApi, name: &str) -> Certificate {
    let text = std::fs::read(api.directory.join(name).join("root-cert.pem")).unwrap();
    Certificate::parse(&pem::certificates(&text).unwrap()[0]).unwrap()
}

#[tokio::test]
async fn a_request_is_created_signed_served_and_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let api = KubeApi::start(directory.path()).await;
    let mut agent = start(directory.path(), &api, &["--cert-ttl", "60s"]);
    agent.process.wait_log("ready").await;
    let chain = served(&agent.socket, "default").await;
    assert_eq!((chain.len(), chain[0].uris.as_slice()), (2, &[spiffe("web")][..]));
    let lifetime = chain[0].not_after.duration_since(chain[0].not_before).unwrap().as_secs();
    assert!((600..=721).contains(&lifetime), "{lifetime}");
    let roots = served(&agent.socket, "ROOTCA").await;
    assert_eq!((roots.len(), &roots[0].serial), (1, &root(&api, "signer").serial));
    assert_eq!(agent.process.count("is requested as 600s, the shortest that Kubernetes accepts"), 1);

    api.wait_call(0, |call| call.method == "DELETE").await;
    let methods: Vec<_> = api.calls().into_iter().map(|call| call.method).collect();
    assert_eq!(methods, ["POST", "GET", "DELETE"]);
    assert_eq!(api.cluster.accepted(), 1, "all calls of a request share a connection");
    assert_eq!(api.names(), Vec::<String>::new());
    let log = agent.process.log();
    let token = std::fs::read_to_string(directory.path().join("token")).unwrap();
    assert!(token.split('.').all(|part| !log.contains(part)), "a token is in the log:\n{log}");
}

#[tokio::test]
async fn the_roots_can_come_from_the_cluster_and_the_key_can_be_rsa() {
    let directory = tempfile::tempdir().unwrap();
    let api = KubeApi::start(directory.path()).await;
    let mut options = options(&api, &["--key-type", "rsa-2048"]);
    let file = options.iter().position(|option| option == "--kubernetes-root").unwrap() + 1;
    options[file] = "cluster".to_owned();
    let agent = Agent::ready(directory.path(), "web", &strs(&options)).await;
    let mut serials: Vec<_> =
        served(&agent.socket, "ROOTCA").await.into_iter().map(|root| root.serial).collect();
    let mut expected = ["signer", "stranger"].map(|name| root(&api, name).serial);
    serials.sort();
    expected.sort();
    assert_eq!(serials, expected);
    let body = &api.calls()[1].body;
    assert_eq!(body["spec"]["expirationSeconds"], 24 * 3600);
    assert_eq!(body["spec"]["usages"][3], "key encipherment");
}

#[tokio::test]
async fn one_request_waits_for_approval_and_signer_across_failed_calls() {
    let directory = tempfile::tempdir().unwrap();
    let mut api = KubeApi::start(directory.path()).await;
    // The first answer is lost: it is unknown whether the request was created.
    api.set(Mood::Fault(Fault::Lose));
    let mut agent = start(directory.path(), &api, &["--ca-timeout", "700ms"]);
    agent.process.wait_log("the connection to the CA").await;
    api.set(Mood::Unapproved);
    let (_, line) = agent.process.wait_log("waits for approval").await;
    let [name] = &api.names()[..] else { panic!("{:?}", api.names()) };
    assert!(
        line.contains("WARN") && line.contains(&format!("kubectl certificate approve {name}`")),
        "{line}"
    );
    assert!(
        line.contains("signer example.com/spiffe") && line.contains("there is no certificate yet"),
        "{line}"
    );
    let (code, body) = agent.status("/readyz").await;
    assert!(code == 503 && body.contains("waits for approval"), "{body}");

    api.stop().await;
    agent.process.wait_log("Connection refused").await;
    api.resume().await;
    api.set(Mood::Fault(Fault::Silent));
    agent.process.wait_log("no answer within 700ms").await;
    api.set(Mood::Unsigned);
    let (_, line) = agent.process.wait_log("waits for the signer example.com/spiffe").await;
    assert!(line.contains(name) && line.contains("--kubernetes-signer"), "{line}");
    assert_eq!(posts(&api.calls()), 1, "one request, one approval");
    assert!(
        agent.metric("attache_ca_requests_total{provider=\"kubernetes\",outcome=\"pending\"}").await >= 2.0
    );

    api.set(Mood::Good);
    agent.process.wait_log("ready").await;
    assert_eq!((posts(&api.calls()), agent.process.count("certificate issued")), (1, 1));
}

#[tokio::test]
async fn a_deleted_request_is_created_again_with_another_key() {
    let directory = tempfile::tempdir().unwrap();
    let api = KubeApi::start(directory.path()).await;
    api.set(Mood::Unapproved);
    let mut agent = start(directory.path(), &api, &["--ca-timeout", "700ms"]);
    agent.process.wait_log("waits for approval").await;
    let first = api.names();
    let known = api.calls().len();
    api.wait_call(known, |call| call.method == "GET").await;
    api.delete_all();
    agent.process.wait_log("was deleted at https://127.0.0.1").await;
    api.wait_call(known, |call| call.method == "POST").await;
    assert_ne!(api.names(), first);
    api.set(Mood::Good);
    agent.process.wait_log("ready").await;
}

/// An agent whose renewals meet each of `cases`: each is logged, and the renewal after it succeeds.
async fn survives(cases: Vec<(Mood, Vec<&str>, &str)>) {
    let directory = tempfile::tempdir().unwrap();
    let api = KubeApi::start(directory.path()).await;
    let mut agent = start(directory.path(), &api, &BUSY);
    agent.process.wait_log("ready").await;
    for (mood, words, label) in cases {
        let metric = format!("attache_ca_requests_total{{provider=\"kubernetes\",outcome=\"{label}\"}}");
        let before = agent.metric(&metric).await;
        api.set(mood.clone());
        let (_, line) = agent.process.wait_next_log("no new certificate").await;
        assert!(
            line.contains("WARN") && line.contains("the served certificate is valid until"),
            "{mood:?}: {line}"
        );
        for word in words {
            assert!(line.contains(word), "{mood:?}: {word:?} is not in {line}");
        }
        assert!(agent.metric(&metric).await > before, "{mood:?}: {label}");
        api.set(Mood::Good);
        agent.process.wait_next_log("the CA signs again").await;
    }
    let log = agent.process.log();
    let token = std::fs::read_to_string(directory.path().join("token")).unwrap();
    assert!(token.split('.').all(|part| !log.contains(part)), "a token is in the log:\n{log}");
}

#[tokio::test]
async fn a_refusal_is_reported_with_the_remedy() {
    let answer = |code, body: serde_json::Value| Mood::Fault(Fault::Answer(code, body.to_string()));
    let failure = |code, reason, message| answer(code, status::failure(code, reason, message, None).body);
    let invalid =
        "CertificateSigningRequest.certificates.k8s.io \"x\" is invalid: spec.signerName: Invalid value";
    let webhook = "admission webhook \"policy.example.com\" denied the request: no";
    survives(vec![
        (
            answer(401, status::unauthorized().body),
            vec!["401 Unauthorized: Unauthorized (the token is for system:serviceaccount:default:web", "/token"],
            "refused",
        ),
        (
            Mood::NoRights,
            vec![
                "cannot create resource",
                "a ClusterRole with {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests], \
                 verbs: [create, get, delete]}",
            ],
            "refused",
        ),
        (failure(403, "Forbidden", webhook), vec!["403 Forbidden: admission webhook"], "refused"),
        (
            Mood::Fault(Fault::Answer(404, "404 page not found\n".to_owned())),
            vec!["404 page not found; is this an API server, and does it serve certificatesigningrequests"],
            "refused",
        ),
        (failure(422, "Invalid", invalid), vec!["422 Unprocessable Entity: Certificate"], "refused"),
        (
            Mood::Fault(Fault::TooMany(1)),
            vec!["429 Too Many Requests: Too many requests, please try again later."],
            "refused",
        ),
        (answer(500, json!({ "message": 7 })), vec!["500 Internal Server Error: {"], "refused"),
        (Mood::Failed, vec!["the signer failed (SignerValidationFailure: the signer knows no"], "refused"),
        (Mood::Unapproved, vec!["waits for approval"], "pending"),
    ])
    .await;
}

#[tokio::test]
async fn junk_is_reported_as_what_it_is() {
    let answer = |body: &str| Mood::Fault(Fault::Answer(200, body.to_owned()));
    let broken = vec!["the connection to the CA at https://127.0.0.1:", "broke before it had answered"];
    let old = vec!["does not speak HTTP/2, which the agent needs"];
    survives(vec![
        (answer("<html>"), vec!["it is not JSON"], "junk"),
        (answer("{}"), vec!["it is not the CertificateSigningRequest attache-"], "junk"),
        (Mood::Fault(Fault::Truncate), vec!["it is not JSON"], "junk"),
        (Mood::Fault(Fault::Reset), broken.clone(), "unreachable"),
        (Mood::Fault(Fault::Close), broken.clone(), "unreachable"),
        (Mood::Raw(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n".to_vec()), old, "unreachable"),
        (Mood::Raw(b"SSH-2.0-OpenSSH_9\r\n".to_vec()), vec![], "unreachable"),
        (Mood::Raw(Vec::new()), broken, "unreachable"),
        (answer(&"x".repeat(3 << 20)), vec!["it is longer than 1048576 bytes"], "junk"),
        (Mood::Raw(vec![b'y'; 1 << 20]), vec![], "unreachable"),
    ])
    .await;
}

#[tokio::test]
async fn a_rotated_token_is_used_and_a_refused_one_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let api = KubeApi::start(directory.path()).await;
    let other = directory.path().join("other-token");
    std::fs::write(&other, token("web", "istio-ca", -60)).unwrap();
    let mut options = options(&api, &[]);
    let file = options.iter().position(|option| option == "--token-file").unwrap() + 1;
    options[file] = other.display().to_string();
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("audience [istio-ca], EXPIRED at") && line.contains("other-token"), "{line}");
    std::fs::copy(directory.path().join("token"), &other).unwrap();
    agent.process.wait_log("ready").await;
}

#[tokio::test]
async fn a_request_that_the_agent_must_not_delete_is_left_to_the_cluster() {
    let directory = tempfile::tempdir().unwrap();
    let api = KubeApi::start(directory.path()).await;
    api.set(Mood::KeepAll);
    let mut agent = start(directory.path(), &api, &["--log-level", "attache=debug"]);
    let (_, line) = agent.process.wait_log("certificate request not deleted").await;
    assert!(line.contains("DEBUG") && line.contains("cannot delete resource"), "{line}");
    assert_eq!((api.names().len(), agent.process.count("WARN")), (1, 0));
}

#[tokio::test]
async fn missing_roots_do_not_cost_an_approval() {
    let directory = tempfile::tempdir().unwrap();
    let api = KubeApi::start(directory.path()).await;
    let file = directory.path().join("signer/root-cert.pem");
    let aside = directory.path().join("aside.pem");
    std::fs::rename(&file, &aside).unwrap();
    let mut agent = start(directory.path(), &api, &[]);
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains(file.to_str().unwrap()) && line.contains("--kubernetes-root"), "{line}");
    assert_eq!(api.calls().len(), 0);
    std::fs::rename(&aside, &file).unwrap();
    agent.process.wait_log("ready").await;
}
