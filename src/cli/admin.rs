//! The client of the admin socket, for `status`, `renew` and `log`.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tokio::net::UnixStream;

use super::sds_client::{agents_socket, connect_remedy, sds_socket};
use super::variable;
use crate::config::{NODES_ADMIN_SOCKET, default_admin_socket};
use crate::serve::listener::FileId;

/// The admin socket of earlier releases, which all agents with their sockets in one directory shared.
const SHARED_NAME: &str = "admin.sock";

/// The agent's address.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AdminArgs {
    /// The agent's SDS socket: its admin socket has the same path with .admin at the end
    /// [default: ATTACHE_SOCKET, else /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The agent's admin socket, if it has another path [default: ATTACHE_ADMIN_SOCKET, and /run/attache/admin.sock of attache
    /// node]
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,
    /// One of the workloads of attache node
    #[arg(long, value_name = "NAME")]
    workload: Option<String>,
}

/// Which agent is meant.
#[derive(Debug)]
struct Target {
    admin: PathBuf,
    /// The SDS socket that the agent must serve; none where only the admin socket is named.
    sds: Option<PathBuf>,
    /// Whether the admin socket follows from the SDS socket.
    is_derived: bool,
}

impl AdminArgs {
    /// The agent of a node that is meant, if this names one of its workloads or it is the only agent here.
    fn nodes_admin_socket(&self) -> Option<PathBuf> {
        let named = self.admin_socket.clone().or_else(|| variable("ATTACHE_ADMIN_SOCKET"));
        let is_meant = self.workload.is_some() || self.socket.is_none() && agents_socket().is_none();
        named.or_else(|| is_meant.then(|| NODES_ADMIN_SOCKET.into()))
    }

    fn target(&self) -> anyhow::Result<Target> {
        if self.workload.is_some()
            && let Some(admin) = self.nodes_admin_socket()
        {
            return Ok(Target { admin, sds: None, is_derived: false });
        }
        let derived =
            |sds: PathBuf| Target { admin: default_admin_socket(&sds), sds: Some(sds), is_derived: true };
        // Options win over the environment, which is the agent's own in its container.
        if let Some(admin) = self.admin_socket.clone() {
            return Ok(Target { admin, sds: self.socket.clone(), is_derived: false });
        }
        if let Some(sds) = self.socket.clone() {
            return Ok(derived(sds));
        }
        match variable("ATTACHE_ADMIN_SOCKET") {
            Some(path) if path.as_os_str() == "none" => bail!(
                "this agent has no admin socket (admin-socket is none); start it with one, or name another agent's with \
                 --admin-socket"
            ),
            Some(admin) => Ok(Target { admin, sds: agents_socket(), is_derived: false }),
            None => Ok(derived(sds_socket(None))),
        }
    }

    /// Makes one call to the agent that is meant, and to no other one. A refusal by the agent is an error with the agent's
    /// message.
    pub(super) async fn call(
        &self,
        method: Method,
        target: &str,
        patience: Duration,
    ) -> anyhow::Result<Value> {
        let asked = target;
        let Target { admin, sds, is_derived } = self.target()?;
        let mut path = admin;
        let target = &match &self.workload {
            Some(workload) => format!("{target}?workload={}", escaped(workload)),
            None => target.to_owned(),
        };
        if let Some(sds) = sds {
            let report = match request(&path, Method::GET, "/v1/status", patience).await {
                Err(error) if is_derived && is_without_listener(&error) => {
                    if let Some((node, workload)) = self.on_a_node(&sds, patience).await {
                        let target =
                            workload.map_or_else(String::new, |name| format!("?workload={}", escaped(&name)));
                        return request(&node, method, &format!("{asked}{target}"), patience).await;
                    }
                    let Some((shared, report)) = shared_socket(&sds, patience).await else {
                        return Err(without_admin_socket(&sds, &path).await.unwrap_or(error));
                    };
                    path = shared;
                    report
                }
                report => report?,
            };
            check_agent(&path, &sds, &report)?;
            if (&method, target.as_str()) == (&Method::GET, "/v1/status") {
                return Ok(report);
            }
        }
        request(&path, method, target, patience).await
    }

    /// The admin socket of the agent of this node, if that one serves `sds`, and the workload that it is the socket of. If no
    /// socket is named, all of them are meant.
    async fn on_a_node(&self, sds: &Path, patience: Duration) -> Option<(PathBuf, Option<String>)> {
        let admin = PathBuf::from(NODES_ADMIN_SOCKET);
        let report = request(&admin, Method::GET, "/v1/status", patience).await.ok()?;
        let workloads = report.get("workloads")?.as_array()?;
        if self.socket.is_none() && agents_socket().is_none() {
            return Some((admin, None));
        }
        let found = workloads.iter().find(|workload| is_same(workload, sds))?;
        Some((admin, Some(found.get("workload")?.as_str()?.to_owned())))
    }
}

/// The SDS socket of the workload `name` of a node's agent.
pub(super) async fn socket_of(name: &str) -> anyhow::Result<PathBuf> {
    let agent = AdminArgs { socket: None, admin_socket: None, workload: Some(name.to_owned()) };
    let report = agent.call(Method::GET, "/v1/status", Duration::from_secs(10)).await?;
    served(&report).map(Path::to_owned).context("the agent's report names no socket")
}

/// A value of a query.
fn escaped(text: &str) -> impl fmt::Display {
    utf8_percent_encode(text, NON_ALPHANUMERIC)
}

