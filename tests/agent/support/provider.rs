//! The behaviours of every CA provider's fake, and an agent that uses it.

mod cfssl;
mod citadel;
mod embedded;
mod exec;
mod google_cas;
mod kubernetes;
mod vault;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::Path;

use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::time::timeout;

pub use self::embedded::Embedded;
use super::issuer::{LIES, Lie};
use super::process::{Agent, PATIENCE, strs};
use super::proxy::{Line, Proxy};

/// How a CA handles every call from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    Signs,
    /// Refuses, in the provider's own words.
    Refuses,
    /// Never answers.
    Hangs,
    /// Answers with something other than certificates.
    Junk,
    /// Something about the certificate is wrong.
    Lies(Lie),
    /// Connections are refused.
    Down,
    /// Connections are accepted and closed.
    Cut,
    /// Signs slowly.
    Slow,
}

/// The agent's report of a failure.
pub struct ExpectedLog {
    pub words: Vec<&'static str>,
    /// Whether the address is in it, too.
    pub has_address: bool,
    /// Its label in the metrics.
    pub outcome: &'static str,
}

impl ExpectedLog {
    /// Words of a line that names the CA's address, if it has one.
    pub fn new(words: &[&'static str], outcome: &'static str) -> Self {
        Self { words: words.to_vec(), has_address: true, outcome }
    }

    fn without_address(self) -> Self {
        Self { has_address: false, ..self }
    }
}

/// The fake of one provider's CA.
pub trait Provider: Sized {
    /// The value of `--ca`.
    const NAME: &'static str;
    /// The lifetime of its certificates, in seconds.
    const LIFETIME: u64 = 60;

    /// Starts it, with its files in `directory`. Its certificates are for `web`, and valid for `lifetime` seconds if the
    /// fake can be configured.
    async fn start(directory: &Path, lifetime: u64) -> Self;

    /// Its address, if it is a server.
    fn address(&self) -> Option<SocketAddr>;

    /// The agent's options for it.
    fn options(&self, directory: &Path) -> Vec<String>;

    /// Sets its behaviour. For a server, those of the network are set elsewhere.
    fn set(&self, behaviour: Behaviour);

    /// The agent's report of `behaviour`, if that is a failure that this CA can have.
    fn expected_log(behaviour: Behaviour) -> Option<ExpectedLog> {
        match behaviour {
            Behaviour::Refuses => Self::refusal(),
            other => common_log(other),
        }
    }

    /// The agent's report of a refusal.
    fn refusal() -> Option<ExpectedLog> {
        None
    }

    /// Whether two calls were ever handled at the same time, if the network does not show that.
    fn has_overlapped(&self) -> bool {
        false
    }
}

/// The report that all servers have in common.
fn common_log(behaviour: Behaviour) -> Option<ExpectedLog> {
    Some(match behaviour {
        Behaviour::Signs | Behaviour::Slow | Behaviour::Refuses => return None,
        Behaviour::Hangs => {
            ExpectedLog::new(&["gave no answer within 4s", "--ca-timeout"], "timeout").without_address()
        }
        Behaviour::Junk => ExpectedLog::new(&["no PEM certificate", "the CA's response is invalid"], "junk")
            .without_address(),
        Behaviour::Lies(lie) => {
            let (_, [what, way_out], outcome) = LIES.into_iter().find(|(known, ..)| *known == lie)?;
            ExpectedLog::new(&[what, "the CA's response is invalid", way_out], outcome).without_address()
        }
        Behaviour::Down => {
            let words = ["Connection refused", "connecting to the CA at", "is --ca-address right?"];
            ExpectedLog::new(&words, "unreachable")
        }
        Behaviour::Cut => ExpectedLog::new(
            &["the connection to the CA at", "broke before it had answered", "see its log"],
            "unreachable",
        ),
    })
}

/// An agent, its CA, and the network between them.
pub struct Site<P> {
    pub agent: Agent,
    pub provider: P,
    pub proxy: Option<Proxy>,
    _directory: TempDir,
}

impl<P: Provider> Site<P> {
    /// Starts an agent whose CA has this behaviour at first.
    pub async fn start(behaviour: Behaviour, lifetime: u64, more: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let provider = P::start(directory.path(), lifetime).await;
        let mut options = provider.options(directory.path());
        let proxy = provider.address().map(|server| {
            let proxy = Proxy::start(server);
            for option in &mut options {
                *option = option.replace(&server.to_string(), &proxy.address.to_string());
            }
            proxy
        });
        options.extend(["--cert-ttl".to_owned(), format!("{lifetime}s")]);
        options.extend(more.iter().map(|text| (*text).to_owned()));
        set(&provider, proxy.as_ref(), behaviour);
        if let (Behaviour::Down, Some(proxy)) = (behaviour, &proxy) {
            while TcpStream::connect(proxy.address).await.is_ok() {}
        }
        let agent = Agent::start(directory.path(), P::NAME, &strs(&options));
        Self { agent, provider, proxy, _directory: directory }
    }

    /// Sets the behaviour of the CA and the network.
    pub fn set(&self, behaviour: Behaviour) {
        set(&self.provider, self.proxy.as_ref(), behaviour);
    }

    /// The failed calls logged with `words`.
    pub fn failures(&self, words: &str) -> Vec<String> {
        let log = self.agent.process.log();
        let failures = log.lines().filter(|line| line.contains("no new certificate") && line.contains(words));
        failures.map(str::to_owned).collect()
    }

    /// Waits until there are more than `known` of these; returns the next one.
    pub async fn wait_failure(&mut self, words: &str, known: usize) -> String {
        let found = timeout(PATIENCE, async {
            loop {
                match self.failures(words).into_iter().nth(known) {
                    Some(line) => return line,
                    None => self.agent.process.wait_next_log("no new certificate").await,
                };
            }
        });
        found.await.unwrap_or_else(|_| panic!("{words:?} is not logged"))
    }

    /// Asserts that a failure with `words` was logged since the last certificate, and no failure twice. A call in
    /// progress when the CA changed may have failed in another way.
    pub fn assert_logged_once(&self, words: &str) {
        let log = self.agent.process.log();
        let since = log.rsplit("certificate issued").next().unwrap();
        let mut logged = HashSet::new();
        let warnings: Vec<_> =
            since.lines().filter(|line| line.contains("WARN no new certificate")).collect();
        for line in &warnings {
            let reason = line.split_once("reason=").unwrap().1.split(" served=").next().unwrap();
            // Times differ each time.
            let words = reason.split_whitespace().filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
            assert!(logged.insert(words.collect::<Vec<_>>().join(" ")), "logged twice: {reason}\n{log}");
        }
        assert!(warnings.iter().any(|line| line.contains(words)), "{words:?} is not logged\n{log}");
    }

    /// The number of calls to the CA with this outcome.
    pub async fn count(&mut self, outcome: &str) -> f64 {
        let provider = P::NAME;
        let sample = format!("attache_ca_requests_total{{provider=\"{provider}\",outcome=\"{outcome}\"}}");
        self.agent.metric(&sample).await
    }
}

fn set<P: Provider>(provider: &P, proxy: Option<&Proxy>, behaviour: Behaviour) {
    let line = match behaviour {
        Behaviour::Down => Line::Down,
        Behaviour::Cut => Line::Cut,
        Behaviour::Slow => Line::Slow,
        _ => Line::Open,
    };
    match proxy {
        Some(proxy) if line != Line::Open => proxy.set(line),
        Some(proxy) => {
            provider.set(behaviour);
            proxy.set(line);
        }
        None => provider.set(behaviour),
    }
}
