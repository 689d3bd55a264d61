//! What is refused, and how.

use serde_json::json;
use tonic::Code;

use super::kubelet::{Kubelet, SECRET, TOKENS, token_of};
use crate::csi::publication::Request;
use crate::csi::{DriverSettings, TokenSource};
use crate::proto::csi::v1::NodePublishVolumeRequest;
use crate::proto::csi::v1::volume_capability::{AccessType, BlockVolume, MountVolume};

fn check(request: NodePublishVolumeRequest, settings: &DriverSettings) -> Result<(), (Code, String)> {
    let request = Request::from(request);
    let record = request.record(settings).map_err(|status| (status.code(), status.message().to_owned()))?;
    let token = request.token(&record.pod, settings);
    let token = token.map_err(|status| (status.code(), status.message().to_owned()))?;
    assert_eq!(token.is_some(), !settings.impersonates);
    Ok(())
}

#[test]
fn what_is_no_volume_of_a_pod_is_refused_with_the_way_out() {
    let kubelet = Kubelet::new();
    let volume = kubelet.volume(1, &[]);
    let settings = kubelet.settings();
    assert_eq!(check(volume.request(), &settings), Ok(()));
    let context = |name: &'static str, value: Option<&'static str>| {
        move |request: &mut NodePublishVolumeRequest| {
            match value {
                Some(value) => request.volume_context.insert(name.to_owned(), value.to_owned()),
                None => request.volume_context.remove(name),
            };
        }
    };
    let access = |access_type: Option<AccessType>| {
        move |request: &mut NodePublishVolumeRequest| {
            request.volume_capability.as_mut().unwrap().access_type = access_type.clone();
        }
    };
    type Change = Box<dyn Fn(&mut NodePublishVolumeRequest)>;
    let cases: Vec<(Change, &str)> = vec![
        (Box::new(|request| request.volume_id = "../x".to_owned()), "volume_id"),
        (Box::new(|request| request.volume_id.clear()), "volume_id"),
        (Box::new(|request| request.target_path.clear()), "target_path"),
        (Box::new(|request| request.target_path = "/etc/passwd".to_owned()), "--kubelet-dir"),
        (Box::new(|request| request.volume_capability = None), "no access type"),
        (Box::new(access(None)), "no access type"),
        (Box::new(access(Some(AccessType::Block(BlockVolume {})))), "block device"),
        (
            Box::new(access(Some(AccessType::Mount(MountVolume { volume_mount_group: "wheel".to_owned() })))),
            "volume_mount_group \"wheel\"",
        ),
        (Box::new(context("csi.storage.k8s.io/ephemeral", None)), "volumeLifecycleModes"),
        (Box::new(context("csi.storage.k8s.io/ephemeral", Some("false"))), "ephemeral"),
        (Box::new(context("csi.storage.k8s.io/pod.name", None)), "podInfoOnMount"),
        (Box::new(context("csi.storage.k8s.io/pod.namespace", Some("a/b"))), "pod.namespace"),
        (Box::new(context("csi.storage.k8s.io/pod.uid", Some("other"))), "another Pod"),
        (Box::new(context("key-typ", Some("x"))), "did you mean key-type?"),
        (Box::new(context("cert-ttl", Some("soon"))), "attribute cert-ttl"),
    ];
    for (change, words) in cases {
        let mut request = volume.request();
        change(&mut request);
        let (code, message) = check(request, &settings).unwrap_err();
        assert_eq!(code, Code::InvalidArgument, "{message}");
        assert!(message.contains(words) && !message.contains(SECRET), "{words}: {message}");
    }
    // Keys that kubelets to come may add are no attributes.
    let mut request = volume.request();
    context("csi.storage.k8s.io/pod.mood", Some("fine"))(&mut request);
    assert_eq!(check(request, &settings), Ok(()));
}

