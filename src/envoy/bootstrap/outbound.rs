//! The way out: a plain HTTP listener, whose requests leave over mutual TLS.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};

use super::endpoints::{Endpoint, Service};
use super::tls::Tls;
use super::{
    cluster, http_manager, http_options, insert, ip, listener, proto_duration, route_to, type_url,
    with_failover,
};
use crate::base::spiffe_id::SpiffeId;

/// A plain HTTP listener whose requests go to a peer over mutual TLS.
#[derive(Clone, Debug)]
pub struct Outbound {
    pub listen: SocketAddr,
    pub to: Peers,
    /// The identities that the peer may present; any whose chain ends in the trust bundle if empty.
    pub peers: Vec<SpiffeId>,
    /// The service in the SNI, by which a gateway of another cluster finds it.
    pub service: Option<Service>,
    /// After so many requests a connection is closed, and the next one has a handshake with the newest certificates.
    pub requests_per_connection: Option<u32>,
    /// How often each endpoint is checked with a connection and its TLS handshake.
    pub health_check: Option<Duration>,
}

/// Where the peer is.
#[derive(Clone, Debug)]
pub enum Peers {
    Fixed(Vec<Endpoint>),
    /// In a file that Envoy watches.
    File(String),
}

impl Outbound {
    pub(super) fn listener(&self) -> Value {
        let mut routes = route_to("peer");
        if self.has_alternatives() {
            let route = routes.pointer_mut("/routes/0/route");
            let retry = json!({
                // Of requests that did not reach an endpoint.
                "retry_on": "connect-failure,refused-stream,reset-before-request",
                "num_retries": 2,
                "retry_host_predicate": [{
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {
                        "@type": type_url("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
                    },
                }],
                "host_selection_retry_max_attempts": 5,
            });
            route.into_iter().for_each(|route| insert(route, "retry_policy", retry.clone()));
        }
        listener("outbound", self.listen, &http_manager("outbound", &routes), None)
    }

    pub(super) fn cluster(&self, tls: &Tls) -> Value {
        let mut peer = match &self.to {
            Peers::Fixed(endpoints) => cluster("peer", endpoints),
            Peers::File(path) => json!({
                "name": "peer",
                "type": "EDS",
                "connect_timeout": "5s",
                "eds_cluster_config": {
                    "service_name": load_name(self.service.as_ref()),
                    "eds_config": { "resource_api_version": "V3", "path_config_source": { "path": path } },
                },
            }),
        };
        insert(&mut peer, "transport_socket", tls.peer(&self.peers, self.sni().as_deref()));
        // HTTP/2 if the peer's TLS agrees to it, else HTTP/1.1.
        let both = json!({ "http_protocol_options": {}, "http2_protocol_options": {} });
        let mut options = http_options("auto_config", &both);
        if let Some(most) = self.requests_per_connection {
            let most = json!({ "max_requests_per_connection": most });
            options.as_object_mut().into_iter().flat_map(|all| all.values_mut()).for_each(|options| {
                insert(options, "common_http_protocol_options", most.clone());
            });
        }
        insert(&mut peer, "typed_extension_protocol_options", options);
        if self.has_alternatives() {
            with_failover(&mut peer);
        }
        if let Some(interval) = self.health_check {
            let interval = proto_duration(interval);
            let check = json!({
                "timeout": "2s",
                "interval": interval,
                "no_traffic_interval": interval,
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                // A connection, with its TLS handshake.
                "tcp_health_check": {},
            });
            insert(&mut peer, "health_checks", json!([check]));
            insert(&mut peer, "ignore_health_on_host_removal", json!(true));
        }
        peer
    }

    fn has_alternatives(&self) -> bool {
        match &self.to {
            Peers::Fixed(endpoints) => endpoints.len() > 1,
            Peers::File(_) => true,
        }
    }

    /// The name that the peer is asked for: that of the service, or of its endpoints, if they have one.
    fn sni(&self) -> Option<String> {
        let Peers::Fixed(endpoints) = &self.to else { return self.service.as_ref().map(Service::sni) };
        let own = || {
            let (first, others) = endpoints.split_first()?;
            let host = first.address.host();
            let is_common = others.iter().all(|other| other.address.host() == host);
            let is_name = ip(&first.address).is_none();
            (is_common && is_name).then(|| host.trim_end_matches('.').to_owned())
        };
        self.service.as_ref().map(Service::sni).or_else(own)
    }
}

/// The name of a cluster in a file of endpoints.
pub fn load_name(service: Option<&Service>) -> String {
    service.map_or_else(|| "peer".to_owned(), Service::sni)
}
