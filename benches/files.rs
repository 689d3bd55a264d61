//! Mounted files: what a swap like the kubelet's costs, how soon a change of each kind reaches an open stream, and the
//! costs of watching files that do not change. Prints three tables; `cargo bench --bench files -- swap` the first one.
//!
//! `PILOT_AGENT` names Istio's agent, which gets a row of its own. System calls are counted by strace, in further swaps,
//! whose time does not count.
//!
//! The agent is the release binary; `ATTACHE` selects another. A change is timed from just before the step that
//! completes it, for `default` and for a `file-cert:` name. Changes are further apart than the agent's debounce window.
//!
//! While nothing changes the agent must sleep. Changes by other processes in the parent directories of the files wake
//! it, so the directory for temporary files should be a quiet one; `TMPDIR` selects another. PSS and watches are
//! visible only to root.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program of its own: it prints, sleeps, and panics where it can't go on"
)]

#[expect(dead_code, reason = "the parts for many streams are not needed here")]
mod load;
mod process;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinHandle;

use crate::load::{Call, Connection, Protocol};
use crate::process::{Process, field, release_binary};

/// Swaps that are timed, and swaps whose system calls are counted.
const SWAPS: usize = 200;
const TRACED: usize = 50;
/// Changes of each kind.
const CHANGES: usize = 50;
/// Fewer where the agent polls every two seconds.
const POLLED_CHANGES: usize = 10;
const POLL: Duration = Duration::from_secs(2);
/// From one push to the next change: longer than the debounce window of 100 ms.
const APART: Duration = Duration::from_millis(130);
/// After this time, files that don't match no longer count as an incomplete change.
const SETTLED: Duration = Duration::from_millis(250);
/// The target for an atomic swap at the median.
const BAR: &str = "5 ms";
/// The numbers of names that are watched while nothing happens.
const WATCHED: [usize; 3] = [1, 100, 1_000];
const SETTLE: Duration = Duration::from_secs(3);
const IDLE: Duration = Duration::from_secs(30);

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let bench = Bench::new(dir.path());
        bench.swaps().await;
        if !std::env::args().any(|argument| argument == "swap") {
            bench.changes().await;
            bench.idle().await;
        }
    });
}

/// The files of a key pair and its roots.
struct Files {
    chain: Vec<u8>,
    key: Vec<u8>,
    root: Vec<u8>,
}

impl Files {
    fn each(&self) -> [(&'static str, &[u8]); 3] {
        [("cert-chain.pem", &self.chain), ("root-cert.pem", &self.root), ("key.pem", &self.key)]
    }

    fn write(&self, directory: &Path) {
        fs::create_dir_all(directory).unwrap();
        for (name, content) in self.each() {
            fs::write(directory.join(name), content).unwrap();
        }
    }
}

/// A way to change files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Swap,
    SwapAndDelete,
    RenameOver,
    WriteInPlace,
    Repair,
    DirectoryReplaced,
    LinkSwap,
}

impl Way {
    const ALL: [(Self, &'static str); 7] = [
        (Self::Swap, "swap of ..data (kubelet)"),
        (Self::SwapAndDelete, "  with the old directory deleted at once"),
        (Self::LinkSwap, "swap of a link to the directory (CSI)"),
        (Self::DirectoryReplaced, "directory replaced by another"),
        (Self::RenameOver, "files replaced by rename"),
        (Self::WriteInPlace, "three files written in place"),
        (Self::Repair, "the key alone, mismatched before"),
    ];
}

/// A directory that is changed in one way.
struct Mount {
    way: Way,
    /// The directory that the agent reads.
    directory: PathBuf,
    /// A sibling: the target of its links, and what replaces it.
    aside: PathBuf,
    number: usize,
}

impl Mount {
    fn new(way: Way, directory: PathBuf, files: &Files) -> Self {
        let aside = directory.with_extension("aside");
        fs::create_dir_all(&aside).unwrap();
        match way {
            Way::Swap | Way::SwapAndDelete => {
                files.write(&directory.join("..0"));
                symlink("..0", directory.join("..data")).unwrap();
                for (name, _) in files.each() {
                    symlink(Path::new("..data").join(name), directory.join(name)).unwrap();
                }
            }
            Way::LinkSwap => {
                files.write(&aside.join("0"));
                symlink(aside.join("0"), &directory).unwrap();
            }
            Way::DirectoryReplaced | Way::RenameOver | Way::WriteInPlace | Way::Repair => {
                files.write(&directory)
            }
        }
        Self { way, directory, aside, number: 0 }
    }

