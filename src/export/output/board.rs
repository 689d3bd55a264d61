//! What the directories have, as the task that runs the hook and the tasks that write them see it.

use std::sync::Arc;

use tokio::sync::watch;

use super::Versions;

/// One line for each directory. Clones share the lines.
#[derive(Clone, Debug)]
pub(super) struct Board(Arc<watch::Sender<Vec<Line>>>);

/// The state of one directory.
#[derive(Clone, Debug, Default)]
struct Line {
    /// The set for which there is nothing to do at present: written, or failed.
    settled: Option<Versions>,
    /// Its disk does not answer.
    is_hanging: bool,
    /// Counts the generations that the hook has to see.
    swaps: u64,
    /// The newest of these for which the hook has succeeded.
    hooked: u64,
}

impl Board {
    pub(super) fn new(directories: usize) -> Self {
        Self(Arc::new(watch::Sender::new(vec![Line::default(); directories])))
    }

    /// Wakes its holder at each change.
    pub(super) fn changes(&self) -> watch::Receiver<impl Sized + use<>> {
        self.0.subscribe()
    }

    /// Notes that nothing is left to do for the set of `versions`.
    pub(super) fn settle(&self, directory: usize, versions: &Versions) {
        self.update(directory, |line| {
            let is_new = line.settled.as_ref() != Some(versions);
            line.settled = Some(versions.clone());
            is_new
        });
    }

    pub(super) fn set_hanging(&self, directory: usize, is_hanging: bool) {
        self.update(directory, |line| std::mem::replace(&mut line.is_hanging, is_hanging) != is_hanging);
    }

    /// Notes that the hook has to run for what is in a directory.
    pub(super) fn request_hook(&self, directory: usize) {
        self.update(directory, |line| {
            line.swaps += 1;
            true
        });
    }

    /// Whether the hook has to run for what is in a directory.
    pub(super) fn awaits_hook(&self, directory: usize) -> bool {
        self.0.borrow().get(directory).is_some_and(|line| line.hooked < line.swaps)
    }

    /// Whether every directory has the set of `versions`, has failed to write it, or hangs.
    pub(super) fn is_settled(&self, versions: &Versions) -> bool {
        self.0.borrow().iter().all(|line| line.is_hanging || line.settled.as_ref() == Some(versions))
    }

    /// The generations for which the hook has not succeeded; none if it has for all.
    pub(super) fn pending(&self) -> Option<Generations> {
        let lines = self.0.borrow();
        let is_pending = lines.iter().any(|line| line.hooked < line.swaps);
        is_pending.then(|| Generations(lines.iter().map(|line| line.swaps).collect()))
    }

    /// Notes that the hook has succeeded for `generations`.
    pub(super) fn hook_succeeded(&self, generations: &Generations) {
        self.0.send_modify(|lines| {
            lines.iter_mut().zip(&generations.0).for_each(|(line, swaps)| line.hooked = *swaps);
        });
    }

    fn update(&self, directory: usize, change: impl FnOnce(&mut Line) -> bool) {
        self.0.send_if_modified(|lines| lines.get_mut(directory).is_some_and(change));
    }
}

/// A generation of each directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Generations(Vec<u64>);
