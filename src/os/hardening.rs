//! Rights that the process gives up. Rights belong to a thread and to the threads it starts, so all of this runs at the start,
//! while there is only one.

use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, AccessFs, PathBeneath, PathFd, PathFdError, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _,
    RulesetError, RulesetStatus,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::set_no_new_privs;

/// The requested ABI. Later versions would also deny connections to sockets elsewhere, such as systemd's.
const LANDLOCK: ABI = ABI::V5;

/// Why the process can't be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error(
        "creating the directory {directory} failed: {source}; with --landlock it must exist at the start: create or mount it"
    )]
    Create { directory: PathBuf, source: io::Error },
    #[error("opening the directory {directory} for --landlock failed: {source}")]
    Open { directory: PathBuf, source: PathFdError },
    #[error(
        "applying --landlock failed: the kernel or a system call filter (SystemCallFilter= of a unit, a container's seccomp \
         profile) refuses it: {0}; allow the three landlock_* calls, or leave --landlock out"
    )]
    Refused(#[from] RulesetError),
}

/// Protects the keys in this process's memory from core dumps and from other processes of this user.
pub fn protect_memory() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "core dumps not disabled; they may contain keys");
    }
}

/// Prevents started programs from gaining privileges, where no program is to be started at all.
pub fn refuse_new_privileges() {
    if let Err(error) = set_no_new_privs(true) {
        tracing::warn!(%error, "no_new_privs not set; a started program could gain privileges");
    }
}

/// From here on this process writes only in `directories`, and executes no program. Reading stays unrestricted, because
/// the links of mounted files lead to other directories tomorrow.
///
/// On an older kernel, what it supports is enforced.
pub fn confine(directories: &[PathBuf]) -> Result<(), ConfineError> {
    let writing = AccessFs::from_write(LANDLOCK);
    let mut rules = Ruleset::default().handle_access(writing | AccessFs::Execute)?.create()?;
    for directory in directories {
        let opened = PathFd::new(directory);
        let opened = opened.map_err(|source| ConfineError::Open { directory: directory.clone(), source })?;
        rules = rules.add_rule(PathBeneath::new(opened, writing))?;
    }
    let status = rules.restrict_self()?;
    let directories: Vec<_> = directories.iter().map(|directory| directory.display().to_string()).collect();
    let directories = directories.join(", ");
    match status.ruleset {
        RulesetStatus::FullyEnforced => {
            tracing::info!(
                directories,
                "Landlock enforced: no writes outside these directories, no execution"
            );
        }
        RulesetStatus::PartiallyEnforced => tracing::info!(
            directories,
            kernel = ?status.landlock,
            "Landlock enforced as far as this kernel supports it: files are created, opened for writing or removed only in \
             these directories, and nothing is executed"
        ),
        RulesetStatus::NotEnforced => tracing::warn!(
            kernel = ?status.landlock,
            "Landlock not available, --landlock has no effect: this kernel lacks it or has it disabled, or a system call \
             filter refuses it (SystemCallFilter= of a unit, a container's seccomp profile)"
        ),
    }
    Ok(())
}

/// Has `create` make `directory` unless it exists, and returns its path. Once confined, the process can't.
pub fn create_directory(
    directory: &Path,
    create: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<PathBuf, ConfineError> {
    let created = if directory.is_dir() { Ok(()) } else { create(directory) };
    created
        .map(|()| directory.to_owned())
        .map_err(|source| ConfineError::Create { directory: directory.to_owned(), source })
}
