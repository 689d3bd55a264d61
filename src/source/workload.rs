//! The life of a workload's secrets: key, CSR, CA, check, publish, sleep until the renewal, again.

mod retry;

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

pub use self::retry::{Validity, retry_delay};
use self::retry::{asked_delay, call_timeout};
use crate::backoff::Repeats;
use crate::ca::client_cert::ClientCertFolder;
use crate::ca::{Answer, CaError, CertificateAuthority, Pending, SigningRequest};
use crate::cache::{Cache, Entry, Key, Origin, Publisher, Workload};
use crate::clock::Clock;
use crate::credential::TokenFile;
use crate::identity::{ServiceAccount, SpiffeId};
use crate::metrics::{ByOutcome, ByProvider, Metrics};
use crate::pki::csr;
use crate::pki::key::{KeyType, SigningKey};
use crate::secret::{KeyPair, Secret, SecretName, TrustBundle};

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

/// How the workload's SPIFFE ID is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentitySource {
    /// It was configured.
    Fixed(SpiffeId),
    /// It follows from the token's `sub`, or from the client certificate that is used instead, less what was configured.
    Token {
        /// The token.
        file: TokenFile,
        /// The client certificate.
        client_cert: Option<ClientCertFolder>,
        /// The trust domain.
        trust_domain: String,
        /// Instead of the token's.
        namespace: Option<String>,
        /// Instead of the token's.
        service_account: Option<String>,
    },
}

impl IdentitySource {
    /// The identity as far as it is known now: none without a credential, or where it does not tell.
    pub async fn resolve(&self, clock: &Clock) -> Option<SpiffeId> {
        match self {
            Self::Fixed(identity) => Some(identity.clone()),
            Self::Token { file, client_cert, trust_domain, namespace, service_account } => {
                let with_configured = |domain: &str, told: Option<ServiceAccount>| {
                    let (told_namespace, told_name) = told.map(|told| (told.namespace, told.name)).unzip();
                    let account = ServiceAccount {
                        namespace: namespace.clone().or(told_namespace)?,
                        name: service_account.clone().or(told_name)?,
                    };
                    SpiffeId::for_service_account(domain, &account).ok()
                };
                let certificate = match client_cert {
                    Some(folder) => folder.read(clock).await.ok(),
                    None => None,
                };
                if let Some(own) = certificate.and_then(|certificate| certificate.pair.spiffe_id()) {
                    return Some(with_configured(own.trust_domain(), own.service_account()).unwrap_or(own));
                }
                let told = file.read().ok().and_then(|token| token.service_account());
                with_configured(trust_domain, told)
            }
        }
    }
}

/// What the source needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whose certificate.
    pub identity: IdentitySource,
    /// The kind of key.
    pub key_type: KeyType,
    /// The lifetime that is asked for.
    pub ttl: Duration,
    /// When to renew.
    pub grace: Grace,
    /// How long one call to the CA may take.
    pub timeout: Duration,
}

/// Keeps one workload's key pair and trust bundle fresh. One call at a time, however many streams listen.
#[derive(Debug)]
pub struct WorkloadSource {
    ca: Box<dyn CertificateAuthority>,
    settings: Settings,
    key_pair: Publisher,
    roots: Publisher,
    clock: Clock,
    metrics: Metrics,
}

