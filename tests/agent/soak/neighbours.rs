//! Those that behave well, and must notice nothing: two Envoys with a request every 50 ms, probes, a client that fetches,
//! one that follows every certificate, and those that follow mounted files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use attache::base::clock::Clock;
use attache::net::http2::with_connection;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::record::Record;
use super::stage::{Content, LIFE, Stage};
use crate::support::envoy::{Envoy, http_get};
use crate::support::files::spiffe;
use crate::support::mesh::{api_envoy, caller_envoy, wait_success};
use crate::support::process::Agent;
use crate::support::sds::{
    Client, DeltaStream, Stream, content, delta_secrets, fetch, on_connection, parsed, secrets,
};

/// Between two requests, each on a new connection with a full handshake.
const REQUESTS: Duration = Duration::from_millis(50);
/// Between two probes of the same page.
const PROBES: Duration = Duration::from_millis(200);
/// Between two fetches, each on a new connection.
const FETCHES: Duration = Duration::from_millis(500);
/// The longest that a probe or a fetch may take, on a machine that is busy with other work.
const ANSWER: Duration = Duration::from_secs(5);
/// A request between the Envoys may take longer: they and this test share the machine with the hostile clients.
const REQUEST: Duration = Duration::from_secs(10);
/// A renewal is due with half of a certificate's life left, give or take a tenth, and late with less than this.
const LATE: f64 = 0.3;
/// The longest time until a change of mounted files arrives.
pub const ARRIVAL: Duration = Duration::from_secs(10);

pub struct Neighbours {
    stop: CancellationToken,
    web: Envoy,
    api: Envoy,
}

impl Neighbours {
    pub async fn start(stage: &Arc<Stage>, agent: &Agent) -> Self {
        let directory = &stage.directory;
        let api = api_envoy(directory, agent).await;
        let inbound = api.listener_address("inbound").await;
        let web = caller_envoy(directory, "web", agent, inbound, &spiffe("web")).await;
        let outbound = web.listener_address("outbound").await;
        wait_success(&web, outbound).await;
        let stop = CancellationToken::new();
        let spawn = |task| drop(tokio::task::spawn_local(stop.clone().run_until_cancelled_owned(task)));
        let boxed: [std::pin::Pin<Box<dyn Future<Output = ()>>>; 5] = [
            Box::pin(requests(outbound, stage.record.clone())),
            Box::pin(probes(stage.status, "/livez", stage.record.clone())),
            Box::pin(probes(stage.status, "/readyz", stage.record.clone())),
            Box::pin(fetches(stage.socket.clone(), stage.record.clone())),
            Box::pin(renewals(Arc::clone(stage))),
        ];
        boxed.into_iter().for_each(spawn);
        let mut followers = Vec::new();
        for name in stage.volume.names() {
            for is_delta in [false, true] {
                let seen = watch::Sender::new(None);
                followers.push(Follower { name: name.clone(), is_delta, seen: seen.subscribe() });
                spawn(Box::pin(follow(Arc::clone(stage), name.clone(), is_delta, seen)));
            }
        }
        assert!(stage.followers.set(followers).is_ok());
        Self { stop, web, api }
    }

    /// Every follower has the newest files.
    pub async fn are_served(&self, stage: &Stage) {
        for follower in stage.followers.get().unwrap() {
            follower.is_current(stage, ARRIVAL).await;
        }
    }

    /// The Envoys accepted everything; then all go.
    pub async fn leave(&self, stage: &Stage) {
        self.stop.cancel();
        for (name, envoy) in [("web", &self.web), ("api", &self.api)] {
            let stats = envoy.stats().await;
            for (stat, value) in stats {
                let is_refusal = stat.starts_with("sds.") && stat.ends_with(".update_rejected");
                if is_refusal && value != 0 {
                    stage.record.find(format!("the Envoy of {name} has {stat}: {value}"));
                }
            }
        }
    }
}

/// A stream that follows a mounted secret.
pub struct Follower {
    name: String,
    is_delta: bool,
    seen: watch::Receiver<Option<Content>>,
}

impl Follower {
    /// Waits until it has the newest content.
    pub async fn is_current(&self, stage: &Stage, patience: Duration) {
        let expected = stage.volume.expected(&self.name);
        let begun = Instant::now();
        let mut seen = self.seen.clone();
        let arrived = timeout(patience, seen.wait_for(|seen| seen.as_ref() == Some(&expected))).await;
        let dialect = if self.is_delta { "delta" } else { "state of the world" };
        if matches!(arrived, Ok(Ok(_))) {
            stage.record.took("arrival of changed files", begun.elapsed());
        } else {
            stage.record.find(format!("{} ({dialect}) has not arrived in {patience:?}", self.name));
        }
    }
}

async fn requests(outbound: std::net::SocketAddr, record: Record) {
    let mut ticks = interval(REQUESTS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let begun = Instant::now();
        match timeout(REQUEST, http_get(outbound, "/")).await {
            Ok(Ok((200, ..))) => record.count("requests"),
            Ok(other) => record.find(format!("a request failed: {other:?}")),
            Err(_) => record.find(format!("a request takes longer than {REQUEST:?}")),
        }
        record.took("request", begun.elapsed());
    }
}

