//! Certificate signing requests.

use rcgen::{CertificateParams, DistinguishedName, SanType};

use super::key::SigningKey;
use super::pem;
use crate::base::spiffe_id::SpiffeId;

/// A CSR for `key`, DER. `identity` is its only subject alternative name, critical, with an empty subject, as the
/// X.509-SVID standard requires; without an identity it has no names and the CA decides.
pub fn request(key: &SigningKey, identity: Option<&SpiffeId>) -> Result<Vec<u8>, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    if let Some(identity) = identity {
        params.subject_alt_names = vec![SanType::URI(identity.as_str().try_into()?)];
    }
    Ok(params.serialize_request(key)?.der().to_vec())
}

/// A DER CSR as PEM.
pub fn to_pem(der: &[u8]) -> String {
    // Base64 and ASCII labels are always UTF-8.
    String::from_utf8_lossy(&pem::encode("CERTIFICATE REQUEST", der)).into_owned()
}
