//! Secrets encoded as Envoy's `Secret` message: once, for all streams that send them.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use zeroize::Zeroizing;

use super::{Secret, SecretName};
use crate::pki::{crl, pem};
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::{DataSource, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3 as tls;
use crate::proto::google::protobuf::Any;

/// A hash of a secret's content: equal content has an equal version, even after a restart. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version(Arc<str>);

impl Version {
    /// The first half of the SHA-256 of `content`, hexadecimal.
    pub fn of(content: &[u8]) -> Self {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, content);
        let text: String = digest.as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Self(text.into())
    }

    /// The version that a client says it holds. It may never have existed here; `None` if the text is not a version at all.
    pub fn claimed(text: String) -> Option<Self> {
        let is_digest =
            text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_digest.then_some(Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An encoded `Secret` message with its version. Clones share the bytes, which are wiped when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Resource {
    pub version: Version,
    pub any: Any,
}

impl Resource {
    pub fn encode(name: &SecretName, secret: &Secret) -> Self {
        let inline = |pem: Bytes| Some(DataSource { specifier: Some(Specifier::InlineBytes(pem)) });
        let content = match secret {
            Secret::KeyPair(pair) => tls::secret::Type::TlsCertificate(tls::TlsCertificate {
                certificate_chain: inline(pem::of_certificates(pair.chain()).into()),
                private_key: inline(Bytes::from_owner(pair.key().to_pem())),
            }),
            Secret::TrustBundle(bundle) => {
                tls::secret::Type::ValidationContext(tls::CertificateValidationContext {
                    trusted_ca: inline(pem::of_certificates(bundle.roots()).into()),
                    // With an empty CRL list, Envoy would reject every peer.
                    crl: match bundle.crls() {
                        [] => None,
                        crls => inline(crl::to_pem(crls.iter().map(AsRef::as_ref)).into()),
                    },
                })
            }
        };
        let message = tls::Secret { name: name.as_str().to_owned(), r#type: Some(content) };
        let bytes = Zeroizing::new(message.encode_to_vec());
        let version = Version::of(&bytes);
        let value = Bytes::from_owner(bytes);
        Self { version, any: Any { type_url: SECRET_TYPE_URL.to_owned(), value } }
    }
}
