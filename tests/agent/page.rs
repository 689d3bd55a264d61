//! The status page, in a real browser.

use std::net::SocketAddr;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;

use crate::support::chromium::Chromium;
use crate::support::envoy::http_get;
use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::spiffe;
use crate::support::node::Node;
use crate::support::process::{Agent, failure, output, strs};
use crate::support::sds::{Stream, on_connection};

/// A name and a reason with markup.
const NAME: &str = "file-root:/<b>x";
const REASON: &str = "<img src=x onerror=alert(1)>";

/// Starts an agent with a status page at `address`.
async fn start(dir: &Path, ca: &FakeCa, address: &str) -> (Agent, SocketAddr) {
    let options = ["--admin-address", address, "--cert-ttl", "10m"].map(str::to_owned);
    let options = [ca.client(dir), options.to_vec()].concat();
    let mut agent = Agent::ready(dir, "web", &strs(&options)).await;
    let (_, line) = agent.process.wait_log("attache serves").await;
    let (_, address) = line.split_once("page=http://").unwrap();
    let address = address.split('/').next().unwrap().parse().unwrap();
    (agent, address)
}

async fn report(page: SocketAddr) -> Value {
    let (status, _, body) = http_get(page, "/v1/status").await.unwrap();
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

#[tokio::test]
async fn a_browser_shows_state_history_and_plans_and_follows_changes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ca = FakeCa::start(dir, &spiffe("web")).await;
    let (mut agent, address) = start(dir, &ca, "127.0.0.1:0").await;
    let socket = agent.socket.clone();
    let renew = ["renew", "--socket", socket.to_str().unwrap()];
    let home = format!("http://{address}/");
    let mut browser = Chromium::open(dir, &home).await;

    on_connection(&socket, async |client| {
        let mut own = Stream::open(&client, &["default"]).await.unwrap();
        let first = own.next().await.unwrap();
        own.accept(&first).await;
        let mut roots = Stream::open(&client, &["ROOTCA"]).await.unwrap();
        let first = roots.next().await.unwrap();
        roots.reject(&first, REASON).await;
        let _other = Stream::open(&client, &[NAME]).await.unwrap();

        // The facts, and no markup from names and reasons.
        browser.wait("document.querySelectorAll('article').length === 3").await;
        browser.wait("document.body.innerText.includes('onerror')").await;
        browser.wait("document.body.innerText.includes('1: 1 with this version')").await;
        let text = browser.evaluate("document.body.innerText").await;
        let text = text.as_str().unwrap();
        let first = report(address).await;
        let [roots, own, other] = ["ROOTCA", "default", NAME]
            .map(|name| first["secrets"].as_array().unwrap().iter().find(|one| one["name"] == name).unwrap());
        let process = format!("{}, process {}", env!("CARGO_PKG_VERSION"), first["pid"]);
        let shown = [
            "attache READY",
            &process,
            &format!("citadel at {}", first["ca"]["addresses"][0].as_str().unwrap()),
            "default OK from ca",
            "ROOTCA REJECTED from ca",
            "file-root:/<b>x MISSING",
            &spiffe("web"),
            "ECDSA P-256",
            own["key_pair"]["serial"].as_str().unwrap(),
            own["key_pair"]["issuer"].as_str().unwrap(),
            own["version"].as_str().unwrap(),
            roots["trust_bundle"]["roots"][0]["serial"].as_str().unwrap(),
            &format!("version {} by test: {REASON}", roots["version"].as_str().unwrap()),
            other["error"].as_str().unwrap(),
            "s left)",
            "(in ",
        ];
        for part in shown {
            assert!(text.contains(part), "{part}:\n{text}");
        }
        for moment in ["not_after", "renews", "received"] {
            let moment = own[moment].as_str().unwrap();
            let place = format!("document.querySelectorAll('time[datetime=\"{moment}\"]').length");
            assert_ne!(browser.evaluate(&place).await, 0, "{moment}");
        }
        assert_eq!(browser.evaluate("document.querySelectorAll('article b, img').length").await, 0);
        let drawn = |kind: &str, number: usize| {
            format!("document.querySelectorAll('#line svg {kind}').length === {number}")
        };
        let now = [("rect.served", 2), ("rect.rejected", 1), (".now", 1), (".renewal", 2), (".renewed", 0)];
        for (kind, number) in now {
            browser.wait(&drawn(kind, number)).await;
        }

        // A renewal appears without a reload of the page.
        browser.evaluate("window.loaded = 'once'").await;
        assert!(output(&renew).await.status.success());
        let serial = report(address).await["secrets"][0]["key_pair"]["serial"].clone();
        assert_ne!(&serial, &own["key_pair"]["serial"]);
        browser.wait(&format!("document.querySelector('article').innerText.includes({serial})")).await;
        for (kind, number) in [("rect.served", 3), (".renewed", 1), ("rect.failing", 0)] {
            browser.wait(&drawn(kind, number)).await;
        }

        // The CA fails and recovers.
        ca.set(Mood::Refuse(Code::PermissionDenied));
        let (code, _) = failure(&renew).await;
        assert_eq!(code, 1);
        browser.wait("document.querySelector('article').innerText.includes('FAILING')").await;
        let text = browser.evaluate("document.querySelector('article').innerText").await;
        assert!(text.as_str().unwrap().contains("PermissionDenied"), "{text}");
        browser.wait(&drawn("rect.failing", 2)).await;
        ca.set(Mood::Good);
        assert!(output(&renew).await.status.success());
        browser.wait("document.querySelector('article').innerText.includes('OK')").await;
        browser.wait("document.querySelector('#rows').innerText.includes('recovered')").await;
        browser.wait(&drawn("rect.failing", 2)).await;
        browser.wait(&drawn(".failed", 2)).await;
        // Zoomed in, the next renewal is out of range.
        let choose = |minutes: &str| format!("back.value = '{minutes}'; back.onchange()");
        browser.evaluate(&choose("10")).await;
        for (kind, number) in [(".renewal", 0), (".failed", 2), ("rect.failing", 2)] {
            browser.wait(&drawn(kind, number)).await;
        }
        browser.evaluate(&choose("")).await;
        browser.wait(&drawn(".renewal", 2)).await;
    })
    .await;

    for (name, width, scheme) in [("light", 1000, "light"), ("dark", 1000, "dark"), ("narrow", 390, "light")]
    {
        browser.screen(width, scheme).await;
        browser.picture(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("page-{name}.png"))).await;
        let widest = browser.evaluate("document.documentElement.scrollWidth").await;
        assert!(widest.as_u64().unwrap() <= u64::from(width), "{name}: {widest}");
    }
    assert_eq!(browser.complaints(), [&Value::Null; 0]);

    // The agent stops: the page reports it, and keeps the last state.
    let pid = browser.evaluate("report.pid").await;
    agent.process.signal(Signal::TERM);
    agent.process.ended().await;
    browser
        .wait("document.querySelector('#gone').innerText.includes('No answer from the agent since')")
        .await;
    let text = browser.evaluate("document.title + document.body.innerText").await;
    let text = text.as_str().unwrap();
    for part in ["NO ANSWER", "WAS READY", "Below is its last known state", &spiffe("web")] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    // Another agent starts at the same address.
    let (_agent, _) = start(dir, &ca, &address.to_string()).await;
    browser.wait(&format!("document.title.startsWith('READY') && report.pid !== {pid}")).await;
    browser.wait("document.querySelector('#gone').innerText === ''").await;
    assert_eq!(browser.evaluate("window.loaded").await, "once");

    for url in browser.requests() {
        assert!(url.starts_with(&home), "{url}");
    }
    for complaint in browser.complaints() {
        assert_eq!(complaint["params"]["entry"]["source"], "network", "{complaint:#}");
    }
}

