//! Real folders, with writes that end at every step they have.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tempfile::TempDir;

use super::*;
use crate::fs::generation::{CHAIN_FILE, KEY_FILE, ROOT_FILE};

/// Ends a write before one of its steps.
#[derive(Debug, Default)]
pub(super) struct Fault {
    steps: Cell<usize>,
    at: Cell<Option<(usize, How)>>,
}

/// What happens at that step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// The process ends: nothing is cleaned up.
    Crash,
    /// The disk refuses this step and all that follow.
    Full,
    /// The disk refuses this one step.
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

/// What a set's files hold, by their names.
type Seen = [String; 3];

fn content(set: usize) -> Seen {
    NAMES.map(|name| format!("{name} of set {set}"))
}

fn files(set: usize) -> [File; 3] {
    // No umask lets 0666 through.
    let [chain, key, root] = content(set);
    [(KEY_FILE, 0o600, key), (CHAIN_FILE, 0o666, chain), (ROOT_FILE, 0o644, root)]
        .map(|(name, mode, content)| File { name, mode, content: Zeroizing::new(content.into_bytes()) })
}

/// What `folder` holds under the three names; none where one is missing.
fn seen(folder: &Path) -> Option<Seen> {
    let [chain, key, root] = NAMES.map(|name| fs::read_to_string(folder.join(name)).ok());
    Some([chain?, key?, root?])
}

