use std::net::SocketAddr;
use std::path::Path;

use super::{Behaviour, ExpectedLog, Provider, common_log};
use crate::support::issuer::Lie;
use crate::support::pipes::{GOOD, Pipes};

impl Provider for Pipes {
    const NAME: &'static str = "exec";
    const LIFETIME: u64 = 120;

    async fn start(directory: &Path, _: u64) -> Self {
        Self::start(directory)
    }

    fn address(&self) -> Option<SocketAddr> {
        None
    }

    fn options(&self, _: &Path) -> Vec<String> {
        self.client()
    }

    fn set(&self, behaviour: Behaviour) {
        let (script, lie) = match behaviour {
            Behaviour::Signs => (GOOD.to_owned(), Lie::None),
            Behaviour::Refuses => ("echo 'not for you' >&2; exit 77".to_owned(), Lie::None),
            // In the background, so that the shell can `wait` and still handle SIGTERM.
            Behaviour::Hangs => ("sleep 1000 & wait".to_owned(), Lie::None),
            Behaviour::Junk => ("echo '<html>'".to_owned(), Lie::None),
            Behaviour::Lies(lie) => (GOOD.to_owned(), lie),
            Behaviour::Down => ("no-such-ca".to_owned(), Lie::None),
            Behaviour::Cut => ("rmdir busy; kill -9 $$".to_owned(), Lie::None),
            Behaviour::Slow => (format!("sleep 0.2; {GOOD}"), Lie::None),
        };
        let alone = "mkdir busy || touch overlapped; trap 'rmdir busy' EXIT; trap 'exit 1' TERM";
        self.set(&format!("{alone}; {script}"), lie);
    }

    fn expected_log(behaviour: Behaviour) -> Option<ExpectedLog> {
        let words = match behaviour {
            Behaviour::Down => {
                "the command of --ca-exec failed with exit status 127: the shell found no such program"
            }
            Behaviour::Cut => "the command of --ca-exec failed with signal: 9",
            Behaviour::Refuses => "the command of --ca-exec failed with exit status: 77; stderr: not for you",
            _ => return common_log(behaviour),
        };
        Some(ExpectedLog::new(&[words], "command"))
    }

    fn has_overlapped(&self) -> bool {
        self.directory.join("overlapped").exists()
    }
}
