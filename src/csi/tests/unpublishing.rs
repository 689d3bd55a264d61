//! Unpublish.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use tokio::time::Instant;
use tonic::Code;

use super::kubelet::{names, node, until};
use super::runner::FakeRunner;

#[tokio::test(start_paused = true)]
async fn nothing_is_left_of_an_unpublished_volume() {
    let runner = FakeRunner::new();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[]);
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(names(&kubelet.path("state/volumes")), [format!("{}.json", volume.id)]);
    for _ in 0..2 {
        kubelet.unpublish(&volume).await.unwrap();
        assert!(!volume.target.exists());
        assert!(volume.target.with_file_name("vol_data.json").exists(), "the kubelet's own file is its own");
        assert!(names(&kubelet.path("state/volumes")).is_empty());
        assert_eq!((runner.running(), running.driver.volumes()), (0, 0));
    }
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn volumes_that_are_unknown_or_gone_are_unpublished_too() {
    let runner = FakeRunner::new();
    let (kubelet, running) = node(&runner).await;
    // Without a directory, with one, without its parent, and outside the kubelet's directory.
    let mut volumes = [1, 2, 3, 4].map(|number| kubelet.volume(number, &[]));
    fs::create_dir(&volumes[1].target).unwrap();
    fs::write(volumes[1].socket(), "").unwrap();
    fs::remove_dir_all(volumes[2].target.parent().unwrap()).unwrap();
    volumes[3].target = kubelet.path("elsewhere/mount");
    fs::create_dir_all(&volumes[3].target).unwrap();
    for volume in &volumes {
        kubelet.unpublish(volume).await.unwrap();
    }
    assert!(!volumes[1].target.exists() && volumes[3].target.exists());
    // What a runner has kept of them goes, too.
    assert_eq!(runner.stopped().len(), 4);
    volumes[0].id.clear();
    assert_eq!(kubelet.unpublish(&volumes[0]).await.unwrap_err().code(), Code::InvalidArgument);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_volume_ends_the_call_that_waits_for_its_certificate() {
    let runner = FakeRunner::silent();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[]);
    let began = Instant::now();
    let waiting = async { kubelet.publish(&volume).await.unwrap_err().code() };
    let ending = async {
        until(|| runner.running() == 1).await;
        kubelet.unpublish(&volume).await
    };
    let (code, ended) = tokio::join!(waiting, ending);
    ended.unwrap();
    assert_eq!(code, Code::Aborted);
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(!volume.target.exists());
    assert_eq!((runner.running(), running.driver.volumes()), (0, 0));
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_pod_wrote_goes_and_what_it_linked_stays() {
    let (kubelet, running) = node(&FakeRunner::new()).await;
    let volume = kubelet.volume(1, &[]);
    kubelet.publish(&volume).await.unwrap();
    let precious = kubelet.path("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("file"), "").unwrap();
    fs::write(volume.target.join("note"), "").unwrap();
    fs::create_dir(volume.target.join("..2026")).unwrap();
    fs::write(volume.target.join("..2026/key.pem"), "").unwrap();
    symlink(&precious, volume.target.join("link")).unwrap();
    symlink(&precious, volume.target.join("..2026/link")).unwrap();
    kubelet.unpublish(&volume).await.unwrap();
    assert!(!volume.target.exists() && precious.join("file").exists());
    // A tree is none of a volume's: it stays, and the kubelet reports it.
    let volume = kubelet.volume(2, &[]);
    kubelet.publish(&volume).await.unwrap();
    fs::create_dir_all(volume.target.join("a/b")).unwrap();
    fs::write(volume.target.join("a/b/c"), "").unwrap();
    kubelet.unpublish(&volume).await.unwrap();
    assert_eq!(names(&volume.target), ["a"]);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_link_in_the_place_of_a_volume_is_neither_used_nor_followed() {
    let (kubelet, running) = node(&FakeRunner::new()).await;
    let volume = kubelet.volume(1, &[]);
    let elsewhere = kubelet.path("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("file"), "").unwrap();
    symlink(&elsewhere, &volume.target).unwrap();
    assert_eq!(kubelet.publish(&volume).await.unwrap_err().code(), Code::Internal);
    kubelet.unpublish(&volume).await.unwrap();
    assert_eq!(names(&elsewhere), ["file"]);
    running.stop().await;
}
