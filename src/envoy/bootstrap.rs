//! An Envoy bootstrap (v3, JSON) that takes its secrets from the agent.
//!
//! Envoy gets one mutual TLS listener; it can also open connections to a peer over mutual TLS. As a gateway it gets a TLS
//! listener for any number of hosts instead.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::{Value, json};

use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::net::address::Address;

/// The cluster through which Envoy reaches the agent.
const SDS_CLUSTER: &str = "attache_sds";

/// The secret that a gateway asks for where a client names no host.
const DEFAULT_HOST: &str = "no-sni";

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

/// A plain HTTP listener whose requests go to a peer over mutual TLS.
#[derive(Clone, Debug)]
pub struct Outbound {
    pub listen: SocketAddr,
    pub to: Address,
    /// The identity that the peer must present; any whose chain ends in the trust bundle if not set.
    pub peer: Option<SpiffeId>,
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
            let most = limits::STREAMS_PER_CONNECTION;
            let most = json!({ "max_connections": most, "max_pending_requests": most, "max_requests": most });
            insert(&mut agent, "circuit_breakers", json!({ "thresholds": [most] }));
        }
        let mut clusters = vec![agent];
        if let Some(upstream) = &self.inbound.upstream {
            clusters.push(cluster("application", upstream));
        }
        if let Some(outbound) = &self.outbound {
            listeners.push(outbound.listener());
            clusters.push(outbound.cluster(&tls));
        }
        json!({
            "node": { "id": self.node_id, "cluster": self.node_cluster },
            "admin": { "address": address(&self.admin.ip(), self.admin.port()) },
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

impl Outbound {
    fn listener(&self) -> Value {
        listener("outbound", self.listen, &http_manager("outbound", &route_to("peer")), None)
    }

    fn cluster(&self, tls: &Tls) -> Value {
        let mut peer = cluster("peer", &self.to);
        insert(&mut peer, "transport_socket", tls.peer(self.peer.as_slice(), &self.to));
        // HTTP/2 if the peer's TLS agrees to it, else HTTP/1.1.
        let both = json!({ "http_protocol_options": {}, "http2_protocol_options": {} });
        insert(&mut peer, "typed_extension_protocol_options", http_options("auto_config", &both));
        peer
    }
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
        "load_assignment": assignment(SDS_CLUSTER, &json!({ "pipe": { "path": socket } })),
    })
}

/// The TLS contexts of listener and peer.
struct Tls {
    sds: Value,
}

impl Tls {
    fn listener(&self, allowed: &[SpiffeId]) -> Value {
        json!({
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": type_url("extensions.transport_sockets.tls.v3.DownstreamTlsContext"),
                "require_client_certificate": true,
                "common_tls_context": self.common(allowed, &["h2", "http/1.1"]),
            },
        })
    }

    /// The certificate of the host that the client names, fetched when it is first named. Envoy refuses this unless no
    /// session is resumed.
    fn on_demand(&self) -> Value {
        json!({
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": type_url("extensions.transport_sockets.tls.v3.DownstreamTlsContext"),
                "disable_stateless_session_resumption": true,
                "disable_stateful_session_resumption": true,
                "common_tls_context": {
                    "tls_params": { "tls_minimum_protocol_version": "TLSv1_2" },
                    "alpn_protocols": ["h2", "http/1.1"],
                    "custom_tls_certificate_selector": {
                        "name": "envoy.certificate_selectors.on_demand_secret",
                        "typed_config": {
                            "@type": type_url(
                                "extensions.transport_sockets.tls.cert_selectors.on_demand_secret.v3.Config",
                            ),
                            "config_source": self.sds,
                            "certificate_mapper": {
                                "name": "sni",
                                "typed_config": {
                                    "@type": type_url("extensions.transport_sockets.tls.cert_mappers.sni.v3.SNI"),
                                    "default_value": DEFAULT_HOST,
                                },
                            },
                        },
                    },
                },
            },
        })
    }

    /// ALPN is empty: the cluster's HTTP options choose the protocols to offer.
    fn peer(&self, expected: &[SpiffeId], to: &Address) -> Value {
        let mut context = json!({
            "@type": type_url("extensions.transport_sockets.tls.v3.UpstreamTlsContext"),
            "common_tls_context": self.common(expected, &[]),
        });
        if ip(to).is_none() {
            insert(&mut context, "sni", json!(to.host().trim_end_matches('.')));
        }
        json!({ "name": "envoy.transport_sockets.tls", "typed_config": context })
    }

    fn common(&self, peers: &[SpiffeId], alpn: &[&str]) -> Value {
        let sans: Vec<Value> = peers
            .iter()
            .map(|peer| json!({ "san_type": "URI", "matcher": { "exact": peer.as_str() } }))
            .collect();
        json!({
            "tls_params": {
                "tls_minimum_protocol_version": "TLSv1_2",
                // As a client, Envoy may stop at TLS 1.2 otherwise.
                "tls_maximum_protocol_version": "TLSv1_3",
            },
            "alpn_protocols": alpn,
            "tls_certificate_sds_secret_configs": [{ "name": "default", "sds_config": self.sds }],
            "combined_validation_context": {
                // If empty, any identity whose chain ends in the trust bundle.
                "default_validation_context": { "match_typed_subject_alt_names": sans },
                "validation_context_sds_secret_config": { "name": "ROOTCA", "sds_config": self.sds },
            },
        })
    }
}

fn listener(name: &str, at: SocketAddr, manager: &Value, transport_socket: Option<&Value>) -> Value {
    let mut chain = json!({
        "filters": [{ "name": "envoy.filters.network.http_connection_manager", "typed_config": manager }],
    });
    if let Some(transport_socket) = transport_socket {
        insert(&mut chain, "transport_socket", transport_socket.clone());
    }
    json!({ "name": name, "address": address(&at.ip(), at.port()), "filter_chains": [chain] })
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

fn cluster(name: &str, to: &Address) -> Value {
    let (kind, socket_address) = match ip(to) {
        Some(ip) => ("STATIC", address(&ip, to.port())),
        None => ("STRICT_DNS", address(&to.host(), to.port())),
    };
    let mut cluster = json!({
        "name": name,
        "type": kind,
        "connect_timeout": "5s",
        "load_assignment": assignment(name, &socket_address),
    });
    if ip(to).is_none() {
        // By default IPv6 addresses hide the IPv4 ones: "localhost" would miss a server on 127.0.0.1. With ALL, every
        // address is a host of its own, and unreachable ones get their share of requests.
        insert(&mut cluster, "dns_lookup_family", json!("V4_PREFERRED"));
    }
    cluster
}

fn ip(address: &Address) -> Option<IpAddr> {
    address.host().parse().ok()
}

fn assignment(cluster: &str, address: &Value) -> Value {
    json!({
        "cluster_name": cluster,
        "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address } }] }],
    })
}

fn address(host: &dyn fmt::Display, port: u16) -> Value {
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
