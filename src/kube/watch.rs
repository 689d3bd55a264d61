//! The events of a watch: JSON objects, one a line.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use memchr::memchr;
use serde_json::Value;
use tokio_stream::Stream;

use super::call::{Answer, Caller};
use super::connection::Lease;
use super::object::{self, RawEvent};
use super::{Event, KubeError, Selection, Version};
use crate::base::limits;
use crate::base::text;
use crate::net::buffer::{Buffer, wipe};
use crate::net::error::TransportError;

/// The events in the answer to a watch.
pub(super) struct Events {
    /// None once it has ended.
    body: Option<RecvStream>,
    lines: Lines,
    reader: LineReader,
    caller: Arc<Caller>,
    /// Last, so that it is dropped after the body: the call has ended when its place is free.
    lease: Lease,
}

/// Turns lines into events.
pub(super) struct LineReader {
    pub(super) selection: Selection,
}

/// What a line means.
#[derive(Debug)]
pub(super) enum Line {
    Event(Event),
    /// An event ERROR: the watch ends.
    Failed(Value),
}

impl Events {
    pub(super) fn new(caller: Arc<Caller>, answer: Answer, selection: Selection) -> Self {
        let Answer { response, lease, .. } = answer;
        let reader = LineReader { selection };
        Self { body: Some(response.into_body()), lines: Lines::default(), reader, caller, lease }
    }

    fn next_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Event, KubeError>>> {
        loop {
            let Some(body) = &mut self.body else { return Poll::Ready(None) };
            let reader = &self.reader;
            match self.lines.next(|line| reader.read(line)) {
                Some(Ok(Line::Event(event))) => return Poll::Ready(Some(Ok(event))),
                Some(Ok(Line::Failed(status))) => return Poll::Ready(Some(Err(self.caller.failed(&status)))),
                Some(Err(reason)) => return Poll::Ready(Some(Err(self.caller.unreadable(reason)))),
                None => {}
            }
            match ready!(body.poll_data(cx)) {
                Some(Ok(part)) => {
                    // Fails for a stream that has ended, which needs no window.
                    let _ = body.flow_control().release_capacity(part.len());
                    if let Err(reason) = self.lines.add(part) {
                        return Poll::Ready(Some(Err(self.caller.unreadable(reason))));
                    }
                }
                Some(Err(error)) => {
                    let failure = self.caller.located(self.lease.failure(&error).into());
                    return Poll::Ready(Some(Err(failure)));
                }
                None if self.lines.is_in_line() => {
                    let cut = TransportError::broken("it ended within an event");
                    return Poll::Ready(Some(Err(self.caller.located(cut.into()))));
                }
                None => return Poll::Ready(None),
            }
        }
    }
}

impl Stream for Events {
    type Item = Result<Event, KubeError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.next_event(cx));
        if !matches!(next, Some(Ok(_))) {
            self.body = None;
        }
        Poll::Ready(next)
    }
}

impl LineReader {
    pub(super) fn read(&self, line: &[u8]) -> Result<Line, String> {
        let Selection { kind, namespace, of } = &self.selection;
        let event = RawEvent::read(line).map_err(|error| error.to_string())?;
        let object = || event.object().map_err(|error| error.to_string());
        let (name, version) = (&event.head.name, &event.head.version);
        let version_of_it = || match version.is_empty() {
            true => Err("an event has no resourceVersion".to_owned()),
            false => Ok(Version(version.as_ref().into())),
        };
        match &*event.kind {
            "ADDED" | "MODIFIED" | "DELETED" if event.head.namespace != **namespace => {
                let its_namespace = text::sanitize_for_log(&event.head.namespace);
                Err(format!("an event is about the namespace {its_namespace:?}, not {namespace:?}"))
            }
            "BOOKMARK" => version_of_it().map(|version| Line::Event(Event::Version(version))),
            "ADDED" | "MODIFIED" | "DELETED" if !of.has(name) => {
                version_of_it().map(|version| Line::Event(Event::Version(version)))
            }
            "ADDED" | "MODIFIED" => {
                Ok(Line::Event(Event::Object(object::object(object()?, *kind, namespace)?)))
            }
            "DELETED" => {
                let (name, version) = (name.as_ref().into(), version_of_it()?);
                Ok(Line::Event(Event::Deleted { name, version }))
            }
            "ERROR" => {
                let status = serde_json::from_slice(object()?);
                Ok(Line::Failed(status.map_err(|_| "an ERROR event is not JSON".to_owned())?))
            }
            other => Err(format!("an event has the type {:?}", text::sanitize_for_log(other))),
        }
    }
}

/// Splits what arrives into lines. Without a line that is not complete it holds no memory.
#[derive(Default)]
pub(super) struct Lines {
    /// The beginning of a line.
    begun: Buffer,
    /// What came last, and how much of it is done.
    part: Bytes,
    at: usize,
}

impl Lines {
    /// Takes up the next part, after all lines have been read.
    pub(super) fn add(&mut self, part: Bytes) -> Result<(), String> {
        let rest = memchr(b'\n', &part).unwrap_or(part.len());
        if self.begun.len() + rest > limits::KUBE_OBJECT_BYTES {
            return Err(format!("an event is longer than {} bytes", limits::KUBE_OBJECT_BYTES));
        }
        (self.part, self.at) = (part, 0);
        Ok(())
    }

    /// The result of `read` for the next complete line; none if more has to come first.
    pub(super) fn next<T>(&mut self, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        loop {
            let rest = self.part.get(self.at..).unwrap_or_default();
            let Some(end) = memchr(b'\n', rest) else {
                self.begun.extend(rest);
                wipe(std::mem::take(&mut self.part));
                self.at = 0;
                return None;
            };
            let line = rest.get(..end).unwrap_or_default();
            self.at += end + 1;
            let mut whole = std::mem::take(&mut self.begun);
            if !whole.is_empty() {
                whole.extend(line);
            }
            match if whole.is_empty() { line } else { whole.as_slice() } {
                blank if blank.trim_ascii().is_empty() => {}
                line => return Some(read(line)),
            }
        }
    }

    /// Whether a line has begun.
    pub(super) fn is_in_line(&self) -> bool {
        !self.begun.as_slice().trim_ascii().is_empty()
    }
}
