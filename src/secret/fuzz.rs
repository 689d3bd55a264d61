//! Fuzz targets: secrets made of foreign certificates, keys and CRLs, and resource names.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message as _;
use rustls::pki_types::CertificateDer;

use super::{KeyPair, PairName, Resource, Revocation, RootsName, Secret, SecretName, TrustBundle, Version};
use crate::base::fuzzing::{check_hidden, check_line, moment, sections};
use crate::base::limits;
use crate::pki::certificate::{Certificate, is_self_issued};
use crate::pki::key::PrivateKey;
use crate::pki::{crl, pem};
use crate::proto::envoy::config::core::v3::{DataSource, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3 as tls;

/// What a source reads, DER.
#[derive(Default)]
struct Material {
    chain: Vec<CertificateDer<'static>>,
    roots: Vec<CertificateDer<'static>>,
    crls: Vec<u8>,
    key: Option<PrivateKey>,
    now: Option<SystemTime>,
}

/// Sections of DER: `C` a certificate of the chain, `K` a key in PKCS#8, `R` a root, `L` a CRL; and `T` the time. True if
/// there are a key pair and a trust bundle, which then hold all that their types promise.
pub fn secrets(bytes: &[u8]) -> bool {
    let mut material = Material::default();
    for (tag, der) in sections(bytes) {
        match tag {
            b'C' => material.chain.push(der.to_vec().into()),
            b'R' => material.roots.push(der.to_vec().into()),
            b'L' => material.crls.extend_from_slice(&pem::encode("X509 CRL", der)),
            b'K' => material.key = PrivateKey::from_pem(&pem::encode("PRIVATE KEY", der)).ok(),
            _ => material.now = Some(moment(der)),
        }
    }
    let now = material.now.unwrap_or(UNIX_EPOCH);
    let pair = material.key.and_then(|key| key_pair(material.chain, key));
    let bundle = trust_bundle(material.roots);
    if let (Some(pair), Some(bundle)) = (&pair, &bundle)
        && let Err(error) = bundle.verify(pair, now)
    {
        check_line(&error.to_string());
    }
    if let Some(bundle) = &bundle {
        revocation(&material.crls, pair.as_ref(), bundle, now);
    }
    let is_complete = pair.is_some() && bundle.is_some();
    if let Some(pair) = pair {
        check_key_pair_resource(pair);
    }
    is_complete
}

fn key_pair(chain: Vec<CertificateDer<'static>>, key: PrivateKey) -> Option<KeyPair> {
    let first = chain.first().cloned();
    let pair = match KeyPair::new(chain, key) {
        Ok(pair) => pair,
        Err(error) => {
            check_line(&error.to_string());
            return None;
        }
    };
    assert_eq!(pair.chain().first(), first.as_ref(), "the leaf stays first");
    assert_eq!(pair.key().public_key().as_ref(), Ok(&pair.leaf().public_key), "the leaf carries the key");
    let parsed: Vec<_> = pair.chain().iter().filter_map(|der| Certificate::parse(der).ok()).collect();
    assert_eq!(parsed.len(), pair.chain().len());
    assert!(
        pair.chain().iter().skip(1).all(|der| is_self_issued(der) == Ok(false)),
        "a root is in the chain"
    );
    assert_eq!(parsed.iter().map(|one| one.not_after).min(), Some(pair.not_after()));
    let different: BTreeSet<&[u8]> = pair.chain().iter().map(AsRef::as_ref).collect();
    assert_eq!(different.len(), pair.chain().len(), "a certificate comes twice");
    Some(pair)
}

fn trust_bundle(roots: Vec<CertificateDer<'static>>) -> Option<TrustBundle> {
    let bundle = match TrustBundle::new(roots) {
        Ok(bundle) => bundle,
        Err(error) => {
            check_line(&error.to_string());
            return None;
        }
    };
    let ders: BTreeSet<&[u8]> = bundle.roots().iter().map(AsRef::as_ref).collect();
    assert!(bundle.roots().iter().map(AsRef::as_ref).eq(ders), "sorted, each one once");
    assert_eq!(bundle.facts().len(), bundle.roots().len());
    assert_eq!(bundle.facts().iter().map(|root| root.not_after).max(), Some(bundle.not_after()));
    Some(bundle)
}

/// Checks that the bundle gets CRLs for all its roots, or none.
fn revocation(text: &[u8], pair: Option<&KeyPair>, bundle: &TrustBundle, now: SystemTime) {
    let Ok(found) = crl::from_pem(text) else { return };
    let mut revocation = Revocation::default();
    revocation.set_crls(&found.into_iter().map(Arc::new).collect::<Vec<_>>());
    if let Some(pair) = pair {
        revocation.set_chain(pair);
    }
    assert!(revocation.next_change(bundle, now).is_none_or(|at| at > now));
    let (covered, outcome) = bundle.with_revocation(&revocation, now);
    assert_eq!(covered.roots(), bundle.roots());
    match outcome {
        Err(gaps) => {
            check_line(&gaps.to_string());
            assert!(covered.crls().is_empty(), "CRLs that do not cover the bundle");
        }
        Ok(count) => {
            assert_eq!(covered.crls().len(), count);
            let is_valid = |from, until: Option<_>| from <= now && until.is_none_or(|until| now < until);
            assert!(covered.crls().iter().all(|crl| is_valid(crl.this_update, crl.next_update)));
            for root in bundle.facts().iter().filter(|root| root.not_after > now) {
                assert!(covered.crls().iter().any(|crl| crl.is_signed_by(root)), "{root:?} has no CRL");
            }
        }
    }
}

/// Checks that Envoy gets what the key pair holds.
fn check_key_pair_resource(pair: KeyPair) {
    let (chain, key) = (pem::of_certificates(pair.chain()), pair.key().to_pem());
    // Behind the first line, which is always the same.
    let hidden: Vec<u8> = key.iter().copied().skip(28).take(64).collect();
    let secret = Secret::KeyPair(pair);
    check_line(&secret.to_string());
    check_hidden(&format!("{secret:?}"), &hidden);
    let resource = Resource::encode(&SecretName::Workload, &secret);
    assert_eq!(Version::claimed(&resource.version.to_string()), Some(resource.version.clone()));
    check_hidden(&format!("{resource:?}"), &hidden);
    let inline = |source: Option<DataSource>| match source.and_then(|source| source.specifier) {
        Some(Specifier::InlineBytes(bytes)) => bytes.to_vec(),
        _ => Vec::new(),
    };
    let sent = tls::Secret::decode(resource.payload.bytes().clone()).unwrap_or_default();
    assert_eq!(sent.name, "", "each name adds itself");
    let Some(tls::secret::Type::TlsCertificate(sent)) = sent.r#type else { unreachable!("no certificate") };
    assert!(
        inline(sent.certificate_chain) == chain && inline(sent.private_key) == *key,
        "other content is sent"
    );
}

/// A resource name. True if the agent could serve it.
pub fn name(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    if let Some(version) = Version::claimed(&text) {
        assert_eq!(version.to_string(), text);
    }
    let name = match text.parse::<SecretName>() {
        Ok(name) => name,
        Err(error) => {
            let message = error.to_string();
            check_line(&message);
            assert!(message.len() < 3_000, "{} bytes", message.len());
            return false;
        }
    };
    assert_eq!(name.as_str(), text);
    check_line(&text);
    let is_path = |path: &std::path::Path| (1..=limits::PATH_BYTES).contains(&path.as_os_str().len());
    match &name {
        SecretName::FileKeyPair(pair) => check_pair(pair, &text, is_path),
        SecretName::FileRoots(roots) => check_roots(roots, &text, is_path),
        SecretName::Minted(host) => assert_eq!(format!("mint://{}", host.host()), text),
        SecretName::Workload | SecretName::Roots | SecretName::Federated(_) | SecretName::SystemRoots => {}
        SecretName::Kubernetes(name) => {
            let namespace = name.namespace().map(|namespace| format!("{namespace}/")).unwrap_or_default();
            assert!(text.ends_with(&format!("://{namespace}{}", name.name())), "{text}");
            assert!(name.name().len() <= 253 && namespace.len() <= 64, "{text}");
        }
    }
    assert_eq!(name.to_string().parse(), Ok(name));
    true
}

fn check_pair(pair: &PairName, text: &str, is_path: impl Fn(&std::path::Path) -> bool) {
    assert!(is_path(pair.chain()) && is_path(pair.key()), "{text}");
    assert_eq!(format!("file-cert:{}~{}", pair.chain().display(), pair.key().display()), text);
}

fn check_roots(roots: &RootsName, text: &str, is_path: impl Fn(&std::path::Path) -> bool) {
    assert!(is_path(roots.path()), "{text}");
    assert_eq!(format!("file-root:{}", roots.path().display()), text);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::fuzzing::{Shape, join, seeded};
    use crate::pki::crl::testing::Authority;

    #[test]
    fn secrets_of_almost_valid_parts_keep_their_promises() {
        let (now, hour) = (UNIX_EPOCH + Duration::from_secs(1_800_000_000), Duration::from_secs(3600));
        let (root, other) = (Authority::root("root"), Authority::root("other"));
        let middle = Authority::new("middle", Some(&root), |_| {});
        let crl = |ca: &Authority| {
            let text = ca.crl(now - hour, now + hour, &[1]);
            crl::from_pem(text.as_bytes()).unwrap()[0].der().to_vec()
        };
        let (chain, key) = middle.issue();
        let time = 1_800_000_000_u64.to_be_bytes().to_vec();
        let key = (b'K', key.der().secret_der().to_vec());
        let chain: Vec<_> = chain.iter().map(|der| (b'C', der.to_vec())).collect();
        let root_der = (b'R', root.certificate.to_vec());
        let bare = [chain.clone(), vec![key, root_der, (b'T', time)]].concat();
        let crls = [crl(&root), crl(&middle)].map(|der| (b'L', der));
        let covered = [bare.clone(), crls.to_vec()].concat();
        let two = (b'R', other.certificate.to_vec());
        let more =
            [covered.clone(), vec![two, (b'L', crl(&other)), (b'C', root.certificate.to_vec())]].concat();
        let samples = [bare, covered, more].map(join);
        seeded("secrets", Shape::Sections, 600, &samples, secrets);
    }

    #[test]
    fn almost_valid_names_break_no_rule() {
        let long = format!("file-root:/{}", "a/".repeat(2_046));
        let samples = [
            "default",
            "ROOTCA",
            "file-root:system",
            "file-root:/etc/certs/root-cert.pem",
            "file-cert:/etc/certs/cert-chain.pem~/etc/certs/key.pem",
            "file-cert:\u{e9}/../a b~./c",
            "kubernetes://shop/web.example.com-cacert",
            "sds://web",
            "configmap://shop/roots",
            &long,
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        seeded("secret_name", Shape::Bytes, 8_000, &samples, name);
        assert!(!name(&[long.as_bytes(), b"aaaaa"].concat()));
    }
}
