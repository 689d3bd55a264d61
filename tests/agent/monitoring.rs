//! Prometheus reads the agent's metrics, and the alerts and the dashboard in `examples/monitoring`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::support::envoy::http_get;
use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::{Mounted, spiffe};
use crate::support::installed::installed;
use crate::support::process::{Agent, PATIENCE, Process, strs};
use crate::support::sds::{Stream, on_connection};
use crate::support::wait::wait_for;

/// The path of promtool, downloaded by the first test that needs it.
async fn promtool() -> PathBuf {
    installed("get-promtool", &[]).await
}

/// Prometheus itself: packages install it beside promtool.
async fn prometheus() -> PathBuf {
    let promtool = promtool().await;
    let own = std::env::var_os("PROMETHEUS_BIN").map(PathBuf::from);
    let beside = ["prometheus", "root/usr/bin/prometheus"].map(|path| promtool.with_file_name(path));
    let found = own.into_iter().chain(beside).find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!("there is no prometheus beside {}; set PROMETHEUS_BIN to the path of one", promtool.display())
    })
}

/// Runs promtool with `input`, and asserts that it has no complaint, not even about style.
async fn passes(arguments: &[&str], input: &str) {
    let mut command = Command::new(promtool().await);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // It may exit before it has read all.
    let _ = stdin.write_all(input.as_bytes()).await;
    drop(stdin);
    let output = timeout(PATIENCE, child.wait_with_output()).await.unwrap().unwrap();
    let words = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap()).concat();
    assert!(output.status.success(), "promtool {arguments:?}: {words}\n{input}");
}

fn file(path: &str) -> String {
    format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap()
}

/// Every documented metric, with its type.
fn described() -> BTreeMap<String, String> {
    let page = read("docs/metrics.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")).filter_map(|row| {
        let mut cells = row.split(" | ");
        Some((cells.next()?.to_owned(), cells.next()?.to_owned()))
    });
    let names = rows.flat_map(|(names, kind)| {
        let names: Vec<_> = names.split(", ").map(|name| name.trim_matches('`').to_owned()).collect();
        names.into_iter().map(move |name| (name, kind.clone()))
    });
    names.filter(|(name, _)| is_ours(name)).collect()
}

fn is_ours(name: &str) -> bool {
    name.starts_with("attache_") || name.starts_with("process_")
}

/// The names of metrics in an expression, without the suffixes of histograms.
fn names(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let words = words.filter(|word| is_ours(word));
    words.map(|word| word.strip_suffix("_bucket").unwrap_or(word).to_owned()).collect()
}

/// The panels' expressions, as Grafana would send them.
fn dashboard_expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&read("examples/monitoring/dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut expressions = Vec::new();
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let targets = panel["targets"].as_array().unwrap();
        if panel["type"] == "table" && targets.len() > 1 {
            // Otherwise only the first is shown, and all that are shown are called "Value".
            assert_eq!(panel["transformations"][0]["id"], "merge", "{}", panel["title"]);
            let overrides = panel["fieldConfig"]["overrides"].as_array().unwrap();
            for target in targets {
                let value = format!("Value #{}", target["refId"].as_str().unwrap());
                let is_named = |it: &Value| it["matcher"]["options"] == value.as_str();
                assert!(overrides.iter().any(is_named), "{}: {value}", panel["title"]);
            }
        }
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
            expressions.push(target["expr"].as_str().unwrap().to_owned());
        }
    }
    assert!(expressions.len() > 10);
    expressions
}

#[tokio::test]
async fn the_documented_metrics_are_exactly_those_that_exist() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut agent = Agent::ready(directory.path(), "web", &strs(&ca.client(directory.path()))).await;
    let (_, text) = agent.status("/metrics").await;
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let shown: BTreeMap<_, _> = types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect();
    assert_eq!(shown, described(), "/metrics, and docs/metrics.md");

    let prefix = "attache_refusals_total{reason=\"";
    let reasons = text.lines().filter_map(|line| line.strip_prefix(prefix)?.strip_suffix("\"} 0"));
    let page = read("docs/metrics.md");
    let (_, row) = page.split_once("(troubleshooting.md#the-agent-refuses-envoy): `").unwrap();
    let (row, _) = row.split_once("`. ").unwrap();
    let described: BTreeSet<_> = row.split("`, `").collect();
    assert_eq!(reasons.collect::<BTreeSet<_>>(), described, "each exists from the start");

    let process = ["process_open_fds", "process_resident_memory_bytes", "process_cpu_seconds_total"];
    for name in process {
        assert!(agent.metric(name).await > 0.0, "{name}");
    }
    let alerts = read("examples/monitoring/alerts.yaml");
    let expressions = dashboard_expressions();
    for name in expressions.iter().chain([&alerts]).flat_map(|text| names(text)) {
        assert!(shown.contains_key(&name), "{name} is in examples/monitoring and not in /metrics");
    }
}

