//! One stream of the Workload API: a message at first, and another one whenever its content changes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;

use crate::base::budget::Charge;
use crate::base::limits;
use crate::base::text;
use crate::pki::crl::Crl;
use crate::secret::{NotAnSvid, Secret, SecretName, Svid, TrustBundle, Version};
use crate::serve::others::Step;
use crate::serve::sds::Peer;
use crate::serve::sds::message::{Message, MessageWriter};
use crate::store::{Entry, Federated, Key, Subscriber, Subscription};

/// How long a call waits for the first certificate.
const PATIENCE: Duration = Duration::from_secs(10);
/// The part of a client's deadline that is reserved for sending the response.
const RESPONSE_TIME: Duration = Duration::from_millis(100);
/// What the status shows as the client of a version.
const CLIENT: &str = "SPIFFE Workload API";
/// A JWKS without keys: this agent issues no JWT-SVIDs.
const NO_KEYS: &[u8] = br#"{"keys":[]}"#;
/// So many streams are sent a change at once.
const AT_ONCE: usize = 8;
/// What each stream beyond adds to the time within which a change is sent to all, and the longest such time: new roots are
/// sent well within the five seconds that a new certificate waits for them.
const SPLAY_STEP: Duration = Duration::from_millis(10);
const LONGEST_SPLAY: Duration = Duration::from_secs(1);

/// Which messages a stream has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Svid,
    Bundles,
    JwtBundles,
}

/// One call.
pub(super) struct IdentityStream<I> {
    peer: Arc<Peer>,
    requests: I,
    is_requested: bool,
    content: Content,
    subscriber: Subscriber,
    key_pair: Subscription,
    /// None where they are not sent.
    roots: Option<Subscription>,
    /// When waiting for the first message ends.
    deadline: Instant,
    sent: Option<Versions>,
    /// The memory of the stream.
    _charge: Charge,
}

/// What a message was made of: the identity, or its trust domain where only that is sent; and the bundles.
type Versions = (Version, Option<Version>);

/// A message that can be sent.
struct Ready {
    identity: Identity,
    roots: Option<(TrustBundle, Version)>,
    /// Those of other trust domains.
    federated: Vec<Federated>,
    /// When it must no longer be held to be true.
    not_after: Option<SystemTime>,
}

struct Identity {
    svid: Svid,
    /// That of the entry.
    version: Version,
}

/// Why there is no message.
enum Missing {
    /// There may be one later.
    Yet(String),
    Never(NotAnSvid),
}

