//! Standard error as the log's destination. A thread writes it, so that a reader that no longer reads (a full pipe, a stopped
//! terminal, a dead disk) blocks that thread alone. What it does not take is buffered, up to a limit, then dropped and counted.
//!
//! The descriptor stays in blocking mode: other processes share it.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::base::limits;

/// How long the thread waits for further lines before it ends. An idle agent has no such thread.
const LINGER: Duration = Duration::from_secs(1);
/// The pause after which a descriptor in non-blocking mode gets another attempt: another process may have set the mode.
const RETRY: Duration = Duration::from_millis(50);
const STACK_BYTES: usize = 128 << 10;

/// Writes a part of the bytes, and returns how many. May block.
type Write = Box<dyn Fn(&[u8]) -> io::Result<usize> + Send + Sync>;

/// A writer that never blocks. Clones write to the same place.
#[derive(Clone)]
pub struct LogOutput(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    /// Notified when lines are added, and when lines have been written.
    changed: Condvar,
    write: Write,
}

#[derive(Default)]
struct Queue {
    /// Lines that the thread has not taken.
    waiting: Vec<u8>,
    /// Bytes that the thread is writing.
    writing: usize,
    thread: Thread,
    /// Lines that were dropped.
    dropped: u64,
    /// Those of them that no log line reports yet.
    unreported: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Thread {
    #[default]
    None,
    Running,
    /// Not to be started yet.
    Held,
}

impl LogOutput {
    /// Writes to standard error.
    pub fn stderr() -> Self {
        Self::new(Box::new(|bytes| Ok(rustix::io::write(io::stderr(), bytes)?)))
    }

    fn new(write: Write) -> Self {
        Self(Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new(), write }))
    }

    /// Starts no thread until [`Self::release`]: it would keep rights that the process is about to give up.
    pub fn hold(&self) {
        self.0.lock().thread = Thread::Held;
    }

    /// Ends [`Self::hold`].
    pub fn release(&self) {
        let mut queue = self.0.lock();
        if queue.thread == Thread::Held {
            queue.thread = Thread::None;
            self.wake(&mut queue);
        }
    }

    /// Adds one line, with its final newline.
    pub fn push(&self, line: &[u8]) {
        let mut queue = self.0.lock();
        if queue.waiting.len() + queue.writing + line.len() > limits::LOG_BUFFER_BYTES {
            queue.drop_lines(1);
            return;
        }
        queue.waiting.extend_from_slice(line);
        self.wake(&mut queue);
    }

    /// How many lines were dropped.
    pub fn dropped(&self) -> u64 {
        self.0.lock().dropped
    }

    /// Waits until everything is written, for `patience` at most.
    pub fn flush(&self, patience: Duration) {
        self.release();
        let queue = self.0.lock();
        let is_unwritten = |queue: &mut Queue| !queue.waiting.is_empty() || queue.writing > 0;
        drop(self.0.changed.wait_timeout_while(queue, patience, is_unwritten));
    }

    /// Has the thread write what waits. Where none can be started, the next line tries again.
    fn wake(&self, queue: &mut Queue) {
        match queue.thread {
            Thread::None if !queue.waiting.is_empty() => {
                let shared = Arc::clone(&self.0);
                let thread = std::thread::Builder::new().name("log".to_owned()).stack_size(STACK_BYTES);
                if thread.spawn(move || shared.run()).is_ok() {
                    queue.thread = Thread::Running;
                }
            }
            Thread::Running => self.0.changed.notify_all(),
            Thread::None | Thread::Held => {}
        }
    }
}

