//! Wires the parts together. The only place that spawns what lives as long as the agent.

mod command;
mod inventory;
pub mod kubernetes;
mod mounted;
mod node;
mod requests;
mod signals;
mod sockets;
pub mod workloads;

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use self::command::Command;
pub(crate) use self::inventory::inventory;
use self::kubernetes::KubernetesPlan;
pub use self::node::run as run_node;
pub use self::requests::{Load, Reloaded, Requests};
pub use self::signals::{RequestSignals, Signals};
use self::sockets::{SdsSockets, Server, Sockets};
use self::workloads::{Plan, Running, Shared, Workloads};
use crate::base::clock::{Clock, millis};
use crate::base::text;
use crate::ca::providers;
use crate::config::Config;
use crate::export::output::directory;
use crate::export::ready_file::ReadyFile;
use crate::fs::disk::{self, Disk};
use crate::fs::generation::Place;
use crate::ops::admin::Admin;
use crate::ops::page::Page;
use crate::ops::report::{About, Reporter, Subject};
use crate::ops::status::Status;
use crate::ops::telemetry::Log;
use crate::os::command as os_command;
use crate::os::hardening::{self, ConfineError};
use crate::os::permissions;
use crate::os::supervise::CommandFailed;
use crate::os::systemd::Started;
use crate::serve::listener::{Listener, SocketFile};
use crate::serve::peer::{AdminPeers, Peers};
use crate::serve::sds::{Bearer, Naming};
use crate::source::issuer::IdentitySource;
use crate::source::kubernetes::kept::Keeper;
use crate::source::spiffe;
use crate::store::Cache;
use crate::store::health::{self, Health, HealthWatcher};

/// Runs the agent until SIGTERM or SIGINT, with the sockets and the service manager that it was started with.
pub async fn run(config: Config, log: Log, given: Started, requests: Requests) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut signals = Signals::new()?;
    prepare_process(&config);
    let shared = Shared::new(Clock::system());
    let mut workloads = Workloads::new(shared.clone());
    let drain_timeout = config.drain_timeout;

    // Sockets come first: an address that is taken is reported before a CA is asked for a certificate.
    let Sockets { sds, admin, status, page, ready_file } =
        Sockets::open(&config, given.sds, given.admin, &shared.disk).await?;
    let addresses = Addresses { status: sockets::address_of(&status), page: sockets::address_of(&page) };
    let server = Server { calls: shared.calls.clone(), stop: shared.stop.clone() };
    let running = workloads.add("");
    if let Some(output) = &config.output {
        // The output is missing from the start, not only after its first report.
        let components = shared.cache.components(running.workload);
        components.report_output(|health| health.expect(output.paths()));
    }
    serve_status(&mut workloads, &shared, &server, status, &log);
    workloads.spawn(&shared.stop, shared.pending.clone().report(shared.clock.clone()));
    if config.landlock {
        // Before there are other threads.
        let sockets = sds.iter().chain(admin.as_ref());
        let own =
            sockets.filter_map(Listener::own_directory).chain(ready_file.as_ref().map(ReadyFile::directory));
        confine(&config, own.map(Path::to_owned).collect(), &shared.disk)?;
        log.release();
    }
    workloads.spawn(&shared.stop, log.clone().summarize());
    let admin_path = admin.as_ref().map(|admin| admin.path().to_owned());
    log_permissions(&shared, config.clone(), sds.paths(), admin_path, given.is_in_pod);

    let mut command = Command::of(&config, sds.first.path(), &mut workloads, &shared, &running, &log)?;
    let (allowed, options_file) = (config.allowed.clone(), config.options_file.clone());
    let bearer = bearer(&config);
    let naming = config.kubernetes.as_ref().map(|kubernetes| kubernetes.naming).unwrap_or_default();
    let naming = Naming { validator: config.spiffe_validator, ..naming };
    let reporter = start_workload(&mut workloads, &shared, &running, config, &sds, addresses).await?;
    let subject = Subject::One(reporter);
    serve_page(&mut workloads, &shared, &server, page, &subject);
    let passed_on = command.as_ref().map(Command::requests);
    requests.serve(&mut workloads, &shared, options_file, &subject, &log, passed_on);
    let mut files = Vec::new();
    if let Some(listener) = admin {
        let (socket, file) = listener.into_parts();
        files.extend(file);
        let peers = AdminPeers::new(shared.metrics.clone(), shared.cache.components(running.workload));
        workloads.spawn(&shared.stop, server.clone().admin(socket, peers, Admin { subject, log }));
    }
    let peers = Peers::new(allowed, shared.metrics.clone(), shared.cache.components(running.workload));
    let service = workloads.service(&running);
    service.set_naming(naming);
    if let Some(bearer) = bearer {
        service.set_bearer(bearer);
    }
    let server = Server { stop: running.ended.clone(), ..server };
    for (socket, file) in sds.into_parts() {
        let (server, peers, service) = (server.clone(), peers.clone(), service.clone());
        workloads.spawn(&running.ended, async move { server.sds(&socket, &peers, &service).await });
        files.extend(file);
    }

    let (health, watched) = watch::channel(Health::unknown());
    if let Some(file) = ready_file {
        workloads.spawn_draining(file.run(watched.clone()));
    }
    if let Some(manager) = given.manager {
        workloads.spawn_draining(manager.run(watched));
    }
    // When this future is dropped, the ready file is removed and the service manager is notified.
    let announce =
        announce_readiness(HealthWatcher::new(shared.cache.clone(), shared.clock.clone()), health, started);
    let ended = tokio::select! {
        never = announce => match never {},
        name = signals.next() => {
            tracing::info!(signal = name, "stopping");
            Ok(())
        }
        ended = command::ended(&mut command) => ended,
        failed = workloads.failed() => Err(match failed.context("a task of the agent failed") {
            Ok(()) => anyhow::anyhow!("a task of the agent ended by itself"),
            Err(error) => error,
        }),
    };

    stop(ended, command, files, &shared, drain_timeout, &mut signals).await
}

