//! A program that does not speak SDS uses the agent's files: nginx, reloaded by the hook after each swap.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use attache::pki::key::PrivateKey;
use attache::pki::pem;
use tokio::time::{sleep, timeout};

use crate::support::files::{Mounted, swap};
use crate::support::nginx::{Client, Nginx};
use crate::support::process::{Agent, PATIENCE};

const SWAPS: usize = 1000;
/// A single one, which pauses for 100 ms after each reload, would take minutes. So several are reloaded in turn.
const NGINXES: usize = 4;

/// A client's observations.
#[derive(Debug, Default)]
struct Seen {
    answers: usize,
    sets: BTreeMap<usize, usize>,
    wrong: Vec<String>,
}

/// Sets from two CAs in turn, so that no two consecutive sets have a part in common.
fn sets(directory: &Path) -> Vec<Mounted> {
    (0..50).map(|number| Mounted::new(&directory.join(format!("ca{}", number % 2)), "web")).collect()
}

#[tokio::test]
async fn nginx_never_sees_a_mixed_set_in_a_thousand_swaps() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let sets = sets(directory);
    let (certs, out) = (directory.join("certs"), directory.join("out"));
    std::fs::create_dir(&certs).unwrap();
    swap(&certs, sets[0].files());
    sets[0].write(&out);
    let mut all = Vec::new();
    // Each swap reloads one nginx, which has to find a whole set at that moment.
    let mut hook = format!("cd '{}' && turn=$(cat turn) && case $turn in", directory.display());
    for number in 0..NGINXES {
        let nginx = Nginx::start(directory, &format!("nginx{number}"), &out).await;
        hook += &format!(" {number}) {};;", nginx.reload);
        all.push(nginx);
    }
    hook += &format!(" esac && echo $(((turn + 1) % {NGINXES})) > turn");
    std::fs::write(directory.join("turn"), "0").unwrap();
    let options = [
        ["--cert-dir", certs.to_str().unwrap()],
        ["--file-debounce", "0ms"],
        ["--output-dir", out.to_str().unwrap()],
        ["--output-hook", &hook],
    ];
    let mut agent = Agent::start(directory, "agent", &options.concat());
    agent.process.wait_log("files written").await;

    // Each handshake proves that nginx has the key of its certificate, each answer that it has the roots of the same set.
    let leaves: Vec<_> = sets.iter().map(|set| pem::certificates(&set.chain).unwrap().remove(0)).collect();
    let client = Mounted::new(&directory.join("ca0"), "client");
    let key = PrivateKey::from_pem(&client.key).unwrap();
    let client = Client::new(pem::certificates(&client.chain).unwrap(), key.der().clone_key());
    let stop = Arc::new(AtomicBool::new(false));
    let traffic = tokio::spawn({
        let stop = Arc::clone(&stop);
        let sockets: Vec<_> = all.iter().map(|nginx| nginx.socket.clone()).collect();
        async move {
            let mut seen = Seen::default();
            for socket in sockets.iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                // Leaves most of the machine's time to the swaps.
                sleep(Duration::from_millis(5)).await;
                match client.ask(socket).await {
                    Ok((leaf, answer)) => {
                        seen.answers += 1;
                        let set = leaves.iter().position(|known| *known == leaf);
                        let is_trusted = set.is_some_and(|set| set % 2 == 0);
                        match set {
                            Some(set) if is_trusted == (answer == "SUCCESS") => {
                                *seen.sets.entry(set).or_default() += 1;
                            }
                            _ => seen.wrong.push(format!("set {set:?} with the answer {answer:?}")),
                        }
                    }
                    Err(error) => seen.wrong.push(format!("{error:#}")),
                }
            }
            seen
        }
    });

    // Each change comes while the hook of the previous one is still running.
    let started = std::time::Instant::now();
    let mut current = std::fs::read_link(out.join("..data")).unwrap();
    for generation in 1..=SWAPS {
        swap(&certs, sets[generation % sets.len()].files());
        let swapped = timeout(PATIENCE, async {
            loop {
                let now = std::fs::read_link(out.join("..data")).unwrap();
                if now != current {
                    return now;
                }
                sleep(Duration::from_millis(1)).await;
            }
        });
        current = swapped.await.unwrap_or_else(|_| panic!("swap {generation}:\n{}", agent.process.log()));
        let _ = std::fs::remove_dir_all(certs.join(format!("..generation-{}", generation - 1)));
    }
    let took = started.elapsed();
    let runs = "attache_output_hooks_total{outcome=\"ok\"}";
    while agent.metric(runs).await <= SWAPS as f64 {
        assert_eq!(agent.process.count("output hook failed"), 0, "{}", agent.process.log());
        sleep(Duration::from_millis(10)).await;
    }
    stop.store(true, Ordering::Relaxed);
    let seen = traffic.await.unwrap();
    println!("{SWAPS} swaps in {took:?}, {} handshakes, {} sets seen", seen.answers, seen.sets.len());

    let errors: Vec<_> = all.iter().flat_map(Nginx::errors).collect();
    assert!(seen.wrong.is_empty(), "{:#?}\n{errors:#?}", seen.wrong);
    assert_eq!(errors, [""; 0]);
    assert!(all.iter_mut().all(Nginx::is_running));
    assert!(all.iter().map(Nginx::reloads).sum::<usize>() > SWAPS);
    assert_eq!(seen.sets.len(), sets.len(), "{:?}", seen.sets);
    assert!(seen.answers > SWAPS, "only {} handshakes", seen.answers);
    assert_eq!(agent.metric(runs).await, (SWAPS + 1) as f64, "one run for each swap");
    assert_eq!(agent.process.count("output hook failed"), 0, "{}", agent.process.log());
}
