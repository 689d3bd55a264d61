//! Roots and intermediates in directories of their own: what `attache ca init` and `attache ca intermediate` make.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{BasicConstraints, DistinguishedName, DnType, Issuer};
use rustls::pki_types::CertificateDer;

use super::directory::{
    CHAIN_FILE, KEY_FILE, ROOT_FILE, ROOT_KEY_FILE, SIGNER_FILE, plain_subject, signing_key,
};
use super::roots::{self, RootsError};
use super::{DAY, Files, OpenError, ca_params};
use crate::base::clock::rfc3339;
use crate::base::limits;
use crate::fs::file;
use crate::fs::new_directory::{self, NewFile, NotCreated};
use crate::pki::certificate::Certificate;
use crate::pki::key::{KeyType, PrivateKey, SigningKey};
use crate::pki::pem;

/// Keys that a directory is never made over.
const PRECIOUS: [&str; 3] = [ROOT_KEY_FILE, KEY_FILE, SIGNER_FILE];

/// What a certificate of a CA is made of.
#[derive(Clone, Debug)]
pub struct NewCa {
    /// The common name in its subject; the default of a root ends in a part of its serial number, so that no two are equal.
    pub common_name: Option<String>,
    pub organization: String,
    pub ttl: Duration,
    pub key_type: KeyType,
}

/// An intermediate that was made.
#[derive(Debug)]
pub struct Made {
    pub intermediate: Certificate,
    /// Whether it expires earlier than requested, because its root does.
    pub is_cut: bool,
    /// Subjects of the roots in its `root-cert.pem`.
    pub roots: Vec<String>,
}

/// Why a root or an intermediate was not made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    #[error(transparent)]
    NotCreated(#[from] NotCreated),
    #[error(
        "the root's file {path} can't be used: {reason}; --root is a directory that `attache ca init` has made"
    )]
    Root { path: PathBuf, reason: String },
    #[error("the root in {path} expired at {at}; make a new one with `attache ca init`")]
    RootExpired { path: PathBuf, at: String },
    #[error(transparent)]
    Roots(#[from] RootsError),
    #[error("the root in {path} can't sign this intermediate: {reason}")]
    Unfit { path: PathBuf, reason: String },
    #[error("making the certificate failed: {0}")]
    Make(#[from] rcgen::Error),
}

/// Makes a root and its key in `directory`, which must be new or empty. With `path_length` it can have no more than that
/// number of intermediates below each other.
pub fn init(
    directory: &Path,
    wish: &NewCa,
    path_length: Option<u8>,
    now: SystemTime,
) -> Result<Certificate, MakeError> {
    let key = SigningKey::generate(wish.key_type)?;
    let constraints = path_length.map_or(BasicConstraints::Unconstrained, BasicConstraints::Constrained);
    let mut params = ca_params(DistinguishedName::new(), [now - DAY, now + wish.ttl], constraints)?;
    let serial: String =
        params.serial_number.iter().flat_map(|serial| serial.to_bytes()).take(4).map(hex).collect();
    let name = wish.common_name.clone().unwrap_or_else(|| format!("Root CA {serial}"));
    params.distinguished_name = subject(&wish.organization, &name, None);
    let root = params.self_signed(&key)?;
    let (text, key) = (pem::of_certificates([root.der()]), key.to_private_key().to_pem());
    let files = [
        NewFile { name: ROOT_FILE, mode: 0o644, content: &text },
        NewFile { name: ROOT_KEY_FILE, mode: 0o600, content: &key },
    ];
    new_directory::create(directory, &files, &PRECIOUS)?;
    parsed(root.der())
}

/// Makes an intermediate for `name`, signed by the root in `root`, and its key in `out`, which must be new or empty. It signs
/// workloads only. Its `root-cert.pem` holds the roots of the files or directories `also`, then the one that signs.
pub fn intermediate(
    root: &Path,
    name: &str,
    out: &Path,
    wish: &NewCa,
    also: &[PathBuf],
    now: SystemTime,
) -> Result<Made, MakeError> {
    let (signer, root_key) = root_in(root)?;
    let facts = parsed(&signer)?;
    let root_file = root.join(ROOT_FILE);
    if facts.not_after <= now {
        return Err(MakeError::RootExpired { path: root_file, at: rfc3339(facts.not_after).to_string() });
    }
    plain_subject(&signer, &facts.subject)
        .map_err(|reason| MakeError::Unfit { path: root_file.clone(), reason })?;
    let mut all = Vec::new();
    for place in also {
        roots::append(&mut all, roots::read(place)?);
    }
    roots::append(&mut all, vec![signer.clone()]);

    let end = now + wish.ttl;
    let common_name = wish.common_name.clone().unwrap_or_else(|| match name.chars().count() {
        ..=40 => format!("{name} intermediate CA"),
        // A common name has at most 64 characters.
        _ => "Intermediate CA".to_owned(),
    });
    let subject = subject(&wish.organization, &common_name, Some(name));
    let validity = [facts.not_before.max(now - DAY), end.min(facts.not_after)];
    let params = ca_params(subject, validity, BasicConstraints::Constrained(0))?;
    let key = SigningKey::generate(wish.key_type)?;
    let made = params.signed_by(&key, &Issuer::from_ca_cert_der(&signer, root_key)?)?;
    let files = Files::new(
        pem::of_certificates(&all),
        pem::of_certificates([made.der()]),
        key.to_private_key().to_pem(),
        pem::of_certificates([made.der(), &signer]),
    );
    files.check(out, now).map_err(|error| match error {
        OpenError::File { reason, .. } => MakeError::Unfit { path: root_file, reason },
        other => MakeError::Unfit { path: root_file, reason: other.to_string() },
    })?;
    new_directory::create(out, &files.to_write(), &PRECIOUS)?;
    let roots = all.iter().map(|root| parsed(root).map(|facts| facts.subject)).collect::<Result<_, _>>()?;
    Ok(Made { intermediate: parsed(made.der())?, is_cut: end > facts.not_after, roots })
}

impl Files {
    /// The files of an intermediate, as they are written.
    fn to_write(&self) -> Vec<NewFile<'_>> {
        let public = |name, content| NewFile { name, mode: 0o644, content };
        let chain = self.chain.as_deref().map(|chain| public(CHAIN_FILE, chain));
        let others = [
            public(SIGNER_FILE, &self.signer),
            NewFile { name: KEY_FILE, mode: 0o600, content: &self.key },
            public(ROOT_FILE, &self.roots),
        ];
        chain.into_iter().chain(others).collect()
    }
}

