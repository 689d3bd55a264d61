//! The program's standard error in a log of JSON lines: lines that are JSON pass unchanged, others become an object each.

use std::io::{self, PipeWriter};

use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

use crate::base::clock::{Clock, rfc3339_millis};
use crate::os::stderr::LogOutput;

/// Bytes of a line; what is longer is cut.
pub(super) const LINE_BYTES: usize = 64 << 10;

/// What one process prints.
#[derive(Debug)]
pub(super) struct Lines {
    pipe: pipe::Receiver,
    output: LogOutput,
    program: String,
    epoch: u32,
    clock: Clock,
}

impl Lines {
    /// The reader, and the program's end of the pipe.
    pub(super) fn new(
        output: LogOutput,
        program: String,
        epoch: u32,
        clock: Clock,
    ) -> io::Result<(Self, PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        let pipe = pipe::Receiver::from_owned_fd(reader.into())?;
        Ok((Self { pipe, output, program, epoch, clock }, writer))
    }

    /// Passes lines on until every process has closed the pipe. The log never blocks: what it does not take is dropped and
    /// counted there.
    pub(super) async fn run(mut self) {
        let mut buffer = vec![0; 16 << 10];
        let mut line = Line::default();
        while let Ok(count @ 1..) = self.pipe.read(&mut buffer).await {
            for part in buffer.get(..count).unwrap_or_default().split_inclusive(|byte| *byte == b'\n') {
                if line.add(part) {
                    self.push(&line);
                    line = Line::default();
                }
            }
            // A program that writes endlessly must not keep the thread.
            tokio::task::yield_now().await;
        }
        if !line.bytes.is_empty() {
            self.push(&line);
        }
    }

    fn push(&self, line: &Line) {
        let timestamp = rfc3339_millis(self.clock.now()).to_string();
        self.output.push(&wrapped(line, &self.program, self.epoch, &timestamp));
    }
}

/// A line so far.
#[derive(Debug, Default)]
struct Line {
    bytes: Vec<u8>,
    is_cut: bool,
}

impl Line {
    /// Adds a part. True at the end of the line.
    fn add(&mut self, part: &[u8]) -> bool {
        let text = part.strip_suffix(b"\n").unwrap_or(part);
        let room = LINE_BYTES - self.bytes.len();
        self.bytes.extend(text.iter().take(room));
        self.is_cut |= text.len() > room;
        text.len() < part.len()
    }
}

fn wrapped(line: &Line, program: &str, epoch: u32, timestamp: &str) -> Vec<u8> {
    let is_object = || matches!(serde_json::from_slice(&line.bytes), Ok(Value::Object(_)));
    if line.bytes.first() == Some(&b'{') && !line.is_cut && is_object() {
        return [&line.bytes, b"\n".as_slice()].concat();
    }
    let text = String::from_utf8_lossy(&line.bytes);
    let mut object = json!({
        "timestamp": timestamp,
        "level": level(&text),
        "message": text.trim_end_matches('\r'),
        "program": program,
        "epoch": epoch,
    });
    if let Some(fields) = object.as_object_mut().filter(|_| line.is_cut) {
        fields.insert("cut".to_owned(), json!(true));
    }
    format!("{object}\n").into_bytes()
}

/// The level in Envoy's default format: `[time][thread][level][logger]`.
fn level(line: &str) -> &'static str {
    let word = line.strip_prefix('[').and_then(|rest| rest.split("][").nth(2)).unwrap_or_default();
    match word {
        "trace" => "TRACE",
        "debug" => "DEBUG",
        "warning" | "warn" => "WARN",
        "error" | "critical" => "ERROR",
        _ => "INFO",
    }
}

/// What becomes of these bytes, up to the last end of a line.
#[cfg(any(test, fuzzing))]
pub(super) fn of_bytes(bytes: &[u8]) -> Vec<Vec<u8>> {
    of_chunks(std::iter::once(bytes))
}

/// The same of bytes that are read in pieces.
#[cfg(any(test, fuzzing))]
pub(super) fn of_chunks<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
    let (mut lines, mut line) = (Vec::new(), Line::default());
    for part in chunks.flat_map(|chunk| chunk.split_inclusive(|byte| *byte == b'\n')) {
        if line.add(part) {
            lines.push(wrapped(&std::mem::take(&mut line), "envoy", 0, "T"));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that these reads make.
    fn lines(reads: &[&[u8]]) -> Vec<Line> {
        let (mut lines, mut line) = (Vec::new(), Line::default());
        for part in reads.iter().flat_map(|read| read.split_inclusive(|byte| *byte == b'\n')) {
            if line.add(part) {
                lines.push(std::mem::take(&mut line));
            }
        }
        lines
    }

    #[test]
    fn a_line_becomes_an_object_unless_it_is_one() {
        let shown = |text: &str| {
            let all = lines(&[text.as_bytes()]);
            String::from_utf8(wrapped(&all[0], "envoy", 2, "T")).unwrap()
        };
        assert_eq!(shown("{\"a\": 1}\n"), "{\"a\": 1}\n");
        assert_eq!(
            shown("[2026-01-01 00:00:00.000][7][warning][main] [f:1] \"x\"\n"),
            "{\"timestamp\":\"T\",\"level\":\"WARN\",\"message\":\"[2026-01-01 00:00:00.000][7][warning][main] [f:1] \\\"x\\\"\",\
             \"program\":\"envoy\",\"epoch\":2}\n"
        );
        for other in ["{\"a\": 1} x\n", "[1]\n", "\n", "{\n"] {
            let object: Value = serde_json::from_str(&shown(other)).unwrap();
            assert_eq!((&object["message"], &object["level"]), (&json!(other.trim_end()), &json!("INFO")));
        }
    }

    #[test]
    fn lines_are_put_together_and_cut() {
        let all = lines(&[b"one\ntw", b"o\n", &vec![b'{'; 2 * LINE_BYTES], b"}\nlast\n"]);
        let shown: Vec<_> = all.iter().map(|line| (line.bytes.len(), line.is_cut)).collect();
        assert_eq!(shown, [(3, false), (3, false), (LINE_BYTES, true), (4, false)]);
        let object: Value = serde_json::from_slice(&wrapped(&all[2], "envoy", 0, "T")).unwrap();
        assert_eq!(object["cut"], json!(true));
    }
}
