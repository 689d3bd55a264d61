//! Many agents against one CA, in virtual time. Each agent is a [`Issuer`] as in the binary: it makes keys and
//! requests, checks the answers, and decides itself when to call. Only the CA is a model, in [`ModelCa`].

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use attache::base::clock::Clock;
use attache::base::spiffe_id::SpiffeId;
use attache::ca::embedded::DevelopmentCa;
use attache::ca::failover::{Failover, Member};
use attache::ca::{CaError, CertificateAuthority, IssuedChain, Pending, SigningRequest};
use attache::fs::disk::Disk;
use attache::metrics::Metrics;
use attache::pki::key::{KeyFormat, KeyType};
use attache::source::issuer::{Grace, IdentitySource, IssuanceQueue, Issuer, IssuerContext, IssuerSettings};
use attache::store::Cache;
use tokio::time::Instant;

/// Delay from the CA's decision to the agent.
const LATENCY: Duration = Duration::from_millis(5);
/// The longest queueing time: the CA refuses calls that would wait longer.
const PATIENCE: Duration = Duration::from_secs(2);

/// A fleet, and the events of its CA.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub agents: usize,
    /// The agents start evenly over this time.
    pub started_within: Duration,
    /// The lifetime of their certificates.
    pub ttl: Duration,
    /// `--grace-jitter`.
    pub jitter: f64,
    /// Signatures per second; no limit if none.
    pub capacity: Option<u32>,
    /// When the CA is down.
    pub outage: Option<Outage>,
    /// How long the scenario runs.
    pub length: Duration,
}

/// A time without the CA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    pub from: Duration,
    pub to: Duration,
    pub kind: Kind,
}

/// In which way a CA is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Connections are refused at once.
    Refuses,
    /// Calls are accepted and never answered.
    Hangs,
}

impl Outage {
    fn covers(self, moment: Duration) -> bool {
        (self.from..self.to).contains(&moment)
    }
}

/// The CA's records.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Requests in each second.
    asked: Vec<u32>,
    /// Certificates that reached their agents.
    issued: Vec<Issued>,
    agents: Vec<Agent>,
    /// When the CA has worked off its queue.
    free_at: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Agent {
    /// The first of the failed calls since the last certificate.
    failing_since: Option<Duration>,
    expires: Option<Duration>,
}

/// One certificate that has reached its agent.
#[derive(Clone, Copy, Debug)]
struct Issued {
    at: Duration,
    /// When the agent first asked for it.
    asked: Duration,
    /// Seconds left of the previous certificate; negative if it had expired.
    left: Option<f64>,
}

impl Records {
    fn note_request(&mut self, agent: usize, now: Duration) {
        let second = usize::try_from(now.as_secs()).unwrap();
        self.asked.resize(self.asked.len().max(second + 1), 0);
        self.asked[second] += 1;
        self.agents[agent].failing_since.get_or_insert(now);
    }

    fn note_certificate(&mut self, agent: usize, now: Duration, expires: Duration) {
        let agent = &mut self.agents[agent];
        let asked = agent.failing_since.take().unwrap();
        let left = agent.expires.replace(expires).map(|expires| expires.as_secs_f64() - now.as_secs_f64());
        self.issued.push(Issued { at: now, asked, left });
    }

    /// How long a request waits for its turn; none if it is refused.
    fn queue(&mut self, now: Duration, capacity: u32) -> Option<Duration> {
        let turn = self.free_at.max(now);
        let wait = turn - now;
        if wait > PATIENCE {
            return None;
        }
        self.free_at = turn + Duration::from_secs(1) / capacity;
        Some(wait)
    }

    /// Requests in each second of `from..to`, 0 after the last request.
    fn seconds(&self, from: Duration, to: Duration) -> impl Iterator<Item = f64> {
        let count = |second| self.asked.get(usize::try_from(second).unwrap()).copied().unwrap_or_default();
        // A partial last second counts, too.
        (from.as_secs()..to.as_secs_f64().ceil() as u64).map(move |second| f64::from(count(second)))
    }

    /// Requests per second in `from..to`.
    pub(crate) fn mean(&self, from: Duration, to: Duration) -> f64 {
        self.seconds(from, to).sum::<f64>() / (to - from).as_secs_f64()
    }

    /// The highest rate, in requests per second, over any `window` (in seconds) that begins in `from..to`.
    pub(crate) fn peak(&self, from: Duration, to: Duration, window: usize) -> f64 {
        let seconds: Vec<_> = self.seconds(from, to + Duration::from_secs(window as u64 - 1)).collect();
        let sums = seconds.windows(window).map(|counts| counts.iter().sum());
        sums.fold(0.0, f64::max) / window as f64
    }

    /// The second of `from..to` by which `share` of its requests had arrived.
    pub(crate) fn quantile(&self, from: Duration, to: Duration, share: f64) -> Duration {
        let wanted = share * self.seconds(from, to).sum::<f64>();
        let mut sum = 0.0;
        let before = self.seconds(from, to).take_while(|count| {
            sum += count;
            sum < wanted
        });
        from + Duration::from_secs(before.count() as u64)
    }

