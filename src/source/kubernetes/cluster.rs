//! One cluster: its connection, whether its API server answers, and how many calls it gets at a time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use http::StatusCode;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::{Instant, timeout};

use super::kept::Keeper;
use crate::base::backoff::Backoff;
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::text;
use crate::kube::{
    Access, Account, Api, ClusterId, Grant, KubeError, List, Object, ObjectId, Of, Selection, Version, Watch,
};
use crate::net::error::TransportError;

/// Calls at a time, and as many watches that are being opened.
const AT_ONCE: usize = 32;
/// Lists at a time, and watches of many objects that are being opened: one saves hundreds of other calls, and does not wait
/// for those.
const LISTS_AT_ONCE: usize = 4;
/// Between two attempts to reach an API server, or to repeat a call that it refused.
pub(super) const PACE: Backoff = Backoff { base: Duration::from_millis(250), cap: Duration::from_secs(10) };
/// Before an object is read again that the API server can't read.
const SLOW_PACE: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };
/// How often a call is repeated that RBAC forbids: a right that is granted later is noticed within a minute.
pub(super) const FORBIDDEN: Duration = Duration::from_secs(45);
/// Watches of single objects; what has none is read from time to time.
const WATCHES: usize = 10_000;
/// How long the watch of an object waits for others that are read for the first time: those have streams that wait.
const READS_FIRST: Duration = Duration::from_millis(500);
/// How many objects a new connection is tried out with.
const SAMPLES: usize = 4;
/// Names in a row that don't exist, and how long it takes until as many more may be asked for.
const MISSES: (u32, Duration) = (200, Duration::from_secs(20));

/// One cluster. Its connection can be replaced while it is in use.
pub struct Cluster {
    pub id: ClusterId,
    /// Distinguishes it from others that had its name before.
    pub(super) number: u64,
    api: watch::Sender<Arc<dyn Api>>,
    is_up: watch::Sender<bool>,
    calls: Semaphore,
    lists: Semaphore,
    openings: Semaphore,
    /// How many objects are being read for the first time.
    first_reads: watch::Sender<usize>,
    /// Room for watches of single objects: API servers and file descriptors bound them.
    pub(super) watches: Semaphore,
    state: Mutex<State>,
    /// Keeps what the cluster delivers.
    pub(super) keeper: Option<Keeper>,
    clock: Clock,
    /// The same, for the task that finds out when the API server answers again.
    own: Weak<Self>,
}

struct State {
    /// When the API server answered first after it was unreachable; none while it is.
    reachable_since: Option<SystemTime>,
    last_error: Option<String>,
    /// Failures in a row.
    failures: u32,
    log: FailureLog,
    paused_until: Option<Instant>,
    misses: Misses,
    names: usize,
    /// Some of the objects that are followed.
    samples: Vec<ObjectId>,
    calls: u64,
    errors: u64,
}

/// Counts while it exists.
struct FirstRead<'a>(&'a watch::Sender<usize>);

impl<'a> FirstRead<'a> {
    fn of(reads: &'a watch::Sender<usize>) -> Self {
        reads.send_if_modified(|reads| {
            *reads += 1;
            false
        });
        Self(reads)
    }
}

impl Drop for FirstRead<'_> {
    fn drop(&mut self) {
        self.0.send_if_modified(|reads| {
            *reads -= 1;
            *reads == 0
        });
    }
}

/// Limits calls for names that don't exist, which clients can make up.
#[derive(Debug)]
struct Misses {
    left: f64,
    at: Instant,
}

impl Misses {
    fn new(now: Instant) -> Self {
        Self { left: f64::from(MISSES.0), at: now }
    }

    fn refill(&mut self, now: Instant) {
        let (most, period) = (f64::from(MISSES.0), MISSES.1.as_secs_f64());
        let gained = now.duration_since(self.at).as_secs_f64() * most / period;
        (self.left, self.at) = ((self.left + gained).min(most), now);
    }
}