/// A request that the CA may still answer, and its key.
struct Unfinished {
    key: SigningKey,
    request: SigningRequest,
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
        ca: Box<dyn CertificateAuthority>,
        settings: Settings,
        cache: &Cache,
        workload: Workload,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let publisher = |name| cache.publisher(Key { workload, name }, Origin::Ca);
        Self {
            ca,
            settings,
            key_pair: publisher(SecretName::Workload),
            roots: publisher(SecretName::Roots),
            clock,
            metrics,
        }
    }

    /// Renews for ever. It depends on the clock alone, not on who listens.
    pub async fn run(self) {
        let mut failures: u32 = 0;
        let mut repeats = Repeats::default();
        let mut unfinished = None;
        loop {
            self.wait_until_due().await;
            match self.renew(&mut unfinished).await {
                Ok(()) => {
                    failures = 0;
                    if repeats.recovered() {
                        tracing::info!(provider = self.ca.name(), "the CA signs again");
                    }
                    self.tidy().await;
                }
                Err(error) => {
                    failures = failures.saturating_add(1);
                    let validity = self.validity();
                    let delay = retry_delay(error.class(), failures, validity, fastrand::f64());
                    let delay = delay.max(asked_delay(error.retry_after().unwrap_or_default(), validity));
                    self.report(&error, delay, &mut repeats);
                    self.tidy().await;
                    self.sleep_unless_files_take_over(delay).await;
                }
            }
        }
    }

    async fn wait_until_due(&self) {
        let mut entries = (self.key_pair.watch(), self.roots.watch());
        loop {
            let due = self.due(&entries.0.borrow_and_update(), &entries.1.borrow_and_update());
            let moment = async {
                match due {
                    Due::At(moment) => self.clock.sleep_until(moment).await,
                    Due::Never => std::future::pending().await,
                }
            };
            // The senders live in `self`, so `changed` does not fail.
            tokio::select! {
                () = moment => return,
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

    async fn renew(&self, unfinished: &mut Option<Unfinished>) -> Result<(), CaError> {
        let started = Instant::now();
        let outcome = self.issue(unfinished).await;
        let provider = self.ca.name();
        let word = outcome.as_ref().map_or_else(CaError::label, |_| "ok");
        self.metrics.ca_requests.get_or_create(&ByOutcome { provider, outcome: word }).inc();
        let took = started.elapsed();
        self.metrics.ca_durations.get_or_create(&ByProvider { provider }).observe(took.as_secs_f64());
        let (pair, bundle) = outcome?;
        self.publish(pair, bundle, took);
        Ok(())
    }

    async fn issue(&self, unfinished: &mut Option<Unfinished>) -> Result<(KeyPair, TrustBundle), CaError> {
        let identity = self.settings.identity.resolve(&self.clock).await;
        let Unfinished { key, request } = match unfinished.take() {
            // Another one would have to be approved anew.
            Some(same) if identity.is_none() || same.request.identity == identity => same,
            _ => self.request(identity).await?,
        };
        let timeout = call_timeout(self.settings.timeout, self.validity());
        let answer = match self.sign(&request, timeout).await {
            Ok(answer) => answer,
            Err(error) => {
                *unfinished = self.ca.pending().map(|_| Unfinished { key, request });
                return Err(error);
            }
        };
        let checked = answer.check(key.to_private_key(), request.identity.as_ref(), self.clock.now());
        checked.map_err(|answer| match self.ca.remedy(&answer) {
            Some(remedy) => CaError::AnswerWithRemedy { answer, remedy },
            None => answer.into(),
        })
    }

    async fn sign(&self, request: &SigningRequest, timeout: Duration) -> Result<Answer, CaError> {
        let answer = tokio::time::timeout(timeout, self.ca.sign(request)).await;
        answer.unwrap_or_else(|_| match self.ca.pending() {
            Some(Pending { waits_for: Some(words) }) => Err(CaError::Pending(words)),
            _ => Err(CaError::Timeout(timeout)),
        })
    }

    /// A new request, with a key of its own.
    async fn request(&self, identity: Option<SpiffeId>) -> Result<Unfinished, CaError> {
        let local = |error: rcgen::Error| CaError::Local(error.to_string());
        let key_type = self.settings.key_type;
        let key = if key_type.is_slow() {
            let made = tokio::task::spawn_blocking(move || SigningKey::generate(key_type)).await;
            made.map_err(|error| CaError::Local(error.to_string()))?
        } else {
            SigningKey::generate(key_type)
        };
        let key = key.map_err(local)?;
        let csr = csr::request(&key, identity.as_ref()).map_err(local)?;
        Ok(Unfinished { key, request: SigningRequest { csr, identity, ttl: self.settings.ttl } })
    }

    /// A CA that hangs here keeps nobody waiting for long.
    async fn tidy(&self) {
        let timeout = call_timeout(self.settings.timeout, self.validity());
        if tokio::time::timeout(timeout, self.ca.tidy()).await.is_err() {
            tracing::debug!(
                provider = self.ca.name(),
                ?timeout,
                "what is left at the CA can't be removed in time"
            );
        }
    }

    fn publish(&self, pair: KeyPair, bundle: TrustBundle, took: Duration) {
        let now = self.clock.now();
        let grace = self.settings.grace;
        let draw = fastrand::f64() * 2.0 - 1.0;
        let renews = grace.renewal(pair.leaf().not_before, pair.not_after(), now, draw);
        // However odd the answer, the CA is not asked in a tight loop.
        let renews = renews.max(now + Duration::from_millis(200));
        tracing::info!(
            identity = pair.leaf().names(),
            serial = pair.leaf().serial,
            not_after = %humantime::format_rfc3339_seconds(pair.not_after()),
            renews = %humantime::format_rfc3339_seconds(renews),
            provider = self.ca.name(),
            took = ?took,
            "certificate issued"
        );
        // Roots first: a peer with a new root must not meet an Envoy that does not know it yet. But its CRLs must be
        // enough for the new chain already.
        self.key_pair.announce(&pair, now);
        self.roots.publish(Secret::TrustBundle(bundle), now, Some(renews));
        self.key_pair.publish(Secret::KeyPair(pair), now, Some(renews));
    }

    fn report(&self, error: &CaError, delay: Duration, repeats: &mut Repeats) {
        let reason = error.to_string();
        let served = self.key_pair.entry().good.map(|good| good.secret.not_after());
        let served = match served {
            Some(at) if at > self.clock.now() => {
                format!(
                    "the certificate that is served is valid until {}",
                    humantime::format_rfc3339_seconds(at)
                )
            }
            Some(at) => {
                format!("the certificate that is served EXPIRED at {}", humantime::format_rfc3339_seconds(at))
            }
            None => "there is no certificate yet".to_owned(),
        };
        let retry = humantime::format_duration(Duration::from_millis(
            u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
        ));
        if repeats.is_news(&reason) {
            tracing::warn!(provider = self.ca.name(), reason, served, %retry, "no new certificate");
        } else {
            tracing::debug!(provider = self.ca.name(), reason, served, %retry, "no new certificate");
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
            () = files => {}
        }
    }
}

#[cfg(test)]
mod tests;
