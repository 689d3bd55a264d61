//! Puts the parts together. The only place that spawns what lives as long as the agent.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::Admin;
use crate::ca::cfssl::Cfssl;
use crate::ca::citadel::Citadel;
use crate::ca::embedded::{DevelopmentCa, Embedded};
use crate::ca::exec::Exec;
use crate::ca::failover::{Failover, Member};
use crate::ca::google_cas::GoogleCas;
use crate::ca::grpc::Connections;
use crate::ca::kubernetes::Kubernetes;
use crate::ca::rest;
use crate::ca::token::TokenSource;
use crate::ca::vault::Vault;
use crate::cache::{Cache, Workload};
use crate::clock::Clock;
use crate::config::{ADMIN_SOCKET, AdminSocket, Config, Provider};
use crate::generation::Place;
use crate::hardening::ConfineError;
use crate::history::History;
use crate::metrics::Metrics;
use crate::output::Output;
use crate::page::Page;
use crate::proto::envoy::service::secret::v3::secret_discovery_service_server::SecretDiscoveryServiceServer;
use crate::readiness::{Follower, Standing};
use crate::ready_file::ReadyFile;
use crate::report::{About, Reporter};
use crate::sds::SecretDiscovery;
use crate::sds::listener::{ListenError, Listener};
use crate::sds::peers::Peers;
use crate::source::crl::CrlSource;
use crate::source::files::FileSource;
use crate::source::watch::Watcher;
use crate::source::workload::WorkloadSource;
use crate::status::Status;
use crate::systemd::Started;
use crate::telemetry::LogLevel;
use crate::{command, exposure, hardening, limits, readiness, rpc};

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
        metrics.output.send_replace(Some(readiness::Output::default()));
    }
    let files_written = metrics.output.subscribe();
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let calls = TaskTracker::new();

    // The sockets first: what can't be taken is said before anybody is asked for a certificate.
    let listener = match given.sds {
        Some(passed) => Ok(Listener::passed(passed).context("taking over the SDS socket failed")?),
        None => Listener::bind(&config.socket, config.socket_mode, "--socket"),
    };
    // Nobody may take a dead agent's word for ours. A live one's stays: it goes on.
    let is_taken = matches!(listener, Err(ListenError::Taken { .. }));
    let ready_file = config.ready_file.clone().filter(|_| !is_taken).map(ReadyFile::claim).transpose()?;
    let listener = listener?;
    let sds_path = listener.path().to_owned();
    let admin_socket = match given.admin {
        Some(passed) => Some(Listener::passed(passed).context("taking over the admin socket failed")?),
        None => config.admin_socket.as_ref().map(|it| bind_admin(it, &sds_path)).transpose()?.flatten(),
    };
    for concern in exposure::concerns(&config, &sds_path, admin_socket.as_ref().map(Listener::path)) {
        tracing::warn!("{concern}");
    }
    let status = bind_http(config.status_address, "--status-address", "probes and metrics").await?;
    let page = bind_http(config.admin_address, "--admin-address", "the status page").await?;
    let (status_address, page_address) = (address_of(&status), address_of(&page));
    if let Some(listener) = status {
        let status =
            Status::new(cache.clone(), metrics.clone(), clock.clone(), watcher.clone(), stop.clone());
        let serve = move |io| status.clone().serve(io);
        tasks.spawn(serve_http("the status address", listener, serve, calls.clone(), stop.clone()));
    }

    if config.landlock {
        // Before there are other threads.
        let sockets = [Some(&listener), admin_socket.as_ref()].into_iter().flatten();
        let ours = sockets.filter_map(Listener::own_folder).chain(ready_file.as_ref().map(ReadyFile::folder));
        confine(&config, ours.map(Path::to_owned).collect())?;
    }
    let (socket, socket_file) = listener.into_parts();
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
        socket = %sds_path.display(),
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
        socket: sds_path,
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
        tasks.spawn(serve_http("the admin address", listener, serve, calls.clone(), stop.clone()));
    }
    let mut admin_file = None;
    if let Some(listener) = admin_socket {
        let (socket, file) = listener.into_parts();
        admin_file = file;
        let admin = Admin { reporter, workload: WORKLOAD, log };
        let (calls, stop) = (calls.clone(), stop.clone());
        tasks.spawn(async move {
            let serve = |io| {
                let (admin, stop) = (admin.clone(), stop.clone());
                drop(calls.spawn(async move { admin.serve(io, stop).await }));
            };
            rpc::accept("the admin socket", |cx| socket.poll_accept(cx), serve, &stop).await;
        });
    }
    if !cas.is_empty() {
        let (cache, clock, metrics) = (&cache, clock.clone(), metrics.clone());
        let mut source = WorkloadSource::new(cas, config.workload, cache, WORKLOAD, clock, metrics);
        source.restore().await;
        tasks.spawn(source.run());
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
    tasks.spawn({
        let (calls, stop) = (calls.clone(), stop.clone());
        async move {
            let serve = |io| {
                let Some(place) = peers.admit(&io) else { return };
                let served = rpc::serve(io, service.clone(), stop.clone());
                calls.spawn(async move {
                    served.await;
                    drop(place);
                });
            };
            rpc::accept("the SDS socket", |cx| socket.poll_accept(cx), serve, &stop).await;
        }
    });
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

/// The admin socket, beside the SDS socket unless somebody wants it elsewhere. Two agents may have their SDS sockets in
/// one folder: there the second one goes without, unless somebody wants it.
fn bind_admin(socket: &AdminSocket, sds: &Path) -> anyhow::Result<Option<Listener>> {
    let path = if socket.is_named { &socket.path } else { &sds.with_file_name(ADMIN_SOCKET) };
    match Listener::bind(path, 0o600, "--admin-socket") {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if socket.is_named => Err(error.into()),
        Err(error) => {
            tracing::info!(reason = %error, "there is no admin socket: attache status, renew and log can't be used");
            Ok(None)
        }
    }
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

/// The client of the CA that `provider` says.
pub(crate) fn certificate_authority(provider: Provider, clock: &Clock) -> anyhow::Result<Member> {
    let name = provider.name();
    Ok(match provider {
        Provider::Embedded { folder } => {
            let ca = DevelopmentCa::open(&folder, clock.clone())?;
            tracing::warn!(
                root = %ca.root_file().display(),
                "the embedded CA is for development: whoever can read its folder can be anybody"
            );
            Member::new(&name, Embedded(ca))
        }
        Provider::Kubernetes { endpoint, token, signer, roots, key_type } => Member::new(
            &name,
            Kubernetes {
                endpoint,
                token,
                signer,
                roots,
                key_type,
                clock: clock.clone(),
                requests: Mutex::default(),
            },
        ),
        Provider::Cfssl { endpoint, profile, label, auth_key, bundle, headers } => {
            let headers = rest::headers(&headers);
            Member::new(&name, Cfssl { endpoint, profile, label, auth_key, bundle, headers })
        }
        Provider::Exec { sign, roots } => Member::new(&name, Exec::new(sign, roots)),
        Provider::Citadel { endpoint, token, client_cert, cluster_id, headers, cert_signer, timeout } => {
            Member::new(
                &name,
                Citadel {
                    endpoint,
                    token: TokenSource::new(token, clock.clone()),
                    client_cert,
                    repeats: Mutex::default(),
                    refused: Mutex::default(),
                    cluster_id,
                    headers,
                    cert_signer,
                    connections: Connections::new(timeout),
                    clock: clock.clone(),
                },
            )
        }
        Provider::GoogleCas { endpoint, settings, token, headers, timeout } => {
            let token = TokenSource::new(token, clock.clone());
            Member::new(&name, GoogleCas::new(endpoint, settings, token, headers, timeout))
        }
        Provider::Vault { endpoint, settings, headers } => {
            Member::new(&name, Vault::new(endpoint, settings, &headers, clock.clone()))
        }
    })
}

/// A listener for `purpose`, where `option` names an address.
async fn bind_http(
    address: Option<SocketAddr>,
    option: &str,
    purpose: &str,
) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    let failed = || format!("listening on {address} for {purpose} failed; choose another {option}, or none");
    listener.map(Some).with_context(failed)
}

fn address_of(listener: &Option<TcpListener>) -> Option<SocketAddr> {
    listener.as_ref()?.local_addr().ok()
}

/// Takes connections to `listener`, which is `what`, and has each of them served.
async fn serve_http<F>(
    what: &'static str,
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> F,
    calls: TaskTracker,
    stop: CancellationToken,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(limits::STATUS_CONNECTIONS));
    // Whoever comes when all places are taken is turned away, so that probes can't take what Envoy needs.
    let serve = |io| {
        if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
            let served = serve(io);
            calls.spawn(async move {
                served.await;
                drop(place);
            });
        }
    };
    rpc::accept(what, |cx| listener.poll_accept(cx), serve, &stop).await;
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
            (true, false) => tracing::error!(missing = readiness::told(&now.missing), "not ready any more"),
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
    output: &watch::Receiver<Option<readiness::Output>>,
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
