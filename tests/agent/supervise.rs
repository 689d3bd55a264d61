//! A program that the agent keeps running: every rule, with a program that speaks Envoy's conventions.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::support::process::{Agent, failure, output, strs};
use crate::support::wait::wait_until;

/// An agent with the fake Envoy, and its directory.
struct Supervised {
    agent: Agent,
    control: PathBuf,
    _directory: tempfile::TempDir,
}

fn fake() -> String {
    format!("{}/tests/agent/support/fake_envoy.py", env!("CARGO_MANIFEST_DIR"))
}

/// The options of an agent with a CA of its own.
fn embedded(directory: &Path) -> Vec<String> {
    vec!["--ca".into(), "embedded".into(), "--ca-dir".into(), directory.join("ca").display().to_string()]
}

impl Supervised {
    /// Starts it. `prepare` changes the directory of the fake Envoy.
    fn start(options: &[&str], prepare: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control");
        std::fs::create_dir(&control).unwrap();
        std::fs::write(control.join("journal"), "").unwrap();
        std::fs::write(directory.path().join("envoy.yaml"), "first").unwrap();
        prepare(&control);
        let watched = directory.path().join("envoy.yaml").display().to_string();
        let mut all = embedded(directory.path());
        all.extend(["--restart-on", &watched].map(str::to_owned));
        if !options.contains(&"--restart-debounce") {
            all.extend(["--restart-debounce", "50ms"].map(str::to_owned));
        }
        if !options.contains(&"--no-hot-restart") {
            all.extend(["--drain-time", "1s"].map(str::to_owned));
        }
        all.extend(options.iter().map(|&option| option.to_owned()));
        all.extend(["--".to_owned(), "python3".to_owned(), fake(), control.display().to_string()]);
        // Its shared memory would be that of this Envoy.
        all.extend(["--base-id".to_owned(), "4294000".to_owned()]);
        let agent = Agent::start(directory.path(), "a", &strs(&all));
        Self { agent, control, _directory: directory }
    }

    /// Starts it, and waits until the first epoch is live.
    async fn live(options: &[&str]) -> Self {
        let mut started = Self::start(options, |_| {});
        started.agent.process.wait_log("command live").await;
        started
    }

    fn journal(&self) -> Vec<String> {
        let journal = std::fs::read_to_string(self.control.join("journal")).unwrap();
        // Without process IDs.
        journal.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect()
    }

    async fn wait_journal(&self, line: &str, times: usize) {
        let what = format!("the journal has {line:?} {times} times");
        wait_until(&what, || self.journal().iter().filter(|it| *it == line).count() >= times).await;
    }

    /// The process of the newest start.
    fn pid(&self) -> Pid {
        let journal = std::fs::read_to_string(self.control.join("journal")).unwrap();
        let start = journal.lines().rev().find_map(|line| line.strip_prefix("start ")).unwrap();
        Pid::from_raw(start.split(' ').next_back().unwrap().parse().unwrap()).unwrap()
    }

    fn set(&self, name: &str, content: &str) {
        std::fs::write(self.control.join(name), content).unwrap();
    }

    fn unset(&self, name: &str) {
        std::fs::remove_file(self.control.join(name)).unwrap();
    }

    fn change(&self, content: &str) {
        std::fs::write(self.control.parent().unwrap().join("envoy.yaml"), content).unwrap();
    }

    async fn status(&self) -> Value {
        let socket = self.agent.socket.display().to_string();
        let output = output(&["status", "--output", "json", "--socket", &socket]).await;
        serde_json::from_slice(&output.stdout).unwrap()
    }

    async fn stopped(&mut self) -> Option<i32> {
        self.agent.process.signal(Signal::TERM);
        self.agent.process.ended().await.code()
    }
}

#[tokio::test]
async fn the_program_starts_once_the_secrets_are_there_and_the_agent_is_ready_once_it_is_live() {
    let mut started = Supervised::start(&[], |control| std::fs::write(control.join("slow"), "3").unwrap());
    started.agent.process.wait_log("command started").await;
    assert!(started.agent.process.log().contains("certificate issued"));
    let (status, body) = started.agent.status("/readyz").await;
    assert_eq!((status, body.as_str()), (503, "command: python3 is starting\n"));
    started.agent.process.wait_log("ready after_ms").await;
    let (status, _) = started.agent.status("/readyz").await;
    assert_eq!(status, 200);
    assert_eq!(started.agent.metric("attache_command_live").await, 1.0);
    assert_eq!(started.stopped().await, Some(0));
    let files: Vec<_> = std::fs::read_dir(started.control.parent().unwrap()).unwrap().flatten().collect();
    let left = files.iter().find(|it| it.file_name().to_string_lossy().contains("envoy-admin"));
    assert!(left.is_none(), "{left:?}");
}

