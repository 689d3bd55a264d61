//! The agent's client of API servers, against a server that keeps Kubernetes' rules and fails on what the API does not have.

use std::sync::Arc;

use attache::base::clock::Clock;
use attache::fs::disk::Disk;
use attache::kube::kubeconfig::{Kubeconfig, Policy};
use attache::kube::{
    Access, Account, Api, Cluster, Event, Kind, KubeError, ObjectId, Of, Selection, Version, Watch,
};
use http::Method;
use serde_json::json;

use crate::support::kube_cluster::{Draft, Fault, KubeCluster, Rule};

/// A client with this kubeconfig.
fn client(kubeconfig: &str) -> Cluster {
    let policy = Policy::Own { directory: "/".as_ref() };
    let parsed = Kubeconfig::parse(kubeconfig.as_bytes(), None, &policy).unwrap();
    Cluster::new(parsed.config, Disk::default(), Clock::system())
}

fn secrets(of: Of) -> Selection {
    Selection { kind: Kind::Secret, namespace: "shop".into(), of }
}

fn named(name: &str) -> Selection {
    secrets(Of::Name(name.into()))
}

fn id(name: &str) -> ObjectId {
    ObjectId { kind: Kind::Secret, namespace: "shop".into(), name: name.into() }
}

/// The next event that is not a bookmark: the object's name, and its version if it has not been deleted.
async fn next(watch: &mut Watch) -> (String, Option<Version>) {
    loop {
        match watch.next().await.unwrap().unwrap() {
            Event::Object(object) => return (object.name.to_string(), Some(object.version)),
            Event::Deleted { name, .. } => return (name.to_string(), None),
            Event::Version(_) => {}
        }
    }
}

fn version(number: u64) -> Option<Version> {
    Some(Version(number.to_string().into()))
}

#[tokio::test]
async fn the_client_reads_what_the_cluster_has() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = KubeCluster::start(directory.path(), "east").await;
    let client = client(&cluster.kubeconfig(&cluster.admin()));
    let pair = cluster.pair("web.example.com");
    let put = cluster.put(&Draft::secret("shop", "web").tls(&pair).label("a/b", "c"));
    let object = client.get(&id("web")).await.unwrap().unwrap();
    assert_eq!(version(put), Some(object.version));
    assert_eq!(*object.data["tls.crt"], pair.chain);
    assert_eq!(&*object.labels["a/b"], "c");
    assert!(client.get(&id("missing")).await.unwrap().is_none());
    for number in 0..600 {
        cluster.put(&Draft::secret("shop", &format!("other-{number}")));
    }
    for (of, count) in [
        (Of::Name("web".into()), 1),
        (Of::Label("a/b=c".into()), 1),
        (Of::Wanted(Arc::new(|name| name.ends_with('7'))), 60),
        (Of::Wanted(Arc::new(|_| true)), 601),
    ] {
        let list = client.list(&secrets(of)).await.unwrap();
        assert_eq!((list.objects.len(), list.version), (count, version(cluster.version()).unwrap()));
    }
    client.probe().await.unwrap();
}

#[tokio::test]
async fn the_client_follows_changes_until_the_server_forgets() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = KubeCluster::start(directory.path(), "east").await;
    let client = client(&cluster.certificate_kubeconfig("admin"));
    cluster.allow("admin", Rule::everything());
    let first = cluster.put(&Draft::secret("shop", "web"));
    let mut watch = client.watch(&named("web"), None).await.unwrap();
    assert_eq!(next(&mut watch).await, ("web".to_owned(), version(first)));
    cluster.put(&Draft::secret("shop", "other"));
    let second = cluster.put(&Draft::secret("shop", "web").entry("a", b"b"));
    assert_eq!(next(&mut watch).await, ("web".to_owned(), version(second)));
    let mut late = client.watch(&named("web"), version(first).as_ref()).await.unwrap();
    assert_eq!(next(&mut late).await, ("web".to_owned(), version(second)));
    cluster.delete_secret("shop", "web");
    assert_eq!(next(&mut watch).await, ("web".to_owned(), None));
    cluster.truncate_watches();
    assert!(watch.next().await.is_none_or(|ended| ended.is_err()), "half of an event is none");
    cluster.restart().await;
    let expired = match client.watch(&named("web"), version(first).as_ref()).await {
        Err(error) => error,
        Ok(mut watch) => watch.next().await.unwrap().unwrap_err(),
    };
    assert!(matches!(expired, KubeError::Expired { .. }), "{expired}");
}

#[tokio::test]
async fn the_client_asks_for_rights_and_says_what_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = KubeCluster::start(directory.path(), "east").await;
    let token = cluster.account("shop", "gateway");
    cluster.allow_account("shop", "gateway", Rule::to(&["get"], "secrets").within("shop").named(&["web"]));
    let admin = client(&cluster.kubeconfig(&cluster.admin()));
    let account = Account { namespace: "shop".into(), name: "gateway".into() };
    for (name, is_allowed) in [("web", true), ("other", false)] {
        let name = Some(name.into());
        let access = Access { verb: "get", kind: Kind::Secret, namespace: "shop".into(), name };
        assert_eq!(admin.may(&account, &access).await.unwrap(), is_allowed);
    }
    let spec = json!({
        "from": [{ "group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": "edge" }],
        "to": [{ "group": "", "kind": "Secret", "name": "web" }],
    });
    cluster.put(&Draft::of("referencegrants", "shop", "edge").with("spec", spec));
    let [grant] = &admin.grants("shop").await.unwrap()[..] else { panic!("not one grant") };
    assert_eq!((&*grant.from, grant.to, grant.name.as_deref()), ("edge", Kind::Secret, Some("web")));
    cluster.set_gateway_api(false);
    assert!(admin.grants("shop").await.unwrap().is_empty());

    let own = client(&cluster.kubeconfig(&token));
    let error = own.get(&id("other")).await.unwrap_err();
    assert!(error.is_forbidden() && error.to_string().contains("cannot get resource"), "{error}");
    cluster.revoke_token(&token);
    assert!(own.get(&id("web")).await.unwrap_err().is_unauthenticated());
    cluster.fault(Fault::TooMany(9));
    let error = admin.get(&id("web")).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(std::time::Duration::from_secs(9)));
    cluster.clear_faults();
    let object = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "made" } });
    let path = "/api/v1/namespaces/shop/secrets/made?fieldManager=attache";
    admin.call(Method::PATCH, path, Some(&object)).await.unwrap();
    assert!(admin.get(&id("made")).await.unwrap().is_some());
}

#[tokio::test]
async fn watches_share_connections_as_far_as_the_server_allows() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = KubeCluster::start(directory.path(), "east").await;
    let client = client(&cluster.kubeconfig(&cluster.admin()));
    let mut watches = Vec::new();
    for number in 0..250 {
        let name = format!("web-{number}");
        cluster.put(&Draft::secret("shop", &name));
        let mut watch = client.watch(&named(&name), None).await.unwrap();
        next(&mut watch).await;
        watches.push(watch);
    }
    assert_eq!(cluster.all_watches(), 250);
    assert!(cluster.connections() <= 4, "{} connections", cluster.connections());
    // A call finds room beside them.
    client.probe().await.unwrap();
    drop(watches);
    cluster.wait_all_watches(0).await;
}
