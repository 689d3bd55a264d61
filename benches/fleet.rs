//! 10,000 agents and one CA: the CA's load when all agents start at once, after an outage, and when they renew. Prints
//! two tables, and draws `docs/fleet-*.svg`; `docs/fleet.md` explains both. Time is virtual: the figures result from
//! the agents' decisions and not from this machine, and are the same each time. It takes a few minutes.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program of its own, without a runtime: it prints, and panics where it can't go on"
)]

mod agents;
mod chart;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use crate::agents::{Kind, Outage, Records, Scenario};
use crate::chart::{Chart, Curve, Scale};

const AGENTS: usize = 10_000;
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// All agents start at once, and the CA is always up.
const START: Scenario = Scenario {
    agents: AGENTS,
    started_within: SECOND,
    ttl: DAY,
    jitter: 0.1,
    capacity: None,
    outage: None,
    length: Duration::from_secs(600),
};

/// The same with Istio's default, which an injected `SECRET_GRACE_PERIOD_RATIO_JITTER` may still set.
const DENSE_START: Scenario = Scenario { jitter: 0.01, ..START };

// The scenarios in the charts.
const AT_ONCE: &str = "24 h, all started at once";
const DENSE: &str = "24 h, all started at once, --grace-jitter 0.01";
const AT_ONCE_500: &str = "24 h, all started at once, CA of 500/s";
const AT_ONCE_100: &str = "24 h, all started at once, CA of 100/s";
const DOWN: &str = "24 h, all started at once, CA down for the first 10 min";
const DOWN_500: &str = "24 h, all started at once, CA down for the first 10 min, 500/s afterwards";
const BLOCK: &str = "24 h, started at once, CA down for 10 min of the first renewals";
const DENSE_BLOCK: &str =
    "24 h, started at once, --grace-jitter 0.01, CA down for 10 min of the first renewals";
const SHORT_10: &str = "1 h, evenly started, CA down for 10 min";
const SHORT_35: &str = "1 h, evenly started, CA down for 35 min";

/// The scenarios, and their names in the table.
fn scenarios() -> Vec<(&'static str, Scenario)> {
    let away = |scenario: &Scenario, from: Duration, minutes: u32, kind| {
        let to = from + minutes * MINUTE;
        Scenario { outage: Some(Outage { from, to, kind }), length: to + 10 * MINUTE, ..scenario.clone() }
    };
    let limited = |scenario: &Scenario, capacity| Scenario { capacity: Some(capacity), ..scenario.clone() };
    let (refuses, hangs) = (Kind::Refuses, Kind::Hangs);
    let down = away(&START, Duration::ZERO, 10, refuses);
    // Certificates that have been renewed many times: their renewals are spread over half of the lifetime.
    let even = |ttl: Duration| Scenario { started_within: ttl / 2, ttl, ..START };
    let (day, hour, ten) = (even(DAY), even(HOUR), even(10 * MINUTE));
    vec![
        (AT_ONCE, Scenario { length: 3 * DAY, ..START }),
        (DENSE, Scenario { length: 3 * DAY, ..DENSE_START }),
        (AT_ONCE_500, limited(&START, 500)),
        (AT_ONCE_100, limited(&START, 100)),
        (DOWN, down.clone()),
        (DOWN_500, limited(&down, 500)),
        ("24 h, all started at once, CA hangs for the first 10 min", away(&START, Duration::ZERO, 10, hangs)),
        ("24 h, evenly started, CA down for 10 min", away(&day, 13 * HOUR, 10, refuses)),
        ("24 h, evenly started, CA hangs for 10 min", away(&day, 13 * HOUR, 10, hangs)),
        // The first renewals are around half of the lifetime, within ±10 % of the whole, or ±1 %.
        (BLOCK, away(&START, 12 * HOUR - 5 * MINUTE, 10, refuses)),
        (DENSE_BLOCK, away(&DENSE_START, 12 * HOUR - 5 * MINUTE, 10, refuses)),
        (SHORT_10, away(&hour, 35 * MINUTE, 10, refuses)),
        (SHORT_35, away(&hour, 35 * MINUTE, 35, refuses)),
        ("10 min, evenly started, CA down for 11 min", away(&ten, 6 * MINUTE, 11, refuses)),
        // The CA is back half a minute after all certificates have expired within one second.
        ("10 min, all started at once, CA down from minute 4 to 10½", {
            let at_once = Scenario { ttl: 10 * MINUTE, ..START };
            let (from, to) = (4 * MINUTE, 10 * MINUTE + 30 * SECOND);
            Scenario { outage: Some(Outage { from, to, kind: refuses }), length: 15 * MINUTE, ..at_once }
        }),
    ]
}

