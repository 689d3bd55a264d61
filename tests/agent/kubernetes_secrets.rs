//! `--kubernetes-secrets`: names of Secrets over SDS, from API servers that keep Kubernetes' rules.

use std::path::Path;

use attache::proto::envoy::config::core::v3::Node;
use attache::proto::google::protobuf::{Struct, Value, value::Kind};
use prost::Message as _;
use serde_json::json;
use tempfile::TempDir;

use crate::support::envoy::Envoy;
use crate::support::files::write_token;
use crate::support::kube_cluster::resource::Key;
use crate::support::kube_cluster::{Draft, KubeCluster, Pair, Rule};
use crate::support::process::{Agent, attache, output};
use crate::support::sds::{
    DeltaStream, Stream, certificates, content, delta_secrets, fetch, on_connection, parsed, request,
};
use crate::support::wait::{wait_for, wait_until};

/// An agent beside a gateway in the namespace `shop`, and its cluster.
pub struct Gateway {
    pub directory: TempDir,
    pub cluster: KubeCluster,
    pub agent: Agent,
}

/// What the documentation tells to allow: these names, and nothing else.
fn named(names: &[&str]) -> Rule {
    Rule::to(&["get", "watch"], "secrets").within("shop").named(names)
}

impl Gateway {
    pub async fn start(rules: Vec<Rule>, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let cluster = KubeCluster::start(directory.path(), "home").await;
        let token = cluster.account("shop", "gateway");
        for rule in rules {
            cluster.allow_account("shop", "gateway", rule);
        }
        let kubeconfig = cluster.write_kubeconfig(&token).display().to_string();
        let own = ["--kubernetes-secrets", "--kubeconfig", &kubeconfig, "--namespace", "shop"];
        let mut agent = Agent::start(directory.path(), "gateway", &[&own, options].concat());
        agent.process.wait_log(" ready ").await;
        Self { directory, cluster, agent }
    }

    /// A Secret with a new pair for a host.
    pub fn put(&self, name: &str, host: &str) -> Pair {
        let pair = self.cluster.pair(host);
        self.cluster.put(&Draft::secret("shop", name).tls(&pair));
        pair
    }

    /// The DNS names of the leaf that is served as `name`.
    async fn host(&self, name: &str) -> Vec<String> {
        let response = on_connection(&self.agent.socket, async |client| {
            Stream::open(&client, &[name]).await.unwrap().next().await.unwrap()
        });
        parsed(&certificates(&response.await)).swap_remove(0).dns_names
    }

    async fn status(&self) -> serde_json::Value {
        let socket = self.agent.socket.to_str().unwrap();
        let printed = output(&["status", "--output", "json", "--socket", socket]).await;
        serde_json::from_slice(&printed.stdout).unwrap()
    }
}

#[tokio::test]
async fn a_secret_is_served_and_its_changes_and_its_deletion_are_pushed() {
    let gateway = Gateway::start(vec![named(&["web", "web-cacert"])], &[]).await;
    gateway.put("web", "one.example");
    on_connection(&gateway.agent.socket, async |client| {
        let mut sotw = Stream::open(&client, &["sds://web-cacert"]).await.unwrap();
        let mut delta = DeltaStream::open(&client, &["kubernetes://web"]).await.unwrap();
        let first = delta.next().await.unwrap();
        delta.accept(&first).await;
        let (chain, key) = content(delta_secrets(&first).swap_remove(0));
        assert_eq!(parsed(&chain)[0].dns_names, ["one.example"]);
        assert!(key.unwrap().contains("PRIVATE KEY"));
        let roots = sotw.next().await.unwrap();
        sotw.accept(&roots).await;
        let root = parsed(&certificates(&roots));
        assert_eq!(root.len(), 1);

        gateway.put("web", "two.example");
        let second = delta.next().await.unwrap();
        delta.accept(&second).await;
        let (chain, _) = content(delta_secrets(&second).swap_remove(0));
        assert_eq!(parsed(&chain)[0].dns_names, ["two.example"]);

        gateway.cluster.delete_secret("shop", "web");
        let removed = delta.next().await.unwrap();
        assert_eq!(
            (removed.removed_resources, removed.resources.len()),
            (vec!["kubernetes://web".to_owned()], 0)
        );
        let failed = fetch(&client, &["kubernetes://web"]).await.unwrap_err();
        assert!(
            failed.message().contains("Secret shop/web does not exist in cluster Kubernetes"),
            "{failed}"
        );

        gateway.put("web", "three.example");
        let (chain, _) = content(delta_secrets(&delta.next().await.unwrap()).swap_remove(0));
        assert_eq!(parsed(&chain)[0].dns_names, ["three.example"]);
    })
    .await;
}

