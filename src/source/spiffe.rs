//! The SPIFFE Workload API as a source: identity, key and roots come from SPIRE's agent, or from another server of that API.
//!
//! One call is kept open, on which the endpoint sends what is new. When it ends, another one is made. What was received
//! last is served meanwhile, until it expires.

mod answer;
mod call;
mod error;
mod federation;
#[cfg(any(test, fuzzing))]
pub mod fuzz;

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;

use self::answer::Answer;
use self::call::{Endpoint, UnixSocket};
pub use self::error::SpiffeError;
use self::federation::Federation;
use super::issuer::publish::{publish_roots, wait_for_verdicts};
use super::issuer::trust::Trust;
use super::issuer::{Validity, retry_delay};
use crate::base::clock::{Clock, millis, rfc3339, until};
use crate::base::failure_log::FailureLog;
use crate::base::offload;
use crate::base::retry::Class;
use crate::base::spiffe_id::SpiffeId;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::metrics::Metrics;
use crate::pki::crl::Crl;
use crate::pki::key::KeyFormat;
use crate::secret::{KeyPair, Secret, SecretName, TrustBundle};
use crate::store::health::{Components, RenewalHealth};
use crate::store::{Cache, Key, Origin, Published, Publisher, Renewals, Workload};

/// The provider's name, as `--ca` takes it.
pub const PROVIDER: &str = "spiffe";

/// The longest pause between two attempts: the endpoint is on the same machine.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A stream that was open for this long was a good one: the next pause is a short one again.
const STEADY: Duration = Duration::from_secs(30);
/// An endpoint that has not renewed a certificate of which this share of its life is left is asked again.
const OVERDUE_SHARE: u32 = 8;

/// Where the identity comes from, and which one it is.
#[derive(Clone, Debug)]
pub struct SpiffeSettings {
    pub socket: PathBuf,
    pub wanted: Wanted,
    pub key_format: KeyFormat,
    /// How long an attempt to get an answer may take, beside what the endpoint itself waits.
    pub timeout: Duration,
    /// Whether roots that the endpoint no longer names are dropped at once.
    pub drops_old_roots: bool,
}

/// What the options say of the identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    pub id: Option<SpiffeId>,
    pub trust_domain: Option<String>,
    /// What the registration entry calls it.
    pub hint: Option<String>,
}

impl SpiffeSettings {
    /// The endpoint as the option names it.
    pub fn name(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    fn endpoint(&self, disk: &Disk) -> Endpoint {
        let disk = disk.within(self.timeout);
        let dial = Arc::new(UnixSocket { path: self.socket.clone(), disk });
        Endpoint { name: self.name().into(), dial, timeout: self.timeout }
    }

    /// Asks the endpoint once.
    pub async fn ask(&self, clock: &Clock, disk: &Disk) -> Result<Received, SpiffeError> {
        let endpoint = self.endpoint(disk);
        let (_messages, first) = endpoint.open().await?;
        let answer = read(&endpoint, self, first, clock.now()).await?;
        Ok(Received { pair: answer.pair, bundle: answer.bundle, others: answer.others })
    }
}

/// What an endpoint delivers now.
#[derive(Debug)]
pub struct Received {
    pub pair: KeyPair,
    pub bundle: TrustBundle,
    /// The identities that are not served.
    pub others: Vec<String>,
}

/// The secrets in a message of `endpoint`.
async fn read(
    endpoint: &Endpoint,
    settings: &SpiffeSettings,
    message: Bytes,
    now: SystemTime,
) -> Result<Answer, SpiffeError> {
    let (wanted, format) = (settings.wanted.clone(), settings.key_format);
    let read = offload::large(message.len(), move || answer::read(message, &wanted, format, now));
    read.await.map_err(|invalid| endpoint.error(invalid))
}

/// Keeps a workload's key pair and trust bundle as an endpoint delivers them.
#[derive(Debug)]
pub struct SpiffeSource {
    endpoint: Endpoint,
    settings: SpiffeSettings,
    key_pair: Publisher,
    roots: Publisher,
    trust: Trust,
    federation: Federation,
    /// What came with the roots. Nothing as long as there never were any.
    crls: Option<Vec<Arc<Crl>>>,
    /// When one of them begins, or goes out of use.
    next_crl_change: Option<SystemTime>,
    /// The certificate that was received last, and when for the first time.
    newest: Option<(CertificateDer<'static>, SystemTime)>,
    /// When the endpoint should have renewed it.
    due: Option<SystemTime>,
    /// How often it was asked in vain since.
    overdue: u32,
    /// Whether the stream that is open, or was last, has delivered anything.
    has_answered: bool,
    failures: FailureLog,
    bad_crls: FailureLog,
    others: Vec<String>,
    renewals: Renewals,
    clock: Clock,
    metrics: Metrics,
    components: Components,
}

/// Why a stream is left: the endpoint is asked again.
struct AskAgain;

impl SpiffeSource {
    /// A source that publishes `workload`'s secrets to `cache`.
    pub fn new(
        settings: SpiffeSettings,
        cache: &Cache,
        workload: Workload,
        disk: &Disk,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let endpoint = settings.endpoint(disk);
        Self::of(endpoint, settings, cache, workload, clock, metrics)
    }

