//! The files of a CA's directory, under the names of Istio's plug-in CA: read together, and checked as a whole.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::{OpenError, leaf_params};
use crate::base::clock::rfc3339;
use crate::base::limits;
use crate::fs::file;
use crate::pki::certificate::{Certificate, has_plain_subject, is_self_issued};
use crate::pki::key::{KeyType, PrivateKey, SigningKey};
use crate::pki::pem;
use crate::secret::{KeyPair, TrustBundle, Version};

/// The roots that peers trust: that of the CA, and announced ones.
pub const ROOT_FILE: &str = "root-cert.pem";
/// The certificate that signs.
pub const SIGNER_FILE: &str = "ca-cert.pem";
/// The file of the signing key.
pub const KEY_FILE: &str = "ca-key.pem";
/// The certificates behind a leaf: that of the signer, those above it, and usually the root.
pub const CHAIN_FILE: &str = "cert-chain.pem";
/// The key of a root, in a directory of its own.
pub const ROOT_KEY_FILE: &str = "root-key.pem";

/// The files as they were read.
pub(super) struct Files {
    pub(super) roots: Vec<u8>,
    pub(super) signer: Vec<u8>,
    pub(super) key: Zeroizing<Vec<u8>>,
    /// Not there in a directory that the agent made by itself.
    pub(super) chain: Option<Vec<u8>>,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Files(hidden)")
    }
}

/// A CA that can sign: its files fit together.
#[derive(Debug)]
pub(super) struct Authority {
    pub(super) signer: CertificateDer<'static>,
    pub(super) key: SigningKey,
    /// The certificates behind a leaf, without the root: none if the signer is the root itself.
    pub(super) intermediates: Vec<CertificateDer<'static>>,
    /// The root that the signer chains to.
    pub(super) root: CertificateDer<'static>,
    /// All roots, in the order of the file.
    pub(super) roots: Vec<CertificateDer<'static>>,
    /// When the first certificate between leaf and root expires.
    pub(super) not_after: SystemTime,
}

impl Files {
    /// Reads the files of `directory`. Waits for the disk.
    pub(super) fn read(directory: &Path) -> Result<Self, OpenError> {
        let read = |name: &'static str| file::read(&directory.join(name), limits::FILE_BYTES);
        let needed = |name: &'static str| read(name).map_err(|error| bad(directory, name, error.to_string()));
        Ok(Self {
            roots: needed(ROOT_FILE)?.to_vec(),
            signer: needed(SIGNER_FILE)?.to_vec(),
            key: needed(KEY_FILE)?,
            chain: match read(CHAIN_FILE) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                chain => Some(chain.map_err(|error| bad(directory, CHAIN_FILE, error.to_string()))?.to_vec()),
            },
        })
    }

    /// The content of files that are not written yet.
    pub(super) fn new(roots: Vec<u8>, signer: Vec<u8>, key: Zeroizing<Vec<u8>>, chain: Vec<u8>) -> Self {
        Self { roots, signer, key, chain: Some(chain) }
    }

    /// Another one for other content.
    pub(super) fn version(&self) -> Version {
        let chain = self.chain.as_deref().unwrap_or_default();
        Version::of_parts(&[&self.roots, &self.signer, &self.key, chain])
    }

    /// Checks that the files fit together and can sign at `now`.
    pub(super) fn check(&self, directory: &Path, now: SystemTime) -> Result<Authority, OpenError> {
        let bad = |name: &'static str, reason: String| bad(directory, name, reason);
        let certificates = |name: &'static str, text: &[u8]| {
            pem::certificates(text).map_err(|error| bad(name, error.to_string()))
        };
        let roots = certificates(ROOT_FILE, &self.roots)?;
        for root in &roots {
            match is_self_issued(root) {
                Ok(true) => {}
                Ok(false) => return Err(bad(ROOT_FILE, "it holds a certificate that is no root".to_owned())),
                Err(error) => return Err(bad(ROOT_FILE, error.to_string())),
            }
        }
        let signers = certificates(SIGNER_FILE, &self.signer)?;
        let [signer, ..] = signers.as_slice() else {
            return Err(bad(SIGNER_FILE, "it is empty".to_owned()));
        };
        let facts = Certificate::parse(signer).map_err(|error| bad(SIGNER_FILE, error.to_string()))?;
        if facts.not_after <= now {
            let at = rfc3339(facts.not_after);
            return Err(bad(SIGNER_FILE, format!("it expired at {at}")));
        }
        plain_subject(signer, &facts.subject).map_err(|reason| bad(SIGNER_FILE, reason))?;
        let key = PrivateKey::from_pem(&self.key).map_err(|error| bad(KEY_FILE, error.to_string()))?;
        if key.public_key().map_err(|error| bad(KEY_FILE, error.to_string()))? != facts.public_key {
            return Err(bad(KEY_FILE, format!("it is not the key of {SIGNER_FILE}")));
        }
        let key = signing_key(&key).map_err(|reason| bad(KEY_FILE, reason))?;
        let mut intermediates = match self.chain.as_ref().filter(|chain| !chain.trim_ascii().is_empty()) {
            None => signers.clone(),
            Some(chain) => certificates(CHAIN_FILE, chain)?,
        };
        intermediates.retain(|certificate| !roots.contains(certificate));
        if !roots.contains(signer) && intermediates.first() != Some(signer) {
            return Err(bad(CHAIN_FILE, format!("it does not begin with the certificate in {SIGNER_FILE}")));
        }
        let unfit = |reason: String| bad(SIGNER_FILE, reason);
        let sample = sample(signer, &key, &intermediates, now).map_err(unfit)?;
        let root = signing_root(&sample, &roots, now).map_err(|reason| bad(ROOT_FILE, reason))?;
        may_sign(sample.chain().iter().skip(1).chain([&root]))
            .map_err(|(is_root, reason)| bad(if is_root { ROOT_FILE } else { SIGNER_FILE }, reason))?;
        let between = intermediates.iter().chain([&root]).map(Certificate::parse);
        let not_after = between.filter_map(Result::ok).map(|facts| facts.not_after).min().unwrap_or(now);
        Ok(Authority { signer: signer.clone(), key, intermediates, root, roots, not_after })
    }
}

