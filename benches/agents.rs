//! Many agents against one CA, in virtual time. Each agent is a [`Issuer`] as the binary runs it: it makes keys and
//! requests, checks what it gets, and decides itself when to ask. Only the CA is a model, in [`Office`].

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use attache::base::clock::Clock;
use attache::base::spiffe_id::SpiffeId;
use attache::ca::embedded::DevelopmentCa;
use attache::ca::failover::{Failover, Member};
use attache::ca::{Answer, CaError, CertificateAuthority, Pending, SigningRequest};
use attache::metrics::Metrics;
use attache::pki::key::{KeyFormat, KeyType};
use attache::source::issuer::{Grace, IdentitySource, IssuanceQueue, Issuer, IssuerSettings};
use attache::store::{Cache, Workload};
use tokio::time::Instant;

/// From the CA's decision to the agent.
const LATENCY: Duration = Duration::from_millis(5);
/// The longest that a CA lets wait; who would wait longer is turned away.
const PATIENCE: Duration = Duration::from_secs(2);

/// A fleet, and what happens to its CA.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// How many.
    pub agents: usize,
    /// They are started evenly over this time.
    pub started_within: Duration,
    /// The lifetime of their certificates.
    pub ttl: Duration,
    /// `--grace-jitter`.
    pub jitter: f64,
    /// Signatures per second; none for as many as are asked for.
    pub capacity: Option<u32>,
    /// When the CA is not there.
    pub outage: Option<Outage>,
    /// How long it is looked at.
    pub length: Duration,
}

/// A time without the CA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    pub from: Duration,
    pub to: Duration,
    pub kind: Kind,
}

/// How a CA is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Connections are refused at once.
    Refuses,
    /// Calls are taken and never answered.
    Hangs,
}

impl Outage {
    fn covers(self, moment: Duration) -> bool {
        (self.from..self.to).contains(&moment)
    }
}

/// What the CA saw.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// Requests in each second.
    asked: Vec<u32>,
    /// Certificates that an agent got.
    issued: Vec<Issued>,
    agents: Vec<Agent>,
    /// When the last of those who wait is served.
    free_at: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Agent {
    /// The first of the calls that have failed since its last certificate.
    waits_since: Option<Duration>,
    ends: Option<Duration>,
}

/// One certificate that has reached its agent.
#[derive(Clone, Copy, Debug)]
struct Issued {
    /// When.
    at: Duration,
    /// When the agent asked for it first.
    asked: Duration,
    /// Seconds that were left of the one before it; negative where it had ended.
    left: Option<f64>,
}

impl Books {
    fn note_request(&mut self, agent: usize, now: Duration) {
        let second = usize::try_from(now.as_secs()).unwrap();
        self.asked.resize(self.asked.len().max(second + 1), 0);
        self.asked[second] += 1;
        self.agents[agent].waits_since.get_or_insert(now);
    }

    fn note_certificate(&mut self, agent: usize, now: Duration, ends: Duration) {
        let agent = &mut self.agents[agent];
        let asked = agent.waits_since.take().unwrap();
        let left = agent.ends.replace(ends).map(|ends| ends.as_secs_f64() - now.as_secs_f64());
        self.issued.push(Issued { at: now, asked, left });
    }

    /// How long a request has to wait for its turn.
    fn queue(&mut self, now: Duration, capacity: u32) -> Option<Duration> {
        let turn = self.free_at.max(now);
        let wait = turn - now;
        if wait > PATIENCE {
            return None;
        }
        self.free_at = turn + Duration::from_secs(1) / capacity;
        Some(wait)
    }

    /// Requests in each second of `from..to`, none where nobody asked any more.
    fn seconds(&self, from: Duration, to: Duration) -> impl Iterator<Item = f64> {
        let count = |second| self.asked.get(usize::try_from(second).unwrap()).copied().unwrap_or_default();
        // The last one counts too where it is not whole.
        (from.as_secs()..to.as_secs_f64().ceil() as u64).map(move |second| f64::from(count(second)))
    }

    /// Requests per second in `from..to`.
    pub(crate) fn mean(&self, from: Duration, to: Duration) -> f64 {
        self.seconds(from, to).sum::<f64>() / (to - from).as_secs_f64()
    }

    /// The most requests per second in any `window` that begins in `from..to`, seconds.
    pub(crate) fn peak(&self, from: Duration, to: Duration, window: usize) -> f64 {
        let seconds: Vec<_> = self.seconds(from, to + Duration::from_secs(window as u64 - 1)).collect();
        let sums = seconds.windows(window).map(|counts| counts.iter().sum());
        sums.fold(0.0, f64::max) / window as f64
    }

    /// The second of `from..to` before which `share` of its requests came.
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