    fn of(
        endpoint: Endpoint,
        settings: SpiffeSettings,
        cache: &Cache,
        workload: Workload,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let publisher = |name| cache.publisher(Key { workload, name }, Origin::WORKLOAD_API);
        let (key_pair, roots) = (publisher(SecretName::Workload), publisher(SecretName::Roots));
        let components = cache.components(workload);
        components.report_renewal(|renewal| {
            *renewal = RenewalHealth::new(std::iter::once(Arc::clone(&endpoint.name)));
        });
        Self {
            renewals: key_pair.renewals(),
            trust: Trust::new(settings.drops_old_roots),
            federation: Federation::new(cache, workload),
            endpoint,
            settings,
            key_pair,
            roots,
            crls: None,
            next_crl_change: None,
            newest: None,
            due: None,
            overdue: 0,
            has_answered: false,
            failures: FailureLog::default(),
            bad_crls: FailureLog::default(),
            others: Vec::new(),
            clock,
            metrics,
            components,
        }
    }

    /// Follows the endpoint. Does not return.
    pub async fn run(mut self) -> Infallible {
        let mut failures: u32 = 0;
        loop {
            let began = Instant::now();
            self.has_answered = false;
            let error = match self.follow().await {
                Ok(AskAgain) => {
                    failures = 0;
                    continue;
                }
                Err(error) => error,
            };
            if self.has_answered && began.elapsed() >= STEADY {
                failures = 0;
            }
            failures = failures.saturating_add(1);
            let delay = self.pause(error.class(), failures);
            if self.has_answered && error.cause.is_end() {
                tracing::info!(reason = %error, retry_in_ms = millis(delay), "stream of the SPIFFE endpoint ended");
            } else {
                self.report(&error, failures, delay);
            }
            self.renewals.settle();
            self.wait(delay).await;
        }
    }

    /// Makes a call, and publishes what comes on it until it ends, or the endpoint is to be asked again.
    async fn follow(&mut self) -> Result<AskAgain, SpiffeError> {
        let started = Instant::now();
        let opened = self.endpoint.open().await;
        let label = opened.as_ref().map_or_else(SpiffeError::label, |_| "ok");
        self.metrics.count_call(PROVIDER, label, started.elapsed(), self.clock.now());
        let (mut messages, first) = opened?;
        self.take(first).await?;
        self.renewals.settle();
        loop {
            tokio::select! {
                biased;
                () = self.renewals.wanted() => return Ok(AskAgain),
                message = self.endpoint.next(&mut messages) => self.take(message?).await?,
                () = self.clock.sleep_until_any(self.due) => return Ok(AskAgain),
                () = self.clock.sleep_until_any(self.next_change()) => self.change(),
            }
        }
    }

