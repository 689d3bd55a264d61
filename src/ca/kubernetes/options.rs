//! `--ca kubernetes`: its options, checks and client.

use std::sync::Mutex;

use super::{Kubernetes, SHORTEST_TTL, SignerName, SignerRoots};
use crate::auth::token;
use crate::auth::token_file::TokenFile;
use crate::base::clock::Clock;
use crate::ca::failover::Member;
use crate::ca::provider::{
    CaNetwork, ClientError, ConfiguredProvider, DefaultRoots, IdentityDefault, NameUse, ProviderArgs,
    ProviderFile, ProviderKind, SharedOptions, TokenUse,
};
use crate::fs::disk::Disk;
use crate::kube;
use crate::net::address::Address;
use crate::net::endpoint::{Endpoint, Protocol};
use crate::options::Reader;
use crate::pki::key::KeyType;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct KubernetesArgs {
    /// The signer, like example.com/spiffe; needed with --ca kubernetes
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes")]
    pub kubernetes_signer: Option<String>,
    /// The signer's roots, which become ROOTCA: a PEM file, read again for each certificate, or cluster (the
    /// ClusterTrustBundles that name the signer); needed with --ca kubernetes
    #[arg(long, value_name = "FILE", help_heading = "Kubernetes")]
    pub kubernetes_root: Option<String>,
}

#[derive(Clone, Debug)]
pub struct KubernetesProvider {
    /// The API server.
    pub endpoint: Endpoint,
    /// A service account's token.
    pub token: TokenFile,
    pub signer: SignerName,
    pub roots: SignerRoots,
    pub key_type: KeyType,
}

impl ProviderArgs for KubernetesArgs {
    type Provider = KubernetesProvider;
    const KIND: &'static ProviderKind = &ProviderKind {
        name: "kubernetes",
        alias: None,
        summary: "CertificateSigningRequests, see docs/ca-kubernetes.md; give --kubernetes-signer and --kubernetes-root",
        network: Some(CaNetwork {
            parse_address: |text| Address::with_ports(text, 443, 80),
            default_address: |r| kube::config::in_cluster_address(|name| r.variable(name)),
            has_istio_variables: false,
            default_roots: DefaultRoots::ServiceAccount,
        }),
        token: TokenUse::ServiceAccount,
        identity: IdentityDefault::Token,
        takes_client_cert: false,
        names: NameUse::Requested,
    };

    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<KubernetesProvider> {
        let Some((signer, roots)) = self.signer(r, shared) else { return Vec::new() };
        shared.note_plaintext(r, "the service account's token goes");
        let provider = |endpoint| KubernetesProvider {
            endpoint,
            token: shared.token_file.clone(),
            signer: signer.clone(),
            roots: roots.clone(),
            key_type: shared.key_type,
        };
        shared.endpoints().map(provider).collect()
    }
}

impl KubernetesArgs {
    /// None if another provider is selected, or an option is missing or invalid, which is in the report then.
    fn signer(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Option<(SignerName, SignerRoots)> {
        let signer = r.parsed("kubernetes-signer", &self.kubernetes_signer, &[], str::parse::<SignerName>);
        let root = r.text("kubernetes-root", &self.kubernetes_root, &[]);
        if !shared.selection.is(Self::KIND, r, &[signer.set_by(), root.set_by()]) {
            return None;
        }
        if signer.is_missing() {
            r.mistake("--ca kubernetes needs the signer's name: --kubernetes-signer example.com/name");
        }
        if root.is_missing() {
            r.mistake(
                "--ca kubernetes needs the signer's roots, which the API does not return with a certificate: \
                 --kubernetes-root FILE, or --kubernetes-root cluster for its ClusterTrustBundles",
            );
        }
        if shared.ttl < SHORTEST_TTL {
            r.note(format!(
                "a certificate lifetime of {:?} is requested as {SHORTEST_TTL:?}, the shortest that Kubernetes accepts",
                shared.ttl
            ));
        }
        let roots = match root.value? {
            text if text == "cluster" => SignerRoots::Cluster,
            path => SignerRoots::File(path.into()),
        };
        Some((signer.value?, roots))
    }
}

impl ConfiguredProvider for KubernetesProvider {
    fn kind(&self) -> &'static ProviderKind {
        KubernetesArgs::KIND
    }

    fn client(&self, clock: &Clock, disk: &Disk) -> Result<Member, ClientError> {
        let client = Kubernetes {
            endpoint: self.endpoint.clone(),
            token: self.token.clone(),
            signer: self.signer.clone(),
            roots: self.roots.clone(),
            key_type: self.key_type,
            clock: clock.clone(),
            disk: disk.clone(),
            requests: Mutex::default(),
        };
        Ok(Member::new(&self.name(), client))
    }

    fn endpoint(&self) -> Option<(&Endpoint, Protocol)> {
        Some((&self.endpoint, Protocol::Http2))
    }

    fn token(&self) -> Option<token::TokenSettings> {
        Some(self.token.clone().into())
    }

    fn files(&self) -> Vec<ProviderFile<'_>> {
        match &self.roots {
            SignerRoots::File(path) => vec![ProviderFile::certificates("--kubernetes-root", path)],
            SignerRoots::Cluster => Vec::new(),
        }
    }
}
