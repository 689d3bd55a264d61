//! What the kubelet asks for, checked: the volume, its Pod and attributes, and the token that belongs to that Pod.
//!
//! The author of a Pod can put any key into `volume_context` (`volumeAttributes`) and into `secrets`
//! (`nodePublishSecretRef`). So the token is taken from one place only, and its claims are compared with the Pod.

use std::collections::HashMap;

use serde_json::Value;
use tonic::{Code, Status};
use zeroize::{Zeroize as _, Zeroizing};

use super::attributes::Attributes;
use super::identifiers::{Pod, VolumeId};
use super::record::Record;
use super::target::Target;
use super::{DriverSettings, TokenSource};
use crate::auth::token_file::Token;
use crate::base::limits::TOKEN_BYTES;
use crate::base::text;
use crate::proto::csi::v1::NodePublishVolumeRequest;
use crate::proto::csi::v1::volume_capability::AccessType;

/// What the kubelet's own keys in `volume_context` begin with.
const KUBELETS: &str = "csi.storage.k8s.io/";
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// A checked request for a volume.
#[derive(Debug)]
pub(super) struct Publication {
    pub(super) record: Record,
    /// None where none is needed.
    pub(super) token: Option<Token>,
}

/// The texts of a request that may be secret. They are wiped when dropped.
pub(super) struct Request(NodePublishVolumeRequest);

impl From<NodePublishVolumeRequest> for Request {
    fn from(request: NodePublishVolumeRequest) -> Self {
        Self(request)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.0.secrets.values_mut().for_each(String::zeroize);
        if let Some(tokens) = self.0.volume_context.get_mut(TOKENS) {
            tokens.zeroize();
        }
    }
}

impl Request {
    pub(super) fn id(&self) -> Result<VolumeId, Status> {
        self.0.volume_id.parse().map_err(Status::invalid_argument)
    }

    pub(super) fn target(&self) -> &str {
        &self.0.target_path
    }

    /// Checks all but the token.
    pub(super) fn record(&self, settings: &DriverSettings) -> Result<Record, Status> {
        let Self(request) = self;
        let context = &request.volume_context;
        let invalid = |reason: String| Status::invalid_argument(reason);
        let id = self.id()?;
        let target = Target::parse(&request.target_path, &settings.kubelet_dir).map_err(invalid)?;
        let capability = request.volume_capability.as_ref().and_then(|it| it.access_type.as_ref());
        let mount = match capability {
            Some(AccessType::Mount(mount)) => mount,
            Some(AccessType::Block(_)) => {
                return Err(invalid("a block device is no volume of this driver".to_owned()));
            }
            None => return Err(invalid("volume_capability has no access type".to_owned())),
        };
        let group = match mount.volume_mount_group.as_str() {
            "" => None,
            group => Some(group.parse().map_err(|_| {
                invalid(format!("volume_mount_group {:?} is no number", text::sanitize_for_log(group)))
            })?),
        };
        if context.get("csi.storage.k8s.io/ephemeral").is_none_or(|ephemeral| ephemeral != "true") {
            return Err(invalid(format!(
                "the volume is not an ephemeral inline one: give it as csi: {{driver: {}}} in the Pod, without a \
                 PersistentVolumeClaim, and the CSIDriver podInfoOnMount: true and volumeLifecycleModes: [Ephemeral]",
                settings.driver_name
            )));
        }
        let pod = Pod::new(|name| Some(context.get(&format!("{KUBELETS}{name}"))?.as_str()));
        let pod = pod.map_err(|reason| {
            invalid(format!(
                "the kubelet does not describe the Pod: {reason}; the CSIDriver needs podInfoOnMount: true"
            ))
        })?;
        if target.pod_uid() != pod.uid.as_str() {
            return Err(invalid(
                "target_path is in the directory of another Pod than pod.uid names".to_owned(),
            ));
        }
        let given = context.iter().filter(|(name, _)| !name.starts_with(KUBELETS));
        let attributes = Attributes::parse(given.map(|(name, value)| (name.as_str(), value.as_str())));
        let attributes = attributes.map_err(invalid)?;
        if attributes.files && !request.readonly {
            // A container could put links among the files, which a privileged agent writes.
            return Err(invalid(
                "attribute files: the volume must be read-only: add readOnly: true beside its driver"
                    .to_owned(),
            ));
        }
        Ok(Record { id, target, pod, attributes, group })
    }