    /// Changes the directory's content to `files`. Returns the moment before the last step.
    async fn change(&mut self, files: &Files) -> Instant {
        self.number += 1;
        let (directory, aside) = (&self.directory, &self.aside);
        let began;
        match self.way {
            Way::Swap | Way::SwapAndDelete => {
                let old = directory.join(fs::read_link(directory.join("..data")).unwrap());
                let name = format!("..{}", self.number);
                files.write(&directory.join(&name));
                symlink(name, directory.join("..data_tmp")).unwrap();
                began = Instant::now();
                fs::rename(directory.join("..data_tmp"), directory.join("..data")).unwrap();
                if self.way == Way::SwapAndDelete {
                    fs::remove_dir_all(old).unwrap();
                }
            }
            Way::LinkSwap => {
                let next = aside.join(self.number.to_string());
                files.write(&next);
                symlink(next, aside.join("link")).unwrap();
                began = Instant::now();
                fs::rename(aside.join("link"), directory).unwrap();
            }
            Way::DirectoryReplaced => {
                files.write(&aside.join("next"));
                fs::rename(directory, aside.join(self.number.to_string())).unwrap();
                began = Instant::now();
                fs::rename(aside.join("next"), directory).unwrap();
            }
            Way::RenameOver => {
                files.write(aside);
                for (name, _) in &files.each()[..2] {
                    fs::rename(aside.join(name), directory.join(name)).unwrap();
                }
                began = Instant::now();
                fs::rename(aside.join("key.pem"), directory.join("key.pem")).unwrap();
            }
            Way::WriteInPlace => {
                for (name, content) in &files.each()[..2] {
                    fs::write(directory.join(name), content).unwrap();
                }
                began = Instant::now();
                fs::write(directory.join("key.pem"), &files.key).unwrap();
            }
            Way::Repair => {
                fs::write(directory.join("cert-chain.pem"), &files.chain).unwrap();
                tokio::time::sleep(SETTLED).await;
                began = Instant::now();
                fs::write(directory.join("key.pem"), &files.key).unwrap();
            }
        }
        began
    }
}

/// strace on all threads of a process.
struct Strace {
    child: std::process::Child,
    output: PathBuf,
}

impl Strace {
    /// None where there is no strace, or no right to use it on that process.
    async fn attach(process: &Process, directory: &Path) -> Option<Self> {
        let output = directory.join("strace");
        let mut command = Command::new("strace");
        command.args(["-f", "-q", "-o"]).arg(&output).arg("-p").arg(id(process));
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        // It attaches one thread after the other.
        tokio::time::sleep(Duration::from_secs(1)).await;
        match child.try_wait() {
            Ok(None) => Some(Self { child, output }),
            _ => None,
        }
    }

    /// The number of calls of each thread since then, by its name.
    fn calls(mut self, process: &Process) -> Vec<(String, usize)> {
        let names = threads(process);
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        self.child.wait().unwrap();
        let mut calls = BTreeMap::new();
        for line in fs::read_to_string(&self.output).unwrap().lines() {
            let Some((thread, call)) = line.split_once(' ') else { continue };
            // A call that others interrupt in the output has two lines.
            if !call.contains("resumed>") && !call.trim_start().starts_with(['+', '-']) {
                let name = names.get(thread).cloned().unwrap_or_else(|| thread.to_owned());
                *calls.entry(name).or_default() += 1;
            }
        }
        calls.into_iter().collect()
    }
}

struct Bench {
    binary: PathBuf,
    dir: PathBuf,
    /// Alternating between them makes every change a real one.
    generations: [Files; 2],
}

impl Bench {
    fn new(dir: &Path) -> Self {
        let ca = DevelopmentCa::open(&dir.join("ca"), Clock::system()).unwrap();
        let identity = "spiffe://cluster.local/ns/default/sa/bench".parse().unwrap();
        let generations = [(); 2].map(|()| {
            let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
            let request = csr::request(&key, None, &csr::Names::default()).unwrap();
            let leaf = ca.issue(&request, &identity, Duration::from_secs(24 * 3600)).unwrap();
            let [intermediate, root] = ca.chain();
            Files {
                chain: pem::of_certificates([&leaf, intermediate]),
                key: key.to_private_key().to_pem().to_vec(),
                root: pem::of_certificates([root]),
            }
        });
        Self { binary: release_binary(), dir: dir.to_owned(), generations }
    }