    /// Requests per second in each `bin` of `from..to`, in `unit`s after `zero`.
    pub(crate) fn curve(
        &self,
        from: Duration,
        to: Duration,
        bin: Duration,
        zero: Duration,
        unit: Duration,
    ) -> Vec<(f64, f64)> {
        let x = |moment: Duration| (moment.as_secs_f64() - zero.as_secs_f64()) / unit.as_secs_f64();
        let bins = (0..).map(|index| from + index * bin).take_while(|begin| *begin < to);
        bins.map(|begin| (x(begin), self.mean(begin, begin + bin))).collect()
    }

    /// When the last agent that failed before `moment` has a certificate.
    pub(crate) fn settled(&self, moment: Duration) -> Option<Duration> {
        if self.agents.iter().any(|agent| agent.failing_since.is_some_and(|since| since < moment)) {
            return None;
        }
        let late = self.issued.iter().filter(|issued| issued.asked < moment && issued.at >= moment);
        late.map(|issued| issued.at).max()
    }

    /// The shortest remaining lifetime of a certificate when its successor arrived.
    pub(crate) fn least_left(&self) -> Option<f64> {
        self.issued.iter().filter_map(|issued| issued.left).min_by(f64::total_cmp)
    }
}

/// The CA: it signs as fast as it can, in turn.
#[derive(Debug)]
struct ModelCa {
    ca: DevelopmentCa,
    scenario: Scenario,
    begun: Instant,
    records: Mutex<Records>,
}

/// One agent's connection to the CA.
#[derive(Debug)]
struct Connection {
    model: Arc<ModelCa>,
    agent: usize,
}

impl ModelCa {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap()
    }
}

#[tonic::async_trait]
impl CertificateAuthority for Connection {
    fn name(&self) -> &'static str {
        "model"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let (model, now) = (&self.model, self.model.now());
        let address = String::from("ca:15012");
        model.records().note_request(self.agent, now);
        match model.scenario.outage.filter(|outage| outage.covers(now)).map(|outage| outage.kind) {
            Some(Kind::Hangs) => std::future::pending().await,
            Some(Kind::Refuses) => {
                let source = std::io::ErrorKind::ConnectionRefused.into();
                return Err(CaError::Unreachable { address, source });
            }
            None => {}
        }
        let turn = model
            .scenario
            .capacity
            .map_or(Some(Duration::ZERO), |capacity| model.records().queue(now, capacity));
        let Some(wait) = turn else {
            let (code, message) = (tonic::Code::ResourceExhausted, String::from("busy"));
            return Err(CaError::Refused { address, code, message, retry_after: None });
        };
        tokio::time::sleep(wait + LATENCY).await;
        let leaf = model.ca.issue(&request.csr, &identity(), request.ttl).unwrap();
        let [intermediate, root] = model.ca.chain();
        let now = model.now();
        model.records().note_certificate(self.agent, now, now + request.ttl);
        Ok(IssuedChain { chain: vec![leaf, intermediate.clone()], roots: vec![root.clone()] })
    }

    /// Makes a failed call repeat with the same key: new keys would take most of the time, and decide nothing.
    fn pending(&self) -> Option<Pending> {
        Some(Pending { waits_for: None })
    }
}

fn identity() -> SpiffeId {
    "spiffe://cluster.local/ns/default/sa/web".parse().unwrap()
}

impl Scenario {
    /// Runs the scenario. The same scenario gives the same records.
    pub(crate) fn run(&self) -> Records {
        fastrand::seed(1);
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(self.simulate())
    }

    async fn simulate(&self) -> Records {
        let dir = tempfile::tempdir().unwrap();
        let clock = Clock::never_set(UNIX_EPOCH + Duration::from_secs(1_782_000_000));
        let ca = DevelopmentCa::open(dir.path(), clock.clone()).unwrap();
        let records = Records { agents: vec![Agent::default(); self.agents], ..Records::default() };
        let (scenario, begun) = (self.clone(), Instant::now());
        let model = Arc::new(ModelCa { ca, scenario, begun, records: Mutex::new(records) });
        let metrics = Metrics::default();
        let running: Vec<_> = (0..self.agents)
            .map(|agent| {
                let connection = Connection { model: Arc::clone(&model), agent };
                let source = self.source(connection, clock.clone(), metrics.clone());
                let delay = self.started_within.mul_f64(agent as f64 / self.agents as f64);
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    source.run().await;
                })
            })
            .collect();
        tokio::time::sleep(self.length).await;
        assert!(running.iter().all(|agent| !agent.is_finished()), "an agent has stopped");
        std::mem::take(&mut *model.records())
    }

    fn source(&self, connection: Connection, clock: Clock, metrics: Metrics) -> Issuer {
        let settings = IssuerSettings {
            identity: IdentitySource::Fixed(identity()),
            names: attache::pki::csr::Names::default(),
            key_type: KeyType::EcdsaP256,
            ttl: self.ttl,
            grace: Grace { ratio: 0.5, jitter: self.jitter },
            key_format: KeyFormat::default(),
            timeout: Duration::from_secs(10),
            drops_old_roots: false,
            state: None,
        };
        let cas = Failover::new(vec![Member::new("model", connection)]);
        let (cache, workload) = Cache::with_workload("");
        let (queue, disk) = (IssuanceQueue::default(), Disk::default());
        Issuer::new(cas, settings, &cache, workload, IssuerContext { clock, metrics, queue, disk })
    }
}
