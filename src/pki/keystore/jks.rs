//! JKS, the format of Java before version 9, for programs that read nothing else. Its protection is weak (a key stream of
//! SHA-1): the file's mode is what protects the key.

use std::time::UNIX_EPOCH;

use aws_lc_rs::digest::{self, SHA1_FOR_LEGACY_USE_ONLY, SHA1_OUTPUT_LEN};
use rustls::pki_types::CertificateDer;
use yasna::models::ObjectIdentifier;
use zeroize::Zeroizing;

use super::{Entries, KeystoreError, Password};

const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
const KEY: u32 = 1;
const TRUSTED: u32 = 2;
/// Sun's algorithm that protects the key.
const KEY_PROTECTOR: &[u64] = &[1, 3, 6, 1, 4, 1, 42, 2, 17, 1, 1];
/// What Java's developers put before the content that is hashed.
const WHITENER: &[u8] = b"Mighty Aphrodite";

/// `entries` as a JKS file. The one password protects the key and the whole.
pub fn jks(entries: &Entries<'_>, password: &Password) -> Result<Zeroizing<Vec<u8>>, KeystoreError> {
    let password = password.utf16();
    let mut file = Writer(Vec::new());
    file.u32(MAGIC);
    file.u32(VERSION);
    file.u32(length(entries.roots.len() + usize::from(entries.key.is_some()))?);
    let since_epoch = entries.created.duration_since(UNIX_EPOCH).unwrap_or_default();
    let created = u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX);
    if let Some(key) = &entries.key {
        file.u32(KEY);
        file.text(key.alias)?;
        file.u64(created);
        let salt = entries.unique("JKS key");
        file.block(&protected(key.pkcs8, salt, &password))?;
        file.u32(length(key.chain.len())?);
        for certificate in key.chain {
            file.certificate(certificate)?;
        }
    }
    for (alias, root) in entries.named_roots() {
        file.u32(TRUSTED);
        file.text(&alias)?;
        file.u64(created);
        file.certificate(root)?;
    }
    let digest = sha1(&[&password, WHITENER, &file.0]);
    file.0.extend_from_slice(&digest);
    Ok(Zeroizing::new(file.0))
}

/// The key as an EncryptedPrivateKeyInfo: a salt, the key xor a stream, and a check value.
fn protected(pkcs8: &[u8], salt: [u8; SHA1_OUTPUT_LEN], password: &[u8]) -> Vec<u8> {
    let mut content = salt.to_vec();
    let mut block = salt;
    for part in pkcs8.chunks(SHA1_OUTPUT_LEN) {
        block = sha1(&[password, &block]);
        content.extend(part.iter().zip(block).map(|(byte, stream)| byte ^ stream));
    }
    content.extend_from_slice(&sha1(&[password, pkcs8]));
    yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_sequence(|writer| {
                writer.next().write_oid(&ObjectIdentifier::from_slice(KEY_PROTECTOR));
                writer.next().write_null();
            });
            writer.next().write_bytes(&content);
        });
    })
}

fn sha1(parts: &[&[u8]]) -> [u8; SHA1_OUTPUT_LEN] {
    let mut context = digest::Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    parts.iter().for_each(|part| context.update(part));
    let mut bytes = [0; SHA1_OUTPUT_LEN];
    bytes.copy_from_slice(context.finish().as_ref());
    bytes
}

fn length(length: usize) -> Result<u32, KeystoreError> {
    u32::try_from(length).map_err(|_| KeystoreError::TooLong)
}

/// Writes as Java's `DataOutputStream` does.
struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, number: u32) {
        self.0.extend_from_slice(&number.to_be_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_be_bytes());
    }

    /// ASCII, for which Java's own form of UTF-8 is the common one.
    fn text(&mut self, text: &str) -> Result<(), KeystoreError> {
        let length = u16::try_from(text.len()).map_err(|_| KeystoreError::TooLong)?;
        self.0.extend_from_slice(&length.to_be_bytes());
        self.0.extend_from_slice(text.as_bytes());
        Ok(())
    }

    fn block(&mut self, bytes: &[u8]) -> Result<(), KeystoreError> {
        self.u32(length(bytes.len())?);
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn certificate(&mut self, certificate: &CertificateDer<'_>) -> Result<(), KeystoreError> {
        self.text("X.509")?;
        self.block(certificate)
    }
}
