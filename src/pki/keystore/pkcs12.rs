//! PKCS#12 (RFC 7292) as Java 9 and later and OpenSSL 3 write it: encrypted with AES-256 under PBES2, with a MAC of
//! HMAC-SHA-256. Roots carry Oracle's attribute, without which Java does not take a certificate as trusted.

use aws_lc_rs::cipher::{
    AES_256, AES_256_KEY_LEN, EncryptionContext, PaddedBlockEncryptingKey, UnboundCipherKey,
};
use aws_lc_rs::digest::{self, SHA256, SHA256_OUTPUT_LEN};
use aws_lc_rs::iv::FixedLength;
use aws_lc_rs::{hmac, pbkdf2};
use rustls::pki_types::CertificateDer;
use yasna::models::ObjectIdentifier;
use yasna::{DERWriter, Tag};
use zeroize::Zeroizing;

use super::{Entries, KeystoreError, Password};

type Oid = &'static [u64];

const DATA: Oid = &[1, 2, 840, 113549, 1, 7, 1];
const ENCRYPTED_DATA: Oid = &[1, 2, 840, 113549, 1, 7, 6];
const KEY_BAG: Oid = &[1, 2, 840, 113549, 1, 12, 10, 1, 2];
const CERTIFICATE_BAG: Oid = &[1, 2, 840, 113549, 1, 12, 10, 1, 3];
const X509: Oid = &[1, 2, 840, 113549, 1, 9, 22, 1];
const FRIENDLY_NAME: Oid = &[1, 2, 840, 113549, 1, 9, 20];
const LOCAL_KEY_ID: Oid = &[1, 2, 840, 113549, 1, 9, 21];
/// Oracle's attribute of trusted certificates, and its value for every purpose.
const TRUSTED_KEY_USAGE: Oid = &[2, 16, 840, 1, 113894, 746875, 1, 1];
const ANY_EXTENDED_KEY_USAGE: Oid = &[2, 5, 29, 37, 0];
const PBES2: Oid = &[1, 2, 840, 113549, 1, 5, 13];
const PBKDF2: Oid = &[1, 2, 840, 113549, 1, 5, 12];
const HMAC_WITH_SHA256: Oid = &[1, 2, 840, 113549, 2, 9];
const AES_256_CBC: Oid = &[2, 16, 840, 1, 101, 3, 4, 1, 42];
const SHA_256: Oid = &[2, 16, 840, 1, 101, 3, 4, 2, 1];

/// Java's number.
const ITERATIONS: std::num::NonZeroU32 = std::num::NonZeroU32::new(10_000).unwrap();
const SALT: usize = 20;
const BLOCK: usize = 16;

/// `entries` as a PKCS#12 file. The one password protects the key, the certificates and the whole.
pub fn pkcs12(entries: &Entries<'_>, password: &Password) -> Result<Zeroizing<Vec<u8>>, KeystoreError> {
    let certificates = certificate_bags(entries);
    let certificates = Encrypted::new(&certificates, entries, "PKCS#12 certificates", password)?;
    let key = match &entries.key {
        Some(key) => Some((key, Encrypted::new(key.pkcs8, entries, "PKCS#12 key", password)?)),
        None => None,
    };
    let contents = yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            content_info(writer.next(), ENCRYPTED_DATA, |writer| certificates.write_data(writer));
            if let Some((key, encrypted)) = &key {
                let bags = yasna::construct_der(|writer| {
                    writer.write_sequence(|writer| {
                        let attributes = [friendly_name(key.alias), local_key_id(key.chain)];
                        bag(writer.next(), KEY_BAG, |writer| encrypted.write_key(writer), &attributes);
                    });
                });
                content_info(writer.next(), DATA, |writer| writer.write_bytes(&bags));
            }
        });
    });
    let salt: [u8; SALT] = entries.unique("PKCS#12 MAC");
    let mac = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &*mac_key(password, &salt)), &contents);
    let file = yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_u8(3);
            content_info(writer.next(), DATA, |writer| writer.write_bytes(&contents));
            writer.next().write_sequence(|writer| {
                writer.next().write_sequence(|writer| {
                    algorithm(writer.next(), SHA_256);
                    writer.next().write_bytes(mac.as_ref());
                });
                writer.next().write_bytes(&salt);
                writer.next().write_u32(ITERATIONS.get());
            });
        });
    });
    Ok(Zeroizing::new(file))
}

/// The certificates. The chain comes last: Java finds issuers by their names, and of two of one name takes the last.
fn certificate_bags(entries: &Entries<'_>) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            for (alias, root) in entries.named_roots() {
                certificate_bag(writer.next(), root, &[friendly_name(&alias), trusted()]);
            }
            let Some(key) = &entries.key else { return };
            for (index, certificate) in key.chain.iter().enumerate() {
                let own = [friendly_name(key.alias), local_key_id(key.chain)];
                certificate_bag(writer.next(), certificate, if index == 0 { &own } else { &[] });
            }
        });
    }))
}

fn certificate_bag(writer: DERWriter<'_>, certificate: &CertificateDer<'_>, attributes: &[Attribute]) {
    let content = |writer: DERWriter<'_>| {
        writer.write_sequence(|writer| {
            oid(writer.next(), X509);
            writer.next().write_tagged(Tag::context(0), |writer| writer.write_bytes(certificate));
        });
    };
    bag(writer, CERTIFICATE_BAG, content, attributes);
}

