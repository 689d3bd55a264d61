//! Real directories under a kernel that refuses watches when told to.

use std::io::Write;
use std::time::Duration;

use tracing::subscriber::DefaultGuard;

use super::inotify::{Change, Report, Watching};
use super::*;

/// What was logged on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Captures until the guard is dropped.
    fn capture() -> (Self, DefaultGuard) {
        let log = Self::default();
        let writer = {
            let log = log.clone();
            move || log.clone()
        };
        let subscriber = tracing_subscriber::fmt().with_writer(writer).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn count(&self, text: &str) -> usize {
        String::from_utf8(lock(&self.0).clone()).unwrap().matches(text).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

const LIMIT: &str = "inotify limit reached";
const RECOVERY: &str = "inotify available again";

#[tokio::test(start_paused = true)]
async fn without_inotify_each_round_asks_for_a_look() {
    let directory = tempfile::tempdir().unwrap();
    let (watcher, kernel) = testing::watcher();
    kernel.refuse_watches();
    let mut watch = watcher.watch(vec![directory.path().join("file")]);
    watch.arm();
    for _ in 0..3 {
        let wake = tokio::time::timeout(poll::INTERVAL, watch.changed()).await;
        assert_eq!(wake.expect("a round"), Wake::Poll);
    }
}

#[tokio::test(start_paused = true)]
async fn a_requested_look_wakes_every_watch_also_those_apart() {
    let directory = tempfile::tempdir().unwrap();
    let (watcher, _kernel) = testing::watcher();
    let apart = watcher.apart();
    let mut watches = [&watcher, &watcher, &apart].map(|it| it.watch(vec![directory.path().join("file")]));
    for watch in &mut watches {
        watch.arm();
        assert!(tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.is_err());
    }
    watcher.look_again();
    for watch in &watches {
        let wake = tokio::time::timeout(Duration::from_secs(60), watch.changed()).await;
        assert_eq!(wake, Ok(Wake::Event));
    }
}

#[test]
fn a_directory_that_was_just_removed_is_not_taken_for_a_watched_one() {
    let directory = tempfile::tempdir().unwrap();
    let removed = directory.path().join("removed");
    let change = Change { unwatch: Vec::new(), watch: vec![removed.clone()] };
    let outcomes = Inotify::new(SharedIndex::default()).update(Report::Names, change);
    assert!(matches!(outcomes[&removed], Watching::Gone), "its successor may have the same inode number");
}

#[test]
fn one_bad_path_keeps_no_other_one_from_being_watched() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["first", "last"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    let unwatch = vec![path("never watched")];
    let change = Change { unwatch, watch: ["first", "missing", "last"].map(path).into() };
    let outcomes = Inotify::new(SharedIndex::default()).update(Report::Content, change);
    let is_watched = |name| matches!(outcomes[&path(name)], Watching::Ok);
    assert_eq!(["first", "missing", "last"].map(is_watched), [true, false, true]);
}

#[test]
fn a_thread_that_hangs_in_inotify_keeps_nobody_else_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let (watcher, _kernel) = testing::watcher();
    let stuck = watcher.0.notifier.lock().unwrap();
    let mut watch = watcher.watch(vec![directory.path().join("file")]);
    watch.arm();
    assert!(watch.polls(), "until inotify answers");
    assert_eq!(watch.activity(&Lookups::default()), Activity::None);
    drop(stuck);
    watch.arm();
    assert!(!watch.polls());
}

#[test]
fn a_path_that_leads_elsewhere_by_the_time_it_is_watched_hides_no_event() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["mount", "beside"] {
        std::fs::create_dir(path(name)).unwrap();
        std::fs::write(path(name).join("file"), "old").unwrap();
    }
    let (watcher, kernel) = testing::watcher();
    let [mut late, mut watch] = ["mount/file", "beside/file"].map(|name| watcher.watch(vec![path(name)]));
    watch.arm();
    let lookups = late.look(1000, |_| None).lookups;
    std::fs::rename(path("mount"), path("gone")).unwrap();
    std::os::unix::fs::symlink("beside", path("mount")).unwrap();
    late.follow(lookups);
    kernel.catch_up();
    let lookups = watch.look(1000, |_| None).lookups;
    std::fs::write(path("beside/file"), "new").unwrap();
    kernel.catch_up();
    assert_eq!(watch.activity(&lookups), Activity::Change);
}

#[test]
fn a_file_that_appears_where_writes_are_not_reported_is_a_change_until_it_is_followed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (watcher, kernel) = testing::watcher();
    let mut watch = watcher.watch(vec![path("file")]);
    watch.arm();
    for number in 0..64 {
        std::fs::write(path(&format!("log-{number}")), "a line").unwrap();
    }
    kernel.catch_up();
    watch.arm();
    // Its writer has not closed it.
    let mut file = std::fs::File::create(path("file")).unwrap();
    let mut activity = || {
        kernel.catch_up();
        let lookups = watch.look(1000, |_| None).lookups;
        let activity = watch.activity(&lookups);
        watch.follow(lookups);
        activity
    };
    assert_eq!([activity(), activity()], [Activity::Change, Activity::None]);
    file.write_all(b"more").unwrap();
    assert_eq!(activity(), Activity::Open, "now it is watched itself");
    drop(file);
    assert_eq!(activity(), Activity::None);
}

