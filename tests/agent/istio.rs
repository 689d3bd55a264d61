//! The drop-in: an agent configured only by an injected pod's environment, and an Envoy with the SDS cluster that
//! Istio's agent gives its proxy (`sds-grpc`, a pipe at the well-known path relative to `/`) and with TLS settings in
//! the form that istiod sends.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::envoy::{Envoy, http_get};
use crate::support::files::{spiffe, token};
use crate::support::mesh::{Traffic, wait_success};
use crate::support::process::{Ca, Process, attache};

/// Where Istio's proxies look for a foreign agent's socket, relative to their working directory.
const SOCKET: &str = "var/run/secrets/workload-spiffe-uds/socket";

/// A directory that stands for the root of a pod's file system.
struct Pod {
    root: PathBuf,
    account: &'static str,
}

impl Pod {
    fn new(directory: &Path, account: &'static str) -> Self {
        let root = directory.join(account);
        std::fs::create_dir_all(root.join(SOCKET).parent().unwrap()).unwrap();
        let tokens = root.join("tokens");
        std::fs::create_dir(&tokens).unwrap();
        std::fs::write(tokens.join("istio-token"), token(account, "istio-ca", 3600)).unwrap();
        Self { root, account }
    }

    /// The agent, with the injected pod's environment. Paths under `/` are passed as options: a test must not write
    /// there.
    async fn agent(&self, ca: &Ca, ca_root: &Path) -> Process {
        let mut command = attache(&["run"]);
        let address = ca.address.to_string();
        let root = |path: &str| self.root.join(path);
        command.envs([
            ("CA_ADDR", address.as_str()),
            ("CA_PROVIDER", "Citadel"),
            ("PILOT_CERT_PROVIDER", "istiod"),
            ("JWT_POLICY", "third-party-jwt"),
            ("ISTIO_META_CLUSTER_ID", "Kubernetes"),
            ("TRUST_DOMAIN", "cluster.local"),
            ("POD_NAMESPACE", "default"),
            ("SERVICE_ACCOUNT", self.account),
            ("SECRET_TTL", "6s"),
            // Ignored by an SDS agent.
            ("ISTIO_META_MESH_ID", "cluster.local"),
            ("PROXY_CONFIG", "{}"),
        ]);
        command.env("CA_ROOT_CA", ca_root);
        command.env("ATTACHE_SOCKET", root(SOCKET)).env("ATTACHE_CERT_DIR", root("etc/certs"));
        command.env("ATTACHE_TOKEN_FILE", root("tokens/istio-token")).env("ATTACHE_STATUS_ADDRESS", "none");
        let mut agent = Process::start(command);
        agent.wait_log("ready").await;
        agent
    }

    /// The proxy, whose working directory is the pod's root.
    async fn proxy(&self, listeners: Value, clusters: &[Value]) -> Envoy {
        let mut all = vec![sds_cluster()];
        all.extend_from_slice(clusters);
        let account = self.account;
        let bootstrap = json!({
            "node": {
                "id": format!("sidecar~10.0.0.1~{account}-0.default~default.svc.cluster.local"),
                "cluster": format!("{account}.default"),
                "metadata": { "CLUSTER_ID": "Kubernetes", "NAMESPACE": "default", "SERVICE_ACCOUNT": account },
            },
            "admin": {},
            "static_resources": { "listeners": listeners, "clusters": all },
        });
        Envoy::start_in(&self.root, bootstrap, &self.root, account).await
    }
}

/// The SDS cluster that Istio's agent writes, whichever agent serves it.
fn sds_cluster() -> Value {
    const OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    let path = format!("./{SOCKET}");
    json!({
        "name": "sds-grpc",
        "type": "STATIC",
        "typed_extension_protocol_options": { OPTIONS: {
            "@type": format!("type.googleapis.com/{OPTIONS}"),
            "explicit_http_config": { "http2_protocol_options": {} },
        }},
        "connect_timeout": "1s",
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {
            "cluster_name": "sds-grpc",
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": { "pipe": { "path": path } } } }] }],
        },
    })
}

/// A secret as istiod names it in a proxy's configuration.
fn secret(name: &str) -> Value {
    json!({ "name": name, "sds_config": {
        "api_config_source": {
            "api_type": "GRPC",
            "transport_api_version": "V3",
            "set_node_on_first_message_only": true,
            "grpc_services": [{ "envoy_grpc": { "cluster_name": "sds-grpc" } }],
        },
        "initial_fetch_timeout": "0s",
        "resource_api_version": "V3",
    }})
}

/// TLS as istiod configures it, with the accepted peers.
fn tls(peers: &Value, alpn: &[&str]) -> Value {
    json!({
        "tls_params": { "tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3" },
        "alpn_protocols": alpn,
        "tls_certificate_sds_secret_configs": [secret("default")],
        "combined_validation_context": {
            "default_validation_context": { "match_typed_subject_alt_names": [{ "san_type": "URI", "matcher": peers }] },
            "validation_context_sds_secret_config": secret("ROOTCA"),
        },
    })
}

fn transport_socket(side: &str, context: Value) -> Value {
    let kind = format!("envoy.extensions.transport_sockets.tls.v3.{side}TlsContext");
    let mut context = context;
    context["@type"] = json!(format!("type.googleapis.com/{kind}"));
    json!({ "name": "envoy.transport_sockets.tls", "typed_config": context })
}

