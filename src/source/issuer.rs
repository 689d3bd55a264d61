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
mod publish;
mod queue;
mod report;
mod restore;
mod retry;
mod round;
mod schedule;
mod state;
mod state_writer;
mod trust;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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

/// Keeps one workload's key pair and trust bundle fresh. One call at a time, however many streams there are. Dropping
/// it, or the future of [`Issuer::run`], wipes the workload's keys.
#[derive(Debug)]
pub struct Issuer {
    cas: Failover,
    settings: IssuerSettings,
    key_pair: Publisher,
    roots: Publisher,
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
    clock: Clock,
    disk: Disk,
    metrics: Metrics,
    components: Components,
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
        let IssuerContext { clock, metrics, queue, disk } = context;
        let publisher = |name| cache.publisher(Key { workload, name }, Origin::CA);
        let key_pair = publisher(SecretName::Workload);
        let state = settings.state.clone();
        let components = cache.components(workload);
        let state = state.map(|dir| StateWriter::new(dir, components.clone(), disk.clone()));
        components.report_renewal(|renewal| {
            *renewal = RenewalHealth::new(cas.in_order().map(|ca| Arc::clone(&ca.name)));
        });
        Self {
            cas,
            renewals: key_pair.renewals(),
            key_pair,
            roots: publisher(SecretName::Roots),
            trust: Trust::new(settings.drops_old_roots),
            state,
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
    pub async fn run(mut self) {
        let mut failures: u32 = 0;
        loop {
            self.wait_until_due().await;
            // Whether or not the CA answers.
            self.drop_old_roots();
            match self.renew().await {
                Ok(()) => {
                    failures = 0;
                    self.components.report_renewal(RenewalHealth::round_ended);
                    self.renewals.settle();
                }
                Err(failed) => {
                    failures = failures.saturating_add(1);
                    let delay = self.delay(&failed, failures);
                    let next_try = self.clock.now() + delay;
                    self.components.report_renewal(|renewal| renewal.round_failed(failures, next_try));
                    self.report(&failed, delay);
                    self.renewals.settle();
                    self.tidy(failed.iter().map(|failed| &failed.ca)).await;
                    self.sleep_until_retry(delay).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
