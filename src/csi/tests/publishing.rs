//! Publish, and publish again.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tonic::Code;

use super::kubelet::{Kubelet, Running, SECRET, Volume, names, node, token, until};
use super::runner::FakeRunner;
use crate::base::limits;
use crate::csi::{NotStarted, TokenSource};

#[tokio::test(start_paused = true)]
async fn a_published_volume_is_a_directory_with_a_socket_for_all_users_of_its_pod() {
    let runner = FakeRunner::new();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[("key-type", "rsa-2048"), ("trust-domain", "prod.example")]);
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(names(&volume.target), ["socket"]);
    assert_eq!(fs::metadata(&volume.target).unwrap().mode() & 0o7777, 0o755);
    let socket = fs::symlink_metadata(volume.socket()).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.mode() & 0o7777, 0o666);
    volume.connect().unwrap();
    let workload = runner.workload(&volume.id).unwrap();
    workload.socket.accept().await.unwrap();
    assert_eq!(workload.pod.to_string(), "Pod shop/web-0");
    assert_eq!((workload.pod.uid.as_str(), workload.pod.service_account.as_str()), ("7f-1", "cart"));
    assert_eq!(workload.attributes.trust_domain.as_deref(), Some("prod.example"));
    assert_eq!(workload.files, None);
    assert_eq!(runner.tokens(&volume.id), [token(&volume.uid, "1")]);
    running.stop().await;
    // Nothing of a volume goes with the agent.
    assert!(volume.socket().exists());
    assert!(runner.stopped().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_path_longer_than_a_sockets_name_is_no_obstacle_to_a_volume() {
    let (kubelet, running) = node(&FakeRunner::new()).await;
    let mut volume = kubelet.volume(1, &[("socket-mode", "0640")]);
    let parent = volume.target.with_file_name("x".repeat(200));
    fs::create_dir_all(&parent).unwrap();
    volume.target = parent.join("mount");
    kubelet.publish(&volume).await.unwrap();
    volume.connect().unwrap();
    assert_eq!(fs::metadata(volume.socket()).unwrap().mode() & 0o7777, 0o640);
    kubelet.unpublish(&volume).await.unwrap();
    assert!(!volume.target.exists());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_is_published_the_moment_its_certificate_is_there() {
    let runner = FakeRunner::silent();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[]);
    let began = Instant::now();
    let published = async {
        kubelet.publish(&volume).await.unwrap();
        began.elapsed()
    };
    let certificate = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        runner.set_answers(true);
    };
    let (took, ()) = tokio::join!(published, certificate);
    assert_eq!(took.as_secs(), 3);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_first_call_waits_ten_seconds_and_later_ones_a_hundred() {
    let runner = FakeRunner::silent();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[]);
    let mut waited = Vec::new();
    for failure in [None, Some("the CA refuses the token"), None] {
        if let Some(failure) = failure {
            runner.set_failure(failure);
        }
        let began = Instant::now();
        let error = kubelet.publish(&volume).await.unwrap_err();
        waited.push((began.elapsed().as_secs(), error.code()));
        assert!(error.message().starts_with("Pod shop/web-0 has no certificate yet"), "{error}");
        assert_eq!(error.message().contains("the CA refuses the token"), error.code() == Code::Unavailable);
    }
    let expected = [(10, Code::DeadlineExceeded), (100, Code::Unavailable), (100, Code::Unavailable)];
    assert_eq!(waited, expected);
    // Its workload goes on, and each call brings a token.
    assert_eq!((runner.started(), runner.tokens(&volume.id).len()), (1, 3));
    assert!(volume.socket().exists());
    runner.set_answers(true);
    kubelet.publish(&volume).await.unwrap();
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_does_not_wait_is_published_at_once() {
    let (kubelet, running) = node(&FakeRunner::silent()).await;
    let began = Instant::now();
    kubelet.publish(&kubelet.volume(1, &[("wait", "false")])).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1));
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_published_volume_stays_as_it_is_whatever_the_ca_does() {
    let runner = FakeRunner::new();
    let (kubelet, running) = node(&runner).await;
    let mut volume = kubelet.volume(1, &[]);
    kubelet.publish(&volume).await.unwrap();
    let inode = fs::metadata(volume.socket()).unwrap().ino();
    runner.set_answers(false);
    runner.set_failure("the CA is unreachable");
    let began = Instant::now();
    kubelet.request(volume.request_with(&token(&volume.uid, "2"))).await.unwrap();
    assert_eq!(runner.tokens(&volume.id), [token(&volume.uid, "1"), token(&volume.uid, "2")]);
    // Neither a missing token, nor another Pod's, nor other attributes are a reason to take it away.
    kubelet.request(volume.request_with(&token("other", "3"))).await.unwrap();
    let mut without = volume.request();
    without.volume_context.remove(super::kubelet::TOKENS);
    kubelet.request(without).await.unwrap();
    volume.attributes = vec![("nonsense", "1")];
    kubelet.publish(&volume).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(runner.tokens(&volume.id).len(), 3, "{:?}", runner.tokens(&volume.id));
    assert_eq!((runner.started(), fs::metadata(volume.socket()).unwrap().ino()), (1, inode));
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_workload_that_no_longer_runs_is_started_again() {
    let runner = FakeRunner::new();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[]);
    kubelet.publish(&volume).await.unwrap();
    runner.lose();
    // Even then an error is none that makes the kubelet forget the volume.
    runner.refuse(Some(NotStarted { reason: "no room".to_owned(), is_retryable: false }));
    let error = kubelet.publish(&volume).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Unavailable, "no room"));
    assert!(volume.socket().exists());
    runner.refuse(None);
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(runner.tokens(&volume.id).len(), 1);
    volume.connect().unwrap();
    runner.workload(&volume.id).unwrap().socket.accept().await.unwrap();
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_fails_for_good_leaves_nothing_behind() {
    let runner = FakeRunner::silent();
    let (kubelet, running) = node(&runner).await;
    let refusals = [(false, Code::FailedPrecondition, false), (true, Code::Unavailable, true)];
    for (number, (is_retryable, code, stays)) in refusals.into_iter().enumerate() {
        let volume = kubelet.volume(number, &[]);
        runner.refuse(Some(NotStarted { reason: "no such trust domain".to_owned(), is_retryable }));
        let error = kubelet.publish(&volume).await.unwrap_err();
        assert_eq!((error.code(), error.message()), (code, "no such trust domain"));
        // The kubelet will remove what may be mounted, and only that.
        assert_eq!(volume.target.exists(), stays);
        assert_eq!(running.driver.volumes(), usize::from(stays));
        kubelet.unpublish(&volume).await.unwrap();
    }
    // A later call that fails for good ends what an earlier one has begun.
    runner.refuse(None);
    let mut volume = kubelet.volume(5, &[]);
    assert_eq!(kubelet.publish(&volume).await.unwrap_err().code(), Code::DeadlineExceeded);
    assert!(volume.socket().exists() && runner.running() == 1);
    volume.attributes = vec![("files", "perhaps")];
    assert_eq!(kubelet.publish(&volume).await.unwrap_err().code(), Code::InvalidArgument);
    assert!(!volume.target.exists());
    // Containers could change what the agent writes.
    let writable = Volume { is_writable: true, ..kubelet.volume(6, &[("files", "true")]) };
    let refused = kubelet.publish(&writable).await.unwrap_err();
    assert!(
        refused.code() == Code::InvalidArgument && refused.message().contains("readOnly: true"),
        "{refused}"
    );
    assert_eq!((runner.running(), running.driver.volumes()), (0, 0));
    assert!(names(&kubelet.path("")).iter().all(|name| name == "kubelet"), "no record either");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_second_call_about_a_volume_is_aborted_and_other_volumes_are_not_concerned() {
    let runner = FakeRunner::silent();
    let (kubelet, running) = node(&runner).await;
    let (volume, other) = (kubelet.volume(1, &[]), kubelet.volume(2, &[("wait", "false")]));
    let first = async { kubelet.publish(&volume).await.unwrap_err().code() };
    let second = async {
        until(|| volume.socket().exists() && runner.running() == 1).await;
        kubelet.publish(&other).await.unwrap();
        kubelet.publish(&volume).await.unwrap_err().code()
    };
    assert_eq!(tokio::join!(first, second), (Code::DeadlineExceeded, Code::Aborted));
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_the_kubelet_gives_up_is_in_nothings_way() {
    let runner = FakeRunner::silent();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[]);
    timeout(Duration::from_secs(5), kubelet.publish(&volume)).await.unwrap_err();
    runner.set_answers(true);
    until(|| volume.socket().exists()).await;
    kubelet.publish(&volume).await.unwrap();
    assert_eq!(runner.started(), 1);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_stops_keeps_no_call_waiting() {
    let runner = FakeRunner::silent();
    let (kubelet, running) = node(&runner).await;
    let volume = kubelet.volume(1, &[]);
    let began = Instant::now();
    let waiting = async { kubelet.publish(&volume).await.unwrap_err() };
    let stopping = async {
        until(|| runner.running() == 1).await;
        running.stop().await;
    };
    let (error, ()) = tokio::join!(waiting, stopping);
    assert_eq!(error.code(), Code::Unavailable);
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn the_number_of_volumes_is_bounded() {
    let (kubelet, running) = node(&FakeRunner::new()).await;
    for number in 0..limits::VOLUMES {
        running.driver.hold(number);
    }
    let error = kubelet.publish(&kubelet.volume(1, &[])).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_token_of_its_own_a_workload_needs_none() {
    let runner = FakeRunner::new();
    let kubelet = Kubelet::new();
    let settings = crate::csi::DriverSettings { impersonates: true, ..kubelet.settings() };
    let running = Running::start(settings, &runner).await;
    let volume = kubelet.volume(1, &[]);
    let mut request = volume.request();
    request.volume_context.remove(super::kubelet::TOKENS);
    for _ in 0..2 {
        kubelet.request(request.clone()).await.unwrap();
    }
    assert!(runner.tokens(&volume.id).is_empty() && runner.started() == 1);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_token_is_in_no_record_no_message_and_no_debug_output() {
    let runner = FakeRunner::new();
    let kubelet = Kubelet::new();
    let settings = crate::csi::DriverSettings { token_source: TokenSource::Secrets, ..kubelet.settings() };
    let running = Running::start(settings, &runner).await;
    let volume = kubelet.volume(1, &[]);
    let mut request = volume.request();
    let error = kubelet.request(request.clone()).await.unwrap_err();
    assert!(error.message().contains("--csi-token-source") && !error.message().contains(SECRET), "{error}");
    let tokens = request.volume_context.remove(super::kubelet::TOKENS).unwrap();
    request.secrets.insert(super::kubelet::TOKENS.to_owned(), tokens);
    assert!(!format!("{request:?}").contains(SECRET));
    kubelet.request(request.clone()).await.unwrap();
    assert!(!format!("{:?}", runner.workload(&volume.id)).contains(SECRET));
    let record =
        fs::read_to_string(kubelet.path("state/volumes").join(format!("{}.json", volume.id))).unwrap();
    assert!(record.contains("web-0") && !record.contains(SECRET) && !record.contains("token"), "{record}");
    running.stop().await;
}
