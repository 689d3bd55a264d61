//! Puts the parts together. The only place that spawns what lives as long as the agent.

mod provider;
mod sockets;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use self::provider::certificate_authority;
use self::sockets::{Server, Sockets};
use crate::base::clock::Clock;
use crate::base::limits;
use crate::ca::failover::Failover;
use crate::config::{Config, Provider};
use crate::export::output::Output;
use crate::export::ready_file::ReadyFile;
use crate::fs::generation::Place;
use crate::fs::watch::Watcher;
use crate::metrics::Metrics;
use crate::ops::admin::Admin;
use crate::ops::page::Page;
use crate::ops::report::{About, Reporter};
use crate::ops::status::Status;
use crate::ops::telemetry::LogLevel;
use crate::os::command;
use crate::os::hardening;
use crate::os::hardening::ConfineError;
use crate::os::permissions;
use crate::os::systemd::Started;
use crate::proto::envoy::service::secret::v3::secret_discovery_service_server::SecretDiscoveryServiceServer;
use crate::serve::listener::Listener;
use crate::serve::peers::Peers;
use crate::serve::sds::SecretDiscovery;
use crate::source::crl::CrlSource;
use crate::source::files::FileSource;
use crate::source::issuer::{IssuanceQueue, Issuer};
use crate::store::health;
use crate::store::health::{Follower, Standing};
use crate::store::history::History;
use crate::store::{Cache, Workload};

/// The one workload there is.
const WORKLOAD: Workload = Workload(0);

/// Runs the agent until SIGTERM or SIGINT, with what it was `given` at its start.
pub async fn run(config: Config, log: LogLevel, given: Started) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut signals = Signals::new()?;
    hardening::protect_memory();
    // A command may be meant to have more rights than we do: by sudo, say.
    if !runs_commands(&config) {
        hardening::refuse_new_privileges();
    }
    command::allow_many_files();
    for note in &config.notes {
        tracing::warn!("{note}");
    }
    let clock = Clock::system();
    let cache = Cache::default();
    let metrics = Metrics::default();
    let watcher = Watcher::new();
    if config.output.is_some() {
        metrics.output.send_replace(Some(health::Output::default()));
    }
    let files_written = metrics.output.subscribe();
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let calls = TaskTracker::new();

    // First of all: what can't be taken is said before anybody is asked for a certificate.
    let Sockets { sds, admin, status, page, ready_file } =
        Sockets::open(&config, given.sds, given.admin).await?;
    let admin_path = admin.as_ref().map(Listener::path);
    for concern in permissions::concerns(&config, sds.path(), admin_path, given.is_in_pod) {
        tracing::warn!("{concern}");
    }
    let (status_address, page_address) = (sockets::address_of(&status), sockets::address_of(&page));
    let server = Server { calls: calls.clone(), stop: stop.clone() };
    if let Some(listener) = status {
        let status =
            Status::new(cache.clone(), metrics.clone(), clock.clone(), watcher.clone(), stop.clone());
        let serve = move |io| status.clone().serve(io);
        tasks.spawn(server.clone().http("the status address", listener, serve));
    }

    if config.landlock {
        // Before there are other threads.
        let sockets = [Some(&sds), admin.as_ref()].into_iter().flatten();
        let ours = sockets.filter_map(Listener::own_folder).chain(ready_file.as_ref().map(ReadyFile::folder));
        confine(&config, ours.map(Path::to_owned).collect())?;
    }
    let cert_dir =
        config.files.mounted.first().and_then(Place::home).map(|folder| folder.display().to_string());
    let debounce = config.files.debounce;
    let mut crls =
        CrlSource::new(config.crl, debounce, &cache, WORKLOAD, &watcher, clock.clone(), metrics.clone());
    crls.amend_once().await;
    let mut files =
        FileSource::new(config.files, &cache, WORKLOAD, watcher.clone(), clock.clone(), metrics.clone());
    files.publish_once();
    tasks.spawn(files.run());
    tasks.spawn(crls.run());
    let cas = config.providers.into_iter().map(|provider| certificate_authority(provider, &clock));
    let cas = Failover::new(cas.collect::<Result<_, _>>()?);
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        socket = %sds.path().display(),
        ca = cas.provider(),
        because = config.provider_reason,
        cert_dir,
        output_dir = config.output.as_ref().map(|output| tracing::field::display(output.folder.display())),
        status = status_address.map(tracing::field::display),
        page = page_address.map(|address| tracing::field::display(format!("http://{address}/"))),
        "attache serves"
    );
    let history = History::default();
    tasks.spawn(history.clone().follow(cache.clone(), WORKLOAD, clock.clone()));
    let about = About {
        started: clock.now(),
        socket: sds.path().to_owned(),
        provider: cas.provider(),
        cas: cas.in_order().map(str::to_owned).collect(),
    };
    let reporter = {
        let (cache, metrics, clock) = (cache.clone(), metrics.clone(), clock.clone());
        Reporter { cache, metrics, history, about, clock }
    };
    if let Some(listener) = page {
        let is_local = page_address.is_some_and(|address| address.ip().is_loopback());
        let page = Page { reporter: reporter.clone(), is_local };
        let stopped = stop.clone();
        let serve = move |io| page.clone().serve(io, stopped.clone());
        tasks.spawn(server.clone().http("the admin address", listener, serve));
    }
    let mut admin_file = None;
    if let Some(listener) = admin {
        let (socket, file) = listener.into_parts();
        admin_file = file;
        tasks.spawn(server.clone().admin(socket, Admin { reporter, workload: WORKLOAD, log }));
    }
    if !cas.is_empty() {
        let (cache, clock, metrics) = (&cache, clock.clone(), metrics.clone());
        let queue = IssuanceQueue::default();
        let mut issuer = Issuer::new(cas, config.workload, cache, WORKLOAD, clock, metrics, queue);
        issuer.restore().await;
        tasks.spawn(issuer.run());
    }
    if let Some(settings) = config.output {
        // After the sources, whose entries it follows.
        let output = Output::new(settings, &cache, WORKLOAD, &watcher, clock.clone(), metrics.clone());
        // Among the calls: a hook that runs has their time to end.
        tasks.spawn(calls.track_future(output.run(stop.clone())));
    }

    let peers = Peers::new(config.allowed, metrics.clone());
    let service = SecretDiscovery::new(cache.clone(), WORKLOAD, metrics, clock.clone(), stop.clone());
    let service = SecretDiscoveryServiceServer::new(service).max_decoding_message_size(limits::REQUEST_BYTES);
    let (socket, socket_file) = sds.into_parts();
    tasks.spawn(server.sds(socket, peers, service));
    let (standing, stands) = watch::channel(Standing::unknown());
    if let Some(file) = ready_file {
        tasks.spawn(calls.track_future(file.run(stands.clone())));
    }
    if let Some(manager) = given.manager {
        tasks.spawn(calls.track_future(manager.run(stands)));
    }
    let follower = Follower::new(cache, files_written.clone(), clock);
    // When it ends, so does what follows the standing.
    let announce = announce_readiness(follower, standing, started);
    tokio::select! {
        never = announce => match never {},
        name = signals.next() => tracing::info!(signal = name, "stopping"),
        Some(ended) = tasks.join_next() => {
            ended.context("a part of the agent failed")?;
            anyhow::bail!("a part of the agent ended by itself");
        }
    }

    // Gone from the folder before the streams end: a successor may take the place at once.
    drop((socket_file, admin_file));
    stop.cancel();
    calls.close();
    drain(&calls, &files_written, config.drain_timeout, &mut signals).await;
    tracing::info!("stopped");
    Ok(())
}