/// How a cluster stands, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterStatus {
    pub id: ClusterId,
    /// None while its API server is unreachable, and before the first call.
    pub reachable_since: Option<SystemTime>,
    /// How many Secrets and ConfigMaps are followed there.
    pub names: usize,
    /// The last error. It may be over.
    pub last_error: Option<String>,
    /// Calls so far, and how many of them failed.
    pub calls: u64,
    pub errors: u64,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Cluster {
    pub fn new(id: ClusterId, api: Arc<dyn Api>, keeper: Option<Keeper>, clock: Clock) -> Arc<Self> {
        let state = State {
            reachable_since: None,
            last_error: None,
            failures: 0,
            log: FailureLog::default(),
            paused_until: None,
            misses: Misses::new(Instant::now()),
            names: 0,
            samples: Vec::new(),
            calls: 0,
            errors: 0,
        };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new_cyclic(|own| Self {
            id,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            watches: Semaphore::new(WATCHES),
            api: watch::Sender::new(api),
            is_up: watch::Sender::new(true),
            calls: Semaphore::new(AT_ONCE),
            lists: Semaphore::new(LISTS_AT_ONCE),
            openings: Semaphore::new(AT_ONCE),
            first_reads: watch::Sender::new(0),
            state: Mutex::new(state),
            keeper,
            clock,
            own: Weak::clone(own),
        })
    }

    /// Replaces the connection by one that works. Watches follow.
    pub fn reconnect(&self, api: Arc<dyn Api>) {
        self.api.send_replace(api);
        self.answered();
    }

    /// The connection, and when another one takes its place.
    pub(super) fn connection(&self) -> watch::Receiver<Arc<dyn Api>> {
        self.api.subscribe()
    }

    pub(super) fn now(&self) -> SystemTime {
        self.clock.now()
    }

    fn api(&self) -> Arc<dyn Api> {
        Arc::clone(&self.api.borrow())
    }

    pub fn status(&self) -> ClusterStatus {
        let state = self.lock();
        ClusterStatus {
            id: self.id.clone(),
            reachable_since: state.reachable_since,
            names: state.names,
            last_error: state.last_error.clone(),
            calls: state.calls,
            errors: state.errors,
        }
    }

    /// Some of the objects that names need: a new connection must deliver them too.
    pub(super) fn samples(&self) -> Vec<ObjectId> {
        self.lock().samples.clone()
    }

    pub(super) fn sample(&self, object: &ObjectId) {
        let samples = &mut self.lock().samples;
        if samples.len() < SAMPLES && !samples.contains(object) {
            samples.push(object.clone());
        }
    }

    pub(super) fn forget_sample(&self, object: &ObjectId) {
        self.lock().samples.retain(|sample| sample != object);
    }

    pub(super) fn add_name(&self) {
        self.lock().names += 1;
    }

    pub(super) fn drop_name(&self) {
        self.lock().names -= 1;
    }

    pub(super) async fn get(&self, object: &ObjectId) -> Result<Option<Object>, KubeError> {
        let (api, _turn) = self.turn(&self.calls).await;
        self.noted(api.get(object).await)
    }

    /// The same for an object that nothing is known of.
    pub(super) async fn get_first(&self, object: &ObjectId) -> Result<Option<Object>, KubeError> {
        let _read = FirstRead::of(&self.first_reads);
        self.get(object).await
    }

    pub(super) async fn page(&self, selection: &Selection, next: &str) -> Result<List, KubeError> {
        let (api, _turn) = self.turn(&self.lists).await;
        self.noted(api.page(selection, next).await)
    }

    pub(super) async fn list(&self, selection: &Selection) -> Result<List, KubeError> {
        let (api, _turn) = self.turn(&self.lists).await;
        self.noted(api.list(selection).await)
    }

    pub(super) async fn watch(
        &self,
        selection: &Selection,
        from: Option<&Version>,
    ) -> Result<Watch, KubeError> {
        let Of::Name(_) = selection.of else {
            let (api, _turn) = self.turn(&self.lists).await;
            return self.noted(api.watch(selection, from).await);
        };
        let (api, _turn) = self.turn(&self.openings).await;
        // Late is fine: what has changed since an object was read is read again.
        let _ = timeout(READS_FIRST, self.first_reads.subscribe().wait_for(|reads| *reads == 0)).await;
        self.noted(api.watch(selection, from).await)
    }

    pub(super) async fn may(&self, account: &Account, access: &Access) -> Result<bool, KubeError> {
        let (api, _turn) = self.turn(&self.calls).await;
        self.noted(api.may(account, access).await)
    }

    pub(super) async fn grants(&self, namespace: &str) -> Result<Vec<Grant>, KubeError> {
        let (api, _turn) = self.turn(&self.calls).await;
        self.noted(api.grants(namespace).await)
    }

    /// The connection, once the API server answers at all and it is this call's turn.
    async fn turn<'a>(&self, turns: &'a Semaphore) -> (Arc<dyn Api>, Option<SemaphorePermit<'a>>) {
        // It is never closed.
        let turn = turns.acquire().await.ok();
        self.ready().await;
        (self.api(), turn)
    }

    fn noted<T>(&self, result: Result<T, KubeError>) -> Result<T, KubeError> {
        self.note(result.as_ref().err());
        result
    }

    /// Returns when the API server answers, as far as is known, and takes calls.
    async fn ready(&self) {
        loop {
            // It does not fail: the sender is part of this.
            let _ = self.is_up.subscribe().wait_for(|is_up| *is_up).await;
            let paused = self.lock().paused_until.filter(|until| *until > Instant::now());
            match paused {
                Some(until) => tokio::time::sleep(until.saturating_duration_since(Instant::now())).await,
                None => return,
            }
        }
    }

    /// Notes how a call ended.
    pub(super) fn note(&self, error: Option<&KubeError>) {
        let mut state = self.lock();
        state.calls += 1;
        let Some(error) = error else {
            drop(state);
            return self.answered();
        };
        if matches!(error, KubeError::Expired { .. }) {
            return;
        }
        state.errors += 1;
        if is_throttled(error) {
            let until = Instant::now() + asked_pause(error).unwrap_or(PACE.base);
            state.paused_until = state.paused_until.max(Some(until));
        }
        let reason = text::sanitize_for_log(&error.to_string());
        state.last_error = Some(reason.clone());
        if !is_outage(error) {
            return;
        }
        state.failures += 1;
        state.reachable_since = None;
        let is_news = state.log.is_new(&reason);
        let names = state.names;
        drop(state);
        if is_news {
            let cluster = &*self.id.0;
            tracing::warn!(
                cluster,
                reason,
                names,
                "API server does not serve the agent; what it delivered before is still served"
            );
        }
        if self.is_up.send_if_modified(|is_up| std::mem::replace(is_up, false)) {
            self.probe();
        }
    }

    /// Whether another name may be asked for that may not exist.
    pub(super) fn may_miss(&self) -> bool {
        let mut state = self.lock();
        state.misses.refill(Instant::now());
        state.misses.left >= 1.0
    }

    /// A name does not exist, or must not be known.
    pub(super) fn missed(&self) {
        let mut state = self.lock();
        state.misses.refill(Instant::now());
        state.misses.left = (state.misses.left - 1.0).max(0.0);
    }

    fn answered(&self) {
        let mut state = self.lock();
        state.failures = 0;
        let now = self.clock.now();
        state.reachable_since.get_or_insert(now);
        let was_failing = state.log.recovered();
        drop(state);
        if was_failing {
            tracing::info!(cluster = &*self.id.0, "API server serves the agent again");
        }
        self.is_up.send_if_modified(|is_up| !std::mem::replace(is_up, true));
    }

    /// Finds out when the API server answers again. Until a call of another kind succeeds, the attempts become fewer.
    fn probe(&self) {
        let own = Weak::clone(&self.own);
        tokio::spawn(async move {
            loop {
                let Some(delay) = own.upgrade().map(|cluster| cluster.delay()) else { return };
                tokio::time::sleep(delay).await;
                let Some(cluster) = own.upgrade() else { return };
                if *cluster.is_up.borrow() {
                    return;
                }
                match cluster.api().probe().await {
                    Ok(()) => {
                        cluster.is_up.send_replace(true);
                        return;
                    }
                    Err(error) => {
                        let mut state = cluster.lock();
                        state.failures += 1;
                        state.last_error = Some(text::sanitize_for_log(&error.to_string()));
                    }
                }
            }
        });
    }

    fn delay(&self) -> Duration {
        PACE.delay(self.lock().failures, fastrand::f64())
    }

    /// Why its API server does not answer.
    pub(super) fn outage(&self) -> Option<String> {
        if *self.is_up.borrow() {
            return None;
        }
        let state = self.lock();
        let since = state.reachable_since.is_none();
        state.last_error.clone().filter(|_| since)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the API server did not answer, or refuses this credential: other calls would fare the same. One object that can't
/// be read (500) is none.
fn is_outage(error: &KubeError) -> bool {
    match error {
        // It is busy with other calls of the agent.
        KubeError::Unreachable { source: TransportError::Request(_), .. } => false,
        KubeError::Transport(_)
        | KubeError::Unreachable { .. }
        | KubeError::Silent { .. }
        | KubeError::Credential(_) => true,
        KubeError::Status { status, .. } => {
            const AWAY: [StatusCode; 4] = [
                StatusCode::UNAUTHORIZED,
                StatusCode::BAD_GATEWAY,
                StatusCode::SERVICE_UNAVAILABLE,
                StatusCode::GATEWAY_TIMEOUT,
            ];
            AWAY.contains(status)
        }
        KubeError::Expired { .. } | KubeError::Unreadable { .. } | KubeError::Undecided { .. } => false,
    }
}

fn is_throttled(error: &KubeError) -> bool {
    matches!(error, KubeError::Status { status: StatusCode::TOO_MANY_REQUESTS, .. })
}

/// The delay before a call is repeated that failed `failures` times in a row.
pub(super) fn delay(error: &KubeError, failures: u32) -> Duration {
    if error.is_forbidden() {
        return FORBIDDEN.mul_f64(0.8 + 0.2 * fastrand::f64());
    }
    let own = match error {
        KubeError::Status { status: StatusCode::INTERNAL_SERVER_ERROR, .. } => SLOW_PACE,
        _ => PACE,
    };
    asked_pause(error).unwrap_or_else(|| own.delay(failures, fastrand::f64()))
}

/// The pause that the API server asks for, within reason.
fn asked_pause(error: &KubeError) -> Option<Duration> {
    Some(error.retry_after()?.clamp(PACE.base, SLOW_PACE.cap))
}