#[tokio::test]
async fn a_program_that_has_waited_long_enough_starts_without_the_secrets_and_the_log_names_them() {
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token").display().to_string();
    let (_, all) =
        ((), ["--ca-address", "http://127.0.0.1:1", "--token-file", &token, "--spiffe-id", "spiffe://td/a"]);
    let mut all = all.to_vec();
    all.extend(["--wait-timeout", "200ms", "--no-hot-restart", "--", "sleep", "1000"]);
    let mut agent = Agent::start(directory.path(), "a", &all);
    let (_, line) = agent.process.wait_log("command is started without secrets").await;
    assert!(line.contains("default: "), "{line}");
    agent.process.wait_log("command live").await;
    let (status, body) = agent.status("/readyz").await;
    assert!(status == 503 && !body.contains("command"), "{body}");
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn the_agent_exits_with_the_programs_status_once_the_budget_is_spent() {
    let directory = tempfile::tempdir().unwrap();
    for (script, budget, expected, starts) in
        [("exit 7", "1", 7, 2), ("kill -9 $$", "0", 137, 1), ("exit 0", "10", 0, 1)]
    {
        let mut all = embedded(directory.path());
        all.extend(
            ["--restart-budget", budget, "--no-hot-restart", "--", "sh", "-c", script].map(str::to_owned),
        );
        let mut agent = Agent::start(directory.path(), "a", &strs(&all));
        assert_eq!(agent.process.ended().await.code(), Some(expected), "{script}: {}", agent.process.log());
        agent.process.wait_log("stopped").await;
        assert_eq!(agent.process.count("command started"), starts, "{script}");
        assert_eq!(agent.process.count("--restart-budget is spent"), usize::from(expected != 0), "{script}");
    }
    let mut all = embedded(directory.path());
    all.extend(["--no-hot-restart", "--", "/nowhere/program"].map(str::to_owned));
    let mut agent = Agent::start(directory.path(), "a", &strs(&all));
    assert_eq!(agent.process.ended().await.code(), Some(127));
    agent.process.wait_log("starting /nowhere/program failed: No such file").await;
    assert_eq!(agent.process.count("command started"), 1);
}

#[tokio::test]
async fn a_configuration_that_is_refused_at_the_first_start_ends_the_agent_with_envoys_words_and_without_a_loop()
 {
    let mut started = Supervised::start(&[], |control| std::fs::write(control.join("refuse"), "").unwrap());
    assert_eq!(started.agent.process.ended().await.code(), Some(1));
    started.agent.process.wait_log("no such field: 'wrong'").await;
    assert_eq!(started.journal(), ["start 0", "failed 0", "validate"]);
}

#[tokio::test]
async fn a_program_that_crashes_is_started_again_and_readiness_says_so_meanwhile() {
    let mut started = Supervised::live(&[]).await;
    started.agent.process.wait_log("ready after_ms").await;
    for crashes in 1..=2 {
        kill_process(started.pid(), Signal::KILL).unwrap();
        started.agent.process.wait_log_times("no longer ready", crashes).await;
        started.agent.process.wait_log_times("ready again", crashes).await;
    }
    assert_eq!(started.journal(), ["start 0", "live 0", "start 0", "live 0", "start 0", "live 0"]);
    let command = started.status().await["command"].clone();
    assert_eq!((&command["restarts"]["crash"], &command["state"]), (&2.into(), &"live".into()), "{command}");
    assert_eq!(command["last_exit"]["reason"], "signal 9");
    assert_eq!(started.stopped().await, Some(0));
}

#[tokio::test]
async fn a_burst_of_changes_is_one_restart_and_equal_bytes_are_none() {
    let mut started = Supervised::live(&["--restart-debounce", "700ms"]).await;
    for content in ["1", "2", "3", "second"] {
        started.change(content);
    }
    started.wait_journal("drained 0", 1).await;
    started.change("second");
    // Longer than a debounce.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let log = started.agent.process.log();
    assert_eq!(log.matches("command started").count(), 2, "{log}");
    started.change("third");
    started.wait_journal("drained 1", 1).await;
    let expected = [
        "start 0",
        "live 0",
        "validate",
        "start 1",
        "live 1",
        "drained 0",
        "validate",
        "start 2",
        "live 2",
        "drained 1",
    ];
    assert_eq!(started.journal(), expected);
    assert_eq!(started.agent.metric("attache_command_restarts_total{reason=\"files\"}").await, 2.0);
    assert_eq!(started.stopped().await, Some(0));
}

#[tokio::test]
async fn a_kubelets_swap_of_a_mounted_directory_is_one_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mounted = directory.path().join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    let swap = |generation: &str, files: [(&str, &str); 2]| {
        std::fs::create_dir(mounted.join(generation)).unwrap();
        for (name, content) in files {
            std::fs::write(mounted.join(generation).join(name), content).unwrap();
        }
        symlink(generation, mounted.join("..data_tmp")).unwrap();
        std::fs::rename(mounted.join("..data_tmp"), mounted.join("..data")).unwrap();
    };
    swap("..1", [("a", "1"), ("b", "1")]);
    for name in ["a", "b"] {
        symlink(format!("..data/{name}"), mounted.join(name)).unwrap();
    }
    let path = mounted.display().to_string();
    let mut started = Supervised::live(&["--restart-on", &path]).await;
    swap("..2", [("a", "2"), ("b", "2")]);
    std::fs::remove_dir_all(mounted.join("..1")).unwrap();
    started.wait_journal("drained 0", 1).await;
    // A file that is new in the directory counts, too.
    std::fs::write(mounted.join("c"), "1").unwrap();
    started.wait_journal("drained 1", 1).await;
    assert_eq!(started.agent.process.count("command started"), 3);
    assert_eq!(started.stopped().await, Some(0));
}