    /// The token of `pod`; none where none is needed.
    pub(super) fn token(&self, pod: &Pod, settings: &DriverSettings) -> Result<Option<Token>, Status> {
        if settings.impersonates {
            return Ok(None);
        }
        let Self(request) = self;
        let (place, other) = match settings.token_source {
            TokenSource::VolumeContext => (&request.volume_context, &request.secrets),
            TokenSource::Secrets => (&request.secrets, &request.volume_context),
        };
        let Some(tokens) = place.get(TOKENS) else { return Err(no_token(other, settings.token_source)) };
        let token = choose(tokens, settings.audience.as_deref())?;
        check(&token, pod, settings.audience.as_deref())?;
        Ok(Some(token))
    }
}

fn no_token(other: &HashMap<String, String>, source: TokenSource) -> Status {
    let (here, there) = match source {
        TokenSource::VolumeContext => ("volume_context", "secrets"),
        TokenSource::Secrets => ("secrets", "volume_context"),
    };
    let remedy = if other.contains_key(TOKENS) {
        format!(
            "there is one in {there}: is it the kubelet's, set --csi-token-source accordingly, as serviceAccountTokenInSecrets of the CSIDriver is"
        )
    } else {
        "the CSIDriver needs tokenRequests with the audience of the CA".to_owned()
    };
    Status::failed_precondition(format!("the kubelet brings no service account token in {here}; {remedy}"))
}

/// The token for `audience` of those that the kubelet brings: `{"AUDIENCE":{"token":…}}`.
fn choose(tokens: &str, audience: Option<&str>) -> Result<Token, Status> {
    let refuse = |reason: &str| Status::failed_precondition(format!("service account tokens: {reason}"));
    let mut tokens: Value = serde_json::from_str(tokens).map_err(|_| refuse("they are not JSON"))?;
    let chosen = pick(&tokens, audience).map_err(|reason| refuse(&reason));
    let token = chosen.and_then(|token| {
        let limit = usize::try_from(TOKEN_BYTES).unwrap_or(usize::MAX);
        let token = Some(token).filter(|token| token.len() <= limit);
        Token::parse(token.unwrap_or_default().as_bytes()).map_err(refuse)
    });
    wipe(&mut tokens);
    token
}

fn pick<'a>(tokens: &'a Value, audience: Option<&str>) -> Result<&'a str, String> {
    let tokens = tokens.as_object().ok_or("they are no object")?;
    let named = || text::sanitize_for_log(&text::listed(tokens.keys(), ", "));
    let entry = match (audience, tokens.values().next()) {
        (Some(audience), _) => tokens.get(audience).ok_or_else(|| {
            format!("there is none for audience {audience:?}, but for [{}]; the CSIDriver needs it in tokenRequests", named())
        })?,
        (None, Some(only)) if tokens.len() == 1 => only,
        (None, _) => return Err(format!("there are {} (audiences [{}]): --csi-token-audience chooses one", tokens.len(), named())),
    };
    entry.get("token").and_then(Value::as_str).ok_or_else(|| "there is no text under token".to_owned())
}

fn wipe(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(values) => values.iter_mut().for_each(wipe),
        Value::Object(values) => values.values_mut().for_each(wipe),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Compares the token's claims with its Pod.
fn check(token: &Token, pod: &Pod, audience: Option<&str>) -> Result<(), Status> {
    let refuse = |what: &str, found: &str, expected: &str| {
        let found = text::sanitize_for_log(found);
        let reason = format!("the token is not this Pod's: its {what} is {found:?}, and not {expected:?}");
        Err(Status::new(Code::PermissionDenied, reason))
    };
    let Some(claims) = token.claims() else {
        return Err(Status::permission_denied("the token is not this Pod's: it is not a JWT"));
    };
    let subject = format!("system:serviceaccount:{}:{}", pod.namespace, pod.service_account);
    if claims.subject != subject {
        return refuse("sub", &claims.subject, &subject);
    }
    let uid = claims.pod_uid.as_deref().unwrap_or_default();
    if uid != pod.uid {
        return refuse("Pod (kubernetes.io, pod, uid)", uid, &pod.uid);
    }
    match audience {
        Some(audience) if !claims.audiences.iter().any(|other| other == audience) => {
            refuse("audience", &claims.audiences.join(", "), audience)
        }
        _ => Ok(()),
    }
}

/// A copy of a token, for a second attempt.
pub(super) fn copy(token: &Token) -> Token {
    let text = Zeroizing::new(token.secret().to_owned());
    Token::new(&text)
}
