//! Misbehaviour on request.

use std::time::Duration;

use super::calls::Call;

/// What happens to a request instead of, or besides, its answer.
#[derive(Clone, Debug)]
pub enum Fault {
    /// 429, to be repeated after these seconds.
    TooMany(u64),
    /// 500.
    Internal,
    /// 503.
    Unavailable,
    /// 504 from a proxy, as HTML.
    Proxy,
    /// This code and body.
    Answer(u16, String),
    /// No answer; the connection stays, and answers HTTP/2's pings.
    Silent,
    /// The connection closes without an answer.
    Close,
    /// The request is executed; then the connection closes without an answer.
    Lose,
    /// The stream is reset without an answer.
    Reset,
    /// The answer comes later.
    Delay(Duration),
    /// The answer is 200, and not JSON.
    Junk,
    /// The answer ends in its middle, as if it were complete. (Watches: see `truncate_watches`.)
    Truncate,
    /// The answer comes in parts of this many bytes, each after the pause.
    Slow(usize, Duration),
}

/// Which requests a fault applies to.
pub type Filter = Box<dyn Fn(&Call) -> bool + Send>;

/// A fault that is in force.
pub struct Placed {
    pub number: u64,
    pub fault: Fault,
    pub filter: Filter,
    /// How many more requests; none for all.
    pub left: Option<usize>,
}

/// The fault of the first that applies to `call`.
pub fn take(placed: &mut [Placed], call: &Call) -> Option<Fault> {
    let index = placed.iter().position(|one| one.left != Some(0) && (one.filter)(call))?;
    let found = &mut placed[index];
    if let Some(left) = &mut found.left {
        *left -= 1;
    }
    Some(found.fault.clone())
}
