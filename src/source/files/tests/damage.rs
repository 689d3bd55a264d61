//! Files that can't be used: each is reported, and the last good secret stays.

use std::sync::mpsc;

use super::*;

/// One way to damage a directory: title, damage (given the next good files), words of the reason, the metric's label.
type Damage = (&'static str, fn(&Path, &Files), &'static str, &'static str);

const DAMAGES: [Damage; 16] = [
    ("no key", |at, _| fs::remove_file(at.join(KEY_FILE)).unwrap(), "but", "incomplete"),
    ("no chain", |at, _| fs::remove_file(at.join(CHAIN_FILE)).unwrap(), "but", "incomplete"),
    ("another key", |at, next| put(at, KEY_FILE, &next.key), "does not match", "mismatch"),
    ("another chain", |at, next| put(at, CHAIN_FILE, &next.chain), "does not match", "mismatch"),
    ("a chain in DER", |at, next| put(at, CHAIN_FILE, der(&next.chain)), "it is DER", "not_parsed"),
    ("a key in DER", |at, next| put(at, KEY_FILE, der(&next.key)), "it is DER", "not_parsed"),
    ("an encrypted key", |at, _| put(at, KEY_FILE, ENCRYPTED), "encrypted", "not_parsed"),
    ("a key file without a key", |at, _| put(at, KEY_FILE, "root:x:0:0"), "no PEM private key", "not_parsed"),
    (
        "a chain file without a certificate",
        |at, _| put(at, CHAIN_FILE, "root:x:0:0"),
        "no PEM certificate",
        "not_parsed",
    ),
    ("half a chain", |at, next| put(at, CHAIN_FILE, &next.chain[..300]), "cert-chain.pem", "not_parsed"),
    ("an empty key", |at, _| put(at, KEY_FILE, ""), "no PEM private key", "not_parsed"),
    ("2 MiB of chain", |at, next| put(at, CHAIN_FILE, next.chain.repeat(2 << 10)), "1 MiB", "unreadable"),
    ("2 MiB of key", |at, _| put(at, KEY_FILE, vec![b'a'; 2 << 20]), "1 MiB", "unreadable"),
    (
        "a directory in place of the key",
        |at, _| {
            fs::remove_file(at.join(KEY_FILE)).unwrap();
            fs::create_dir(at.join(KEY_FILE)).unwrap();
        },
        "not a regular file",
        "unreadable",
    ),
    (
        "an expired pair",
        |at, _| {
            let files = Files::at(Clock::starting_at(Clock::system().now() - 3 * DAY));
            put(at, CHAIN_FILE, &files.chain);
            put(at, KEY_FILE, &files.key);
        },
        "expired at",
        "not_valid",
    ),
    (
        "a pair of the future",
        |at, _| {
            let files = Files::at(Clock::starting_at(Clock::system().now() + 3 * DAY));
            put(at, CHAIN_FILE, &files.chain);
            put(at, KEY_FILE, &files.key);
        },
        "valid only from",
        "not_valid",
    ),
];

fn mend(directory: &Path, files: &Files) {
    // There may be a directory in place of the file.
    let _ = fs::remove_dir(directory.join(KEY_FILE));
    files.write(directory);
}

#[test]
fn an_unusable_pair_is_reported_and_the_last_good_one_stays() {
    let (first, next) = (Files::new(), Files::new());
    for (title, damage, words, label) in DAMAGES {
        let mount = Mount::new();
        let mut source = mount.source();
        first.write(&mount.directory());
        source.publish_once();
        assert_eq!(mount.version(KEY_PAIR).as_ref(), Some(&first.pair_version), "{title}");

        damage(&mount.directory(), &next);
        source.publish_once();
        let entry = mount.entry(KEY_PAIR);
        let reason = entry.failure().expect(title);
        assert!(reason.contains(words), "{title}: {reason}");
        assert!(reason.contains(mount.directory().to_str().unwrap()), "{title}: {reason}");
        assert_eq!(mount.failures(label), 1, "{title}");
        assert_eq!(mount.version(KEY_PAIR).as_ref(), Some(&first.pair_version), "{title}");
        let roots = mount.entry(ROOTS);
        assert!(roots.good.is_some() && roots.failure().is_none(), "{title}: the roots are not affected");

        mend(&mount.directory(), &next);
        source.publish_once();
        assert_eq!(mount.version(KEY_PAIR).as_ref(), Some(&next.pair_version), "{title}");
        assert_eq!(mount.entry(KEY_PAIR).failure(), None, "{title}");
    }
}

#[test]
fn unusable_roots_are_reported_and_the_last_good_ones_stay() {
    let (first, next) = (Files::new(), Files::new());
    let cases: [(&str, Vec<u8>, &str); 4] = [
        ("no certificate", b"root:x:0:0".to_vec(), "no PEM certificate"),
        ("DER", der(&next.root), "it is DER"),
        ("2 MiB", next.root.repeat(4 << 10), "1 MiB"),
        ("a key", next.key.clone(), "no PEM certificate"),
    ];
    for (title, content, words) in cases {
        let mount = Mount::new();
        let mut source = mount.source();
        first.write(&mount.directory());
        source.publish_once();
        put(&mount.directory(), ROOT_FILE, content);
        source.publish_once();
        let reason = mount.entry(ROOTS).failure().expect(title);
        assert!(reason.contains(words), "{title}: {reason}");
        assert_eq!(mount.version(ROOTS).as_ref(), Some(&first.root_version), "{title}");
        assert_eq!(mount.entry(KEY_PAIR).failure(), None, "{title}");
        next.write(&mount.directory());
        source.publish_once();
        assert_eq!(mount.version(ROOTS).as_ref(), Some(&next.root_version), "{title}");
    }
}

#[test]
fn a_fifo_in_place_of_a_file_blocks_nothing() {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let mount = Mount::new();
        Files::new().write(&mount.directory());
        for name in [CHAIN_FILE, KEY_FILE, ROOT_FILE] {
            fs::remove_file(mount.path(name)).unwrap();
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, mount.path(name), rustix::fs::FileType::Fifo, mode, 0)
                .unwrap();
        }
        mount.source().publish_once();
        let reasons = [KEY_PAIR, ROOTS].map(|key| mount.entry(key).failure());
        done.send(reasons).unwrap();
    });
    for reason in is_done.recv_timeout(PATIENCE).expect("the look at a FIFO to end") {
        let reason = reason.unwrap();
        assert!(reason.contains("not a regular file"), "{reason}");
    }
}

#[test]
fn a_directory_without_files_is_no_failure() {
    let mount = Mount::new();
    let mut source = mount.source();
    source.publish_once();
    let mut missing = mount.source_of(mount.path("missing"));
    missing.publish_once();
    for key in [KEY_PAIR, ROOTS] {
        let entry = mount.entry(key);
        assert!(entry.good.is_none() && entry.failure().is_none() && entry.holder.is_none());
    }
}