/// The complete response to a request of these lines.
async fn raw(to: SocketAddr, lines: &[&str]) -> String {
    let mut io = TcpStream::connect(to).await.unwrap();
    let request = format!("{}\r\nconnection: close\r\n\r\n", lines.join("\r\n"));
    io.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    io.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn the_page_is_readable_from_this_machine_only_and_read_only() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ca = FakeCa::start(dir, &spiffe("web")).await;
    let (mut agent, address) = start(dir, &ca, "0").await;
    assert!(address.ip().is_loopback());

    // The report is the same as on the admin socket.
    let shown = output(&["status", "--output", "json", "--socket", agent.socket.to_str().unwrap()]).await;
    let mut on_socket: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let mut on_page = report(address).await;
    for report in [&mut on_socket, &mut on_page] {
        report["now"].take();
    }
    assert_eq!(on_socket, on_page);

    let host = "host: localhost:8080";
    let calls = [
        (&["GET / HTTP/1.1", host][..], "200 OK"),
        (&["GET /v1/status HTTP/1.1", "host: evil.example"], "403 Forbidden"),
        (&["GET /v1/status HTTP/1.0"], "200 OK"),
        (&["POST /v1/renew HTTP/1.1", host, "content-length: 0"], "405 Method Not Allowed"),
        (&["PUT /v1/log?level=trace HTTP/1.1", host, "content-length: 0"], "405 Method Not Allowed"),
        (&["GET /v1/log HTTP/1.1", host], "404 Not Found"),
    ];
    for (lines, status) in calls {
        let answer = raw(address, lines).await;
        let (first, _) = answer.split_once("\r\n").unwrap();
        assert!(first.ends_with(status), "{lines:?}: {answer}");
        assert!(answer.contains("content-security-policy: default-src 'none';"), "{lines:?}: {answer}");
    }
    let head = raw(address, &["HEAD / HTTP/1.1", host]).await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    assert_eq!(agent.serials().len(), 1);

    // A taken port ends the start with an error.
    let taken = address.to_string();
    let options = [ca.client(dir), vec!["--admin-address".to_owned(), taken]].concat();
    let mut second = Agent::start(dir, "second", &strs(&options));
    second.process.wait_log("choose another --admin-address").await;
    assert_eq!(second.process.ended().await.code(), Some(1));
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
}

