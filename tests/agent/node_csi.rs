//! The agent of a node as a CSI driver: volumes of Pods, as a kubelet has them made and removed.

use std::time::Duration;

use rustix::process::Signal;
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::spiffe;
use crate::support::kubelet::Kubelet;
use crate::support::node::{Node, identity};
use crate::support::process::{Ca, strs};
use crate::support::sds::{Stream, on_connection, served_serial};

#[tokio::test]
async fn a_pods_volume_has_its_identity_until_the_pod_goes() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let kubelet = Kubelet::new(directory.path());
    let node = start(&ca, &kubelet, directory.path()).await;
    let volume = kubelet.volume(1, "web", &[("key-type", "ecdsa-p384")]);
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(identity(&volume.socket()).await, spiffe("web"));
    let serial = served_serial(&volume.socket()).await;
    let other = kubelet.volume(2, "db", &[]);
    kubelet.publish(&other).await.unwrap();
    assert_eq!(identity(&other.socket()).await, spiffe("db"));
    // The kubelet comes by again and again.
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(served_serial(&volume.socket()).await, serial);
    let report = node.workload("default/web-7f-1").await;
    assert_eq!((report["ready"].as_bool(), report["identity"].as_str()), (Some(true), Some(&*spiffe("web"))));

    on_connection(&volume.socket(), async |client| {
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        let pushed = stream.next().await.unwrap();
        stream.accept(&pushed).await;
        kubelet.unpublish(&volume).await.unwrap();
        assert_eq!(stream.next().await.unwrap_err().code(), Code::Unavailable);
    })
    .await;
    assert!(!volume.target.exists());
    assert!(!directory.path().join("state").join(&volume.id).exists(), "the key on the disk is gone, too");
    kubelet.unpublish(&volume).await.unwrap();
    assert_eq!(identity(&other.socket()).await, spiffe("db"));
}

/// An agent with the CSI driver, and certificates from `ca`.
async fn start(ca: &Ca, kubelet: &Kubelet, directory: &std::path::Path) -> Node {
    let mut options = ca.client("agent");
    // Each Pod has a token of its own.
    let token = options.iter().position(|option| option == "--token-file").unwrap();
    options.drain(token..token + 2);
    options.extend(kubelet.options());
    Node::start(directory, &strs(&options)).await
}

#[tokio::test]
async fn a_restart_takes_over_each_volume_and_serves_it_while_the_ca_is_down() {
    let directory = tempfile::tempdir().unwrap();
    let mut ca = Ca::start(directory.path()).await;
    let kubelet = Kubelet::new(directory.path());
    let mut node = start(&ca, &kubelet, directory.path()).await;
    let volume = kubelet.volume(1, "web", &[]);
    kubelet.publish(&volume).await.unwrap();
    let serial = served_serial(&volume.socket()).await;
    let state = directory.path().join("state").join(&volume.id).join("attache.state");
    crate::support::wait::wait_until("its state", || state.exists()).await;
    ca.process.kill().await;
    for signal in [Signal::TERM, Signal::KILL] {
        node.restart(signal).await;
        assert_eq!(served_serial(&volume.socket()).await, serial);
        // The kubelet's next call is no failure either.
        kubelet.publish(&volume).await.unwrap();
    }
    kubelet.unpublish(&volume).await.unwrap();
    assert!(!state.exists() && !volume.target.exists());
}

#[tokio::test]
async fn a_volume_that_is_not_restored_is_said_to_be_that_and_served_once_the_kubelet_comes_by() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let kubelet = Kubelet::new(directory.path());
    let mut node = start(&ca, &kubelet, directory.path()).await;
    let volume = kubelet.volume(1, "web", &[]);
    kubelet.publish(&volume).await.unwrap();
    // No socket can take the place of a directory.
    std::fs::remove_file(volume.socket()).unwrap();
    std::fs::create_dir(volume.socket()).unwrap();
    node.restart(Signal::KILL).await;
    let log = node.process.log();
    assert!(log.contains("volume not restored; it is served once the kubelet comes by"), "{log}");
    assert!(!log.contains("volume not published"), "{log}");
    std::fs::remove_dir(volume.socket()).unwrap();
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(identity(&volume.socket()).await, spiffe("web"));
}

