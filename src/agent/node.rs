//! The agent of a whole node: many workloads, each with its own socket, identity and state, which come and go.

mod files;
mod members;
mod socket;
mod starter;
mod volumes;

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use tokio::sync::watch;

use self::files::WorkloadFiles;
use self::members::Members;
use self::starter::Starter;
use self::volumes::{VolumeRunner, Volumes};
use super::requests::Requests;
use super::signals::Signals;
use super::sockets::{self, Server};
use super::workloads::{Shared, Workloads};
use super::{announce_readiness, prepare_process, serve_page, serve_status, stop};
use crate::base::clock::Clock;
use crate::ca::providers;
use crate::config::NodeConfig;
use crate::csi::Driver;
use crate::export::ready_file::ReadyFile;
use crate::fs::watch::directory;
use crate::ops::admin::Admin;
use crate::ops::report::{NodeReporter, Roster, Subject};
use crate::ops::telemetry::Log;
use crate::os::systemd::Started;
use crate::serve::listener::Listener;
use crate::serve::peer::AdminPeers;
use crate::source::files::named::NamedFiles;
use crate::source::issuer::IssuanceQueue;
use crate::store::health::{Components, Health, HealthWatcher};
use crate::store::{Scope, Workload};

/// Runs the agent until SIGTERM or SIGINT.
pub async fn run(config: NodeConfig, log: Log, given: Started, requests: Requests) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut signals = Signals::new()?;
    prepare_process(&config.shared);
    if !given.sds.is_empty() {
        anyhow::bail!(
            "attache node takes no SDS sockets from the service manager: each workload names its own; leave sds out of the \
             .socket unit"
        );
    }
    let queue = IssuanceQueue::new(config.concurrency.get());
    let shared = Shared { queue, ..Shared::new(Clock::system()) };
    let mut workloads = Workloads::new(shared.clone());
    let admin = match (given.admin, &config.shared.admin_socket) {
        (Some(passed), _) => Some(Listener::passed(passed).context("taking over the admin socket failed")?),
        (None, Some(socket)) => sockets::bind_nodes_admin(socket)?,
        (None, None) => None,
    };
    let bind = sockets::bind_http;
    let status = bind(config.shared.status_address, "--status-address", "probes and metrics").await?;
    let page = bind(config.shared.admin_address, "--admin-address", "the status page").await?;
    let claim = |path| ReadyFile::claim(path, &shared.disk);
    let ready_file = config.shared.ready_file.clone().map(claim).transpose()?;

    let server = Server { calls: shared.calls.clone(), stop: shared.stop.clone() };
    workloads.spawn(&shared.stop, shared.pending.clone().report(shared.clock.clone()));
    workloads.spawn(&shared.stop, log.clone().summarize());
    shared.clock.watch_jumps();
    let Shared { cache, metrics, watcher, pending, clock, disk, .. } = shared.clone();
    let federated = workloads.follow_federated(&shared.stop, Workload::EVERY, &config.shared.files).await;
    federated.context("starting the thread for trust bundles failed")?;
    let names = config.shared.files.clone();
    let names = NamedFiles::start(
        names,
        &cache,
        Scope::Every,
        watcher.apart(),
        pending.clone(),
        clock.clone(),
        metrics,
    );
    let names = names.await;
    workloads.spawn(&shared.stop, names.run());

    let cas =
        providers::clients(&config.shared.providers, &clock, &disk.within(config.shared.workload.timeout))?;
    let roster = Roster::default();
    let reporter = NodeReporter {
        cache: cache.clone(),
        history: shared.history.clone(),
        pending,
        roster: roster.clone(),
        started: clock.now(),
        provider: cas.provider(),
        cas: cas.in_order().map(|ca| ca.name.to_string()).collect(),
        clock: clock.clone(),
    };
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        workloads = config.workloads.as_ref().map(|directory| tracing::field::display(directory.display())),
        ca = cas.provider(),
        because = config.shared.provider_reason,
        status = sockets::address_of(&status).map(tracing::field::display),
        page =
            sockets::address_of(&page).map(|address| tracing::field::display(format!("http://{address}/"))),
        "attache serves the workloads of this node"
    );
    let starter = Starter { shared: shared.clone(), template: config.template.clone(), cas: Arc::new(cas) };
    let (runner, mut orders) = VolumeRunner::new(cache.clone());
    let mut volumes = Volumes::new(starter.clone(), runner.clone(), roster.clone());
    let mut members = Members::new(starter, roster);
    let mut files = config.workloads.clone().map(|path| WorkloadFiles::new(path, watcher, disk.clone()));
    if let Some(found) = &files {
        // The first look comes before the first probe: an agent that knows no workload yet is not ready.
        let path = found.directory().to_owned();
        let at_start = disk.at_the_edges();
        let listing = path.clone();
        let listed = at_start.run(&path, move || directory::files(&listing).map(drop)).await;
        if let Ok(Err(error)) = listed {
            anyhow::bail!(
                "reading the directory of --workloads {} failed: {error}; create it, or name another one",
                path.display()
            );
        }
    }
    if let Some(settings) = config.csi.clone() {
        let driver = Driver::new(settings, Arc::new(runner), disk.clone(), &shared.metrics);
        let mut restoring = Box::pin(driver.restore());
        loop {
            tokio::select! {
                () = &mut restoring => break,
                Some(order) = orders.recv() => volumes.obey(order, &mut workloads),
            }
        }
        drop(restoring);
        let socket = driver.open().await?;
        let stop = shared.stop.clone();
        workloads.spawn_draining(async move { driver.serve(socket, stop).await });
    }
    serve_status(&mut workloads, &shared, &server, status, &log);
    let subject = Subject::Node(reporter);
    serve_page(&mut workloads, &shared, &server, page, &subject);
    requests.serve(&mut workloads, &shared, config.shared.options_file.clone(), &subject, &log, None);
    let mut own = Vec::new();
    if let Some(listener) = admin {
        let (socket, file) = listener.into_parts();
        own.extend(file);
        let peers = AdminPeers::new(shared.metrics.clone(), Components::detached());
        let admin = Admin { subject, log: log.clone() };
        workloads.spawn(&shared.stop, server.clone().admin(socket, peers, admin));
    }
    let (health, watched) = watch::channel(Health::unknown());
    if let Some(file) = ready_file {
        workloads.spawn_draining(file.run(watched.clone()));
    }
    if let Some(manager) = given.manager {
        workloads.spawn_draining(manager.run(watched));
    }
    let announce = announce_readiness(HealthWatcher::new(cache, clock), health, started);
    let mut announce = Box::pin(announce);
    let mut looking = files.take().map(|files| Box::pin(files.next()));
    let ended = loop {
        tokio::select! {
            never = &mut announce => match never {},
            name = signals.next() => {
                tracing::info!(signal = name, "stopping");
                break Ok(());
            }
            (files, found) = next(&mut looking) => {
                members.apply(files.directory(), found, &mut workloads);
                looking = Some(Box::pin(files.next()));
            }
            Some(order) = orders.recv() => volumes.obey(order, &mut workloads),
            failed = workloads.failed() => break Err(match failed.context("a task of the agent failed") {
                Ok(()) => anyhow::anyhow!("a task of the agent ended by itself"),
                Err(error) => error,
            }),
        }
    };
    own.extend(members.take_socket_files());
    stop(ended, None, own, &shared, config.shared.drain_timeout, &mut signals).await
}

/// What the pending future returns. Without one, this does not return.
async fn next<T>(pending: &mut Option<std::pin::Pin<Box<impl Future<Output = T>>>>) -> T {
    match pending {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