#[tokio::test]
async fn a_configuration_that_is_refused_later_leaves_the_old_epoch_serving_and_later_epochs_possible() {
    let mut started = Supervised::live(&[]).await;
    started.agent.process.wait_log("ready after_ms").await;
    started.set("refuse", "");
    started.change("wrong");
    let (_, line) = started.agent.process.wait_log("new configuration refused").await;
    assert!(line.contains("no such field: 'wrong'"), "{line}");
    let (status, _) = started.agent.status("/readyz").await;
    assert_eq!((status, started.journal().last().map(String::as_str)), (200, Some("validate")));
    let command = started.status().await["command"].clone();
    assert!(command["error"].as_str().unwrap().contains("no such field"), "{command}");
    assert_eq!(started.agent.metric("attache_command_restart_failing").await, 1.0);
    // Repaired elsewhere: SIGHUP has it tried again.
    started.unset("refuse");
    started.agent.process.signal(Signal::HUP);
    started.wait_journal("live 1", 1).await;
    started.agent.wait_metric("attache_command_restart_failing", 0).await;
    assert_eq!(started.stopped().await, Some(0));
}

#[tokio::test]
async fn a_new_epoch_that_fails_late_leaves_the_old_one_serving_and_the_next_change_is_tried() {
    let mut started = Supervised::live(&[]).await;
    started.set("fail", "3");
    started.change("wrong");
    let (_, line) = started.agent.process.wait_log("new epoch failed, the old one serves on").await;
    assert!(line.contains("exit status 3"), "{line}");
    started.unset("fail");
    // The fake Envoy has no shared memory: the next restart stops the old one first.
    started.agent.process.wait_log("hot restart not possible until Envoy is stopped").await;
    started.change("right");
    started.wait_journal("live 0", 2).await;
    assert_eq!(started.stopped().await, Some(0));
}