    /// Starts an agent for `directory`, with the command line prefix `before`, and connects to it.
    async fn agent(
        &self,
        name: &str,
        directory: &Path,
        before: &[&str],
    ) -> (Process, Connection, JoinHandle<()>) {
        let socket = self.dir.join(format!("{name}.sock"));
        // A copy, since PSS divides a page by the number of processes that share it.
        let binary = self.dir.join(name);
        fs::copy(&self.binary, &binary).unwrap();
        let line = before.iter().map(Path::new).chain([binary.as_path()]).map(Path::as_os_str);
        let line: Vec<_> = line.collect();
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).args(["run", "--status-address", "none", "--socket"]).arg(&socket);
        command.arg("--cert-dir").arg(directory);
        let process = Process::start(&mut command);
        process.wait_for(" ready ");
        let (connection, end) = Connection::open(&socket).await;
        (process, connection, end)
    }

    async fn swaps(&self) {
        let heading = ["median, ms", "p99, ms", "CPU, ms", "switches", "system calls"];
        let row = |name: &str, cells: [String; 5]| {
            println!("| {name:<24} | {} |", cells.map(|cell| format!("{cell:>12}")).join(" | "));
        };
        println!();
        row("swap of ..data, each", heading.map(str::to_owned));
        println!("|{:-<26}|{}|", "", [(); 5].map(|()| format!("{:->13}:", "")).join("|"));
        let own = Mount::new(Way::Swap, self.dir.join("swap"), &self.generations[0]);
        let (process, connection, end) = self.agent("swap-agent", &own.directory, &[]).await;
        let (costs, threads) = self.swap(&process, &connection, own).await;
        row("attache", costs);
        end.abort();
        if let Some(binary) = std::env::var_os("PILOT_AGENT") {
            let home = self.dir.join("istio");
            let mounted = Mount::new(Way::SwapAndDelete, home.join("etc/certs"), &self.generations[0]);
            let (process, connection, end) = self.pilot_agent(Path::new(&binary), &home).await;
            let (costs, _) = self.swap(&process, &connection, mounted).await;
            row("pilot-agent", costs);
            end.abort();
        }
        println!("\nsystem calls of a swap, by thread: {threads}");
    }

    /// The costs of a swap, and the system calls of each thread.
    async fn swap(
        &self,
        process: &Process,
        connection: &Connection,
        mut mount: Mount,
    ) -> ([String; 5], String) {
        let mut stream = open(connection, "default").await;
        let mut times = Vec::new();
        // The first ones are not yet as all later ones.
        for change in 1..=5 {
            self.timed_swap(&mut mount, &mut stream, change).await;
        }
        let before = (cpu(process), switches(process));
        for change in 6..6 + SWAPS {
            times.push(self.timed_swap(&mut mount, &mut stream, change).await);
        }
        tokio::time::sleep(APART).await;
        let after = (cpu(process), switches(process));
        times.sort_unstable();
        let millis = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
        let each = |total: u64| format!("{:.1}", total as f64 / SWAPS as f64);
        let cpu = (after.0 - before.0) / u32::try_from(SWAPS).unwrap();
        let time = |rank: usize| millis(times[rank]);
        let calls = match Strace::attach(process, &self.dir).await {
            None => Vec::new(),
            Some(strace) => {
                for change in 0..TRACED {
                    self.timed_swap(&mut mount, &mut stream, change).await;
                }
                tokio::time::sleep(APART).await;
                strace.calls(process)
            }
        };
        let total: usize = calls.iter().map(|(_, count)| count).sum();
        let of_each = |count: usize| format!("{:.1}", count as f64 / TRACED as f64);
        let shown = if calls.is_empty() { "no strace".to_owned() } else { of_each(total) };
        let threads: Vec<_> =
            calls.iter().map(|(name, count)| format!("{name} {}", of_each(*count))).collect();
        let costs = [time(SWAPS / 2), time(SWAPS * 99 / 100), millis(cpu), each(after.1 - before.1), shown];
        (costs, threads.join(", "))
    }