async fn probes(status: std::net::SocketAddr, path: &'static str, record: Record) {
    let mut ticks = interval(PROBES);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let begun = Instant::now();
        match timeout(ANSWER, http_get(status, path)).await {
            Ok(Ok((200, ..))) => record.count("probes"),
            Ok(Ok((status, _, body))) => record.find(format!("{path} answers {status}: {body:?}")),
            Ok(Err(error)) => record.find(format!("{path} does not answer: {error:#}")),
            Err(_) => record.find(format!("{path} takes longer than {ANSWER:?}")),
        }
        record.took("probe", begun.elapsed());
    }
}

/// Fetches the certificate on a connection of its own.
async fn fetch_once(socket: PathBuf) -> Result<usize, String> {
    let io = UnixStream::connect(socket).await.map_err(|error| error.to_string())?;
    let fetched = with_connection(io, async |connection| {
        let origin = http::Uri::from_static("http://attache");
        fetch(&Client::with_origin(connection, origin), &["default"]).await
    });
    let response = fetched.await.map_err(|error| format!("{error:?}"))?;
    response.map(|response| response.resources.len()).map_err(|status| status.to_string())
}

async fn fetches(socket: PathBuf, record: Record) {
    let mut ticks = interval(FETCHES);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let begun = Instant::now();
        match timeout(ANSWER, fetch_once(socket.clone())).await {
            Ok(Ok(1)) => record.count("fetches"),
            Ok(other) => record.find(format!("a fetch of default got {other:?}")),
            Err(_) => record.find(format!("a fetch of default takes longer than {ANSWER:?}")),
        }
        record.took("fetch", begun.elapsed());
    }
}

/// The certificate that is served now.
struct Served {
    since: Instant,
    not_after: std::time::SystemTime,
    is_reported: bool,
}

impl Served {
    /// The share of its life that is left.
    fn left(&self) -> f64 {
        let left = self.not_after.duration_since(Clock::system().now()).unwrap_or_default();
        left.as_secs_f64() / LIFE.as_secs_f64()
    }

    /// Records a renewal that is late: the next certificate comes now, or has not come yet.
    fn check(&mut self, record: &Record) {
        let left = self.left();
        let may_be_late = record.failed_since(self.since);
        let is_late = left <= 0.0 || (left < LATE && !may_be_late);
        if is_late && !self.is_reported {
            self.is_reported = true;
            let since = if may_be_late { "the CA failed meanwhile" } else { "the CA did not fail" };
            record.find(format!(
                "the renewal is late: {:.0} % of the certificate's life left; {since}",
                left * 100.0
            ));
        }
    }
}

/// Follows the certificate as a monitoring client would, and its roots on another stream.
async fn renewals(stage: Arc<Stage>) {
    let ended = on_connection(&stage.socket, async |client| -> Result<(), Status> {
        let mut pairs = Stream::open(&client, &["default"]).await?;
        let mut roots = Stream::open(&client, &["ROOTCA"]).await?;
        let mut ticks = interval(Duration::from_millis(500));
        let mut served: Option<Served> = None;
        loop {
            tokio::select! {
                push = pairs.pushed() => {
                    let push = push?;
                    let [secret] = secrets(&push).try_into().unwrap();
                    let pair = content(secret);
                    let not_after = parsed(&pair.0)[0].not_after;
                    if let Some(served) = &mut served {
                        served.check(&stage.record);
                        stage.record.count("renewals");
                    }
                    served = Some(Served { since: Instant::now(), not_after, is_reported: false });
                    stage.newest.send_replace(pair);
                    stage.renewed.send_modify(|count| *count += 1);
                    pairs.accept(&push).await;
                }
                push = roots.pushed() => roots.accept(&push?).await,
                _ = ticks.tick() => if let Some(served) = &mut served {
                    served.check(&stage.record);
                },
            }
        }
    });
    if let Err(status) = ended.await {
        stage.record.find(format!("the stream of default or ROOTCA ended: {status}"));
    }
}

/// Follows a mounted secret, and checks that each push is one set.
async fn follow(stage: Arc<Stage>, name: String, is_delta: bool, seen: watch::Sender<Option<Content>>) {
    let ended = on_connection(&stage.socket, async |client| -> Result<(), Status> {
        let note = |secret| {
            let content = content(secret);
            if !stage.volume.has_written(&content) {
                stage
                    .record
                    .find(format!("{name} was pushed with content that was never written as one set"));
            }
            stage.record.count("pushes of files");
            seen.send_replace(Some(content));
        };
        if is_delta {
            let mut stream = DeltaStream::open(&client, &[&name]).await?;
            loop {
                let push = stream.pushed().await?;
                if !push.removed_resources.is_empty() {
                    stage.record.find(format!("{name} was removed"));
                }
                delta_secrets(&push).into_iter().for_each(note);
                stream.accept(&push).await;
            }
        }
        let mut stream = Stream::open(&client, &[&name]).await?;
        loop {
            let push = stream.pushed().await?;
            secrets(&push).into_iter().for_each(note);
            stream.accept(&push).await;
        }
    });
    if let Err(status) = ended.await {
        stage.record.find(format!("the stream of {name} ended: {status}"));
    }
}