#[tokio::test]
async fn a_stop_waits_for_connections_and_a_second_signal_hurries() {
    let mut started = Supervised::live(&["--drain-timeout", "50s"]).await;
    started.set("connections", "2");
    started.agent.process.signal(Signal::TERM);
    started.wait_journal("POST /drain_listeners?graceful", 1).await;
    assert_eq!(started.journal()[2..], ["POST /healthcheck/fail", "POST /drain_listeners?graceful"]);
    let (status, body) = started.agent.status("/readyz").await;
    assert_eq!((status, body.as_str()), (503, "command: python3 is stopping\n"));
    started.set("connections", "0");
    assert_eq!(started.agent.process.ended().await.code(), Some(0));
    assert_eq!(started.journal().last().map(String::as_str), Some("term 0"));

    let mut started = Supervised::live(&["--drain-timeout", "50s"]).await;
    started.set("connections", "2");
    started.agent.process.signal(Signal::TERM);
    started.wait_journal("POST /drain_listeners?graceful", 1).await;
    let begun = Instant::now();
    started.agent.process.signal(Signal::TERM);
    assert_eq!(started.agent.process.ended().await.code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[tokio::test]
async fn connections_that_stay_are_cut_after_the_drain_timeout_and_the_log_says_how_many() {
    let mut started = Supervised::live(&["--drain-timeout", "4s"]).await;
    started.set("connections", "2");
    assert_eq!(started.stopped().await, Some(0));
    let (_, line) = started.agent.process.wait_log("drain timeout exceeded").await;
    assert!(line.contains("connections=2"), "{line}");
}

#[tokio::test]
async fn without_hot_restart_any_program_is_stopped_before_it_is_started_again() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, watched) = (directory.path().join("journal"), directory.path().join("watched"));
    std::fs::write(&watched, "1").unwrap();
    let script = format!(
        "echo start >>{0}; trap 'echo term >>{0}; exit 0' TERM; trap 'echo hup >>{0}' HUP; while :; do sleep 0.02; done",
        journal.display()
    );
    let mut all = embedded(directory.path());
    let watched_path = watched.display().to_string();
    all.extend(
        ["--no-hot-restart", "--restart-on", &watched_path, "--", "sh", "-c", &script].map(str::to_owned),
    );
    let mut agent = Agent::start(directory.path(), "a", &strs(&all));
    agent.process.wait_log("command live").await;
    let read = || std::fs::read_to_string(&journal).unwrap_or_default();
    agent.process.signal(Signal::HUP);
    wait_until("the program gets SIGHUP", || read().contains("hup")).await;
    // Not handled by the program: it is not passed on.
    agent.process.signal(Signal::USR1);
    agent.process.signal(Signal::USR2);
    agent.process.wait_log("status requested").await;
    std::fs::write(&watched, "2").unwrap();
    agent.process.wait_log_times("command live", 2).await;
    assert_eq!(read(), "start\nhup\nterm\nstart\n");
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    assert_eq!(read(), "start\nhup\nterm\nstart\nterm\n");
}

#[tokio::test]
async fn envoy_gets_the_signal_to_open_its_log_files_again() {
    let started = Supervised::live(&[]).await;
    started.agent.process.signal(Signal::USR1);
    started.wait_journal("usr1 0", 1).await;
}

#[tokio::test]
async fn the_program_inherits_nothing_of_the_agents_own() {
    let directory = tempfile::tempdir().unwrap();
    let seen = directory.path().join("seen");
    let script = format!("env >{0}; ulimit -S -n >>{0}; ps -o pgid= -p $$ >>{0}", seen.display());
    let all = ["--no-hot-restart", "--", "sh", "-c", &script];
    let mut agent = Agent::start_as(directory.path(), "a", &all, |command| {
        let command = command.into_std();
        let mut shell = tokio::process::Command::new("sh");
        shell
            .args(["-c", "ulimit -S -n 777; exec \"$@\"", "sh"])
            .arg(command.get_program())
            .args(command.get_args());
        shell.env_clear().env("ATTACHE_CA", "embedded").env("ATTACHE_CA_DIR", directory.path().join("ca"));
        shell.env("CA_HEADER_authorization", "s3cret").env("KEPT", "yes").kill_on_drop(true);
        shell
    });
    assert_eq!(agent.process.ended().await.code(), Some(0), "{}", agent.process.log());
    let seen = std::fs::read_to_string(seen).unwrap();
    assert!(seen.contains("KEPT=yes") && seen.contains("\n777\n"), "{seen}");
    assert!(!seen.contains("ATTACHE_") && !seen.contains("CA_HEADER"), "{seen}");
}

#[tokio::test]
async fn the_program_ends_with_an_agent_that_is_killed() {
    let mut started = Supervised::live(&[]).await;
    let pid = started.pid();
    started.agent.process.kill().await;
    wait_until("the program is gone", || test_kill_process(pid).is_err()).await;
    assert_eq!(started.journal().last().map(String::as_str), Some("term 0"));
}

#[tokio::test]
async fn lines_of_the_program_are_json_in_a_log_of_json() {
    let mut started = Supervised::live(&["--log-format", "json"]).await;
    started.agent.process.wait_log("epoch 0 serves").await;
    started.set("word", "a last word");
    assert_eq!(started.stopped().await, Some(0));
    let log = started.agent.process.log();
    assert!(log.contains("a last word"), "{log}");
    let lines =
        log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{line}")));
    let of_program = lines.into_iter().find(|line| line["message"] == "epoch 0 serves").unwrap();
    assert_eq!((&of_program["program"], &of_program["level"]), (&"python3".into(), &"INFO".into()));
}

