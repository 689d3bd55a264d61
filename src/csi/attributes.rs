//! What a Pod's author may set for a volume: `volumeAttributes`.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::base::spiffe_id::{ServiceAccount, SpiffeId};
use crate::base::text;
use crate::options::{parse_duration, parse_switch};
use crate::pki::key::KeyType;

/// The attributes of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub trust_domain: Option<String>,
    pub key_type: Option<KeyType>,
    pub cert_ttl: Option<Duration>,
    pub socket_mode: Option<u32>,
    /// True if key and certificates are also files in the volume.
    pub files: bool,
    /// True if the Pod waits for its first certificate.
    pub wait: bool,
}

impl Default for Attributes {
    fn default() -> Self {
        Self {
            trust_domain: None,
            key_type: None,
            cert_ttl: None,
            socket_mode: None,
            files: false,
            wait: true,
        }
    }
}

const NAMES: [&str; 6] = ["cert-ttl", "files", "key-type", "socket-mode", "trust-domain", "wait"];

impl Attributes {
    /// Reads all of them. The error has every mistake.
    pub fn parse<'a>(given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, String> {
        let mut attributes = Self::default();
        let mut mistakes = Vec::new();
        for (name, value) in given {
            if let Err(mistake) = attributes.set(name, value) {
                mistakes.push(text::sanitize_for_log(&format!("attribute {name}: {mistake}")));
            }
        }
        // The kubelet's order changes from call to call.
        mistakes.sort();
        if mistakes.is_empty() { Ok(attributes) } else { Err(text::listed(mistakes, "; ")) }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "trust-domain" => self.trust_domain = Some(parse_trust_domain(value)?),
            "key-type" => self.key_type = Some(value.parse()?),
            "cert-ttl" => self.cert_ttl = Some(parse_ttl(value)?),
            "socket-mode" => self.socket_mode = Some(parse_mode(value)?),
            "files" => self.files = parse_switch(value)?,
            "wait" => self.wait = parse_switch(value)?,
            _ => {
                return Err(match text::closest(name, NAMES) {
                    Some(known) => format!("there is none of this name; did you mean {known}?"),
                    None => format!("there is none of this name; there are {}", NAMES.join(", ")),
                });
            }
        }
        Ok(())
    }

    /// Names and values, as [`Attributes::parse`] reads them.
    pub(super) fn to_map(&self) -> BTreeMap<&'static str, String> {
        let Self { trust_domain, key_type, cert_ttl, socket_mode, files, wait } = self;
        let given = [
            ("trust-domain", trust_domain.clone()),
            ("key-type", key_type.map(|key_type| key_type.name().to_owned())),
            ("cert-ttl", cert_ttl.map(|ttl| humantime::format_duration(ttl).to_string())),
            ("socket-mode", socket_mode.map(|mode| format!("{mode:o}"))),
            ("files", Some(files.to_string())),
            ("wait", Some(wait.to_string())),
        ];
        given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

fn parse_trust_domain(value: &str) -> Result<String, String> {
    let account = ServiceAccount { namespace: "namespace".to_owned(), name: "account".to_owned() };
    match SpiffeId::for_service_account(value, &account) {
        Ok(id) if id.trust_domain() == value => Ok(value.to_owned()),
        _ => Err(format!("{value:?} is not a trust domain; the shape is cluster.local")),
    }
}

fn parse_ttl(value: &str) -> Result<Duration, String> {
    let ttl = parse_duration(value)?;
    if ttl < Duration::from_secs(1) { Err(format!("{value:?} is less than a second")) } else { Ok(ttl) }
}

fn parse_mode(value: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(value, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("{value:?} is not a file mode; the shape is octal, like 0660"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_survive_the_round_trip() {
        let given = [
            ("trust-domain", "prod.example"),
            ("key-type", "rsa-2048"),
            ("cert-ttl", "1h30m"),
            ("socket-mode", "0660"),
            ("files", "true"),
            ("wait", "false"),
        ];
        let attributes = Attributes::parse(given).unwrap();
        assert_eq!(
            attributes,
            Attributes {
                trust_domain: Some("prod.example".to_owned()),
                key_type: Some(KeyType::Rsa2048),
                cert_ttl: Some(Duration::from_secs(5400)),
                socket_mode: Some(0o660),
                files: true,
                wait: false,
            }
        );
        for attributes in [attributes, Attributes::default()] {
            let map = attributes.to_map();
            let again = Attributes::parse(map.iter().map(|(name, value)| (*name, value.as_str())));
            assert_eq!(again.as_ref(), Ok(&attributes));
        }
    }

    #[test]
    fn every_mistake_is_named_and_an_unknown_attribute_is_one() {
        let cases = [
            ("trust-domain", "a/b", "is not a trust domain"),
            ("trust-domain", "", "is not a trust domain"),
            ("key-type", "dsa", "choose one of"),
            ("cert-ttl", "5x", "is not a duration"),
            ("cert-ttl", "10ms", "less than a second"),
            ("socket-mode", "999", "is not a file mode"),
            ("socket-mode", "4666", "is not a file mode"),
            ("files", "yes", "neither true nor false"),
            ("wait", "", "neither true nor false"),
            ("socketmode", "0660", "did you mean socket-mode?"),
            ("x", "1", "there are cert-ttl, files"),
        ];
        for (name, value, words) in cases {
            let error = Attributes::parse([(name, value)]).unwrap_err();
            assert!(error.contains(words) && error.starts_with(&format!("attribute {name}: ")), "{error}");
        }
        let error = Attributes::parse([("wait", "x"), ("files", "y")]).unwrap_err();
        assert!(error.contains("attribute files: ") && error.contains("; attribute wait: "), "{error}");
    }
}
