//! Istio's CA protocol: connection reuse, a CA that misbehaves in every way, and the reports about it.

use std::time::Duration;

use attache::proto::google::protobuf::value::Kind;
use rustix::process::Signal;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Code;

use crate::support::fake_ca::{Call, FakeCa, Mood, Shape, Tls};
use crate::support::files::{spiffe, token};
use crate::support::process::{Agent, Ca, strs};
use crate::support::rough_h2::{GOAWAY, Rough};
use crate::support::sds::{Stream, certificates, on_connection, served_serial};
use crate::support::wait::wait_until;

/// An agent of the fake CA that renews three times a second.
fn busy_agent(directory: &std::path::Path, ca: &FakeCa, more: &[&str]) -> Agent {
    let mut options = ca.client(directory);
    let fixed = ["--cert-ttl", "30s", "--grace-ratio", "0.99", "--grace-jitter", "0"];
    options.extend(fixed.iter().chain(more).map(|text| (*text).to_owned()));
    Agent::start(directory, "web", &strs(&options))
}

/// The CA is good, then in this mood, then good again.
async fn survives(mood: Mood, label: &str, words: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut agent = busy_agent(directory.path(), &ca, &["--ca-timeout", "1500ms"]);
    agent.process.wait_log("ready").await;
    ca.set(mood);
    let (_, line) = agent.process.wait_log(words[0]).await;
    for words in words {
        assert!(line.contains(words), "{mood:?}: {words:?} is not in {line}");
    }
    assert!(line.contains(" WARN no new certificate ") && line.len() < 1000, "{mood:?}: {line}");
    let metric = format!("attache_ca_requests_total{{provider=\"citadel\",outcome=\"{label}\"}}");
    assert!(agent.metric(&metric).await > 0.0, "{mood:?} is not counted as {label}: {line}");
    // A stream that opens now gets the good certificate.
    assert_eq!(Some(&served_serial(&agent.socket).await), agent.serials().last(), "{mood:?}");
    assert_eq!(agent.status("/readyz").await.0, 200, "{mood:?}");
    ca.set(Mood::Good);
    agent.process.wait_log("the CA signs again").await;
    assert_eq!(agent.process.count(words[0]), 1, "{mood:?}:\n{}", agent.process.log());
    assert_eq!(agent.process.count("panicked"), 0, "{mood:?}");
}