/// The inodes of all listening TCP sockets of this machine.
fn listening() -> Vec<String> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| std::fs::read_to_string(table).unwrap_or_default());
    let rows = tables.iter().flat_map(|table| table.lines().skip(1));
    let rows = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[3] == "0A").map(|row| format!("socket:[{}]", row[9])).collect()
}

#[tokio::test]
async fn without_the_option_nothing_listens() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ca = FakeCa::start(dir, &spiffe("web")).await;
    let listeners = async |name: &str, options: &[&str]| {
        let client = ca.client(dir);
        let agent = Agent::ready(dir, name, &[&strs(&client), options].concat()).await;
        let listening = listening();
        let open = std::fs::read_dir(format!("/proc/{}/fd", agent.process.pid().as_raw_nonzero())).unwrap();
        // The agent may close a file meanwhile.
        let open = open.filter_map(|one| std::fs::read_link(one.unwrap().path()).ok());
        open.filter(|target| listening.iter().any(|socket| target.as_os_str() == socket.as_str())).count()
    };
    assert_eq!(listeners("with", &["--admin-address", "0"]).await, 2);
    // One is the listener of the status address.
    assert_eq!(listeners("without", &[]).await, 1);
    assert_eq!(listeners("none", &["--admin-address", "none"]).await, 1);
}

#[tokio::test]
async fn of_many_workloads_the_page_shows_troubles_first_finds_any_and_opens_one_in_full() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ca = dir.join("ca").display().to_string();
    let mut node =
        Node::start(dir, &["--ca", "embedded", "--ca-dir", &ca, "--admin-address", "127.0.0.1:0"]).await;
    for number in 0..260 {
        let name = format!("web-{number:03}");
        node.describe(&name, &name, "");
    }
    let elsewhere = "socket = \"/nowhere/x.sock\"\nspiffe-id = \"spiffe://cluster.local/<b>odd\"\n";
    std::fs::write(node.file("zz-odd"), elsewhere).unwrap();
    let (_, line) = node.process.wait_log("attache serves the workloads").await;
    let (_, address) = line.split_once("page=http://").unwrap();
    let home = format!("http://{}/", address.split('/').next().unwrap());
    std::fs::write(node.file("zz-unbound"), elsewhere.replace("<b>", "")).unwrap();
    let mut browser = Chromium::open(dir, &home).await;
    browser.wait("document.querySelector('#summary')?.innerText.includes('260 ok')").await;
    let text = browser.evaluate("document.body.innerText").await;
    let text = text.as_str().unwrap();
    // A mistake in a file is no markup either.
    for part in ["NOT READY", "261 in all", "the first 250 of 261", "zz-odd: ", "<b>odd", "embedded"] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    // The one without a socket comes first, with the reason.
    browser.wait("document.querySelector('tbody tr').innerText.includes('zz-unbound')").await;
    browser.wait("document.querySelector('tbody tr').innerText.includes('/nowhere')").await;
    let filter = |text: &str| format!("filter.value = '{text}'; filter.oninput()");
    browser.evaluate(&filter("sa/web-25")).await;
    browser.wait("document.querySelector('#found').innerText === '10 of 261'").await;
    browser.evaluate("document.querySelector('tbody button').click()").await;
    browser.wait("document.querySelectorAll('article').length === 2").await;
    let opened = browser.evaluate("document.querySelector('tbody').innerText").await;
    assert!(opened.as_str().unwrap().contains("ECDSA P-256"), "{opened}");
    assert!(opened.as_str().unwrap().contains("web-250.sock"), "{opened}");
    browser.evaluate("document.querySelector('tbody button').click()").await;
    browser.wait("document.querySelectorAll('article').length === 0").await;
    let button =
        "[...document.querySelectorAll('#summary button')].find(one => one.innerText.includes('260 ok'))";
    browser.evaluate(&format!("{button}.click()")).await;
    browser
        .wait("document.querySelector('#found').innerText === 'the first 250 of 260: filter for the others'")
        .await;
    // A workload that goes disappears.
    std::fs::remove_file(node.file("web-000")).unwrap();
    browser.wait("document.querySelector('#summary').innerText.includes('259 ok')").await;
    for (name, width) in [("node", 1000), ("node-narrow", 390)] {
        browser.resize(width).await;
        browser.picture(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("page-{name}.png"))).await;
        let widest = browser.evaluate("document.documentElement.scrollWidth").await;
        assert!(widest.as_u64().unwrap() <= u64::from(width), "{name}: {widest}");
    }
    assert_eq!(browser.complaints(), [&Value::Null; 0]);
    for url in browser.requests() {
        assert!(url.starts_with(&home), "{url}");
    }
}