/// The records of each scenario.
type Outcomes = BTreeMap<&'static str, Records>;

fn main() {
    let scenarios = scenarios();
    let outcomes = run(&scenarios);
    println!(
        "| fleet | calls per second while the CA is down: mean, peak | then all have a certificate within | calls per second until then: mean | peak, 1 s | 10 s | 1 min | peak to mean | shortest remaining lifetime |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    for (name, scenario) in &scenarios {
        println!("{}", recovery(name, scenario, &outcomes[name]));
    }
    println!();
    println!(
        "| renewals | the middle 98 % within | calls per second then: mean | peak, 1 s | 10 s | 1 min | peak (1 min) to mean | mean to that of an even load |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    for (name, title) in [(AT_ONCE, "jitter 0.1"), (DENSE, "jitter 0.01")] {
        for generation in 1..=5 {
            println!("{}", renewals(title, generation, &outcomes[name]));
        }
    }
    draw(&outcomes);
}

/// Runs the scenarios side by side.
fn run(scenarios: &[(&'static str, Scenario)]) -> Outcomes {
    let waiting = Mutex::new(scenarios.iter());
    let outcomes = Mutex::new(Outcomes::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((name, scenario)) = { waiting.lock().unwrap().next() } {
                    let began = std::time::Instant::now();
                    let records = scenario.run();
                    eprintln!("{name}: {:.0?}", began.elapsed());
                    outcomes.lock().unwrap().insert(*name, records);
                }
            });
        }
    });
    outcomes.into_inner().unwrap()
}

/// A row of the first table: from the end of the outage, or from the start if there was none.
fn recovery(name: &str, scenario: &Scenario, records: &Records) -> String {
    let away = scenario.outage.map_or("".to_owned(), |Outage { from, to, .. }| {
        format!("{:.1}, {:.0}", records.mean(from, to), records.peak(from, to, 1))
    });
    let (begin, asked_before) =
        scenario.outage.map_or((Duration::ZERO, SECOND), |outage| (outage.to, outage.to));
    let Some(settled) = records.settled(asked_before) else {
        return format!("| {name} | {away} | not yet |");
    };
    let end = begin + SECOND.max(settled - begin);
    let mean = records.mean(begin, end);
    let peaks = [1, 10, 60].map(|seconds| records.peak(begin, end, seconds));
    let least = records.least_left().map_or("".to_owned(), |left| {
        let length = Duration::from_secs(left.abs() as u64);
        let length = humantime::format_duration(length);
        if left < 0.0 { format!("expired {length} before") } else { length.to_string() }
    });
    let [one, ten, sixty] = peaks;
    format!(
        "| {name} | {away} | {:.1} s | {mean:.1} | {one:.0} | {ten:.1} | {sixty:.1} | {:.1} | {least} |",
        (settled - begin).as_secs_f64(),
        one / mean
    )
}

