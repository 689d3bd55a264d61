//! A gateway between clusters: it passes TLS connections on by their SNI, without a certificate of its own.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::endpoints::{Endpoint, Service};
use super::{UNLIMITED, address, cluster, insert, limit, type_url, with_failover};

/// A service of this cluster, and where it is.
#[derive(Clone, Debug)]
pub struct Route {
    pub service: Service,
    pub endpoints: Vec<Endpoint>,
}

/// An Envoy that passes TLS connections on.
#[derive(Clone, Debug)]
pub struct EastWest {
    pub node_id: String,
    pub node_cluster: String,
    /// Envoy's admin address.
    pub admin: SocketAddr,
    pub listen: SocketAddr,
    pub routes: Vec<Route>,
}

impl EastWest {
    pub fn json(&self) -> Value {
        let chains: Vec<_> = self.routes.iter().map(Route::filter_chain).collect();
        let mut listener = json!({
            "name": "east_west",
            "address": address(&self.listen),
            "filter_chains": chains,
        });
        let inspector = json!({
            "name": "envoy.filters.listener.tls_inspector",
            "typed_config": { "@type": type_url("extensions.filters.listener.tls_inspector.v3.TlsInspector") },
        });
        insert(&mut listener, "listener_filters", json!([inspector]));
        let clusters: Vec<_> = self.routes.iter().map(Route::cluster).collect();
        json!({
            "node": { "id": self.node_id, "cluster": self.node_cluster },
            "admin": { "address": address(&self.admin) },
            "static_resources": { "listeners": [listener], "clusters": clusters },
        })
    }
}

impl Route {
    /// Connections with another SNI match none, and are closed.
    fn filter_chain(&self) -> Value {
        let name = self.service.sni();
        json!({
            "filter_chain_match": { "server_names": [name] },
            "filters": [{
                "name": "envoy.filters.network.tcp_proxy",
                "typed_config": {
                    "@type": type_url("extensions.filters.network.tcp_proxy.v3.TcpProxy"),
                    "stat_prefix": name,
                    "cluster": name,
                    "max_connect_attempts": 3,
                },
            }],
        })
    }

    fn cluster(&self) -> Value {
        let mut cluster = cluster(&self.service.sni(), &self.endpoints);
        if self.endpoints.len() > 1 {
            with_failover(&mut cluster);
        } else {
            limit(&mut cluster, UNLIMITED);
        }
        cluster
    }
}
