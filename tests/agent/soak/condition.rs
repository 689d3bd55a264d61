//! What the agent takes: memory, threads, descriptors, log.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio_util::task::AbortOnDropHandle;

use super::record::Record;
use super::stage::Stage;
use crate::support::envoy::http_get;
use crate::support::process::{Agent, named_binary};

/// What the agent may take above the idle agent, in kB.
struct Bounds {
    /// What may stay of a turn.
    left_over: u64,
    /// The most at any time: clients have budgets.
    peak: u64,
    /// How much more may be taken at the end of a run than in its second quarter.
    drift: u64,
}

/// For the static binary, whose allocator gives back what is freed. Entries on demand outlive their streams by minutes.
const RELEASE: Bounds = Bounds { left_over: 32 << 10, peak: 192 << 10, drift: 8 << 10 };
/// For the debug build. glibc's allocator keeps much of what is freed: 70 MB after ten kinds of turns at a time.
const DEBUG: Bounds = Bounds { left_over: 128 << 10, peak: 192 << 10, drift: 16 << 10 };
/// Settled samples from which the drift is measured.
const SAMPLES: usize = 16;
/// Descriptors and threads that may come and go.
const FEW: u64 = 8;
/// Bytes of log: a start, and a rate that gives less than 1 MB in five minutes.
const LOG: (usize, usize) = (100_000, 3_000);
/// How long the agent may hold on to what a client leaves behind: idle threads and half-open connections.
const SETTLING: Duration = Duration::from_secs(30);

pub struct Condition {
    bounds: Bounds,
    status: SocketAddr,
    record: Record,
    memory: Memory,
    idle: Sample,
    /// Anonymous memory after each turn of the second round and later, in kB.
    settled: Vec<u64>,
    peak: Arc<AtomicU64>,
    _watch: AbortOnDropHandle<()>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    memory: u64,
    descriptors: u64,
    threads: u64,
}

/// The process whose memory is looked at.
#[derive(Clone, Copy)]
struct Memory(rustix::process::Pid);

impl Memory {
    /// Anonymous memory, in kB; 0 once the process is gone.
    fn now(self) -> u64 {
        let status = format!("/proc/{}/status", self.0.as_raw_nonzero());
        let status = std::fs::read_to_string(status).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }
}

impl Condition {
    pub async fn new(stage: &Stage, agent: &Agent) -> Self {
        let memory = Memory(agent.process.pid());
        let peak = Arc::new(AtomicU64::new(0));
        let watch = tokio::task::spawn_local({
            let peak = Arc::clone(&peak);
            async move {
                loop {
                    peak.fetch_max(memory.now(), Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        });
        let mut new = Self {
            bounds: if named_binary().is_some() { RELEASE } else { DEBUG },
            status: stage.status,
            record: stage.record.clone(),
            memory,
            idle: Sample { memory: 0, descriptors: 0, threads: 0 },
            settled: Vec::new(),
            peak,
            _watch: AbortOnDropHandle::new(watch),
        };
        new.idle = new.sample().await.expect("the agent answers before the first turn");
        new
    }

    /// None while the agent does not answer: the probes record that.
    async fn sample(&self) -> Option<Sample> {
        let asked = tokio::time::timeout(Duration::from_secs(5), http_get(self.status, "/metrics"));
        let (_, _, page) = asked.await.ok()?.ok()?;
        let value = |name: &str| {
            let found = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            found.and_then(|value| value.parse().ok())
        };
        Some(Sample {
            memory: self.memory.now(),
            descriptors: value("process_open_fds")?,
            threads: value("process_threads")?,
        })
    }

    /// Waits until a sample is as wanted; records the last one otherwise.
    async fn wait(&self, what: &str, is_wanted: impl Fn(Sample) -> bool) {
        let begun = Instant::now();
        let mut last = None;
        while begun.elapsed() < SETTLING && !self.record.has_found() {
            last = self.sample().await;
            if last.is_some_and(&is_wanted) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        if self.record.has_found() {
            // The agent may not answer at all.
            return;
        }
        self.record.find(format!("{what}: {last:?}, and at the start {:?}", self.idle));
    }

    /// Descriptors and memory return after each turn, and the log of `logged` bytes is short.
    pub async fn settles(&mut self, is_counted: bool, logged: usize) {
        let Sample { memory, descriptors, .. } = self.idle;
        self.wait("descriptors stay open", |now| now.descriptors <= descriptors + FEW).await;
        self.wait("memory stays", |now| now.memory <= memory + self.bounds.left_over).await;
        let settled = self.memory.now();
        self.record.note(&format!("{settled} kB"));
        if is_counted {
            self.settled.push(settled);
        }
        let peak = self.peak.swap(0, Ordering::Relaxed);
        self.record.was("kB above the idle agent", peak.saturating_sub(memory));
        if peak > memory + self.bounds.peak {
            self.record.find(format!("the agent took {peak} kB, and {memory} kB at the start"));
        }
        let (start, rate) = LOG;
        let allowed = start + rate * usize::try_from(self.record.elapsed().as_secs()).unwrap();
        self.record.was("bytes of log", logged.try_into().unwrap());
        if logged > allowed {
            self.record.find(format!("{logged} bytes were logged, more than {allowed}"));
        }
    }

    /// The medians of the second and of the last quarter.
    fn quarters(&self) -> Option<(u64, u64)> {
        let quarter = self.settled.len() / 4;
        let median = |samples: &[u64]| {
            let mut sorted = samples.to_vec();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        };
        let (second, last) = (quarter..2 * quarter, 3 * quarter..);
        (self.settled.len() >= SAMPLES).then(|| (median(&self.settled[second]), median(&self.settled[last])))
    }

    /// At the end of a run: threads are back, and memory is flat.
    pub async fn holds(&self) {
        let threads = self.idle.threads;
        self.wait("threads stay", |now| now.threads <= threads + FEW).await;
        if let Some((second, last)) = self.quarters()
            && last > second + self.bounds.drift
        {
            self.record.find(format!("memory grows: {second} kB, later {last} kB: {:?}", self.settled));
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sample { memory, descriptors, threads } = self.idle;
        write!(formatter, "at the start {memory} kB, {descriptors} descriptors, {threads} threads; ")?;
        match self.quarters() {
            Some((second, last)) => write!(formatter, "later {second} kB, at last {last} kB"),
            None => write!(formatter, "too short to compare the quarters: {:?} kB", self.settled),
        }
    }
}