impl Queue {
    fn drop_lines(&mut self, lines: u64) {
        self.dropped += lines;
        self.unreported += lines;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread. The lock is never held while it writes.
    fn run(&self) {
        while let Some((lines, dropped)) = self.take() {
            let written = self.write(&lines);
            let mut queue = self.lock();
            queue.writing = 0;
            match written {
                Ok(()) => {
                    // The lines that were dropped came after these.
                    queue.unreported -= dropped;
                    drop(queue);
                    self.changed.notify_all();
                    if dropped > 0 {
                        tracing::warn!(lines = dropped, "log lines dropped: standard error was blocked");
                    }
                }
                Err(lost) => {
                    queue.drop_lines(lost);
                    drop(queue);
                    self.changed.notify_all();
                }
            }
        }
    }

    /// The next lines to write, and how many were dropped after them. None when the thread is to end.
    fn take(&self) -> Option<(Vec<u8>, u64)> {
        let is_empty = |queue: &mut Queue| queue.waiting.is_empty();
        let waited = self.changed.wait_timeout_while(self.lock(), LINGER, is_empty);
        let mut queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        if queue.waiting.is_empty() {
            queue.thread = Thread::None;
            return None;
        }
        let lines = std::mem::take(&mut queue.waiting);
        queue.writing = lines.len();
        Some((lines, queue.unreported))
    }

    /// Writes all of `lines`. An error is the number of lines that were lost: their reader is gone, or the disk is full.
    fn write(&self, mut lines: &[u8]) -> Result<(), u64> {
        while !lines.is_empty() {
            match (self.write)(lines) {
                Ok(written) if written > 0 => lines = lines.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                #[expect(clippy::disallowed_methods, reason = "this thread may block")]
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(RETRY),
                Ok(_) | Err(_) => {
                    let lost = lines.iter().filter(|byte| **byte == b'\n').count();
                    return Err(u64::try_from(lost).unwrap_or(u64::MAX));
                }
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for LogOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LogOutput({} lines dropped)", self.dropped())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// An output that takes as much as it is permitted to, and hands on what it took.
    fn permitted() -> (LogOutput, Sender<io::Result<()>>, Receiver<Vec<u8>>) {
        let (permit, permits) = channel::<io::Result<()>>();
        let (sender, taken) = channel();
        let (permits, sender) = (Mutex::new(permits), Mutex::new(sender));
        let output = LogOutput::new(Box::new(move |bytes| {
            permits.lock().unwrap().recv().unwrap()?;
            sender.lock().unwrap().send(bytes.to_vec()).unwrap();
            Ok(bytes.len())
        }));
        (output, permit, taken)
    }

    #[test]
    fn a_reader_that_does_not_read_costs_no_more_than_the_buffer() {
        let (output, permit, taken) = permitted();
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        let lines = limits::LOG_BUFFER_BYTES / line.len();
        for _ in 0..lines + 10 {
            output.push(&line);
        }
        assert_eq!(output.dropped(), 10);
        output.flush(Duration::from_millis(10));
        let queue = output.0.lock();
        assert!(queue.waiting.len() + queue.writing <= limits::LOG_BUFFER_BYTES);
        drop(queue);
        // It reads again.
        for _ in 0..lines {
            permit.send(Ok(())).unwrap();
        }
        output.flush(LONG);
        assert_eq!(taken.try_iter().map(|bytes| bytes.len()).sum::<usize>(), lines * line.len());
        assert_eq!(output.0.lock().unreported, 0, "the thread has logged it");
        output.push(b"again\n");
        output.flush(LONG);
        assert_eq!(taken.try_iter().collect::<Vec<_>>(), [b"again\n"]);
    }

    #[test]
    fn lines_that_can_not_be_written_are_counted_and_later_ones_are_written() {
        let (output, permit, taken) = permitted();
        permit.send(Err(io::ErrorKind::BrokenPipe.into())).unwrap();
        output.push(b"1\n2\n");
        output.flush(LONG);
        assert_eq!(output.dropped(), 2);
        permit.send(Err(io::ErrorKind::Interrupted.into())).unwrap();
        permit.send(Err(io::ErrorKind::WouldBlock.into())).unwrap();
        permit.send(Ok(())).unwrap();
        output.push(b"3\n");
        output.flush(LONG);
        assert_eq!(taken.try_iter().collect::<Vec<_>>(), [b"3\n"]);
        assert_eq!(output.dropped(), 2);
    }

    #[test]
    fn nothing_is_written_while_it_is_held_and_nothing_is_lost() {
        let (output, permit, taken) = permitted();
        permit.send(Ok(())).unwrap();
        output.hold();
        output.push(b"held\n");
        assert!(output.0.lock().thread == Thread::Held && taken.try_recv().is_err());
        output.release();
        output.flush(LONG);
        assert_eq!(taken.try_recv().unwrap(), b"held\n");
    }
}