fn listener(name: &str, transport: Option<Value>, route: Value) -> Value {
    const PROXY: &str = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let header = |name: &str, value: &str| json!({ "header": { "key": name, "value": value } });
    let mut chain = json!({ "filters": [{ "name": "envoy.filters.network.http_connection_manager", "typed_config": {
        "@type": format!("type.googleapis.com/{PROXY}"),
        "stat_prefix": name,
        "http_filters": [{ "name": "envoy.filters.http.router", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
        }}],
        "route_config": { "virtual_hosts": [{ "name": "all", "domains": ["*"], "routes": [route] }] },
    }}]});
    if let Some(transport) = transport {
        chain["transport_socket"] = transport;
        let config = &mut chain["filters"][0]["typed_config"]["route_config"];
        config["response_headers_to_add"] = json!([
            header("x-peer-uri-san", "%DOWNSTREAM_PEER_URI_SAN%"),
            header("x-peer-serial", "%DOWNSTREAM_PEER_SERIAL%"),
        ]);
    }
    let address = json!({ "socket_address": { "address": "127.0.0.1", "port_value": 0 } });
    json!({ "name": name, "address": address, "filter_chains": [chain] })
}

/// istiod's inbound listener for the proxy's own workload: any peer of the trust domain.
fn inbound() -> Value {
    let context = json!({
        "common_tls_context": tls(&json!({ "prefix": "spiffe://cluster.local/" }), &["h2", "http/1.1"]),
        "require_client_certificate": true,
    });
    let route = json!({
        "match": { "prefix": "/" },
        "direct_response": { "status": 200, "body": { "inline_string": "hello\n" } },
    });
    listener("virtualInbound", Some(transport_socket("Downstream", context)), route)
}

/// A service that is called with mutual TLS where its endpoint supports it: a new handshake for each request.
fn service(to: SocketAddr) -> Value {
    const OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    let context = json!({
        "common_tls_context": tls(&json!({ "exact": spiffe("api") }), &["istio", "http/1.1"]),
        "sni": "outbound_.80_._.api.default.svc.cluster.local",
        "max_session_keys": 0,
    });
    let address = json!({ "socket_address": { "address": to.ip(), "port_value": to.port() } });
    json!({
        "name": "outbound|80||api.default.svc.cluster.local",
        "type": "STATIC",
        "typed_extension_protocol_options": { OPTIONS: {
            "@type": format!("type.googleapis.com/{OPTIONS}"),
            "common_http_protocol_options": { "max_requests_per_connection": 1 },
            "explicit_http_config": { "http_protocol_options": {} },
        }},
        "transport_socket_matches": [{
            "name": "tlsMode-istio",
            "match": { "tlsMode": "istio" },
            "transport_socket": transport_socket("Upstream", context),
        }],
        "load_assignment": {
            "cluster_name": "outbound|80||api.default.svc.cluster.local",
            "endpoints": [{ "lb_endpoints": [{
                "endpoint": { "address": address },
                "metadata": { "filter_metadata": { "envoy.transport_socket_match": { "tlsMode": "istio" } } },
            }] }],
        },
    })
}

#[tokio::test]
async fn an_unchanged_istio_proxy_is_served_from_the_well_known_path() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let ca_root = directory.path().join("ca/root-cert.pem");
    let (web, api) = (Pod::new(directory.path(), "web"), Pod::new(directory.path(), "api"));

    let mut api_agent = api.agent(&ca, &ca_root).await;
    let api_proxy = api.proxy(json!([inbound()]), &[]).await;
    api_proxy.wait_listeners(&["virtualInbound"]).await;
    let to = api_proxy.listener_address("virtualInbound").await;

    // A proxy that starts first waits as long as necessary: nothing is served without certificates.
    let cluster = service(to);
    let route = json!({ "match": { "prefix": "/" }, "route": { "cluster": cluster["name"] } });
    let web_proxy = web.proxy(json!([listener("outbound", None, route)]), &[cluster]).await;
    web_proxy.wait_stat("cluster.sds-grpc.upstream_cx_connect_fail", 1).await;
    let mut web_agent = web.agent(&ca, &ca_root).await;
    web_proxy.wait_listeners(&["outbound"]).await;
    let outbound = web_proxy.listener_address("outbound").await;
    wait_success(&web_proxy, outbound).await;

    let traffic = Traffic::start(outbound);
    web_agent.wait_log_times("certificate issued", 4).await;
    api_agent.wait_log_times("certificate issued", 4).await;
    let (_, newest) = web_agent.wait_next_log("certificate issued").await;
    let newest = newest.split("serial=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let is_used = async || match http_get(outbound, "/").await {
        Ok((200, headers, _)) => headers["x-peer-serial"].contains(&newest),
        _ => false,
    };
    web_proxy.wait_until("the newest serial is seen by the peer", is_used).await;
    let report = traffic.stop().await;
    assert!(report.failures.is_empty(), "{:#?}\n{}", report.failures, web_proxy.log());
    assert_eq!(report.identities, [spiffe("web")]);
    assert!(report.serials.len() >= 3, "{:?}", report.serials);
    for proxy in [&web_proxy, &api_proxy] {
        assert_eq!(proxy.stat("sds.default.update_rejected").await, 0);
        assert!(proxy.stat("sds.default.update_success").await >= 3);
    }
}