/// The names of everything in `folder`.
fn entries(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// What is ours and nobody is led to.
fn unused(folder: &Path) -> usize {
    let current = fs::read_link(folder.join(DATA)).map(PathBuf::into_os_string).unwrap_or_default();
    let mut entries = entries(folder);
    entries.retain(|name| is_ours(Path::new(name)) && **name != current);
    entries.len()
}

/// A folder as a write may find it.
#[derive(Clone, Copy, Debug)]
enum Before {
    Absent,
    Written,
    /// Files that another agent has left.
    Plain,
    /// Such files without roots.
    PlainPair,
    /// Ours, but somebody has put a file in a link's place.
    Mixed,
}

const BEFORE: [Before; 5] =
    [Before::Absent, Before::Written, Before::Plain, Before::PlainPair, Before::Mixed];

impl Before {
    fn make(self, folder: &Path) {
        let plain = |names: &[&str]| {
            for (name, content) in NAMES.iter().zip(content(1)).filter(|(name, _)| names.contains(name)) {
                let _ = fs::remove_file(folder.join(name));
                fs::write(folder.join(name), content).unwrap();
            }
        };
        if !matches!(self, Self::Absent) {
            fs::create_dir(folder).unwrap();
            fs::create_dir(folder.join("..2026_theirs")).unwrap();
            fs::write(folder.join("notes.txt"), "theirs").unwrap();
        }
        match self {
            Self::Absent => {}
            Self::Written => drop(Folder::new(folder.to_owned()).write(&files(1)).unwrap()),
            Self::Plain => plain(&NAMES),
            Self::PlainPair => plain(&[KEY_FILE, CHAIN_FILE]),
            Self::Mixed => {
                Folder::new(folder.to_owned()).write(&files(1)).unwrap();
                plain(&[CHAIN_FILE]);
            }
        }
    }
}

fn place() -> (TempDir, PathBuf) {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("made/on demand");
    fs::create_dir(folder.parent().unwrap()).unwrap();
    (temporary, folder)
}

/// As if its grace had passed.
fn sweep(folder: &mut Folder) {
    folder.sweep().unwrap();
    folder.old.values_mut().for_each(|since| *since -= GRACE);
    assert!(!folder.sweep().unwrap());
}

#[test]
fn a_generation_is_swapped_in_with_its_modes_and_foreign_files_stay() {
    for before in BEFORE {
        let (_temporary, path) = place();
        before.make(&path);
        let mut theirs = if path.exists() { entries(&path) } else { BTreeSet::new() };
        theirs.retain(|name| !is_ours(Path::new(name)));
        let mut folder = Folder::new(path.clone());
        for set in 2..4 {
            assert_eq!(folder.write(&files(set)).unwrap(), Written::Swapped, "{before:?}");
            assert_eq!(seen(&path).unwrap(), content(set), "{before:?}");
            assert_eq!(seen(&path.join(DATA)).unwrap(), content(set), "{before:?}");
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(NAMES.map(|name| mode(&path.join(name))), [0o666, 0o600, 0o644]);
        assert_eq!([mode(&path), mode(&path.join(DATA)), mode(&path.join(LOCK))], [0o755, 0o755, 0o700]);
        sweep(&mut folder);
        let generation = fs::read_link(path.join(DATA)).unwrap().into_os_string().into_string().unwrap();
        theirs.extend(NAMES.into_iter().chain([DATA, LOCK, &generation]).map(str::to_owned));
        assert_eq!(entries(&path), theirs, "{before:?}");
    }
}

#[test]
fn what_is_there_already_is_not_swapped() {
    let (_temporary, path) = place();
    Folder::new(path.clone()).write(&files(1)).unwrap();
    let generation = fs::read_link(path.join(DATA)).unwrap();
    // After a restart, too.
    assert_eq!(Folder::new(path.clone()).write(&files(1)).unwrap(), Written::Same);
    assert_eq!(fs::read_link(path.join(DATA)).unwrap(), generation);
    let mut shared = files(1);
    shared[0].mode = 0o640;
    assert_eq!(Folder::new(path.clone()).write(&shared).unwrap(), Written::Swapped, "another mode");
    fs::remove_file(path.join(ROOT_FILE)).unwrap();
    assert_eq!(Folder::new(path.clone()).write(&shared).unwrap(), Written::Swapped, "a link was lost");
    assert_eq!(seen(&path).unwrap(), content(1));
    fs::remove_dir_all(path.join(DATA).canonicalize().unwrap()).unwrap();
    assert_eq!(Folder::new(path.clone()).write(&shared).unwrap(), Written::Swapped, "all was lost");
    assert_eq!(seen(&path).unwrap(), content(1));
}

#[test]
fn whom_the_hook_was_told_of_survives_the_process_and_shows_to_nobody() {
    let (_temporary, path) = place();
    let mut folder = Folder::new(path.clone());
    assert!(!folder.is_told());
    folder.write(&files(1)).unwrap();
    assert!(!folder.is_told());
    let before = entries(&path);
    // A crash in between leaves this.
    symlink("..attache-0", path.join(LOCK).join(TOLD).with_extension("new")).unwrap();
    folder.note_told().unwrap();
    assert!(folder.is_told());
    let mut next = Folder::new(path.clone());
    assert!(!next.is_told(), "it does not know yet what is to be there");
    assert_eq!(next.write(&files(1)).unwrap(), Written::Same);
    assert!(next.is_told());
    assert_eq!(entries(&path), before);
    next.write(&files(2)).unwrap();
    assert!(!next.is_told());
}

#[test]
fn a_look_says_what_is_missing_or_whose_it_is() {
    type Harm = fn(&Path);
    let cases: [(Harm, &str); 8] = [
        (|path| fs::remove_dir_all(path).unwrap(), "the folder is gone"),
        (|path| fs::remove_file(path.join(DATA)).unwrap(), "..data is gone"),
        (|path| fs::remove_file(path.join(KEY_FILE)).unwrap(), "key.pem is gone"),
        (|path| fs::remove_dir_all(path.join(DATA).canonicalize().unwrap()).unwrap(), "can't be read"),
        (|path| fs::remove_file(path.join(DATA).join(ROOT_FILE)).unwrap(), "root-cert.pem can't be read"),
        (|path| fs::write(path.join(KEY_FILE), "other").unwrap(), "key.pem holds something else"),
        (
            |path| {
                fs::remove_file(path.join(KEY_FILE)).unwrap();
                fs::write(path.join(KEY_FILE), "plain").unwrap();
            },
            "key.pem is no link any more",
        ),
        (
            |path| {
                fs::remove_file(path.join(KEY_FILE)).unwrap();
                fs::create_dir(path.join(KEY_FILE)).unwrap();
            },
            "key.pem is not a plain file",
        ),
    ];
    for (harm, words) in cases {
        let (_temporary, path) = place();
        let mut folder = Folder::new(path.clone());
        assert_eq!(folder.look(), Look::Whole, "nothing was written");
        folder.write(&files(1)).unwrap();
        fs::set_permissions(path.join(KEY_FILE), Permissions::from_mode(0o640)).unwrap();
        assert_eq!(folder.look(), Look::Whole);
        harm(&path);
        let Look::Damaged(found) = folder.look() else { panic!("{words}: nothing was found") };
        assert!(found.contains(words), "{words}: {found}");
    }
    let (_temporary, path) = place();
    let [mut one, mut other] = [Folder::new(path.clone()), Folder::new(path)];
    one.write(&files(1)).unwrap();
    assert!(!other.is_taken() && other.write(&files(1)).unwrap() == Written::Same);
    assert_eq!((one.look(), other.look()), (Look::Whole, Look::Whole), "equal files are nobody's");
    other.write(&files(2)).unwrap();
    assert_eq!((one.look(), other.look()), (Look::Taken, Look::Whole));
    assert!(one.is_taken());
    one.write(&files(3)).unwrap();
    assert_eq!((one.look(), other.look()), (Look::Whole, Look::Taken));
}

/// Calls `test` with a folder whose write of set 2 was ended at one step after the other, `how`.
fn at_every_step(how: How, test: impl Fn(&str, Before, &mut Folder, Option<Result<Written, FolderError>>)) {
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
            let mut folder = Folder::new(path);
            folder.fault.at.set(Some((reached, how)));
            let outcome = catch_unwind(AssertUnwindSafe(|| folder.write(&files(2))));
            let was_reached = folder.fault.steps.get() > reached;
            folder.fault.at.set(None);
            test(&format!("{before:?}, step {reached}, {how:?}"), before, &mut folder, outcome.ok());
            if !was_reached {
                break;
            }
            reached += 1;
        }
        assert!(reached >= 7, "{before:?} has only {reached} steps");
    }
}

