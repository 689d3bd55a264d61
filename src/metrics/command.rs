//! The program that the agent keeps running, as metrics.

use std::time::SystemTime;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Unit;

use super::{Known, describe, seconds};
use crate::store::health::{CommandHealth, CommandState, Reports};

/// Only a sidecar's workload has a program. Without one the metrics have no samples.
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, reports: &Reports) -> Result<(), std::fmt::Error> {
    let command = reports.command.as_deref();
    let mut gauge = |name: &str, help: &str, value: fn(&CommandHealth) -> Option<i64>| {
        describe(encoder, name, help, None, &Known(command.and_then(value)))
    };
    gauge("command_live", "1 while the command serves", |it| Some((it.state == CommandState::Live).into()))?;
    gauge("command_processes", "Processes of the command: two while an old epoch drains", |it| {
        i64::try_from(it.epochs.len()).ok()
    })?;
    gauge("command_epoch", "The newest restart epoch", |it| Some(it.epochs.last()?.epoch.into()))?;
    gauge("command_restart_failing", "1 while the newest files have not led to a restart", |it| {
        Some((it.restart_failure.is_some() || it.files_failure.is_some()).into())
    })?;
    let since = |it: &CommandHealth| Some(it.epochs.iter().rev().find(|epoch| epoch.state == "live")?.since);
    let since: Option<SystemTime> = command.and_then(since);
    let since = Known(since.map(seconds));
    let help = "When the newest epoch began to serve";
    describe(encoder, "command_live_since_timestamp", help, Some(&Unit::Seconds), &since)?;
    let help = "Starts of the command after the first one, by reason, and restarts that failed";
    let mut family = encoder.encode_descriptor("command_restarts", help, None, MetricType::Counter)?;
    let restarts = command.map(|it| it.restarts).into_iter();
    for (reason, count) in
        restarts.flat_map(|it| [("files", it.files), ("crash", it.crash), ("failed", it.failed)])
    {
        ConstCounter::new(count).encode(family.encode_family(&[("reason", reason)])?)?;
    }
    Ok(())
}
