//! `attache watch`: subscribes to an SDS socket as Envoy does, and prints every push.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use prost::Message as _;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Status};

use super::note;
use super::sds_client::{ConnectionClosed, SdsClient, sds_socket, with_client};
use super::secret_view::SecretView;
use crate::base::clock::{Clock, rfc3339_millis};
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::extensions::transport_sockets::tls::v3::Secret;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};

/// The pause before reconnecting.
const PAUSE: Duration = Duration::from_secs(1);

/// Subscribe to secrets on an SDS socket, and print each push until interrupted.
///
/// Every push is acknowledged, as by an Envoy that accepts everything. When the agent restarts, the command reconnects.
/// Private keys are never printed.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct WatchArgs {
    /// Resource names
    #[arg(value_name = "NAME", default_values = ["default", "ROOTCA"])]
    names: Vec<String>,
    /// The SDS socket [default: ATTACHE_SOCKET, else /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The format: a table for each push, or one line of JSON
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Table,
    Json,
}

/// Runs until interrupted; the first connection must succeed.
pub(super) fn run(args: &WatchArgs) -> anyhow::Result<()> {
    super::block_on(async {
        let mut was_connected = false;
        let mut reported = None;
        loop {
            let mut is_connected = false;
            let ended = watch(args, &mut is_connected).await;
            was_connected |= is_connected;
            let reason = match ended {
                Err(error) if !was_connected || error.is::<std::io::Error>() => return Err(error),
                Err(error) => super::with_causes(&error),
                Ok(()) => "the agent closed the stream".to_owned(),
            };
            if is_connected || reported.as_ref() != Some(&reason) {
                note(&format!("{reason}; reconnecting"));
            }
            reported = Some(reason);
            tokio::time::sleep(PAUSE).await;
        }
    })
}

async fn watch(args: &WatchArgs, is_connected: &mut bool) -> anyhow::Result<()> {
    let socket = sds_socket(args.socket.as_deref());
    let talk = async |client| stream(client, args, &socket, is_connected).await;
    with_client(&socket, talk).await?
}

/// One stream: acknowledges and prints every push.
async fn stream(
    mut client: SdsClient,
    args: &WatchArgs,
    socket: &Path,
    is_connected: &mut bool,
) -> anyhow::Result<()> {
    let (requests, outgoing) = mpsc::unbounded_channel();
    let request = |version: String, nonce: String| DiscoveryRequest {
        version_info: version,
        node: Some(Node { id: "attache-watch".to_owned(), cluster: String::new() }),
        resource_names: args.names.clone(),
        type_url: SECRET_TYPE_URL.to_owned(),
        response_nonce: nonce,
        ..DiscoveryRequest::default()
    };
    // Sending can't fail: the receiver is in the call below.
    let _ = requests.send(request(String::new(), String::new()));
    let call = Request::new(UnboundedReceiverStream::new(outgoing));
    let refused = |status: Status| match ConnectionClosed::is_cause_of(&status) {
        true => ConnectionClosed::new(socket).into(),
        false => anyhow!("the agent refused the stream: {}", message(&status)),
    };
    let mut pushes = client.stream_secrets(call).await.map_err(refused)?.into_inner();
    *is_connected = true;
    let broken = |status: Status| anyhow!("the stream broke: {}", message(&status));
    while let Some(push) = pushes.message().await.map_err(broken)? {
        print(args.output, &push)?;
        let _ = requests.send(request(push.version_info, push.nonce));
    }
    Ok(())
}

fn message(status: &Status) -> &str {
    if status.message().is_empty() { status.code().description() } else { status.message() }
}

fn print(output: Output, push: &DiscoveryResponse) -> anyhow::Result<()> {
    let now = Clock::system().now();
    let at = rfc3339_millis(now);
    let mut out = String::new();
    for any in &push.resources {
        let secret = Secret::decode(any.value.clone()).context("a push is not a Secret message")?;
        let view = match SecretView::new(secret) {
            Ok(view) => view,
            Err(status) => bail!("a push can't be shown: {}", status.message()),
        };
        out.push_str(&match output {
            Output::Table => format!("--- {at} version {}\n{}", push.version_info, view.table(now)),
            Output::Json => {
                let secret = view.json(false);
                let line = json!({ "at": at.to_string(), "version": push.version_info, "secret": secret });
                format!("{line}\n")
            }
        });
    }
    super::print(out)
}
