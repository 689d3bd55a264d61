//! What a test asks of a running server: what was asked, and to misbehave.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::timeout;

use super::calls::Call;
use super::fault::{Fault, Placed};
use super::resource::Key;
use super::store::Signal;
use super::{KubeCluster, serve};

/// Far longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What was asked.
impl KubeCluster {
    /// All requests so far.
    pub fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// How many requests are as wanted.
    pub fn count(&self, is_wanted: impl Fn(&Call) -> bool) -> usize {
        self.state().calls.iter().filter(|call| is_wanted(call)).count()
    }

    /// Forgets all requests so far.
    pub fn forget_calls(&self) {
        self.state().calls.clear();
    }

    /// Waits for a request that is as wanted, after the first `known`.
    pub async fn wait_call(&self, known: usize, is_wanted: impl Fn(&Call) -> bool) -> Call {
        let find = || self.state().calls.iter().skip(known).find(|call| is_wanted(call)).cloned();
        self.wait(find, || format!("the call never comes; the last one: {:#?}", self.calls().last())).await
    }

    /// The number of open watches of this name, or of a whole namespace or cluster (none).
    pub fn watches(&self, name: Option<&str>) -> usize {
        let state = self.state();
        state.store.watchers().filter(|watcher| watcher.selection.name.as_deref() == name).count()
    }

    /// The number of all open watches.
    pub fn all_watches(&self) -> usize {
        self.state().store.watchers().count()
    }

    /// Waits until as many watches of this name are open.
    pub async fn wait_watches(&self, name: Option<&str>, count: usize) {
        let find = || (self.watches(name) == count).then_some(());
        self.wait(find, || format!("{} watches of {name:?}, not {count}", self.watches(name))).await;
    }

    /// Waits until as many watches are open in all.
    pub async fn wait_all_watches(&self, count: usize) {
        let find = || (self.all_watches() == count).then_some(());
        self.wait(find, || format!("{} watches, not {count}", self.all_watches())).await;
    }

    async fn wait<T>(&self, find: impl Fn() -> Option<T>, failed: impl Fn() -> String) -> T {
        let mut counted = self.shared.counted.subscribe();
        let found = timeout(PATIENCE, async {
            loop {
                counted.borrow_and_update();
                if let Some(found) = find() {
                    return found;
                }
                counted.changed().await.unwrap();
            }
        });
        found.await.unwrap_or_else(|_| panic!("{}: {}", self.name, failed()))
    }

    /// Open connections.
    pub fn connections(&self) -> usize {
        self.shared.connections.open.load(Ordering::Relaxed)
    }

    /// Connections so far.
    pub fn accepted(&self) -> usize {
        self.shared.connections.accepted.load(Ordering::Relaxed)
    }

    /// The most requests that were answered at one time; watches are not counted.
    pub fn busiest(&self) -> usize {
        self.state().busiest
    }

    /// The violations so far, which no longer fail the test.
    pub fn take_violations(&self) -> Vec<String> {
        self.shared.violations.take()
    }
}

/// Faults of requests.
impl KubeCluster {
    /// Every request gets the fault, until `clear_faults`.
    pub fn fault(&self, fault: Fault) -> u64 {
        self.fault_on(fault, None, |_| true)
    }

    /// The next `times` requests that are as wanted get the fault; all of them, if none. Earlier faults count first.
    pub fn fault_on(
        &self,
        fault: Fault,
        times: impl Into<Option<usize>>,
        filter: impl Fn(&Call) -> bool + Send + 'static,
    ) -> u64 {
        let mut state = self.state();
        state.numbers += 1;
        let number = state.numbers;
        state.faults.push(Placed { number, fault, filter: Box::new(filter), left: times.into() });
        number
    }

    pub fn clear_fault(&self, number: u64) {
        self.state().faults.retain(|placed| placed.number != number);
    }

    pub fn clear_faults(&self) {
        self.state().faults.clear();
    }

    /// More requests at once than this get 429; watches don't count.
    pub fn limit_requests(&self, limit: Option<usize>) {
        self.state().limit = limit;
    }

    /// The time that each answer takes from now on.
    pub fn set_latency(&self, latency: Duration) {
        *self.shared.latency.lock().unwrap() = latency;
    }

    /// How many streams new connections may have at once.
    pub fn set_streams(&self, streams: u32) {
        *self.shared.streams.lock().unwrap() = streams;
    }

    /// Whether `ReferenceGrant`s are known; else their paths get 404.
    pub fn set_gateway_api(&self, is_there: bool) {
        self.state().has_gateway_api = is_there;
    }
}

/// Faults of open watches.
impl KubeCluster {
    /// The open watches get nothing from now on, not even bookmarks, and do not end. New ones are not silent.
    pub fn silence_watches(&self) {
        self.state().store.silence_watches();
    }

    /// The silent watches get what they have missed.
    pub fn release_watches(&self) {
        self.state().store.release_watches();
    }

    /// Ends all open watches properly.
    pub fn end_watches(&self) {
        self.state().store.signal_all(&Signal::End);
    }

    /// Ends all open watches in the middle of a line.
    pub fn truncate_watches(&self) {
        self.state().store.signal_all(&Signal::Truncate);
    }

    /// Resets the streams of all open watches in the middle of a line.
    pub fn reset_watches(&self) {
        self.state().store.signal_all(&Signal::Reset);
    }

    /// Sends these bytes to all open watches.
    pub fn send_watches(&self, bytes: &[u8]) {
        self.state().store.signal_all(&Signal::Raw(bytes.to_vec().into()));
    }

    /// Sends a bookmark to all open watches that take them.
    pub fn send_bookmarks(&self) {
        let mut state = self.state();
        let bookmark = Signal::Bookmark(state.store.version);
        state.store.signal_all(&bookmark);
    }

    /// Open watches see the deletion of an object that is still there: a `get` does not confirm it.
    pub fn pretend_deleted(&self, key: &Key) {
        self.state().store.pretend_deleted(key);
    }

    /// Other objects of the cluster change: the version grows, and no watch of ours gets an event.
    pub fn pass(&self, versions: u64) {
        self.state().store.pass(versions);
    }

    /// Forgets the changes so far: a watch from an older version gets 410, and so does the next page of a list.
    pub fn forget_history(&self) {
        let mut state = self.state();
        state.store.pass(1);
        state.store.forget_history();
    }
}

/// Faults of connections.
impl KubeCluster {
    /// Asks all connections to go (GOAWAY): what is open on them goes on.
    pub fn go_away(&self) {
        self.shared.connections.go_away();
    }

    /// Closes all connections.
    pub fn close_connections(&self) {
        self.shared.connections.close();
    }

    /// New connections get these bytes instead of HTTP; without any they close at once. None: they get HTTP again.
    pub fn set_raw(&self, bytes: Option<Vec<u8>>) {
        self.shared.connections.set_raw(bytes);
    }

    /// Nothing is read from or written to connections any longer, which stay open: as if the network dropped every packet.
    pub fn freeze(&self) {
        self.shared.connections.freeze(true);
    }

    pub fn thaw(&self) {
        self.shared.connections.freeze(false);
    }

    /// Refuses connections, and closes those that there are. Objects stay.
    pub async fn stop(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
        self.shared.connections.close();
    }

    /// Accepts connections again, at the same port.
    pub async fn resume(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.task = tokio::spawn(serve::accept(listener, Arc::clone(&self.shared)));
    }

    /// Restarts: connections close, and the history is lost, so that watches from an older version get 410.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.forget_history();
        self.resume().await;
    }
}