#[tokio::test]
async fn an_api_server_that_restarts_costs_nothing_and_status_tells_how_it_stands() {
    let mut gateway = Gateway::start(vec![named(&["web", "other"])], &[]).await;
    gateway.put("web", "one.example");
    on_connection(&gateway.agent.socket.clone(), async |client| {
        let mut stream = Stream::open(&client, &["kubernetes://web"]).await.unwrap();
        let first = stream.next().await.unwrap();
        stream.accept(&first).await;
        gateway.cluster.wait_watches(Some("web"), 1).await;
        let status = gateway.status().await;
        assert_eq!((&status["ready"], &status["secrets"][1]), (&json!(true), &json!(null)), "{status}");
        let cluster = &status["clusters"][0];
        assert_eq!((&cluster["name"], &cluster["names"]), (&json!("Kubernetes"), &json!(1)));
        assert!(cluster["reachable_since"].is_string(), "{cluster}");

        gateway.cluster.stop().await;
        let (_, line) = gateway.agent.process.wait_log("API server does not serve the agent").await;
        assert!(line.contains("cluster=\"Kubernetes\"") && line.contains("names=1"), "{line}");
        assert_eq!(gateway.host("kubernetes://web").await, ["one.example"], "the last good value");
        let error = fetch(&client, &["kubernetes://other"]).await.unwrap_err();
        assert!(error.message().contains(&gateway.cluster.address.to_string()), "{error}");
        let status = gateway.status().await;
        assert!(status["clusters"][0]["reachable_since"].is_null(), "{status}");
        let printed = output(&["status", "--socket", gateway.agent.socket.to_str().unwrap()]).await;
        let printed = String::from_utf8(printed.stdout).unwrap();
        assert!(printed.contains("cluster Kubernetes  not reachable"), "{printed}");

        // What happened meanwhile is noticed.
        gateway.put("web", "two.example");
        gateway.cluster.resume().await;
        let second = stream.next().await.unwrap();
        assert_eq!(parsed(&certificates(&second))[0].dns_names, ["two.example"]);
        gateway.agent.process.wait_log("API server serves the agent again").await;
    })
    .await;
}

#[tokio::test]
async fn rbac_decides_and_a_refusal_does_not_tell_whether_a_secret_exists() {
    let mut gateway = Gateway::start(vec![named(&["web"])], &["--kubernetes-bare-names"]).await;
    gateway.put("web", "one.example");
    gateway.put("hidden", "hidden.example");
    assert_eq!(gateway.host("WEB").await, ["one.example"], "a bare name, as a TLS client spelled it");
    on_connection(&gateway.agent.socket, async |client| {
        let mut removed = Vec::new();
        for name in ["hidden", "absent"] {
            let mut stream = DeltaStream::open(&client, &[name]).await.unwrap();
            removed.extend(stream.next().await.unwrap().removed_resources);
        }
        assert_eq!(removed, ["hidden", "absent"]);
        let hidden = fetch(&client, &["hidden"]).await.unwrap_err();
        let absent = fetch(&client, &["absent"]).await.unwrap_err();
        assert_eq!(hidden.message().replace("hidden", "absent"), absent.message());
    })
    .await;
    let (_, line) = gateway.agent.process.wait_log("requested Secret is not served").await;
    assert!(line.contains("cannot get resource") && line.contains("secrets"), "{line}");
    // Granted later, without another stream.
    on_connection(&gateway.agent.socket, async |client| {
        let mut stream = Stream::open(&client, &["hidden"]).await.unwrap();
        gateway.cluster.allow_account("shop", "gateway", named(&["hidden"]));
        let response = stream.next().await.unwrap();
        assert_eq!(parsed(&certificates(&response))[0].dns_names, ["hidden.example"]);
    })
    .await;
}

/// A node of the cluster `id`.
fn node(id: &str) -> Option<Node> {
    let value = Value { kind: Some(Kind::StringValue(id.to_owned())) };
    let metadata = Struct { fields: [("CLUSTER_ID".to_owned(), value)].into() }.encode_to_vec();
    Some(Node { id: "gateway".to_owned(), metadata: metadata.into(), ..Node::default() })
}