    /// When the last agent that asked in vain before `moment` has a certificate.
    pub(crate) fn settled(&self, moment: Duration) -> Option<Duration> {
        if self.agents.iter().any(|agent| agent.waits_since.is_some_and(|since| since < moment)) {
            return None;
        }
        let late = self.issued.iter().filter(|issued| issued.asked < moment && issued.at >= moment);
        late.map(|issued| issued.at).max()
    }

    /// The least that was left of a certificate when the next one came.
    pub(crate) fn least_left(&self) -> Option<f64> {
        self.issued.iter().filter_map(|issued| issued.left).min_by(f64::total_cmp)
    }
}

/// The CA: it signs what it can, in turn.
#[derive(Debug)]
struct Office {
    ca: DevelopmentCa,
    scenario: Scenario,
    begun: Instant,
    books: Mutex<Books>,
}

/// One agent's way to the CA.
#[derive(Debug)]
struct Line {
    office: Arc<Office>,
    agent: usize,
}

impl Office {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap()
    }
}

#[tonic::async_trait]
impl CertificateAuthority for Line {
    fn name(&self) -> &'static str {
        "model"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<Answer, CaError> {
        let (office, now) = (&self.office, self.office.now());
        let address = String::from("ca:15012");
        office.books().note_request(self.agent, now);
        match office.scenario.outage.filter(|outage| outage.covers(now)).map(|outage| outage.kind) {
            Some(Kind::Hangs) => std::future::pending().await,
            Some(Kind::Refuses) => {
                let source = std::io::ErrorKind::ConnectionRefused.into();
                return Err(CaError::Unreachable { address, source });
            }
            None => {}
        }
        let turn = office
            .scenario
            .capacity
            .map_or(Some(Duration::ZERO), |capacity| office.books().queue(now, capacity));
        let Some(wait) = turn else {
            let (code, message) = (tonic::Code::ResourceExhausted, String::from("busy"));
            return Err(CaError::Refused { address, code, message, retry_after: None });
        };
        tokio::time::sleep(wait + LATENCY).await;
        let leaf = office.ca.issue(&request.csr, &identity(), request.ttl).unwrap();
        let [intermediate, root] = office.ca.chain();
        let now = office.now();
        office.books().note_certificate(self.agent, now, now + request.ttl);
        Ok(Answer { chain: vec![leaf, intermediate.clone()], roots: vec![root.clone()] })
    }

    /// So a call that failed is repeated with the same key: to make others would take most of the time, and decides
    /// nothing.
    fn pending(&self) -> Option<Pending> {
        Some(Pending { waits_for: None })
    }
}

fn identity() -> SpiffeId {
    "spiffe://cluster.local/ns/default/sa/web".parse().unwrap()
}

impl Scenario {
    /// Lets it happen. The same scenario gives the same books.
    pub(crate) fn run(&self) -> Books {
        fastrand::seed(1);
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(self.happen())
    }

    async fn happen(&self) -> Books {
        let dir = tempfile::tempdir().unwrap();
        let clock = Clock::never_set(UNIX_EPOCH + Duration::from_secs(1_782_000_000));
        let ca = DevelopmentCa::open(dir.path(), clock.clone()).unwrap();
        let books = Books { agents: vec![Agent::default(); self.agents], ..Books::default() };
        let (scenario, begun) = (self.clone(), Instant::now());
        let office = Arc::new(Office { ca, scenario, begun, books: Mutex::new(books) });
        let metrics = Metrics::default();
        let running: Vec<_> = (0..self.agents)
            .map(|agent| {
                let line = Line { office: Arc::clone(&office), agent };
                let source = self.source(line, clock.clone(), metrics.clone());
                let delay = self.started_within.mul_f64(agent as f64 / self.agents as f64);
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    source.run().await;
                })
            })
            .collect();
        tokio::time::sleep(self.length).await;
        assert!(running.iter().all(|agent| !agent.is_finished()), "an agent has ended");
        std::mem::take(&mut *office.books())
    }

    fn source(&self, line: Line, clock: Clock, metrics: Metrics) -> Issuer {
        let settings = IssuerSettings {
            identity: IdentitySource::Fixed(identity()),
            key_type: KeyType::EcdsaP256,
            ttl: self.ttl,
            grace: Grace { ratio: 0.5, jitter: self.jitter },
            key_format: KeyFormat::default(),
            timeout: Duration::from_secs(10),
            drops_old_roots: false,
            state: None,
        };
        let cas = Failover::new(vec![Member::new("office", line)]);
        let (cache, queue) = (Cache::default(), IssuanceQueue::default());
        Issuer::new(cas, settings, &cache, Workload(0), clock, metrics, queue)
    }
}
