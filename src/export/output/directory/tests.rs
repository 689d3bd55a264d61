//! Real directories, with writes that fail or crash at every step.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tempfile::TempDir;

use super::*;
use crate::fs::generation::{CHAIN_FILE, KEY_FILE, NAMES, ROOT_FILE};

/// Makes a write fail before one of its steps.
#[derive(Debug, Default)]
pub(super) struct Fault {
    steps: Cell<usize>,
    at: Cell<Option<(usize, How)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// The process dies: nothing is cleaned up.
    Crash,
    /// This step and all later ones fail.
    Full,
    /// Only this step fails.
    Once,
}

impl Fault {
    pub(super) fn step(&self) -> io::Result<()> {
        let step = self.steps.replace(self.steps.get() + 1);
        match self.at.get() {
            Some((at, How::Crash)) if at == step => panic!("crash"),
            Some((at, How::Once)) if at == step => Err(io::ErrorKind::StorageFull.into()),
            Some((at, How::Full)) if at <= step => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }
}

/// The content of a set's files, in the order of `NAMES`.
type Seen = [String; 3];

fn directory_at(path: PathBuf) -> OutputDirectory {
    let names = NAMES.map(str::to_owned).to_vec();
    OutputDirectory::new(Layout { option: "--output-dir", path, names, owner: Owner::default() })
}

fn content(set: usize) -> Seen {
    NAMES.map(|name| format!("{name} of set {set}"))
}

fn files(set: usize) -> [OutputFile; 3] {
    // No umask lets 0666 through.
    let [chain, key, root] = content(set);
    [(KEY_FILE, 0o600, key), (CHAIN_FILE, 0o666, chain), (ROOT_FILE, 0o644, root)].map(
        |(name, mode, content)| OutputFile {
            name: name.to_owned(),
            mode,
            content: Zeroizing::new(content.into_bytes()),
        },
    )
}

/// The content of the three files in `directory`; none if one is missing.
fn seen(directory: &Path) -> Option<Seen> {
    let [chain, key, root] = NAMES.map(|name| fs::read_to_string(directory.join(name)).ok());
    Some([chain?, key?, root?])
}

/// The names of all entries of `directory`.
fn entries(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The number of entries of the agent that no link leads to.
fn unused(directory: &Path) -> usize {
    let current = fs::read_link(directory.join(DATA)).map(PathBuf::into_os_string).unwrap_or_default();
    let mut entries = entries(directory);
    entries.retain(|name| is_ours(Path::new(name)) && **name != current);
    entries.len()
}

/// A directory before a write.
#[derive(Clone, Copy, Debug)]
enum Before {
    Absent,
    Written,
    /// Files left by another agent.
    Plain,
    /// Such files, without roots.
    PlainPair,
    /// Written by this agent, but with a plain file in place of a link.
    Mixed,
}

const BEFORE: [Before; 5] =
    [Before::Absent, Before::Written, Before::Plain, Before::PlainPair, Before::Mixed];

impl Before {
    fn make(self, directory: &Path) {
        let plain = |names: &[&str]| {
            for (name, content) in NAMES.iter().zip(content(1)).filter(|(name, _)| names.contains(name)) {
                let _ = fs::remove_file(directory.join(name));
                fs::write(directory.join(name), content).unwrap();
            }
        };
        if !matches!(self, Self::Absent) {
            fs::create_dir(directory).unwrap();
            fs::create_dir(directory.join("..2026_theirs")).unwrap();
            fs::write(directory.join("notes.txt"), "theirs").unwrap();
        }
        match self {
            Self::Absent => {}
            Self::Written => drop(directory_at(directory.to_owned()).write(&files(1)).unwrap()),
            Self::Plain => plain(&NAMES),
            Self::PlainPair => plain(&[KEY_FILE, CHAIN_FILE]),
            Self::Mixed => {
                directory_at(directory.to_owned()).write(&files(1)).unwrap();
                plain(&[CHAIN_FILE]);
            }
        }
    }
}

fn place() -> (TempDir, PathBuf) {
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path().join("made/on demand");
    fs::create_dir(directory.parent().unwrap()).unwrap();
    (temporary, directory)
}

/// Sweeps as if the grace period had passed.
fn sweep(directory: &mut OutputDirectory) {
    directory.sweep().unwrap();
    directory.old.values_mut().for_each(|since| *since -= GRACE);
    assert!(!directory.sweep().unwrap());
}

#[test]
fn a_generation_is_swapped_in_with_its_modes_and_foreign_files_stay() {
    for before in BEFORE {
        let (_temporary, path) = place();
        before.make(&path);
        let mut theirs = if path.exists() { entries(&path) } else { BTreeSet::new() };
        theirs.retain(|name| !is_ours(Path::new(name)));
        let mut directory = directory_at(path.clone());
        for set in 2..4 {
            assert_eq!(directory.write(&files(set)).unwrap(), Written::Swapped, "{before:?}");
            assert_eq!(seen(&path).unwrap(), content(set), "{before:?}");
            assert_eq!(seen(&path.join(DATA)).unwrap(), content(set), "{before:?}");
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(NAMES.map(|name| mode(&path.join(name))), [0o666, 0o600, 0o644]);
        assert_eq!([mode(&path), mode(&path.join(DATA)), mode(&path.join(LOCK))], [0o755, 0o755, 0o700]);
        sweep(&mut directory);
        let generation = fs::read_link(path.join(DATA)).unwrap().into_os_string().into_string().unwrap();
        theirs.extend(NAMES.into_iter().chain([DATA, LOCK, &generation]).map(str::to_owned));
        assert_eq!(entries(&path), theirs, "{before:?}");
    }
}

#[test]
fn an_unchanged_set_is_not_swapped() {
    let (_temporary, path) = place();
    directory_at(path.clone()).write(&files(1)).unwrap();
    let generation = fs::read_link(path.join(DATA)).unwrap();
    // Also after a restart.
    assert_eq!(directory_at(path.clone()).write(&files(1)).unwrap(), Written::Unchanged);
    assert_eq!(fs::read_link(path.join(DATA)).unwrap(), generation);
    let mut shared = files(1);
    shared[0].mode = 0o640;
    assert_eq!(directory_at(path.clone()).write(&shared).unwrap(), Written::Swapped, "another mode");
    fs::remove_file(path.join(ROOT_FILE)).unwrap();
    assert_eq!(directory_at(path.clone()).write(&shared).unwrap(), Written::Swapped, "a link was lost");
    assert_eq!(seen(&path).unwrap(), content(1));
    fs::remove_dir_all(path.join(DATA).canonicalize().unwrap()).unwrap();
    assert_eq!(directory_at(path.clone()).write(&shared).unwrap(), Written::Swapped, "all was lost");
    assert_eq!(seen(&path).unwrap(), content(1));
}

#[test]
fn a_recorded_hook_run_survives_the_process_and_is_invisible_to_readers() {
    let (_temporary, path) = place();
    let mut directory = directory_at(path.clone());
    assert!(!directory.hook_is_done());
    directory.write(&files(1)).unwrap();
    assert!(!directory.hook_is_done());
    let before = entries(&path);
    // Left by a crash in between.
    symlink("..attache-0", path.join(LOCK).join(HOOK_DONE).with_extension("new")).unwrap();
    directory.record_hook_done().unwrap();
    assert!(directory.hook_is_done());
    let mut next = directory_at(path.clone());
    assert!(!next.hook_is_done(), "the new process does not know the current generation yet");
    assert_eq!(next.write(&files(1)).unwrap(), Written::Unchanged);
    assert!(next.hook_is_done());
    assert_eq!(entries(&path), before);
    next.write(&files(2)).unwrap();
    assert!(!next.hook_is_done());
}

#[test]
fn an_inspection_names_the_damage_or_finds_another_writer() {
    type Harm = fn(&Path);
    let cases: [(Harm, &str); 8] = [
        (|path| fs::remove_dir_all(path).unwrap(), "the directory is missing"),
        (|path| fs::remove_file(path.join(DATA)).unwrap(), "..data is missing"),
        (|path| fs::remove_file(path.join(KEY_FILE)).unwrap(), "key.pem is missing"),
        (|path| fs::remove_dir_all(path.join(DATA).canonicalize().unwrap()).unwrap(), "reading"),
        (|path| fs::remove_file(path.join(DATA).join(ROOT_FILE)).unwrap(), "reading root-cert.pem failed"),
        (|path| fs::write(path.join(KEY_FILE), "other").unwrap(), "key.pem has different content"),
        (
            |path| {
                fs::remove_file(path.join(KEY_FILE)).unwrap();
                fs::write(path.join(KEY_FILE), "plain").unwrap();
            },
            "key.pem is a file instead of a link",
        ),
        (
            |path| {
                fs::remove_file(path.join(KEY_FILE)).unwrap();
                fs::create_dir(path.join(KEY_FILE)).unwrap();
            },
            "key.pem is not a regular file",
        ),
    ];
    for (harm, words) in cases {
        let (_temporary, path) = place();
        let mut directory = directory_at(path.clone());
        assert_eq!(directory.inspect(), Condition::Intact, "nothing was written yet");
        directory.write(&files(1)).unwrap();
        fs::set_permissions(path.join(KEY_FILE), Permissions::from_mode(0o640)).unwrap();
        assert_eq!(directory.inspect(), Condition::Intact);
        harm(&path);
        let Condition::Damaged(found) = directory.inspect() else {
            panic!("no damage found, expected: {words}")
        };
        assert!(found.contains(words), "{words}: {found}");
    }
    let (_temporary, path) = place();
    let [mut one, mut other] = [directory_at(path.clone()), directory_at(path)];
    one.write(&files(1)).unwrap();
    assert!(!other.is_replaced() && other.write(&files(1)).unwrap() == Written::Unchanged);
    assert_eq!(
        (one.inspect(), other.inspect()),
        (Condition::Intact, Condition::Intact),
        "equal files are no conflict"
    );
    other.write(&files(2)).unwrap();
    assert_eq!((one.inspect(), other.inspect()), (Condition::Replaced, Condition::Intact));
    assert!(one.is_replaced());
    one.write(&files(3)).unwrap();
    assert_eq!((one.inspect(), other.inspect()), (Condition::Intact, Condition::Replaced));
}

/// Calls `test` once for each step of a write of set 2, with a directory where that step failed as `how` says.
fn at_every_step(
    how: How,
    test: impl Fn(&str, Before, &mut OutputDirectory, Option<Result<Written, OutputDirectoryError>>),
) {
    let silent = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload_as_str() != Some("crash") {
            silent(panic);
        }
    }));
    for before in BEFORE {
        let mut reached = 0;
        loop {
            let (_temporary, path) = place();
            before.make(&path);
            let mut directory = directory_at(path);
            directory.fault.at.set(Some((reached, how)));
            let outcome = catch_unwind(AssertUnwindSafe(|| directory.write(&files(2))));
            let was_reached = directory.fault.steps.get() > reached;
            directory.fault.at.set(None);
            test(&format!("{before:?}, step {reached}, {how:?}"), before, &mut directory, outcome.ok());
            if !was_reached {
                break;
            }
            reached += 1;
        }
        assert!(reached >= 7, "{before:?} has only {reached} steps");
    }
}

