//! The options of `--ca kubernetes`.

use super::args::RunArgs;
use super::choice::{Chosen, ProviderName};
use super::reader::Reader;
use crate::ca::kubernetes::{SHORTEST_TTL, SignerName, SignerRoots};
use crate::net::endpoint::Address;
use crate::source::issuer::IssuerSettings;

/// The API server as the kubelet tells it to each container.
pub(super) fn in_cluster(r: &Reader<'_>) -> Option<Address> {
    let host = r.variable("KUBERNETES_SERVICE_HOST")?;
    let port = r.variable("KUBERNETES_SERVICE_PORT").unwrap_or("443");
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    Address::with_ports(&format!("https://{host}:{port}"), 443, 80).ok()
}

/// The signer and its roots, if that is the provider.
pub(super) fn options(
    r: &mut Reader<'_>,
    args: &RunArgs,
    chosen: Chosen,
    workload: &IssuerSettings,
    notes: &mut Vec<String>,
) -> Option<(SignerName, SignerRoots)> {
    let signer = r.parsed("kubernetes-signer", &args.kubernetes_signer, &[], str::parse::<SignerName>);
    let root = r.text("kubernetes-root", &args.kubernetes_root, &[]);
    if !chosen.is(r, (ProviderName::Kubernetes, "kubernetes"), &[signer.set(), root.set()]) {
        return None;
    }
    if signer.value.is_none() && !signer.was_wrong {
        r.mistake("kubernetes needs the signer's name: --kubernetes-signer example.com/name".to_owned());
    }
    if root.value.is_none() && !root.was_wrong {
        r.mistake(
            "kubernetes needs the signer's roots, which its API does not tell with a certificate: --kubernetes-root \
             FILE, or --kubernetes-root cluster for its ClusterTrustBundles"
                .to_owned(),
        );
    }
    if workload.ttl < SHORTEST_TTL {
        notes.push(format!(
            "a certificate lifetime of {:?} is asked for as {SHORTEST_TTL:?}: Kubernetes takes no shorter one",
            workload.ttl
        ));
    }
    let root = match root.value? {
        text if text == "cluster" => SignerRoots::Cluster,
        path => SignerRoots::File(path.into()),
    };
    Some((signer.value?, root))
}
