//! Registration.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::time::Duration;

use tokio::time::Instant;

use super::kubelet::{DRIVER, Kubelet, Running, names, node, origin, until};
use super::runner::FakeRunner;
use crate::csi::DriverSettings;
use crate::proto::csi::v1 as csi;
use crate::proto::csi::v1::identity_client::IdentityClient;
use crate::proto::pluginregistration as plugin;

fn inode(kubelet: &Kubelet) -> Option<u64> {
    Some(fs::symlink_metadata(kubelet.registration_socket()).ok()?.ino())
}

#[tokio::test(start_paused = true)]
async fn the_driver_is_registered_as_the_kubelet_does_it() {
    let (kubelet, running) = node(&FakeRunner::new()).await;
    until(|| inode(&kubelet).is_some()).await;
    // Its temporary name begins with a dot, and has gone.
    assert_eq!(names(&kubelet.path("kubelet/plugins_registry")), [format!("{DRIVER}-reg.sock")]);
    for socket in [kubelet.registration_socket(), kubelet.settings().csi_socket] {
        assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let info = kubelet.registration(async |mut client| client.get_info(plugin::InfoRequest {}).await);
    let info = info.await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", DRIVER));
    assert_eq!(info.supported_versions, ["1.0.0"]);
    assert_eq!(info.endpoint, kubelet.settings().csi_socket.to_str().unwrap());
    let node = kubelet.node(async |mut node| node.node_get_info(csi::NodeGetInfoRequest {}).await);
    assert_eq!(node.await.unwrap().into_inner().node_id, "node-1");
    kubelet.notify("").await;
    let registered = inode(&kubelet);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(inode(&kubelet), registered, "the socket stays");
    running.stop().await;
    assert!(names(&kubelet.path("kubelet/plugins_registry")).is_empty());
    assert!(!kubelet.settings().csi_socket.exists());
}

#[tokio::test(start_paused = true)]
async fn the_driver_says_what_it_is() {
    let kubelet = Kubelet::new();
    let endpoint = Some("/as/the/kubelet/sees/it.sock".into());
    let settings = DriverSettings { endpoint, ..kubelet.settings() };
    let running = Running::start(settings.clone(), &FakeRunner::new()).await;
    let talk = async |connection| {
        let mut client = IdentityClient::with_origin(connection, origin());
        let info = client.get_plugin_info(csi::GetPluginInfoRequest {}).await.unwrap().into_inner();
        assert_eq!((info.name.as_str(), info.vendor_version.as_str()), (DRIVER, env!("CARGO_PKG_VERSION")));
        client.get_plugin_capabilities(csi::GetPluginCapabilitiesRequest {}).await.unwrap();
        let probed = client.probe(csi::ProbeRequest {}).await.unwrap().into_inner();
        assert_eq!(probed.ready.map(|ready| ready.value), Some(true));
    };
    Kubelet::call(&settings.csi_socket, talk).await;
    until(|| inode(&kubelet).is_some()).await;
    let info = kubelet.registration(async |mut client| client.get_info(plugin::InfoRequest {}).await);
    assert_eq!(info.await.unwrap().into_inner().endpoint, "/as/the/kubelet/sees/it.sock");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_registration_that_fails_or_does_not_come_gets_a_new_socket() {
    let (kubelet, running) = node(&FakeRunner::new()).await;
    until(|| inode(&kubelet).is_some()).await;
    let first = inode(&kubelet);
    kubelet.notify("no such node").await;
    until(|| inode(&kubelet) != first).await;
    assert!(inode(&kubelet).is_some(), "there is a socket at any time");
    let (second, began) = (inode(&kubelet), Instant::now());
    until(|| inode(&kubelet) != second).await;
    assert!((30..=121).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    kubelet.notify("").await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_registration_socket_that_is_gone_is_made_again() {
    let (kubelet, running) = node(&FakeRunner::new()).await;
    until(|| inode(&kubelet).is_some()).await;
    kubelet.notify("").await;
    fs::remove_file(kubelet.registration_socket()).unwrap();
    until(|| inode(&kubelet).is_some()).await;
    kubelet.notify("").await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_takes_the_sockets_over_and_the_old_agent_leaves_them() {
    let (kubelet, old) = node(&FakeRunner::new()).await;
    until(|| inode(&kubelet).is_some()).await;
    kubelet.notify("").await;
    let registered = inode(&kubelet);
    let new = Running::start(kubelet.settings(), &FakeRunner::new()).await;
    until(|| inode(&kubelet) != registered).await;
    kubelet.notify("").await;
    let taken = inode(&kubelet);
    // Both run for a while: the old one does not take it back.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(inode(&kubelet), taken);
    old.stop().await;
    assert_eq!(inode(&kubelet), taken);
    kubelet.node(async |mut node| node.node_get_info(csi::NodeGetInfoRequest {}).await).await.unwrap();
    new.stop().await;
    assert_eq!(inode(&kubelet), None);
}

#[tokio::test(start_paused = true)]
async fn a_registration_directory_that_comes_later_is_found() {
    let kubelet = Kubelet::new();
    let directory = kubelet.path("kubelet/plugins_registry");
    fs::remove_dir(&directory).unwrap();
    let running = Running::start(kubelet.settings(), &FakeRunner::new()).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    fs::create_dir(&directory).unwrap();
    until(|| inode(&kubelet).is_some()).await;
    running.stop().await;
}