/// The report of an agent of an earlier release, if it is the one that serves `sds`.
async fn shared_socket(sds: &Path, patience: Duration) -> Option<(PathBuf, Value)> {
    let path = sds.with_file_name(SHARED_NAME);
    let report = request(&path, Method::GET, "/v1/status", patience).await.ok()?;
    serves(&report, sds).then_some((path, report))
}

/// The error where an agent listens on `sds`, and no process on its admin socket at `admin`.
async fn without_admin_socket(sds: &Path, admin: &Path) -> Option<anyhow::Error> {
    UnixStream::connect(sds).await.ok()?;
    let (sds, admin) = (sds.display(), admin.display());
    Some(anyhow::anyhow!(
        "the agent at {sds} has no admin socket {admin}: name the one that it was started with by --admin-socket, or start it \
         without --admin-socket; its log says why if it could not create one"
    ))
}

/// Fails if the agent that sent `report` over the admin socket at `path` serves another SDS socket than `sds`.
fn check_agent(path: &Path, sds: &Path, report: &Value) -> anyhow::Result<()> {
    if serves(report, sds) {
        return Ok(());
    }
    bail!(
        "the admin socket {} belongs to another agent (process {}), which serves {} and not {}; name the admin socket of the \
         right agent with --admin-socket",
        path.display(),
        report.get("pid").unwrap_or(&Value::Null),
        served(report).unwrap_or(Path::new("no socket")).display(),
        sds.display()
    )
}

/// The SDS socket that a report names.
fn served(report: &Value) -> Option<&Path> {
    report.get("socket").and_then(Value::as_str).filter(|path| !path.is_empty()).map(Path::new)
}

/// Whether the agent that sent `report` serves `sds`, among other sockets or alone.
fn serves(report: &Value, sds: &Path) -> bool {
    let others = report.get("other_sockets").and_then(Value::as_array).into_iter().flatten();
    std::iter::once(report).chain(others).any(|socket| is_same(socket, sds))
}

/// Whether the socket of a report is `sds`. Paths may differ where a directory is mounted in two places.
fn is_same(report: &Value, sds: &Path) -> bool {
    let file = report.get("socket_file").and_then(Value::as_str);
    match (FileId::of(sds), file) {
        (Ok(asked), Some(file)) => asked.to_string() == file,
        // An agent of an earlier release, whose path may be relative; or the file is gone.
        _ => {
            let sds = std::path::absolute(sds).unwrap_or_else(|_| sds.to_owned());
            served(report).is_some_and(|served| sds.ends_with(served))
        }
    }
}

/// Whether no process listens on the socket.
fn is_without_listener(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(kind, Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused))
}

async fn request(path: &Path, method: Method, target: &str, patience: Duration) -> anyhow::Result<Value> {
    let outcome = tokio::time::timeout(patience, exchange(path, method, target)).await;
    let (status, body) = outcome
        .with_context(|| format!("the agent at {} did not answer within {patience:?}", path.display()))??;
    let value: Value = serde_json::from_slice(&body).with_context(|| {
        format!("{} is not an admin socket of attache: its answer is not JSON", path.display())
    })?;
    if !status.is_success() {
        bail!("{}", value.get("error").and_then(Value::as_str).unwrap_or(status.as_str()));
    }
    Ok(value)
}

async fn exchange(path: &Path, method: Method, target: &str) -> anyhow::Result<(StatusCode, Bytes)> {
    let io = UnixStream::connect(path).await.map_err(|error| {
        let remedy = connect_remedy(path, &error, "is --socket the same?");
        let failed = format!("connecting to the admin socket {} failed: {error}; {remedy}", path.display());
        anyhow::Error::from(error).context(failed)
    })?;
    let broken = || format!("{} does not speak HTTP as attache does", path.display());
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(io)).await.with_context(broken)?;
    tokio::spawn(connection);
    let request = Request::builder().method(method).uri(target).header("host", "attache");
    let response = sender.send_request(request.body(Empty::<Bytes>::new())?).await.with_context(broken)?;
    let (head, body) = response.into_parts();
    Ok((head.status, body.collect().await.with_context(broken)?.to_bytes()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_agent_is_recognized_by_the_file_of_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("web"), "").unwrap();
        std::fs::write(path("other"), "").unwrap();
        std::os::unix::fs::symlink(path("web"), path("link")).unwrap();
        let report = |socket: &Path, file: Option<FileId>| {
            let file = file.map(|file| file.to_string());
            json!({ "pid": 1, "socket": socket.display().to_string(), "socket_file": file })
        };
        let web = FileId::of(&path("web")).ok();
        let elsewhere = Path::new("/mounted/elsewhere");
        for (asked, report, is_right) in [
            (path("web"), report(&path("web"), web), true),
            (path("link"), report(&path("web"), web), true),
            (path("web"), report(elsewhere, web), true),
            (path("other"), report(&path("other"), web), false),
            // Gone, or not reported.
            (path("gone"), report(&path("gone"), web), true),
            (path("gone"), report(&path("web"), web), false),
            (path("web"), report(&path("web"), None), true),
            (path("web"), report(Path::new("web"), None), true),
            (path("web"), report(&path("other"), None), false),
            (path("web"), report(elsewhere, None), false),
        ] {
            assert_eq!(serves(&report, &asked), is_right, "{asked:?} {report}");
            assert_eq!(check_agent(&path("web.admin"), &asked, &report).is_ok(), is_right);
        }
        assert!(!serves(&json!({}), &path("web")));
    }
}
