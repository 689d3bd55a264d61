//! Which contents of files are served, from which places, and how others are reported.

use super::*;

const ENCRYPTED_BEFORE_PKCS8: &[u8] = b"-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\
    DEK-Info: AES-256-CBC,00\n\nAAAA\n-----END EC PRIVATE KEY-----\n";

/// The content of the DER value at the start of `der`, and the rest.
fn split(der: &[u8]) -> (&[u8], &[u8]) {
    let (header, length) = match der[1] {
        0x82 => (4, usize::from(der[2]) << 8 | usize::from(der[3])),
        0x81 => (3, usize::from(der[2])),
        short => (2, usize::from(short)),
    };
    (&der[header..header + length], &der[header + length..])
}

/// A DER value of less than 256 bytes.
fn tagged(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = u8::try_from(content.len()).unwrap();
    let header = if length < 128 { vec![tag, length] } else { vec![tag, 0x81, length] };
    [header, content.to_vec()].concat()
}

/// A key in the usual form before PKCS#8 (PKCS#1 or SEC1), as openssl writes it.
fn traditional(key: &SigningKey, key_type: KeyType) -> Vec<u8> {
    let pkcs8 = key.to_private_key().der().secret_der().to_vec();
    let (version, rest) = (split(&pkcs8).0, split(split(&pkcs8).0).1);
    assert_eq!(split(version).0, [0]);
    let inner = split(split(rest).1).0;
    let curve: &[u8] = match key_type {
        KeyType::EcdsaP256 => &[0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7],
        KeyType::EcdsaP384 => &[0x2b, 0x81, 4, 0, 0x22],
        _ => return pem::encode("RSA PRIVATE KEY", inner).to_vec(),
    };
    let curve = tagged(6, curve);
    let content = split(inner).0;
    let behind_key = split(split(content).1).1;
    let (head, tail) = content.split_at(content.len() - behind_key.len());
    let tail = if tail[0] == 0xa0 { split(tail).1 } else { tail };
    let sec1 = tagged(0x30, &[head, &tagged(0xa0, &curve), tail].concat());
    [pem::encode("EC PARAMETERS", &curve).to_vec(), pem::encode("EC PRIVATE KEY", &sec1).to_vec()].concat()
}

#[test]
fn keys_and_chains_are_accepted_in_every_usual_form() {
    let directory = tempfile::tempdir().unwrap();
    let ca = DevelopmentCa::open(directory.path(), Clock::system()).unwrap();
    let identity: SpiffeId = "spiffe://cluster.local/ns/default/sa/web".parse().unwrap();
    for key_type in [KeyType::Rsa2048, KeyType::EcdsaP256, KeyType::EcdsaP384, KeyType::Ed25519] {
        let key = SigningKey::generate(key_type).unwrap();
        let leaf = ca
            .issue(&csr::request(&key, Some(&identity), &csr::Names::default()).unwrap(), &identity, DAY)
            .unwrap();
        let chain = pem::of_certificates([&leaf, ca.chain()[0]]);
        let pkcs8 = key.to_private_key().to_pem().to_vec();
        let mut keys = vec![("PKCS#8", pkcs8.clone())];
        if key_type != KeyType::Ed25519 {
            keys.push(("the older form", traditional(&key, key_type)));
        }
        for (form, key) in keys {
            let crlf =
                |pem: &[u8]| String::from_utf8(pem.to_vec()).unwrap().replace('\n', "\r\n").into_bytes();
            let comments =
                |pem: &[u8]| [b"Bag Attributes\n  friendlyName: web\n\n", pem, b"# end\n"].concat();
            let with_root = [chain.clone(), pem::of_certificates([ca.chain()[1]])].concat();
            let shapes = [
                ("plain", chain.clone(), key.clone()),
                ("CRLF", crlf(&chain), crlf(&key)),
                ("comments", comments(&chain), comments(&key)),
                ("the root after it", with_root, key.clone()),
                ("chain and key in one file", [chain.clone(), key.clone()].concat(), key.clone()),
            ];
            let mount = Mount::new();
            let mut source = mount.source();
            let mut versions = Vec::new();
            for (shape, chain, key) in shapes {
                let what = format!("{key_type:?} as {form}, {shape}");
                put(&mount.directory(), CHAIN_FILE, chain);
                put(&mount.directory(), KEY_FILE, key);
                source.publish_once();
                let entry = mount.entry(KEY_PAIR);
                assert_eq!(entry.failure(), None, "{what}");
                versions.push(entry.good.expect(&what).resource.version.clone());
            }
            versions.dedup();
            assert_eq!(versions.len(), 1, "{key_type:?} as {form}: the served bytes differ");
        }
    }
}

