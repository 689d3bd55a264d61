use std::cell::RefCell;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, symlink};

use super::*;

/// Lets everything pass but one device, and records the devices.
#[derive(Default)]
struct Recorder {
    entered: RefCell<Vec<u64>>,
    closed: Option<u64>,
}

impl Gate for Recorder {
    fn enter(&self, device: u64) -> Result<(), Blocked> {
        self.entered.borrow_mut().push(device);
        if self.closed == Some(device) { Err(Blocked(device)) } else { Ok(()) }
    }
}

struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        for directory in ["inside/..data", "outside/secret", "inside-too"] {
            fs::create_dir_all(tree.path(directory)).unwrap();
            fs::write(tree.path(directory).join("file"), directory).unwrap();
        }
        for (target, link) in [
            ("..data/file", "inside/file"),
            ("../outside/secret/file", "inside/escape"),
            ("../outside/secret", "inside/way-out"),
            ("../outside/nothing", "inside/dangling-out"),
            ("nothing", "inside/dangling"),
            ("inside", "prefix"),
            ("b", "a"),
            ("a", "b"),
        ] {
            symlink(target, tree.path(link)).unwrap();
        }
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().unwrap().join(name)
    }

    fn find(&self, name: &str, bounds: &Bounds) -> Result<Found, Failed> {
        find(&self.path(name), bounds, &Recorder::default())
    }

    fn read(&self, name: &str, bounds: &Bounds) -> Result<String, String> {
        let mut content = String::new();
        let failed = |failed| match failed {
            Failed::Io(error) => error.to_string(),
            other => format!("{other:?}"),
        };
        let found = self.find(name, bounds).map_err(failed)?;
        let mut file = found.open().map_err(|error| error.to_string())?;
        file.read_to_string(&mut content).unwrap();
        Ok(content)
    }

    /// Bounds that hold everything beneath this directory.
    fn beneath(&self, prefix: &str) -> Bounds {
        let prefix = self.path(prefix).components().count() - 1;
        Bounds { prefix: Some(prefix), private: Vec::new() }
    }
}

#[test]
fn a_path_leads_where_the_kernel_would_go() {
    let tree = Tree::new();
    let anywhere = Bounds::default();
    for (name, content) in [
        ("inside/file", "inside/..data"),
        ("prefix/file", "inside/..data"),
        ("inside/way-out/file", "outside/secret"),
        ("inside/way-out/../secret/file", "outside/secret"),
        ("prefix/../inside-too/file", "inside-too"),
    ] {
        assert_eq!(tree.read(name, &anywhere).as_deref(), Ok(content), "{name}");
        let inode = fs::metadata(tree.path(name)).unwrap();
        assert_eq!(tree.find(name, &anywhere).unwrap().inode, (inode.dev(), inode.ino()), "{name}");
    }
    assert!(tree.read("a", &anywhere).unwrap_err().contains("symbolic links"));
    assert!(tree.read("inside/file/below", &anywhere).unwrap_err().contains("Not a directory"));
    assert_eq!(tree.read("inside", &anywhere).unwrap_err(), "not a regular file");
    let fifo = tree.path("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
    assert_eq!(tree.read("fifo", &anywhere).unwrap_err(), "not a regular file");
}

#[test]
fn a_missing_name_says_how_much_of_the_path_exists() {
    let tree = Tree::new();
    let depth = tree.path("x").components().count() - 2;
    for (name, expected) in [
        ("missing", Some(depth)),
        ("missing/deep/file", Some(depth)),
        ("inside/missing", Some(depth + 1)),
        ("inside/way-out/missing", Some(depth + 2)),
        ("inside/dangling", None),
    ] {
        let found = tree.find(name, &Bounds::default());
        assert!(matches!(found, Err(Failed::Missing(exists)) if exists == expected), "{name}: {found:?}");
    }
}

#[test]
fn links_do_not_lead_out_of_a_prefix() {
    let tree = Tree::new();
    for prefix in ["inside", "prefix"] {
        let bounds = tree.beneath(prefix);
        let read = |name: &str| tree.read(&format!("{prefix}/{name}"), &bounds);
        assert_eq!(read("file").as_deref(), Ok("inside/..data"));
        assert!(read("missing").unwrap_err().starts_with("Missing"));
        assert!(read("dangling").unwrap_err().starts_with("Missing"));
        for name in
            ["escape", "way-out/file", "way-out/missing", "way-out/missing/deep", "dangling-out", "way-out"]
        {
            assert_eq!(read(name).unwrap_err(), OutOfBounds::Prefix.to_string(), "{prefix}/{name}");
        }
    }
    let bounds = tree.beneath("nowhere/deep");
    assert!(tree.read("nowhere/deep/file", &bounds).unwrap_err().starts_with("Missing"));
}

#[test]
fn what_lies_in_a_private_directory_is_not_found_by_any_path() {
    let tree = Tree::new();
    let gate = Recorder::default();
    let private = private(&tree.path("inside/way-out"), &gate).unwrap();
    assert_eq!(private.path, tree.path("outside/secret"));
    for private in [
        private.clone(),
        // Known by its inode alone, as one that is mounted elsewhere.
        Private { path: "/elsewhere".into(), ..private },
    ] {
        let bounds = Bounds { prefix: None, private: vec![private] };
        for name in
            ["outside/secret/file", "inside/escape", "inside/way-out/file", "prefix/../outside/secret/file"]
        {
            assert!(tree.read(name, &bounds).unwrap_err().contains("the agent's own"), "{name}");
        }
        assert!(tree.read("inside/file", &bounds).is_ok());
    }
    let absent = self::private(&tree.path("prefix/new/state"), &gate).unwrap();
    assert_eq!(absent, Private { path: tree.path("inside/new/state"), inode: None });
}

#[test]
fn a_closed_device_is_not_looked_at() {
    let proc = fs::metadata("/proc").unwrap().dev();
    let gate = Recorder { closed: Some(proc), ..Recorder::default() };
    let found = find(Path::new("/proc/self/status"), &Bounds::default(), &gate);
    assert!(matches!(found, Err(Failed::Blocked(Blocked(device))) if device == proc), "{found:?}");
    let root = fs::metadata("/").unwrap().dev();
    assert_eq!(*gate.entered.borrow(), [root, proc]);
    assert!(find(Path::new("/etc"), &Bounds::default(), &gate).is_ok());
}
