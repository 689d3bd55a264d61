//! The rooms of `src/` stand in `lib.rs` in the order of their dependencies, and the code keeps to it.

use std::fs;
use std::path::{Path, PathBuf};

/// The rooms in order, and the directory they are in.
fn rooms() -> (PathBuf, Vec<String>) {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let map = fs::read_to_string(src.join("lib.rs")).unwrap();
    let rooms = map.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let rooms = rooms.map(str::to_owned).collect();
    (src, rooms)
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The rooms that a line of code names: `use crate::room::…`, and paths such as `crate::room::item`.
fn named(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.split("crate::").skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        &rest[..end]
    })
}

#[test]
fn each_room_uses_only_those_above_it() {
    let (src, rooms) = rooms();
    let rank = |name: &str| rooms.iter().position(|room| room == name);
    let mut files = Vec::new();
    sources(&src, &mut files);
    let (mut upward, mut uses) = (Vec::new(), 0);
    for file in files {
        let inside = file.strip_prefix(&src).unwrap();
        let first = inside.iter().next().unwrap().to_str().unwrap();
        // `lib.rs` and `main.rs` are in no room.
        let Some(own) = rank(first.trim_end_matches(".rs")) else { continue };
        for (number, line) in fs::read_to_string(&file).unwrap().lines().enumerate() {
            for other in named(line) {
                assert!(!other.is_empty(), "{}: one path a line, not `crate::{{…}}`", inside.display());
                uses += 1;
                if rank(other).is_some_and(|other| other > own) {
                    upward.push(format!("{}:{}: {}", inside.display(), number + 1, line.trim()));
                }
            }
        }
    }
    assert!(uses > 500, "only {uses} uses were found: the lines are not read as they are written now");
    assert!(upward.is_empty(), "these use a room below their own:\n{}", upward.join("\n"));
}

#[test]
fn the_top_level_holds_rooms_only() {
    let (src, rooms) = rooms();
    for entry in fs::read_dir(src).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let is_known = rooms.iter().any(|room| *room == name.trim_end_matches(".rs"));
        assert!(is_known || ["lib.rs", "main.rs"].contains(&name.as_str()), "{name} is in no room");
    }
}
