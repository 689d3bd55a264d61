//! The client of the admin socket, for `status`, `renew` and `log`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

use super::sds_client::sds_socket;
use super::variable;
use crate::config::ADMIN_SOCKET;

/// The agent's address.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AdminArgs {
    /// The agent's SDS socket: the admin socket is in the same directory
    /// [default: ATTACHE_SOCKET, else /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The agent's admin socket, if it has another path [default: ATTACHE_ADMIN_SOCKET]
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,
}

impl AdminArgs {
    fn path(&self) -> anyhow::Result<PathBuf> {
        // Options win over the environment, which is the agent's own in its container.
        let beside = |socket: &PathBuf| socket.with_file_name(ADMIN_SOCKET);
        let given = self.admin_socket.clone().or_else(|| self.socket.as_ref().map(beside));
        if let Some(path) = given {
            return Ok(path);
        }
        match variable("ATTACHE_ADMIN_SOCKET") {
            Some(path) if path.as_os_str() == "none" => bail!(
                "this agent has no admin socket (ATTACHE_ADMIN_SOCKET=none); start it with one, or name another agent's \
                 with --admin-socket"
            ),
            path => Ok(path.unwrap_or_else(|| beside(&sds_socket(None)))),
        }
    }

    /// Makes one call. A refusal by the agent is an error with the agent's message.
    pub(super) async fn call(
        &self,
        method: Method,
        target: &str,
        patience: Duration,
    ) -> anyhow::Result<Value> {
        let path = self.path()?;
        let call = call(&path, method, target);
        let outcome = tokio::time::timeout(patience, call).await;
        let (status, body) = outcome.with_context(|| {
            format!("the agent at {} did not answer within {patience:?}", path.display())
        })??;
        let value: Value = serde_json::from_slice(&body).with_context(|| {
            format!("{} is not an admin socket of attache: its answer is not JSON", path.display())
        })?;
        if !status.is_success() {
            bail!("{}", value.get("error").and_then(Value::as_str).unwrap_or(status.as_str()));
        }
        Ok(value)
    }
}

async fn call(path: &Path, method: Method, target: &str) -> anyhow::Result<(StatusCode, Bytes)> {
    let io = UnixStream::connect(path).await.with_context(|| {
        format!(
            "connecting to the admin socket {} failed; is `attache run` running as this user, and is --socket the same?",
            path.display()
        )
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