/// Runs the cases, several at a time.
async fn all_survive(cases: impl IntoIterator<Item = (Mood, &'static str, &'static [&'static str])>) {
    const AT_A_TIME: usize = 8;
    let (mut running, mut failed) = (JoinSet::new(), Vec::new());
    for (mood, label, words) in cases {
        if running.len() == AT_A_TIME {
            failed.extend(running.join_next().await.and_then(Result::err));
        }
        running.spawn(survives(mood, label, words));
    }
    while let Some(ended) = running.join_next().await {
        failed.extend(ended.err());
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[tokio::test]
async fn an_incomplete_answer_is_reported_as_what_it_is() {
    const NOT_HTTP2: &[&str] = &["it violates HTTP/2", "is this its gRPC port?"];
    let rough = |rough, label, words| (Mood::Rough(rough), label, words);
    all_survive([
        rough(Rough::Silent, "timeout", &["gave no answer within 1.5s"] as &[_]),
        rough(Rough::Close, "unreachable", &["broke before it had answered"]),
        rough(Rough::Bytes(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"), "unreachable", NOT_HTTP2),
        rough(Rough::Bytes(b"220 mail.example ESMTP\r\n"), "unreachable", NOT_HTTP2),
        rough(Rough::Bytes(GOAWAY), "unreachable", &["it is shutting down (GOAWAY)"]),
        rough(Rough::Html(502), "refused", &["answered 502 ", "not gRPC (text/html)"]),
        rough(Rough::Html(503), "refused", &["answered 503 ", "not gRPC (text/html)"]),
        rough(Rough::Html(404), "refused", &["answered 404 ", "not gRPC (text/html)"]),
        rough(Rough::Html(200), "refused", &["answered 200 ", "not gRPC (text/html)"]),
        rough(Rough::HangInAnswer, "timeout", &["gave no answer within 1.5s"]),
        rough(
            Rough::ResetInAnswer(h2::Reason::INTERNAL_ERROR),
            "unreachable",
            &["it reset the call (RST_STREAM: "],
        ),
        rough(Rough::ResetInAnswer(h2::Reason::CANCEL), "unreachable", &["it reset the call"]),
        rough(Rough::CloseInAnswer, "unreachable", &["it closed the connection"]),
        rough(Rough::ShortAnswer, "junk", &["can't be read: "]),
        rough(Rough::BadPrefix, "junk", &["can't be read: protocol error"]),
        rough(Rough::GiantPrefix, "junk", &["longer than 1048576 bytes"]),
        rough(Rough::NotProtobuf, "junk", &["failed to decode Protobuf message"]),
        rough(Rough::NoTrailers, "unreachable", &["the answer is incomplete"]),
        rough(Rough::WrongContentLength, "unreachable", &["broke before it had answered"]),
        rough(Rough::HugeHeaders, "unreachable", &["it violates HTTP/2"]),
        rough(Rough::NoMessage, "junk", &["can't be read: Missing response message"]),
        (Mood::Huge, "junk", &["longer than 1048576 bytes"]),
        (Mood::ResetOnce(h2::Reason::CANCEL), "unreachable", &["it reset the call (RST_STREAM: "]),
        (Mood::Shape(Shape::NoRoot), "no_root", &["must send its root last"]),
        (Mood::Shape(Shape::Nothing), "no_root", &["must send its root last"]),
        (Mood::Shape(Shape::CutOff), "junk", &["a BEGIN line without its END line"]),
        (Mood::Shape(Shape::Many), "junk", &["holds 65 certificates"]),
    ])
    .await;
}

#[tokio::test]
async fn every_grpc_status_is_reported_by_its_name() {
    let answered =
        |code| -> &'static str { String::leak(format!("answered {code:?}: as the test wants it")) };
    let refused = |code| (Mood::Refuse(code), "refused", &*Vec::leak(vec![answered(code)]));
    all_survive((1..=16).map(Code::from_i32).map(refused)).await;
}

#[tokio::test]
async fn every_way_to_write_the_certificates_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut agent = busy_agent(directory.path(), &ca, &[]);
    agent.process.wait_log("ready").await;
    let served = async || {
        on_connection(&agent.socket, async |client| {
            let mut names = Vec::new();
            for name in ["default", "ROOTCA"] {
                let mut stream = Stream::open(&client, &[name]).await.unwrap();
                names.push(certificates(&stream.next().await.unwrap()).matches("BEGIN").count());
            }
            names
        })
        .await
    };
    // Leaf and intermediate, and the root once, each without the text between them.
    assert_eq!(served().await, [2, 1]);
    for shape in [Shape::One, Shape::TwoInTheLast, Shape::OneTwoOne, Shape::Decorated] {
        ca.set(Mood::Shape(shape));
        // The open call may have had the old mood.
        wait_calls(&ca, 2).await;
        agent.process.wait_next_log("certificate issued").await;
        assert_eq!(served().await, [2, 1], "{shape:?}");
    }
    ca.set(Mood::Slow(Duration::from_secs(1)));
    wait_calls(&ca, 2).await;
    agent.process.wait_next_log("certificate issued").await;
    assert_eq!(agent.process.count("no new certificate"), 0, "{}", agent.process.log());
}

#[tokio::test]
async fn a_ca_that_asks_for_a_delay_gets_it() {
    let directory = tempfile::tempdir().unwrap();
    // Without a certificate that could expire, the agent waits as long as the CA asks, and up to twice as long, since
    // other agents may have been asked the same.
    let cases = [
        (Mood::Busy { seconds: 77, pushback: "1000" }, 77),
        (Mood::Busy { seconds: 0, pushback: "61000" }, 61),
        (Mood::Busy { seconds: 1 << 40, pushback: "99999999999999" }, 300),
        (Mood::Busy { seconds: -1, pushback: "junk" }, 0),
        (Mood::Busy { seconds: i64::MIN, pushback: "-1" }, 0),
    ];
    for (index, (mood, asked)) in cases.into_iter().enumerate() {
        let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
        ca.set(mood);
        let options = ca.client(directory.path());
        let mut agent = Agent::start(directory.path(), &index.to_string(), &strs(&options));
        let (_, line) = agent.process.wait_log("too many requests").await;
        assert!(line.contains("Unavailable"), "{mood:?}: {line}");
        let (_, retry) = line.trim().rsplit_once("retry_in_ms=").unwrap();
        let retry = retry.parse::<u64>().unwrap() / 1000;
        let longest = if asked == 0 { 1 } else { 2 * asked };
        assert!((asked..=longest).contains(&retry), "{mood:?}: {line}");
        if asked == 0 {
            // It retries soon, as usual.
            wait_calls(&ca, 1).await;
        }
    }
}

/// Waits for `count` more calls.
async fn wait_calls(ca: &FakeCa, count: usize) {
    let known = ca.calls().len();
    wait_until("calls", || ca.calls().len() >= known + count).await;
}

#[tokio::test]
async fn calls_close_together_share_a_connection() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Optional).await;
    let root = directory.join("root.pem");
    let own = std::fs::read(directory.join("fake-ca/root-cert.pem")).unwrap();
    std::fs::write(&root, &own).unwrap();
    let mut agent =
        busy_agent(directory, &ca, &["--ca-root", root.to_str().unwrap(), "--cert-signer", "blue"]);
    wait_calls(&ca, 5).await;
    // Only the second call shows that there is more than one.
    assert_eq!((ca.connected(), ca.open()), (2, 1));

    // Another token changes the call, not the connection.
    let other = token("web", "istio-ca", 7200);
    std::fs::write(directory.join("token"), &other).unwrap();
    let bearer = format!("Bearer {other}");
    let has_it =
        || ca.calls().last().is_some_and(|call| call.metadata.get("authorization").unwrap() == &bearer);
    wait_until("the new token", has_it).await;
    assert_eq!(ca.connected(), 2);

    // Other roots change the connection.
    let stranger = std::fs::read(directory.join("stranger/root-cert.pem")).unwrap();
    std::fs::write(&root, [&own[..], &stranger].concat()).unwrap();
    wait_until("a new connection", || ca.connected() == 3).await;
    wait_calls(&ca, 3).await;
    assert_eq!((ca.connected(), ca.open()), (3, 1));

    // A connection that ended while idle, or on which the CA accepted no more calls, costs nothing.
    ca.end_connections();
    wait_until("a new connection", || ca.connected() == 4).await;
    wait_calls(&ca, 2).await;
    ca.set(Mood::ResetOnce(h2::Reason::REFUSED_STREAM));
    wait_until("a new connection", || ca.connected() == 5).await;
    wait_calls(&ca, 3).await;
    assert_eq!(agent.process.count("no new certificate"), 0, "{}", agent.process.log());

    // Whether the CA signed a call that broke is unknown: the call counts as a failure, and the next one has another
    // key.
    ca.set(Mood::ResetOnce(h2::Reason::INTERNAL_ERROR));
    agent.process.wait_log("the CA signs again").await;
    assert_eq!(agent.process.count("no new certificate"), 1);
    let calls = ca.calls();
    let csrs: std::collections::HashSet<_> = calls.iter().map(|call| &call.request.csr).collect();
    assert_eq!(csrs.len(), calls.len(), "a request was sent twice");
    let signer = |call: &Call| call.request.metadata.clone().unwrap().fields["CertSigner"].clone();
    assert!(calls.iter().all(|call| signer(call).kind == Some(Kind::StringValue("blue".to_owned()))));

    std::fs::write(&root, &stranger).unwrap();
    agent.process.wait_log("not signed by").await;
    std::fs::write(&root, &own).unwrap();
    agent.process.wait_log_times("the CA signs again", 2).await;
}

#[tokio::test]
async fn calls_far_apart_keep_no_connection_open() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start_tls(directory.path(), &spiffe("web"), Tls::Optional).await;
    let mut options = ca.client(directory.path());
    options.extend(["--ca-root".to_owned(), "system".to_owned()]);
    let root = directory.path().join("fake-ca/root-cert.pem");
    let with_roots = |mut command: tokio::process::Command| {
        command.env("SSL_CERT_FILE", root);
        command
    };
    let mut agent = Agent::start_as(directory.path(), "web", &strs(&options), with_roots);
    agent.process.wait_log("ready").await;
    wait_until("the end of the connection", || ca.open() == 0).await;
    assert_eq!(ca.connected(), 1);
    assert!(ca.calls().iter().all(|call| call.request.metadata.is_none()));
}

#[tokio::test]
async fn istios_plaintext_port_is_plaintext_with_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    // An address of this process's own, since the port is the same for all processes.
    let [.., a, b, c] = std::process::id().to_be_bytes();
    let listen = format!("127.{a}.{b}.{}:15010", c.clamp(2, 250));
    let ca = FakeCa::start_at(directory.path(), &spiffe("web"), None, listen.parse().unwrap()).await;
    let mut options = ca.client(directory.path());
    options[1] = listen.clone();
    let mut agent = Agent::ready(directory.path(), "web", &strs(&options)).await;
    let (_, line) = agent.process.wait_log("in plain text").await;
    assert!(line.contains(" WARN ") && line.contains(&format!("token goes to http://{listen}")), "{line}");
    assert_eq!(ca.calls().len(), 1);
}

#[tokio::test]
async fn a_ca_that_freezes_is_noticed_within_the_call() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let mut options = ca.client("web");
    let fixed = ["--cert-ttl", "300s", "--grace-ratio", "0.999", "--grace-jitter", "0", "--ca-timeout", "3s"];
    options.extend(fixed.map(str::to_owned));
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    agent.process.wait_log_times("certificate issued", 3).await;
    ca.process.signal(Signal::STOP);
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("it has stopped answering, HTTP/2 pings too"), "{line}");
    assert_eq!(Some(&served_serial(&agent.socket).await), agent.serials().last());
    ca.process.signal(Signal::CONT);
    agent.process.wait_log("the CA signs again").await;
}

#[tokio::test]
async fn the_report_says_where_a_ca_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.set(Mood::Rough(Rough::Silent));
    // A listener whose queue is full.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let (full, mut queue) = (listener.local_addr().unwrap(), Vec::new());
    while let Ok(connected) = timeout(Duration::from_millis(500), TcpStream::connect(full)).await {
        queue.push(connected.unwrap());
    }
    let hung = ca.address;
    let cases = [
        ("tcp", format!("http://{full}"), "nothing answers there within 1.6s"),
        ("tls", format!("https://{hung}"), "it takes connections, but answers no TLS handshake within 1.6s"),
    ];
    let root = directory.path().join("fake-ca/root-cert.pem").display().to_string();
    let mut agents = cases.map(|(name, address, words)| {
        let mut options = ca.client(directory.path());
        options[1] = address;
        options.extend(["--ca-timeout", "2s", "--ca-root", &root].map(str::to_owned));
        (Agent::start(directory.path(), name, &strs(&options)), words)
    });
    for (agent, words) in &mut agents {
        let (_, line) = agent.process.wait_log("no new certificate").await;
        assert!(line.contains(*words), "{line}");
    }
}
