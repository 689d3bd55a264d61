//! The output of a command, read from a pipe and kept up to a limit.

use std::convert::Infallible;
use std::io::{self, PipeWriter};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::unix::pipe;

use super::last_lines::LastLines;
use crate::base::limits;
use crate::base::text;

/// What a command writes into a pipe. Output beyond the limit is read and discarded, so that the command never blocks on
/// the agent.
#[derive(Debug)]
pub struct CapturedOutput {
    /// None after end of file.
    pipe: Option<Arc<pipe::Receiver>>,
    kept: Vec<u8>,
    limit: usize,
    is_truncated: bool,
    last: LastLines,
}

impl CapturedOutput {
    /// A pipe of which `limit` bytes are kept, and the command's end of it.
    pub fn with_limit(limit: usize) -> io::Result<(Self, PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        let pipe = Some(Arc::new(pipe::Receiver::from_owned_fd(reader.into())?));
        let (kept, last) = (Vec::new(), LastLines::default());
        Ok((Self { pipe, kept, limit, is_truncated: false, last }, writer))
    }

    /// A pipe for messages, of which a line for the log is kept.
    pub fn for_log() -> io::Result<(Self, PipeWriter)> {
        Self::with_limit(limits::COMMAND_MESSAGE_BYTES)
    }

    pub(super) fn pipe(&self) -> Option<Arc<pipe::Receiver>> {
        self.pipe.clone()
    }

    /// Reads for as long as the future is polled.
    pub async fn read_forever(&mut self) -> Infallible {
        loop {
            self.read_some().await;
        }
    }

    /// Reads until the limit is exceeded.
    pub async fn exceeded(&mut self) {
        while !self.is_truncated {
            self.read_some().await;
        }
    }

    async fn read_some(&mut self) {
        let Some(pipe) = &self.pipe else { return std::future::pending().await };
        match pipe.readable().await {
            Ok(()) => self.read_available(),
            Err(_) => self.pipe = None,
        }
        // A command that writes endlessly must not block the thread.
        tokio::task::yield_now().await;
    }

    /// Reads what is available now, at most as much as a pipe buffers.
    fn read_available(&mut self) {
        let mut buffer = [0; 4096];
        for _ in 0..16 {
            let Some(pipe) = &self.pipe else { return };
            match pipe.try_read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(0) | Err(_) => self.pipe = None,
                Ok(count) => {
                    let room = self.limit - self.kept.len();
                    self.kept.extend(buffer.iter().take(count.min(room)));
                    self.is_truncated |= count > room;
                    self.last.add(buffer.get(..count).unwrap_or_default());
                }
            }
        }
    }

    /// The output, or none if it exceeded the limit. Does not wait for end of file: a process in the background may keep the
    /// pipe open.
    pub fn into_bytes(mut self) -> Option<Vec<u8>> {
        self.read_available();
        (!self.is_truncated).then_some(self.kept)
    }

    /// Reads and discards in the background until every writer has closed the pipe: a process that was left in the
    /// background must not be killed by its next write. When the agent exits, the pipe closes with it.
    pub fn discard_rest(mut self) {
        const PAUSE: Duration = Duration::from_millis(100);
        (self.kept, self.limit) = (Vec::new(), 0);
        tokio::spawn(async move {
            while self.pipe.is_some() {
                self.read_some().await;
                // A process that never stops writing waits for the agent, not the other way round.
                tokio::time::sleep(PAUSE).await;
            }
        });
    }

    /// The last lines of the output so far.
    pub fn last_lines(&mut self) -> Vec<String> {
        self.read_available();
        self.last.shown()
    }

    /// The output so far, as one line for the log. Does not wait for end of file either.
    pub fn text(&mut self) -> String {
        self.read_available();
        let text = String::from_utf8_lossy(&self.kept);
        // A command that prints a key must not make the agent log it.
        let text = match text.split_once("PRIVATE KEY") {
            Some((before, _)) => format!("{before}(a private key, and what follows, is not shown)"),
            None => text.into_owned(),
        };
        text::sanitize_for_log(&text.trim().replace('\n', "; "))
    }
}