#[tokio::test]
async fn mistakes_about_the_program_are_in_the_one_report() {
    let (code, report) = failure(&["run", "--ca", "embedded", "--"]).await;
    assert!(code == 2 && report.contains("nothing stands behind --"), "{report}");
    let (code, report) = failure(&[
        "run",
        "--ca",
        "embedded",
        "--restart-on",
        "/a",
        "--no-hot-restart",
        "--restart-budget",
        "1",
        "--drain-time",
        "1s",
        "--wait-timeout",
        "1s",
        "--restart-debounce",
        "1s",
        "--cert-ttl",
        "soon",
    ])
    .await;
    assert_eq!((code, report.matches("without a COMMAND").count()), (2, 6), "{report}");
    assert!(report.contains("8 mistakes") || report.contains("7 mistakes"), "{report}");
    let (code, report) = failure(&[
        "run",
        "--ca",
        "embedded",
        "--landlock",
        "--drain-time",
        "1500ms",
        "--restart-debounce",
        "0s",
        "--restart-budget",
        "x",
        "--",
        "envoy",
        "--restart-epoch",
        "1",
        "--mode",
        "validate",
    ])
    .await;
    assert_eq!(code, 2);
    for words in [
        "--landlock and the COMMAND behind -- contradict each other",
        "not a whole number of seconds",
        "is too short: 10ms is the least",
        "\"x\" is not a number of restarts",
        "the agent numbers the epochs",
        "keeps an Envoy running that serves",
    ] {
        assert!(report.contains(words), "{words}:\n{report}");
    }
    let (_, report) =
        failure(&["run", "--ca", "embedded", "--drain-time", "1s", "--", "envoy", "--drain-time-s", "2"])
            .await;
    assert!(report.contains("contradict each other"), "{report}");
    let (code, report) = failure(&["inject", "--image", "a", "--", "--ca", "embedded", "--", "envoy"]).await;
    assert!(code == 2 && report.contains("keeps no COMMAND running"), "{report}");
}

/// The children of a process that have ended and were not waited for.
fn zombies(parent: &str) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = processes.filter_map(|it| std::fs::read_to_string(it.path().join("stat")).ok());
    let is_zombie = |stat: &String| {
        let (_, behind) = stat.rsplit_once(") ").unwrap();
        behind.starts_with(&format!("Z {parent} "))
    };
    stats.filter(is_zombie).count()
}

/// The only child of a process.
fn child_of(pid: &str) -> String {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().to_owned()
}

#[tokio::test]
async fn the_agent_leaves_no_zombies_as_process_1_and_as_any_other_one() {
    // Orphans that end at once, and hooks of the agent, whose exit status must not get lost.
    const SCRIPT: &str = "for i in 1 2 3 4 5; do (sh -c 'sleep 0.2 &' &); done; exec sleep 1000";
    for is_process_1 in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let mut all = embedded(directory.path());
        let out = directory.path().join("out").display().to_string();
        let hook = ["--output-dir", &out, "--output-hook", "(sleep 0.1 &) ; exit 0"];
        all.extend(
            hook.iter().chain(&["--no-hot-restart", "--", "sh", "-c", SCRIPT]).map(|&it| it.to_owned()),
        );
        let mut agent = Agent::start_as(directory.path(), "a", &strs(&all), |command| {
            let command = command.into_std();
            let namespace: &[&str] =
                if is_process_1 { &["-Urpf", "--mount-proc", "--kill-child"] } else { &["-U"] };
            let mut unshare = tokio::process::Command::new("unshare");
            unshare.args(namespace).arg(command.get_program()).args(command.get_args());
            unshare.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").kill_on_drop(true);
            unshare
        });
        agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
        agent.process.wait_log("command live").await;
        let started = agent.process.pid().as_raw_nonzero().to_string();
        let pid = if is_process_1 { child_of(&started) } else { started };
        wait_until("no zombie is left", || zombies(&pid) == 0).await;
        // The orphans were its own: what is left is the program alone.
        wait_until("only the program is left", || !child_of(&pid).contains(' ')).await;
        agent.process.signal(Signal::TERM);
    }
}
