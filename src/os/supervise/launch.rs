//! How the program is started: by this binary itself, in a process of its own, which gives up what is the agent's and then
//! becomes the program. So the program needs no shell in its image.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{ExitCode, Stdio};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getpid, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};
use tokio::process::{Child, Command};

use crate::os::command;

/// The first argument of this binary that has it become a program.
const WORD: &str = "become-command";
/// Instead of the limit of file descriptors, where that is to stay.
const UNCHANGED: &str = "-";
const SELF: &str = "/proc/self/exe";
/// As shells report them.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// Starts a program, in a process group of its own, with the agent's environment less the agent's own options.
///
/// It ends with the thread that calls this, by SIGTERM: so only the main thread, which runs the runtime, may call it.
pub(super) fn spawn(words: &[String], prepare: impl FnOnce(&mut Command)) -> io::Result<Child> {
    let limit = command::original_file_limit().map_or(UNCHANGED.to_owned(), |limit| limit.to_string());
    let mut command = Command::new(SELF);
    command.arg(WORD).arg(limit).arg(getpid().as_raw_nonzero().to_string()).args(words);
    command.process_group(0).kill_on_drop(true).stdin(Stdio::null());
    command::remove_own_variables(&mut command);
    prepare(&mut command);
    command.spawn()
}

/// Whether these are the arguments of `spawn`.
pub fn is_launch(arguments: &[OsString]) -> bool {
    arguments.get(1).is_some_and(|word| word == WORD)
}

/// Becomes the program that `arguments` name. Returns only if that fails.
pub fn launch(arguments: &[OsString]) -> ExitCode {
    let [_, _, limit, parent, program, arguments @ ..] = arguments else {
        return ExitCode::from(NOT_EXECUTABLE);
    };
    restore_file_limit(limit);
    // A program that outlives the agent would keep its ports from the next agent's.
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    if !is_parent(parent) {
        return ExitCode::from(NOT_EXECUTABLE);
    }
    let error = std::process::Command::new(program).args(arguments).exec();
    let name = program.to_string_lossy();
    let (code, remedy) = match error.kind() {
        io::ErrorKind::NotFound => (NOT_FOUND, "is it in this image, and in PATH?"),
        _ => (NOT_EXECUTABLE, "is it an executable file for this machine?"),
    };
    let _ = io::Write::write_all(
        &mut io::stderr(),
        format!("attache: starting {name} failed: {error}; {remedy}\n").as_bytes(),
    );
    ExitCode::from(code)
}

fn restore_file_limit(limit: &OsStr) {
    if let Some(limit) = limit.to_str().and_then(|limit| limit.parse().ok()) {
        let hard = getrlimit(Resource::Nofile).maximum;
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: hard });
    }
}

/// False if the agent has died before its death could be noticed.
fn is_parent(expected: &OsStr) -> bool {
    let expected = expected.to_str().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
    expected.is_none() || getppid() == expected
}
