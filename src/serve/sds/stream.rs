//! The loop of one stream: takes requests and changes of secrets, returns responses.
//!
//! It is a `Stream` that the transport polls when it can send. So the requests of a client that does not read are not read
//! either, and once it reads, it gets the newest secrets, not a queue of old ones.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio_stream::Stream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Status;

use super::Peer;
use super::dialect::{Dialect, Received, Refusal, Verdict};
use super::followed::{Followed, Look, Node, NotFollowed};
use super::message::Message;
use super::session::{NameId, Session};
use super::turns::{AT_ONCE, Turn};
use crate::base::budget::Charge;
use crate::base::limits;
use crate::base::text;
use crate::store::{NotServed, Subscriber, Unserved, Waiting};

/// The responses of one stream.
pub struct SecretStream<D: Dialect, I> {
    peer: Arc<Peer>,
    requests: I,
    dialect: D,
    session: Session,
    subscriber: Subscriber,
    /// What the client says of itself, where that matters.
    node: Node,
    /// By [`NameId`]; none where nothing is served.
    names: Vec<Option<Subscribed>>,
    /// A request with many names and its memory, until it is this stream's turn.
    large: Option<Box<(D::Request, Charge)>>,
    /// Names of the last request that are not subscribed to yet.
    added: VecDeque<NameId>,
    /// Names whose entries changed.
    changed: VecDeque<u32>,
    refusals: Refusals,
    turn: Turn,
    /// The memory of the stream and its names.
    charge: Charge,
    draining: Pin<Box<WaitForCancellationFutureOwned>>,
    phase: Phase,
}

/// Bytes that a name takes in a request that waits, without its text: a string in a list with room for more, and an allocation.
const UNHANDLED_NAME: usize = 2 * size_of::<String>() + 16;
/// How many refused names of one request are logged with their reason; the others are only counted.
const REFUSALS_LOGGED: usize = 3;

/// A name on its way to the client.
enum Subscribed {
    To(Followed),
    /// Boxed: few names wait.
    Waits(Box<Waiting>),
}

/// The names of a request that are not served.
#[derive(Default)]
struct Refusals {
    count: usize,
    reasons: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The client has closed its side: it gets what is ready, then the stream ends.
    Closing,
    Ended,
}

impl<D: Dialect, I> SecretStream<D, I> {
    /// The stream of `peer` with `requests`. `charge` is the memory of a stream without names.
    pub(super) fn new(peer: Arc<Peer>, requests: I, charge: Charge) -> Self {
        let draining = Box::pin(peer.service.draining.clone().cancelled_owned());
        Self {
            subscriber: Subscriber::new(peer.connection),
            turn: Turn::new(peer.service.turns.clone()),
            node: Node::default(),
            peer,
            requests,
            dialect: D::default(),
            session: Session::default(),
            names: Vec::new(),
            large: None,
            added: VecDeque::new(),
            changed: VecDeque::new(),
            refusals: Refusals::default(),
            charge,
            draining,
            phase: Phase::Open,
        }
    }

    fn receive(&mut self, request: D::Request) -> Result<(), Status> {
        let before = self.memory_of_names();
        let is_first = self.dialect.node_id().is_empty();
        if is_first {
            self.node = Node::of(self.peer.service.naming(), D::metadata(&request));
        }
        let received = self.dialect.receive(&mut self.session, request);
        let received = received.map_err(|refusal| self.refuse(refusal))?;
        if is_first {
            self.subscriber.set_node(self.dialect.node_id());
        }
        self.apply(received);
        let after = self.memory_of_names();
        self.charge.shrink(before.saturating_sub(after));
        self.charge.grow(after.saturating_sub(before)).map_err(|full| self.peer.refuse(full))
    }

    /// Keeps a request with many names until it is this stream's turn.
    fn park(&mut self, request: D::Request) -> Result<(), Status> {
        let names = D::names(&request);
        // However often each is repeated.
        if names > 2 * limits::NAMES_PER_STREAM {
            return Err(self.refuse(Refusal::TooManyNames(names)));
        }
        self.large = Some(Box::new((request, self.peer.charge(names * UNHANDLED_NAME)?)));
        Ok(())
    }

    fn refuse(&self, refusal: Refusal) -> Status {
        self.peer.service.refuse(refusal.label(), &refusal);
        tracing::warn!(reason = %refusal, "stream refused");
        Status::from(refusal)
    }

    fn memory_of_names(&self) -> usize {
        self.session.len() * limits::NAME_MEMORY + self.session.name_bytes()
    }