/// Asserts that the three names show one whole set of `sets`, and that no name that existed is missing.
fn assert_whole(at: &str, before: Before, path: &Path, sets: &[usize]) {
    let shown = NAMES.map(|name| fs::read_to_string(path.join(name)).ok());
    let is = |set: usize| {
        let content = content(set).map(Some);
        let [chain, key, root] = content.clone();
        shown == content
            || (matches!(before, Before::PlainPair)
                && set == 1
                && shown == [chain, key, None]
                && root.is_some())
    };
    let nothing = matches!(before, Before::Absent) && shown == [None, None, None];
    assert!(nothing || sets.iter().any(|set| is(*set)), "{at}: {shown:?}");
}

#[test]
fn a_crash_at_any_step_leaves_one_whole_set_and_the_next_write_cleans_up() {
    at_every_step(How::Crash, |at, before, directory, _| {
        let path = directory.path.clone();
        assert_whole(at, before, &path, &[1, 2]);
        // Also with another crash at each step of the repair.
        for step in 0..40 {
            let mut next = directory_at(path.clone());
            next.fault.at.set(Some((step, How::Crash)));
            let ended = catch_unwind(AssertUnwindSafe(|| next.write(&files(2)).unwrap()));
            assert_whole(at, before, &path, &[1, 2]);
            if ended.is_ok() {
                break;
            }
        }
        assert_eq!(seen(&path).unwrap(), content(2), "{at}");
        let mut next = directory_at(path.clone());
        assert_eq!(next.write(&files(2)).unwrap(), Written::Unchanged, "{at}");
        sweep(&mut next);
        assert_eq!(unused(&path), 0, "{at}: {:?}", entries(&path));
    });
}

