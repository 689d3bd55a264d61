//! The signals that the agent handles.

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, which stop the agent.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// From now on these signals don't end the process by themselves.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self { terminate: handle(SignalKind::terminate())?, interrupt: handle(SignalKind::interrupt())? })
    }

    /// Waits for the next signal, and returns its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// SIGHUP and SIGUSR1, which never end the agent. A signal that comes before its receiver waits is not lost.
#[derive(Debug)]
pub struct RequestSignals {
    /// SIGHUP: reload.
    pub(super) reload: Signal,
    /// SIGUSR1: log the status.
    pub(super) status: Signal,
}

impl RequestSignals {
    /// From now on, until the process ends, these signals don't end it. Needs a runtime.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self { reload: handle(SignalKind::hangup())?, status: handle(SignalKind::user_defined1())? })
    }
}

/// SIGUSR2, which the agent has no use for: it is for the program that the agent keeps running.
pub(super) fn for_command() -> anyhow::Result<Signal> {
    handle(SignalKind::user_defined2())
}

fn handle(kind: SignalKind) -> anyhow::Result<Signal> {
    signal(kind).context("handling signals failed")
}
