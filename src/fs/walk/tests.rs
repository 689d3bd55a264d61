use std::os::unix::fs::symlink;

use super::*;

fn names(walk: &mut Walk, root: &Path) -> Vec<String> {
    let lookups = walk.look_up();
    let beneath = lookups.names.keys().filter_map(|path| path.strip_prefix(root).ok());
    beneath.map(|path| path.to_str().unwrap().to_owned()).collect()
}

#[test]
fn the_look_ups_of_a_mounted_file_include_its_links() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    std::fs::create_dir_all(root.join("volume/..2026")).unwrap();
    symlink("..2026", root.join("volume/..data")).unwrap();
    symlink("..data/key.pem", root.join("volume/key.pem")).unwrap();
    symlink(root.join("volume"), root.join("mount")).unwrap();
    let mut walk = Walk::new(vec![root.join("mount/key.pem")]);
    let expected =
        ["", "mount", "volume", "volume/..2026", "volume/..2026/key.pem", "volume/..data", "volume/key.pem"];
    for _ in 0..2 {
        assert_eq!(names(&mut walk, &root), expected);
    }
    let lookups = walk.look_up();
    let holds_files: Vec<_> =
        lookups.directories.iter().filter(|(_, it)| it.holds_files).map(|(path, _)| path.clone()).collect();
    assert_eq!(holds_files, [root.join("volume/..2026")]);
}

#[test]
fn a_loop_of_links_is_left_after_as_many_as_the_kernel_follows() {
    let directory = tempfile::tempdir().unwrap();
    symlink("b", directory.path().join("a")).unwrap();
    symlink("a", directory.path().join("b")).unwrap();
    let look = Walk::new(vec![directory.path().join("a")]).read(10, |_| None);
    assert_eq!(look.files[0].content.as_ref().unwrap_err().raw_os_error(), Some(Errno::LOOP.raw_os_error()));
}

#[test]
fn only_regular_files_of_a_bounded_size_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "0123456789").unwrap();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
    let read =
        |path: &Path, limit| Walk::new(vec![path.to_owned()]).read(limit, |_| None).files.remove(0).content;
    assert_eq!(*read(&file, 10).unwrap(), b"0123456789");
    let cases = [
        (file.as_path(), io::ErrorKind::FileTooLarge),
        (directory.path(), io::ErrorKind::InvalidInput),
        (&fifo, io::ErrorKind::InvalidInput),
        (Path::new("/nowhere"), io::ErrorKind::NotFound),
        (&file.join("below"), io::ErrorKind::NotADirectory),
    ];
    for (path, kind) in cases {
        assert_eq!(read(path, 9).unwrap_err().kind(), kind, "{}", path.display());
    }
}

#[test]
fn files_behind_one_link_are_of_one_generation() {
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().canonicalize().unwrap();
    for generation in ["..1", "..2"] {
        std::fs::create_dir(volume.join(generation)).unwrap();
        for name in ["chain", "key"] {
            std::fs::write(volume.join(generation).join(name), generation).unwrap();
        }
    }
    symlink("..1", volume.join("..data")).unwrap();
    for name in ["chain", "key"] {
        symlink(Path::new("..data").join(name), volume.join(name)).unwrap();
    }
    let (links, root) = (BTreeSet::new(), root());
    let mut pass = Pass::new(&links, &root);
    let chain = pass.resolve(&volume.join("chain"));
    symlink("..2", volume.join("..new")).unwrap();
    std::fs::rename(volume.join("..new"), volume.join("..data")).unwrap();
    let key = pass.resolve(&volume.join("key"));
    for end in [chain, key] {
        assert_eq!(*pass.read(&end, 10).unwrap(), b"..1", "{}", end.path.display());
    }
}

#[test]
fn fallbacks_are_looked_up_only_if_a_decisive_file_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let paths: Vec<_> = ["chain", "key", "fallback"].map(|name| root.join(name)).into();
    for path in &paths {
        std::fs::write(path, "text").unwrap();
    }
    let mut walk = Walk::with_fallbacks(paths.clone(), 2);
    let mut read = |refused: Option<&Path>| {
        let look = walk.read(10, |path| (Some(path) == refused).then(|| io::ErrorKind::NotFound.into()));
        let is_read: Vec<_> = look.files.iter().map(|file| file.content.is_ok()).collect();
        (is_read, look.lookups.names.contains_key(&paths[2]))
    };
    assert_eq!(read(None), (vec![true, true, false], false));
    assert_eq!(read(Some(&paths[0])), (vec![false, true, true], true));
    std::fs::remove_file(&paths[1]).unwrap();
    assert_eq!(read(None), (vec![true, false, true], true));
}
