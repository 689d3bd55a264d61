//! The client of each CA.

use std::sync::Mutex;

use crate::auth::token::TokenSource;
use crate::base::clock::Clock;
use crate::ca::cfssl::Cfssl;
use crate::ca::citadel::Citadel;
use crate::ca::embedded::{DevelopmentCa, Embedded};
use crate::ca::exec::Exec;
use crate::ca::failover::Member;
use crate::ca::google_cas::GoogleCas;
use crate::ca::kubernetes::Kubernetes;
use crate::ca::vault::Vault;
use crate::config::Provider;
use crate::net::grpc::Connections;
use crate::net::rest;

/// The client of the CA that `provider` says.
pub(crate) fn certificate_authority(provider: Provider, clock: &Clock) -> anyhow::Result<Member> {
    let name = provider.name();
    Ok(match provider {
        Provider::Embedded { folder } => {
            let ca = DevelopmentCa::open(&folder, clock.clone())?;
            tracing::warn!(
                root = %ca.root_file().display(),
                "the embedded CA is for development: whoever can read its folder can be anybody"
            );
            Member::new(&name, Embedded(ca))
        }
        Provider::Kubernetes { endpoint, token, signer, roots, key_type } => Member::new(
            &name,
            Kubernetes {
                endpoint,
                token,
                signer,
                roots,
                key_type,
                clock: clock.clone(),
                requests: Mutex::default(),
            },
        ),
        Provider::Cfssl { endpoint, profile, label, auth_key, bundle, headers } => {
            let headers = rest::headers(&headers);
            Member::new(&name, Cfssl { endpoint, profile, label, auth_key, bundle, headers })
        }
        Provider::Exec { sign, roots } => Member::new(&name, Exec::new(sign, roots)),
        Provider::Citadel { endpoint, token, client_cert, cluster_id, headers, cert_signer, timeout } => {
            Member::new(
                &name,
                Citadel {
                    endpoint,
                    token: TokenSource::new(token, clock.clone()),
                    client_cert,
                    repeats: Mutex::default(),
                    refused: Mutex::default(),
                    cluster_id,
                    headers,
                    cert_signer,
                    connections: Connections::new(timeout),
                    clock: clock.clone(),
                },
            )
        }
        Provider::GoogleCas { endpoint, settings, token, headers, timeout } => {
            let token = TokenSource::new(token, clock.clone());
            Member::new(&name, GoogleCas::new(endpoint, settings, token, headers, timeout))
        }
        Provider::Vault { endpoint, settings, headers } => {
            Member::new(&name, Vault::new(endpoint, settings, &headers, clock.clone()))
        }
    })
}