    fn apply(&mut self, received: Received) {
        if let Some(verdict) = received.verdict {
            self.record(verdict);
        }
        if self.session.len() == received.added.len() {
            // A stream that had many names needs no memory for them any longer.
            let names = std::mem::take(&mut self.names);
            self.release(names);
        } else {
            let names = &mut self.names;
            let removed = received.removed.iter();
            let removed = removed.filter_map(|(id, _)| names.get_mut(id.index()).map(Option::take)).collect();
            self.release(removed);
        }
        if received.added.len() > self.names.len() / 8 {
            // Many at once: no more memory than they need.
            let most = received.added.iter().map(|id| id.index() + 1).max();
            self.names.reserve_exact(most.unwrap_or_default().saturating_sub(self.names.len()));
        }
        self.added = received.added.into();
    }

    /// Unsubscribes: from many names in turns.
    fn release(&self, names: Vec<Option<Subscribed>>) {
        if names.len() > AT_ONCE {
            self.peer.service.turns.drop_slowly(names, AT_ONCE, ());
        }
    }

    /// Subscribes to some of the names that were added.
    fn subscribe_some(&mut self) {
        for _ in 0..AT_ONCE {
            let Some(id) = self.added.pop_front() else { break };
            self.subscribe(id);
        }
        if self.added.is_empty() {
            self.added = VecDeque::new();
            let Refusals { count, reasons } = std::mem::take(&mut self.refusals);
            if count > 0 {
                let node = &*self.dialect.node_id();
                // One line per request: a client that requests thousands of names must not fill the log.
                tracing::warn!(node, refused = count, reasons = reasons.join("; "), "resource names refused");
            }
        }
    }

    fn subscribe(&mut self, id: NameId) {
        let Some(name) = self.session.name(id).cloned() else { return };
        let (service, number) = (&self.peer.service, number(id));
        let (label, reason, is_final) =
            match Followed::new(service, &name, &self.node, &self.subscriber, number) {
                Ok(followed) => {
                    tracing::debug!(node = &*self.dialect.node_id(), name = &*name, "subscribed");
                    return self.subscribed(id, Subscribed::To(followed));
                }
                Err(NotFollowed::NotServed(key, error)) => {
                    let is_final = error != NotServed::TooMany;
                    if !is_final {
                        let waiting = service.cache.wait_for_room(key, &self.subscriber, number);
                        self.subscribed(id, Subscribed::Waits(Box::new(waiting)));
                    }
                    (error.label(), format!("{}: {error}", text::sanitize_for_log(&name)), is_final)
                }
                Err(NotFollowed::Unknown(unknown)) => ("unknown_name", unknown.to_string(), true),
            };
        if is_final {
            self.dialect.refuse(&mut self.session, id);
        }
        self.refused(label, reason);
    }

    fn refused(&mut self, label: &'static str, reason: String) {
        self.peer.service.refuse(label, &reason);
        self.refusals.count += 1;
        if self.refusals.reasons.len() < REFUSALS_LOGGED {
            self.refusals.reasons.push(reason);
        }
    }

    fn subscribed(&mut self, id: NameId, subscribed: Subscribed) {
        let is_new = matches!(subscribed, Subscribed::To(_));
        if self.names.len() <= id.index() {
            self.names.resize_with(id.index() + 1, || None);
        }
        if let Some(name) = self.names.get_mut(id.index()) {
            *name = Some(subscribed);
        }
        if is_new {
            self.offer(id);
        }
    }

    /// Looks at the entry of a name that changed, or whose turn it is.
    fn changed(&mut self, id: NameId) {
        match self.names.get_mut(id.index()).and_then(Option::take) {
            None => {}
            Some(Subscribed::To(followed)) => self.subscribed(id, Subscribed::To(followed)),
            Some(Subscribed::Waits(waiting)) => match waiting.subscribe(&self.subscriber, number(id)) {
                Ok(subscription) => self.subscribed(id, Subscribed::To(Followed::on_demand(subscription))),
                Err(Unserved::Waits(waiting)) => {
                    self.subscribed(id, Subscribed::Waits(Box::new(waiting)));
                }
                Err(Unserved::Never(_)) => self.dialect.refuse(&mut self.session, id),
            },
        }
    }

    fn offer(&mut self, id: NameId) {
        let Some(place) = self.names.get_mut(id.index()) else { return };
        let Some(Subscribed::To(followed)) = place else { return };
        match followed.look(&self.peer.service) {
            Look::Found(resource) => self.session.offer(id, resource),
            Look::Missing { is_withdrawn: true, .. } => self.dialect.withdraw(&mut self.session, id),
            Look::Missing { .. } => {}
            Look::Unknown(reason) => {
                *place = None;
                self.dialect.refuse(&mut self.session, id);
                self.refused("unknown_name", reason.to_string());
            }
        }
    }

