//! Every way to replace files is noticed, after every other one.

use std::os::unix::fs::MetadataExt as _;

use super::*;

/// A way to replace the mounted files by the next generation.
pub(super) type Rotation = fn(&Path, &Files);

/// Swaps files as the kubelet does: into a new directory, to which `..data` is switched at once.
pub(super) fn swap(volume: &Path, files: &Files, old: fn(&Path)) {
    fs::create_dir_all(volume).unwrap();
    let data = volume.join("..data");
    let before = fs::read_link(&data).ok();
    let name = format!("..{}", count());
    fs::create_dir(volume.join(&name)).unwrap();
    files.write(&volume.join(&name));
    let beside = volume.join("..data_tmp");
    symlink(&name, &beside).unwrap();
    fs::rename(&beside, &data).unwrap();
    for (name, _) in files.each() {
        let target = Path::new("..data").join(name);
        if fs::read_link(volume.join(name)).ok().as_ref() != Some(&target) {
            symlink(target, &beside).unwrap();
            fs::rename(&beside, volume.join(name)).unwrap();
        }
    }
    if let Some(before) = before {
        old(&volume.join(before));
    }
}

pub(super) const ROTATIONS: [(&str, Rotation); 12] = [
    ("overwriting in place", |at, files| files.write(at)),
    ("overwriting in place, the root first", |at, files| {
        files.each().iter().rev().for_each(|(name, content)| put(at, name, content));
    }),
    ("renaming over", |at, files| {
        for (name, content) in files.each() {
            put(at, "new", content);
            fs::rename(at.join("new"), at.join(name)).unwrap();
        }
    }),
    ("renaming over from another directory", |at, files| {
        let beside = at.with_extension("beside");
        fs::create_dir_all(&beside).unwrap();
        files.write(&beside);
        for (name, _) in files.each() {
            fs::rename(beside.join(name), at.join(name)).unwrap();
        }
    }),
    ("deleting and creating", |at, files| {
        for (name, content) in files.each() {
            fs::remove_file(at.join(name)).unwrap();
            put(at, name, content);
        }
    }),
    ("a kubelet swap, the old directory deleted at once", |at, files| {
        swap(at, files, |old| fs::remove_dir_all(old).unwrap());
    }),
    ("a kubelet swap, the old directory kept", |at, files| swap(at, files, |_| {})),
    ("a kubelet swap, the old directory deleted at the next one", |at, files| {
        swap(at, files, |old| {
            let grave = old.parent().unwrap().join("..grave");
            let _ = fs::remove_dir_all(&grave);
            fs::rename(old, grave).unwrap();
        });
    }),
    ("removing the directory and creating it again", |at, files| {
        fs::remove_dir_all(at).unwrap();
        fs::create_dir(at).unwrap();
        files.write(at);
    }),
    ("moving the directory away and another in", |at, files| {
        let beside = at.with_extension("beside");
        fs::create_dir(&beside).unwrap();
        files.write(&beside);
        let old = at.with_extension("old");
        fs::rename(at, &old).unwrap();
        fs::rename(&beside, at).unwrap();
        fs::remove_dir_all(old).unwrap();
    }),
    ("replacing the files by links to files elsewhere", |at, files| {
        let elsewhere = at.with_file_name(format!("elsewhere-{}", count()));
        fs::create_dir(&elsewhere).unwrap();
        files.write(&elsewhere);
        for (name, _) in files.each() {
            let beside = at.join("new");
            symlink(elsewhere.join(name), &beside).unwrap();
            fs::rename(&beside, at.join(name)).unwrap();
        }
    }),
    ("replacing the directory by a link to another", |at, files| {
        let elsewhere = at.with_file_name(format!("elsewhere-{}", count()));
        fs::create_dir(&elsewhere).unwrap();
        files.write(&elsewhere);
        let beside = at.with_extension("beside");
        symlink(&elsewhere, &beside).unwrap();
        if fs::read_link(at).is_err() {
            fs::remove_dir_all(at).unwrap();
        }
        fs::rename(&beside, at).unwrap();
    }),
];

#[tokio::test]
async fn every_way_to_change_mounted_files_is_noticed_every_time() {
    for (title, rotate) in ROTATIONS {
        let mount = Mount::new();
        Files::new().write(&mount.directory());
        mount.follow();
        for round in 0..4 {
            let files = Files::new();
            rotate(&mount.directory(), &files);
            mount.serves(&files, &format!("{title}, round {round}")).await;
        }
    }
}

#[tokio::test]
async fn after_any_change_the_next_one_of_any_kind_is_noticed() {
    // A plain file after a kubelet link, an overwritten file in a directory that was created again, and so on.
    let mut random = fastrand::Rng::with_seed(7);
    // Those that replace the directory need plain files.
    let rotations: Vec<_> =
        ROTATIONS.into_iter().filter(|(title, _)| !title.contains("the directory")).collect();
    let mount = Mount::new();
    Files::new().write(&mount.directory());
    mount.follow();
    let mut changes = Vec::new();
    for _ in 0..40 {
        let (title, rotate) = rotations[random.usize(0..rotations.len())];
        changes.push(title);
        let files = Files::new();
        rotate(&mount.directory(), &files);
        mount.serves(&files, &changes.join(", then ")).await;
    }
}

/// Removes a directory and creates it again, with the same inode number if possible.
fn recreate(directory: &Path) {
    let old = fs::metadata(directory).unwrap().ino();
    fs::remove_dir_all(directory).unwrap();
    // Most file systems reuse inode numbers as soon as possible.
    for _ in 0..1000 {
        fs::create_dir(directory).unwrap();
        if fs::metadata(directory).unwrap().ino() == old {
            return;
        }
        fs::remove_dir(directory).unwrap();
    }
    fs::create_dir(directory).unwrap();
}