    async fn timed_swap(&self, mount: &mut Mount, stream: &mut Call, number: usize) -> Duration {
        tokio::time::sleep(APART).await;
        let began = mount.change(&self.generations[(number + 1) % 2]).await;
        let message = stream.next().await.expect("the stream stays open");
        let time = began.elapsed();
        stream.accept(message);
        time
    }

    /// Starts Istio's agent, whose paths are relative to its working directory, with mounted files and without an Envoy.
    async fn pilot_agent(&self, binary: &Path, home: &Path) -> (Process, Connection, JoinHandle<()>) {
        let mut command = Command::new(binary);
        command.args(["proxy", "sidecar"]).current_dir(home);
        let (process, socket) = {
            let variables = [
                ("FILE_MOUNTED_CERTS", "true"),
                ("DISABLE_ENVOY", "true"),
                ("POD_NAME", "bench"),
                ("POD_NAMESPACE", "default"),
                ("INSTANCE_IP", "127.0.0.1"),
            ];
            let process = Process::start_with(&mut command, &variables);
            (process, home.join("var/run/secrets/workload-spiffe-uds/socket"))
        };
        while tokio::net::UnixStream::connect(&socket).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (connection, end) = Connection::open(&socket).await;
        (process, connection, end)
    }

    async fn changes(&self) {
        let row = |name: &str, cells: [String; 4]| println!("| {name:<40} | {} |", cells.join(" | "));
        let heading = ["default, median", "default, max", "file, median", "file, max"];
        println!();
        row("from a change to its push, ms", heading.map(|text| format!("{text:>15}")));
        println!("|{:-<42}|{}|", "", [(); 4].map(|()| format!("{:->16}:", "")).join("|"));
        for (number, (way, name)) in Way::ALL.into_iter().enumerate() {
            row(name, self.way(number, way, CHANGES, &[]).await);
        }
        // Without inotify, in a user namespace of its own, if the machine allows one.
        let script = "echo 0 >/proc/sys/user/max_inotify_instances && exec \"$0\" \"$@\"";
        let polled = ["unshare", "-Ur", "sh", "-c", script];
        let is_possible = Command::new("unshare").args(["-Ur", "true"]).status().is_ok_and(|it| it.success());
        if is_possible {
            row("swap of ..data, without inotify", self.way(99, Way::Swap, POLLED_CHANGES, &polled).await);
        }
        println!("\n{CHANGES} changes of each kind; target for an atomic swap: {BAR} at the median");
    }

    /// The median and the longest time from a change to its push, for both names.
    async fn way(&self, number: usize, way: Way, changes: usize, before: &[&str]) -> [String; 4] {
        let [own, named] = ["own", "named"].map(|name| {
            let directory = self.dir.join(format!("{number}-{name}"));
            Mount::new(way, directory, &self.generations[0])
        });
        let (_agent, connection, end) = self.agent(&format!("agent-{number}"), &own.directory, before).await;
        let names = ["default".to_owned(), pair_name(&named.directory)];
        let mut cells = Vec::new();
        for (name, mut mount) in names.into_iter().zip([own, named]) {
            let mut stream = open(&connection, &name).await;
            let mut times = Vec::new();
            for change in 1..=changes {
                // At a random moment between two polls.
                let further = if before.is_empty() { Duration::ZERO } else { POLL.mul_f64(fastrand::f64()) };
                tokio::time::sleep(APART + further).await;
                let began = mount.change(&self.generations[change % 2]).await;
                let message = stream.next().await.expect("the stream stays open");
                times.push(began.elapsed());
                stream.accept(message);
            }
            times.sort_unstable();
            let time = |rank: usize| format!("{:>15.2}", times[rank].as_secs_f64() * 1e3);
            cells.extend([time(changes / 2), time(changes - 1)]);
        }
        // Aborted before the agent stops: it would report that as a failure.
        end.abort();
        cells.try_into().unwrap()
    }

