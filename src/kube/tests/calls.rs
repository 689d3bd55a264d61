use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde_json::json;

use super::server::{Reply, Server};
use super::{id, named, secret, status, wanted};
use crate::auth::token_file::{Token, TokenFile};
use crate::kube::{Access, Account, Api as _, Credential, Kind, KubeError, ObjectId, Of, Selection};

#[tokio::test]
async fn a_secret_is_read_with_its_data_decoded() {
    let server = Server::start(|_| {
        let mut object = secret("tls", "7", &[("tls.crt", "cert"), ("tls.key", "key"), ("empty", "")]);
        object["metadata"]["labels"] = json!({ "app": "shop" });
        object["metadata"]["annotations"] =
            json!({ "kubectl.kubernetes.io/last-applied-configuration": "{\"data\":1}", "note": "a\nb" });
        Reply::Json(200, object)
    });
    let server = server.await;
    let found = server.cluster().get(&id("tls")).await.unwrap().unwrap();
    assert_eq!((&*found.name, &*found.version.0), ("tls", "7"));
    assert_eq!(found.data["tls.key"].as_slice(), b"key");
    assert_eq!(found.data["empty"].as_slice(), b"");
    assert_eq!(&*found.labels["app"], "shop");
    let notes: Vec<_> = found.annotations.iter().map(|(key, value)| (&**key, &**value)).collect();
    assert_eq!(notes, [("note", "a\nb")], "kubectl's copy of the data is not kept");
    let seen = server.seen();
    assert_eq!(seen[0].path, "/api/v1/namespaces/gw/secrets/tls");
    assert!(seen[0].headers["user-agent"].to_str().unwrap().starts_with("attache/"));
    assert!(seen[0].headers.get("authorization").is_none());
}

#[tokio::test]
async fn the_texts_and_the_bytes_of_a_configmap_are_its_data() {
    let server = Server::start(|_| {
        Reply::Json(
            200,
            json!({
                "kind": "ConfigMap", "metadata": { "name": "ca", "namespace": "gw", "resourceVersion": "1" },
                "data": { "ca.crt": "-----\nA\u{1f680}\n", "odd": null }, "binaryData": { "der": "AQID" },
            }),
        )
    });
    let server = server.await;
    let object = ObjectId { kind: Kind::ConfigMap, namespace: "gw".into(), name: "ca".into() };
    let found = server.cluster().get(&object).await.unwrap().unwrap();
    assert_eq!(found.data["ca.crt"].as_slice(), "-----\nA\u{1f680}\n".as_bytes());
    assert_eq!(found.data["der"].as_slice(), [1, 2, 3]);
}

#[tokio::test]
async fn only_the_api_servers_own_answer_means_that_an_object_does_not_exist() {
    let answers = [
        (Reply::Json(404, status(404, "NotFound", "secrets \"tls\" not found")), true),
        (Reply::Json(404, status(404, "NotFound", "secrets \"other\" not found")), false),
        (
            Reply::Json(404, status(404, "NotFound", "the server could not find the requested resource")),
            false,
        ),
        (Reply::Text(404, "404 page not found".to_owned()), false),
    ];
    for (answer, is_none) in answers {
        let mut answer = Some(answer);
        let server = Server::start(move |_| answer.take().unwrap()).await;
        let found = server.cluster().get(&id("tls")).await;
        assert_eq!(matches!(found, Ok(None)), is_none, "{found:?}");
    }
}

