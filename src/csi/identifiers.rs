//! What drivers, volumes and Pods are named by. All of it is checked: it becomes file names, and identities.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::base::limits::VOLUME_ID_TEXT;
use crate::base::text;

/// The name of a driver, as `CSIDriver` objects and Pods have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverName(String);

impl DriverName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DriverName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DriverName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if is_subdomain(text) && text.len() <= 63 {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "{:?} is not a driver's name: it is a DNS name of at most 63 characters, like csi.attache.dev",
            text::sanitize_for_log(text)
        ))
    }
}

/// Identifies a volume: `csi-` and a hash of the Pod and the volume's name. Usable as a file name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId(Arc<str>);

impl VolumeId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for VolumeId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let begins_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if begins_well && text.len() <= VOLUME_ID_TEXT && text.bytes().all(is_known) {
            return Ok(Self(text.into()));
        }
        Err(format!(
            "volume_id {:?} is not one of the kubelet's: it has letters, digits, '-', '_' and '.', {VOLUME_ID_TEXT} at most",
            text::sanitize_for_log(text)
        ))
    }
}

/// The Pod of a volume, as the kubelet describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub service_account: String,
}

impl Pod {
    /// Checks what `value_of` has under each of the kubelet's names.
    pub(super) fn new<'a>(value_of: impl Fn(&'static str) -> Option<&'a str>) -> Result<Self, String> {
        let checked = |name: &'static str, is_valid: fn(&str) -> bool| {
            let value = value_of(name).ok_or_else(|| format!("{name} is missing"))?;
            let shown = || format!("{name} {:?} is not one of Kubernetes'", text::sanitize_for_log(value));
            if is_valid(value) { Ok(value.to_owned()) } else { Err(shown()) }
        };
        Ok(Self {
            namespace: checked("pod.namespace", is_subdomain)?,
            name: checked("pod.name", is_subdomain)?,
            uid: checked("pod.uid", is_uid)?,
            service_account: checked("serviceAccount.name", is_subdomain)?,
        })
    }
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pod {}/{}", self.namespace, self.name)
    }
}

/// Whether Kubernetes could name an object so.
fn is_subdomain(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_label = |label: &str| {
        let ends = [label.bytes().next(), label.bytes().next_back()];
        ends.into_iter().all(|end| end.is_some_and(is_letter))
            && label.bytes().all(|byte| is_letter(byte) || byte == b'-')
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

fn is_uid(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_id_is_a_file_name_and_nothing_else() {
        let hash = format!("csi-{}", "0a".repeat(32));
        for text in [hash.as_str(), "csi-1", "sanity.node_1"] {
            assert_eq!(text.parse::<VolumeId>().unwrap().as_str(), text);
        }
        let long = "a".repeat(VOLUME_ID_TEXT + 1);
        for text in ["", ".", "..", ".hidden", "a/b", "../a", "a\0", "a b", "ä", "-a", &long] {
            assert!(text.parse::<VolumeId>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_drivers_name_is_a_dns_name_of_63_characters() {
        for text in ["csi.attache.dev", "a", "1.2-3"] {
            assert_eq!(text.parse::<DriverName>().unwrap().as_str(), text);
        }
        for text in ["", "CSI.attache.dev", "a..b", ".a", "a-", "a/b", "a_b", &"a".repeat(64)] {
            assert!(text.parse::<DriverName>().unwrap_err().contains("csi.attache.dev"), "{text}");
        }
    }

    #[test]
    fn what_is_no_name_of_kubernetes_describes_no_pod() {
        let pod = |namespace: &'static str, uid: &'static str| {
            Pod::new(|name| match name {
                "pod.namespace" => Some(namespace),
                "pod.uid" => Some(uid),
                "pod.name" => Some("web-0"),
                _ => Some("cart.v2"),
            })
        };
        assert_eq!(pod("shop", "7f-1").unwrap().to_string(), "Pod shop/web-0");
        for (namespace, uid) in
            [("shop/sa/x", "7f"), ("", "7f"), ("Shop", "7f"), ("shop", "../7f"), ("shop", "")]
        {
            assert!(pod(namespace, uid).is_err(), "{namespace} {uid}");
        }
        assert_eq!(Pod::new(|_| None).unwrap_err(), "pod.namespace is missing");
    }
}