impl<I> IdentityStream<I>
where
    I: Stream<Item = Result<(), Status>> + Unpin,
{
    pub(super) fn new(
        peer: Arc<Peer>,
        requests: I,
        content: Content,
        timeout: Option<Duration>,
    ) -> Result<Self, Status> {
        let charge = peer.charge(limits::STREAM_MEMORY)?;
        let subscriber = Subscriber::new(peer.connection);
        subscriber.set_node(CLIENT.into());
        let subscribe = |name, number| {
            let key = Key { workload: peer.service.workload, name };
            let subscription = peer.service.cache.subscribe_as(&key, &subscriber, number);
            subscription.map_err(|reason| no_identity(&peer, &reason.to_string()))
        };
        let key_pair = subscribe(SecretName::Workload, 0)?;
        let roots = match content {
            Content::JwtBundles => None,
            Content::Svid | Content::Bundles => Some(subscribe(SecretName::Roots, 1)?),
        };
        let patience =
            timeout.map_or(PATIENCE, |timeout| timeout.saturating_sub(RESPONSE_TIME).min(PATIENCE));
        Ok(Self {
            deadline: Instant::now() + patience,
            requests,
            is_requested: false,
            content,
            subscriber,
            key_pair,
            roots,
            sent: None,
            _charge: charge,
            peer,
        })
    }

    /// The next message. It never ends with OK: clients take that for the last word.
    pub(super) async fn next(mut self) -> Step<Self> {
        let service = Arc::clone(&self.peer.service);
        let message = tokio::select! {
            biased;
            () = service.draining.cancelled() => Err(service.stopping()),
            message = self.message() => message,
        };
        message.map(|message| Some((message, self)))
    }

    async fn message(&mut self) -> Result<Message, Status> {
        if !self.is_requested {
            let missing = || Err(Status::invalid_argument("the call has no request"));
            self.requests.next().await.unwrap_or_else(missing)?;
            self.is_requested = true;
        }
        let mut has_waited = false;
        loop {
            match self.look() {
                Ok(ready) if self.sent.as_ref() == Some(&ready.versions(self.content)) => {
                    let service = &self.peer.service;
                    tokio::select! {
                        () = self.changed() => {}
                        () = service.clock.sleep_until_any(ready.not_after) => {}
                    }
                }
                Ok(_) if self.sent.is_some() && !has_waited => {
                    sleep(splay(self.streams(), fastrand::f64())).await;
                    has_waited = true;
                }
                Ok(ready) => return Ok(self.send(ready)),
                Err(Missing::Never(reason)) => return Err(no_identity(&self.peer, &reason.to_string())),
                Err(Missing::Yet(reason)) if self.sent.is_some() || Instant::now() >= self.deadline => {
                    return Err(Status::unavailable(text::sanitize_for_log(&reason)));
                }
                Err(Missing::Yet(_)) => {
                    // Late or not, the next look decides.
                    let _ = timeout_at(self.deadline, self.changed()).await;
                }
            }
        }
    }

    /// Returns when an entry has changed since the last look.
    async fn changed(&self) {
        std::future::poll_fn(|cx| self.subscriber.poll_changes(cx)).await;
    }

    /// How many streams learn of a change when this one does.
    fn streams(&self) -> usize {
        self.roots.as_ref().unwrap_or(&self.key_pair).streams()
    }

    fn look(&self) -> Result<Ready, Missing> {
        let service = &self.peer.service;
        let now = service.clock.now();
        // Files change both at once.
        let _together = service.cache.together();
        let identity = self.key_pair.entry(|entry| self.identity(entry, now));
        let roots = self.roots.as_ref().map(|roots| roots.entry(|entry| bundle(entry, now))).transpose();
        let ((identity, pair_ends), roots) = (identity?, roots?);
        let roots_end = roots.as_ref().map(|(bundle, _)| bundle.not_after());
        let domain = identity.svid.id.trust_domain();
        let mut federated = service.cache.federated(service.workload, now);
        federated.retain(|one| one.name.domain() != domain);
        let not_after =
            if self.content == Content::Svid { roots_end.min(Some(pair_ends)) } else { roots_end };
        Ok(Ready { identity, roots, federated, not_after })
    }

    /// The identity in the entry of the key pair, and when it expires. Bundles need only its trust domain.
    fn identity(&self, entry: &Entry, now: SystemTime) -> Result<(Identity, SystemTime), Missing> {
        let valid = entry.valid_at(now);
        let good = match (&entry.good, valid) {
            (Some(good), Err(_)) if self.content != Content::Svid => good,
            (_, valid) => valid.map_err(|reason| Missing::Yet(format!("no certificate: {reason}")))?,
        };
        let Secret::KeyPair(pair) = &good.secret else { return Err(Missing::Never(NotAnSvid::NoSpiffeId)) };
        let svid = pair.svid().map_err(Missing::Never)?.clone();
        Ok((Identity { svid, version: good.resource.version.clone() }, pair.not_after()))
    }

    fn send(&mut self, ready: Ready) -> Message {
        let versions = ready.versions(self.content);
        let message = ready.encode(self.content);
        let (identity_sent, roots_sent) = self.sent.take().unzip();
        if self.content == Content::Svid {
            if identity_sent.as_ref() != Some(&versions.0) {
                self.key_pair.pushed();
            }
            self.key_pair.holds(ready.identity.version);
        }
        if let (Some(subscription), Some((_, version))) = (&mut self.roots, ready.roots) {
            if roots_sent.flatten() != versions.1 {
                subscription.pushed();
            }
            subscription.holds(version);
        }
        tracing::debug!(content = ?self.content, id = %ready.identity.svid.id, "sent to a client of the Workload API");
        self.sent = Some(versions);
        message
    }
}