#[tokio::test]
async fn the_metrics_of_good_and_failing_agents_pass_promtool() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let (state, output) = (directory.join("state"), directory.join("out"));
    let more = ["--state-dir", state.to_str().unwrap(), "--output-dir", output.to_str().unwrap()];
    let options = ca.client(directory);
    // Labels escape both characters.
    let roots = directory.join("a\"b\\c.pem");
    std::fs::write(&roots, Mounted::new(&directory.join("ca"), "web").root).unwrap();
    let mut good = Agent::ready(directory, "web", &[&strs(&options)[..], &more].concat()).await;
    on_connection(&good.socket.clone(), async |client| {
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        let response = stream.next().await.unwrap();
        stream.reject(&response, "no").await;
        good.wait_metric("attache_nacks_total{name=\"default\"}", 1).await;
        assert_eq!(good.metric("attache_connections").await, 1.0);
        let mut odd = Stream::open(&client, &[&format!("file-root:{}", roots.display())]).await.unwrap();
        odd.next().await.unwrap();
        let (_, text) = good.status("/metrics").await;
        assert!(text.contains("/a\\\"b\\\\c.pem\"} 1\n"), "{text}");
        passes(&["check", "metrics"], &text).await;
    })
    .await;
    good.wait_metric("attache_connections", 0).await;
    assert_eq!(good.metric("attache_state_failing").await, 0.0);

    ca.set(Mood::Refuse(Code::PermissionDenied));
    let mounted = directory.join("mounted");
    let chain = Mounted::new(&directory.join("ca"), "web").chain;
    Mounted { chain, ..Mounted::new(&directory.join("ca"), "web") }.write(&mounted);
    std::fs::write(directory.join("crls"), "no CRL").unwrap();
    let (mounted, crls) = (mounted.to_str().unwrap(), directory.join("crls"));
    let more = ["--cert-dir", mounted, "--crl", crls.to_str().unwrap()];
    let mut failing = Agent::start(directory, "failing", &[&strs(&options)[..], &more].concat());
    failing.process.wait_log("no new certificate").await;
    failing.process.wait_log("mounted files are not used").await;
    let (_, text) = failing.status("/metrics").await;
    passes(&["check", "metrics"], &text).await;
    let expected = [
        ("attache_ready", 0.0),
        ("attache_crls_failing", 1.0),
        ("attache_source_failures_total{source=\"crl\",reason=\"not_parsed\"}", 1.0),
        ("attache_ca_requests_total{provider=\"citadel\",outcome=\"ok\"}", 0.0),
    ];
    for (sample, value) in expected {
        assert_eq!(failing.metric(sample).await, value, "{sample}\n{text}");
    }
    // Files are read again until they are stable.
    for sample in [
        "attache_source_failures_total{source=\"files\",reason=\"mismatch\"}",
        "attache_renewal_consecutive_failures",
    ] {
        assert!(failing.metric(sample).await >= 1.0, "{sample}");
    }
}

#[tokio::test]
async fn the_alerts_pass_their_tests_and_link_to_the_documentation() {
    passes(&["check", "rules", &file("examples/monitoring/alerts.yaml")], "").await;
    passes(&["test", "rules", &file("examples/monitoring/alerts_test.yaml")], "").await;
    let (alerts, tests) =
        (read("examples/monitoring/alerts.yaml"), read("examples/monitoring/alerts_test.yaml"));
    let page = read("docs/troubleshooting.md");
    let anchors: BTreeSet<_> = page.lines().filter_map(|line| line.strip_prefix("## ")).map(anchor).collect();
    let (_, alerts) = alerts.split_once("rules:").unwrap();
    for alert in alerts.split("- alert: ").skip(1) {
        let name = alert.lines().next().unwrap();
        assert!(tests.contains(&format!("alertname=\"{name}\", alertstate=\"firing\", severity=")), "{name}");
        let (_, link) = alert.split_once("docs/troubleshooting.md#").unwrap_or_else(|| panic!("{name}"));
        assert!(anchors.contains(link.trim()), "{name}: {link}");
    }
    let metrics = read("docs/metrics.md");
    for link in metrics.split("troubleshooting.md#").skip(1) {
        let link = link.split(')').next().unwrap();
        assert!(anchors.contains(link), "docs/metrics.md: {link}");
    }
}

