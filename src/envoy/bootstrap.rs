//! An Envoy bootstrap (v3, JSON) that takes its secrets from the agent.
//!
//! Envoy gets one mutual TLS listener; it can also open connections to a peer over mutual TLS. As a gateway it gets a TLS
//! listener for any number of hosts instead. A gateway between clusters takes no secrets at all.

pub mod east_west;
pub mod endpoints;
pub mod outbound;
mod tls;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::{Value, json};

use self::endpoints::Endpoint;
use self::outbound::Outbound;
use self::tls::Tls;
use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::net::address::Address;

/// The cluster through which Envoy reaches the agent.
const SDS_CLUSTER: &str = "attache_sds";

#[derive(Clone, Debug)]
pub struct Bootstrap {
    /// The agent's SDS socket.
    pub socket: String,
    /// How long Envoy waits for a secret before it opens the listener without one.
    pub initial_fetch_timeout: Duration,
    /// Whether Envoy uses the incremental protocol.
    pub delta: bool,
    /// Whether the listener fetches the certificate of each host when a client names it, and expects none of the client.
    pub is_gateway: bool,
    pub node_id: String,
    pub node_cluster: String,
    /// Envoy's admin address.
    pub admin: SocketAddr,
    pub inbound: Inbound,
    pub outbound: Option<Outbound>,
}

/// The mutual TLS listener.
#[derive(Clone, Debug)]
pub struct Inbound {
    pub listen: SocketAddr,
    /// The plain HTTP application behind the listener; without one, Envoy answers by itself.
    pub upstream: Option<Address>,
    /// The peers that may connect; if empty, every peer whose chain ends in the trust bundle.
    pub allow: Vec<SpiffeId>,
}

impl Bootstrap {
    pub fn json(&self) -> Value {
        let tls = Tls { sds: self.sds_config() };
        let inbound = match self.is_gateway {
            true => self.inbound.gateway(&tls),
            false => self.inbound.listener(&tls),
        };
        let mut listeners = vec![inbound];
        let mut agent = sds_cluster(&self.socket);
        if self.is_gateway {
            // Envoy opens one stream for each host, and stops at 1,024 by default: further handshakes would hang.
            limit(&mut agent, limits::STREAMS_PER_CONNECTION);
        }
        let mut clusters = vec![agent];
        if let Some(upstream) = &self.inbound.upstream {
            clusters.push(cluster("application", &[upstream.clone().into()]));
        }
        if let Some(outbound) = &self.outbound {
            listeners.push(outbound.listener());
            clusters.push(outbound.cluster(&tls));
        }
        json!({
            "node": { "id": self.node_id, "cluster": self.node_cluster },
            "admin": { "address": address(&self.admin) },
            "static_resources": { "listeners": listeners, "clusters": clusters },
        })
    }

    /// Envoy opens one stream per secret name and *distinct* SDS configuration. The listener and the peer's cluster have the
    /// same configuration, so they share their streams and receive each new secret together.
    fn sds_config(&self) -> Value {
        json!({
            "resource_api_version": "V3",
            "initial_fetch_timeout": proto_duration(self.initial_fetch_timeout),
            "api_config_source": {
                // Only Delta says that a host is unknown.
                "api_type": if self.delta || self.is_gateway { "DELTA_GRPC" } else { "GRPC" },
                "transport_api_version": "V3",
                // Envoy's node takes some 61 kB; without this, every acknowledgement repeats it.
                "set_node_on_first_message_only": true,
                "grpc_services": [{ "envoy_grpc": { "cluster_name": SDS_CLUSTER } }],
            },
        })
    }
}

impl Inbound {
    fn listener(&self, tls: &Tls) -> Value {
        let routes = match self.upstream {
            Some(_) => route_to("application"),
            None => json!({
                "name": "itself",
                "domains": ["*"],
                "response_headers_to_add": [
                    peer_header("x-peer-uri-san", "%DOWNSTREAM_PEER_URI_SAN%"),
                    peer_header("x-peer-serial", "%DOWNSTREAM_PEER_SERIAL%"),
                ],
                "routes": [{
                    "match": { "prefix": "/" },
                    "direct_response": {
                        "status": 200,
                        "body": { "inline_string": "mutual TLS works: x-peer-uri-san is your identity\n" },
                    },
                }],
            }),
        };
        let mut manager = http_manager("inbound", &routes);
        // Envoy replaces what a caller wrote into this header, so that the application may trust it.
        insert(&mut manager, "forward_client_cert_details", json!("SANITIZE_SET"));
        insert(&mut manager, "set_current_client_cert_details", json!({ "uri": true }));
        listener("inbound", self.listen, &manager, Some(&tls.listener(&self.allow)))
    }

    /// The listener of a gateway.
    fn gateway(&self, tls: &Tls) -> Value {
        let routes = match self.upstream {
            Some(_) => route_to("application"),
            None => json!({
                "name": "itself",
                "domains": ["*"],
                "routes": [{
                    "match": { "prefix": "/" },
                    "direct_response": {
                        "status": 200,
                        "body": { "inline_string": "TLS works: the certificate is that of the host in the SNI\n" },
                    },
                }],
            }),
        };
        let mut manager = http_manager("gateway", &routes);
        // Its peers are clients from anywhere.
        insert(&mut manager, "use_remote_address", json!(true));
        let mut listener = listener("gateway", self.listen, &manager, Some(&tls.on_demand()));
        if let Some(chain) = listener.pointer_mut("/filter_chains/0") {
            // Of a handshake that waits for its certificate, which would wait for ever.
            insert(chain, "transport_socket_connect_timeout", json!("15s"));
        }
        listener
    }
}

