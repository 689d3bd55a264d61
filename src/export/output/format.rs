//! The formats, and the files of a set in each.

use std::path::PathBuf;

use zeroize::Zeroizing;

use super::Set;
use super::directory::{Layout, OutputFile, Owner};
use crate::fs::generation::{CHAIN_FILE, KEY_FILE, ROOT_FILE};
use crate::pki::keystore::{self, Entries, KeyEntry, KeystoreError, Password};
use crate::pki::pem;
use crate::secret::Secret;

/// One directory: where it is, what is written there, and for which user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectorySettings {
    /// The option that names it.
    pub option: &'static str,
    /// Created if it does not exist.
    pub directory: PathBuf,
    pub format: Format,
    /// Permissions of the files with the key.
    pub key_mode: u32,
    /// Permissions of the others.
    pub cert_mode: u32,
    pub owner: Owner,
}

/// What is written, with the names of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// A file each for the chain, the key and the roots.
    Pem { chain: String, key: String, roots: String },
    /// The chain and its key in one file, and the roots in another.
    Combined { file: String, roots: String },
    /// A keystore with key, chain and roots, and one with the roots alone.
    Keystore(Keystore),
}

impl Default for Format {
    fn default() -> Self {
        let [chain, key, roots] = [CHAIN_FILE, KEY_FILE, ROOT_FILE].map(str::to_owned);
        Self::Pem { chain, key, roots }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keystore {
    pub kind: KeystoreKind,
    pub file: String,
    pub roots: String,
    /// The name of the key.
    pub alias: String,
    /// None for the default password.
    pub password_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeystoreKind {
    Pkcs12,
    Jks,
}

impl Format {
    /// The names of its files.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Pem { chain, key, roots } => vec![chain.clone(), key.clone(), roots.clone()],
            Self::Combined { file, roots } | Self::Keystore(Keystore { file, roots, .. }) => {
                vec![file.clone(), roots.clone()]
            }
        }
    }

    pub fn password_file(&self) -> Option<&PathBuf> {
        match self {
            Self::Keystore(keystore) => keystore.password_file.as_ref(),
            Self::Pem { .. } | Self::Combined { .. } => None,
        }
    }
}

impl DirectorySettings {
    pub(super) fn layout(&self) -> Layout {
        let Self { option, directory, format, owner, .. } = self;
        Layout { option, path: directory.clone(), names: format.names(), owner: *owner }
    }

    /// The files of `set`. Takes some milliseconds of CPU for a keystore.
    pub(super) fn files(&self, set: &Set, password: &Password) -> Result<Vec<OutputFile>, KeystoreError> {
        let (Secret::KeyPair(pair), Secret::TrustBundle(bundle)) = (&set.pair.secret, &set.roots.secret)
        else {
            return Ok(Vec::new());
        };
        let secret = |name: &str, content| OutputFile { name: name.to_owned(), mode: self.key_mode, content };
        let public =
            |name: &str, content| OutputFile { name: name.to_owned(), mode: self.cert_mode, content };
        let chain_text = || Zeroizing::new(pem::of_certificates(pair.chain()));
        let roots_text = || Zeroizing::new(pem::of_certificates(bundle.roots()));
        Ok(match &self.format {
            Format::Pem { chain, key, roots } => vec![
                secret(key, pair.key().to_pem()),
                public(chain, chain_text()),
                public(roots, roots_text()),
            ],
            Format::Combined { file, roots } => {
                let (chain, key) = (chain_text(), pair.key().to_pem());
                let mut both = Zeroizing::new(Vec::with_capacity(chain.len() + key.len()));
                both.extend_from_slice(&chain);
                both.extend_from_slice(&key);
                vec![secret(file, both), public(roots, roots_text())]
            }
            Format::Keystore(Keystore { kind, file, roots, alias, .. }) => {
                let write = match kind {
                    KeystoreKind::Pkcs12 => keystore::pkcs12,
                    KeystoreKind::Jks => keystore::jks,
                };
                let pkcs8 = pair.key().to_pkcs8().ok_or(KeystoreError::Key)?;
                let key = KeyEntry { alias, pkcs8: &pkcs8, chain: pair.chain() };
                let created = pair.leaf().not_before;
                let trusted = Entries { key: None, roots: bundle.roots(), created };
                let whole = Entries { key: Some(key), ..trusted };
                vec![secret(file, write(&whole, password)?), public(roots, write(&trusted, password)?)]
            }
        })
    }
}
