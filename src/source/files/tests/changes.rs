//! Every way to change files, under every kind of name, many times: each generation is published once, and nothing
//! else is.

use tokio::task::JoinSet;

use super::*;
use crate::fs::pending::PendingOperations;

const SHORT: Duration = Duration::from_millis(4);
/// Longer than a window, so that half of a change is reported.
const LONG: Duration = Duration::from_millis(60);

/// A way to change files, and the number of rounds.
type Way = (&'static str, usize, Rotation);

pub(super) fn rename_over(directory: &Path, name: &str, content: &[u8]) {
    put(directory, "new", content);
    fs::rename(directory.join("new"), directory.join(name)).unwrap();
}

fn link_over(path: &Path, target: impl AsRef<Path>) {
    let beside = path.with_extension("link");
    symlink(target, &beside).unwrap();
    fs::rename(beside, path).unwrap();
}

/// A new directory beside `at` with these files.
fn elsewhere(at: &Path, files: &Files) -> PathBuf {
    let directory = at.with_file_name(format!("elsewhere-{}", count()));
    fs::create_dir(&directory).unwrap();
    files.write(&directory);
    directory
}

/// Overwrites each file in place, in the `order`-th of the six possible orders, with a pause after each.
fn in_order(at: &Path, files: &Files, order: usize, rest: Duration) {
    let mut left = files.each().to_vec();
    for (name, content) in [left.remove(order / 2), left.remove(order % 2), left.remove(0)] {
        put(at, name, content);
        pause(rest);
    }
}

/// Overwrites each file in place without closing it, block by block: every state in between can be parsed.
fn slowly(at: &Path, files: &Files, rest: Duration) {
    use std::io::Write as _;
    for (name, content) in files.each() {
        let mut file = fs::File::create(at.join(name)).unwrap();
        let text = String::from_utf8(content.to_vec()).unwrap();
        for block in text.split_inclusive("-----END CERTIFICATE-----\n") {
            file.write_all(block.as_bytes()).unwrap();
            pause(rest);
        }
    }
}

/// Overwrites each file in place, and closes it after each half: no half can be parsed.
fn in_halves(at: &Path, files: &Files, rest: Duration) {
    use std::io::Write as _;
    for (name, content) in files.each() {
        let (head, tail) = content.split_at(100);
        put(at, name, head);
        pause(rest);
        fs::File::options().append(true).open(at.join(name)).unwrap().write_all(tail).unwrap();
        pause(rest);
    }
}

/// Swaps a link in the middle of a chain of links, as CSI drivers do.
fn swap_in_the_middle(at: &Path, files: &Files) {
    let store = at.with_file_name("store");
    let target = elsewhere(at, files);
    fs::create_dir_all(&store).unwrap();
    link_over(&store.join("newest"), Path::new("..").join(target.file_name().unwrap()));
    if fs::read_link(at.join("..data")).is_err() {
        symlink("../store/current", at.join("..data")).unwrap();
        symlink("newest", store.join("current")).unwrap();
        for (name, _) in files.each() {
            link_over(&at.join(name), Path::new("..data").join(name));
        }
    }
}

const WAYS: [Way; 21] = [
    ("overwriting in each order", 12, |at, files| in_order(at, files, count() % 6, Duration::ZERO)),
    ("overwriting in each order with short pauses", 12, |at, files| {
        in_order(at, files, count() % 6, SHORT);
    }),
    ("overwriting in each order with long pauses", 7, |at, files| in_order(at, files, count() % 6, LONG)),
    ("overwriting slowly, with short pauses", 10, |at, files| slowly(at, files, SHORT)),
    ("overwriting slowly, with long pauses", 4, |at, files| slowly(at, files, LONG)),
    ("overwriting in halves, with short pauses", 10, |at, files| in_halves(at, files, SHORT)),
    ("overwriting in halves, with long pauses", 4, |at, files| in_halves(at, files, LONG)),
    ("renaming over, with long pauses", 4, |at, files| {
        for (name, content) in files.each() {
            rename_over(at, name, content);
            pause(LONG);
        }
    }),
    ("a kubelet swap, the old directory deleted later", 10, |at, files| {
        swap(at, files, |old| {
            pause(LONG);
            fs::remove_dir_all(old).unwrap();
        });
    }),
    ("a swap in the middle of a chain of links", 12, swap_in_the_middle),
    ("deleting all, then creating all", 10, |at, files| {
        files.each().iter().for_each(|(name, _)| fs::remove_file(at.join(name)).unwrap());
        files.write(at);
    }),
    ("deleting all, creating one after the other, with long pauses", 4, |at, files| {
        files.each().iter().for_each(|(name, _)| fs::remove_file(at.join(name)).unwrap());
        pause(LONG);
        in_order(at, files, count() % 6, LONG);
    }),
    ("removing the directory and creating it again much later", 4, |at, files| {
        fs::remove_dir_all(at).unwrap();
        pause(LONG);
        fs::create_dir(at).unwrap();
        pause(SHORT);
        files.write(at);
    }),
    ("moving the directory away and back", 4, |at, files| {
        let away = at.with_extension("away");
        fs::rename(at, &away).unwrap();
        pause(LONG);
        files.write(&away);
        fs::rename(&away, at).unwrap();
    }),
    ("a link to a directory in its place, swapped slowly", 4, |at, files| {
        let _ = fs::remove_file(at).or_else(|_| fs::remove_dir_all(at));
        pause(LONG);
        symlink(elsewhere(at, files), at).unwrap();
    }),
    ("hard links to files elsewhere", 10, |at, files| {
        let elsewhere = elsewhere(at, files);
        for (name, _) in files.each() {
            fs::remove_file(at.join(name)).unwrap();
            fs::hard_link(elsewhere.join(name), at.join(name)).unwrap();
        }
    }),
    ("overwriting hard links elsewhere", 10, |at, files| {
        let elsewhere = at.with_file_name("hard-links");
        if !elsewhere.exists() {
            fs::create_dir(&elsewhere).unwrap();
            for (name, _) in files.each() {
                fs::hard_link(at.join(name), elsewhere.join(name)).unwrap();
                // A new hard link is no event for the source, but these changes of the file are.
                rename_over(at, "beside", b"");
                fs::rename(at.join(name), at.join("beside")).unwrap();
                fs::rename(at.join("beside"), at.join(name)).unwrap();
            }
            pause(LONG);
        }
        files.write(&elsewhere);
    }),
    ("a link, then a file, then a link", 10, |at, files| {
        let elsewhere = elsewhere(at, files);
        for (name, content) in files.each() {
            match fs::read_link(at.join(name)) {
                Err(_) => link_over(&at.join(name), elsewhere.join(name)),
                Ok(_) => rename_over(at, name, content),
            }
        }
    }),
    ("overwriting the file behind a link", 10, |at, files| {
        for (name, content) in files.each() {
            let target = at.with_file_name(format!("target-of-{name}"));
            if fs::read_link(at.join(name)).is_err() {
                fs::copy(at.join(name), &target).unwrap();
                link_over(&at.join(name), &target);
            }
            fs::write(target, content).unwrap();
        }
    }),
    ("copying with the times of the originals", 10, |at, files| {
        for (name, content) in files.each() {
            rename_over(at, name, content);
            let file = fs::File::options().write(true).open(at.join(name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }
    }),
    ("the key long after the chain", 4, |at, files| {
        put(at, ROOT_FILE, &files.root);
        put(at, CHAIN_FILE, &files.chain);
        pause(3 * LONG);
        rename_over(at, KEY_FILE, &files.key);
    }),
];

/// `path` relative to the working directory.
fn relative(path: &Path) -> PathBuf {
    let here = std::env::current_dir().unwrap().canonicalize().unwrap();
    let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
    up.join(path.canonicalize().unwrap().strip_prefix("/").unwrap())
}

/// Names of every kind for the files in the mounted directory, which must exist.
fn names_for(mount: &Mount) -> Vec<Key> {
    let beside = mount.temp.path().join("beside");
    fs::create_dir(&beside).unwrap();
    symlink("../mount", beside.join("link")).unwrap();
    let direct = mount.directory();
    let around = beside.join("../mount");
    let through = beside.join("link");
    let relative = relative(mount.temp.path()).join("mount");
    let mut names = vec![KEY_PAIR, ROOTS];
    for directory in [direct, around, through, relative] {
        let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
        names.push(key_of(&format!("file-cert:{}~{}", path(CHAIN_FILE), path(KEY_FILE))));
        names.push(key_of(&format!("file-root:{}", path(ROOT_FILE))));
    }
    names
}

/// Changes the files of one directory in this way.
async fn goes_through((title, rounds, rotate): Way, watcher: Watcher) {
    let mount = Mount { watcher, ..Mount::new() };
    let names = names_for(&mount);
    let files = Files::nth(0);
    files.write(&mount.directory());
    mount.follow();
    let mut streams = Vec::new();
    let mut expected = Vec::new();
    let mut records = Vec::new();
    for name in &names {
        // Streams that open and close change nothing.
        drop(mount.subscribe(name).await);
        streams.push(mount.subscribe(name).await);
        streams.push(mount.subscribe(name).await);
        mount.serves_version(name, &files.version(&name.name), title).await;
        records.push(record(mount.watch(name.clone())));
        expected.push(Vec::new());
    }
    for round in 1..=rounds {
        let files = Files::nth(round);
        let (at, next) = (mount.directory(), files.clone());
        change(move || rotate(&at, &next)).await;
        for (name, expected) in names.iter().zip(&mut expected) {
            let version = files.version(&name.name);
            mount.serves_version(name, &version, &format!("{title}, round {round}")).await;
            expected.push(version);
        }
        let halfway = streams.len() / 2;
        if round == 1 {
            drop(streams.drain(..halfway));
        }
    }
    // Enough time for a publish too many.
    tokio::time::sleep(3 * DEBOUNCE).await;
    for ((name, expected), record) in names.iter().zip(expected).zip(records) {
        assert_eq!(*record.lock().unwrap(), expected, "{title}: {}", name.name);
    }
}

/// Tries all of these ways concurrently.
async fn go_through(ways: Vec<Way>) {
    let watcher = Watcher::new(PendingOperations::default());
    let mut going = JoinSet::new();
    for way in ways {
        going.spawn(goes_through(way, watcher.clone()));
    }
    while let Some(done) = going.join_next().await {
        done.unwrap();
    }
}

#[tokio::test]
async fn each_generation_is_published_once_for_every_way_and_every_name() {
    let rotations = ROTATIONS.map(|(title, rotate)| (title, 12, rotate));
    go_through(WAYS.into_iter().chain(rotations).collect()).await;
}

#[tokio::test]
async fn a_thousand_swaps_are_noticed() {
    let delete: Rotation = |at, files| swap(at, files, |old| fs::remove_dir_all(old).unwrap());
    let mount = Mount::new();
    let mut files = Files::new();
    swap(&mount.directory(), &files, |_| {});
    let settings = FileSettings { debounce: Duration::from_millis(1), ..settings(&mount.directory()) };
    mount.follow_with(settings);
    let name = key_of(&format!("file-root:{}", mount.path(ROOT_FILE).display()));
    let _stream = mount.subscribe(&name).await;
    mount.serves_version(&name, &files.version(&name.name), "at first").await;
    let (pairs, roots) = (record(mount.watch(KEY_PAIR)), record(mount.watch(name.clone())));
    let mut expected = (Vec::new(), Vec::new());
    for round in 0..1000 {
        files = Files::new();
        let (at, next) = (mount.directory(), files.clone());
        change(move || delete(&at, &next)).await;
        mount.serves(&files, &format!("round {round}")).await;
        expected.0.push(files.pair_version.clone());
        expected.1.push(files.version(&name.name));
        mount.serves_version(&name, &files.version(&name.name), &format!("round {round}")).await;
    }
    tokio::time::sleep(DEBOUNCE).await;
    assert_eq!(*pairs.lock().unwrap(), expected.0);
    assert_eq!(*roots.lock().unwrap(), expected.1);
}

#[tokio::test]
async fn no_part_of_a_bundle_is_served_while_it_is_written() {
    use std::io::Write as _;
    const ROUNDS: usize = 160;
    // The roots of the CA that signed the pair, and of another CA: then the source waits before it publishes.
    for pair in [Some(0), None] {
        let mount = Mount::new();
        let window = Duration::from_millis(1);
        Files::nth(0).write(&mount.directory());
        mount.follow_with(FileSettings { debounce: window, ..settings(&mount.directory()) });
        let name = key_of(&format!("file-root:{}", mount.path(ROOT_FILE).display()));
        let _stream = mount.subscribe(&name).await;
        mount.serves(&Files::nth(0), "at first").await;
        // A writer that begins before the file is watched goes unnoticed.
        mount.serves_version(&name, &Files::nth(0).version(&name.name), "at first").await;
        let records = [ROOTS, name].map(|key| (key.clone(), record(mount.watch(key))));
        let at = mount.directory();
        change(move || {
            let mut random = fastrand::Rng::with_seed(11);
            let mut rest = || pause(Duration::from_micros(random.u64(0..2500)));
            for round in 1..ROUNDS {
                let files = Files::nth(round);
                let pair = Files::nth(pair.map_or(round + 1, |before| before + round));
                // Another change to look at, at the moment when the bundle's write begins.
                rename_over(&at, CHAIN_FILE, &pair.chain);
                rename_over(&at, KEY_FILE, &pair.key);
                rest();
                let mut file = fs::File::create(at.join(ROOT_FILE)).unwrap();
                let text = String::from_utf8(files.root).unwrap();
                for block in text.split_inclusive("-----END CERTIFICATE-----\n") {
                    file.write_all(block.as_bytes()).unwrap();
                    rest();
                }
                drop(file);
                rest();
            }
        })
        .await;
        let is_last = |entry: &Entry| {
            let good = entry.good.as_ref();
            good.is_some_and(|good| good.resource.version == Files::nth(ROUNDS - 1).root_version)
        };
        mount.until(ROOTS, "the last of the bundles", is_last).await;
        for (key, record) in records {
            let whole: Vec<_> = (0..ROUNDS).map(|round| Files::nth(round).version(&key.name)).collect();
            for version in &*record.lock().unwrap() {
                assert!(whole.contains(version), "{}: a part of a bundle was served", key.name);
            }
        }
    }
}

#[tokio::test]
async fn a_file_that_keeps_changing_is_reported_and_not_published_until_it_stops() {
    use std::io::{Seek as _, Write as _};
    let mount = Mount::new();
    Files::nth(0).write(&mount.directory());
    mount.follow();
    mount.serves(&Files::nth(0), "at first").await;
    let records = record(mount.watch(ROOTS));
    let at = mount.directory();
    let writer = change(move || {
        // Longer than the source waits for an open file, without a pause in which it is whole and closed.
        let end = Instant::now() + OPEN_PATIENCE + 10 * DEBOUNCE;
        let mut file = fs::File::create(at.join(ROOT_FILE)).unwrap();
        let text = String::from_utf8(Files::nth(1).root).unwrap();
        while Instant::now() < end {
            file.set_len(0).unwrap();
            file.rewind().unwrap();
            for block in text.split_inclusive("-----END CERTIFICATE-----\n") {
                file.write_all(block.as_bytes()).unwrap();
                pause(DEBOUNCE / 10);
            }
        }
    });
    let reported = async {
        let is_reported = |entry: &Entry| entry.failure().is_some_and(|reason| reason.contains("faster"));
        mount.until(ROOTS, "the endless change", is_reported).await;
        assert!(records.lock().unwrap().is_empty(), "something was published");
    };
    tokio::join!(writer, reported);
    let is_whole = |entry: &Entry| {
        let good = entry.good.as_ref();
        good.is_some_and(|good| good.resource.version == Files::nth(1).root_version)
            && entry.failure().is_none()
    };
    mount.until(ROOTS, "the last content", is_whole).await;
}