/// A limit that is none: a gateway serves whole clusters.
const UNLIMITED: u32 = 1 << 20;

/// Replaces Envoy's limits of 1,024 connections and requests, and of three retries at a time.
fn limit(cluster: &mut Value, most: u32) {
    let threshold = json!({
        "max_connections": most,
        "max_pending_requests": most,
        "max_requests": most,
        "max_retries": most,
    });
    insert(cluster, "circuit_breakers", json!({ "thresholds": [threshold] }));
}

/// What a cluster with several endpoints needs: those that can't be reached get no requests for a while.
fn with_failover(cluster: &mut Value) {
    let outliers = json!({
        "split_external_local_origin_errors": true,
        "consecutive_local_origin_failure": 2,
        "enforcing_consecutive_local_origin_failure": 100,
        // Responses of applications say nothing about the way to them.
        "enforcing_consecutive_5xx": 0,
        "enforcing_consecutive_gateway_failure": 0,
        "enforcing_success_rate": 0,
        "enforcing_local_origin_success_rate": 0,
        "interval": "1s",
        "base_ejection_time": "5s",
        "max_ejection_time": "30s",
        "max_ejection_percent": 100,
        // In TLS 1.3 a check succeeds before the endpoint has judged the certificate.
        "successful_active_health_check_uneject_host": false,
    });
    insert(cluster, "outlier_detection", outliers);
    // All requests that one endpoint leaves behind are sent again; Envoy's default is three of them at a time.
    limit(cluster, UNLIMITED);
    // Endpoints that are away get requests only if all are. Envoy's default is half of them.
    insert(cluster, "common_lb_config", json!({ "healthy_panic_threshold": { "value": 1 } }));
}

/// The JSON form of a protobuf duration, which is in seconds.
fn proto_duration(duration: Duration) -> String {
    match duration.subsec_nanos() {
        0 => format!("{}s", duration.as_secs()),
        nanos => format!("{}.{nanos:09}s", duration.as_secs()),
    }
}

fn sds_cluster(socket: &str) -> Value {
    json!({
        "name": SDS_CLUSTER,
        "type": "STATIC",
        "connect_timeout": "1s",
        // Without HTTP/2, Envoy opens no stream and reports nothing.
        "typed_extension_protocol_options": http_options(
            "explicit_http_config",
            &json!({ "http2_protocol_options": {} }),
        ),
        "load_assignment": {
            "cluster_name": SDS_CLUSTER,
            "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": { "pipe": { "path": socket } } } }] }],
        },
    })
}

fn listener(name: &str, at: SocketAddr, manager: &Value, transport_socket: Option<&Value>) -> Value {
    let mut chain = json!({
        "filters": [{ "name": "envoy.filters.network.http_connection_manager", "typed_config": manager }],
    });
    if let Some(transport_socket) = transport_socket {
        insert(&mut chain, "transport_socket", transport_socket.clone());
    }
    json!({ "name": name, "address": address(&at), "filter_chains": [chain] })
}

fn http_manager(name: &str, virtual_host: &Value) -> Value {
    json!({
        "@type": type_url("extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": name,
        "codec_type": "AUTO",
        "route_config": { "name": name, "virtual_hosts": [virtual_host] },
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": { "@type": type_url("extensions.filters.http.router.v3.Router") },
        }],
    })
}

/// Without a timeout: Envoy's default would cut every response off after 15 s, and the application knows better.
fn route_to(cluster: &str) -> Value {
    json!({
        "name": cluster,
        "domains": ["*"],
        "routes": [{ "match": { "prefix": "/" }, "route": { "cluster": cluster, "timeout": "0s" } }],
    })
}

fn peer_header(name: &str, value: &str) -> Value {
    json!({ "header": { "key": name, "value": value }, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD" })
}

fn cluster(name: &str, to: &[Endpoint]) -> Value {
    let is_static = to.iter().all(|endpoint| ip(&endpoint.address).is_some());
    let mut cluster = json!({
        "name": name,
        "type": if is_static { "STATIC" } else { "STRICT_DNS" },
        "connect_timeout": "5s",
        "load_assignment": endpoints::assignment(name, to),
    });
    if !is_static {
        // By default IPv6 addresses hide the IPv4 ones: "localhost" would miss a server on 127.0.0.1. With ALL, every
        // address is a host of its own, and unreachable ones get their share of requests.
        insert(&mut cluster, "dns_lookup_family", json!("V4_PREFERRED"));
    }
    cluster
}

fn ip(address: &Address) -> Option<IpAddr> {
    address.host().parse().ok()
}

fn address(at: &SocketAddr) -> Value {
    socket_address(&at.ip(), at.port())
}

fn socket_address(host: &dyn fmt::Display, port: u16) -> Value {
    json!({ "socket_address": { "address": host.to_string(), "port_value": port } })
}

fn http_options(which: &str, options: &Value) -> Value {
    const NAME: &str = "extensions.upstreams.http.v3.HttpProtocolOptions";
    json!({ format!("envoy.{NAME}"): { "@type": type_url(NAME), which: options } })
}

fn type_url(message: &str) -> String {
    format!("type.googleapis.com/envoy.{message}")
}

fn insert(object: &mut Value, key: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(key.to_owned(), value);
    }
}

#[cfg(test)]
mod tests;
