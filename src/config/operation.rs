//! The options for operating the agent: admin socket, addresses, confinement, log.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use tracing_subscriber::filter::Targets;

use super::args::RunArgs;
use super::files::resolved;
use super::{AdminSocket, DEFAULT_SOCKET, NODES_ADMIN_SOCKET, default_admin_socket};
use crate::ca::providers::Provider;
use crate::export::output;
use crate::ops::telemetry::{LogConfig, parse_filter};
use crate::options::Reader;
use crate::serve::listener::ListenError;

/// The first SDS socket, and the others.
pub(super) fn sockets(r: &mut Reader<'_>, args: &RunArgs) -> (PathBuf, Vec<PathBuf>) {
    let parse = |text: &str| {
        if text.is_empty() {
            return Err("a socket needs a path: give it a value, or leave it out".to_owned());
        }
        let path = PathBuf::from(text);
        ListenError::check_path(&path, "--socket").map_err(|error| error.to_string())?;
        Ok(path)
    };
    let found = r.list("socket", &args.socket, &[], ':', parse).value.unwrap_or_default();
    if found.len() > 1 {
        let paths = resolved(found.iter().map(PathBuf::as_path));
        for (index, path) in paths.iter().enumerate() {
            let is_earlier = paths.iter().take(index).any(|earlier| earlier == path);
            if let Some(socket) = found.get(index).filter(|_| is_earlier) {
                r.mistake(format!("--socket {} is named twice: drop one of them", socket.display()));
            }
        }
    }
    let mut found = found.into_iter();
    (found.next().unwrap_or_else(|| DEFAULT_SOCKET.into()), found.collect())
}

/// Beside the first SDS socket, unless `--admin-socket` is set.
pub(super) fn admin_socket(
    r: &mut Reader<'_>,
    args: &RunArgs,
    socket: &Path,
    others: &[PathBuf],
) -> Option<AdminSocket> {
    let path = r.text("admin-socket", &args.admin_socket, &[]);
    let is_named = path.value.is_some();
    let path = match path.value {
        Some(text) if text == "none" => return None,
        Some(path) => PathBuf::from(path),
        None => default_admin_socket(socket),
    };
    if path == socket || others.contains(&path) {
        r.mistake(format!(
            "{} is the SDS socket, too: give the admin socket a path of its own",
            path.display()
        ));
    }
    match ListenError::check_path(&path, "--admin-socket") {
        Err(error) if is_named => r.mistake(error.to_string()),
        Err(error) => {
            // With an SDS socket that is too long there is a mistake already.
            if ListenError::check_path(socket, "--socket").is_ok() {
                r.note(format!("no admin socket, so attache status, renew and log are unavailable: {error}"));
            }
            return None;
        }
        Ok(()) => {}
    }
    Some(AdminSocket { path, is_named })
}

/// The admin socket of a node's agent, which goes by no SDS socket.
pub(super) fn nodes_admin_socket(r: &mut Reader<'_>, args: &RunArgs) -> Option<AdminSocket> {
    let path = r.text("admin-socket", &args.admin_socket, &[]);
    let is_named = path.value.is_some();
    let path = match path.value {
        Some(text) if text == "none" => return None,
        Some(path) => PathBuf::from(path),
        None => NODES_ADMIN_SOCKET.into(),
    };
    if let Err(error) = ListenError::check_path(&path, "--admin-socket") {
        r.mistake(error.to_string());
        return None;
    }
    Some(AdminSocket { path, is_named })
}

/// The address of probes and metrics.
pub(super) fn status_address(r: &mut Reader<'_>, args: &RunArgs) -> Option<SocketAddr> {
    let parse = |text: &str| parse_address(text, "127.0.0.1:15055");
    let address = r.parsed("status-address", &args.status_address, &[], parse);
    address.or(Some(SocketAddr::from(([127, 0, 0, 1], 15055))))
}

/// The address of the status page.
pub(super) fn admin_address(
    r: &mut Reader<'_>,
    args: &RunArgs,
    status: Option<SocketAddr>,
) -> Option<SocketAddr> {
    let setting = r.parsed("admin-address", &args.admin_address, &[], |text| match text.parse() {
        Ok(port) => Ok(Some(SocketAddr::from(([127, 0, 0, 1], port)))),
        Err(_) => parse_address(text, "127.0.0.1:15056, 15056"),
    });
    let address = setting.value??;
    // With port 0 each gets a free one. A listener on all addresses takes the port of each of them.
    let clashes = |status: SocketAddr| {
        let is_same = status.ip() == address.ip();
        status.port() == address.port()
            && (is_same || status.ip().is_unspecified() || address.ip().is_unspecified())
    };
    if address.port() != 0 && status.is_some_and(clashes) {
        r.mistake(format!(
            "{}: --status-address is the same; give the status page a port of its own",
            setting.from
        ));
    }
    if !address.ip().is_loopback() {
        r.note(format!(
            "{}: every client that can reach it can read the names, identities and expiry of secrets; 127.0.0.1 limits \
             it to this machine",
            setting.from
        ));
    }
    Some(address)
}

/// Whether the agent confines itself, which it can't if it has to run commands.
pub(super) fn landlock(
    r: &mut Reader<'_>,
    args: &RunArgs,
    providers: &[Provider],
    output: Option<&output::OutputSettings>,
) -> bool {
    let landlock = r.switch("landlock", args.landlock, &[]);
    let is_wanted = landlock.value == Some(true);
    let hook = output.and_then(|output| output.hook.as_ref()).map(|_| "--output-hook".to_owned());
    let ca = providers.iter().find(|provider| provider.runs_commands());
    let ca = ca.map(|provider| format!("--ca {}", provider.kind().name));
    let own = (!args.command.is_empty()).then(|| "the COMMAND behind --".to_owned());
    for command in hook.into_iter().chain(ca).chain(own).filter(|_| is_wanted) {
        r.mistake(format!(
            "{} and {command} contradict each other: with the first no command can run; drop one of them",
            landlock.from
        ));
    }
    is_wanted
}

pub(super) fn log(r: &mut Reader<'_>, args: &RunArgs) -> LogConfig {
    let filter = r.parsed("log-level", &args.log_level, &["ATTACHE_LOG"], parse_filter);
    let json = r.parsed("log-format", &args.log_format, &[], parse_format).or(false);
    let info = Targets::new().with_default(tracing::Level::INFO);
    LogConfig { filter: filter.or(info), json }
}

/// `shapes` are examples for the error.
fn parse_address(text: &str, shapes: &str) -> Result<Option<SocketAddr>, String> {
    if text == "none" {
        return Ok(None);
    }
    let address = text.parse().map(Some);
    address.map_err(|_| format!("{text:?} is not an address; the shape is {shapes}, or none"))
}

/// True for JSON.
fn parse_format(text: &str) -> Result<bool, String> {
    match text {
        "text" => Ok(false),
        "json" => Ok(true),
        _ => Err(format!("{text:?} is not a log format; choose text or json")),
    }
}
