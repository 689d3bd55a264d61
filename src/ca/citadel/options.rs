//! `--ca citadel`: its options, checks and client.

use std::sync::Mutex;
use std::time::Duration;

use tonic::metadata::{Ascii, MetadataValue};

use super::{AUDIENCE, Citadel};
use crate::auth::client_cert::ClientCertDir;
use crate::auth::token::{self, TokenSource};
use crate::auth::token_file::Token;
use crate::base::clock::Clock;
use crate::ca::failover::Member;
use crate::ca::provider::{
    CaNetwork, ClientError, ConfiguredProvider, DefaultRoots, Headers, IdentityDefault, MetadataToken,
    NameUse, ProviderArgs, ProviderKind, SharedOptions, TokenUse,
};
use crate::fs::disk::Disk;
use crate::net::endpoint::{Endpoint, Protocol};
use crate::net::grpc::Connections;
use crate::options::Reader;

#[allow(rustdoc::broken_intra_doc_links, reason = "the text of --help, which has brackets of its own")]
#[derive(clap::Args, Clone, Debug, Default)]
pub struct CitadelArgs {
    /// The cluster id that the CA is given [default: Kubernetes] [ISTIO_META_CLUSTER_ID]
    #[arg(long, value_name = "ID", help_heading = "CA")]
    pub cluster_id: Option<String>,
    /// The signer that istiod is to use, where Kubernetes signs for it: the name without istiod's
    /// CERT_SIGNER_DOMAIN [default: istiod's own choice] [ISTIO_META_CERT_SIGNER]
    #[arg(long, value_name = "NAME", help_heading = "CA")]
    pub cert_signer: Option<String>,
}

#[derive(Clone, Debug)]
pub struct CitadelProvider {
    pub endpoint: Endpoint,
    pub token: token::TokenSettings,
    /// Presented instead of the token, while it is valid.
    pub client_cert: Option<ClientCertDir>,
    pub cluster_id: MetadataValue<Ascii>,
    pub headers: Headers,
    /// Istiod's signer.
    pub cert_signer: Option<String>,
    /// Whether the agent's own credential requests certificates for other workloads of its node.
    pub impersonates: bool,
    /// How long one call may take.
    pub timeout: Duration,
}

impl ProviderArgs for CitadelArgs {
    type Provider = CitadelProvider;
    const KIND: &'static ProviderKind = &ProviderKind {
        name: "citadel",
        alias: None,
        summary: "Istio's CA protocol; give --ca-address",
        network: Some(CaNetwork {
            parse_address: super::address,
            default_address: |_| None,
            has_istio_variables: true,
            default_roots: DefaultRoots::Istio,
        }),
        token: TokenUse::Source {
            exchange: None,
            metadata: MetadataToken::Identity { audience: Some(AUDIENCE) },
            audience: Some(AUDIENCE),
        },
        identity: IdentityDefault::Token,
        takes_client_cert: true,
        names: NameUse::Ignored { why: "Istio's CA issues the caller's identity alone" },
    };

    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<CitadelProvider> {
        let cluster_id: MetadataValue<Ascii> = r
            .parsed("cluster-id", &self.cluster_id, &["ISTIO_META_CLUSTER_ID"], |text| {
                text.parse().map_err(|_| format!("{text:?} can't be sent in a header"))
            })
            .or(MetadataValue::from_static("Kubernetes"));
        let cert_signer = r.text("cert-signer", &self.cert_signer, &["ISTIO_META_CERT_SIGNER"]);
        // Istio sets its variable for a whole mesh, whichever CA a workload uses. A cluster id is no mistake either.
        let set: &[_] = if cert_signer.is_own() { &[cert_signer.set_by()] } else { &[] };
        if !shared.selection.is(Self::KIND, r, set) {
            return Vec::new();
        }
        shared.note_plaintext(r, "the workload's token goes");
        let provider = |endpoint| CitadelProvider {
            endpoint,
            token: shared.token.clone(),
            client_cert: shared.client_cert.clone(),
            cluster_id: cluster_id.clone(),
            headers: shared.headers.clone(),
            cert_signer: cert_signer.value.clone(),
            impersonates: shared.impersonates,
            timeout: shared.timeout,
        };
        shared.endpoints().map(provider).collect()
    }
}

impl ConfiguredProvider for CitadelProvider {
    fn kind(&self) -> &'static ProviderKind {
        CitadelArgs::KIND
    }

    fn client(&self, clock: &Clock, disk: &Disk) -> Result<Member, ClientError> {
        let client = Citadel {
            endpoint: self.endpoint.clone(),
            token: TokenSource::new(self.token.clone(), clock.clone(), disk.clone()),
            client_cert: self.client_cert.clone(),
            repeats: Mutex::default(),
            refused: Mutex::default(),
            cluster_id: self.cluster_id.clone(),
            headers: self.headers.clone(),
            cert_signer: self.cert_signer.clone(),
            impersonates: self.impersonates,
            connections: Connections::new(self.timeout, disk.clone()),
            clock: clock.clone(),
            disk: disk.clone(),
        };
        Ok(Member::new(&self.name(), client))
    }

    fn endpoint(&self) -> Option<(&Endpoint, Protocol)> {
        Some((&self.endpoint, Protocol::Http2))
    }

    fn token(&self) -> Option<token::TokenSettings> {
        Some(self.token.clone())
    }

    fn token_hint(&self, token: &Token) -> &'static str {
        super::audience_hint(token)
    }

    fn client_cert(&self) -> Option<&ClientCertDir> {
        self.client_cert.as_ref()
    }
}