#[tokio::test]
async fn a_recreated_directory_is_followed_though_it_has_the_old_inode_number() {
    let mount = Mount::new();
    Files::new().write(&mount.directory());
    mount.follow();
    for round in 0..10 {
        let files = Files::new();
        recreate(&mount.directory());
        files.write(&mount.directory());
        mount.serves(&files, &format!("created again, round {round}")).await;
        // The first looks may be due to events of the old directory; the later ones need a watch on the new one.
        for write in 0..4 {
            let files = Files::new();
            files.write(&mount.directory());
            mount.serves(&files, &format!("write {write} to it, round {round}")).await;
        }
    }
}

#[tokio::test]
async fn changes_during_an_overflow_are_found_afterwards() {
    let mount = Mount::new();
    Files::new().write(&mount.directory());
    mount.follow();
    for round in 0..10 {
        let files = Files::new();
        mount.kernel.lose_events();
        recreate(&mount.directory());
        files.write(&mount.directory());
        mount.kernel.report_overflow();
        mount.serves(&files, &format!("without events, round {round}")).await;
        let files = Files::new();
        files.write(&mount.directory());
        mount.serves(&files, &format!("a change after it, round {round}")).await;
    }
}

#[tokio::test]
async fn a_directory_that_appears_later_is_found() {
    let mount = Mount::new();
    let deep = mount.path("a/b/c");
    mount.follow_with(settings(&deep.clone()));
    // The first look has to be over, or it alone would find everything.
    tokio::task::yield_now().await;
    assert!(mount.entry(KEY_PAIR).good.is_none());
    for directory in [mount.path("a"), mount.path("a/b"), deep.clone()] {
        fs::create_dir(directory).unwrap();
        tokio::task::yield_now().await;
    }
    let files = Files::new();
    files.write(&deep);
    mount.serves(&files, "a directory that appears").await;
    let files = Files::new();
    files.write(&deep);
    mount.serves(&files, "a change in it").await;
}

#[tokio::test]
async fn a_key_written_after_its_chain_completes_the_pair() {
    type Write = fn(&Path, &[u8]);
    let ways: [(&str, Write); 2] = [
        ("in place", |path, content| fs::write(path, content).unwrap()),
        ("renamed over", |path, content| {
            let beside = path.with_extension("new");
            fs::write(&beside, content).unwrap();
            fs::rename(beside, path).unwrap();
        }),
    ];
    for (title, write) in ways {
        let mount = Mount::new();
        let mut served = Files::new();
        served.write(&mount.directory());
        mount.follow();
        mount.serves(&served, title).await;
        for _ in 0..3 {
            let next = Files {
                root: served.root.clone(),
                root_version: served.root_version.clone(),
                ..Files::new()
            };
            write(&mount.path(CHAIN_FILE), &next.chain);
            let failed = mount.until(KEY_PAIR, title, |entry| entry.failure().is_some()).await;
            assert_eq!(failed.good.unwrap().resource.version, served.pair_version, "{title}");
            // The key alone.
            write(&mount.path(KEY_FILE), &next.key);
            mount.serves(&next, title).await;
            served = next;
        }
    }
}

#[tokio::test]
async fn changes_that_keep_the_bytes_are_not_published() {
    let mount = Mount::new();
    let mut files = Files::new();
    files.write(&mount.directory());
    mount.follow();
    mount.serves(&files, "at first").await;
    let record = record(mount.watch(KEY_PAIR));
    let mut expected = Vec::new();
    for round in 0..5 {
        // A touch, a rewrite, a rename, a change of mode. The other roots show that all this was noticed.
        let key = mount.path(KEY_FILE);
        std::fs::File::options()
            .write(true)
            .open(&key)
            .unwrap()
            .set_modified(SystemTime::UNIX_EPOCH)
            .unwrap();
        files.write(&mount.directory());
        fs::write(mount.path("new"), &files.key).unwrap();
        fs::rename(mount.path("new"), &key).unwrap();
        fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let other = Files::new();
        files = Files { root: other.root.clone(), root_version: other.root_version.clone(), ..files };
        put(&mount.directory(), ROOT_FILE, &files.root);
        mount.serves(&files, &format!("the roots of round {round}")).await;
        files = Files { root: files.root, root_version: files.root_version, ..other };
        files.write(&mount.directory());
        mount.serves(&files, &format!("round {round}")).await;
        expected.push(files.pair_version.clone());
    }
    // The last change was published; the recording task may not have run yet.
    while record.lock().unwrap().len() < expected.len() {
        tokio::task::yield_now().await;
    }
    assert_eq!(*record.lock().unwrap(), expected);
}

#[tokio::test]
async fn a_burst_is_folded_into_few_publishes() {
    let mount = Mount::new();
    let first = Files::new();
    swap(&mount.directory(), &first, |_| {});
    mount.follow();
    mount.serves(&first, "at first").await;
    let record = record(mount.watch(KEY_PAIR));
    let burst: Vec<_> = (0..20).map(|_| Files::new()).collect();
    let started = Instant::now();
    for files in &burst {
        swap(&mount.directory(), files, |_| {});
        tokio::task::yield_now().await;
    }
    mount.serves(&burst[19], "the last of the burst").await;
    let windows = started.elapsed().as_millis() / DEBOUNCE.as_millis() + 2;
    let seen = record.lock().unwrap().clone();
    assert!(seen.len() as u128 <= windows, "{} publishes in {windows} windows", seen.len());
}
