//! Fuzz target: what the kubelet asks for. Authors of Pods write much of it.

use std::path::Path;

use super::publication::Request;
use super::record::Record;
use super::{DriverSettings, TokenSource};
use crate::base::fuzzing::{check_hidden, check_line, sections};
use crate::proto::csi::v1::volume_capability::{AccessType, MountVolume};
use crate::proto::csi::v1::{NodePublishVolumeRequest, VolumeCapability};

/// The sections of an input: the volume's id, its path, its group, the tokens in either place, and names of attributes, each
/// before its value.
const ID: u8 = 0;
const TARGET: u8 = 1;
const GROUP: u8 = 2;
const CONTEXT: u8 = 3;
const SECRETS: u8 = 4;
const NAME: u8 = 5;
const VALUE: u8 = 6;

const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

fn settings(token_source: TokenSource) -> Option<DriverSettings> {
    Some(DriverSettings {
        driver_name: "csi.attache.dev".parse().ok()?,
        node_id: "node-1".to_owned(),
        csi_socket: "/csi.sock".into(),
        registration_dir: "/registration".into(),
        endpoint: None,
        kubelet_dir: "/kubelet".into(),
        records: "/records".into(),
        token_source,
        audience: None,
        impersonates: false,
    })
}

fn request(bytes: &[u8]) -> NodePublishVolumeRequest {
    let mut request = NodePublishVolumeRequest { readonly: true, ..NodePublishVolumeRequest::default() };
    let mut mount = MountVolume::default();
    let mut name = String::new();
    for (tag, content) in sections(bytes) {
        let text = String::from_utf8_lossy(content).into_owned();
        match tag {
            ID => request.volume_id = text,
            TARGET => request.target_path = text,
            GROUP => mount.volume_mount_group = text,
            CONTEXT => drop(request.volume_context.insert(TOKENS.to_owned(), text)),
            SECRETS => drop(request.secrets.insert(TOKENS.to_owned(), text)),
            NAME => name = text,
            VALUE => drop(request.volume_context.insert(std::mem::take(&mut name), text)),
            _ => {}
        }
    }
    request.volume_capability = Some(VolumeCapability { access_type: Some(AccessType::Mount(mount)) });
    request
}

/// A request for a volume. True if it is accepted, with a token.
pub fn volume(bytes: &[u8]) -> bool {
    let request = request(bytes);
    // The last part of a token is what makes it one.
    let secrets: Vec<_> =
        request.volume_context.get(TOKENS).into_iter().chain(request.secrets.get(TOKENS)).collect();
    let secrets: Vec<_> =
        secrets.into_iter().filter_map(|tokens| tokens.rsplit('.').next()).map(str::to_owned).collect();
    let check = |message: &str| {
        check_line(message);
        secrets.iter().for_each(|secret| check_hidden(message, secret.as_bytes()));
    };
    let has_token = [TokenSource::VolumeContext, TokenSource::Secrets].map(|source| {
        let Some(settings) = settings(source) else { return false };
        let request = Request::from(request.clone());
        let record = match request.record(&settings) {
            Ok(record) => record,
            Err(status) => {
                check_line(status.message());
                return false;
            }
        };
        assert!(record.target.path().starts_with("/kubelet/pods"));
        assert!(!Path::new(record.id.as_str()).components().any(|part| part.as_os_str() == ".."));
        let again = Record::parse(record.to_json().to_string().as_bytes(), &settings.kubelet_dir);
        assert_eq!(again.as_ref(), Ok(&record), "a record does not survive");
        match request.token(&record.pod, &settings) {
            Ok(token) => {
                let subject =
                    format!("system:serviceaccount:{}:{}", record.pod.namespace, record.pod.service_account);
                assert!(
                    token.is_some_and(|token| token.claims().is_some_and(|claims| claims.subject == subject))
                );
                true
            }
            Err(status) => {
                check(status.message());
                false
            }
        }
    });
    has_token.contains(&true)
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;

    use super::*;
    use crate::base::fuzzing::{Shape, join, seeded};

    fn sample(place: u8, attributes: &[(&str, &str)]) -> Vec<u8> {
        let claims = r#"{"sub":"system:serviceaccount:shop:cart","kubernetes.io":{"pod":{"uid":"7f"}}}"#;
        let token = format!("e30.{}.dGhlIHNpZ25hdHVyZSBvZiB0aGlz", URL_SAFE_NO_PAD.encode(claims));
        let tokens = format!(r#"{{"istio-ca":{{"token":"{token}"}}}}"#);
        let pod = [
            ("csi.storage.k8s.io/pod.name", "web-0"),
            ("csi.storage.k8s.io/pod.namespace", "shop"),
            ("csi.storage.k8s.io/pod.uid", "7f"),
            ("csi.storage.k8s.io/serviceAccount.name", "cart"),
            ("csi.storage.k8s.io/ephemeral", "true"),
        ];
        let mut sections = vec![
            (ID, format!("csi-{}", "0a".repeat(32))),
            (TARGET, "/kubelet/pods/7f/volumes/kubernetes.io~csi/identity/mount".to_owned()),
            (GROUP, "2000".to_owned()),
            (place, tokens),
        ];
        for (name, value) in pod.iter().chain(attributes) {
            sections.extend([(NAME, (*name).to_owned()), (VALUE, (*value).to_owned())]);
        }
        join(sections)
    }

    #[test]
    fn almost_valid_volumes_break_no_rule() {
        let attributes = [
            ("trust-domain", "prod.example"),
            ("key-type", "rsa-2048"),
            ("cert-ttl", "1h30m"),
            ("socket-mode", "0660"),
            ("files", "true"),
            ("wait", "false"),
        ];
        let samples = [sample(CONTEXT, &[]), sample(SECRETS, &attributes), sample(CONTEXT, &attributes[..2])];
        seeded("volume", Shape::Sections, 3_000, &samples, volume);
        assert!(!volume(b""));
    }
}
