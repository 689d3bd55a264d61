//! One process of the program.

use std::io::{self, PipeWriter};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::Child;

use super::launch;
use crate::os::command::orphans::OwnChild;

/// A process that was started, with its group.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    _own: OwnChild,
}

impl Process {
    /// Starts it. `stderr` is where it prints, if not to the agent's own standard error.
    pub(super) fn start(words: &[String], stderr: Option<PipeWriter>) -> io::Result<(Self, Child)> {
        let child = launch::spawn(words, |command| {
            if let Some(stderr) = stderr {
                command.stderr(stderr);
            }
        })?;
        let own = OwnChild::new(&child);
        let pid = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
        let pid = pid.ok_or_else(|| io::Error::other("it has no process ID"))?;
        Ok((Self { pid, _own: own }, child))
    }

    pub(super) fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Sends SIGTERM to the whole group: a shell that does not pass it on must not keep the program.
    pub(super) fn signal(&self, signal: Signal) {
        let _ = match signal {
            Signal::TERM => kill_process_group(self.pid, signal),
            signal => kill_process(self.pid, signal),
        };
    }

    /// Kills the whole group.
    pub(super) fn kill(&self) {
        let _ = kill_process_group(self.pid, Signal::KILL);
    }

    /// Whether the program handles this signal. A shell script that does not would be killed by it.
    pub(super) fn handles(&self, signal: Signal) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap_or_default();
        handles(&status, signal)
    }
}

/// By the mask of caught signals in `/proc/PID/status`.
pub(super) fn handles(status: &str, signal: Signal) -> bool {
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    caught & (1 << (signal.as_raw() - 1)) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_which_signals_a_program_handles() {
        let status = "Name:\tsh\nSigIgn:\t0000000000000000\nSigCgt:\t0000000000000001\n";
        let handled = [Signal::HUP, Signal::USR1, Signal::USR2].map(|signal| handles(status, signal));
        assert_eq!(handled, [true, false, false]);
        assert!(handles("SigCgt:\t0000000000000a00", Signal::USR2));
        assert!(!handles("", Signal::HUP));
    }
}