#[test]
fn a_full_disk_leaves_the_old_set_and_no_partial_generation() {
    at_every_step(How::Full, |at, before, directory, outcome| {
        let path = directory.path.clone();
        let sets: &[usize] = match outcome.unwrap() {
            Ok(_) => &[2],
            Err(error) => {
                let error = error.to_string();
                let is_clear = error.contains("failed: no storage space; free some space there");
                assert!(is_clear && error.contains("made/on demand"), "{error}");
                &[1]
            }
        };
        assert_whole(at, before, &path, sets);
        if path.exists() {
            let whole = entries(&path).into_iter().filter(|name| is_ours(Path::new(name)));
            let whole = whole.filter(|name| path.join(name).join(KEY_FILE).exists()).count();
            assert_eq!(whole, entries(&path).iter().filter(|name| is_ours(Path::new(name))).count(), "{at}");
        }
        assert!(matches!(directory.write(&files(2)).unwrap(), Written::Swapped | Written::Unchanged));
        assert_whole(at, before, &path, &[2]);
    });
}

#[test]
fn a_single_failure_at_any_step_is_recovered_from() {
    at_every_step(How::Once, |at, before, directory, outcome| {
        let sets: &[usize] = if outcome.unwrap().is_ok() { &[2] } else { &[1] };
        assert_whole(at, before, &directory.path, sets);
        directory.write(&files(2)).unwrap();
        assert_whole(at, before, &directory.path, &[2]);
        sweep(directory);
        assert_eq!(unused(&directory.path), 0, "{at}");
    });
}

