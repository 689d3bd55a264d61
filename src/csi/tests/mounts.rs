//! Volumes with files. These tests run in namespaces of their own, in which every user may mount.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::mount::MountFlags;
use tonic::Code;

use super::kubelet::{Kubelet, Running, Volume, node};
use super::runner::FakeRunner;
use crate::csi::mounts::Mount;
use crate::csi::target::Target;
use crate::fs::disk::Disk;

/// Set in the namespaces.
const INSIDE: &str = "ATTACHE_TEST_IN_NAMESPACE";

/// True inside new namespaces; outside it runs the test of this name in them.
fn is_inside(flags: &str, test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let tried = Command::new("unshare")
        .args([flags, "true"])
        .output()
        .expect("this test needs unshare, of util-linux");
    let error = String::from_utf8_lossy(&tried.stderr);
    assert!(
        tried.status.success(),
        "this test needs user namespaces, and there are none ({error}): sysctl user.max_user_namespaces, \
         kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns decide"
    );
    let mut command = Command::new("unshare");
    command.arg(flags).arg(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("csi::tests::mounts::{test}"), "--nocapture"]).env(INSIDE, "1");
    let ran = command.output().unwrap();
    let output = [ran.stdout, ran.stderr].concat();
    let output = String::from_utf8_lossy(&output);
    assert!(ran.status.success() && output.contains("1 passed"), "{output}");
    false
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(test);
}

/// Mounts a file system on `directory` that does not answer until the descriptor is closed.
fn mount_dead(directory: &Path) -> fs::File {
    let opened = fs::File::options().read(true).write(true).open("/dev/fuse");
    let device = opened
        .expect("this test opens /dev/fuse: load the module fuse, and give every user access (mode 0666)");
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount("dead", directory, "fuse", MountFlags::empty(), options.as_c_str()).unwrap();
    device
}

fn mounts_on(target: &Path) -> usize {
    let target = target.canonicalize().unwrap_or_else(|_| target.to_owned());
    Mount::all().unwrap().iter().filter(|mount| mount.point == target).count()
}

fn with_files(kubelet: &Kubelet, number: usize) -> Volume {
    kubelet.volume(number, &[("files", "true")])
}

#[test]
fn a_volume_with_files_is_one_bounded_file_system() {
    if !is_inside("-rm", "a_volume_with_files_is_one_bounded_file_system") {
        return;
    }
    run(async {
        let runner = FakeRunner::new();
        let (kubelet, running) = node(&runner).await;
        let volume = Volume { group: "0", ..with_files(&kubelet, 1) };
        for _ in 0..3 {
            kubelet.publish(&volume).await.unwrap();
        }
        assert_eq!(mounts_on(&volume.target), 1);
        let files = runner.workload(&volume.id).unwrap().files.clone().unwrap();
        assert_eq!((files.directory.as_path(), files.group), (volume.target.as_path(), Some(0)));
        assert_eq!(fs::metadata(&volume.target).unwrap().mode() & 0o7777, 0o755);
        let list = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = list.lines().find(|line| line.contains(" csi.attache.dev ")).unwrap();
        for option in ["nosuid", "nodev", "noexec", "size=4096k", "nr_inodes=1024"] {
            assert!(line.contains(option), "{option}: {line}");
        }
        let error = fs::write(volume.target.join("large"), vec![0; 5 << 20]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        volume.connect().unwrap();
        kubelet.unpublish(&volume).await.unwrap();
        assert!(mounts_on(&volume.target) == 0 && !volume.target.exists());
        running.stop().await;
    });
}

#[test]
fn a_volume_is_unpublished_however_often_it_is_mounted() {
    if !is_inside("-rm", "a_volume_is_unpublished_however_often_it_is_mounted") {
        return;
    }
    run(async {
        let (kubelet, running) = node(&FakeRunner::new()).await;
        let volume = with_files(&kubelet, 1);
        kubelet.publish(&volume).await.unwrap();
        for _ in 0..2 {
            let directory = fs::File::open(&volume.target).unwrap();
            crate::csi::mounts::mount_memory(&directory, "csi.attache.dev").unwrap();
        }
        assert_eq!(mounts_on(&volume.target), 3);
        fs::write(volume.target.join("key.pem"), "").unwrap();
        kubelet.unpublish(&volume).await.unwrap();
        assert!(mounts_on(&volume.target) == 0 && !volume.target.exists());
        kubelet.unpublish(&volume).await.unwrap();
        running.stop().await;
    });
}

#[test]
fn a_dead_disk_of_one_pod_delays_no_other() {
    if !is_inside("-rm", "a_dead_disk_of_one_pod_delays_no_other") {
        return;
    }
    // Virtual time would stand still while a disk is waited for.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let runner = FakeRunner::new();
        let kubelet = Kubelet::new();
        let disk = Disk::default().within(Duration::from_millis(500));
        let running = Running::start_with(kubelet.settings(), &runner, disk).await;
        let [dead, live] = [1, 2].map(|number| kubelet.volume(number, &[]));
        let device = mount_dead(dead.target.parent().unwrap());
        for _ in 0..3 {
            let (failed, published) = tokio::join!(kubelet.publish(&dead), kubelet.publish(&live));
            published.unwrap();
            let error = failed.unwrap_err();
            assert_eq!(error.code(), Code::Unavailable);
            assert!(error.message().contains("does not answer"), "{error}");
        }
        let (failed, unpublished) = tokio::join!(kubelet.unpublish(&dead), kubelet.unpublish(&live));
        unpublished.unwrap();
        assert_eq!(failed.unwrap_err().code(), Code::Unavailable);
        assert!(!live.target.exists());
        drop(device);
        running.stop().await;
    });
}