    fn followed(&mut self, id: NameId) -> Option<&mut Followed> {
        match self.names.get_mut(id.index())? {
            Some(Subscribed::To(followed)) => Some(followed),
            _ => None,
        }
    }

    fn record(&mut self, Verdict { items, rejection }: Verdict) {
        for (name, version) in items {
            let Some(id) = self.session.id(&name) else { continue };
            let node = self.dialect.node_id();
            let Some(followed) = self.followed(id) else { continue };
            match &rejection {
                None => {
                    tracing::debug!(name = &*name, %version, "accepted");
                    followed.accepted(version);
                }
                Some(reason) => {
                    if followed.rejected(version.clone(), reason) {
                        tracing::warn!(
                            name = &*name,
                            %version,
                            node = &*node,
                            reason,
                            "Envoy rejected a secret and keeps the previous version; the rejected version is not sent again"
                        );
                    }
                }
            }
        }
    }

    fn respond(&mut self) -> Option<Message> {
        let response = self.dialect.respond(&mut self.session);
        // What the client has held since an earlier stream counts like what it acknowledged.
        for (name, version) in self.session.take_confirmed() {
            let id = self.session.id(&name);
            if let Some(followed) = id.and_then(|id| self.followed(id)) {
                followed.holds(version);
            }
        }
        let (push, message) = response?;
        for item in &push.items {
            if let Some(followed) = self.followed(item.id) {
                followed.pushed();
            }
            tracing::debug!(name = &*item.name, version = %item.resource.version, nonce = push.nonce, "sent");
        }
        Some(message)
    }

    /// Takes in names that were added, and entries that changed, a few at a time. Pending while there is more to take in.
    fn poll_names(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.changed.is_empty()
                && let Poll::Ready(changed) = self.subscriber.poll_changes(cx)
            {
                self.changed = changed.into();
            }
            let left = self.added.len() + self.changed.len();
            if left == 0 {
                return Poll::Ready(());
            }
            if left > AT_ONCE {
                ready!(self.turn.poll_take(cx));
            }
            self.subscribe_some();
            for _ in 0..AT_ONCE {
                let Some(number) = self.changed.pop_front() else { break };
                self.changed(NameId::from_index(number as usize));
            }
            self.turn.end();
        }
    }
}

impl<D: Dialect, I> Drop for SecretStream<D, I> {
    fn drop(&mut self) {
        let names = std::mem::take(&mut self.names);
        if names.len() > AT_ONCE {
            // Their memory is in use until then.
            let charge = self.charge.take();
            self.peer.service.turns.drop_slowly(names, AT_ONCE, charge);
        }
    }
}

/// The number by which the store calls a name.
fn number(id: NameId) -> u32 {
    u32::try_from(id.index()).unwrap_or(u32::MAX)
}

impl<D, I> Stream for SecretStream<D, I>
where
    D: Dialect + Unpin,
    I: Stream<Item = Result<D::Request, Status>> + Unpin,
{
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.phase == Phase::Ended {
            return Poll::Ready(None);
        }
        if this.draining.as_mut().poll(cx).is_ready() {
            this.phase = Phase::Ended;
            return Poll::Ready(Some(Err(this.peer.service.stopping())));
        }
        // Requests first: an ACK or NACK of the last response affects the next one. Each is taken in before the next one.
        while this.phase == Phase::Open {
            if !this.added.is_empty() {
                ready!(this.poll_names(cx));
            }
            let next = match this.large.is_some() {
                true => {
                    ready!(this.turn.poll_take(cx));
                    Poll::Ready(this.large.take().map(|large| Ok(large.0)))
                }
                false => Pin::new(&mut this.requests).poll_next(cx),
            };
            match next {
                Poll::Ready(Some(Ok(request))) => {
                    let is_large = D::names(&request) > AT_ONCE;
                    let received = match is_large && !this.turn.is_taken() {
                        // It gets a turn of its own: decoding it took one already.
                        true => this.park(request),
                        false => this.receive(request),
                    };
                    this.turn.end();
                    if let Err(status) = received {
                        this.phase = Phase::Ended;
                        return Poll::Ready(Some(Err(status)));
                    }
                }
                Poll::Ready(Some(Err(status))) => {
                    this.phase = Phase::Ended;
                    return Poll::Ready(Some(Err(status)));
                }
                Poll::Ready(None) => this.phase = Phase::Closing,
                Poll::Pending => break,
            }
        }
        ready!(this.poll_names(cx));
        if let Some(message) = this.respond() {
            return Poll::Ready(Some(Ok(message)));
        }
        if this.phase == Phase::Closing {
            this.phase = Phase::Ended;
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests;
