//! The costs of an outage of hours: the whole agent, in a process of its own, in a runtime whose timers don't wait.
//! Each attempt is a real one, with a key, a token and a refused connection; only the time in between is skipped.

use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use attache::agent::{RequestSignals, Requests};
use attache::config::{Config, Environment, RunArgs};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::process::field;

/// The argument that makes this program become that process.
const FLAG: &str = "--outage";
const MINUTE: Duration = Duration::from_secs(60);
/// When it is measured, after the start.
const AFTER: [(&str, Duration); 4] = [
    ("1 min", MINUTE),
    ("1 h", MINUTE.saturating_mul(60)),
    ("3 h", MINUTE.saturating_mul(180)),
    ("10 h", MINUTE.saturating_mul(600)),
];

/// Prints the table; its files are in `dir`.
pub(crate) fn print(dir: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.arg(FLAG).arg(dir).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    println!("\n{}", String::from_utf8(output.stdout).unwrap().trim_end());
}

/// In the process that `print` has started: runs the agent, and exits.
pub(crate) fn run_if_child() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().as_deref() != Some(OsStr::new(FLAG)) {
        return;
    }
    let dir = arguments.next().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.unwrap().block_on(run(Path::new(&dir)));
    std::process::exit(0);
}

async fn run(dir: &Path) {
    let unused = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let file = |name: &str| Some(dir.join(name).display().to_string());
    let status = unused();
    let args = RunArgs {
        socket: file("outage.socket").into_iter().collect(),
        ca_address: vec![unused().to_string()],
        ca_root: file("tls-ca/root-cert.pem"),
        token_file: file("token"),
        cert_dir: file("no-certs"),
        status_address: Some(status.to_string()),
        ..RunArgs::default()
    };
    let config = Config::new(&args, &Environment::new()).unwrap();
    let log = attache::ops::telemetry::init(&config.log);
    let requests = Requests {
        signals: RequestSignals::new().unwrap(),
        load: Arc::new(move || Config::new(&args, &Environment::new()).map(Into::into)),
        table: |_, _| String::new(),
    };
    let agent = attache::agent::run(config, log, attache::os::systemd::Started::default(), requests);
    let watched = async {
        let mut looks = Vec::new();
        let mut last = Duration::ZERO;
        for (_, after) in AFTER {
            tokio::time::sleep(after - last).await;
            last = after;
            looks.push((attempts(status).await, anonymous()));
        }
        looks
    };
    let looks = tokio::select! {
        ended = agent => panic!("{ended:?}"),
        looks = watched => looks,
    };
    let row = |name: &str, values: Vec<String>| {
        let values: Vec<_> = values.iter().map(|value| format!("{value:>9}")).collect();
        println!("| {name:<46} | {} |", values.join(" | "));
    };
    row("a CA that refuses connections, for", AFTER.map(|(name, _)| name.to_owned()).to_vec());
    println!("|{:-<48}|{}", "", format!("{:->10}:|", "").repeat(AFTER.len()));
    row("attempts", looks.iter().map(|(attempts, _)| attempts.to_string()).collect());
    row("memory, anonymous", looks.iter().map(|(_, memory)| format!("{memory} kB")).collect());
}

/// This process's anonymous memory.
fn anonymous() -> u64 {
    field(&std::fs::read_to_string("/proc/self/status").unwrap(), "RssAnon:").unwrap()
}

/// The number of calls to the CA, of any outcome.
async fn attempts(status: SocketAddr) -> u64 {
    let mut stream = TcpStream::connect(status).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).await.unwrap();
    let calls = page.lines().filter(|line| line.starts_with("attache_ca_requests_total{"));
    calls.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}