fn bad(directory: &Path, name: &str, reason: String) -> OpenError {
    OpenError::File { path: directory.join(name), reason }
}

/// `key` in the form that signs; an error says why not.
pub(super) fn signing_key(key: &PrivateKey) -> Result<SigningKey, String> {
    let pkcs8 = key.to_pkcs8().ok_or("keys of its kind can't sign here")?;
    SigningKey::from_pkcs8(&pkcs8.as_slice().into()).map_err(|error| error.to_string())
}

/// Whether a certificate can sign here, by its name; an error says why not. Otherwise the issuer in what it signs would be
/// another one.
pub(super) fn plain_subject(signer: &CertificateDer<'_>, subject: &str) -> Result<(), String> {
    match has_plain_subject(signer) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!(
            "its subject ({subject}) has an attribute twice, or several in one place, and the agent can't repeat such a name as \
             the issuer of what it signs; make an intermediate with a simple subject for it, with the tool that made this \
             certificate"
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// Longer than any certificate of a CA is valid.
const FOREVER: Duration = Duration::from_secs(200 * 365 * 24 * 3600);

/// A certificate as this CA would issue it, to be checked as peers will check it.
fn sample(
    signer: &CertificateDer<'static>,
    key: &SigningKey,
    intermediates: &[CertificateDer<'static>],
    now: SystemTime,
) -> Result<KeyPair, String> {
    let issue = || {
        let own = SigningKey::generate(KeyType::EcdsaP256)?;
        let issuer = rcgen::Issuer::from_ca_cert_der(signer, key)?;
        let leaf = leaf_params(Vec::new(), now, now + FOREVER)?.signed_by(&own, &issuer)?;
        Ok::<_, rcgen::Error>((leaf.der().clone(), own))
    };
    let (leaf, own) = issue().map_err(|error| format!("it can't sign: {error}"))?;
    let chain = [leaf].into_iter().chain(intermediates.iter().cloned()).collect();
    KeyPair::new(chain, own.to_private_key()).map_err(|error| error.to_string())
}

/// Whether peers accept each of `path`, the signer first and the root last, as the CA of the one before. An error says why not,
/// and whether it is the root.
fn may_sign<'a>(path: impl Iterator<Item = &'a CertificateDer<'static>>) -> Result<(), (bool, String)> {
    let path: Vec<_> = path.filter_map(|certificate| Certificate::parse(certificate).ok()).collect();
    for (below, facts) in path.iter().enumerate() {
        let reason = match facts.path_len.and_then(|most| usize::try_from(most).ok()) {
            _ if !facts.is_ca => "is no CA certificate".to_owned(),
            _ if !facts.signs_certificates => "has a key usage without certificate signing".to_owned(),
            Some(most) if below > most => {
                format!("allows {most} CAs below it (its path length), and here it has {below}")
            }
            _ => continue,
        };
        let is_root = below + 1 == path.len() && below > 0;
        return Err((
            is_root,
            format!("{} {reason}: peers would refuse its certificates; use another one", facts.subject),
        ));
    }
    Ok(())
}

/// The one of `roots` that the certificates of the CA chain to; of several with one key, that with the longest life.
fn signing_root(
    sample: &KeyPair,
    roots: &[CertificateDer<'static>],
    now: SystemTime,
) -> Result<CertificateDer<'static>, String> {
    let (mut reason, mut found) = (None, None::<(SystemTime, &CertificateDer<'static>)>);
    for root in roots {
        let bundle = TrustBundle::new(vec![root.clone()]).map_err(|error| error.to_string())?;
        // A CA whose clock is behind may sign with certificates that are not valid yet.
        let path = sample.chain().iter().skip(1).chain([root]).map(Certificate::parse);
        let from = path.filter_map(Result::ok).map(|facts| facts.not_before).max();
        match bundle.verify(sample, from.map_or(now, |from| from.max(now))) {
            Ok(()) => {
                let end = bundle.not_after();
                found = found.filter(|(other, _)| *other >= end).or(Some((end, root)));
            }
            Err(error) => reason = reason.or(Some(error.to_string())),
        }
    }
    if let Some((_, root)) = found {
        return Ok(root.clone());
    }
    let reason = reason.unwrap_or_default();
    Err(format!(
        "{SIGNER_FILE} does not chain to a root in it, so that peers would refuse its certificates: {reason}"
    ))
}