/// What takes the tokens of clients, if the options want them.
fn bearer(config: &Config) -> Option<Bearer> {
    let identity = match &config.workload.identity {
        IdentitySource::Fixed(identity) => Some(identity.clone()),
        IdentitySource::Unknown | IdentitySource::Token { .. } => None,
    };
    Some(Bearer::new(config.token_from_request.clone()?, identity))
}

/// Stops what runs, each after what needs it.
async fn stop(
    ended: anyhow::Result<()>,
    command: Option<Command>,
    files: Vec<SocketFile>,
    shared: &Shared,
    drain_timeout: Duration,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    // It has its secrets until it has stopped.
    command::stop(command, signals, ended.is_err()).await;
    // The sockets disappear before the streams end, so that a successor may take their place at once.
    sockets::remove(files, &shared.disk.at_the_edges()).await;
    if ended.as_ref().is_err_and(|error| !error.is::<CommandFailed>()) {
        return ended;
    }
    shared.stop.cancel();
    shared.calls.close();
    drain(&shared.calls, &shared.cache, drain_timeout, signals).await;
    tracing::info!("stopped");
    ended
}

/// Serves probes and metrics, where there is an address for them.
fn serve_status(
    workloads: &mut Workloads,
    shared: &Shared,
    server: &Server,
    listener: Option<TcpListener>,
    log: &Log,
) {
    let Some(listener) = listener else { return };
    let Shared { cache, metrics, clock, watcher, pending, stop, clusters, .. } = shared.clone();
    let (started, is_local) = (clock.now(), sockets::is_local(&listener));
    let (log, draining) = (log.clone(), stop);
    let status =
        Status { cache, metrics, clock, started, watcher, pending, clusters, log, is_local, draining };
    let serve = move |io, place| status.clone().serve(io, place);
    workloads.spawn(&shared.stop, server.clone().http("the status address", listener, serve));
}