fn bag(writer: DERWriter<'_>, kind: Oid, content: impl FnOnce(DERWriter<'_>), attributes: &[Attribute]) {
    writer.write_sequence(|writer| {
        oid(writer.next(), kind);
        writer.next().write_tagged(Tag::context(0), content);
        if !attributes.is_empty() {
            writer.next().write_set_of(|writer| {
                for (kind, value) in attributes {
                    writer.next().write_sequence(|writer| {
                        oid(writer.next(), kind);
                        writer.next().write_set_of(|writer| writer.next().write_der(value));
                    });
                }
            });
        }
    });
}

/// An attribute of a bag, with its value in DER.
type Attribute = (Oid, Vec<u8>);

fn friendly_name(alias: &str) -> Attribute {
    (FRIENDLY_NAME, yasna::construct_der(|writer| writer.write_bmp_string(alias)))
}

/// What joins a key with its certificate.
fn local_key_id(chain: &[CertificateDer<'_>]) -> Attribute {
    let id = digest::digest(&SHA256, chain.first().map_or(&[], |leaf| leaf));
    (LOCAL_KEY_ID, yasna::construct_der(|writer| writer.write_bytes(id.as_ref())))
}

fn trusted() -> Attribute {
    (TRUSTED_KEY_USAGE, yasna::construct_der(|writer| oid(writer, ANY_EXTENDED_KEY_USAGE)))
}

fn content_info(writer: DERWriter<'_>, kind: Oid, content: impl FnOnce(DERWriter<'_>)) {
    writer.write_sequence(|writer| {
        oid(writer.next(), kind);
        writer.next().write_tagged(Tag::context(0), content);
    });
}

fn oid(writer: DERWriter<'_>, oid: Oid) {
    writer.write_oid(&ObjectIdentifier::from_slice(oid));
}

/// An algorithm without parameters.
fn algorithm(writer: DERWriter<'_>, kind: Oid) {
    writer.write_sequence(|writer| {
        oid(writer.next(), kind);
        writer.next().write_null();
    });
}

/// Bytes encrypted with AES-256-CBC, with a key that PBKDF2 derives from the password.
struct Encrypted {
    salt: [u8; SALT],
    iv: [u8; BLOCK],
    text: Zeroizing<Vec<u8>>,
}

impl Encrypted {
    fn new(
        plain: &[u8],
        entries: &Entries<'_>,
        purpose: &str,
        password: &Password,
    ) -> Result<Self, KeystoreError> {
        let salt = entries.unique(&format!("{purpose}: salt"));
        let iv = entries.unique(&format!("{purpose}: initialization vector"));
        let mut key = Zeroizing::new([0; AES_256_KEY_LEN]);
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, ITERATIONS, &salt, password.as_bytes(), &mut *key);
        let key = PaddedBlockEncryptingKey::cbc_pkcs7(UnboundCipherKey::new(&AES_256, &*key)?)?;
        // With room for the padding: a buffer that grows leaves a copy of the key in memory.
        let mut text = Zeroizing::new(Vec::with_capacity(plain.len() + BLOCK));
        text.extend_from_slice(plain);
        key.less_safe_encrypt(&mut *text, EncryptionContext::Iv128(FixedLength::from(iv)))?;
        Ok(Self { salt, iv, text })
    }

    /// As EncryptedData, with the content implicitly tagged.
    fn write_data(&self, writer: DERWriter<'_>) {
        writer.write_sequence(|writer| {
            writer.next().write_u8(0);
            writer.next().write_sequence(|writer| {
                oid(writer.next(), DATA);
                self.write_algorithm(writer.next());
                writer.next().write_tagged_implicit(Tag::context(0), |writer| writer.write_bytes(&self.text));
            });
        });
    }

    /// As EncryptedPrivateKeyInfo.
    fn write_key(&self, writer: DERWriter<'_>) {
        writer.write_sequence(|writer| {
            self.write_algorithm(writer.next());
            writer.next().write_bytes(&self.text);
        });
    }

    fn write_algorithm(&self, writer: DERWriter<'_>) {
        writer.write_sequence(|writer| {
            oid(writer.next(), PBES2);
            writer.next().write_sequence(|writer| {
                writer.next().write_sequence(|writer| {
                    oid(writer.next(), PBKDF2);
                    writer.next().write_sequence(|writer| {
                        writer.next().write_bytes(&self.salt);
                        writer.next().write_u32(ITERATIONS.get());
                        writer.next().write_u32(AES_256_KEY_LEN as u32);
                        algorithm(writer.next(), HMAC_WITH_SHA256);
                    });
                });
                writer.next().write_sequence(|writer| {
                    oid(writer.next(), AES_256_CBC);
                    writer.next().write_bytes(&self.iv);
                });
            });
        });
    }
}

/// The key of the MAC: RFC 7292, appendix B, where one block of SHA-256 is enough.
fn mac_key(password: &Password, salt: &[u8]) -> Zeroizing<[u8; SHA256_OUTPUT_LEN]> {
    /// The diversifier for a MAC key.
    const MAC: u8 = 3;
    const BLOCK: usize = 64;
    let mut password = password.utf16();
    let mut terminated = Zeroizing::new(Vec::with_capacity(password.len() + 2));
    terminated.append(&mut password);
    terminated.extend_from_slice(&[0, 0]);
    let mut context = digest::Context::new(&SHA256);
    context.update(&[MAC; BLOCK]);
    for part in [salt, terminated.as_slice()] {
        let filled = part.len().next_multiple_of(BLOCK);
        let filled: Zeroizing<Vec<u8>> = Zeroizing::new(part.iter().copied().cycle().take(filled).collect());
        context.update(&filled);
    }
    let mut key = Zeroizing::new([0; SHA256_OUTPUT_LEN]);
    key.copy_from_slice(context.finish().as_ref());
    for _ in 1..ITERATIONS.get() {
        let next = digest::digest(&SHA256, &*key);
        key.copy_from_slice(next.as_ref());
    }
    key
}