#[tokio::test]
async fn a_publish_that_waits_in_vain_says_why_and_ends_well_with_the_next_token() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.set(Mood::Refuse(Code::Unauthenticated));
    let kubelet = Kubelet::new(directory.path());
    let address = format!("http://{}", ca.address);
    let options = kubelet.options();
    let options = [&["--ca-address", &address][..], &strs(&options)].concat();
    let node = Node::start(directory.path(), &options).await;
    let volume = kubelet.volume(1, "web", &[]);
    let refused = kubelet.publish(&volume).await.unwrap_err();
    assert!(matches!(refused.code(), Code::DeadlineExceeded | Code::Unavailable), "{refused}");
    assert!(refused.message().contains("the kubelet brought it"), "{refused}");
    assert!(!refused.message().contains("c2lnbmF0dXJl") && !node.process.log().contains("c2lnbmF0dXJl"));
    ca.set(Mood::Good);
    tokio::time::timeout(Duration::from_secs(20), kubelet.publish(&volume)).await.unwrap().unwrap();
    assert_eq!(identity(&volume.socket()).await, spiffe("web"));
}

#[tokio::test]
async fn what_can_never_work_is_refused_at_once_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let kubelet = Kubelet::new(directory.path());
    let _node = start(&ca, &kubelet, directory.path()).await;
    for (number, (attribute, words)) in
        [(("key-typ", "rsa-2048"), "did you mean key-type?"), (("cert-ttl", "soon"), "is not a duration")]
            .into_iter()
            .enumerate()
    {
        let volume = kubelet.volume(number, "web", &[attribute]);
        let refused = kubelet.publish(&volume).await.unwrap_err();
        assert!(refused.code() == Code::InvalidArgument && refused.message().contains(words), "{refused}");
        assert!(!volume.target.exists());
    }
}

#[tokio::test]
async fn metrics_count_the_workloads_of_a_service_account_and_the_kubelets_calls_and_name_no_pod() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let kubelet = Kubelet::new(directory.path());
    let mut node = start(&ca, &kubelet, directory.path()).await;
    let volumes: Vec<_> = (1..4).map(|number| kubelet.volume(number, "web", &[])).collect();
    for volume in &volumes {
        kubelet.publish(volume).await.unwrap();
        assert_eq!(identity(&volume.socket()).await, spiffe("web"));
    }
    let refused = kubelet.volume(4, "web", &[("cert-ttl", "soon")]);
    kubelet.publish(&refused).await.unwrap_err();
    kubelet.unpublish(&volumes[0]).await.unwrap();
    let text = node.metrics().await;
    let web = "{namespace=\"default\",service_account=\"web\"}";
    let expected = [
        format!("attache_workloads{web} 2"),
        format!("attache_workloads_without_certificate{web} 0"),
        format!("attache_workloads_expired{web} 0"),
        format!("attache_workloads_overdue{web} 0"),
        "attache_workload_groups_left_out 0".to_owned(),
        // Those of the volume that is gone count, too.
        "attache_pushes_total{name=\"default\"} 3".to_owned(),
        "attache_csi_publishes_total{outcome=\"ok\"} 3".to_owned(),
        "attache_csi_publishes_total{outcome=\"invalid_argument\"} 1".to_owned(),
        "attache_csi_unpublishes_total{outcome=\"ok\"} 1".to_owned(),
        "attache_csi_publish_wait_seconds_count 3".to_owned(),
        "attache_csi_volumes 2".to_owned(),
        "attache_csi_registered 0".to_owned(),
    ];
    for line in expected {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
    assert!(text.contains(&format!("attache_workloads_not_after_timestamp_seconds{web} ")), "{text}");
    assert!(!text.contains("web-7f") && !text.contains("attache_secret_overdue{"), "{text}");
}