    /// Sleeps after a failure, or until a renewal is requested.
    async fn wait(&mut self, delay: Duration) {
        let end = Instant::now() + delay;
        loop {
            tokio::select! {
                () = until(Some(end)) => return,
                () = self.renewals.wanted() => return,
                // Less may be left than the delay allows for.
                () = self.clock.jumped() => return,
                () = self.clock.sleep_until_any(self.next_change()) => self.change(),
            }
        }
    }

    /// When an old root is dropped, or the CRLs have to change.
    fn next_change(&self) -> Option<SystemTime> {
        [self.trust.next_end(), self.next_crl_change].into_iter().flatten().min()
    }

    fn change(&mut self) {
        let now = self.clock.now();
        if self.trust.next_end().is_some_and(|end| end <= now) {
            self.trust.settle(now);
            publish_roots(&self.roots, &self.trust, now, None);
        }
        if self.next_crl_change.is_some_and(|at| at <= now) {
            self.bring_crls(now);
        }
    }

    /// Publishes what a message holds: the roots first, then the certificate.
    async fn take(&mut self, message: Bytes) -> Result<(), SpiffeError> {
        let now = self.clock.now();
        let Answer { pair, bundle, crls, foreign, others } =
            read(&self.endpoint, &self.settings, message, now).await?;
        self.has_answered = true;
        self.note_others(others);
        self.take_crls(crls);
        self.federation.take(foreign, now);
        let not_after = pair.not_after();
        // CAs date certificates back, and an endpoint sends the same one again.
        let begun = pair.leaf().not_before.max(self.first_received(&pair, now));
        let lifetime = not_after.duration_since(begun).unwrap_or_default();
        self.trust.answered(&self.endpoint.name, bundle.roots(), lifetime, now);
        // New roots come with their CRLs, which must cover the new chain already.
        self.key_pair.announce(&pair, now);
        if let Some(crls) = &self.crls {
            self.roots.cache().bring_crls(self.roots.key(), crls, now);
        }
        let has_new_roots = publish_roots(&self.roots, &self.trust, now, None);
        self.bring_crls(now);
        if let (true, Validity::Left(left)) = (has_new_roots, self.validity()) {
            wait_for_verdicts(&self.roots, left).await;
        }
        let (identity, serial) = (pair.leaf().names(), pair.leaf().serial.clone());
        if self.key_pair.publish(Secret::KeyPair(pair), now, None) == Published::Changed {
            let endpoint = &*self.endpoint.name;
            tracing::info!(identity, serial, not_after = %rfc3339(not_after), endpoint, "certificate received");
        }
        let now = self.clock.now();
        self.components.report_renewal(|renewal| renewal.issued(&self.endpoint.name, now));
        self.judge_age(lifetime, not_after);
        Ok(())
    }

    /// When the certificate of `pair` was received for the first time.
    fn first_received(&mut self, pair: &KeyPair, now: SystemTime) -> SystemTime {
        match (pair.chain().first(), &self.newest) {
            (Some(leaf), Some((newest, received))) if leaf == newest => *received,
            (leaf, _) => {
                self.newest = leaf.map(|leaf| (leaf.clone(), now));
                now
            }
        }
    }

    /// Sets when the endpoint should have renewed the certificate, and reports where it has not.
    fn judge_age(&mut self, lifetime: Duration, not_after: SystemTime) {
        let now = self.clock.now();
        let due = not_after - lifetime / OVERDUE_SHARE;
        let is_due = due <= now;
        self.overdue = if is_due { self.overdue.saturating_add(1) } else { 0 };
        if self.overdue < 2 && self.failures.recovered() {
            tracing::info!(endpoint = &*self.endpoint.name, "SPIFFE endpoint delivers again");
        }
        if !is_due {
            self.due = Some(due);
            return;
        }
        let delay = self.pause(Class::Transient, self.overdue);
        self.due = Some(now + delay);
        if self.overdue == 1 {
            // The endpoint may be about to renew it.
            return;
        }
        let reason = format!(
            "SPIFFE endpoint {}: it has not renewed the certificate, which expires at {}",
            self.endpoint.name,
            rfc3339(not_after)
        );
        if self.failures.is_new(&reason) {
            tracing::warn!(reason, "no new certificate");
        }
        self.fail(reason, "timeout", self.overdue, delay);
    }

