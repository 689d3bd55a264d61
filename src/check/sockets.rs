//! Checks of the listeners: sockets and addresses.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::{getgid, getuid};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::{Findings, Scope, Severity, check_writable};
use crate::base::text;
use crate::config::Config;
use crate::fs::file;
use crate::net::http2;
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3::DiscoveryRequest;
use crate::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use crate::serve::listener::{Occupant, occupant};
use crate::serve::peer::Allowed;

/// The user and group id of Istio's proxy.
const ISTIO_PROXY: u32 = 1337;
/// How long a running agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The mode bit of a directory that passes its group on to new files.
const SET_GROUP_ID: u32 = 0o2000;

impl Findings {
    /// Checks the sockets and their peers. Returns whether an agent is running on the first SDS socket.
    pub(super) async fn socket(&mut self, config: &Config, scope: Scope) -> bool {
        if let Some(admin) = config.admin_socket.as_ref().filter(|admin| admin.is_named) {
            self.place("admin socket", "--admin-socket", &admin.path).await;
        }
        let is_running = self.place("socket", "--socket", &config.socket).await;
        for other in &config.other_sockets {
            if self.place("socket", "--socket", other).await && !is_running {
                let (other, first) = (other.display(), config.socket.display());
                self.note(
                    Severity::Error,
                    "socket",
                    format!(
                        "{other}: the agent there does not serve {first}: stop it, or choose another path with --socket"
                    ),
                );
            }
        }
        for socket in config.sockets() {
            self.peers(config, scope, socket);
        }
        is_running
    }

    /// Checks that a socket can be created at `path`. Returns whether an agent is running there.
    pub(super) async fn place(&mut self, about: &'static str, option: &'static str, path: &Path) -> bool {
        let shown = path.display();
        if let Err(words) = check_writable(file::directory_of(path)) {
            let remedy = match file::directory_of(path).is_dir() {
                true => format!("give it write permission, or choose another path with {option}"),
                false => format!("create or mount it, or choose another path with {option}"),
            };
            self.note(Severity::Error, about, format!("{shown}: {words}; {remedy}"));
            return false;
        }
        let process = |pid: Option<i32>| match pid {
            Some(pid) => format!("process {pid}"),
            None => "another process".to_owned(),
        };
        match occupant(path, option) {
            Err(error) => self.note(Severity::Error, about, error.to_string()),
            Ok(Occupant::Live(pid)) => {
                // The admin socket speaks HTTP/1.1, and belongs to the same process as the SDS socket.
                let is_agent = if option == "--socket" { is_agent(path).await } else { Some(true) };
                let process = process(pid);
                let (state, text) = match is_agent {
                    Some(true) => (Severity::Ok, format!("an agent is running there, {process}")),
                    Some(false) => (
                        Severity::Error,
                        format!(
                            "{process} listens there and is not an attache agent: stop it, or choose another path with \
                             {option}"
                        ),
                    ),
                    None => (
                        Severity::Warning,
                        format!(
                            "{process} listens there and has not answered within {PATIENCE:?}: is the agent hanging?"
                        ),
                    ),
                };
                self.note(state, about, format!("{shown}: {text}"));
                return is_agent != Some(false);
            }
            Ok(Occupant::None | Occupant::Dead) => {
                self.note(Severity::Ok, about, format!("{shown}: free, and its directory is writable"));
            }
        }
        false
    }

