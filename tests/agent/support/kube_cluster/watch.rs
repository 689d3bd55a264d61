//! The stream of one watch.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, interval_at, sleep};
use tokio_stream::wrappers::ReceiverStream;

use super::Shared;
use super::resource::{Resource, Selection};
use super::serve::Body;
use super::store::{Begin, Change, Signal};

/// A watch that the server has accepted.
pub struct Opened {
    pub selection: Selection,
    /// The version of the API in its objects.
    pub api: &'static str,
    pub has_bookmarks: bool,
    /// The version of the initial events, which end with a bookmark that says so.
    pub initial: Option<u64>,
    pub lasts: Duration,
    pub begin: Begin,
}

type Frames = mpsc::Sender<Result<Frame<Bytes>, io::Error>>;

/// The end of a stream, and why.
struct Ended;

/// Runs a watch in a task of its own, until its time is over or the client goes.
pub fn stream(shared: &Arc<Shared>, opened: Opened) -> Body {
    let (frames, body) = mpsc::channel(64);
    let shared = Arc::clone(shared);
    shared.counted.send_modify(|count| *count += 1);
    tokio::spawn(async move {
        let number = opened.begin.2;
        tokio::select! {
            _ = run(&shared, opened, &frames) => (),
            () = frames.closed() => (),
        }
        shared.state.lock().unwrap().store.end_watch(number);
        shared.counted.send_modify(|count| *count += 1);
    });
    StreamBody::new(ReceiverStream::new(body)).boxed_unsync()
}

/// A stream with the one event that ends a watch from a version that is too old.
pub fn too_old(body: &serde_json::Value) -> Body {
    let mut line = json!({ "type": "ERROR", "object": body }).to_string().into_bytes();
    line.push(b'\n');
    http_body_util::Full::new(Bytes::from(line)).map_err(|never: Infallible| match never {}).boxed_unsync()
}

async fn run(shared: &Shared, opened: Opened, frames: &Frames) -> Result<(), Ended> {
    let Opened { selection, api, has_bookmarks, initial, lasts, begin } = opened;
    let (first, mut signals, number) = begin;
    for change in first {
        send(frames, line(&change, &selection, api)).await?;
    }
    if let Some(version) = initial {
        send(frames, bookmark(&selection, api, version, true)).await?;
    }
    let every = shared.bookmarks;
    let mut marks = interval_at(Instant::now() + every, every);
    let end = sleep(lasts);
    tokio::pin!(end);
    let mut is_over = false;
    loop {
        // Bookmarks and the end go through the queue: never before an event of theirs, and not at all while it is silent.
        let with_bookmark = has_bookmarks.then_some(number);
        tokio::select! {
            biased;
            signal = signals.recv() => {
                let Some(signal) = signal else { return Ok(()) };
                handle(frames, signal, &selection, api, has_bookmarks).await?;
            }
            _ = marks.tick(), if has_bookmarks => shared.state.lock().unwrap().store.mark(with_bookmark),
            () = &mut end, if !is_over => {
                is_over = true;
                let mut state = shared.state.lock().unwrap();
                state.store.mark(with_bookmark);
                state.store.signal(number, Signal::End);
            }
        }
    }
}

async fn handle(
    frames: &Frames,
    signal: Signal,
    selection: &Selection,
    api: &str,
    has_bookmarks: bool,
) -> Result<(), Ended> {
    let half = || {
        let whole = bookmark(selection, api, 1, false);
        whole.slice(..whole.len() / 2)
    };
    match signal {
        Signal::Changed(change) => send(frames, line(&change, selection, api)).await,
        Signal::Bookmark(version) if has_bookmarks => {
            send(frames, bookmark(selection, api, version, false)).await
        }
        Signal::Bookmark(_) => Ok(()),
        Signal::Raw(bytes) => send(frames, bytes).await,
        Signal::End => Err(Ended),
        Signal::Truncate => {
            send(frames, half()).await?;
            Err(Ended)
        }
        Signal::Reset => {
            send(frames, half()).await?;
            let _ = frames.send(Err(io::Error::other("reset on request"))).await;
            Err(Ended)
        }
    }
}

async fn send(frames: &Frames, bytes: Bytes) -> Result<(), Ended> {
    if bytes.is_empty() {
        return Ok(());
    }
    frames.send(Ok(Frame::data(bytes))).await.map_err(|_| Ended)
}

/// The line of an event; empty where it does not concern the selection.
fn line(change: &Change, selection: &Selection, api: &str) -> Bytes {
    let Some((kind, object)) = change.seen_by(selection) else { return Bytes::new() };
    let mut text = format!("{{\"type\":\"{kind}\",\"object\":").into_bytes();
    text.extend(object.json(api, false));
    text.extend(b"}\n");
    text.into()
}

fn bookmark(selection: &Selection, api: &str, version: u64, is_initial: bool) -> Bytes {
    let resource = Resource::of(selection.plural);
    let mut metadata = json!({ "resourceVersion": version.to_string() });
    if is_initial {
        metadata["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
    }
    let object =
        json!({ "kind": resource.kind, "apiVersion": resource.api_version(api), "metadata": metadata });
    format!("{}\n", json!({ "type": "BOOKMARK", "object": object })).into()
}