/// The trust bundle in its entry, with its version.
fn bundle(entry: &Entry, now: SystemTime) -> Result<(TrustBundle, Version), Missing> {
    let good = entry.valid_at(now).map_err(|reason| Missing::Yet(format!("no trust bundle: {reason}")))?;
    match &good.secret {
        Secret::TrustBundle(bundle) => Ok((bundle.clone(), good.resource.version.clone())),
        Secret::KeyPair(_) => Err(Missing::Yet("no trust bundle".to_owned())),
    }
}

impl Ready {
    fn versions(&self, content: Content) -> Versions {
        let Svid { id, version, .. } = &self.identity.svid;
        let identity = match content {
            Content::Svid => version.clone(),
            Content::Bundles | Content::JwtBundles => Version::of(id.trust_domain().as_bytes()),
        };
        let own = self.roots.as_ref().map(|(_, version)| version);
        if self.federated.is_empty() {
            return (identity, own.cloned());
        }
        let mut all = own.map(ToString::to_string).unwrap_or_default();
        for one in &self.federated {
            all.extend(["\n", one.name.as_str()]);
            // The names alone are sent with empty key sets.
            if content != Content::JwtBundles {
                all.push('\n');
                all.push_str(&one.good.resource.version.to_string());
            }
        }
        (identity, Some(Version::of(all.as_bytes())))
    }

    /// The message, which shares its bytes with those of all streams.
    fn encode(&self, content: Content) -> Message {
        let (crls, roots) = match &self.roots {
            Some((bundle, _)) => (bundle.crls(), bundle.joined()),
            None => (&[][..], Bytes::new()),
        };
        let domain = format!("spiffe://{}", self.identity.svid.id.trust_domain());
        let crls = crls.iter().map(|crl| Bytes::from_owner(SharedCrl(Arc::clone(crl))));
        let federated =
            self.federated.iter().filter_map(|one| Some((one.name.as_str(), one.bundle()?.joined())));
        let mut writer = MessageWriter::default();
        match content {
            Content::Svid => {
                writer.extended(1, self.identity.svid.bytes().clone(), 4, roots);
                crls.for_each(|crl| writer.shared(2, crl));
                federated.for_each(|(domain, roots)| writer.keyed(3, domain, roots));
            }
            Content::Bundles => {
                crls.for_each(|crl| writer.shared(1, crl));
                writer.keyed(2, &domain, roots);
                federated.for_each(|(domain, roots)| writer.keyed(2, domain, roots));
            }
            Content::JwtBundles => {
                let all = federated.map(|(domain, _)| domain);
                let all = std::iter::once(&*domain).chain(all);
                all.for_each(|domain| writer.keyed(1, domain, Bytes::from_static(NO_KEYS)));
            }
        }
        writer.finish()
    }
}

struct SharedCrl(Arc<Crl>);

impl AsRef<[u8]> for SharedCrl {
    fn as_ref(&self) -> &[u8] {
        self.0.der()
    }
}

/// No identity will come. Clients look for the first words.
fn no_identity(peer: &Peer, reason: &str) -> Status {
    let message = format!("no identity issued: {reason}");
    super::refuse(peer, "no_identity", &message);
    Status::permission_denied(message)
}

/// How long a stream waits before it sends a change of which `streams` learn at once: a part of the time that grows with
/// their number, as `random` from 0 to 1 says.
pub(super) fn splay(streams: usize, random: f64) -> Duration {
    let beyond = u32::try_from(streams.saturating_sub(AT_ONCE)).unwrap_or(u32::MAX);
    SPLAY_STEP.saturating_mul(beyond).min(LONGEST_SPLAY).mul_f64(random)
}
