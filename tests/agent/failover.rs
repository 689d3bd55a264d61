//! Several CAs: which one is called when, what is logged, and what is served meanwhile.

use std::path::Path;
use std::time::Duration;

use attache::pki::pem;
use rustix::process::Signal;
use serde_json::Value;
use tonic::Code;

use crate::support::fake_ca::{Call, FakeCa, Mood};
use crate::support::files::spiffe;
use crate::support::process::{Agent, Ca, output, strs};
use crate::support::sds::{Stream, certificates, on_connection, served_serial};
use crate::support::wait::wait_until;

/// Renewed every 0.6 s, a minute before expiry.
const SOON: [&str; 4] = ["--cert-ttl", "60s", "--grace-ratio", "0.99"];

/// The number of roots that a new stream gets.
async fn roots(socket: &Path) -> usize {
    on_connection(socket, async |client| {
        let mut stream = Stream::open(&client, &["ROOTCA"]).await.unwrap();
        pem::certificates(certificates(&stream.next().await.unwrap()).as_bytes()).unwrap().len()
    })
    .await
}

#[tokio::test]
async fn the_second_ca_signs_while_the_first_is_down_or_hangs_and_the_first_once_it_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut first = Ca::start(directory).await;
    let second = FakeCa::start(directory, &spiffe("web")).await;
    let names = [format!("https://{}", first.address), format!("http://{}", second.address)];
    first.process.kill().await;
    let mut options = first.client("web");
    options.extend(["--ca-address", &names[1], "--ca-timeout", "1s"].map(str::to_owned));
    options.extend(SOON.map(str::to_owned));
    let mut agent = Agent::ready(directory, "web", &strs(&options)).await;
    let issued_by = |name: &str| format!(" ca=\"{name}\"");
    let (_, line) = agent.process.wait_log("certificate issued").await;
    assert!(line.contains(&issued_by(&names[1])), "{line}");
    let (_, line) = agent.process.wait_log("failed over to the next CA").await;
    assert!(line.contains(" WARN ") && line.contains(&names[0]) && line.contains("refused"), "{line}");
    assert_eq!(roots(&agent.socket).await, 1);

    // Status and metrics say which CA signed, and which one fails, since when and why.
    let socket = agent.socket.to_str().unwrap().to_owned();
    let status = async |more: &[&str]| {
        let printed = output(&[&["status", "--socket", &socket], more].concat()).await;
        String::from_utf8(printed.stdout).unwrap()
    };
    let table = status(&[]).await;
    let rows =
        [format!("    failing      {} since 20", names[0]), format!("    signed by    {} 20", names[1])];
    assert!(rows.iter().all(|row| table.contains(row)) && table.contains("refused"), "{table}");
    let report: Value = serde_json::from_str(&status(&["--output", "json"]).await).unwrap();
    let [failing, signing] = [0, 1].map(|index| report["ca"]["members"][index].clone());
    assert_eq!((&report["ca"]["signed_by"], &failing["issued"]), (&names[1].as_str().into(), &Value::Null));
    assert!(failing["error"].as_str().unwrap().contains("refused") && failing["last_call"].is_string());
    assert!(
        failing["failing_since"].is_string() && signing["issued"].is_string() && signing["error"].is_null()
    );
    let sample = |metric: &str, index: usize| format!("attache_ca_{metric}{{ca=\"{}\"}}", names[index]);
    let expected = [("serving", 0, 0.0), ("serving", 1, 1.0), ("failing", 0, 1.0), ("failing", 1, 0.0)];
    for (metric, index, value) in expected {
        assert_eq!(agent.metric(&sample(metric, index)).await, value, "{metric} {index}");
    }
    let since = sample("failing_since_timestamp_seconds", 0);
    assert!(agent.metric(&since).await > 0.0);

    // The first CA is called again.
    first.restart().await;
    let (_, line) = agent.process.wait_log("the CA signs again").await;
    assert!(line.contains(&issued_by(&names[0])), "{line}");
    agent.wait_metric(&sample("serving", 0), 1).await;
    assert_eq!((agent.metric(&sample("failing", 0)).await, agent.metric(&since).await), (0.0, 0.0));
    agent.process.wait_log("trust roots changed").await;
    assert_eq!(roots(&agent.socket).await, 2, "peers may hold certificates of either");
    let calls = second.calls().len();
    agent.process.wait_next_log("certificate issued").await;
    agent.process.wait_next_log("certificate issued").await;
    assert_eq!(second.calls().len(), calls, "the second CA is not called while the first one signs");

    // It hangs: the second CA is called after its timeout.
    first.process.signal(Signal::STOP);
    let (_, line) = agent.process.wait_log("gave no answer within 1s").await;
    assert!(line.contains("failed over to the next CA") && line.contains(&names[0]), "{line}");
    assert!(second.calls().len() > calls);
    first.process.signal(Signal::CONT);
    agent.process.wait_log_times("the CA signs again", 2).await;

    assert_eq!(agent.process.count("no new certificate"), 0, "{}", agent.process.log());
    // However often the calls failed.
    assert_eq!(agent.process.count(" WARN failed over"), 2, "{}", agent.process.log());
    assert_eq!(roots(&agent.socket).await, 2);
}

