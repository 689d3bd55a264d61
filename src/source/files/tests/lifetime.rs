//! Files and certificates that appear, disappear, become valid and expire.

use super::*;

#[tokio::test]
async fn removed_files_leave_their_value_and_release_the_entry() {
    let mount = Mount::new();
    let files = Files::new();
    files.write(&mount.directory());
    mount.follow();
    mount.serves(&files, "at first").await;
    assert_eq!(mount.entry(KEY_PAIR).holder, Some(Origin::FILES));
    for (name, _) in files.each() {
        fs::remove_file(mount.path(name)).unwrap();
    }
    for (key, version) in [(KEY_PAIR, &files.pair_version), (ROOTS, &files.root_version)] {
        let entry = mount.until(key, "the deletion", |entry| entry.holder.is_none()).await;
        assert!(entry.failure().unwrap().contains("the files were removed"));
        assert_eq!(entry.good.unwrap().resource.version, *version, "their content is still served");
    }
    files.write(&mount.directory());
    mount.until(KEY_PAIR, "the return", |entry| entry.holder == Some(Origin::FILES)).await;
}

#[tokio::test]
async fn a_failure_ends_when_the_files_that_caused_it_are_removed() {
    let mount = Mount::new();
    put(&mount.directory(), KEY_FILE, Files::new().key);
    put(&mount.directory(), ROOT_FILE, "root:x:0:0");
    mount.follow();
    for key in [KEY_PAIR, ROOTS] {
        mount.until(key, "the bad file", |entry| entry.failure().is_some()).await;
    }
    fs::remove_file(mount.path(KEY_FILE)).unwrap();
    fs::remove_file(mount.path(ROOT_FILE)).unwrap();
    for key in [KEY_PAIR, ROOTS] {
        mount.until(key, "its deletion", |entry| entry.failure().is_none()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pair_of_the_future_is_served_once_it_is_valid() {
    // No file changes at that moment.
    let mount = Mount { clock: Clock::starting_at(Clock::system().now() - DAY), ..Mount::new() };
    let files = Files::new();
    files.write(&mount.directory());
    mount.follow();
    mount.until(KEY_PAIR, "a pair of the future", |entry| entry.failure().is_some()).await;
    let mut entries = mount.watch(KEY_PAIR);
    let served = tokio::time::timeout(2 * DAY, entries.wait_for(|entry| entry.good.is_some())).await;
    assert!(served.is_ok(), "it was never served");
    drop(served);
    mount.serves(&files, "its failure ends").await;
}

#[tokio::test(start_paused = true)]
async fn files_that_are_not_renewed_release_the_entry_when_their_secret_expires() {
    // No file changes at that moment.
    let mount = Mount { clock: Clock::starting_at(Clock::system().now()), ..Mount::new() };
    let files = Files::new();
    files.write(&mount.directory());
    mount.follow();
    mount.serves(&files, "at first").await;
    let mut entries = mount.watch(KEY_PAIR);
    let released = tokio::time::timeout(2 * DAY, entries.wait_for(|entry| entry.holder.is_none())).await;
    let entry = released.expect("the entry to be released").unwrap().clone();
    assert!(entry.failure().unwrap().contains("expired at"), "{entry:?}");
    assert!(entry.valid_at(mount.clock.now()).is_err());
    let ca = mount.cache.publisher(KEY_PAIR, Origin::CA);
    let Files { chain, key, .. } = Files::at(mount.clock.clone());
    let pair = KeyPair::new(pem::certificates(&chain).unwrap(), PrivateKey::from_pem(&key).unwrap()).unwrap();
    assert_eq!(ca.publish(Secret::KeyPair(pair), mount.clock.now(), None), Published::Changed);
}

#[test]
fn the_agents_own_output_is_not_read_back_by_any_path() {
    let mount = Mount::new();
    let output = mount.temp.path().join("output");
    let files = Files::new();
    fs::create_dir_all(output.join("..data")).unwrap();
    files.write(&output.join("..data"));
    symlink(&output, mount.temp.path().join("link")).unwrap();
    for (name, _) in files.each() {
        symlink(output.join("..data").join(name), mount.path(name)).unwrap();
    }
    let own = vec![mount.temp.path().join("link")];
    for directory in [mount.directory(), output.join("..data")] {
        let mut source = mount.source_with(FileSettings { own: own.clone(), ..settings(&directory) });
        source.publish_once();
        for key in [KEY_PAIR, ROOTS] {
            let entry = mount.entry(key);
            assert!(entry.good.is_none() && entry.holder.is_none(), "{}", directory.display());
        }
    }
    mount.source().publish_once();
    assert!(mount.entry(KEY_PAIR).good.is_some(), "without an output they are files like others");
}
