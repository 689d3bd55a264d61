//! `attache watch`: subscribes to an SDS socket as Envoy does, and prints every push.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{anyhow, bail};
use prost::Message as _;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Request, Status};

use super::admin::socket_of;
use super::note;
use super::sds_client::{ConnectionClosed, SdsClient, first_request, sds_socket, with_client};
use super::secret_view::SecretView;
use crate::base::clock::{Clock, rfc3339_millis};
use crate::proto::envoy::extensions::transport_sockets::tls::v3::Secret;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};

/// The pause before reconnecting, and before a name that was refused is asked for again.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause of a name that is refused again and again.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long the agent may hold back its answer whether it knows a name. It says so at once if it does not.
const PROBE: Duration = Duration::from_secs(1);

/// Subscribe to secrets on an SDS socket, and print each push until interrupted.
///
/// Each name has a stream of its own, as in an Envoy, and every push is acknowledged, as by an Envoy that accepts everything.
/// When the agent restarts, the command reconnects. Private keys are never printed. Exits with 1 if the server has none of
/// the names, and with 0 when its output is closed.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct WatchArgs {
    /// Resource names
    #[arg(value_name = "NAME", default_values = ["default", "ROOTCA"])]
    names: Vec<String>,
    /// The SDS socket [default: ATTACHE_SOCKET, else /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The socket of this workload of attache node
    #[arg(long, value_name = "NAME", conflicts_with = "socket")]
    workload: Option<String>,
    /// The format: a table for each push, one line of JSON, or the certificates as PEM
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table)]
    output: Output,
    /// The node id in the requests
    #[arg(long, value_name = "ID", default_value = "attache-watch")]
    node_id: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Table,
    Json,
    Pem,
}

/// Runs until interrupted, or until its output is closed; the first connection must succeed.
pub(super) fn run(args: &WatchArgs) -> anyhow::Result<()> {
    super::block_on(super::until_output_is_closed(reconnect(args)))
}

/// What is known across connections.
#[derive(Default)]
struct Progress {
    /// A stream of this connection was accepted.
    is_open: bool,
    was_pushed: bool,
    /// The names that the server refuses, with the reason.
    refused: BTreeMap<String, String>,
}

/// The server refuses every name.
#[derive(Debug, thiserror::Error)]
#[error("the server has none of these secrets")]
struct AllRefused;

async fn reconnect(args: &WatchArgs) -> anyhow::Result<()> {
    let socket = match &args.workload {
        Some(name) => socket_of(name).await?,
        None => sds_socket(args.socket.as_deref()),
    };
    let mut progress = Progress::default();
    let (mut was_open, mut reported) = (false, None);
    loop {
        progress.is_open = false;
        let talk = async |client| watch(client, args, &socket, &mut progress).await;
        let error = match with_client(&socket, talk).await.and_then(|ended| ended) {
            Err(error) => error,
            Ok(()) => anyhow!("all streams ended"),
        };
        was_open |= progress.is_open;
        if !was_open || error.is::<AllRefused>() || error.is::<io::Error>() {
            return Err(error);
        }
        let reason = super::with_causes(&error);
        if progress.is_open || reported.as_ref() != Some(&reason) {
            note(&format!("{reason}; reconnecting"));
        }
        reported = Some(reason);
        tokio::time::sleep(PAUSE).await;
    }
}

enum Event {
    Opened,
    /// A push for this name.
    Push(String, DiscoveryResponse),
    /// The server does not serve this name, at least not now.
    Refused(String, String),
    /// The server ended a stream, or the connection.
    Ended(Status),
}

/// One connection: prints every push.
async fn watch(
    client: SdsClient,
    args: &WatchArgs,
    socket: &Path,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let (events, mut received) = mpsc::channel(1);
    let mut tasks = Vec::new();
    for name in &args.names {
        let request = first_request(name, &args.node_id);
        let follow = follow(client.clone(), request.clone(), events.clone());
        tasks.push(AbortOnDropHandle::new(tokio::spawn(follow)));
        tasks.push(AbortOnDropHandle::new(tokio::spawn(probe(client.clone(), request, events.clone()))));
    }
    drop(events);
    while let Some(event) = received.recv().await {
        match event {
            Event::Opened => progress.is_open = true,
            Event::Push(name, push) => {
                progress.was_pushed = true;
                progress.refused.remove(&name);
                print(args.output, &push)?;
            }
            Event::Refused(name, reason) if progress.refused.get(&name) != Some(&reason) => {
                note(&reason);
                progress.refused.insert(name, reason);
                if !progress.was_pushed && args.names.iter().all(|name| progress.refused.contains_key(name)) {
                    return Err(AllRefused.into());
                }
            }
            Event::Refused(..) => {}
            Event::Ended(status) if ConnectionClosed::is_cause_of(&status) => {
                return Err(ConnectionClosed::new(socket).into());
            }
            Event::Ended(status) => bail!("the stream ended: {}", message(&status)),
        }
    }
    Ok(())
}