#[test]
fn only_the_pods_own_token_is_taken() {
    let kubelet = Kubelet::new();
    let volume = kubelet.volume(1, &[]);
    let claims = |subject: &str, audience: &str, uid: &str| {
        let bound = json!({"namespace": "shop", "pod": {"uid": uid}});
        token_of(&json!({"sub": subject, "aud": [audience], "kubernetes.io": bound}))
    };
    let own = "system:serviceaccount:shop:cart";
    let cases = [
        (claims(own, "istio-ca", &volume.uid), Ok(())),
        (claims("system:serviceaccount:bank:cart", "istio-ca", &volume.uid), Err("its sub is")),
        (claims("system:serviceaccount:shop:admin", "istio-ca", &volume.uid), Err("its sub is")),
        (claims(own, "istio-ca", "other"), Err("pod, uid")),
        (token_of(&json!({"sub": own, "aud": "istio-ca"})), Err("pod, uid")),
        (claims(own, "vault", &volume.uid), Err("its audience is")),
        ("opaque".to_owned(), Err("not a JWT")),
    ];
    for (token, expected) in cases {
        let checked = check(volume.request_with(&token), &kubelet.settings());
        match (checked, expected) {
            (Ok(()), Ok(())) => {}
            (Err((code, message)), Err(words)) => {
                assert_eq!(code, Code::PermissionDenied);
                assert!(message.contains(words) && !message.contains(&token), "{message}");
            }
            (checked, expected) => panic!("{expected:?}: {checked:?}"),
        }
    }
}

#[test]
fn the_token_comes_from_the_one_place_that_is_configured() {
    let kubelet = Kubelet::new();
    let volume = kubelet.volume(1, &[]);
    let in_context = volume.request();
    let mut in_secrets = volume.request();
    let tokens = in_secrets.volume_context.remove(TOKENS).unwrap();
    in_secrets.secrets.insert(TOKENS.to_owned(), tokens);
    let mut nowhere = volume.request();
    nowhere.volume_context.remove(TOKENS);
    let [context, secrets] = [TokenSource::VolumeContext, TokenSource::Secrets]
        .map(|token_source| DriverSettings { token_source, ..kubelet.settings() });
    let without = DriverSettings { impersonates: true, ..kubelet.settings() };
    for (request, settings) in [(&in_context, &context), (&in_secrets, &secrets), (&nowhere, &without)] {
        assert_eq!(check(request.clone(), settings), Ok(()));
    }
    for (request, settings, words) in [
        (&in_context, &secrets, "there is one in volume_context"),
        (&in_secrets, &context, "there is one in secrets"),
        (&nowhere, &context, "tokenRequests"),
    ] {
        let (code, message) = check(request.clone(), settings).unwrap_err();
        assert_eq!(code, Code::FailedPrecondition);
        assert!(message.contains(words) && !message.contains(SECRET), "{message}");
    }
}

#[test]
fn one_audience_needs_no_choice_and_several_do() {
    let kubelet = Kubelet::new();
    let volume = kubelet.volume(1, &[]);
    let any = DriverSettings { audience: None, ..kubelet.settings() };
    assert_eq!(check(volume.request(), &any), Ok(()));
    let cases = [
        ("{}", "there are 0"),
        ("[]", "no object"),
        ("{", "not JSON"),
        (r#"{"a":{"token":"x"},"b":{"token":"y"}}"#, "--csi-token-audience"),
        (r#"{"a":{"token":7}}"#, "no text under token"),
        (r#"{"a":{"token":"two words"}}"#, "printable"),
        (r#"{"a":{"token":""}}"#, "printable"),
    ];
    for (tokens, words) in cases {
        let mut request = volume.request();
        request.volume_context.insert(TOKENS.to_owned(), tokens.to_owned());
        let (code, message) = check(request, &any).unwrap_err();
        assert_eq!(code, Code::FailedPrecondition);
        assert!(message.contains(words), "{message}");
    }
    let other = DriverSettings { audience: Some("vault".to_owned()), ..kubelet.settings() };
    let (_, message) = check(volume.request(), &other).unwrap_err();
    assert!(message.contains("none for audience \"vault\", but for [istio-ca]"), "{message}");
}
