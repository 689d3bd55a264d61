//! The loop of one stream: takes requests and changes of secrets, returns responses.
//!
//! It is a `Stream` that the transport polls when it can send. So the requests of a client that does not read are not read
//! either, and once it reads, it gets the newest secrets, not a queue of old ones.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use prometheus_client::metrics::counter::Counter;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamMap};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Status;

use super::Service;
use super::dialect::{Dialect, Received, Verdict};
use super::session::Session;
use crate::base::text;
use crate::secret::{Resource, SecretName};
use crate::store::{Entry, Subscription};

/// The responses of one stream.
pub struct SecretStream<D, I> {
    service: Arc<Service>,
    requests: I,
    dialect: D,
    session: Session,
    subscriptions: HashMap<String, Subscribed>,
    changes: StreamMap<String, WatchStream<Entry>>,
    /// The newest value of every subscribed name that has one.
    resources: HashMap<String, Resource>,
    draining: Pin<Box<WaitForCancellationFutureOwned>>,
    phase: Phase,
}

/// How many refused names of one request are logged with their reason; the others are only counted.
const REFUSALS_LOGGED: usize = 3;

/// A subscribed name with its counters.
struct Subscribed {
    subscription: Subscription,
    pushes: Counter,
    acks: Counter,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The client has closed its side: it gets what is ready, then the stream ends.
    Closing,
    Ended,
}

impl<D: Dialect, I> SecretStream<D, I> {
    pub(super) fn new(service: Arc<Service>, requests: I) -> Self {
        let draining = Box::pin(service.draining.clone().cancelled_owned());
        Self {
            service,
            requests,
            dialect: D::default(),
            session: Session::default(),
            subscriptions: HashMap::new(),
            changes: StreamMap::new(),
            resources: HashMap::new(),
            draining,
            phase: Phase::Open,
        }
    }

    fn receive(&mut self, request: D::Request) -> Result<(), Status> {
        let received = self.dialect.receive(&mut self.session, request).map_err(|refusal| {
            self.service.refuse(refusal.label(), &refusal);
            tracing::warn!(reason = %refusal, "stream refused");
            Status::from(refusal)
        })?;
        self.apply(received);
        Ok(())
    }

    fn apply(&mut self, received: Received) {
        if let Some(verdict) = received.verdict {
            self.record(verdict);
        }
        for name in received.removed {
            self.subscriptions.remove(&name);
            self.changes.remove(&name);
            self.resources.remove(&name);
        }
        let mut reasons = Vec::new();
        let mut refused: usize = 0;
        for name in received.added {
            if let Err(reason) = self.subscribe(name) {
                refused += 1;
                // One line per request: a client that requests thousands of names must not fill the log.
                if reasons.len() < REFUSALS_LOGGED {
                    reasons.push(reason);
                }
            }
        }
        if refused > 0 {
            let node = &*self.dialect.node_id();
            tracing::warn!(node, refused, reasons = reasons.join("; "), "resource names refused");
        }
    }

    fn subscribe(&mut self, text: String) -> Result<(), String> {
        let (label, reason) = match text.parse::<SecretName>() {
            Ok(name) => match self.service.cache.subscribe(&self.service.key(&name)) {
                Ok(subscription) => {
                    let node = self.dialect.node_id();
                    tracing::debug!(node = &*node, name = text, "subscribed");
                    let subscription = subscription.named(node);
                    self.changes.insert(text.clone(), subscription.changes());
                    // Looked up once, because each look-up builds a label.
                    let label = self.service.label(&text);
                    let pushes = self.service.metrics.pushes.get_or_create_owned(&label);
                    let acks = self.service.metrics.acks.get_or_create_owned(&label);
                    // Starts at zero, so that the first NACK shows as an increase.
                    drop(self.service.metrics.nacks.get_or_create(&label));
                    self.subscriptions.insert(text, Subscribed { subscription, pushes, acks });
                    return Ok(());
                }
                Err(error) => (error.label(), format!("{}: {error}", text::sanitize_for_log(&text))),
            },
            Err(unknown) => ("unknown_name", unknown.to_string()),
        };
        self.service.refuse(label, &reason);
        self.dialect.refuse(&mut self.session, &text);
        Err(reason)
    }

    fn record(&mut self, Verdict { items, rejection }: Verdict) {
        for (name, version) in items {
            let Some(Subscribed { subscription, acks, .. }) = self.subscriptions.get_mut(&name) else {
                continue;
            };
            match &rejection {
                None => {
                    acks.inc();
                    tracing::debug!(name, %version, "accepted");
                    subscription.accepted(version);
                }
                Some(reason) => {
                    self.service.metrics.nacks.get_or_create(&self.service.label(&name)).inc();
                    if subscription.rejected(version.clone(), reason) {
                        let node = &*self.dialect.node_id();
                        tracing::warn!(
                            name,
                            %version,
                            node,
                            reason,
                            "Envoy rejected a secret and keeps the previous version; the rejected version is not sent again"
                        );
                    }
                }
            }
        }
    }

    fn offer(&mut self, name: String, entry: &Entry) {
        if let Ok(resource) = self.service.sendable(entry) {
            self.session.offer(&name, resource.version.clone());
            self.resources.insert(name, resource.clone());
        }
    }

    fn respond(&mut self) -> Option<D::Response> {
        let (push, response) = self.dialect.respond(&mut self.session, &self.resources)?;
        for (name, version) in &push.items {
            if let Some(subscribed) = self.subscriptions.get(name) {
                subscribed.pushes.inc();
            }
            tracing::debug!(name, %version, nonce = push.nonce, "sent");
        }
        Some(response)
    }
}

impl<D, I> Stream for SecretStream<D, I>
where
    D: Dialect + Unpin,
    I: Stream<Item = Result<D::Request, Status>> + Unpin,
{
    type Item = Result<D::Response, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.phase == Phase::Ended {
            return Poll::Ready(None);
        }
        if this.draining.as_mut().poll(cx).is_ready() {
            this.phase = Phase::Ended;
            return Poll::Ready(Some(Err(this.service.stopping())));
        }
        // Requests first: an ACK or NACK of the last response affects the next one.
        while this.phase == Phase::Open {
            match Pin::new(&mut this.requests).poll_next(cx) {
                Poll::Ready(Some(Ok(request))) => {
                    if let Err(status) = this.receive(request) {
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
        while let Poll::Ready(Some((name, entry))) = Pin::new(&mut this.changes).poll_next(cx) {
            this.offer(name, &entry);
        }
        if let Some(response) = this.respond() {
            return Poll::Ready(Some(Ok(response)));
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
