//! systemd's service protocols: socket activation, readiness notification, watchdog. Other service managers that speak them (a
//! container engine, say) work too.

use std::collections::BTreeMap;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram as StdDatagram, UnixListener};
use std::path::PathBuf;
use std::time::Duration;

use listenfd::ListenFd;
use rustix::net::sockopt::socket_acceptconn;
use tokio::net::UnixDatagram;
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep, timeout};

use crate::base::backoff::Backoff;
use crate::base::failure_log::FailureLog;
use crate::base::text;
use crate::store::health::{self, Health};

/// The name of the SDS socket among the passed ones.
const SDS: &str = "sds";
/// The name of the admin socket.
const ADMIN: &str = "admin";
/// How long the service manager may take to accept a message.
const PATIENCE: Duration = Duration::from_secs(5);
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

/// What the agent was started with, besides options.
#[derive(Debug, Default)]
pub struct Started {
    pub manager: Option<Manager>,
    /// They replace `--socket`. The first one is that of admin commands.
    pub sds: Vec<PassedSocket>,
    pub admin: Option<PassedSocket>,
    /// The agent runs in a Pod of Kubernetes.
    pub is_in_pod: bool,
}

/// A listening socket opened by the service manager, to which its file belongs.
#[derive(Debug)]
pub struct PassedSocket {
    /// In non-blocking mode.
    pub listener: UnixListener,
    pub path: PathBuf,
}

/// Why the sockets or the environment of the service manager can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("NOTIFY_SOCKET={0:?} is neither a path nor an abstract socket: unset it, or correct it")]
    NotifySocket(String),
    #[error("WATCHDOG_USEC={0:?} is not a time in microseconds: unset it, or correct it")]
    Watchdog(String),
    #[error(
        "passed socket {name:?} (file descriptor {number}) {reason}; in a .socket unit use ListenStream= with a path"
    )]
    Kind { number: usize, name: String, reason: String },
    #[error(
        "one of {count} passed sockets is named {name:?}: with FileDescriptorName= give each the name sds, or one of them \
         the name admin"
    )]
    Name { count: usize, name: String },
}

impl Started {
    /// Takes the sockets that `environment` names. To be called before any file is opened, while their file descriptors can't
    /// belong to anything else.
    pub fn new(environment: &BTreeMap<String, String>) -> Result<Self, StartError> {
        let mut started = Self { manager: Manager::new(environment)?, ..Self::default() };
        let names = environment.get("LISTEN_FDNAMES").map(String::as_str).unwrap_or_default();
        let mut names = names.split(':');
        let mut passed = ListenFd::from_env();
        let count = passed.len();
        for index in 0..count {
            let name = names.next().unwrap_or_default();
            // A single socket may have the name of its unit. One unit may open several for SDS.
            let is_sds = name == SDS || count == 1 && name != ADMIN;
            let is_second_admin = name == ADMIN && started.admin.is_some();
            if is_second_admin || !is_sds && name != ADMIN {
                return Err(StartError::Name { count, name: name.to_owned() });
            }
            let wrong =
                |reason: String| StartError::Kind { number: 3 + index, name: name.to_owned(), reason };
            let taken = passed.take_unix_listener(index);
            let listener = taken
                .map_err(|_| wrong("is not a Unix stream socket".to_owned()))?
                .ok_or_else(|| wrong("was passed twice".to_owned()))?;
            let path = path_of(&listener).map_err(wrong)?;
            let passed = PassedSocket { listener, path };
            if is_sds {
                started.sds.push(passed);
            } else {
                started.admin = Some(passed);
            }
        }
        Ok(started)
    }
}

/// The path of the socket, once it is non-blocking. An error is the rest of a sentence.
fn path_of(listener: &UnixListener) -> Result<PathBuf, String> {
    let failed = |error: io::Error| format!("can't be used: {error}");
    if !socket_acceptconn(listener).map_err(|errno| failed(errno.into()))? {
        return Err("is not listening".to_owned());
    }
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    // Without a file, no mode would limit the peers.
    address.as_pathname().map(PathBuf::from).ok_or_else(|| "has no path".to_owned())
}

/// The service manager, which is notified of the agent's health.
#[derive(Debug)]
pub struct Manager {
    address: SocketAddr,
    /// The manager expects a sign of life within this time.
    watchdog: Option<Duration>,
    failures: FailureLog,
}

