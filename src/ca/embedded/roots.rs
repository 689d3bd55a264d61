//! The roots in a CA's directory: one is announced before it signs, and dropped when no certificate of it is left.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use super::directory::{ROOT_FILE, SIGNER_FILE};
use super::{Files, OpenError};
use crate::base::clock::rfc3339;
use crate::base::limits;
use crate::fs::file;
use crate::fs::replace::{self, NotReplaced};
use crate::pki::certificate::{Certificate, is_self_issued};
use crate::pki::pem;

/// Why the roots of a directory were not changed.
#[derive(Debug, thiserror::Error)]
pub enum RootsError {
    #[error(
        "the roots in {path} can't be used: {reason}; name a PEM file of root certificates, or a directory that has {ROOT_FILE}"
    )]
    Unusable { path: PathBuf, reason: String },
    #[error("the root {subject} in {path} expired at {at}; make a new one with `attache ca init`")]
    Expired { path: PathBuf, subject: String, at: String },
    #[error(
        "{subject} is the root of {SIGNER_FILE} in {directory}, which signs now; first replace the directory by one that `attache ca intermediate` has made with another root"
    )]
    Signs { subject: String, directory: PathBuf },
    #[error(transparent)]
    Directory(#[from] OpenError),
    #[error("{0}run the command again")]
    NotReplaced(#[from] NotReplaced),
}

/// The roots in the file `place`, or in the file of that name in the directory `place`.
pub fn read(place: &Path) -> Result<Vec<CertificateDer<'static>>, RootsError> {
    let path = if place.is_dir() { place.join(ROOT_FILE) } else { place.to_owned() };
    let unusable = |reason: String| RootsError::Unusable { path: path.clone(), reason };
    let text = file::read(&path, limits::FILE_BYTES).map_err(|error| unusable(error.to_string()))?;
    let found = pem::certificates(&text).map_err(|error| unusable(error.to_string()))?;
    for certificate in &found {
        let facts = Certificate::parse(certificate).map_err(|error| unusable(error.to_string()))?;
        let is_root = is_self_issued(certificate).map_err(|error| unusable(error.to_string()))?;
        if !is_root || !facts.is_ca {
            return Err(unusable(format!("{} is not the certificate of a root", facts.subject)));
        }
    }
    Ok(found)
}

/// Appends those of `new` that `roots` does not have.
pub(super) fn append(roots: &mut Vec<CertificateDer<'static>>, new: Vec<CertificateDer<'static>>) {
    for root in new {
        if !roots.contains(&root) {
            roots.push(root);
        }
    }
}

/// Appends the roots of `place` to those of the CA in `directory`, behind the others and without a change to them, as istiod
/// wants it. Returns the subjects of those that were not there.
pub fn announce(directory: &Path, place: &Path, now: SystemTime) -> Result<Vec<String>, RootsError> {
    let _guard = lock(directory)?;
    let files = Files::read(directory)?;
    let authority = files.check(directory, now)?;
    let mut new = read(place)?;
    new.retain(|root| !authority.roots.contains(root));
    let mut text = files.roots.to_vec();
    let mut subjects = Vec::new();
    for root in &new {
        let facts = facts(root, place)?;
        if facts.not_after <= now {
            let (path, subject) = (place.to_owned(), facts.subject);
            return Err(RootsError::Expired { path, subject, at: rfc3339(facts.not_after).to_string() });
        }
        subjects.push(facts.subject);
    }
    if !new.is_empty() {
        if !text.ends_with(b"\n") {
            text.push(b'\n');
        }
        text.extend(pem::of_certificates(&new));
        replace::replace_public(&directory.join(ROOT_FILE), &text)?;
    }
    Ok(subjects)
}

/// Removes the roots of `place` from those of the CA in `directory`. Returns the subjects of those that were there.
pub fn withdraw(directory: &Path, place: &Path, now: SystemTime) -> Result<Vec<String>, RootsError> {
    let _guard = lock(directory)?;
    let authority = Files::read(directory)?.check(directory, now)?;
    let old = read(place)?;
    if old.contains(&authority.root) {
        let subject = facts(&authority.root, directory)?.subject;
        return Err(RootsError::Signs { subject, directory: directory.to_owned() });
    }
    let (dropped, kept): (Vec<_>, Vec<_>) = authority.roots.into_iter().partition(|root| old.contains(root));
    if !dropped.is_empty() {
        replace::replace_public(&directory.join(ROOT_FILE), &pem::of_certificates(&kept))?;
    }
    dropped.iter().map(|root| facts(root, place).map(|facts| facts.subject)).collect()
}

/// Against other commands, each of which would lose what the other has written.
fn lock(directory: &Path) -> Result<File, OpenError> {
    let unusable = |source| OpenError::Directory { directory: directory.to_owned(), source };
    file::lock_directory(directory).map_err(unusable)
}

fn facts(root: &CertificateDer<'_>, place: &Path) -> Result<Certificate, RootsError> {
    Certificate::parse(root).map_err(|error| {
        let (path, reason) = (place.to_owned(), error.to_string());
        RootsError::Unusable { path, reason }
    })
}