#[tokio::test]
async fn while_all_cas_are_down_the_last_good_certificate_is_served_and_the_first_to_return_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let first = FakeCa::start(&directory.join("first"), &spiffe("web")).await;
    let second = FakeCa::start(&directory.join("second"), &spiffe("web")).await;
    first.client(directory);
    let token = directory.join("token");
    let options = [&["--token-file", token.to_str().unwrap()][..], &SOON].concat();
    // In the form of an injected pod's environment.
    let names = [&first, &second].map(|ca| format!("http://{}", ca.address));
    let both = names.join(", ");
    let mut agent = Agent::start_as(directory, "web", &options, |mut command| {
        command.env("CA_ADDR", both);
        command
    });
    agent.process.wait_log(" ready ").await;
    first.set(Mood::Refuse(Code::Unavailable));
    second.set(Mood::Refuse(Code::PermissionDenied));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    let words = ["WARN", &names[0], "Unavailable", &names[1], "PermissionDenied", "is valid until"];
    assert!(words.iter().all(|word| line.contains(word)), "{line}");
    let asked = [&first, &second].map(|ca| ca.calls().len());
    for (ca, asked) in [&first, &second].into_iter().zip(asked) {
        wait_until("each CA is called twice more", || ca.calls().len() >= asked + 2).await;
    }
    assert_eq!(agent.process.count("no new certificate"), 1, "logged once:\n{}", agent.process.log());
    assert_eq!(served_serial(&agent.socket).await, *agent.serials().last().unwrap());
    assert_eq!(agent.status("/readyz").await, (200, "ready\n".to_owned()));
    assert_eq!(agent.metric("attache_secret_failing{name=\"default\"}").await, 1.0);

    second.set(Mood::Slow(Duration::from_millis(300)));
    let (_, line) = agent.process.wait_log("the CA signs again").await;
    assert!(line.contains(&names[1]), "{line}");
    first.set(Mood::Slow(Duration::from_millis(300)));
    agent.process.wait_log_times("the CA signs again", 2).await;
    agent.process.wait_next_log("certificate issued").await;
    assert_eq!(agent.metric("attache_secret_failing{name=\"default\"}").await, 0.0);

    // One call at a time, to either CA.
    let calls = [first.calls(), second.calls()].concat();
    let mut times: Vec<_> = calls.into_iter().map(|Call { time, .. }| time).collect();
    times.sort_unstable();
    assert!(times.windows(2).all(|two| two[0].1.is_some_and(|end| end <= two[1].0)), "{times:#?}");
}
