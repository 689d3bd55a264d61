//! systemd's ways with a service: sockets that it has opened, and what it wants to be told. Whoever else speaks the same
//! (a container engine, say) will do.

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
use crate::base::limits;
use crate::config::{Environment, is_in_pod};
use crate::serve::listener::Passed;
use crate::store::health::{self, Standing};

/// The name of the SDS socket among those that are passed.
const SDS: &str = "sds";
/// The name of the admin socket.
const ADMIN: &str = "admin";
/// How long the service manager may take to take a message.
const PATIENCE: Duration = Duration::from_secs(5);
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

/// What the agent was started with, besides options.
#[derive(Debug, Default)]
pub struct Started {
    /// Whom to tell.
    pub manager: Option<Manager>,
    /// The SDS socket.
    pub sds: Option<Passed>,
    /// The admin socket.
    pub admin: Option<Passed>,
    /// This runs in a Pod of Kubernetes.
    pub is_in_pod: bool,
}

/// What is wrong with what the service manager gave us.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("NOTIFY_SOCKET={0:?} is neither a path nor an abstract socket: unset it, or correct it")]
    NotifySocket(String),
    #[error("WATCHDOG_USEC={0:?} is no time in microseconds: unset it, or correct it")]
    Watchdog(String),
    #[error(
        "descriptor {number} ({name:?}), which was passed as a socket, {reason}; in a .socket unit use ListenStream= with a path"
    )]
    Kind { number: usize, name: String, reason: String },
    #[error(
        "of the {count} sockets that were passed one is called {name:?}: give each its own name, sds or admin, by FileDescriptorName="
    )]
    Name { count: usize, name: String },
}

impl Started {
    /// Takes what the environment names. To be called before anything else is opened: until then these numbers are
    /// nobody else's.
    pub fn new(environment: &Environment) -> Result<Self, StartError> {
        let is_in_pod = is_in_pod(environment);
        let mut started = Self { manager: Manager::new(environment)?, is_in_pod, ..Self::default() };
        let names = environment.get("LISTEN_FDNAMES").map(String::as_str).unwrap_or_default();
        let mut names = names.split(':');
        let mut given = ListenFd::from_env();
        let count = given.len();
        for index in 0..count {
            let name = names.next().unwrap_or_default();
            let place = match name {
                ADMIN => &mut started.admin,
                // Alone it may be called as its unit is.
                _ if name == SDS || count == 1 => &mut started.sds,
                _ => return Err(StartError::Name { count, name: name.to_owned() }),
            };
            let wrong =
                |reason: String| StartError::Kind { number: 3 + index, name: name.to_owned(), reason };
            let taken = given.take_unix_listener(index);
            let listener = taken
                .map_err(|_| wrong("is no Unix stream socket".to_owned()))?
                .ok_or_else(|| wrong("is there twice".to_owned()))?;
            let path = listening(&listener).map_err(wrong)?;
            if place.replace(Passed { listener, path }).is_some() {
                return Err(StartError::Name { count, name: name.to_owned() });
            }
        }
        Ok(started)
    }
}

/// Where the socket listens.
fn listening(listener: &UnixListener) -> Result<PathBuf, String> {
    let failed = |error: io::Error| format!("can't be used: {error}");
    if !socket_acceptconn(listener).map_err(|errno| failed(errno.into()))? {
        return Err("does not listen".to_owned());
    }
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    // Without a file there is no mode that says who may connect.
    address.as_pathname().map(PathBuf::from).ok_or_else(|| "has no path".to_owned())
}

/// Whom to tell how the service stands.
#[derive(Debug)]
pub struct Manager {
    address: SocketAddr,
    /// It wants to hear from us that often.
    watchdog: Option<Duration>,
    repeats: FailureLog,
}

impl Manager {
    fn new(environment: &Environment) -> Result<Option<Self>, StartError> {
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
        Ok(Some(Self { address, watchdog: watchdog.transpose()?, repeats: FailureLog::default() }))
    }

    /// Tells how it stands, whenever that changes, and that we are alive, as often as that is wanted, until nobody tells
    /// of the standing any more: then the service is stopping.
    ///
    /// READY is told once all is there, and not when the socket is: who is started after this service wants a
    /// certificate.
    pub async fn run(mut self, mut standing: watch::Receiver<Standing>) {
        // Twice in a period, as systemd advises. On this thread: what hangs it is to be noticed.
        let mut alive = self.watchdog.map(|period| {
            let mut alive = interval((period / 2).max(Duration::from_millis(1)));
            alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
            alive
        });
        let (mut was_ready, mut told, mut failures) = (false, None, 0);
        loop {
            let (is_ready, status) = {
                let standing = standing.borrow_and_update();
                (standing.is_ready(), status(&standing))
            };
            let ready = if is_ready && !was_ready { "READY=1\n" } else { "" };
            let is_behind = told.as_ref() != Some(&status) && !self.tell(&format!("{ready}{status}")).await;
            failures = if is_behind { failures + 1 } else { 0 };
            if !is_behind {
                was_ready |= is_ready;
                told = Some(status);
            }
            let mut again = std::pin::pin!(sleep(BACKOFF.delay(failures, fastrand::f64())));
            loop {
                tokio::select! {
                    changed = standing.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => {
                            self.tell("STOPPING=1\nSTATUS=stopping").await;
                            return;
                        }
                    },
                    () = &mut again, if is_behind => break,
                    () = tick(&mut alive) => drop(self.tell("WATCHDOG=1").await),
                }
            }
        }
    }

    /// Whether the message was taken.
    async fn tell(&mut self, message: &str) -> bool {
        let sent = timeout(PATIENCE, send(&self.address, message)).await;
        match sent.map_err(io::Error::from).flatten() {
            Ok(()) => {
                if self.repeats.recovered() {
                    tracing::info!("the service manager is told again how it stands");
                }
                true
            }
            Err(error) => {
                if self.repeats.is_new(&error.to_string()) {
                    tracing::warn!(%error, "the service manager at NOTIFY_SOCKET can't be told how it stands; it is tried again");
                }
                false
            }
        }
    }
}

/// A socket for each message: the manager may be another one by then.
async fn send(address: &SocketAddr, message: &str) -> io::Result<()> {
    let socket = StdDatagram::unbound()?;
    socket.connect_addr(address)?;
    socket.set_nonblocking(true)?;
    UnixDatagram::from_std(socket)?.send(message.as_bytes()).await.map(drop)
}

async fn tick(alive: &mut Option<Interval>) {
    match alive {
        Some(alive) => drop(alive.tick().await),
        None => std::future::pending().await,
    }
}

/// One line for people.
fn status(standing: &Standing) -> String {
    let Standing { missing, failing } = standing;
    let text = match (missing.is_empty(), failing.is_empty()) {
        (false, _) => format!("not ready: {}", health::told(missing)),
        (true, false) => format!("ready; not renewed: {}", health::told(failing)),
        (true, true) => "ready".to_owned(),
    };
    format!("STATUS={}", limits::sanitize_for_log(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager(variables: &[(&str, &str)]) -> Result<Option<Manager>, StartError> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Manager::new(&variables.collect())
    }

    #[test]
    fn the_manager_is_whom_the_environment_names() {
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