/// Serves the status page, where there is an address for it.
fn serve_page(
    workloads: &mut Workloads,
    shared: &Shared,
    server: &Server,
    listener: Option<TcpListener>,
    subject: &Subject,
) {
    let Some(listener) = listener else { return };
    let page = Page { subject: subject.clone(), is_local: sockets::is_local(&listener) };
    let stop = shared.stop.clone();
    let serve = move |io, place| page.clone().serve(io, place, stop.clone());
    workloads.spawn(&shared.stop, server.clone().http("the admin address", listener, serve));
}

/// Sets the limits and rights of the process, and logs what a person should know about the options.
fn prepare_process(config: &Config) {
    hardening::protect_memory();
    // A command may be meant to have more rights than the agent: by sudo, say.
    if !runs_commands(config) {
        hardening::refuse_new_privileges();
    }
    os_command::raise_file_limit();
    for note in &config.notes {
        tracing::warn!("{note}");
    }
}

/// Where people and probes connect.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    status: Option<SocketAddr>,
    page: Option<SocketAddr>,
}

/// Starts the sidecar's workload, and returns what reports its state.
async fn start_workload(
    workloads: &mut Workloads,
    shared: &Shared,
    running: &Running,
    config: Config,
    sds: &SdsSockets,
    addresses: Addresses,
) -> anyhow::Result<Reporter> {
    let cert_dir = config.files.mounted.first().and_then(Place::home);
    let cert_dir = cert_dir.map(|directory| tracing::field::display(directory.display().to_string()));
    let output_dir = config.output.as_ref().map(|output| {
        let paths: Vec<_> = output.paths().map(|path| path.display().to_string()).collect();
        tracing::field::display(paths.join(", "))
    });
    let cas =
        providers::clients(&config.providers, &shared.clock, &shared.disk.within(config.workload.timeout))?;
    // What the secrets come from: the endpoint has no client.
    let (provider, names) = match &config.spiffe {
        Some(spiffe) => (spiffe::PROVIDER, vec![spiffe.name()]),
        None => (cas.provider(), cas.in_order().map(|ca| ca.name.to_string()).collect()),
    };
    let kubernetes = start_kubernetes(workloads, shared, running, &config).await?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        socket = %text::listed(sds.iter().map(|socket| socket.path().display()), ", "),
        config = config.options_file.as_ref().map(|file| tracing::field::display(file.path().display())),
        ca = provider,
        because = config.provider_reason,
        cert_dir,
        output_dir,
        status = addresses.status.map(tracing::field::display),
        page = addresses.page.map(|address| tracing::field::display(format!("http://{address}/"))),
        "attache serves"
    );
    let named = |socket: &Listener| {
        let path = std::path::absolute(socket.path()).unwrap_or_else(|_| socket.path().to_owned());
        (path, socket.id().map(|id| id.to_string()))
    };
    let (socket, socket_file) = named(&sds.first);
    let about = About {
        started: shared.clock.now(),
        socket,
        socket_file,
        other_sockets: sds.others.iter().map(named).collect(),
        provider,
        cas: names,
    };
    let plan = Plan {
        kubernetes,
        files: config.files,
        crl: config.crl,
        cas,
        issuer: config.workload,
        spiffe: config.spiffe,
        mint: config.mint,
        output: config.output,
    };
    workloads.start(running, plan).await.context("starting the thread for mounted files failed")?;
    let Shared { cache, history, pending, clock, clusters, .. } = shared.clone();
    Ok(Reporter { cache, workload: running.workload, history, pending, clusters, about, clock })
}

/// Starts what keeps and finds clusters, where Secrets of Kubernetes are served.
async fn start_kubernetes(
    workloads: &mut Workloads,
    shared: &Shared,
    running: &Running,
    config: &Config,
) -> anyhow::Result<Option<KubernetesPlan>> {
    let Some(kubernetes) = config.kubernetes.clone() else { return Ok(None) };
    let components = shared.cache.components(running.workload);
    let state = config.workload.state.as_ref();
    let keeper = state.map(|state| Keeper::new(state.path(), shared.disk.clone(), components));
    let (plan, remote) = kubernetes::start(kubernetes, keeper.clone(), shared).await?;
    if let Some(keeper) = keeper {
        workloads.spawn(&running.ended, keeper.run());
    }
    if let Some(remote) = remote {
        workloads.spawn(&shared.stop, remote.run());
    }
    let _ = shared.clusters.set(plan.clusters.clone());
    Ok(Some(plan))
}