    /// Logs a failed attempt, and notes it in the entries of both secrets.
    fn report(&mut self, error: &SpiffeError, failures: u32, delay: Duration) {
        let reason = error.to_string();
        let served = self.key_pair.entry().good.map(|good| good.secret.not_after());
        let served = match served {
            Some(at) if at > self.clock.now() => {
                format!("the served certificate is valid until {}", rfc3339(at))
            }
            Some(at) => format!("the served certificate EXPIRED at {}", rfc3339(at)),
            None => "there is no certificate yet".to_owned(),
        };
        let retry_in_ms = millis(delay);
        if self.failures.is_new(&reason) {
            tracing::warn!(reason, served, retry_in_ms, "no new certificate");
        } else {
            tracing::debug!(reason, served, retry_in_ms, "no new certificate");
        }
        self.fail(reason, error.label(), failures, delay);
    }

    fn fail(&self, reason: String, outcome: &'static str, failures: u32, delay: Duration) {
        let now = self.clock.now();
        self.components.report_renewal(|renewal| {
            renewal.call_failed(&self.endpoint.name, reason.clone(), outcome, now);
            renewal.round_failed(failures, now + delay);
        });
        self.federation.fail(&reason);
        self.key_pair.fail(reason.clone());
        self.roots.fail(reason);
    }

    fn pause(&self, class: Class, failures: u32) -> Duration {
        let draw = fastrand::f64();
        let longest = LONGEST_PAUSE.mul_f64(0.5 + draw / 2.0);
        retry_delay(class, failures, self.validity(), fastrand::f64()).min(longest)
    }

    /// How long the served certificate is still valid.
    fn validity(&self) -> Validity {
        let Some(good) = self.key_pair.entry().good else { return Validity::Nothing };
        match good.secret.not_after().duration_since(self.clock.now()) {
            Ok(left) => Validity::Left(left),
            Err(past) => Validity::Past(past.duration()),
        }
    }

    /// Logs the identities that are not served, when they change.
    fn note_others(&mut self, others: Vec<String>) {
        if self.others != others {
            tracing::info!(
                others = text::listed(&others, ", "),
                endpoint = &*self.endpoint.name,
                "the endpoint has further identities, which are not served; --spiffe-id or --spiffe-hint chooses another"
            );
            self.others = others;
        }
    }

    fn take_crls(&mut self, crls: Result<Vec<Arc<Crl>>, String>) {
        match crls {
            Ok(crls) => {
                self.bad_crls.recovered();
                if self.crls.is_some() || !crls.is_empty() {
                    self.crls = Some(crls);
                }
            }
            Err(reason) => {
                if self.bad_crls.is_new(&reason) {
                    let endpoint = &*self.endpoint.name;
                    tracing::warn!(
                        reason,
                        endpoint,
                        "CRLs of the SPIFFE endpoint not used; the previous ones stay"
                    );
                }
            }
        }
    }

    /// Has the trust bundle, and its successors, hold the CRLs as long as they cover it.
    fn bring_crls(&mut self, now: SystemTime) {
        let Some(crls) = &self.crls else { return };
        let Some(coverage) = self.roots.cache().bring_crls(self.roots.key(), crls, now) else { return };
        self.next_crl_change = coverage.next_change;
        let health = coverage.covered.map(drop).map_err(|uncovered| uncovered.to_string());
        if let Err(reason) = &health
            && self.bad_crls.is_new(reason)
        {
            let what = "trust bundle served without the CRLs of the SPIFFE endpoint: with them Envoy would reject good ones";
            tracing::warn!(reason, "{what}");
        }
        self.components.report_crls(health);
    }
}

#[cfg(test)]
mod tests;
