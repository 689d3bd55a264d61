//! `attache watch`: prints every push of an SDS socket, as Envoy would get it.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use prost::Message as _;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Status};

use super::get::Shown;
use super::{Closed, connect, note, sds_socket};
use crate::base::clock::{Clock, rfc3339_millis};
use crate::net::http2;
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::extensions::transport_sockets::tls::v3::Secret;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;

/// How long to wait before connecting anew, where the agent has gone.
const PAUSE: Duration = Duration::from_secs(1);

/// Subscribe to secrets on an SDS socket, and print each push until interrupted.
///
/// It accepts what it gets, as an Envoy does that likes everything, and connects anew when the agent restarts. Private
/// keys are never printed.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct WatchArgs {
    /// Resource names
    #[arg(value_name = "NAME", default_values = ["default", "ROOTCA"])]
    names: Vec<String>,
    /// The socket to ask [default: ATTACHE_SOCKET, else /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// What to print: a table for each push, or one line of JSON
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Table,
    Json,
}

/// Watches for ever; the first connection must succeed.
pub(super) fn run(args: &WatchArgs) -> anyhow::Result<()> {
    super::block_on(async {
        let mut was_connected = false;
        let mut gone = None;
        loop {
            let mut is_connected = false;
            let ended = watch(args, &mut is_connected).await;
            was_connected |= is_connected;
            let why = match ended {
                Err(error) if !was_connected || error.is::<std::io::Error>() => return Err(error),
                Err(error) => super::told(&error),
                Ok(()) => "the agent has ended the stream".to_owned(),
            };
            if is_connected || gone.as_ref() != Some(&why) {
                note(&format!("{why}; connecting anew"));
            }
            gone = Some(why);
            tokio::time::sleep(PAUSE).await;
        }
    })
}

async fn watch(args: &WatchArgs, is_connected: &mut bool) -> anyhow::Result<()> {
    let socket = sds_socket(args.socket.as_deref());
    let io = connect(&socket).await?;
    let talk = async |connection| {
        let mut client =
            SecretDiscoveryServiceClient::with_origin(connection, http::Uri::from_static("http://attache"));
        let (requests, outgoing) = mpsc::unbounded_channel();
        let request = |version: String, nonce: String| DiscoveryRequest {
            version_info: version,
            node: Some(Node { id: "attache-watch".to_owned(), cluster: String::new() }),
            resource_names: args.names.clone(),
            type_url: SECRET_TYPE_URL.to_owned(),
            response_nonce: nonce,
            ..DiscoveryRequest::default()
        };
        // The receiver is in the call below.
        let _ = requests.send(request(String::new(), String::new()));
        let call = Request::new(UnboundedReceiverStream::new(outgoing));
        let refused = |status: Status| match Closed::is_why(&status) {
            true => Closed::new(&socket).into(),
            false => anyhow!("the agent refuses the stream: {}", words(&status)),
        };
        let mut pushes = client.stream_secrets(call).await.map_err(refused)?.into_inner();
        *is_connected = true;
        let broken = |status: Status| anyhow!("the stream has broken: {}", words(&status));
        while let Some(push) = pushes.message().await.map_err(broken)? {
            print(args.output, &push)?;
            let _ = requests.send(request(push.version_info, push.nonce));
        }
        anyhow::Ok(())
    };
    match http2::with_connection(io, talk).await {
        Err(error) if Closed::is_why(&error) => Err(Closed::new(&socket).into()),
        ended => ended.with_context(|| format!("{} does not speak HTTP/2", socket.display()))?,
    }
}

/// What `status` says.
fn words(status: &Status) -> &str {
    if status.message().is_empty() { status.code().description() } else { status.message() }
}

fn print(output: Output, push: &DiscoveryResponse) -> anyhow::Result<()> {
    let now = Clock::system().now();
    let at = rfc3339_millis(now);
    let mut out = String::new();
    for any in &push.resources {
        let secret = Secret::decode(any.value.clone()).context("a push is no Secret message")?;
        let shown = match Shown::new(secret) {
            Ok(shown) => shown,
            Err(status) => bail!("a push can't be shown: {}", status.message()),
        };
        out.push_str(&match output {
            Output::Table => format!("--- {at} version {}\n{}", push.version_info, shown.table(now)),
            Output::Json => {
                let secret = shown.json(false);
                format!(
                    "{}\n",
                    json!({ "at": at.to_string(), "version": push.version_info, "secret": secret })
                )
            }
        });
    }
    let mut stdout = std::io::stdout();
    stdout.write_all(out.as_bytes()).and_then(|()| stdout.flush())?;
    Ok(())
}