    async fn idle(&self) {
        let mut agents = Vec::new();
        for count in WATCHED {
            let own = self.dir.join(format!("idle-{count}"));
            drop(Mount::new(Way::Swap, own.clone(), &self.generations[0]));
            let (process, connection, end) = self.agent(&format!("idle-agent-{count}"), &own, &[]).await;
            let mut streams = Vec::new();
            // `default` is the first; each of the others has a mounted directory of its own.
            streams.push(open(&connection, "default").await);
            for number in 1..count {
                let directory = self.dir.join(format!("idle-{count}-{number}"));
                drop(Mount::new(Way::Swap, directory.clone(), &self.generations[0]));
                streams.push(open(&connection, &pair_name(&directory)).await);
            }
            agents.push((process, streams, end));
        }
        tokio::time::sleep(SETTLE).await;
        let look =
            || agents.iter().map(|(process, ..)| (switches(process), cpu(process))).collect::<Vec<_>>();
        let before = look();
        tokio::time::sleep(IDLE).await;
        let after = look();
        let minutes = IDLE.as_secs_f64() / 60.0;
        let row = |name: &str, cells: Vec<String>| {
            let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:>9}")).collect();
            println!("| {name:<40} | {} |", cells.join(" | "));
        };
        println!();
        row("watched names, one directory each", WATCHED.map(|count| count.to_string()).into());
        println!("|{:-<42}|{}|", "", WATCHED.map(|_| format!("{:->10}:", "")).join("|"));
        let both = || before.iter().zip(&after);
        let wake_ups = both().map(|((before, _), (after, _))| (after - before) as f64 / minutes);
        row("wake-ups in a minute, idle", wake_ups.map(|count| format!("{count:.0}")).collect());
        let cpu = both().map(|((_, before), (_, after))| (*after - *before).as_secs_f64() * 1e3 / minutes);
        row("CPU in a minute, idle, ms", cpu.map(|time| format!("{time:.2}")).collect());
        let of_each = |figure: &dyn Fn(&Process) -> Option<u64>| {
            let cell = |value: Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
            agents.iter().map(|(process, ..)| cell(figure(process))).collect()
        };
        let pss = |process: &Process| field(&process.read("smaps_rollup")?, "Pss:");
        row("memory, proportional (PSS), kB", of_each(&pss));
        row("memory, anonymous, kB", of_each(&|process| Some(process.status("RssAnon:"))));
        row("inotify watches", of_each(&watches));
        for (_, _, end) in &agents {
            end.abort();
        }
    }
}

fn pair_name(directory: &Path) -> String {
    format!("file-cert:{0}/cert-chain.pem~{0}/key.pem", directory.display())
}

/// A stream that has accepted its first response.
async fn open(connection: &Connection, name: &str) -> Call {
    let (mut call, first) = connection.call_for(Protocol::StateOfTheWorld, name.into()).await;
    call.accept(first);
    call
}

/// The number of context switches of all its threads.
fn switches(process: &Process) -> u64 {
    let names = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
    let of_thread = |status: String| names.map(|name| field(&status, name).unwrap()).iter().sum::<u64>();
    process.of_threads("status").map(of_thread).sum()
}

fn id(process: &Process) -> String {
    process.path("").components().nth(2).unwrap().as_os_str().to_str().unwrap().to_owned()
}

/// The names of its threads.
fn threads(process: &Process) -> BTreeMap<String, String> {
    let name = |task: std::io::Result<fs::DirEntry>| {
        let task = task.unwrap();
        let name = fs::read_to_string(task.path().join("comm")).unwrap();
        (task.file_name().into_string().unwrap(), name.trim().to_owned())
    };
    fs::read_dir(process.path("task")).unwrap().map(name).collect()
}

/// CPU time of all its threads, in nanoseconds.
fn cpu(process: &Process) -> Duration {
    let thread = |stat: String| stat.split(' ').next().unwrap().parse::<u64>().unwrap();
    Duration::from_nanos(process.of_threads("schedstat").map(thread).sum())
}

/// The number of its inotify watches; none if that is not visible.
fn watches(process: &Process) -> Option<u64> {
    let descriptors = fs::read_dir(process.path("fdinfo")).ok()?;
    let infos = descriptors.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
    let watches = infos.map(|info| info.lines().filter(|line| line.starts_with("inotify wd:")).count());
    watches.sum::<usize>().try_into().ok()
}