/// Keeps the process in `folders` and those that the options name, which are made first.
fn confine(config: &Config, mut folders: Vec<PathBuf>) -> Result<(), ConfineError> {
    if let Some(state) = &config.workload.state {
        folders.push(hardening::made(state.path(), 0o700)?);
    }
    if let Some(output) = &config.output {
        folders.push(hardening::made(&output.folder, 0o777)?);
    }
    for provider in &config.providers {
        if let Provider::Embedded { folder } = provider {
            folders.push(hardening::made(folder, 0o777)?);
        }
    }
    folders.sort();
    folders.dedup();
    hardening::confine(&folders)
}

/// Whether there are programs that we start.
fn runs_commands(config: &Config) -> bool {
    let has_hook = config.output.as_ref().is_some_and(|output| output.hook.is_some());
    has_hook || config.providers.iter().any(|provider| matches!(provider, Provider::Exec { .. }))
}

/// Logs when it is ready and when not, and passes on how it stands.
async fn announce_readiness(
    mut follower: Follower,
    standing: watch::Sender<Standing>,
    started: Instant,
) -> Infallible {
    let (mut is_ready, mut was_ready) = (false, false);
    loop {
        let now = follower.next().await;
        match (is_ready, now.is_ready()) {
            (false, true) if was_ready => tracing::info!("ready again"),
            (false, true) => tracing::info!(after = ?started.elapsed(), "ready"),
            (true, false) => tracing::error!(missing = health::told(&now.missing), "not ready any more"),
            _ => {}
        }
        is_ready = now.is_ready();
        was_ready |= is_ready;
        standing.send_replace(now);
    }
}

/// Waits for the calls that are open, and the output's hook, but not for ever, and not past a second signal.
async fn drain(
    calls: &TaskTracker,
    output: &watch::Receiver<Option<health::Output>>,
    timeout: Duration,
    signals: &mut Signals,
) {
    tokio::select! {
        () = calls.wait() => {}
        () = tokio::time::sleep(timeout) => {
            let is_hook_running = output.borrow().as_ref().is_some_and(|output| output.is_hook_running);
            if is_hook_running {
                tracing::warn!(
                    ?timeout,
                    "the output hook did not end in time and is killed; --drain-timeout gives it longer. The next \
                     start runs it again"
                );
            }
            // The hook's is one of them.
            let open = calls.len() - usize::from(is_hook_running);
            if open > 0 {
                tracing::warn!(open, ?timeout, "what did not end in time is cut");
            }
        }
        name = signals.next() => tracing::warn!(signal = name, open = calls.len(), "stopping at once"),
    }
}

/// The signals that mean: stop.
pub struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Takes SIGTERM and SIGINT over from the kernel.
    pub fn new() -> anyhow::Result<Self> {
        let take = |kind| signal(kind).context("taking over a signal failed");
        Ok(Self { terminate: take(SignalKind::terminate())?, interrupt: take(SignalKind::interrupt())? })
    }

    /// The next signal's name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