/// The host that a client of the cluster `id` is served as `name`; none if it is not served within a second.
async fn host_in(socket: &Path, id: &str, name: &str) -> Option<String> {
    let first = attache::proto::envoy::service::discovery::v3::DiscoveryRequest {
        node: node(id),
        ..request(&[name])
    };
    on_connection(socket, async |client| {
        let mut stream = Stream::open_with(&client, first).await.unwrap();
        let served = tokio::time::timeout(std::time::Duration::from_secs(1), stream.next()).await.ok()?;
        parsed(&certificates(&served.unwrap())).swap_remove(0).dns_names.pop()
    })
    .await
}

#[tokio::test]
async fn remote_clusters_come_change_and_go_at_run_time() {
    let system = Rule::to(&["list", "watch"], "secrets").within("istio-system");
    let mut gateway = Gateway::start(vec![named(&["web"]), system], &["--remote-clusters"]).await;
    gateway.put("web", "home.example");
    let east = KubeCluster::start(gateway.directory.path(), "east").await;
    let token = east.account("istio-system", "reader");
    let read = || Rule::to(&["get", "watch"], "secrets").within("shop");
    east.allow_account("istio-system", "reader", read());
    east.put(&Draft::secret("shop", "web").tls(&east.pair("east.example")));
    let socket = gateway.agent.socket.clone();
    assert_eq!(host_in(&socket, "Kubernetes", "kubernetes://web").await.unwrap(), "home.example");
    assert_eq!(host_in(&socket, "east", "kubernetes://web").await, None);

    let remote = |name: &str, kubeconfig: &str| {
        let draft = Draft::secret("istio-system", name).label("istio/multiCluster", "true");
        draft.entry("east", kubeconfig.as_bytes())
    };
    gateway.cluster.put(&remote("one", &east.kubeconfig(&token)));
    let process = &mut gateway.agent.process;
    process.wait_log("remote cluster added cluster=\"east\"").await;
    assert_eq!(host_in(&socket, "east", "kubernetes://web").await.unwrap(), "east.example");
    assert_eq!(host_in(&socket, "east", "kubernetes-gateway://shop/web").await.unwrap(), "home.example");

    // A token that is not good costs a warning, and nothing else.
    gateway.cluster.put(&remote("one", &east.kubeconfig("useless")));
    let (_, line) = process.wait_log("the previous connection stays in use").await;
    assert!(line.contains("401") && line.contains("Secret istio-system/one"), "{line}");
    east.put(&Draft::secret("shop", "web").tls(&east.pair("changed.example")));
    wait_for("the old token is used", async || {
        let host = host_in(&socket, "east", "kubernetes://web").await;
        host.filter(|host| host == "changed.example")
    })
    .await;
    let another = east.account("istio-system", "reader");
    gateway.cluster.put(&remote("one", &east.kubeconfig(&another)));
    process.wait_log("is read with its new kubeconfig cluster=\"east\"").await;
    east.revoke_token(&token);
    east.close_connections();
    east.put(&Draft::secret("shop", "web").tls(&east.pair("again.example")));
    wait_for("the new token is used", async || {
        let host = host_in(&socket, "east", "kubernetes://web").await;
        host.filter(|host| host == "again.example")
    })
    .await;

    // The second Secret for one cluster is taken up when the first goes.
    let west = KubeCluster::start(gateway.directory.path(), "west").await;
    let token = west.account("istio-system", "reader");
    west.allow_account("istio-system", "reader", read());
    west.put(&Draft::secret("shop", "web").tls(&west.pair("west.example")));
    gateway.cluster.put(&remote("two", &west.kubeconfig(&token)));
    let (_, line) = process.wait_log("two kubeconfigs for one cluster").await;
    assert!(line.contains("istio-system/one") && line.contains("istio-system/two"), "{line}");
    gateway.cluster.delete(&Key::new("secrets", "istio-system", "one"));
    process.wait_log_times("is read with its new kubeconfig cluster=\"east\"", 2).await;
    wait_for("the other cluster is read", async || {
        let host = host_in(&socket, "east", "kubernetes://web").await;
        host.filter(|host| host == "west.example")
    })
    .await;
    gateway.cluster.delete(&Key::new("secrets", "istio-system", "two"));
    process.wait_log("remote cluster removed").await;

    // What a kubeconfig must not do.
    let plugin = east.kubeconfig_of(&json!({ "exec": { "command": "/bin/sh", "apiVersion": "v1" } }));
    gateway.cluster.put(&remote("three", &plugin));
    let (_, line) = process.wait_log("kubeconfig of a remote cluster is not used").await;
    assert!(line.contains("exec") && line.contains("service account's token"), "{line}");
    let file = east.kubeconfig_of(&json!({ "tokenFile": "/etc/passwd" }));
    gateway.cluster.put(&remote("three", &file));
    let (_, line) = process.wait_log("--clusters-allow files").await;
    assert!(line.contains("tokenFile"), "{line}");
}