#[tokio::test]
async fn another_object_or_no_object_is_an_error_that_shows_no_data() {
    let mut other_namespace = secret("tls", "1", &[("k", "hidden")]);
    other_namespace["metadata"]["namespace"] = json!("other");
    let mut bad = secret("tls", "1", &[]);
    bad["data"] = json!({ "tls.key": "not base64: hidden" });
    let mut other_kind = secret("tls", "1", &[("k", "hidden")]);
    other_kind["kind"] = json!("ConfigMap");
    let mut odd = secret("tls", "1", &[]);
    odd["data"] = json!("hidden");
    let cases = [
        (secret("web", "1", &[]).to_string(), "another name"),
        (other_namespace.to_string(), "namespace \"other\""),
        (other_kind.to_string(), "ConfigMap"),
        (bad.to_string(), "\"tls.key\" of the Secret tls is not base64"),
        (odd.to_string(), "JSON"),
        ("[]".to_owned(), "JSON"),
        ("{}".to_owned(), "no name"),
        ("<html>hidden".to_owned(), "JSON"),
        (secret("tls", "1", &[("k", "hidden")]).to_string().trim_end_matches('}').to_owned(), "JSON"),
    ];
    for (body, words) in cases {
        let shown = body.clone();
        let server = Server::start(move |_| Reply::Text(200, body.clone())).await;
        let error = server.cluster().get(&id("tls")).await.unwrap_err();
        assert!(matches!(error, KubeError::Unreadable { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(words) && !text.contains("hidden"), "{shown}: {text}");
        assert!(text.contains(&server.address.to_string()), "{text}");
    }
}

#[tokio::test]
async fn a_list_takes_all_its_pages_and_decodes_wanted_objects_only() {
    let server = Server::start(|request| {
        let (items, next) = match request.path.split_once("continue=").map(|(_, next)| next) {
            None => (vec![secret("a", "3", &[("k", "1")]), secret("b", "4", &[])], "to%2Fken"),
            Some("to%252Fken") => (vec![secret("c", "5", &[("k", "2")])], "last"),
            _ => (Vec::new(), ""),
        };
        Reply::Json(200, json!({ "metadata": { "resourceVersion": "9", "continue": next }, "items": items }))
    });
    let server = server.await;
    let list = server.cluster().list(&wanted(|name| name != "b")).await.unwrap();
    let names: Vec<_> = list.objects.iter().map(|object| &*object.name).collect();
    assert_eq!((names, &*list.version.0), (vec!["a", "c"], "9"));
    let seen = server.seen();
    assert_eq!(seen.len(), 3);
    assert!(seen.iter().all(|call| call.has("limit=250") && !call.path.contains("resourceVersion")));
}

#[tokio::test]
async fn selections_are_sent_as_selectors() {
    let server =
        Server::start(|_| Reply::Json(200, json!({ "metadata": { "resourceVersion": "1" }, "items": [] })));
    let server = server.await;
    let cluster = server.cluster();
    cluster.list(&named("tls")).await.unwrap();
    let label = Of::Label("istio/multiCluster=true".into());
    cluster.list(&Selection { of: label, ..named("x") }).await.unwrap();
    let seen = server.seen();
    assert!(seen[0].has("fieldSelector=metadata.name%3Dtls"), "{}", seen[0].path);
    assert!(seen[1].has("labelSelector=istio%2FmultiCluster%3Dtrue"), "{}", seen[1].path);
    assert_eq!((seen[0].connection, seen[1].connection), (1, 1), "they share a connection");
}

#[tokio::test]
async fn a_list_whose_continuation_has_expired_begins_again() {
    let mut refusals = 0;
    let server = Server::start(move |request| {
        if request.path.contains("continue=") && refusals < 1 {
            refusals += 1;
            return Reply::Json(410, status(410, "Expired", "The provided continue parameter is too old"));
        }
        let next = if request.path.contains("continue=") { "" } else { "more" };
        let items = [secret("a", "3", &[])];
        Reply::Json(200, json!({ "metadata": { "resourceVersion": "9", "continue": next }, "items": items }))
    });
    let server = server.await;
    let list = server.cluster().list(&named("a")).await.unwrap();
    assert_eq!(list.objects.len(), 2, "each page once");
    assert_eq!(server.seen().len(), 4);
}

#[tokio::test]
async fn a_page_that_is_too_long_is_asked_for_in_smaller_ones() {
    let server = Server::start(|request| {
        let items = if request.has("limit=250") {
            vec![secret("a", "1", &[("k", &"x".repeat(26 << 20))])]
        } else {
            vec![secret("a", "1", &[])]
        };
        Reply::Json(200, json!({ "metadata": { "resourceVersion": "9" }, "items": items }))
    });
    let server = server.await;
    assert_eq!(server.cluster().list(&named("a")).await.unwrap().objects.len(), 1);
    assert!(server.seen()[1].has("limit=26"), "{}", server.seen()[1].path);
}

#[tokio::test]
async fn an_answer_that_is_too_long_is_not_read() {
    let server = Server::start(|_| Reply::Text(200, "x".repeat(4 << 20))).await;
    let error = server.cluster().get(&id("tls")).await.unwrap_err();
    assert!(error.to_string().contains("longer than 3145728 bytes"), "{error}");
}

#[tokio::test]
async fn a_refusal_keeps_the_servers_words_and_its_delay_but_no_token() {
    let server = Server::start(|_| {
        let message =
            format!("secrets \"tls\" is forbidden: User \"x\" cannot get; s3cr3t-token\n{}", "y".repeat(900));
        Reply::With(429, "retry-after", "7", status(429, "TooManyRequests", &message))
    });
    let server = server.await;
    let cluster = server.cluster_as(Credential::Token(Arc::new(Token::new("s3cr3t-token"))));
    let error = cluster.get(&id("tls")).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
    let text = error.to_string();
    assert!(text.contains("429") && text.contains("cannot get") && text.contains("(the token)"), "{text}");
    assert!(!text.contains("s3cr3t") && !text.contains('\n') && text.len() < 600, "{text}");
    assert_eq!(server.seen()[0].bearer(), "Bearer s3cr3t-token");
}

#[tokio::test]
async fn a_rotated_token_is_read_again_once_when_the_old_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "old").unwrap();
    let rotated = path.clone();
    let server = Server::start(move |request| match request.bearer() {
        "Bearer new" => Reply::Json(200, secret("tls", "1", &[])),
        "Bearer old" => {
            std::fs::write(&rotated, "new").unwrap();
            Reply::Json(401, status(401, "Unauthorized", "Unauthorized"))
        }
        _ => Reply::Json(401, status(401, "Unauthorized", "Unauthorized")),
    });
    let server = server.await;
    let cluster = server.cluster_as(Credential::TokenFile(TokenFile::new(&path)));
    assert!(cluster.get(&id("tls")).await.unwrap().is_some());
    assert_eq!(server.seen().len(), 2);
    std::fs::write(&path, "bad").unwrap();
    let other = server.cluster_as(Credential::TokenFile(TokenFile::new(&path)));
    let error = other.get(&id("tls")).await.unwrap_err();
    assert!(error.is_unauthenticated(), "{error}");
    let text = error.to_string();
    assert!(text.contains("the token is not a JWT; it is read from") || text.contains("not a JWT"), "{text}");
    assert!(text.contains(path.to_str().unwrap()), "{text}");
    assert_eq!(server.seen().len(), 3, "the same token is not sent again");
}