/// Two sets of files in one directory, from two CAs: `istio` and `tls` are the names of each that exist.
fn two_sets(istio: &str, tls: &str) -> (Mount, [Files; 2]) {
    let (mount, files) = (Mount::new(), [Files::nth(0), Files::nth(1)]);
    let sets = [(istio, NAMES), (tls, TLS_NAMES)];
    for ((present, names), files) in sets.into_iter().zip(&files) {
        for (name, (kind, (_, content))) in
            names.into_iter().zip(["chain", "key", "roots"].into_iter().zip(files.each()))
        {
            if present.split(' ').any(|it| it == kind) {
                put(&mount.directory(), name, content);
            }
        }
    }
    mount.source().publish_once();
    (mount, files)
}

#[test]
fn one_set_of_file_names_is_served_at_a_time() {
    let all = "chain key roots";
    // Whether the key pair is from Istio's names (0) or from a TLS Secret's (1), and the roots.
    for (istio, tls, pair, roots) in [
        (all, "", Some(0), Some(0)),
        ("", all, Some(1), Some(1)),
        (all, all, Some(0), Some(0)),
        ("chain key", all, Some(1), Some(1)),
        ("roots", all, Some(1), Some(1)),
        ("chain", all, Some(1), Some(1)),
        (all, "chain key", Some(0), Some(0)),
        ("", "chain key", Some(1), None),
        ("roots", "chain key", Some(1), None),
        ("", "roots", None, Some(1)),
    ] {
        let (mount, files) = two_sets(istio, tls);
        let served = |key: Key, version: fn(&Files) -> &Version| {
            let good = mount.entry(key).good?;
            files.iter().position(|files| *version(files) == good.resource.version)
        };
        let what = format!("{istio:?} beside {tls:?}");
        assert_eq!(served(KEY_PAIR, |files| &files.pair_version), pair, "{what}");
        assert_eq!(served(ROOTS, |files| &files.root_version), roots, "{what}");
    }
    let (mount, _) = two_sets("roots", "chain key");
    let reason = mount.entry(ROOTS).failure().unwrap();
    assert!(
        reason.contains("root-cert.pem is not used beside") && reason.contains("--root-file"),
        "{reason}"
    );
}