#[tokio::test]
async fn a_directory_of_kubeconfigs_is_followed() {
    let directory = tempfile::tempdir().unwrap();
    let clusters = directory.path().join("clusters");
    std::fs::create_dir(&clusters).unwrap();
    let option = clusters.to_str().unwrap().to_owned();
    let mut gateway = Gateway::start(vec![named(&["web"])], &["--clusters-dir", &option]).await;
    let east = KubeCluster::start(gateway.directory.path(), "east").await;
    let kubeconfig = east.kubeconfig(&east.admin());
    east.put(&Draft::secret("shop", "web").tls(&east.pair("east.example")));
    std::fs::write(clusters.join("east"), &kubeconfig).unwrap();
    std::fs::write(clusters.join("Kubernetes"), &kubeconfig).unwrap();
    let process = &mut gateway.agent.process;
    process.wait_log("kubeconfig of the agent's own cluster ignored").await;
    process.wait_log("remote cluster added cluster=\"east\"").await;
    assert_eq!(host_in(&gateway.agent.socket, "east", "kubernetes://web").await.unwrap(), "east.example");
    std::fs::write(clusters.join("east"), "junk: [").unwrap();
    process.wait_log("kubeconfig of a remote cluster is not used").await;
    assert_eq!(host_in(&gateway.agent.socket, "east", "kubernetes://web").await.unwrap(), "east.example");
    std::fs::remove_file(clusters.join("east")).unwrap();
    gateway.agent.process.wait_log("remote cluster removed").await;
}

#[tokio::test]
async fn with_reviews_the_account_of_the_workload_counts() {
    let agent = [Rule::to(&["get", "watch"], "secrets"), Rule::to_review()].to_vec();
    let options = ["--authorize", "rbac", "--service-account", "web"];
    let gateway = Gateway::start(agent, &options).await;
    gateway.put("web", "one.example");
    gateway.put("other", "two.example");
    gateway.cluster.account("shop", "web");
    gateway.cluster.allow_account(
        "shop",
        "web",
        Rule::to(&["get"], "secrets").within("shop").named(&["web"]),
    );
    assert_eq!(gateway.host("kubernetes://web").await, ["one.example"]);
    on_connection(&gateway.agent.socket, async |client| {
        let mut stream = DeltaStream::open(&client, &["kubernetes://other"]).await.unwrap();
        assert_eq!(stream.next().await.unwrap().removed_resources, ["kubernetes://other"]);
    })
    .await;
}

#[tokio::test]
async fn mistakes_in_the_options_are_reported_together() {
    let mut command = attache(&[
        "run",
        "--ca",
        "none",
        "--kube-context",
        "a",
        "--authorize",
        "rabc",
        "--system-namespace",
        "A",
    ]);
    let failed = command.output().await.unwrap();
    let printed = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(2), "{printed}");
    for words in [
        "--kube-context needs --kubernetes-secrets",
        "\"rabc\" is no rule; choose own, namespace, rbac or istio",
        "\"A\" is not a namespace's name",
    ] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
    let mut command = attache(&["run", "--kubernetes-secrets"]);
    command.env_remove("KUBERNETES_SERVICE_HOST");
    let printed = String::from_utf8(command.output().await.unwrap().stderr).unwrap();
    assert!(
        printed.contains("KUBERNETES_SERVICE_HOST") && printed.contains("--kubeconfig FILE"),
        "{printed}"
    );
}

#[tokio::test]
async fn an_api_server_without_tls_is_used_with_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let text = "{current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}], clusters: [{name: a, \
                cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: a, user: {token: s3cr3t}}]}";
    write_token(&kubeconfig, text);
    let own = ["--kubernetes-secrets", "--kubeconfig", kubeconfig.to_str().unwrap()];
    let mut agent = Agent::start(directory.path(), "gateway", &own);
    let (_, line) = agent.process.wait_log("in plain text").await;
    assert!(line.contains("WARN") && line.contains("goes to http://127.0.0.1:1,"), "{line}");
    assert!(!agent.process.log().contains("s3cr3t"));
}

