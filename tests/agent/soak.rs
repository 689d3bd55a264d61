//! Hostile clients, swapped files, failing CAs and dead mounts by turns, beside neighbours that behave well: no request
//! of theirs fails, no renewal is late, and the agent's memory stays flat.
//!
//! | variable | meaning |
//! |---|---|
//! | `ATTACHE` | the static release binary, for which the bounds are tighter; the debug build without it |
//! | `ATTACHE_SOAK` | the length in seconds, 20 without it |
//! | `ATTACHE_SOAK_SEED` | repeats the turns of the run that printed this seed; without both variables it is 1 |
//! | `ATTACHE_SOAK_TURNS` | only these turns, separated by commas |

mod condition;
mod neighbours;
mod record;
mod stage;
mod turns;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::task::LocalSet;
use tokio::time::timeout;

use self::condition::Condition;
use self::neighbours::Neighbours;
use self::record::Record;
use self::stage::{DRAIN, Stage};
use self::turns::Turn;
use crate::support::process::Agent;

/// The length within the ordinary tests.
const SHORT: Duration = Duration::from_secs(20);
/// Far longer than any turn takes: one that has not ended by then hangs.
const TURN_TIME: Duration = Duration::from_secs(120);
/// The same once the run has failed.
const FAILED_TURN_TIME: Duration = Duration::from_secs(15);
/// By then an agent that can exit has exited.
const EXIT: Duration = Duration::from_secs(20);
/// What a busy machine may add to the time of an exit.
const SLACK: Duration = Duration::from_secs(1);

struct Plan {
    length: Duration,
    seed: u64,
    turns: Vec<Turn>,
}

impl Plan {
    fn from_environment() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let number = |name: &str| {
            let value = variable(name)?;
            Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
        };
        let turns = variable("ATTACHE_SOAK_TURNS").map_or(Turn::ALL.to_vec(), |names| {
            let turns = names.split(',').map(|name| {
                let found = Turn::ALL.into_iter().find(|turn| turn.name() == name);
                found.unwrap_or_else(|| panic!("no turn {name:?}; there are {:?}", Turn::ALL.map(Turn::name)))
            });
            turns.collect()
        });
        Self {
            length: number("ATTACHE_SOAK").map_or(SHORT, Duration::from_secs),
            // The short run plays the same turns each time.
            seed: number("ATTACHE_SOAK_SEED").unwrap_or_else(|| match variable("ATTACHE_SOAK") {
                Some(_) => fastrand::u64(..),
                None => 1,
            }),
            turns,
        }
    }

    /// All turns in a random order, one to three at a time; two that disturb the same thing never together.
    fn round(&self, random: &mut fastrand::Rng) -> Vec<Vec<Turn>> {
        let mut left = self.turns.clone();
        random.shuffle(&mut left);
        let mut batches = Vec::new();
        while !left.is_empty() {
            let size = random.usize(1..=3);
            let mut batch: Vec<Turn> = Vec::new();
            left.retain(|turn| {
                let fits = batch.len() < size && batch.iter().all(|other| !turn.excludes(*other));
                if fits {
                    batch.push(*turn);
                }
                !fits
            });
            batches.push(batch);
        }
        batches
    }
}

/// Plays the turns of a batch at the same time, each on a thread of its own: they must not delay the neighbours, which
/// share this one.
async fn play(batch: &[Turn], stage: &Arc<Stage>, random: &mut fastrand::Rng) {
    let threads: Vec<_> = batch
        .iter()
        .map(|turn| {
            let (turn, stage, seed) = (*turn, Arc::clone(stage), random.u64(..));
            let play = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let mut random = fastrand::Rng::with_seed(seed);
                LocalSet::new().block_on(&runtime, turn.play(&stage, &mut random));
                // The connections of a hostile client may never end.
                runtime.shutdown_background();
            };
            (turn, std::thread::Builder::new().name(turn.name().to_owned()).spawn(play).unwrap())
        })
        .collect();
    let begun = Instant::now();
    let time = || if stage.record.has_found() { FAILED_TURN_TIME } else { TURN_TIME };
    for (turn, thread) in threads {
        while !thread.is_finished() && begun.elapsed() < time() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if !thread.is_finished() {
            stage.record.find(format!("the turn {} does not end", turn.name()));
        } else if let Err(panicked) = thread.join() {
            let text = panicked.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panicked.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            stage.record.find(format!("the turn {} failed: {}", turn.name(), text.unwrap_or_default()));
        }
    }
}

/// The agent stops in time although clients hold streams that they don't read, and a file system does not answer.
async fn exits_in_time(stage: &Stage, agent: &mut Agent, is_dead: bool) {
    let _deaf = turns::peers::deaf_client(stage, 20).await;
    let _names = if is_dead { Some(turns::disks::ask_for_dead_names(stage).await) } else { None };
    let begun = Instant::now();
    agent.process.signal(Signal::TERM);
    let Ok(status) = timeout(EXIT, agent.process.ended()).await else {
        return stage.record.find(format!("the agent does not exit within {EXIT:?} after SIGTERM"));
    };
    let took = begun.elapsed();
    if !status.success() {
        stage.record.find(format!("the agent exited with {status} after SIGTERM"));
    }
    if took > DRAIN + Duration::from_secs(1) + SLACK {
        stage.record.find(format!("the agent took {took:?} to exit, with a drain timeout of {DRAIN:?}"));
    }
}

/// Returns the figures of a run that found nothing.
async fn soak(plan: Plan) -> String {
    let record = Record::new(plan.seed);
    let directory = tempfile::tempdir().unwrap();
    let (stage, mut agent) = Stage::start(directory.path(), record.clone()).await;
    let neighbours = Neighbours::start(&stage, &agent).await;
    // What serves the files has started, too.
    neighbours.are_served(&stage).await;
    let mut condition = Condition::new(&stage, &agent).await;
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let mut rounds = 0;
    // The length counts from here: installing and starting Envoy may take long.
    let end = Instant::now() + plan.length;
    while Instant::now() < end {
        for batch in plan.round(&mut random) {
            if Instant::now() >= end {
                break;
            }
            record.begin(batch.iter().map(|turn| turn.name()).collect());
            play(&batch, &stage, &mut random).await;
            if let Some(status) = agent.process.exited() {
                record.find(format!("the agent exited with {status}"));
            }
            neighbours.are_served(&stage).await;
            condition.settles(rounds > 0, agent.process.log().len()).await;
            record.fail_if_found(&agent.process.log());
        }
        rounds += 1;
    }
    record.begin(vec!["the end"]);
    condition.holds().await;
    neighbours.leave(&stage).await;
    if agent.process.count("panicked") != 0 {
        record.find("the agent panicked".to_owned());
    }
    exits_in_time(&stage, &mut agent, plan.turns.iter().any(|turn| turn.mounts())).await;
    record.fail_if_found(&agent.process.log());
    format!("{rounds} rounds; {condition}\nsoak: {record}")
}

#[tokio::test]
async fn neighbours_notice_no_hostile_turn() {
    let plan = Plan::from_environment();
    println!("soak: {} s with ATTACHE_SOAK_SEED={}", plan.length.as_secs(), plan.seed);
    let figures = LocalSet::new().run_until(soak(plan)).await;
    println!("soak: {figures}");
}
