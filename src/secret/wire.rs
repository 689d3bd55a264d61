//! Secrets encoded as Envoy's `Secret` message: once, for all streams that send them.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use zeroize::Zeroizing;

use super::{Secret, SecretName, TrustBundle};
use crate::pki::{crl, pem};
use crate::proto::envoy::config::core::v3::{DataSource, TypedExtensionConfig, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3 as tls;
use crate::proto::google::protobuf::Any;

/// Envoy's name of the validator that knows several trust domains, and the type of its configuration.
const SPIFFE_VALIDATOR: &str = "envoy.tls.cert_validator.spiffe";
const SPIFFE_VALIDATOR_TYPE_URL: &str =
    "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.SPIFFECertValidatorConfig";

/// A hash of a secret's content: equal content has an equal version, even after a restart.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version([u8; Self::LENGTH]);

impl Version {
    const LENGTH: usize = 16;

    /// The first half of the SHA-256 of `content`.
    pub fn of(content: &[u8]) -> Self {
        Self::of_parts(&[content])
    }

    /// The version of the content that `parts` make up together.
    pub fn of_parts(parts: &[&[u8]]) -> Self {
        let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
        for part in parts {
            context.update(part);
        }
        let digest = context.finish();
        let mut half = [0; Self::LENGTH];
        half.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
        Self(half)
    }

    /// The version that a client says it holds. It may never have existed here; `None` if the text is not a version at all.
    pub fn claimed(text: &str) -> Option<Self> {
        let is_digest = text.len() == 2 * Self::LENGTH
            && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_digest)?;
        Some(Self::from_number(number))
    }

    /// The version as a number, to make one version of several.
    pub fn number(&self) -> u128 {
        u128::from_be_bytes(self.0)
    }

    pub fn from_number(number: u128) -> Self {
        Self(number.to_be_bytes())
    }
}

/// Hexadecimal.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.number())
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The content of a `Secret` message, encoded: all of the message but the name, so that names of the same content can share
/// it. Clones share the bytes, which are wiped when the last clone is dropped.
#[derive(Clone)]
pub struct Payload(Bytes);

impl Payload {
    /// The payload of `secret` and its clones, encoded once.
    pub fn of(secret: &Secret) -> Self {
        match secret {
            Secret::KeyPair(pair) => pair.payload(|| Self::encode(secret)),
            Secret::TrustBundle(bundle) => bundle.payload(|| Self::encode(secret)),
        }
    }

    /// A payload with which Envoy checks each peer against the roots of the peer's own trust domain, which are those of the
    /// bundle beside its name in `domains`. Peers of other trust domains are refused.
    pub fn of_validator<'a>(domains: impl IntoIterator<Item = (&'a str, &'a TrustBundle)>) -> Self {
        let domain = |(name, bundle): (&str, &TrustBundle)| {
            let mut pem = pem::of_certificates(bundle.roots());
            // This validator does not read the context's own CRLs, but those that stand among the roots of a trust domain.
            pem.extend(crl::to_pem(bundle.crls().iter().map(AsRef::as_ref)));
            tls::spiffe_cert_validator_config::TrustDomain {
                name: name.to_owned(),
                trust_bundle: inline(pem.into()),
            }
        };
        let trust_domains = domains.into_iter().map(domain).collect();
        let config = tls::SpiffeCertValidatorConfig { trust_domains };
        let config =
            Any { type_url: SPIFFE_VALIDATOR_TYPE_URL.to_owned(), value: config.encode_to_vec().into() };
        Self::of_content(tls::secret::Type::ValidationContext(tls::CertificateValidationContext {
            trusted_ca: None,
            crl: None,
            custom_validator_config: Some(TypedExtensionConfig {
                name: SPIFFE_VALIDATOR.to_owned(),
                typed_config: Some(config),
            }),
        }))
    }

    fn encode(secret: &Secret) -> Self {
        let content = match secret {
            Secret::KeyPair(pair) => tls::secret::Type::TlsCertificate(tls::TlsCertificate {
                certificate_chain: inline(pem::of_certificates(pair.chain()).into()),
                private_key: inline(Bytes::from_owner(pair.key().to_pem())),
                ocsp_staple: pair.staple().and_then(|staple| inline(staple.der().to_vec().into())),
            }),
            Secret::TrustBundle(bundle) => {
                tls::secret::Type::ValidationContext(tls::CertificateValidationContext {
                    trusted_ca: inline(pem::of_certificates(bundle.roots()).into()),
                    // With an empty CRL list, Envoy would reject every peer.
                    crl: match bundle.crls() {
                        [] => None,
                        crls => inline(crl::to_pem(crls.iter().map(AsRef::as_ref)).into()),
                    },
                    custom_validator_config: None,
                })
            }
        };
        Self::of_content(content)
    }

    fn of_content(content: tls::secret::Type) -> Self {
        let message = tls::Secret { name: String::new(), r#type: Some(content) };
        Self(Bytes::from_owner(Zeroizing::new(message.encode_to_vec())))
    }

    /// The payload that was encoded as `bytes`.
    pub fn from_bytes(bytes: Bytes) -> Self {
        Self(bytes)
    }

    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

fn inline(pem: Bytes) -> Option<DataSource> {
    Some(DataSource { specifier: Some(Specifier::InlineBytes(pem)) })
}

/// The bytes can hold a private key.
impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Payload({} bytes)", self.0.len())
    }
}

/// What streams send for a name. Clones share it.
#[derive(Clone, Debug)]
pub struct Resource(Arc<Encoded>);

/// The content of a [`Resource`].
#[derive(Debug)]
pub struct Encoded {
    /// Of the whole message, name included.
    pub version: Version,
    pub payload: Payload,
}

impl Resource {
    pub fn encode(name: &SecretName, secret: &Secret) -> Self {
        Self::of(name.as_str(), Payload::of(secret))
    }

    /// The resource that serves `payload` as `name`.
    pub fn of(name: &str, payload: Payload) -> Self {
        let named = tls::Secret { name: name.to_owned(), r#type: None }.encode_to_vec();
        Self::new(Version::of_parts(&[&named, payload.bytes()]), payload)
    }

    pub fn new(version: Version, payload: Payload) -> Self {
        Self(Arc::new(Encoded { version, payload }))
    }
}

impl Deref for Resource {
    type Target = Encoded;

    fn deref(&self) -> &Encoded {
        &self.0
    }
}