/// A heading's anchor, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[tokio::test]
async fn prometheus_understands_the_dashboards_queries() {
    let directory = tempfile::tempdir().unwrap();
    let mut rules = "groups: [{name: panels, rules: [".to_owned();
    for (number, expression) in dashboard_expressions().into_iter().enumerate() {
        let expression = expression.replace("$__rate_interval", "5m");
        let expression = serde_json::to_string(&expression).unwrap();
        rules += &format!("{{record: 'panel:{number}', expr: {expression}}},\n");
    }
    let path = directory.path().join("rules.yaml");
    std::fs::write(&path, rules + "]}]").unwrap();
    passes(&["check", "rules", path.to_str().unwrap()], "").await;
}

/// A Prometheus that scrapes `target` twice a second, with the alerts of the example.
async fn watch(directory: &Path, target: SocketAddr) -> (Process, SocketAddr) {
    let config = format!(
        "global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}\n\
         rule_files: ['{}']\n\
         scrape_configs: [{{job_name: attache, static_configs: [{{targets: ['{target}']}}]}}]\n",
        file("examples/monitoring/alerts.yaml")
    );
    let path = directory.join("prometheus.yaml");
    std::fs::write(&path, config).unwrap();
    let binary = prometheus().await;
    // Another process may take the port in between.
    for round in 0..10 {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new(&binary);
        command.args(["--config.file", path.to_str().unwrap(), "--storage.tsdb.path"]);
        command.arg(directory.join(format!("data-{round}"))).arg(format!("--web.listen-address={free}"));
        command.kill_on_drop(true).stdin(Stdio::null());
        let mut process = Process::start(command);
        let is_up = wait_for("Prometheus is ready", async || {
            http_get(free, "/-/ready").await.ok().filter(|(status, ..)| *status == 200)
        });
        tokio::select! {
            _ = is_up => return (process, free),
            _ = process.ended() => {}
        }
    }
    panic!("there is no port for Prometheus");
}

#[tokio::test]
async fn a_real_prometheus_reads_the_metrics_and_fires_an_alert() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut agent = Agent::ready(directory.path(), "web", &strs(&ca.client(directory.path()))).await;
    let (prometheus, address) = watch(directory.path(), agent.status_address().await).await;
    let ask = async |path: &str| -> Value {
        let (_, _, body) = http_get(address, path).await.unwrap();
        serde_json::from_str(&body).unwrap()
    };
    let until = async |what: &str, path: &str, holds: &dyn Fn(&Value) -> bool| {
        let mut seen = ask(path).await;
        let reached = async {
            while !holds(&seen["data"]) {
                sleep(Duration::from_millis(100)).await;
                seen = ask(path).await;
            }
        };
        let is_reached = timeout(PATIENCE, reached).await.is_ok();
        assert!(is_reached, "{what}: {seen}\n{}", prometheus.log());
    };
    let has_sample = |data: &Value| data["result"].as_array().is_some_and(|found| !found.is_empty());
    // All in one scrape, as OpenMetrics: only it carries units.
    until("a scrape", "/api/v1/query?query=up==1", &has_sample).await;
    until("a sample", "/api/v1/query?query=attache_ca_requests_total==1", &has_sample).await;
    let metadata = ask("/api/v1/metadata?metric=attache_secret_not_after_timestamp_seconds").await;
    assert!(metadata.to_string().contains("\"unit\":\"seconds\""), "{metadata}");

    let fires = |data: &Value| {
        let alerts = data["alerts"].as_array().unwrap();
        alerts.iter().any(|alert| {
            alert["labels"]["alertname"] == "AttacheRequestsRefused" && alert["state"] == "firing"
        })
    };
    assert!(!fires(&ask("/api/v1/alerts").await["data"]));
    on_connection(&agent.socket.clone(), async |client| {
        let _stream = Stream::open(&client, &["no-such-name"]).await.unwrap();
        until("the alert", "/api/v1/alerts", &fires).await;
    })
    .await;
}