impl Manager {
    fn new(environment: &BTreeMap<String, String>) -> Result<Option<Self>, StartError> {
        let variable = |name| environment.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let Some(name) = variable("NOTIFY_SOCKET") else { return Ok(None) };
        let address = match name.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None if name.starts_with('/') => SocketAddr::from_pathname(name),
            None => return Err(StartError::NotifySocket(name.to_owned())),
        };
        let address = address.map_err(|_| StartError::NotifySocket(name.to_owned()))?;
        let is_ours = variable("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        let watchdog = variable("WATCHDOG_USEC").filter(|_| is_ours).map(|text| {
            let period = text.parse().ok().filter(|period| *period > 0).map(Duration::from_micros);
            period.ok_or_else(|| StartError::Watchdog(text.to_owned()))
        });
        Ok(Some(Self { address, watchdog: watchdog.transpose()?, failures: FailureLog::default() }))
    }

    /// Reports each change of `health`, and feeds the watchdog, until the sender is dropped: then the service is stopping.
    ///
    /// READY is sent once every secret is there, not when the socket is: services ordered after this one need a certificate.
    pub async fn run(mut self, mut health: watch::Receiver<Health>) {
        // Twice per period, as systemd advises. On this thread, so that a blocked thread is noticed.
        let mut keep_alive = self.watchdog.map(|period| {
            let mut keep_alive = interval((period / 2).max(Duration::from_millis(1)));
            keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
            keep_alive
        });
        let (mut was_ready, mut reported, mut failures) = (false, None, 0);
        loop {
            let (is_ready, status) = {
                let health = health.borrow_and_update();
                (health.is_ready(), status(&health))
            };
            let ready = if is_ready && !was_ready { "READY=1\n" } else { "" };
            let must_retry =
                reported.as_ref() != Some(&status) && !self.notify(&format!("{ready}{status}")).await;
            failures = if must_retry { failures + 1 } else { 0 };
            if !must_retry {
                was_ready |= is_ready;
                reported = Some(status);
            }
            let mut retry = std::pin::pin!(sleep(BACKOFF.delay(failures, fastrand::f64())));
            loop {
                tokio::select! {
                    changed = health.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => {
                            self.notify("STOPPING=1\nSTATUS=stopping").await;
                            return;
                        }
                    },
                    () = &mut retry, if must_retry => break,
                    () = tick(&mut keep_alive) => drop(self.notify("WATCHDOG=1").await),
                }
            }
        }
    }

    /// Sends a message. Returns whether the manager accepted it.
    async fn notify(&mut self, message: &str) -> bool {
        let sent = timeout(PATIENCE, send(&self.address, message)).await;
        match sent.map_err(io::Error::from).flatten() {
            Ok(()) => {
                if self.failures.recovered() {
                    tracing::info!("service manager reachable again");
                }
                true
            }
            Err(error) => {
                if self.failures.is_new(&error.to_string()) {
                    tracing::warn!(%error, "service manager at NOTIFY_SOCKET unreachable, retrying");
                }
                false
            }
        }
    }
}

/// Opens a socket per message, because the manager may have been replaced since the last one.
async fn send(address: &SocketAddr, message: &str) -> io::Result<()> {
    let socket = StdDatagram::unbound()?;
    socket.connect_addr(address)?;
    socket.set_nonblocking(true)?;
    UnixDatagram::from_std(socket)?.send(message.as_bytes()).await.map(drop)
}

async fn tick(keep_alive: &mut Option<Interval>) {
    match keep_alive {
        Some(keep_alive) => drop(keep_alive.tick().await),
        None => std::future::pending().await,
    }
}

/// The status line that systemd shows.
fn status(health: &Health) -> String {
    let Health { missing, failing } = health;
    let text = match (missing.is_empty(), failing.is_empty()) {
        (false, _) => format!("not ready: {}", health::listed(missing)),
        (true, false) => format!("ready; not renewed: {}", health::listed(failing)),
        (true, true) => "ready".to_owned(),
    };
    format!("STATUS={}", text::sanitize_for_log(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager(variables: &[(&str, &str)]) -> Result<Option<Manager>, StartError> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Manager::new(&variables.collect())
    }

    #[test]
    fn the_environment_names_the_manager_and_its_watchdog() {
        assert!(manager(&[("WATCHDOG_USEC", "1000000")]).unwrap().is_none());
        let (pid, other) = (std::process::id().to_string(), "1".to_owned());
        let second = Some(Duration::from_secs(1));
        for (watchdog, pid, expected) in [
            ("1000000", Some(&pid), second),
            ("1000000", Some(&other), None),
            ("1000000", None, second),
            ("", None, None),
        ] {
            let mut variables = vec![("NOTIFY_SOCKET", "@abstract"), ("WATCHDOG_USEC", watchdog)];
            variables.extend(pid.map(|pid| ("WATCHDOG_PID", pid.as_str())));
            assert_eq!(manager(&variables).unwrap().unwrap().watchdog, expected, "{variables:?}");
        }
        for wrong in
            [vec![("NOTIFY_SOCKET", "relative")], vec![("NOTIFY_SOCKET", "/run/n"), ("WATCHDOG_USEC", "0")]]
        {
            assert!(manager(&wrong).unwrap_err().to_string().contains("unset it"));
        }
    }
}
