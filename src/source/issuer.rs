//! The life of a workload's secrets: key, CSR, CA, check, publish, sleep until the renewal, again.
//!
//! | file | story |
//! |---|---|
//! | `schedule` | when the CA is asked next |
//! | `round` | one round of calls, until a CA signs |
//! | `publish` | roots first, then the certificate; old roots go |
//! | `report` | what is logged, and how long until the retry |
//! | `restore` | the certificate of an earlier run |
//! | `identity`, `retry`, `trust`, `state`, `state_writer`, `queue` | what these rest on |

#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod identity;
pub(super) mod publish;
mod queue;
mod report;
mod restore;
mod retry;
mod round;
mod schedule;
mod state;
mod state_writer;
pub(super) mod trust;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

pub use self::identity::IdentitySource;
pub use self::queue::IssuanceQueue;
pub use self::retry::{Validity, retry_delay};
use self::round::{Issued, Unfinished};
pub use self::schedule::Grace;
pub use self::state::StateDir;
use self::state_writer::StateWriter;
use self::trust::Trust;
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::ca::failover::Failover;
use crate::fs::disk::Disk;
use crate::metrics::Metrics;
use crate::pki::csr::Names;
use crate::pki::key::{KeyFormat, KeyType};
use crate::secret::SecretName;
use crate::store::health::{Components, RenewalHealth};
use crate::store::{Cache, Key, Origin, Publisher, Renewals, Workload};

#[derive(Clone, Debug)]
pub struct IssuerSettings {
    /// The SPIFFE ID that is asked for.
    pub identity: IdentitySource,
    /// Further names that are asked for.
    pub names: Names,
    pub key_type: KeyType,
    pub key_format: KeyFormat,
    /// The lifetime that is asked for.
    pub ttl: Duration,
    /// When to renew.
    pub grace: Grace,
    /// How long one call to the CA may take.
    pub timeout: Duration,
    /// Whether roots that the CA no longer names are dropped at once.
    pub drops_old_roots: bool,
    /// Where the last good secret is kept across restarts.
    pub state: Option<StateDir>,
}

/// What issuers share with the rest of the agent. Clones share the same.
#[derive(Clone, Debug)]
pub struct IssuerContext {
    pub clock: Clock,
    pub metrics: Metrics,
    /// The issuers that share a CA share it.
    pub queue: IssuanceQueue,
    pub disk: Disk,
}

/// Keeps one workload's key pair and trust bundle fresh, or the key pair of one host alone. One call at a time, however many streams there are. Dropping
/// it, or the future of [`Issuer::run`], wipes the workload's keys.
#[derive(Debug)]
pub struct Issuer {
    cas: Failover,
    settings: IssuerSettings,
    key_pair: Publisher,
    /// None for a host: the roots are the workload's.
    roots: Option<Publisher>,
    trust: Trust,
    state: Option<StateWriter>,
    /// By the CA's name: requests that the CA may still answer.
    unfinished: BTreeMap<Arc<str>, Unfinished>,
    /// By the CA's name: certificates that are not valid yet. Their CAs are not asked meanwhile.
    early: BTreeMap<Arc<str>, Issued>,
    /// Rounds in which no CA signed.
    failures: FailureLog,
    /// CAs that failed in rounds in which another one signed.
    failovers: FailureLog,
    renewals: Renewals,
    queue: IssuanceQueue,
    /// For a host.
    minted: Option<Minted>,
    clock: Clock,
    disk: Disk,
    metrics: Metrics,
    components: Components,
}

/// What the issuer of a host's key pair has besides.
#[derive(Clone, Debug)]
pub struct Minted {
    /// Of all hosts together, before the queue of all certificates: hosts don't keep workloads waiting.
    pub queue: IssuanceQueue,
    /// Notified when there is room for a value that had none.
    pub room: Arc<Notify>,
}

impl Issuer {
    /// An issuer that publishes `workload`'s secrets to `cache`.
    pub fn new(
        cas: Failover,
        settings: IssuerSettings,
        cache: &Cache,
        workload: Workload,
        context: IssuerContext,
    ) -> Self {
        let key_pair = Key { workload, name: SecretName::Workload };
        let issuer = Self::of(cas, settings, cache, key_pair, None, context);
        issuer.components.report_renewal(|renewal| {
            *renewal = RenewalHealth::new(issuer.cas.in_order().map(|ca| Arc::clone(&ca.name)));
        });
        let roots = cache.publisher(Key { workload, name: SecretName::Roots }, Origin::CA);
        let state = issuer.settings.state.clone();
        let state = state.map(|dir| StateWriter::new(dir, issuer.components.clone(), issuer.disk.clone()));
        Self { roots: Some(roots), state, ..issuer }
    }

    /// An issuer that publishes the key pair of a host under `key`, with the workload's identity and the names in
    /// `settings`.
    pub fn minting(
        cas: Failover,
        settings: IssuerSettings,
        cache: &Cache,
        key: Key,
        minted: Minted,
        context: IssuerContext,
    ) -> Self {
        Self::of(cas, settings, cache, key, Some(minted), context)
    }

    fn of(
        cas: Failover,
        settings: IssuerSettings,
        cache: &Cache,
        key: Key,
        minted: Option<Minted>,
        context: IssuerContext,
    ) -> Self {
        let IssuerContext { clock, metrics, queue, disk } = context;
        let components = cache.components(key.workload);
        let key_pair = cache.publisher(key, Origin::CA);
        Self {
            cas,
            renewals: key_pair.renewals(),
            key_pair,
            roots: None,
            trust: Trust::new(settings.drops_old_roots),
            state: None,
            minted,
            unfinished: BTreeMap::new(),
            early: BTreeMap::new(),
            failures: FailureLog::default(),
            failovers: FailureLog::default(),
            settings,
            queue,
            clock,
            disk,
            metrics,
            components,
        }
    }

    /// Renews for ever. The moments depend on the clock alone, not on which streams there are.
    #[expect(clippy::manual_async_fn, reason = "an async function would have room for the issuer twice")]
    pub fn run(mut self) -> impl Future<Output = ()> + Send {
        async move { self.renew_for_ever().await }
    }

    async fn renew_for_ever(&mut self) {
        let mut failures: u32 = 0;
        loop {
            self.wait_until_due().await;
            // Whether or not the CA answers.
            self.drop_old_roots();
            // A box, because the issuer sleeps for most of its life.
            match Box::pin(self.renew()).await {
                Ok(()) => {
                    failures = 0;
                    self.report_renewal(RenewalHealth::round_ended);
                    self.renewals.settle();
                }
                Err(failed) => {
                    failures = failures.saturating_add(1);
                    let delay = self.delay(&failed, failures);
                    let next_try = self.clock.now() + delay;
                    self.report_renewal(|renewal| renewal.round_failed(failures, next_try));
                    self.report(&failed, delay);
                    self.renewals.settle();
                    self.tidy(failed.iter().map(|failed| &failed.ca)).await;
                    self.sleep_until_retry(delay).await;
                }
            }
        }
    }

    /// Reports the renewal of the workload's certificate. Those of hosts are in their entries alone.
    fn report_renewal(&self, change: impl FnOnce(&mut RenewalHealth)) {
        if self.minted.is_none() {
            self.components.report_renewal(change);
        }
    }

    /// The host's name in logs; none for the workload's certificate.
    fn logged_name(&self) -> Option<&str> {
        self.minted.as_ref().map(|_| self.key_pair.key().name.as_str())
    }
}

#[cfg(test)]
mod tests;