#[tokio::test]
async fn a_restarted_agent_serves_what_was_served_while_the_api_server_is_away() {
    let state = tempfile::tempdir().unwrap();
    let option = state.path().join("state").to_str().unwrap().to_owned();
    let mut gateway = Gateway::start(vec![named(&["web", "gone"])], &["--state-dir", &option]).await;
    gateway.put("web", "one.example");
    gateway.put("gone", "gone.example");
    let names = ["kubernetes://web", "kubernetes://gone"];
    for name in names {
        gateway.host(name).await;
    }
    let kept = state.path().join("state/kubernetes");
    let files = || std::fs::read_dir(&kept).into_iter().flatten().map(|entry| entry.unwrap().path());
    wait_until("both are kept", || files().count() == 2).await;
    for file in files() {
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(std::fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    }
    on_connection(&gateway.agent.socket.clone(), async |client| {
        let mut stream = DeltaStream::open(&client, &["kubernetes://gone"]).await.unwrap();
        stream.next().await.unwrap();
        gateway.cluster.delete_secret("shop", "gone");
        stream.next().await.unwrap();
    })
    .await;
    wait_until("one is kept", || files().count() == 1).await;

    gateway.cluster.stop().await;
    gateway.agent.process.kill().await;
    gateway.agent.restart();
    gateway.agent.process.wait_log(" ready ").await;
    assert_eq!(gateway.host("kubernetes://web").await, ["one.example"]);
    gateway.put("web", "two.example");
    gateway.cluster.resume().await;
    wait_for("the change is noticed", async || {
        let host = gateway.host("kubernetes://web").await;
        (host == ["two.example"]).then_some(())
    })
    .await;
    // A damaged file is not used.
    for file in files() {
        std::fs::write(file, "junk").unwrap();
    }
    gateway.cluster.stop().await;
    gateway.agent.process.kill().await;
    gateway.agent.restart();
    gateway.agent.process.wait_log(" ready ").await;
    on_connection(&gateway.agent.socket.clone(), async |client| {
        fetch(&client, &["kubernetes://web"]).await.unwrap_err();
    })
    .await;
    let (_, line) = gateway.agent.process.wait_log("kept Secret is not used").await;
    assert!(line.contains("damaged"), "{line}");
}

/// A staple for the leaf of `pair`, signed by a CA that Envoy does not know: it does not check that.
fn staple(directory: &Path, pair: &Pair) -> Vec<u8> {
    let openssl = |arguments: &str| {
        let mut command = std::process::Command::new("openssl");
        let output = command.args(arguments.split_whitespace()).current_dir(directory).output().unwrap();
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let serial = parsed(std::str::from_utf8(&pair.chain).unwrap())[0].serial.to_uppercase();
    let digits = serial.len().next_multiple_of(2);
    let entry = format!("V\t361231235959Z\t\t{serial:0>digits$}\tunknown\t/CN=leaf\n");
    std::fs::write(directory.join("index.txt"), entry).unwrap();
    openssl(
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -subj /CN=ca",
    );
    openssl(&format!(
        "ocsp -index index.txt -CA ca.crt -rsigner ca.crt -rkey ca.key -issuer ca.crt -serial 0x{serial} \
         -respout staple.der -ndays 1"
    ));
    std::fs::read(directory.join("staple.der")).unwrap()
}

#[tokio::test]
async fn a_real_envoy_staples_what_fits_and_a_foreign_staple_costs_no_certificate() {
    let gateway = Gateway::start(vec![named(&["web", "web-cacert"])], &[]).await;
    let put = |host: &str, of: Option<&Pair>| {
        let pair = gateway.cluster.pair(host);
        let staple = staple(gateway.directory.path(), of.unwrap_or(&pair));
        gateway.cluster.put(&Draft::secret("shop", "web").tls(&pair).entry("tls.ocsp-staple", &staple));
        pair
    };
    let first = put("one.example", None);
    let socket = gateway.agent.socket.to_str().unwrap();
    let printed = output(&["bootstrap", "--listen", "127.0.0.1:0", "--socket", socket]).await;
    let printed = String::from_utf8(printed.stdout).unwrap();
    let bootstrap =
        printed.replace("\"default\"", "\"kubernetes://web\"").replace("\"ROOTCA\"", "\"sds://web-cacert\"");
    let bootstrap = serde_json::from_str(&bootstrap).unwrap();
    let envoy = Envoy::start(bootstrap, gateway.directory.path(), "gateway").await;
    let until = async |host: &str, is_stapled: bool| {
        wait_for(host, async || {
            let certs = envoy.certs().await.to_string();
            let is_so = certs.contains(host) && certs.contains("\"ocsp_details\"") == is_stapled;
            is_so.then_some(())
        })
        .await;
    };
    until("one.example", true).await;
    put("two.example", Some(&first));
    until("two.example", false).await;
    put("three.example", None);
    until("three.example", true).await;
}