fn make_fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

#[test]
fn foreign_entries_are_named_in_the_error_and_left_alone() {
    type Make = fn(&Path);
    let cases: [(Make, &str); 9] = [
        (
            |path| {
                fs::remove_dir(path).unwrap();
                symlink("nowhere", path).unwrap();
            },
            "demand is a dangling link",
        ),
        (|path| make_fifo(&path.join(LOCK)), "..attache-lock is not a directory"),
        (|path| symlink("/", path.join(LOCK)).unwrap(), "..attache-lock is not a directory"),
        (|path| fs::create_dir(path.join(KEY_FILE)).unwrap(), "key.pem is not a regular file"),
        (|path| symlink("/etc/hosts", path.join(ROOT_FILE)).unwrap(), "root-cert.pem is a link"),
        (|path| fs::create_dir(path.join(DATA)).unwrap(), "..data is not a link"),
        (
            |path| symlink("..2026_01_01", path.join(DATA)).unwrap(),
            "..data is a link that this agent did not make",
        ),
        (
            |path| symlink("../..attache-1", path.join(DATA)).unwrap(),
            "..data is a link that this agent did not make",
        ),
        (
            |path| {
                fs::remove_dir(path).unwrap();
                fs::write(path, "precious").unwrap();
            },
            "demand is not a directory",
        ),
    ];
    for (make, words) in cases {
        let (_temporary, path) = place();
        fs::create_dir(&path).unwrap();
        make(&path);
        for outcome in
            [directory_at(path.clone()).check(), directory_at(path.clone()).write(&files(1)).map(drop)]
        {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("another --output-dir"), "{error}");
        }
        assert!(!path.is_dir() || entries(&path).len() <= 2, "{words}: {:?}", entries(&path));
    }
}

#[test]
fn a_path_that_cannot_be_created_is_an_error_with_a_remedy() {
    let error = |path: &str| directory_at(path.into()).check().unwrap_err().to_string();
    let error = error("/proc/nothing-is-made-here");
    assert!(error.starts_with("creating /proc/nothing-is-made-here failed: "), "{error}");
    assert!(error.ends_with("; choose another --output-dir"), "{error}");
}

#[test]
fn a_directory_locked_by_another_agent_is_an_error_with_a_remedy() {
    let (_temporary, path) = place();
    directory_at(path.clone()).write(&files(1)).unwrap();
    let _theirs = file::lock_directory(&path.join(LOCK)).unwrap();
    let error = directory_at(path).write(&files(2)).unwrap_err().to_string();
    assert!(error.starts_with("locking ") && error.contains("an --output-dir of its own"), "{error}");
}

#[test]
fn old_generations_stay_for_their_readers_but_never_too_many() {
    let (_temporary, path) = place();
    let mut directory = directory_at(path.clone());
    directory.write(&files(1)).unwrap();
    let old = path.join(fs::read_link(path.join(DATA)).unwrap());
    let swapped = Instant::now();
    directory.write(&files(2)).unwrap();
    while directory.sweep().unwrap() {
        std::thread::yield_now();
        assert!(!old.exists() || seen(&old).unwrap() == content(1), "the old generation is incomplete");
    }
    assert!(!old.exists() && swapped.elapsed() >= GRACE, "{:?}", swapped.elapsed());
    for set in 0..2 * limits::OUTPUT_GENERATIONS {
        directory.write(&files(set)).unwrap();
        assert!(unused(&path) <= limits::OUTPUT_GENERATIONS);
    }
}

