//! What the process gives away of its own rights. Rights are those of a thread and of the threads that it starts: so all of
//! this is for the start, when there is one.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, AccessFs, PathBeneath, PathFd, PathFdError, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _,
    RulesetError, RulesetStatus,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::set_no_new_privs;

/// What is asked of the kernel. Later versions would also refuse connections to sockets elsewhere: systemd's, say.
const LANDLOCK: ABI = ABI::V5;

/// Why the process can't be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error(
        "the folder {folder} can't be used: {source}; with --landlock it must be there at the start: create or mount it"
    )]
    Folder { folder: PathBuf, source: io::Error },
    #[error("opening the folder {folder} for --landlock failed: {source}")]
    Open { folder: PathBuf, source: PathFdError },
    #[error(
        "the kernel, or a filter of system calls (SystemCallFilter= of a unit, a container's seccomp profile), refuses \
         --landlock: {0}; allow the three landlock_* calls, or leave it out"
    )]
    Refused(#[from] RulesetError),
}

/// Keeps other processes of this user, and core files, from the keys in this process's memory.
pub fn protect_memory() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "core files can't be forbidden; keys may get into them");
    }
}

/// Lets no program that is started give us rights that we don't have: there is none to be started.
pub fn refuse_new_privileges() {
    if let Err(error) = set_no_new_privs(true) {
        tracing::warn!(%error, "gaining privileges by starting programs can't be forbidden");
    }
}

/// From here on this process writes in `folders` alone, and starts no program. What it may read stays: mounted files
/// lie behind links that lead elsewhere tomorrow.
///
/// A kernel that knows less of this does what it can.
pub fn confine(folders: &[PathBuf]) -> Result<(), ConfineError> {
    let writing = AccessFs::from_write(LANDLOCK);
    let mut rules = Ruleset::default().handle_access(writing | AccessFs::Execute)?.create()?;
    for folder in folders {
        let opened = PathFd::new(folder);
        let opened = opened.map_err(|source| ConfineError::Open { folder: folder.clone(), source })?;
        rules = rules.add_rule(PathBeneath::new(opened, writing))?;
    }
    let status = rules.restrict_self()?;
    let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let folders = folders.join(", ");
    match status.ruleset {
        RulesetStatus::FullyEnforced => {
            tracing::info!(
                folders,
                "landlock is in force: only in these folders is written, and nothing is executed"
            );
        }
        RulesetStatus::PartiallyEnforced => tracing::info!(
            folders,
            kernel = ?status.landlock,
            "landlock is in force, as far as this kernel knows it: only in these folders are files made, opened for \
             writing, or removed, and nothing is executed"
        ),
        RulesetStatus::NotEnforced => tracing::warn!(
            kernel = ?status.landlock,
            "there is no landlock: --landlock changes nothing. This kernel lacks it or has it switched off, or a filter of \
             system calls refuses it (SystemCallFilter= of a unit, a container's seccomp profile)"
        ),
    }
    Ok(())
}

/// `folder`, made with `mode` (less the umask) unless it is there: once confined, nobody can.
pub fn made(folder: &Path, mode: u32) -> Result<PathBuf, ConfineError> {
    let made = DirBuilder::new().recursive(true).mode(mode).create(folder);
    made.map(|()| folder.to_owned())
        .map_err(|source| ConfineError::Folder { folder: folder.to_owned(), source })
}
