//! The thread on which mounted files are read and watched. A file system that does not answer stops it, and nothing else.

use std::io;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// The look-ups, a file's content and its parsers fit in several times.
const STACK: usize = 256 << 10;

/// Starts the thread, and returns where to spawn its tasks. It ends after `stop`, once its file systems answer: the process
/// exits without waiting for it.
pub(super) fn start(stop: CancellationToken) -> io::Result<Handle> {
    // It sleeps and is woken; the clock's jumps are watched elsewhere.
    let runtime = Builder::new_current_thread().enable_time().build()?;
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(stop.cancelled());
    std::thread::Builder::new().name("mounted-files".to_owned()).stack_size(STACK).spawn(run)?;
    Ok(handle)
}
