//! The TLS contexts of listener and peer.

use serde_json::{Value, json};

use super::{insert, type_url};
use crate::base::spiffe_id::SpiffeId;

/// The secret that a gateway asks for where a client names no host.
const DEFAULT_HOST: &str = "no-sni";

pub(super) struct Tls {
    /// The SDS configuration of all secrets.
    pub(super) sds: Value,
}

impl Tls {
    pub(super) fn listener(&self, allowed: &[SpiffeId]) -> Value {
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
    pub(super) fn on_demand(&self) -> Value {
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
    pub(super) fn peer(&self, expected: &[SpiffeId], sni: Option<&str>) -> Value {
        let mut context = json!({
            "@type": type_url("extensions.transport_sockets.tls.v3.UpstreamTlsContext"),
            "common_tls_context": self.common(expected, &[]),
        });
        if let Some(sni) = sni {
            insert(&mut context, "sni", json!(sni));
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