/// The three names show one set, and no name that was there is missing.
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
fn after_a_crash_at_any_step_one_whole_set_is_there_and_the_next_write_mends_the_rest() {
    at_every_step(How::Crash, |at, before, folder, _| {
        let path = folder.path.clone();
        assert_whole(at, before, &path, &[1, 2]);
        // Another crash at each step of the repair, too.
        for step in 0..40 {
            let mut next = Folder::new(path.clone());
            next.fault.at.set(Some((step, How::Crash)));
            let ended = catch_unwind(AssertUnwindSafe(|| next.write(&files(2)).unwrap()));
            assert_whole(at, before, &path, &[1, 2]);
            if ended.is_ok() {
                break;
            }
        }
        assert_eq!(seen(&path).unwrap(), content(2), "{at}");
        let mut next = Folder::new(path.clone());
        assert_eq!(next.write(&files(2)).unwrap(), Written::Same, "{at}");
        sweep(&mut next);
        assert_eq!(unused(&path), 0, "{at}: {:?}", entries(&path));
    });
}

#[test]
fn a_disk_that_refuses_leaves_the_old_set_and_no_half_of_the_new_one() {
    at_every_step(How::Full, |at, before, folder, outcome| {
        let path = folder.path.clone();
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
        assert!(matches!(folder.write(&files(2)).unwrap(), Written::Swapped | Written::Same));
        assert_whole(at, before, &path, &[2]);
    });
}

#[test]
fn one_refusal_at_any_step_is_survived() {
    at_every_step(How::Once, |at, before, folder, outcome| {
        let sets: &[usize] = if outcome.unwrap().is_ok() { &[2] } else { &[1] };
        assert_whole(at, before, &folder.path, sets);
        folder.write(&files(2)).unwrap();
        assert_whole(at, before, &folder.path, &[2]);
        sweep(folder);
        assert_eq!(unused(&folder.path), 0, "{at}");
    });
}

fn make_fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

