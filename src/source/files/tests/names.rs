//! Names that streams subscribe to: when they are followed, and what that costs.

use super::*;
use crate::metrics::{Agent, Format, HangingPaths};

/// Longer than a value is kept without streams.
const LINGER: Duration = Duration::from_secs(301);

fn roots_at(path: &Path) -> Key {
    key_of(&format!("file-root:{}", path.display()))
}

impl Mount {
    /// Waits until `key` is no longer followed.
    async fn forgets(&self, key: &Key) {
        let forgotten = async {
            while self.cache.watch(key).is_some() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, forgotten).await.expect("the name to be forgotten");
    }

    /// Waits until this number of directories is watched.
    async fn watches(&self, expected: usize) {
        let watched = async {
            while self.kernel.watched() != expected {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let watched = tokio::time::timeout(PATIENCE, watched).await;
        watched
            .unwrap_or_else(|_| panic!("{} directories are watched, not {expected}", self.kernel.watched()));
    }
}

#[tokio::test]
async fn a_name_that_never_had_a_value_is_forgotten_with_its_last_stream() {
    let mount = Mount::new();
    mount.follow();
    tokio::task::yield_now().await;
    let before = mount.kernel.watched();
    let directory = mount.temp.path().join("other/deep");
    fs::create_dir_all(&directory).unwrap();
    put(&directory, "bad.pem", "root:x:0:0");
    let path = |name: &str| directory.join(name).display().to_string();
    let names = [
        roots_at(&directory.join("missing.pem")),
        roots_at(&directory.join("bad.pem")),
        key_of(&format!("file-cert:{}~{}", path("missing.pem"), path("bad.pem"))),
    ];
    for round in 0..3 {
        for name in &names {
            let streams = [mount.subscribe(name).await, mount.subscribe(name).await];
            let failed = mount.until(name.clone(), "its failure", |entry| entry.failure().is_some()).await;
            assert!(failed.good.is_none());
            streams[0].rejected(Version::of(b"bad"), "bad");
            let is_watched = async {
                while mount.kernel.watched() <= before {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            let watched = tokio::time::timeout(PATIENCE, is_watched).await;
            assert!(watched.is_ok(), "round {round}: its directories are not watched");
            let [first, last] = streams;
            drop(first);
            tokio::task::yield_now().await;
            assert!(mount.cache.watch(name).is_some(), "a stream is left");
            drop(last);
            mount.forgets(name).await;
            mount.watches(before).await;
            let now = mount.clock.now();
            let (watched, hanging) = (mount.watcher.count(), HangingPaths::default());
            let agent = Agent {
                started: now,
                now,
                watched,
                hanging,
                log_lines_dropped: [("", 0); 2],
                clusters: Vec::new(),
            };
            let text = mount.metrics.encode(&mount.cache, agent, Format::Prometheus);
            assert!(!text.contains(name.name.as_str()), "{text}");
        }
    }
}

#[tokio::test]
async fn a_stream_that_leaves_before_the_source_has_run_leaves_nothing() {
    let mount = Mount::new();
    mount.follow();
    tokio::task::yield_now().await;
    let before = mount.kernel.watched();
    let name = roots_at(&mount.temp.path().join("other/root.pem"));
    for _ in 0..10 {
        drop(mount.cache.subscribe(&name).unwrap());
        mount.forgets(&name).await;
    }
    mount.watches(before).await;
}

#[tokio::test(start_paused = true)]
async fn a_value_is_followed_for_a_while_after_the_last_stream_and_then_forgotten() {
    // Files are polled: the time is virtual.
    let mount = Mount::polled();
    mount.follow();
    tokio::task::yield_now().await;
    let before = mount.kernel.watched();
    let directory = mount.temp.path().join("other");
    fs::create_dir(&directory).unwrap();
    let name = roots_at(&directory.join("root.pem"));
    put(&directory, "root.pem", Files::nth(0).root);
    let stream = mount.subscribe(&name).await;
    mount.serves_version(&name, &Files::nth(0).version(&name.name), "at first").await;
    drop(stream);
    put(&directory, "root.pem", Files::nth(1).root);
    mount.serves_version(&name, &Files::nth(1).version(&name.name), "without a stream").await;
    // A stream that comes back restarts the time.
    tokio::time::sleep(LINGER / 2).await;
    drop(mount.subscribe(&name).await);
    tokio::time::sleep(LINGER / 2 + Duration::from_secs(5)).await;
    assert!(mount.cache.watch(&name).is_some());
    tokio::time::sleep(LINGER).await;
    assert!(mount.cache.watch(&name).is_none());
    mount.watches(before).await;
}

#[tokio::test]
async fn hundreds_of_names_in_one_directory_share_its_watch_and_each_notices_each_change() {
    const NAMES: usize = 250;
    let mount = Mount::new();
    mount.follow();
    // A kubelet's volume, with a file for each name.
    let volume = mount.temp.path().join("volume");
    let write = move |volume: &Path, round: usize| {
        let directory = format!("..{round}");
        fs::create_dir_all(volume.join(&directory)).unwrap();
        for name in 0..NAMES {
            put(&volume.join(&directory), &format!("{name}.pem"), Files::nth(name + round).root);
        }
        symlink(&directory, volume.join("..new")).unwrap();
        fs::rename(volume.join("..new"), volume.join("..data")).unwrap();
    };
    write(&volume, 0);
    for name in 0..NAMES {
        let name = format!("{name}.pem");
        symlink(Path::new("..data").join(&name), volume.join(name)).unwrap();
    }
    let names: Vec<_> = (0..NAMES).map(|name| roots_at(&volume.join(format!("{name}.pem")))).collect();
    let version = |name: usize, round: usize| Files::nth(name + round).version(&names[name].name);
    let mut streams = vec![mount.subscribe(&names[0]).await];
    mount.serves_version(&names[0], &version(0, 0), "the first name").await;
    let watched = mount.kernel.watched();
    for (number, name) in names.iter().enumerate().skip(1) {
        streams.push(mount.subscribe(name).await);
        mount.serves_version(name, &version(number, 0), "at first").await;
    }
    assert_eq!(mount.kernel.watched(), watched, "no name costs a watch of its own");
    let records: Vec<_> = names.iter().map(|name| record(mount.watch(name.clone()))).collect();
    for round in 1..4 {
        let at = volume.clone();
        change(move || {
            write(&at, round);
            fs::remove_dir_all(at.join(format!("..{}", round - 1))).unwrap();
        })
        .await;
        for (number, name) in names.iter().enumerate() {
            mount.serves_version(name, &version(number, round), &format!("round {round}")).await;
        }
    }
    tokio::time::sleep(3 * DEBOUNCE).await;
    for (number, record) in records.iter().enumerate() {
        let expected: Vec<_> = (1..4).map(|round| version(number, round)).collect();
        assert_eq!(*record.lock().unwrap(), expected, "{number}");
    }
    assert_eq!(mount.kernel.watched(), watched);
}

#[tokio::test]
async fn names_of_equal_content_share_what_was_parsed() {
    const SPELLINGS: usize = 100;
    let mount = Mount::new();
    let [one, other] = ["one", "other"].map(|name| mount.temp.path().join(name));
    for directory in [&one, &other] {
        fs::create_dir(directory).unwrap();
        Files::nth(0).write(directory);
    }
    symlink(&one, mount.temp.path().join("link")).unwrap();
    mount.follow();
    let mut names = vec![
        one.join(ROOT_FILE),
        one.join("../one").join(ROOT_FILE),
        mount.temp.path().join("link").join(ROOT_FILE),
        // A copy.
        other.join(ROOT_FILE),
    ];
    names.extend((0..SPELLINGS).map(|number| one.join("./".repeat(number)).join(ROOT_FILE)));
    let names: Vec<_> = names.iter().map(|name| roots_at(name)).collect();
    let mut streams = vec![mount.subscribe(&names[0]).await];
    mount.serves_version(&names[0], &Files::nth(0).version(&names[0].name), "the first name").await;
    for name in &names {
        streams.push(mount.subscribe(name).await);
    }
    for round in 0..3 {
        let files = Files::nth(round);
        for directory in [&one, &other] {
            changes::rename_over(directory, ROOT_FILE, &files.root);
        }
        let mut contents = Vec::new();
        for name in &names {
            mount.serves_version(name, &files.version(&name.name), &format!("round {round}")).await;
            let good = mount.entry(name.clone()).good.unwrap();
            let Secret::TrustBundle(bundle) = &good.secret else { panic!("no roots") };
            contents.push(bundle.roots().as_ptr());
        }
        contents.dedup();
        assert_eq!(contents.len(), 1, "round {round}: it was parsed more than once");
    }
}

#[tokio::test]
async fn removed_files_are_reported_after_any_replacement_by_bad_files() {
    let mount = Mount::new();
    let files = Files::nth(0);
    files.write(&mount.directory());
    mount.follow();
    let path = |name: &str| mount.path(name).display().to_string();
    let names = [
        KEY_PAIR,
        ROOTS,
        key_of(&format!("file-cert:{}~{}", path(CHAIN_FILE), path(KEY_FILE))),
        roots_at(&mount.path(ROOT_FILE)),
    ];
    let mut streams = Vec::new();
    for name in &names {
        streams.push(mount.subscribe(name).await);
        mount.serves_version(name, &files.version(&name.name), "at first").await;
    }
    let remove = || {
        for (name, _) in files.each() {
            let _ = fs::remove_file(mount.path(name));
        }
    };
    for round in 0..3 {
        remove();
        for name in &names {
            let is_removed = |entry: &Entry| entry.failure().is_some_and(|reason| reason == REMOVED);
            let what = format!("{}, round {round}", name.name);
            let entry = mount.until(name.clone(), &what, is_removed).await;
            assert_eq!(entry.good.unwrap().resource.version, files.version(&name.name), "{what}");
        }
        // Bad files take their place.
        put(&mount.directory(), CHAIN_FILE, "root:x:0:0");
        put(&mount.directory(), ROOT_FILE, "root:x:0:0");
        for name in &names {
            let is_bad = |entry: &Entry| entry.failure().is_some_and(|reason| reason != REMOVED);
            mount.until(name.clone(), "the bad files", is_bad).await;
        }
    }
    files.write(&mount.directory());
    for name in &names {
        mount.serves_version(name, &files.version(&name.name), "the return").await;
    }
}
