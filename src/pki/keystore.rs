//! Keystores for Java and other readers of PKCS#12: a key with its chain, and trusted roots.
//!
//! A keystore is a function of its entries and its password: equal entries yield equal bytes, so that a restart of the agent
//! replaces no file that is up to date.

mod jks;
mod pkcs12;

use std::time::SystemTime;

use aws_lc_rs::digest;
use aws_lc_rs::error::Unspecified;
use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

pub use self::jks::jks;
pub use self::pkcs12::pkcs12;

/// What Java's tools and servers take where no password is configured.
pub const DEFAULT_PASSWORD: &str = "changeit";
/// Characters of a password.
const PASSWORD_LENGTH: usize = 1024;

/// Why a keystore can't be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeystoreError {
    #[error("the private key has no PKCS#8 form: RSA, ECDSA P-256, P-384, P-521 and Ed25519 keys have one")]
    Key,
    #[error("an entry is longer than the format allows")]
    TooLong,
    #[error("encryption failed")]
    Encryption(#[from] Unspecified),
}

/// The content of a keystore.
#[derive(Clone, Copy, Debug)]
pub struct Entries<'a> {
    /// None in a truststore.
    pub key: Option<KeyEntry<'a>>,
    pub roots: &'a [CertificateDer<'static>],
    /// The time that Java shows for each entry.
    pub created: SystemTime,
}

/// A private key with its chain.
#[derive(Clone, Copy)]
pub struct KeyEntry<'a> {
    pub alias: &'a str,
    pub pkcs8: &'a [u8],
    /// Leaf first.
    pub chain: &'a [CertificateDer<'static>],
}

impl std::fmt::Debug for KeyEntry<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyEntry").field("alias", &self.alias).finish_non_exhaustive()
    }
}

impl Entries<'_> {
    /// Bytes that differ for each `purpose` and for each content, and reveal nothing of the key: salts and initialization
    /// vectors.
    fn unique<const N: usize>(&self, purpose: &str) -> [u8; N] {
        let mut context = digest::Context::new(&digest::SHA256);
        let mut part = |bytes: &[u8]| {
            context.update(&(bytes.len() as u64).to_be_bytes());
            context.update(bytes);
        };
        part(purpose.as_bytes());
        if let Some(key) = &self.key {
            part(key.alias.as_bytes());
            part(key.pkcs8);
            key.chain.iter().for_each(|certificate| part(certificate));
        }
        self.roots.iter().for_each(|root| part(root));
        let digest = context.finish();
        let mut bytes = [0; N];
        bytes.iter_mut().zip(digest.as_ref()).for_each(|(byte, from)| *byte = *from);
        bytes
    }

    /// The roots with their names in the keystore.
    fn named_roots(&self) -> impl Iterator<Item = (String, &CertificateDer<'static>)> {
        self.roots.iter().enumerate().map(|(index, root)| (format!("root-{}", index + 1), root))
    }
}

/// A password that Java and OpenSSL understand alike, wiped when dropped.
pub struct Password(Zeroizing<String>);

/// Why a text is not a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAPassword {
    #[error("it holds no password on its first line")]
    Empty,
    #[error("its password is longer than {PASSWORD_LENGTH} characters")]
    TooLong,
    #[error("its password has characters that are not printable ASCII, which Java does not take")]
    Unprintable,
    #[error("it has more than one line")]
    SeveralLines,
}

impl Password {
    /// The password in a file: its only line.
    pub fn from_file(content: &[u8]) -> Result<Self, NotAPassword> {
        let line = content.strip_suffix(b"\n").unwrap_or(content);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return Err(NotAPassword::Empty);
        }
        if line.contains(&b'\n') {
            return Err(NotAPassword::SeveralLines);
        }
        if line.len() > PASSWORD_LENGTH {
            return Err(NotAPassword::TooLong);
        }
        match std::str::from_utf8(line) {
            Ok(text) if line.iter().all(|byte| matches!(byte, b' '..=b'~')) => {
                Ok(Self(Zeroizing::new(text.to_owned())))
            }
            _ => Err(NotAPassword::Unprintable),
        }
    }

    fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// As UTF-16, big-endian.
    fn utf16(&self) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(self.as_bytes().iter().flat_map(|byte| [0, *byte]).collect())
    }
}

impl Default for Password {
    fn default() -> Self {
        Self(Zeroizing::new(DEFAULT_PASSWORD.to_owned()))
    }
}

impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Password(hidden)")
    }
}

#[cfg(test)]
mod tests;