#[tokio::test(start_paused = true)]
async fn the_limit_and_the_recovery_are_each_logged_once() {
    let (log, _guard) = Log::capture();
    let directory = tempfile::tempdir().unwrap();
    let (watcher, kernel) = testing::watcher();
    kernel.refuse_watches();
    let mut watches = ["one", "two"].map(|name| watcher.watch(vec![directory.path().join(name)]));
    watches.iter_mut().for_each(Watch::arm);
    tokio::time::sleep(3 * poll::INTERVAL).await;
    assert_eq!((log.count(LIMIT), log.count(RECOVERY)), (1, 0));
    assert_eq!((watcher.count().inotify, watches[0].polls()), (0, true));
    kernel.accept_watches();
    for watch in &mut watches {
        // The first look at a file is new, so each watch is woken in the next round in any case.
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.expect("a round");
        watch.arm();
    }
    assert_eq!((log.count(LIMIT), log.count(RECOVERY)), (1, 1));
    assert_eq!((watcher.count().polling, watches[0].polls()), (0, false));
}

#[tokio::test(start_paused = true)]
async fn dropping_watches_logs_no_recovery() {
    let (log, _guard) = Log::capture();
    let [watched, refused] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (watcher, kernel) = testing::watcher();
    let mut first = watcher.watch(vec![watched.path().join("file")]);
    first.arm();
    kernel.refuse_watches();
    let mut second = watcher.watch(vec![refused.path().join("file")]);
    second.arm();
    assert_eq!((first.polls(), second.polls()), (false, true));
    drop(second);
    drop(first);
    assert_eq!((log.count(LIMIT), log.count(RECOVERY)), (1, 0), "at shutdown nothing recovers");
    assert_eq!(kernel.watched(), 0);
}

/// A directory with a link to a file, and two watches: the second one needs to know of writes to the directory's files.
fn a_link_and_a_file(watcher: &Watcher) -> (tempfile::TempDir, [Watch; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::create_dir(path("target")).unwrap();
    std::fs::write(path("target/file"), "old").unwrap();
    std::os::unix::fs::symlink("target/file", path("link")).unwrap();
    std::fs::write(path("file"), "old").unwrap();
    let watches = ["link", "file"].map(|name| watcher.watch(vec![path(name)]));
    (directory, watches)
}

fn swap_link(directory: &Path, target: &str) {
    std::os::unix::fs::symlink(target, directory.join("new")).unwrap();
    std::fs::rename(directory.join("new"), directory.join("link")).unwrap();
}

/// Each round, until both are watched by inotify again.
async fn recover(watches: &mut [Watch; 2]) {
    for _ in 0..2 {
        tokio::time::sleep(poll::INTERVAL).await;
        watches.iter_mut().for_each(Watch::arm);
    }
    assert_eq!(watches.each_ref().map(Watch::polls), [false, false]);
}

#[tokio::test(start_paused = true)]
async fn at_the_limit_a_watch_that_needs_more_of_a_directory_takes_nothing_from_the_others() {
    let (log, _guard) = Log::capture();
    let elsewhere = tempfile::tempdir().unwrap();
    let (watcher, kernel) = testing::watcher();
    let (directory, mut watches) = a_link_and_a_file(&watcher);
    let [link, file] = &mut watches;
    link.arm();
    kernel.refuse_watches();
    let mut refused = watcher.watch(vec![elsewhere.path().join("file")]);
    refused.arm();
    file.arm();
    assert_eq!([link.polls(), file.polls(), refused.polls()], [false, true, true]);
    link.arm();
    assert!(!link.polls());
    assert_eq!(watcher.count().polling, 2);
    swap_link(directory.path(), "file");
    kernel.catch_up();
    let wake = tokio::time::timeout(Duration::from_secs(60), link.changed()).await;
    assert_eq!(wake, Ok(Wake::Event));
    drop(refused);
    link.arm();
    assert_eq!((log.count(LIMIT), log.count(RECOVERY)), (1, 0), "one of them still polls");
    kernel.accept_watches();
    recover(&mut watches).await;
    assert_eq!((log.count(LIMIT), log.count(RECOVERY)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_watch_polls_once_inotify_refuses_a_directory_that_it_watched_before() {
    let (watcher, kernel) = testing::watcher();
    let (_directory, mut watches) = a_link_and_a_file(&watcher);
    let [link, file] = &mut watches;
    link.arm();
    assert!(!link.polls());
    kernel.refuse_watches();
    file.arm();
    let wake = tokio::time::timeout(Duration::from_secs(60), link.changed()).await;
    assert_eq!(wake, Ok(Wake::Event), "it has to follow again");
    link.arm();
    assert_eq!([link.polls(), file.polls()], [true, true]);
    kernel.accept_watches();
    recover(&mut watches).await;
}

#[tokio::test(start_paused = true)]
#[expect(clippy::await_holding_lock, reason = "another thread has it")]
async fn a_watch_polls_while_another_thread_is_to_change_what_it_watches() {
    let (watcher, _kernel) = testing::watcher();
    let (_directory, [mut link, mut file]) = a_link_and_a_file(&watcher);
    link.arm();
    let stuck = watcher.0.notifier.lock().unwrap();
    file.arm();
    let wake = tokio::time::timeout(Duration::from_secs(60), link.changed()).await;
    assert_eq!(wake, Ok(Wake::Event), "it has to follow again");
    link.arm();
    assert!(link.polls());
    drop(stuck);
    link.arm();
    assert!(!link.polls());
}
