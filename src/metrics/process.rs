//! The kernel's figures for this process, under the names that Prometheus' own clients use.

use std::fs;
use std::time::SystemTime;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::{Known, describe, seconds};

/// This process. Figures that can't be read, where there is no `/proc`, are left out.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) started: SystemTime,
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut gauge = |name: &str, help: &str, unit: Option<&Unit>, value: Option<u64>| {
            describe(&mut encoder, name, help, unit, &Known(value))
        };
        let bytes = Some(&Unit::Bytes);
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kilobytes = |field: &str| Some(of_status(&status, field)? * 1024);
        gauge("process_resident_memory", "Resident memory", bytes, kilobytes("VmRSS:"))?;
        gauge("process_virtual_memory", "Virtual memory", bytes, kilobytes("VmSize:"))?;
        gauge("process_threads", "Threads", None, of_status(&status, "Threads:"))?;
        gauge("process_open_fds", "Open file descriptors", None, open_files())?;
        let most = getrlimit(Resource::Nofile).current;
        gauge("process_max_fds", "Limit of open file descriptors", None, most)?;
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let cpu = ConstCounter::new(cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9);
        describe(&mut encoder, "process_cpu", "CPU time used", Some(&Unit::Seconds), &cpu)?;
        let start = ConstGauge::new(seconds(self.started));
        describe(&mut encoder, "process_start_time", "When the process started", Some(&Unit::Seconds), &start)
    }
}

/// A number in `/proc/self/status`.
fn of_status(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

fn open_files() -> Option<u64> {
    let open = fs::read_dir("/proc/self/fd").ok()?.count();
    // One of them is the directory that is read.
    u64::try_from(open.saturating_sub(1)).ok()
}