#[test]
fn file_names_can_be_chosen_and_one_file_can_hold_the_whole_pair() {
    type Present<'a> = &'a [(&'a str, &'a [u8])];
    let files = Files::nth(0);
    let bundle = [files.key.as_slice(), &files.chain].concat();
    let names = |chain: Option<&str>, key: Option<&str>, roots: Option<&str>| FileNames {
        chain: chain.map(str::to_owned),
        key: key.map(str::to_owned),
        roots: roots.map(str::to_owned),
    };
    let cases: [(FileNames, Present<'_>); 4] = [
        (
            names(Some("web.pem"), Some("web.key"), Some("mesh/roots.pem")),
            &[("web.pem", &files.chain), ("web.key", &files.key), ("mesh/roots.pem", &files.root)],
        ),
        (
            names(None, None, Some("roots.pem")),
            &[("tls.crt", &files.chain), ("tls.key", &files.key), ("roots.pem", &files.root)],
        ),
        (
            names(Some("credentials.pem"), None, None),
            &[("credentials.pem", &bundle), ("ca.crt", &files.root)],
        ),
        (
            names(Some("both.pem"), Some("both.pem"), Some("roots.pem")),
            &[("both.pem", &bundle), ("roots.pem", &files.root)],
        ),
    ];
    for (names, present) in cases {
        let mount = Mount::new();
        fs::create_dir(mount.path("mesh")).unwrap();
        for (name, content) in present {
            put(&mount.directory(), name, content);
        }
        let mounted = places(&mount.directory(), &names);
        assert!(mounted.iter().any(Place::holds_key_pair), "{names:?}");
        mount.source_with(FileSettings { mounted, ..settings(&mount.directory()) }).publish_once();
        for (key, version) in [(KEY_PAIR, &files.pair_version), (ROOTS, &files.root_version)] {
            let entry = mount.entry(key);
            assert_eq!(entry.failure(), None, "{names:?}");
            assert_eq!(entry.good.unwrap().resource.version, *version, "{names:?}");
        }
    }
}

#[test]
fn a_key_with_a_password_is_reported_in_both_forms() {
    for text in [ENCRYPTED, ENCRYPTED_BEFORE_PKCS8] {
        let mount = Mount::new();
        Files::nth(0).write(&mount.directory());
        put(&mount.directory(), KEY_FILE, text);
        mount.source().publish_once();
        let reason = mount.entry(KEY_PAIR).failure().unwrap();
        assert!(reason.contains("encrypted") && reason.contains(KEY_FILE), "{reason}");
    }
}

/// A root that expires at `not_after`.
fn root_until(not_after: SystemTime) -> Vec<u8> {
    let mut params = rcgen::CertificateParams::default();
    params.not_before = (not_after - 300 * DAY).into();
    params.not_after = not_after.into();
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    pem::of_certificates([params.self_signed(&key).unwrap().der()])
}

#[test]
fn roots_are_served_as_long_as_one_of_them_is_valid() {
    let now = Clock::system().now();
    let (good, other, expired) = (root_until(now + DAY), root_until(now + DAY), root_until(now - DAY));
    let several: Vec<u8> = (0..100).flat_map(|_| root_until(now + DAY)).collect();
    let text = |parts: &[&[u8]]| parts.concat();
    let cases: [(&str, Vec<u8>, Result<usize, &str>); 9] = [
        ("one", text(&[&good]), Ok(1)),
        ("two", text(&[&good, &other]), Ok(2)),
        ("twice the same", text(&[&good, &good]), Ok(1)),
        ("a hundred", several, Ok(100)),
        ("with comments", text(&[b"# good\r\n", &good, b"\n# other\n", &other, b"\n"]), Ok(2)),
        ("one that has expired and one that has not", text(&[&expired, &good]), Ok(2)),
        ("one that has expired", expired.clone(), Err("expired at")),
        ("a good one and half of another", text(&[&good, &other[..200]]), Err("PEM is damaged")),
        ("nothing", Vec::new(), Err("no PEM certificate")),
    ];
    for (title, content, expected) in cases {
        let mount = Mount::new();
        let mut source = mount.source();
        put(&mount.directory(), ROOT_FILE, Files::nth(0).root);
        source.publish_once();
        put(&mount.directory(), ROOT_FILE, content);
        source.publish_once();
        let entry = mount.entry(ROOTS);
        match expected {
            Ok(count) => {
                assert_eq!(entry.failure(), None, "{title}");
                let Secret::TrustBundle(bundle) = &entry.good.unwrap().secret else { panic!("{title}") };
                assert_eq!(bundle.roots().len(), count, "{title}");
            }
            Err(words) => {
                assert!(entry.failure().is_some_and(|reason| reason.contains(words)), "{title}: {entry:?}");
                assert_eq!(entry.good.unwrap().resource.version, Files::nth(0).root_version, "{title}");
            }
        }
    }
}

#[test]
fn a_source_without_a_ca_reports_missing_files() {
    type Write = fn(&Path, &Files);
    let nothing: Write = |_, _| {};
    type Case<'a> = (&'a str, Write, Option<(&'a str, &'a str)>, Option<&'a str>);
    let cases: [Case<'_>; 5] = [
        ("nothing", nothing, Some(("none of", "missing")), Some("none of")),
        ("all", |at, files| files.write(at), None, None),
        (
            "a chain",
            |at, files| put(at, CHAIN_FILE, &files.chain),
            Some((", but ", "incomplete")),
            Some("none of"),
        ),
        ("a key", |at, files| put(at, KEY_FILE, &files.key), Some((", but ", "incomplete")), Some("none of")),
        ("roots", |at, files| put(at, ROOT_FILE, &files.root), Some(("none of", "missing")), None),
    ];
    for (title, write, pair, roots) in cases {
        for is_alone in [true, false] {
            let mount = Mount::new();
            let mut settings = FileSettings { is_alone, ..settings(&mount.directory()) };
            settings.mounted.push(Place::in_directory(&mount.directory(), GKE_NAMES));
            write(&mount.directory(), &Files::nth(0));
            mount.source_with(settings).publish_once();
            let expected = pair.filter(|(_, label)| is_alone || *label != "missing");
            let reason = mount.entry(KEY_PAIR).failure();
            match expected {
                None => assert_eq!(reason, None, "{title}"),
                Some((words, label)) => {
                    assert!(reason.is_some_and(|reason| reason.contains(words)), "{title}");
                    // The roots may have the same failure.
                    assert!(mount.failures(label) >= 1, "{title}");
                }
            }
            let reason = mount.entry(ROOTS).failure();
            match roots.filter(|_| is_alone) {
                None => assert_eq!(reason, None, "{title}"),
                Some(words) => assert!(reason.is_some_and(|reason| reason.contains(words)), "{title}"),
            }
        }
    }
}

#[tokio::test]
async fn each_secret_comes_from_the_first_place_that_has_it() {
    let mount = Mount::new();
    let lower = mount.directory();
    let upper = mount.temp.path().join("upper");
    let mut settings = FileSettings { mounted: vec![Place::in_directory(&upper, NAMES)], ..settings(&lower) };
    settings.mounted.push(Place::in_directory(&lower, GKE_NAMES));
    let write_lower = |files: &Files| {
        for (name, (_, content)) in GKE_NAMES.iter().zip(files.each()) {
            put(&lower, name, content);
        }
    };
    let of = Files::nth;
    write_lower(&of(0));
    mount.follow_with(settings);
    mount.serves(&of(0), "the lower place").await;
    let records = [KEY_PAIR, ROOTS].map(|key| record(mount.watch(key)));

    fs::create_dir(&upper).unwrap();
    put(&upper, CHAIN_FILE, of(1).chain);
    tokio::time::sleep(3 * DEBOUNCE).await;
    mount.serves(&of(0), "half a pair in the higher place").await;
    write_lower(&of(2));
    mount.serves(&of(2), "a change in the lower place meanwhile").await;
    put(&upper, KEY_FILE, of(1).key);
    let mixed = Files { root: of(2).root, root_version: of(2).root_version, ..of(1) };
    mount.serves(&mixed, "the pair from the higher place, the roots from the lower one").await;
    put(&upper, ROOT_FILE, of(1).root);
    mount.serves(&of(1), "all from the higher place").await;
    // The lower place does not count now.
    write_lower(&of(3));
    put(&upper, CHAIN_FILE, "root:x:0:0");
    mount.until(KEY_PAIR, "bad files in the higher place", |entry| entry.failure().is_some()).await;
    assert_eq!(
        mount.version(KEY_PAIR),
        Some(of(1).pair_version),
        "bad files are no reason to use the lower place"
    );
    fs::remove_file(upper.join(CHAIN_FILE)).unwrap();
    let mixed = Files { root: of(1).root, root_version: of(1).root_version, ..of(3) };
    mount.serves(&mixed, "the pair from the lower place again").await;
    fs::remove_dir_all(&upper).unwrap();
    mount.serves(&of(3), "all from the lower place again").await;
    of(4).write({
        fs::create_dir(&upper).unwrap();
        &upper
    });
    mount.serves(&of(4), "the higher place is back").await;

    tokio::time::sleep(3 * DEBOUNCE).await;
    let [pairs, roots] = records.map(|record| record.lock().unwrap().clone());
    assert_eq!(pairs, [2, 1, 3, 4].map(|number| of(number).pair_version));
    assert_eq!(roots, [2, 1, 3, 4].map(|number| of(number).root_version));
}

#[tokio::test]
async fn only_half_of_a_change_or_an_early_one_waits_for_a_window() {
    // Far longer than anything takes that does not wait for a window.
    let debounce = Duration::from_secs(2);
    let mount = Mount::new();
    let of = Files::nth;
    of(0).write(&mount.directory());
    mount.follow_with(FileSettings { debounce, ..settings(&mount.directory()) });
    mount.serves(&of(0), "at first").await;
    tokio::time::sleep(debounce).await;
    // The first change after a while.
    let changed = Instant::now();
    swap(&mount.directory(), &of(1), |_| {});
    mount.serves(&of(1), "the first change").await;
    assert!(changed.elapsed() < debounce, "{:?}", changed.elapsed());
    // A change that follows closely.
    swap(&mount.directory(), &of(2), |_| {});
    mount.serves(&of(2), "the second change").await;
    assert!(changed.elapsed() >= debounce, "{:?}", changed.elapsed());
    // Half of a change.
    tokio::time::sleep(debounce).await;
    let changed = Instant::now();
    let key = fs::canonicalize(mount.path(KEY_FILE)).unwrap();
    fs::write(&key, of(3).key).unwrap();
    mount.until(KEY_PAIR, "the mismatch", |entry| entry.failure().is_some()).await;
    assert!(changed.elapsed() >= debounce, "{:?}", changed.elapsed());
    assert_eq!(mount.failures("mismatch"), 1);
    let repaired = Instant::now();
    fs::write(&key, of(2).key).unwrap();
    mount.serves(&of(2), "the repair").await;
    assert!(repaired.elapsed() < debounce, "{:?}", repaired.elapsed());
}

#[tokio::test]
async fn a_pair_that_does_not_chain_to_the_roots_is_served_after_a_window() {
    let mount = Mount::new();
    let mut served = Files::nth(0);
    served.write(&mount.directory());
    mount.follow();
    mount.serves(&served, "at first").await;
    let records = [KEY_PAIR, ROOTS].map(|key| record(mount.watch(key)));
    for number in 1..6 {
        // The pair of one CA with the roots of another.
        let (pair, roots) = (Files::nth(2 * number), Files::nth(2 * number + 1));
        served = Files { root: roots.root, root_version: roots.root_version, ..pair };
        let changed = Instant::now();
        let (at, next) = (mount.directory(), served.clone());
        change(move || next.write(&at)).await;
        mount.serves(&served, "the mixture").await;
        assert!(changed.elapsed() >= DEBOUNCE);
    }
    tokio::time::sleep(3 * DEBOUNCE).await;
    let numbers = [2, 4, 6, 8, 10];
    let [pairs, roots] = records.map(|record| record.lock().unwrap().clone());
    assert_eq!(pairs, numbers.map(|number| Files::nth(number).pair_version));
    assert_eq!(roots, numbers.map(|number| Files::nth(number + 1).root_version));
}