/// Reports a name that the agent does not know, for which a stream never has an answer. A server without FetchSecrets can't
/// say so.
async fn probe(mut client: SdsClient, request: DiscoveryRequest, events: mpsc::Sender<Event>) {
    let name = request.resource_names.concat();
    let mut request = Request::new(request);
    request.set_timeout(PROBE);
    if let Err(status) = client.fetch_secrets(request).await
        && status.code() == Code::NotFound
    {
        let _ = events.send(Event::Refused(name, message(&status).to_owned())).await;
    }
}

/// Subscribes to a name, and again as long as the server refuses it.
async fn follow(mut client: SdsClient, request: DiscoveryRequest, events: mpsc::Sender<Event>) {
    let name = request.resource_names.concat();
    let mut pause = PAUSE;
    loop {
        let status = match subscribe(&mut client, &request, &events).await {
            Ok(()) => Status::unavailable("the server closed it"),
            Err(status) => status,
        };
        let refused = Event::Refused(name.clone(), format!("{name}: {}", message(&status)));
        let is_refused = is_refusal(status.code());
        let _ = events.send(if is_refused { refused } else { Event::Ended(status) }).await;
        if !is_refused {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Whether a status concerns the name, and not the connection.
fn is_refusal(code: Code) -> bool {
    !matches!(
        code,
        Code::Ok | Code::Cancelled | Code::Unknown | Code::Internal | Code::Unavailable | Code::Aborted
    )
}

/// One stream, of which each push is acknowledged.
async fn subscribe(
    client: &mut SdsClient,
    request: &DiscoveryRequest,
    events: &mpsc::Sender<Event>,
) -> Result<(), Status> {
    let name = request.resource_names.concat();
    let (requests, outgoing) = mpsc::unbounded_channel();
    // Sending can't fail: the receiver is in the call below.
    let _ = requests.send(request.clone());
    let call = Request::new(UnboundedReceiverStream::new(outgoing));
    let mut pushes = client.stream_secrets(call).await?.into_inner();
    let _ = events.send(Event::Opened).await;
    while let Some(push) = pushes.message().await? {
        let acknowledgement = DiscoveryRequest {
            version_info: push.version_info.clone(),
            response_nonce: push.nonce.clone(),
            ..request.clone()
        };
        let _ = events.send(Event::Push(name.clone(), push)).await;
        let _ = requests.send(acknowledgement);
    }
    Ok(())
}

fn message(status: &Status) -> &str {
    if status.message().is_empty() { status.code().description() } else { status.message() }
}

fn print(output: Output, push: &DiscoveryResponse) -> anyhow::Result<()> {
    let now = Clock::system().now();
    let at = rfc3339_millis(now);
    let mut out = Vec::new();
    for any in &push.resources {
        let secret = Secret::decode(any.value.clone());
        let secret = secret.map_err(|error| Status::data_loss(format!("not a Secret message: {error}")));
        let view = match secret.and_then(SecretView::new) {
            Ok(view) => view,
            Err(status) => {
                note(&format!("a push can't be shown: {}", status.message()));
                continue;
            }
        };
        let version = &push.version_info;
        match output {
            Output::Table => {
                let named = if version.is_empty() {
                    "without a version".into()
                } else {
                    format!("version {version}")
                };
                out.extend(format!("--- {at} {} {named}\n{}", view.name, view.table(now)).into_bytes());
            }
            Output::Json => {
                let line = json!({ "at": at.to_string(), "version": version, "secret": view.json(false) });
                out.extend(format!("{line}\n").into_bytes());
            }
            Output::Pem => view.write_pem(false, &mut out),
        }
    }
    super::print(out)
}