/// The certificate and the key of the root in `directory`.
fn root_in(directory: &Path) -> Result<(CertificateDer<'static>, SigningKey), MakeError> {
    let bad = |name: &str, reason: String| MakeError::Root { path: directory.join(name), reason };
    let read = |name: &str| {
        let text = file::read(&directory.join(name), limits::FILE_BYTES);
        text.map_err(|error: io::Error| bad(name, error.to_string()))
    };
    let (text, key) = (read(ROOT_FILE)?, read(ROOT_KEY_FILE)?);
    let roots = pem::certificates(&text).map_err(|error| bad(ROOT_FILE, error.to_string()))?;
    let key = PrivateKey::from_pem(&key).map_err(|error| bad(ROOT_KEY_FILE, error.to_string()))?;
    let public = key.public_key().map_err(|error| bad(ROOT_KEY_FILE, error.to_string()))?;
    let is_its_own = |root: &CertificateDer<'_>| {
        Certificate::parse(root).is_ok_and(|facts| facts.public_key == public && facts.is_ca)
    };
    let root = roots.into_iter().find(|root| is_its_own(root));
    let root = root.ok_or_else(|| bad(ROOT_KEY_FILE, format!("it is not the key of a CA in {ROOT_FILE}")))?;
    Ok((root, signing_key(&key).map_err(|reason| bad(ROOT_KEY_FILE, reason))?))
}

fn subject(organization: &str, common_name: &str, locality: Option<&str>) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    if !organization.is_empty() {
        subject.push(DnType::OrganizationName, organization);
    }
    subject.push(DnType::CommonName, common_name);
    if let Some(locality) = locality {
        subject.push(DnType::LocalityName, locality);
    }
    subject
}

fn parsed(der: &CertificateDer<'_>) -> Result<Certificate, MakeError> {
    Certificate::parse(der).map_err(|_| rcgen::Error::CouldNotParseCertificate.into())
}

fn hex(byte: u8) -> String {
    format!("{byte:02x}")
}

#[cfg(test)]
mod tests;
