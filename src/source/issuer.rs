//! The life of a workload's secrets: key, CSR, CA, check, publish, sleep until the renewal, again.

mod identity;
mod retry;
mod state;
mod trust;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use tokio::time::Instant;

pub use self::identity::IdentitySource;
pub use self::retry::{Validity, retry_delay};
use self::retry::{asked_delay, call_timeout};
pub use self::state::StateFolder;
use self::state::{Keeper, State};
use self::trust::Trust;
use crate::base::clock::{Clock, rfc3339};
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::ca::failover::{Failover, Member};
use crate::ca::{Answer, CaError, CertificateAuthority, Class, Pending, SigningRequest};
use crate::metrics::Metrics;
use crate::pki::certificate::Certificate;
use crate::pki::csr;
use crate::pki::key::{KeyFormat, KeyType, SigningKey};
use crate::secret::{KeyPair, Secret, SecretName, TrustBundle};
use crate::store::{Cache, Entry, Key, Origin, Published, Publisher, Renewals, Workload};

/// When a certificate is renewed: with `ratio` of its lifetime left, give or take `jitter`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grace {
    /// 0.2 renews with 20 % left.
    pub ratio: f64,
    /// 0.01 spreads the moment over ±1 % of the lifetime.
    pub jitter: f64,
}

impl Grace {
    /// notAfter − (ratio ± jitter) × (notAfter − max(notBefore, received)): Istio's meaning, except that a
    /// certificate that was dated back counts from its arrival. `draw` is a random number from −1 to 1.
    pub fn renewal(
        self,
        not_before: SystemTime,
        not_after: SystemTime,
        received: SystemTime,
        draw: f64,
    ) -> SystemTime {
        let lifetime = not_after.duration_since(not_before.max(received)).unwrap_or_default();
        let share = (self.ratio + self.jitter * draw).clamp(0.0, 1.0);
        not_after - lifetime.mul_f64(share)
    }
}

/// How far ahead of ours the clock of a CA may be.
const SKEW: Duration = Duration::from_secs(600);

/// What the source needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whose certificate.
    pub identity: IdentitySource,
    /// The kind of key.
    pub key_type: KeyType,
    /// How it is written.
    pub key_format: KeyFormat,
    /// The lifetime that is asked for.
    pub ttl: Duration,
    /// When to renew.
    pub grace: Grace,
    /// How long one call to the CA may take.
    pub timeout: Duration,
    /// Whether roots that the CA does not name any more are dropped at once.
    pub drops_old_roots: bool,
    /// Where the last good secret is kept across restarts.
    pub state: Option<StateFolder>,
}

/// Keeps one workload's key pair and trust bundle fresh. One call at a time, however many streams listen.
#[derive(Debug)]
pub struct WorkloadSource {
    cas: Failover,
    settings: Settings,
    key_pair: Publisher,
    roots: Publisher,
    trust: Trust,
    keeper: Option<Keeper>,
    /// Of the CA of this name.
    unfinished: BTreeMap<Arc<str>, Unfinished>,
    repeats: FailureLog,
    renewals: Renewals,
    /// Of those that others stood in for.
    stood_in_for: FailureLog,
    clock: Clock,
    metrics: Metrics,
}

/// A request that the CA may still answer, and its key.
#[derive(Debug)]
struct Unfinished {
    key: SigningKey,
    request: SigningRequest,
}

/// What came of a successful call.
struct Issued {
    pair: KeyPair,
    bundle: TrustBundle,
    took: Duration,
}

/// A CA that gave nothing, and why.
struct Failed {
    ca: Member,
    error: CaError,
}

/// When the CA is to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    At(SystemTime),
    /// Files hold both secrets.
    Never,
}

impl WorkloadSource {
    /// A source that publishes `workload`'s secrets to `cache`.
    pub fn new(
        cas: Failover,
        settings: Settings,
        cache: &Cache,
        workload: Workload,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let publisher = |name| cache.publisher(Key { workload, name }, Origin::Ca);
        let key_pair = publisher(SecretName::Workload);
        Self {
            cas,
            renewals: key_pair.renewals(),
            key_pair,
            roots: publisher(SecretName::Roots),
            trust: Trust::new(settings.drops_old_roots),
            keeper: settings.state.clone().map(|folder| Keeper::new(folder, metrics.state.clone())),
            unfinished: BTreeMap::new(),
            repeats: FailureLog::default(),
            stood_in_for: FailureLog::default(),
            settings,
            clock,
            metrics,
        }
    }