    /// Checks which users the mode of `socket` and the options let connect.
    fn peers(&mut self, config: &Config, scope: Scope, socket: &Path) {
        let (uid, mut gid) = (getuid().as_raw(), getgid().as_raw());
        // New files in such a directory get its group. A Pod's volumes with an fsGroup are set up so.
        if let Ok(directory) = fs::metadata(file::directory_of(socket))
            && directory.mode() & SET_GROUP_ID != 0
        {
            gid = directory.gid();
        }
        let Allowed { uids, gids } = &config.allowed;
        let is_limited = !uids.is_empty() || !gids.is_empty();
        let (is_for_group, is_for_all) = (config.socket_mode & 0o020 != 0, config.socket_mode & 0o002 != 0);
        let mode = format!("mode {:04o} (--socket-mode)", config.socket_mode);
        let (users, mode_admits_proxy) = match (is_for_all, is_for_group) {
            (true, _) => ("every user".to_owned(), true),
            (_, true) => (format!("user {uid} and group {gid}"), uid == ISTIO_PROXY || gid == ISTIO_PROXY),
            _ => (format!("user {uid}"), uid == ISTIO_PROXY),
        };
        let options_admit_proxy =
            !is_limited || uid == ISTIO_PROXY || uids.contains(&ISTIO_PROXY) || gids.contains(&ISTIO_PROXY);
        let limit = if is_limited {
            format!(
                ", and --allow-uid and --allow-gid admit only users [{}] and groups [{}]",
                text::listed(uids, ", "),
                text::listed(gids, ", ")
            )
        } else {
            String::new()
        };
        if scope.is_in_pod && !(mode_admits_proxy && options_admit_proxy) {
            self.note(
                Severity::Warning,
                "peers",
                format!(
                    "{mode} lets {users} connect{limit}, but Istio's proxy is user and group {ISTIO_PROXY}: run Envoy and \
                     this agent with the same runAsUser or runAsGroup (securityContext), and name it in --allow-uid \
                     if that is set"
                ),
            );
        } else if is_for_all && !is_limited {
            self.note(
                Severity::Warning,
                "peers",
                format!("{mode} lets every user connect and get the workload's key: limit that with --socket-mode 0660 or --allow-uid"),
            );
        } else {
            self.note(
                Severity::Ok,
                "peers",
                format!("{mode} lets {users} connect{limit}: Envoy must be among them"),
            );
        }
    }

    /// Checks the HTTP addresses. Both listeners stay open until the end, as in the agent.
    pub(super) fn addresses(&mut self, config: &Config, scope: Scope, is_running: bool) {
        let mut taken = Vec::new();
        let mut listen = |address: SocketAddr, option: &str| match TcpListener::bind(address) {
            Ok(listener) => {
                taken.push(listener);
                Ok(())
            }
            // The running agent has it.
            Err(_) if is_running => Ok(()),
            Err(error) => {
                Err(format!("listening on {address} failed: {error}; choose another {option}, or none"))
            }
        };
        let status = config.status_address.map(|address| (address, listen(address, "--status-address")));
        let page = config.admin_address.map(|address| (address, listen(address, "--admin-address")));
        match status {
            None => self.note(Severity::Ok, "status address", "none: no probes and no metrics"),
            Some((_, Err(words))) => self.note(Severity::Error, "status address", words),
            Some((address, Ok(()))) if scope.is_in_pod && address.ip().is_loopback() => self.note(
                Severity::Warning,
                "status address",
                format!(
                    "{address} is unreachable for the kubelet's probes and for Prometheus: --status-address 0.0.0.0:{} \
                     opens it to them",
                    address.port()
                ),
            ),
            Some((address, Ok(()))) => self.note(Severity::Ok, "status address", address.to_string()),
        }
        match page {
            None => {}
            Some((_, Err(words))) => self.note(Severity::Error, "status page", words),
            Some((address, Ok(()))) => self.note(Severity::Ok, "status page", address.to_string()),
        }
    }
}

/// Whether the listener on the SDS socket at `path` speaks SDS; none if it does not answer.
async fn is_agent(path: &Path) -> Option<bool> {
    let ask = async {
        let io = UnixStream::connect(path).await.ok()?;
        let request = DiscoveryRequest {
            node: Some(Node { id: "attache-check".to_owned(), ..Node::default() }),
            resource_names: vec!["ROOTCA".to_owned()],
            type_url: SECRET_TYPE_URL.to_owned(),
            ..DiscoveryRequest::default()
        };
        let origin = http::Uri::from_static("http://attache");
        let talk = async |connection| {
            SecretDiscoveryServiceClient::with_origin(connection, origin).fetch_secrets(request).await
        };
        http2::with_connection(io, talk).await.ok()
    };
    Some(match timeout(PATIENCE, ask).await.ok()? {
        // An error status that the peer sent, not one made from a broken connection.
        Some(Err(status)) => std::error::Error::source(&status).is_none(),
        answer => answer.is_some(),
    })
}
