//! What was noticed during a run, and when: what must not happen, and the figures that are printed at its end.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long after a fault of the CA a renewal may still be late: the call that hangs in it, and the delay until the
/// retry.
const RECOVERY: Duration = Duration::from_secs(6);
/// Findings that are printed.
const PRINTED: usize = 30;
/// Bytes of the agent's log that are printed.
const TAIL: usize = 12_000;

/// Shared by all that take part in a run.
#[derive(Clone, Debug)]
pub struct Record(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    seed: u64,
    started: Instant,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// The turns that are played now.
    turns: Vec<&'static str>,
    findings: Vec<String>,
    /// When the CA failed, and until when.
    faults: Vec<(Instant, Option<Instant>)>,
    counts: BTreeMap<&'static str, u64>,
    longest: BTreeMap<&'static str, (Duration, String)>,
    most: BTreeMap<&'static str, (u64, String)>,
}

/// The CA fails until this is dropped.
pub struct Fault {
    record: Record,
    number: usize,
}

impl Drop for Fault {
    fn drop(&mut self) {
        self.record.0.seen.lock().unwrap().faults[self.number].1 = Some(Instant::now());
    }
}

impl Record {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Inner { seed, started: Instant::now(), seen: Mutex::default() }))
    }

    pub fn elapsed(&self) -> Duration {
        self.0.started.elapsed()
    }

    /// From now on these turns are played.
    pub fn begin(&self, turns: Vec<&'static str>) {
        self.note(&turns.join(", "));
        self.0.seen.lock().unwrap().turns = turns;
    }

    #[expect(clippy::print_stdout, reason = "a long run shows where it is")]
    pub fn note(&self, what: &str) {
        println!("soak: {:>7.1} s: {what}", self.elapsed().as_secs_f64());
    }

    /// Records what must not happen; the run fails when the turn ends.
    pub fn find(&self, what: String) {
        let mut seen = self.0.seen.lock().unwrap();
        let turns = seen.turns.join(", ");
        let finding = format!("{:.1} s, during {turns}: {what}", self.elapsed().as_secs_f64());
        if seen.findings.len() < PRINTED {
            eprintln!("soak: {finding}");
        }
        seen.findings.push(finding);
    }

    pub fn has_found(&self) -> bool {
        !self.0.seen.lock().unwrap().findings.is_empty()
    }

    pub fn count(&self, what: &'static str) {
        *self.0.seen.lock().unwrap().counts.entry(what).or_default() += 1;
    }

    /// Records how long something took; the longest time is printed.
    pub fn took(&self, what: &'static str, time: Duration) {
        let mut seen = self.0.seen.lock().unwrap();
        let turns = seen.turns.join(", ");
        let longest = seen.longest.entry(what).or_default();
        if time > longest.0 {
            *longest = (time, turns);
        }
    }

    /// Records how much something was; the most is printed.
    pub fn was(&self, what: &'static str, value: u64) {
        let mut seen = self.0.seen.lock().unwrap();
        let turns = seen.turns.join(", ");
        let most = seen.most.entry(what).or_default();
        if value > most.0 {
            *most = (value, turns);
        }
    }

    /// The CA fails from now on.
    pub fn fault(&self) -> Fault {
        let mut seen = self.0.seen.lock().unwrap();
        seen.faults.push((Instant::now(), None));
        Fault { record: self.clone(), number: seen.faults.len() - 1 }
    }

    /// Whether the CA failed at any time since `moment`, or shortly before it.
    pub fn failed_since(&self, moment: Instant) -> bool {
        let seen = self.0.seen.lock().unwrap();
        seen.faults.iter().any(|(_, end)| end.is_none_or(|end| end + RECOVERY > moment))
    }

    /// Fails the test with all that is needed to repeat the run.
    pub fn fail_if_found(&self, log: &str) {
        let seen = self.0.seen.lock().unwrap();
        if seen.findings.is_empty() {
            return;
        }
        let findings: Vec<_> = seen.findings.iter().take(PRINTED).map(String::as_str).collect();
        let more = seen.findings.len().saturating_sub(PRINTED);
        let (seed, findings) = (self.0.seed, findings.join("\n  "));
        drop(seen);
        let tail = log.floor_char_boundary(log.len().saturating_sub(TAIL));
        panic!(
            "{self}\nthe end of the agent's log of {} bytes:\n{}\nrepeat it with ATTACHE_SOAK_SEED={seed}; \
             found, and {more} more:\n  {findings}",
            log.len(),
            &log[tail..],
        );
    }
}

impl fmt::Display for Record {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.0.seen.lock().unwrap();
        let counts: Vec<_> = seen.counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
        write!(formatter, "{}", counts.join(", "))?;
        for (what, (time, turns)) in &seen.longest {
            write!(formatter, "\nsoak: longest {what}: {time:.1?} ({turns})")?;
        }
        for (what, (value, turns)) in &seen.most {
            write!(formatter, "\nsoak: most {what}: {value} ({turns})")?;
        }
        Ok(())
    }
}