    /// Publishes what an earlier run of the agent has kept, if it is still of use.
    pub async fn restore(&mut self) {
        let Some(keeper) = &self.keeper else { return };
        let file = keeper.folder.file();
        let state = match keeper.folder.read() {
            Ok(Some(state)) => state,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(
                    file = %file.display(),
                    reason = %error,
                    "the state of an earlier run is not used; the next certificate replaces it"
                );
                return;
            }
        };
        let identity = self.settings.identity.resolve(&self.clock).await;
        match self.restored(state, identity.as_ref()) {
            Ok(moment) => tracing::info!(
                file = %file.display(),
                renews = %rfc3339(moment),
                "the certificate of an earlier run is served"
            ),
            Err(reason) => tracing::warn!(
                file = %file.display(),
                reason,
                "the certificate of an earlier run is not used; the next one replaces it"
            ),
        }
    }

    fn restored(&mut self, state: State, identity: Option<&SpiffeId>) -> Result<SystemTime, String> {
        let State { provider, ca, key_type, received, chain, key, anchors } = state;
        let names = self.cas.names();
        if provider != self.cas.provider() || !names.contains(&ca) {
            let names = limits::listed(&names, ", ");
            return Err(format!(
                "it came from {provider} at {ca}, and the CA is {} at {names} now",
                self.cas.provider()
            ));
        }
        let now = self.clock.now();
        let roots = anchors.iter().map(|anchor| anchor.root.clone()).collect();
        let key = key.in_format(self.settings.key_format).map_err(|error| error.to_string())?;
        let (pair, _) =
            Answer { chain, roots }.check(key, identity, now).map_err(|error| error.to_string())?;
        self.trust.restore(anchors, &names, now);
        let received = received.min(now);
        let mut renews = self.renewal(&pair, received);
        // Another kind of key is wanted now; or only the CA knows which roots it does not name any more.
        if key_type != self.settings.key_type.name() || self.settings.drops_old_roots {
            renews = now;
        }
        self.key_pair.announce(&pair, now);
        self.publish_roots(Some(renews));
        self.key_pair.publish(Secret::KeyPair(pair), received, Some(renews));
        Ok(renews)
    }

    /// When such a key pair is to be renewed: another moment for each draw.
    fn renewal(&self, pair: &KeyPair, received: SystemTime) -> SystemTime {
        let draw = fastrand::f64() * 2.0 - 1.0;
        self.settings.grace.renewal(pair.leaf().not_before, pair.not_after(), received, draw)
    }

    /// Renews for ever. It depends on the clock alone, not on who listens.
    pub async fn run(mut self) {
        let mut failures: u32 = 0;
        loop {
            self.wait_until_due().await;
            // Whether or not the CA answers.
            self.drop_old_roots();
            match self.renew().await {
                Ok(()) => {
                    failures = 0;
                    self.metrics.failed_rounds.set(0);
                    self.renewals.settle();
                }
                Err(failed) => {
                    failures = failures.saturating_add(1);
                    self.metrics.failed_rounds.set(failures.into());
                    let delay = self.delay(&failed, failures);
                    self.report(&failed, delay);
                    self.renewals.settle();
                    self.tidy(failed.iter().map(|failed| &failed.ca)).await;
                    self.sleep_unless_files_take_over(delay).await;
                }
            }
        }
    }

    async fn wait_until_due(&mut self) {
        let mut entries = (self.key_pair.watch(), self.roots.watch());
        loop {
            let due = self.due(&entries.0.borrow_and_update(), &entries.1.borrow_and_update());
            if due == Due::Never {
                self.metrics.failed_rounds.set(0);
            }
            let renewal = async {
                match due {
                    Due::At(moment) => self.clock.sleep_until(moment).await,
                    Due::Never => std::future::pending().await,
                }
            };
            let old_root = async {
                match self.trust.next_end() {
                    Some(end) => self.clock.sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            // The senders live in `self`, so `changed` does not fail.
            tokio::select! {
                () = renewal => return,
                () = self.renewals.wanted(), if due != Due::Never => return,
                () = old_root => self.drop_old_roots(),
                // What is due is another question then.
                () = self.clock.jumped() => {}
                _ = entries.0.changed() => {}
                _ = entries.1.changed() => {}
            }
        }
    }

    /// The key pair's renewal decides; the roots' only where files hold the key pair.
    fn due(&self, key_pair: &Entry, roots: &Entry) -> Due {
        let is_held = |entry: &Entry| entry.holder > Some(Origin::Ca);
        let entry = match (is_held(key_pair), is_held(roots)) {
            (true, true) => return Due::Never,
            (true, false) => roots,
            (false, _) => key_pair,
        };
        let Some(good) = &entry.good else { return Due::At(SystemTime::UNIX_EPOCH) };
        // The clock was ahead when it came, and the CA's with it: peers refuse it, and its renewal may be years away.
        if let Secret::KeyPair(pair) = &good.secret
            && pair.leaf().not_before > self.clock.now()
        {
            return Due::At(SystemTime::UNIX_EPOCH);
        }
        match (good.renews, &good.secret) {
            (Some(moment), _) => Due::At(moment),
            // Left behind by files that are gone: the CA takes over when a certificate of its own would be renewed.
            (None, Secret::KeyPair(pair)) => Due::At(self.settings.grace.renewal(
                pair.leaf().not_before,
                pair.not_after(),
                good.received,
                0.0,
            )),
            (None, Secret::TrustBundle(_)) => Due::At(SystemTime::UNIX_EPOCH),
        }
    }

    fn validity(&self) -> Validity {
        let Some(good) = self.key_pair.entry().good else { return Validity::Nothing };
        match good.secret.not_after().duration_since(self.clock.now()) {
            Ok(left) => Validity::Left(left),
            Err(past) => Validity::Past(past.duration()),
        }
    }

    /// One round: the CAs are asked one after the other, until one signs.
    async fn renew(&mut self) -> Result<(), Vec<Failed>> {
        let mut failed = Vec::new();
        for ca in self.cas.in_turn(Instant::now()) {
            let error = match self.ask(&ca).await {
                Ok(issued) => {
                    self.publish(&ca, issued).await;
                    self.recovered(&ca, &failed);
                    self.unfinished.clear();
                    self.tidy(failed.iter().map(|failed| &failed.ca).chain([&ca])).await;
                    return Ok(());
                }
                Err(error) => error,
            };
            // It may still sign: nobody else is to do the same.
            let is_pending = matches!(error, CaError::Pending(_));
            if !is_pending {
                self.cas.failed(&ca.name, error.retry_after(), Instant::now(), fastrand::f64());
            }
            failed.push(Failed { ca, error });
            if is_pending {
                return Err(failed);
            }
        }
        self.cas.all_failed();
        Err(failed)
    }

    async fn ask(&mut self, ca: &Member) -> Result<Issued, CaError> {
        let started = Instant::now();
        let outcome = self.issue(ca).await;
        let provider = ca.client.name();
        let word = outcome.as_ref().map_or_else(CaError::label, |_| "ok");
        let took = started.elapsed();
        self.metrics.count_call(provider, word, took, self.clock.now());
        let (pair, bundle) = outcome?;
        Ok(Issued { pair, bundle, took })
    }

    async fn issue(&mut self, ca: &Member) -> Result<(KeyPair, TrustBundle), CaError> {
        let identity = self.settings.identity.resolve(&self.clock).await;
        let Unfinished { key, request } = match self.unfinished.remove(&ca.name) {
            // Another one would have to be approved anew.
            Some(same) if identity.is_none() || same.request.identity == identity => same,
            _ => self.request(identity).await?,
        };
        let timeout = call_timeout(self.settings.timeout, self.validity());
        let answer = match sign(&*ca.client, &request, timeout).await {
            Ok(answer) => answer,
            Err(error) => {
                if ca.client.pending().is_some() {
                    self.unfinished.insert(Arc::clone(&ca.name), Unfinished { key, request });
                }
                return Err(error);
            }
        };
        self.wait_until_begun(&answer).await;
        let key = key.to_private_key().in_format(self.settings.key_format);
        let key = key.map_err(|error| CaError::Local(error.to_string()))?;
        let checked = answer.check(key, request.identity.as_ref(), self.clock.now());
        checked.map_err(|answer| match ca.client.remedy(&answer) {
            Some(remedy) => CaError::AnswerWithRemedy { answer, remedy },
            None => answer.into(),
        })
    }

    /// A certificate that begins in a moment is good then: the CA's clock is ahead of ours, and peers' clocks may be
    /// as ours is. What is served meanwhile stays.
    async fn wait_until_begun(&self, answer: &Answer) {
        let leaf = answer.chain.first().and_then(|leaf| Certificate::parse(leaf).ok());
        let Some(begins) = leaf.map(|leaf| leaf.not_before) else { return };
        let early = begins.duration_since(self.clock.now()).unwrap_or_default();
        if early.is_zero() || early > SKEW {
            return;
        }
        let reason = format!(
            "the certificate that has come is valid only from {}: it is served then; the CA's clock or this \
             machine's clock is wrong",
            rfc3339(begins)
        );
        tracing::warn!(provider = self.cas.provider(), "{reason}");
        self.key_pair.fail(reason);
        self.clock.sleep_until(begins).await;
    }

    /// A new request, with a key of its own.
    async fn request(&self, identity: Option<SpiffeId>) -> Result<Unfinished, CaError> {
        let (key_type, ttl) = (self.settings.key_type, self.settings.ttl);
        let make = move || {
            let key = SigningKey::generate(key_type)?;
            let csr = csr::request(&key, identity.as_ref())?;
            Ok(Unfinished { key, request: SigningRequest { csr, identity, ttl } })
        };
        let made: Result<_, rcgen::Error> = if key_type.is_slow() {
            let made = tokio::task::spawn_blocking(make).await;
            made.map_err(|error| CaError::Local(error.to_string()))?
        } else {
            make()
        };
        made.map_err(|error| CaError::Local(error.to_string()))
    }

    /// A CA that hangs here keeps nobody waiting for long.
    async fn tidy(&self, cas: impl Iterator<Item = &Member>) {
        let timeout = call_timeout(self.settings.timeout, self.validity());
        for ca in cas {
            if tokio::time::timeout(timeout, ca.client.tidy()).await.is_err() {
                tracing::debug!(ca = &*ca.name, ?timeout, "what is left at the CA can't be removed in time");
            }
        }
    }

    async fn publish(&mut self, ca: &Member, issued: Issued) {
        let Issued { pair, bundle, took } = issued;
        let now = self.clock.now();
        let (not_before, not_after) = (pair.leaf().not_before, pair.not_after());
        // However odd the answer, the CA is not asked in a tight loop.
        let renews = self.renewal(&pair, now).max(now + Duration::from_millis(200));
        tracing::info!(
            identity = pair.leaf().names(),
            serial = pair.leaf().serial,
            not_after = %rfc3339(not_after),
            renews = %rfc3339(renews),
            provider = ca.client.name(),
            ca = self.cas.has_several().then_some(&*ca.name),
            took = ?took,
            "certificate issued"
        );
        let lifetime = not_after.duration_since(not_before.max(now)).unwrap_or_default();
        self.trust.answered(&ca.name, bundle.roots(), lifetime, now);
        // Roots first: a peer with a new root must not meet an Envoy that does not know it yet. But its CRLs must be
        // enough for the new chain already.
        self.key_pair.announce(&pair, now);
        if self.publish_roots(Some(renews)) {
            self.wait_for_verdicts().await;
        }
        let key_type = self.settings.key_type;
        let anchors = self.trust.anchors();
        let state = || state::encode(ca.client.name(), &ca.name, key_type, now, &pair, anchors);
        let state = self.keeper.is_some().then(state);
        self.key_pair.publish(Secret::KeyPair(pair), now, Some(renews));
        if let (Some(keeper), Some(state)) = (&mut self.keeper, state) {
            keeper.keep(state).await;
        }
    }

    /// Publishes the roots as they are known. True if there are new ones among them.
    fn publish_roots(&self, renews: Option<SystemTime>) -> bool {
        let Ok(bundle) = TrustBundle::new(self.trust.roots()) else { return false };
        let before = self.roots.entry().good;
        let before = match before.as_deref().map(|good| &good.secret) {
            Some(Secret::TrustBundle(before)) => before.roots(),
            _ => bundle.roots(),
        };
        let (added, removed) = (subjects(bundle.roots(), before), subjects(before, bundle.roots()));
        let published = self.roots.publish(Secret::TrustBundle(bundle), self.clock.now(), renews);
        if published != Published::Changed || (added.is_empty() && removed.is_empty()) {
            return false;
        }
        let old_until = self.trust.next_end().map(rfc3339);
        tracing::info!(
            added = (!added.is_empty()).then(|| limits::listed(&added, "; ")),
            removed = (!removed.is_empty()).then(|| limits::listed(&removed, "; ")),
            old_until = old_until.map(tracing::field::display),
            "the trust roots change"
        );
        !added.is_empty()
    }

    /// Lets those who are served take in new roots before they are served a leaf of theirs.
    async fn wait_for_verdicts(&self) {
        const LONGEST: Duration = Duration::from_secs(5);
        // What is served can wait no longer than half of its remaining life.
        let Validity::Left(left) = self.validity() else { return };
        let longest = LONGEST.min(left / 2);
        if tokio::time::timeout(longest, self.roots.settled()).await.is_err() {
            let streams = self.roots.observed().streams;
            tracing::warn!(
                streams,
                waited = ?longest,
                "not every stream of the trust roots has accepted the new ones; the new certificate goes out nevertheless"
            );
        }
    }

    fn drop_old_roots(&mut self) {
        let now = self.clock.now();
        if self.trust.next_end().is_none_or(|end| end > now) {
            return;
        }
        self.trust.settle(now);
        let renews = self.key_pair.entry().good.and_then(|good| good.renews);
        self.publish_roots(renews);
    }

    /// Notes that `ca` has signed, after those of this round that have not.
    fn recovered(&mut self, ca: &Member, failed: &[Failed]) {
        let had_failed = self.cas.signed(&ca.name);
        if had_failed {
            self.stood_in_for.recovered();
        }
        if self.repeats.recovered() || had_failed && failed.is_empty() {
            tracing::info!(
                provider = ca.client.name(),
                ca = self.cas.has_several().then_some(&*ca.name),
                "the CA signs again"
            );
        }
        if failed.is_empty() {
            return;
        }
        let reason = self.reasons(failed);
        if self.stood_in_for.is_new(&reason) {
            tracing::warn!(reason, "the next CA was asked instead");
        } else {
            tracing::debug!(reason, "the next CA was asked instead");
        }
    }

    /// Why these gave nothing. Each reason says whose it is, where there are several, or the CA has an address.
    fn reasons(&self, failed: &[Failed]) -> String {
        let reasons: Vec<_> = failed
            .iter()
            .map(|Failed { ca, error }| {
                // A CA without an address is called as its provider is.
                let is_anonymous = !self.cas.has_several() && *ca.name == *ca.client.name();
                if is_anonymous || error.names_its_ca() {
                    error.to_string()
                } else {
                    format!("{}: {error}", ca.name)
                }
            })
            .collect();
        reasons.join("; ")
    }

    fn delay(&self, failed: &[Failed], failures: u32) -> Duration {
        let is_transient = failed.iter().any(|failed| failed.error.class() == Class::Transient);
        let class = if is_transient { Class::Transient } else { Class::Permanent };
        let validity = self.validity();
        // As soon as one of them may be asked again.
        let asked = failed.iter().map(|failed| failed.error.retry_after().unwrap_or_default()).min();
        let delay = retry_delay(class, failures, validity, fastrand::f64());
        delay.max(asked_delay(asked.unwrap_or_default(), validity))
    }

    fn report(&mut self, failed: &[Failed], delay: Duration) {
        let reason = self.reasons(failed);
        let served = self.key_pair.entry().good.map(|good| good.secret.not_after());
        let served = match served {
            Some(at) if at > self.clock.now() => {
                format!("the certificate that is served is valid until {}", rfc3339(at))
            }
            Some(at) => {
                format!("the certificate that is served EXPIRED at {}", rfc3339(at))
            }
            None => "there is no certificate yet".to_owned(),
        };
        let retry = humantime::format_duration(Duration::from_millis(
            u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
        ));
        let provider = self.cas.provider();
        if self.repeats.is_new(&reason) {
            tracing::warn!(provider, reason, served, %retry, "no new certificate");
        } else {
            tracing::debug!(provider, reason, served, %retry, "no new certificate");
        }
        self.key_pair.fail(reason.clone());
        self.roots.fail(reason);
    }

    async fn sleep_unless_files_take_over(&self, delay: Duration) {
        let (mut key_pair, mut roots) = (self.key_pair.watch(), self.roots.watch());
        let files = async {
            // Where files hold one of the two, the CA is still asked for the other, no sooner than before.
            while self.due(&key_pair.borrow_and_update(), &roots.borrow_and_update()) != Due::Never {
                tokio::select! {
                    _ = key_pair.changed() => {}
                    _ = roots.changed() => {}
                }
            }
        };
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            // The clock was set, or the machine slept: how much is left is another question now.
            () = self.clock.jumped() => {}
            () = self.renewals.wanted() => {}
            () = files => {}
        }
    }
}

/// Those of `roots` that are not among `others`, for people. A new root often has the old one's name.
fn subjects(roots: &[CertificateDer<'static>], others: &[CertificateDer<'static>]) -> Vec<String> {
    let only_here = roots.iter().filter(|root| !others.contains(root));
    let name = |root: Certificate| format!("{} (serial {})", root.subject, root.serial);
    only_here.filter_map(|root| Certificate::parse(root).ok().map(name)).collect()
}

async fn sign(
    ca: &dyn CertificateAuthority,
    request: &SigningRequest,
    timeout: Duration,
) -> Result<Answer, CaError> {
    let answer = tokio::time::timeout(timeout, ca.sign(request)).await;
    answer.unwrap_or_else(|_| match ca.pending() {
        Some(Pending { waits_for: Some(words) }) => Err(CaError::Pending(words)),
        _ => Err(CaError::Timeout(timeout)),
    })
}

#[cfg(test)]
mod tests;