#[test]
fn what_is_not_the_agents_is_named_and_left_alone() {
    type Make = fn(&Path);
    let cases: [(Make, &str); 9] = [
        (
            |path| {
                fs::remove_dir(path).unwrap();
                symlink("nowhere", path).unwrap();
            },
            "demand is a link to nowhere",
        ),
        (|path| make_fifo(&path.join(LOCK)), "..attache-lock is not a folder"),
        (|path| symlink("/", path.join(LOCK)).unwrap(), "..attache-lock is not a folder"),
        (|path| fs::create_dir(path.join(KEY_FILE)).unwrap(), "key.pem is not a plain file"),
        (|path| symlink("/etc/hosts", path.join(ROOT_FILE)).unwrap(), "root-cert.pem is a link"),
        (|path| fs::create_dir(path.join(DATA)).unwrap(), "..data is not a link of this agent's"),
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
            "demand is not a folder",
        ),
    ];
    for (make, words) in cases {
        let (_temporary, path) = place();
        fs::create_dir(&path).unwrap();
        make(&path);
        for outcome in
            [Folder::new(path.clone()).check(), Folder::new(path.clone()).write(&files(1)).map(drop)]
        {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("another --output-dir"), "{error}");
        }
        assert!(!path.is_dir() || entries(&path).len() <= 2, "{words}: {:?}", entries(&path));
    }
}

#[test]
fn what_is_in_the_way_is_told_with_what_to_do() {
    let error = |path: &str| Folder::new(path.into()).check().unwrap_err().to_string();
    let told = error("/proc/nothing-is-made-here");
    assert!(told.starts_with("creating /proc/nothing-is-made-here failed: "), "{told}");
    assert!(told.ends_with("; choose another --output-dir"), "{told}");
}

#[test]
fn a_folder_that_another_agent_writes_is_said_to_be_locked() {
    let (_temporary, path) = place();
    Folder::new(path.clone()).write(&files(1)).unwrap();
    let _theirs = file::lock_directory(&path.join(LOCK)).unwrap();
    let error = Folder::new(path).write(&files(2)).unwrap_err().to_string();
    assert!(error.contains("can't be locked") && error.contains("an --output-dir of its own"), "{error}");
}

#[test]
fn an_old_generation_stays_for_those_who_read_it_but_never_many() {
    let (_temporary, path) = place();
    let mut folder = Folder::new(path.clone());
    folder.write(&files(1)).unwrap();
    let old = path.join(fs::read_link(path.join(DATA)).unwrap());
    let swapped = Instant::now();
    folder.write(&files(2)).unwrap();
    while folder.sweep().unwrap() {
        std::thread::yield_now();
        assert!(!old.exists() || seen(&old).unwrap() == content(1), "half of it is gone");
    }
    assert!(!old.exists() && swapped.elapsed() >= GRACE, "{:?}", swapped.elapsed());
    for set in 0..2 * limits::OUTPUT_GENERATIONS {
        folder.write(&files(set)).unwrap();
        assert!(unused(&path) <= limits::OUTPUT_GENERATIONS);
    }
}

#[test]
fn a_generation_that_cannot_be_removed_is_told_and_tried_again() {
    let (_temporary, path) = place();
    let mut folder = Folder::new(path.clone());
    folder.write(&files(1)).unwrap();
    folder.write(&files(2)).unwrap();
    folder.old.values_mut().for_each(|since| *since -= GRACE);
    let old = path.join(folder.old.keys().next().unwrap());
    folder.fault.at.set(Some((folder.fault.steps.get(), How::Once)));
    let told = folder.sweep().unwrap_err().to_string();
    assert!(told.contains("removing") && told.contains("..attache-"), "{told}");
    assert!(old.exists() && !folder.sweep().unwrap() && !old.exists());
}

#[test]
fn a_folder_that_was_removed_does_not_come_back_empty() {
    let (_temporary, path) = place();
    let mut folder = Folder::new(path.clone());
    folder.write(&files(1)).unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert!(!folder.sweep().unwrap());
    assert!(!path.exists());
}

#[test]
fn readers_never_miss_a_name_nor_see_a_mixed_set() {
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
            let mut folder = Folder::new(path.clone());
            for set in 2..302 {
                // Now and then somebody writes a plain file over a link, as Istio's agent does.
                if set % 10 == 0 {
                    let new = path.join("new");
                    fs::write(&new, &content(set - 1)[0]).unwrap();
                    fs::rename(&new, path.join(CHAIN_FILE)).unwrap();
                }
                folder.write(&files(set)).unwrap();
                // So many swaps in so little time leave no generation its second: readers are waited for instead.
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
