//! A secret as Envoy's `Secret` message, encoded once and shared by every stream that sends it.

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

/// A hash of a secret's content: equal content has an equal version, also after a restart. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version(Arc<str>);

impl Version {
    /// The version of `content`: the first half of its SHA-256, hexadecimal.
    pub fn of(content: &[u8]) -> Self {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, content);
        let text: String = digest.as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Self(text.into())
    }

    /// The version that a client says it holds. It may be of nothing that ever was here; none where it can't be of
    /// anything.
    pub fn claimed(text: String) -> Option<Self> {
        let is_digest =
            text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_digest.then_some(Self(text.into()))
    }

    /// The text on the wire.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An encoded `Secret` message with its version. Clones share the bytes, which are wiped with the last one.
#[derive(Clone, Debug)]
pub struct Resource {
    /// The version of the bytes.
    pub version: Version,
    /// The message, ready to be put into a response.
    pub any: Any,
}

impl Resource {
    /// Encodes `secret` under `name`.
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
                    // An empty one would count: every peer is refused then.
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