/// Logs what every local user could read or replace. Does not wait for a disk that does not answer soon.
fn log_permissions(
    shared: &Shared,
    config: Config,
    sds: Vec<PathBuf>,
    admin: Option<PathBuf>,
    is_in_pod: bool,
) {
    let pending = shared.pending.clone();
    disk::attempt(2 * disk::AT_THE_EDGES, move || {
        let inventory = inventory(&config, &sds, admin.as_deref());
        for concern in permissions::concerns(&inventory, is_in_pod, &pending) {
            tracing::warn!("{concern}");
        }
    });
}

/// Confines the process to `directories` and those that the options name, which are created first.
fn confine(config: &Config, mut directories: Vec<PathBuf>, disk: &Disk) -> Result<(), ConfineError> {
    type Create = Box<dyn FnOnce(&Path) -> std::io::Result<()> + Send>;
    let mut needed: Vec<(PathBuf, Create)> = Vec::new();
    if let Some(state) = config.workload.state.clone() {
        needed.push((state.path().to_owned(), Box::new(move |_| state.create())));
    }
    for path in config.output.iter().flat_map(|output| output.paths()) {
        needed.push((path.clone(), Box::new(directory::create)));
    }
    for directory in config.providers.iter().filter_map(|provider| provider.directory()) {
        needed.push((directory.to_owned(), Box::new(|path| fs::create_dir_all(path))));
    }
    for (directory, create) in needed {
        let path = directory.clone();
        match disk.attempt(&directory, move || hardening::create_directory(&path, create)) {
            Some(created) => directories.push(created?),
            None => tracing::warn!(
                directory = %directory.display(),
                "file system does not answer: under --landlock this directory stays read-only until the agent restarts"
            ),
        }
    }
    directories.sort();
    directories.dedup();
    hardening::confine(&directories)
}

/// Whether the agent starts programs.
fn runs_commands(config: &Config) -> bool {
    let has_hook = config.output.as_ref().is_some_and(|output| output.hook.is_some());
    has_hook || config.command.is_some() || config.providers.iter().any(|provider| provider.runs_commands())
}

/// Logs each change of readiness, and passes the health on.
async fn announce_readiness(
    mut watcher: HealthWatcher,
    health: watch::Sender<Health>,
    started: Instant,
) -> Infallible {
    let (mut is_ready, mut was_ready) = (false, false);
    loop {
        let now = watcher.next().await;
        match (is_ready, now.is_ready()) {
            (false, true) if was_ready => tracing::info!("ready again"),
            (false, true) => tracing::info!(after_ms = millis(started.elapsed()), "ready"),
            (true, false) => tracing::error!(missing = health::listed(&now.missing), "no longer ready"),
            _ => {}
        }
        is_ready = now.is_ready();
        was_ready |= is_ready;
        health.send_replace(now);
    }
}

/// Waits for open calls and the output hook until `timeout` or a second signal.
async fn drain(calls: &TaskTracker, cache: &Cache, timeout: Duration, signals: &mut Signals) {
    tokio::select! {
        () = calls.wait() => {}
        () = tokio::time::sleep(timeout) => {
            let outputs = cache.workloads().into_iter().filter_map(|(it, _)| cache.components(it).output());
            // Their tasks are among the calls: one for the hook, and one for each directory.
            let tasks = outputs.filter(|output| output.is_hook_running).map(|it| 1 + it.directories.len());
            let tasks: usize = tasks.sum();
            if tasks > 0 {
                tracing::warn!(
                    timeout_ms = millis(timeout),
                    "drain timeout exceeded, killing the output hook; --drain-timeout gives it longer. The next start \
                     runs it again"
                );
            }
            let open = calls.len().saturating_sub(tasks);
            if open > 0 {
                tracing::warn!(open, timeout_ms = millis(timeout), "drain timeout exceeded, closing connections");
            }
        }
        name = signals.next() => tracing::warn!(signal = name, open = calls.len(), "stopping at once"),
    }
}