#[test]
fn a_failed_removal_is_reported_and_retried() {
    let (_temporary, path) = place();
    let mut directory = directory_at(path.clone());
    directory.write(&files(1)).unwrap();
    directory.write(&files(2)).unwrap();
    directory.old.values_mut().for_each(|since| *since -= GRACE);
    let old = path.join(directory.old.keys().next().unwrap());
    directory.fault.at.set(Some((directory.fault.steps.get(), How::Once)));
    let error = directory.sweep().unwrap_err().to_string();
    assert!(error.contains("removing") && error.contains("..attache-"), "{error}");
    assert!(old.exists() && !directory.sweep().unwrap() && !old.exists());
}

#[test]
fn a_removed_directory_does_not_come_back_empty() {
    let (_temporary, path) = place();
    let mut directory = directory_at(path.clone());
    directory.write(&files(1)).unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert!(!directory.sweep().unwrap());
    assert!(!path.exists());
}

#[test]
fn readers_never_miss_a_name_or_see_a_mixed_set() {
    for before in [Before::Written, Before::Plain] {
        let (_temporary, path) = place();
        before.make(&path);
        let (stop, looks) = (AtomicBool::new(false), [AtomicUsize::new(0), AtomicUsize::new(0)]);
        std::thread::scope(|scope| {
            let look = |looks: &AtomicUsize| {
                while !stop.load(Ordering::Relaxed) {
                    assert!(seen(&path).is_some(), "a name is missing: {:?}", entries(&path));
                    if let Ok(to) = fs::read_link(path.join(DATA)) {
                        let set = seen(&path.join(to)).unwrap();
                        let number = set[0].rsplit(' ').next().unwrap().parse().unwrap();
                        assert_eq!(set, content(number));
                    }
                    looks.fetch_add(1, Ordering::Relaxed);
                }
            };
            let readers = looks.each_ref().map(|looks| scope.spawn(move || look(looks)));
            let mut directory = directory_at(path.clone());
            for set in 2..302 {
                // Now and then another program writes a plain file over a link, as Istio's agent does.
                if set % 10 == 0 {
                    let new = path.join("new");
                    fs::write(&new, &content(set - 1)[0]).unwrap();
                    fs::rename(&new, path.join(CHAIN_FILE)).unwrap();
                }
                directory.write(&files(set)).unwrap();
                // With so many swaps in so little time no generation keeps its grace period, so wait for the readers instead.
                if set % 10 == 0 {
                    let before = looks.each_ref().map(|looks| looks.load(Ordering::Relaxed));
                    let has_looked =
                        |(before, looks): (&usize, &AtomicUsize)| looks.load(Ordering::Relaxed) > before + 1;
                    while !before.iter().zip(&looks).all(has_looked)
                        && !readers.iter().any(|reader| reader.is_finished())
                    {
                        std::thread::yield_now();
                    }
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn files_are_given_to_their_owner_and_an_owner_that_cannot_be_set_is_an_error_with_a_remedy() {
    use std::os::unix::fs::MetadataExt as _;
    let own = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid())).unwrap();
    let (temporary, path) = place();
    let (user, group) = own(temporary.path());
    let with_owner = |path: &Path, owner| {
        OutputDirectory::new(Layout {
            option: "--output",
            path: path.to_owned(),
            names: NAMES.map(str::to_owned).to_vec(),
            owner,
        })
    };
    // What every user may do: keep its own.
    let mut directory = with_owner(&path, Owner { user: Some(user), group: Some(group) });
    directory.check().unwrap();
    assert_eq!(directory.write(&files(1)).unwrap(), Written::Swapped);
    assert_eq!(own(&path.join(KEY_FILE)), (user, group));
    assert_eq!(directory.write(&files(1)).unwrap(), Written::Unchanged);
    let other = Owner { user: None, group: Some(group + 1) };
    let mut directory = with_owner(&path, other);
    if user == 0 {
        assert_eq!(directory.write(&files(1)).unwrap(), Written::Swapped, "another group");
        assert_eq!(NAMES.map(|name| own(&path.join(name))), [(0, group + 1); 3]);
        assert_eq!(directory.write(&files(1)).unwrap(), Written::Unchanged);
    } else {
        for outcome in [directory.check(), directory.write(&files(1)).map(drop)] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(&format!("to group {} failed: ", group + 1)), "{error}");
            assert!(error.contains("CAP_CHOWN"), "{error}");
        }
        assert_eq!(seen(&path).unwrap(), content(1));
        assert_eq!(unused(&path), 0, "{:?}", entries(&path));
    }
}