#[test]
fn a_group_takes_a_right_only_where_the_socket_is_not_for_all() {
    // Where there is no other group than root's.
    if !is_inside("-r", "a_group_takes_a_right_only_where_the_socket_is_not_for_all") {
        return;
    }
    run(async {
        let (kubelet, running) = node(&FakeRunner::new()).await;
        kubelet.publish(&Volume { group: "2000", ..kubelet.volume(1, &[]) }).await.unwrap();
        let volume = Volume { group: "2000", ..kubelet.volume(2, &[("socket-mode", "0660")]) };
        let error = kubelet.publish(&volume).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("CHOWN") && error.message().contains("0666"), "{error}");
        assert!(!volume.target.exists());
        running.stop().await;
    });
}

#[test]
fn nothing_beneath_another_mount_is_removed() {
    if !is_inside("-rm", "nothing_beneath_another_mount_is_removed") {
        return;
    }
    run(async {
        let (kubelet, running) = node(&FakeRunner::new()).await;
        let volume = kubelet.volume(1, &[]);
        kubelet.publish(&volume).await.unwrap();
        let (precious, inner) = (kubelet.path("precious"), volume.target.join("inner"));
        for directory in [&precious, &inner] {
            fs::create_dir(directory).unwrap();
        }
        fs::write(precious.join("file"), "").unwrap();
        rustix::mount::mount_bind(&precious, &inner).unwrap();
        kubelet.unpublish(&volume).await.unwrap();
        assert!(precious.join("file").exists());
        running.stop().await;
    });
}

#[test]
fn after_a_restart_or_a_reboot_a_volume_with_files_is_mounted_once_in_the_same_directory() {
    let name = "after_a_restart_or_a_reboot_a_volume_with_files_is_mounted_once_in_the_same_directory";
    if !is_inside("-rm", name) {
        return;
    }
    run(async {
        let kubelet = Kubelet::new();
        let mut running = Running::start(kubelet.settings(), &FakeRunner::new()).await;
        let volume = with_files(&kubelet, 1);
        kubelet.publish(&volume).await.unwrap();
        let parent =
            |path: &Path| Target::parse(path.to_str().unwrap(), &kubelet.settings().kubelet_dir).unwrap();
        for is_reboot in [false, true, false] {
            running.stop().await;
            if is_reboot {
                let parent = parent(&volume.target).open_parent().unwrap();
                crate::csi::mounts::unmount_newest(&parent, Path::new("mount")).unwrap();
                assert_eq!(mounts_on(&volume.target), 0);
            }
            let runner = FakeRunner::new();
            running = Running::start(kubelet.settings(), &runner).await;
            assert_eq!((mounts_on(&volume.target), runner.running()), (1, 1));
            kubelet.publish(&volume).await.unwrap();
            assert_eq!(mounts_on(&volume.target), 1);
            volume.connect().unwrap();
        }
        // The Pod goes while no agent runs, and the record is lost.
        running.stop().await;
        fs::remove_dir_all(kubelet.path("state")).unwrap();
        fs::remove_file(volume.target.with_file_name("vol_data.json")).unwrap();
        let running = Running::start(kubelet.settings(), &FakeRunner::new()).await;
        assert!(mounts_on(&volume.target) == 0 && !volume.target.exists());
        running.stop().await;
    });
}

#[test]
fn mounts_that_pods_would_not_see_are_refused() {
    if !is_inside("-rm", "mounts_that_pods_would_not_see_are_refused") {
        return;
    }
    run(async {
        let (kubelet, running) = node(&FakeRunner::new()).await;
        // As in a container without mountPropagation.
        let directory = kubelet.path("kubelet/pods");
        rustix::mount::mount_bind(&directory, &directory).unwrap();
        let volume = with_files(&kubelet, 1);
        let error = kubelet.publish(&volume).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("mountPropagation: Bidirectional"), "{error}");
        assert!(mounts_on(&volume.target) == 0 && !volume.target.exists());
        running.stop().await;
    });
}

#[test]
fn without_the_right_to_mount_the_privileged_manifest_is_named() {
    // A user namespace alone: the mounts are another one's.
    if !is_inside("-r", "without_the_right_to_mount_the_privileged_manifest_is_named") {
        return;
    }
    run(async {
        let runner = FakeRunner::new();
        let (kubelet, running) = node(&runner).await;
        let volume = with_files(&kubelet, 1);
        let error = kubelet.publish(&volume).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("privileged: true"), "{error}");
        assert!(!volume.target.exists() && runner.started() == 0);
        // Without files it takes no right.
        kubelet.publish(&kubelet.volume(2, &[])).await.unwrap();
        running.stop().await;
    });
}