/// A row of the second table.
fn renewals(title: &str, generation: u32, records: &Records) -> String {
    let half = 12 * HOUR;
    let (from, to) = (generation * half - half / 2, generation * half + half / 2);
    let (from, to) = (records.quantile(from, to, 0.01), records.quantile(from, to, 0.99));
    let mean = records.mean(from, to);
    let [one, ten, sixty] = [1, 10, 60].map(|seconds| records.peak(from, to, seconds));
    format!(
        "| {title}, no. {generation} | {:.0} min | {mean:.2} | {one:.0} | {ten:.1} | {sixty:.1} | {:.1} | {:.1} |",
        (to - from).as_secs_f64() / 60.0,
        sixty / mean,
        mean / (AGENTS as f64 / half.as_secs_f64())
    )
}

/// Writes the curves to `docs/`.
fn draw(outcomes: &Outcomes) {
    const PER_SECOND: &str = "requests per second";
    let curve = |name, label: &str, from, to, bin, zero, unit| Curve {
        name: label.to_owned(),
        points: outcomes[name].curve(from, to, bin, zero, unit),
    };
    let start = |name, label| curve(name, label, Duration::ZERO, 2 * MINUTE, SECOND, Duration::ZERO, SECOND);
    let down =
        |name, label| curve(name, label, Duration::ZERO, 12 * MINUTE, 2 * SECOND, Duration::ZERO, MINUTE);
    let half = 12 * HOUR;
    let block =
        |name, label| curve(name, label, half - 20 * MINUTE, half + 25 * MINUTE, 10 * SECOND, half, MINUTE);
    let short = |name, label, away: u32| {
        let back = (35 + away) * MINUTE;
        curve(name, label, back - 4 * MINUTE, back + 6 * MINUTE, 2 * SECOND, back, MINUTE)
    };
    let days = |name, label| curve(name, label, HOUR, 3 * DAY, 10 * MINUTE, Duration::ZERO, HOUR);
    let charts = [
        (
            "start",
            Chart {
                title: "All agents start within one second",
                x: "seconds after the start",
                y: PER_SECOND,
                scale: Scale::Logarithmic,
                outage: None,
                curves: vec![
                    start(AT_ONCE_100, "CA signs 100/s"),
                    start(AT_ONCE_500, "500/s"),
                    start(AT_ONCE, "no limit"),
                ],
            },
        ),
        (
            "start-down",
            Chart {
                title: "All agents start within one second, and the CA is down for ten minutes",
                x: "minutes after the start",
                y: PER_SECOND,
                scale: Scale::Logarithmic,
                outage: Some((0.0, 10.0)),
                curves: vec![down(DOWN_500, "CA signs 500/s afterwards"), down(DOWN, "no limit")],
            },
        ),
        (
            "outage-24h",
            Chart {
                title: "The CA is down while a fleet with certificates of 24 h, started at once, renews for the first time",
                x: "minutes from half of the lifetime",
                y: PER_SECOND,
                scale: Scale::Linear,
                outage: Some((-5.0, 5.0)),
                curves: vec![block(DENSE_BLOCK, "--grace-jitter 0.01"), block(BLOCK, "--grace-jitter 0.1")],
            },
        ),
        (
            "outage-1h",
            Chart {
                title: "The CA of a fleet with certificates of 1 h comes back",
                x: "minutes after its return",
                y: PER_SECOND,
                scale: Scale::Logarithmic,
                outage: Some((-4.0, 0.0)),
                curves: vec![short(SHORT_10, "down for 10 min", 10), short(SHORT_35, "35 min", 35)],
            },
        ),
        (
            "renewals",
            Chart {
                title: "Three days of renewals after all agents started at once",
                x: "hours after the start",
                y: PER_SECOND,
                scale: Scale::Linear,
                outage: None,
                curves: vec![days(DENSE, "--grace-jitter 0.01"), days(AT_ONCE, "--grace-jitter 0.1")],
            },
        ),
    ];
    for (name, chart) in charts {
        let path = format!("{}/docs/fleet-{name}.svg", env!("CARGO_MANIFEST_DIR"));
        std::fs::write(path, chart.svg()).unwrap();
    }
}
