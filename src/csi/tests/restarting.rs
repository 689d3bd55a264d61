//! An agent takes over from the one before.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use super::kubelet::{Kubelet, Running, names, node, token};
use super::runner::FakeRunner;
use crate::csi::NotStarted;

#[tokio::test(start_paused = true)]
async fn a_restart_serves_all_volumes_again_in_the_same_directories() {
    for is_crash in [false, true] {
        let (kubelet, old) = node(&FakeRunner::new()).await;
        let volumes = [1, 2, 3].map(|number| kubelet.volume(number, &[("cert-ttl", "90m")]));
        for volume in &volumes {
            kubelet.publish(volume).await.unwrap();
        }
        let inode = |of: &std::path::Path| fs::metadata(of).unwrap().ino();
        let directories = volumes.clone().map(|volume| inode(&volume.target));
        if is_crash {
            old.kill().await
        } else {
            old.stop().await
        }
        // Its CA does not answer: the volumes were published once.
        let runner = FakeRunner::silent();
        let new = Running::start(kubelet.settings(), &runner).await;
        assert_eq!((runner.running(), new.driver.volumes()), (3, 3));
        for (volume, directory) in volumes.iter().zip(directories) {
            assert_eq!(inode(&volume.target), directory);
            assert_eq!(names(&volume.target), ["socket"]);
            volume.connect().unwrap();
            let workload = runner.workload(&volume.id).unwrap();
            workload.socket.accept().await.unwrap();
            assert!(workload.token.is_none());
            assert_eq!(workload.attributes.cert_ttl.unwrap().as_secs(), 5400);
            kubelet.request(volume.request_with(&token(&volume.uid, "2"))).await.unwrap();
            assert_eq!(runner.tokens(&volume.id), [token(&volume.uid, "2")]);
        }
        assert_eq!(runner.started(), 3);
        new.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn volumes_of_pods_that_went_while_no_agent_ran_are_cleaned_up() {
    let (kubelet, old) = node(&FakeRunner::new()).await;
    let volumes = [1, 2, 3, 4].map(|number| kubelet.volume(number, &[]));
    for volume in &volumes {
        kubelet.publish(volume).await.unwrap();
    }
    old.stop().await;
    // The kubelet has forgotten one, removed one, and given the place of one to another volume.
    fs::remove_file(volumes[0].target.with_file_name("vol_data.json")).unwrap();
    fs::remove_dir_all(volumes[1].target.parent().unwrap()).unwrap();
    let other = r#"{"driverName":"other","volumeHandle":"csi-other"}"#;
    fs::write(volumes[2].target.with_file_name("vol_data.json"), other).unwrap();
    let runner = FakeRunner::new();
    let new = Running::start(kubelet.settings(), &runner).await;
    assert_eq!(runner.running(), 1);
    assert_eq!(names(&kubelet.path("state/volumes")), [format!("{}.json", volumes[3].id)]);
    assert!(!volumes[0].target.exists());
    assert!(volumes[2].target.exists(), "it is another driver's now");
    let mut stopped = runner.stopped();
    stopped.sort();
    assert_eq!(stopped, [0, 1, 2].map(|number| volumes[number].id.clone()), "what is kept of them goes");
    new.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_without_a_record_is_served_once_the_kubelet_comes_by() {
    let (kubelet, old) = node(&FakeRunner::new()).await;
    let volume = kubelet.volume(1, &[]);
    kubelet.publish(&volume).await.unwrap();
    let directory = fs::metadata(&volume.target).unwrap().ino();
    old.stop().await;
    fs::remove_dir_all(kubelet.path("state")).unwrap();
    let runner = FakeRunner::new();
    let new = Running::start(kubelet.settings(), &runner).await;
    assert!(volume.socket().exists() && runner.running() == 0);
    kubelet.publish(&volume).await.unwrap();
    volume.connect().unwrap();
    assert_eq!(fs::metadata(&volume.target).unwrap().ino(), directory);
    new.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_record_that_is_damaged_stops_nothing() {
    let kubelet = Kubelet::new();
    let records = kubelet.path("state/volumes");
    fs::create_dir_all(&records).unwrap();
    fs::write(records.join("csi-1.json"), "{").unwrap();
    fs::write(records.join("csi-2.json"), "{}").unwrap();
    let running = Running::start(kubelet.settings(), &FakeRunner::new()).await;
    kubelet.publish(&kubelet.volume(3, &[])).await.unwrap();
    assert_eq!(names(&records).len(), 1);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_not_restored_is_served_once_the_kubelet_comes_by() {
    let (kubelet, old) = node(&FakeRunner::new()).await;
    let volume = kubelet.volume(1, &[]);
    kubelet.publish(&volume).await.unwrap();
    old.stop().await;
    let runner = FakeRunner::new();
    runner.refuse(Some(NotStarted { reason: "no room".to_owned(), is_retryable: false }));
    let new = Running::start(kubelet.settings(), &runner).await;
    assert!(volume.socket().exists(), "the Pod runs");
    assert_eq!(names(&kubelet.path("state/volumes")).len(), 1);
    runner.refuse(None);
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(runner.tokens(&volume.id).len(), 1);
    new.stop().await;
}