#[tokio::test]
async fn a_review_asks_for_the_account_and_reads_the_decision() {
    let mut answers = [
        json!({ "allowed": true }),
        json!({ "allowed": false }),
        json!({ "allowed": false, "evaluationError": "timed out" }),
    ]
    .into_iter();
    let server = Server::start(move |request| {
        assert_eq!(request.body["kind"], "SubjectAccessReview");
        Reply::Json(201, json!({ "status": answers.next().unwrap() }))
    });
    let server = server.await;
    let cluster = server.cluster();
    let account = Account { namespace: "gw".into(), name: "web".into() };
    let access = Access { verb: "get", kind: Kind::Secret, namespace: "gw".into(), name: None };
    assert!(cluster.may(&account, &access).await.unwrap());
    assert!(!cluster.may(&account, &access).await.unwrap());
    let error = cluster.may(&account, &access).await.unwrap_err();
    assert!(
        matches!(&error, KubeError::Undecided { .. }) && error.to_string().contains("timed out"),
        "{error}"
    );
    assert_eq!(server.seen()[0].method, Method::POST);
}

#[tokio::test]
async fn grants_are_read_in_whichever_version_there_is_and_none_without_the_gateway_api() {
    let list = json!({ "metadata": {}, "items": [{ "spec": {
        "from": [{ "group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": "a" }],
        "to": [{ "group": "", "kind": "Secret" }],
    } }] });
    for (version, count) in [("v1beta1", 1), ("v1", 1), ("v9", 0)] {
        let list = list.clone();
        let server = Server::start(move |request| match request.path.contains(&format!("/{version}/")) {
            true => Reply::Json(200, list.clone()),
            false => Reply::Text(404, "404 page not found".to_owned()),
        });
        let server = server.await;
        assert_eq!(server.cluster().grants("shop").await.unwrap().len(), count, "{version}");
    }
}

#[tokio::test]
async fn a_probe_needs_a_known_credential_and_no_right() {
    for (code, is_known) in [(200, true), (403, true), (401, false), (500, false)] {
        let server = Server::start(move |request| {
            assert_eq!(request.path, "/version");
            Reply::Json(code, status(code, "", ""))
        });
        let server = server.await;
        assert_eq!(server.cluster().probe().await.is_ok(), is_known, "{code}");
    }
}

#[tokio::test]
async fn any_call_can_be_made_with_json() {
    let server = Server::start(|request| {
        let types = request.headers.get("content-type").map(|value| value.to_str().unwrap().to_owned());
        Reply::Json(200, json!({ "type": types, "body": request.body }))
    });
    let server = server.await;
    let cluster = server.cluster();
    let body = json!({ "a": 1 });
    let applied =
        cluster.call(Method::PATCH, "/x?fieldManager=attache&force=true", Some(&body)).await.unwrap();
    assert_eq!(applied, json!({ "type": "application/apply-patch+yaml", "body": { "a": 1 } }));
    let made = cluster.call(Method::POST, "/x", Some(&body)).await.unwrap();
    assert_eq!(made["type"], "application/json");
    assert_eq!(cluster.call(Method::DELETE, "/x", None).await.unwrap()["type"], json!(null));
}
