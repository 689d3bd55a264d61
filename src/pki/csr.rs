//! Certificate signing requests.

use std::fmt;
use std::str::FromStr;

use rcgen::{CertificateParams, DistinguishedName, DnType, SanType};
use rustls::pki_types;

use super::certificate::Certificate;
use super::key::SigningKey;
use super::pem;
use crate::base::spiffe_id::SpiffeId;

/// Names of a certificate besides its identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub dns: Vec<DnsName>,
    pub common_name: Option<CommonName>,
}

/// A DNS name in lower case; its first label may be a `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsName(String);

/// The common name of a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommonName(String);

impl FromStr for DnsName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = text.to_ascii_lowercase();
        let bare = name.strip_prefix("*.").unwrap_or(&name);
        if bare.ends_with('.') || pki_types::DnsName::try_from(bare).is_err() {
            return Err(format!("{text:?} is not a DNS name; the shape is web.example.com or *.example.com"));
        }
        Ok(Self(name))
    }
}

impl FromStr for CommonName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        /// X.509's bound (`ub-common-name`).
        const LONGEST: usize = 64;
        if text.trim().is_empty() || text.chars().any(char::is_control) || text.chars().count() > LONGEST {
            return Err(format!("{text:?} is not a common name: it has 1 to {LONGEST} printable characters"));
        }
        Ok(Self(text.to_owned()))
    }
}

impl DnsName {
    /// Whether the first label is a `*`.
    pub fn is_wildcard(&self) -> bool {
        self.0.starts_with('*')
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for CommonName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Names {
    pub fn is_empty(&self) -> bool {
        self.dns.is_empty() && self.common_name.is_none()
    }

    /// The DNS names, separated by commas.
    pub fn dns_list(&self) -> String {
        self.dns.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }

    /// Those that `certificate` does not have.
    pub fn missing(&self, certificate: &Certificate) -> Vec<String> {
        let has = |name: &DnsName| certificate.dns_names.iter().any(|own| own.eq_ignore_ascii_case(&name.0));
        let dns = self.dns.iter().filter(|name| !has(name)).map(ToString::to_string);
        let common_name =
            self.common_name.as_ref().filter(|name| !certificate.common_names.contains(&name.0));
        dns.chain(common_name.map(|name| format!("the common name {name}"))).collect()
    }

    /// Puts them into `params`: the common name as the only part of the subject, DNS names after the names that are there.
    pub fn put_into(&self, params: &mut CertificateParams) -> Result<(), rcgen::Error> {
        params.distinguished_name = DistinguishedName::new();
        if let Some(CommonName(name)) = &self.common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        for DnsName(name) in &self.dns {
            params.subject_alt_names.push(SanType::DnsName(name.as_str().try_into()?));
        }
        Ok(())
    }
}

/// A CSR for `key`, DER. `identity` is its only subject alternative name, critical, with an empty subject, as the
/// X.509-SVID standard requires, unless there are `names`; without an identity and names the CA decides.
pub fn request(
    key: &SigningKey,
    identity: Option<&SpiffeId>,
    names: &Names,
) -> Result<Vec<u8>, rcgen::Error> {
    let mut params = CertificateParams::default();
    if let Some(identity) = identity {
        params.subject_alt_names = vec![SanType::URI(identity.as_str().try_into()?)];
    }
    names.put_into(&mut params)?;
    Ok(params.serialize_request(key)?.der().to_vec())
}

/// A DER CSR as PEM.
pub fn to_pem(der: &[u8]) -> String {
    // Base64 and ASCII labels are always UTF-8.
    String::from_utf8_lossy(&pem::encode("CERTIFICATE REQUEST", der)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::key::KeyType;

    fn names(dns: &[&str], common_name: Option<&str>) -> Names {
        let dns = dns.iter().map(|name| name.parse().unwrap()).collect();
        Names { dns, common_name: common_name.map(|name| name.parse().unwrap()) }
    }

    #[test]
    fn names_are_judged_before_a_ca_sees_them() {
        for (text, name) in [
            ("Web.Example", "web.example"),
            ("*.example.com", "*.example.com"),
            ("web", "web"),
            ("a_b", "a_b"),
        ] {
            assert_eq!(text.parse::<DnsName>().map(|name| name.to_string()), Ok(name.to_owned()));
        }
        let long = "x".repeat(64);
        for text in ["", "*", "*.", "a.*.b", "web.", "10.0.0.1", "a b", "spiffe://a/b", "a..b", "-a", &long] {
            let error = text.parse::<DnsName>().unwrap_err();
            assert!(error.contains("is not a DNS name; the shape is web.example.com"), "{text:?}: {error}");
        }
        assert_eq!("Web Server".parse::<CommonName>().unwrap().to_string(), "Web Server");
        for text in ["", " ", "a\nb", &"x".repeat(65)] {
            assert!(text.parse::<CommonName>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_csr_has_the_names_and_a_certificate_lacks_those_that_it_has_not() {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let identity = "spiffe://a/b".parse().unwrap();
        let asked = names(&["web.example", "*.web.example"], Some("Web"));
        let csr = request(&key, Some(&identity), &asked).unwrap();
        let params = rcgen::CertificateSigningRequestParams::from_der(&csr.as_slice().into()).unwrap().params;
        let certificate = Certificate::parse(params.self_signed(&key).unwrap().der()).unwrap();
        assert_eq!(
            (certificate.uris.len(), &certificate.dns_names[..]),
            (1, &["web.example".to_owned(), "*.web.example".to_owned()][..])
        );
        assert_eq!(asked.missing(&certificate), [""; 0]);
        let more = names(&["WEB.example", "db.example"], Some("web"));
        assert_eq!(more.missing(&certificate), ["db.example", "the common name web"]);
        // Names that were not asked for are the CA's decision.
        assert_eq!(Names::default().missing(&certificate), [""; 0]);
    }
}
