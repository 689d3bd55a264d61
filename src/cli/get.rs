//! `attache get`: fetches secrets from an SDS socket and prints them.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, SystemTime};

use anyhow::bail;
use prost::Message as _;
use serde_json::Value;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Request, Status};

use super::note;
use super::sds_client::{ConnectFailed, ConnectionClosed, SdsClient, first_request, sds_socket, with_client};
use super::secret_view::{SecretView, validity};
use crate::base::clock::{Clock, span};
use crate::base::spiffe_id::SpiffeId;
use crate::config::{ConfigErrors, parse_duration};
use crate::pki::certificate::Certificate;
use crate::proto::envoy::extensions::transport_sockets::tls::v3::Secret;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};

/// The pause between two rounds of --wait.
const PAUSE: Duration = Duration::from_millis(500);
/// How long the agent may hold back an answer with --wait: the interval at which missing secrets are reported.
const ROUND: Duration = Duration::from_secs(2);
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// After so many closed connections in a row, the agent is not just stopping.
const MAX_CLOSED: u32 = 4;

/// Fetch secrets from an SDS socket and print them.
///
/// The names are default (the workload's key pair) and ROOTCA (its trust roots). Private keys are printed only with
/// --show-key. Exits with 1 if a secret is missing, or is not as --expect and --min-life say. Any SDS server will do: one
/// without FetchSecrets is asked by streams.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  What this agent serves:
    attache get --socket /run/attache/sds.sock
  The roots, for another program:
    attache get ROOTCA --output pem >roots.pem
  Wait until both are there, as in an init container:
    attache get --wait --timeout 60s --output none")]
pub(super) struct GetArgs {
    /// Resource names
    #[arg(value_name = "NAME", default_values = ["default", "ROOTCA"])]
    names: Vec<String>,
    /// The SDS socket [default: ATTACHE_SOCKET, else /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The format: a table, the certificates as PEM, JSON, or no output
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Print private keys too (only with --output pem and json)
    #[arg(long)]
    show_key: bool,
    /// The node id in the requests
    #[arg(long, value_name = "ID", default_value = "attache-get")]
    node_id: String,
    /// Fail unless each key pair is for this SPIFFE ID
    #[arg(long, value_name = "ID")]
    expect: Option<SpiffeId>,
    /// Fail unless each key pair, and at least one root of each trust bundle, is valid for so long
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    min_life: Option<Duration>,
    /// Wait until the agent runs and every secret is available and valid: for init containers. Changes of what is missing
    /// are reported on standard error. A name that the agent does not know ends the wait
    #[arg(long)]
    wait: bool,
    /// How long to wait for missing secrets [default: 5s; without limit with --wait]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    timeout: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Table,
    Pem,
    Json,
    None,
}

/// Each name with its secret, or the reason why there is none.
type Answers = Vec<(String, Result<SecretView, Status>)>;

pub(super) fn run(args: &GetArgs) -> anyhow::Result<()> {
    if args.show_key && !matches!(args.output, Output::Pem | Output::Json) {
        let mistake =
            "--show-key prints keys with --output pem or --output json alone: add one of them, or drop it";
        return Err(ConfigErrors(vec![mistake.to_owned()]).into());
    }
    let socket = sds_socket(args.socket.as_deref());
    let answers = super::block_on(async {
        match args.wait {
            true => wait(&socket, args).await,
            false => fetch(&socket, args, args.timeout.unwrap_or(DEFAULT_TIMEOUT)).await,
        }
    })?;
    let now = Clock::system().now();
    let mut out = Vec::new();
    let mut missing = Vec::new();
    let mut values = Vec::new();
    // A secret without an answer may be one.
    let may_be_pair =
        |(_, answer): &(String, Result<SecretView, _>)| answer.as_ref().map_or(true, |it| it.key.is_some());
    if args.expect.is_some() && !answers.iter().any(may_be_pair) {
        missing.push("--expect: none of these secrets is a key pair".to_owned());
    }
    for (name, answer) in answers {
        let view = match answer {
            Ok(view) => view,
            Err(status) => {
                missing.push(explain(&name, &status));
                continue;
            }
        };
        missing.extend(args.unmet(&view, now));
        match args.output {
            Output::Table => out.extend_from_slice(view.table(now).as_bytes()),
            Output::Pem => view.write_pem(args.show_key, &mut out),
            Output::Json => values.push(view.json(args.show_key)),
            Output::None => {}
        }
    }
    if args.output == Output::Json {
        writeln!(out, "{:#}", Value::Array(values))?;
    }
    super::print(out)?;
    if missing.is_empty() { Ok(()) } else { bail!("{}", missing.join("\nattache: ")) }
}

impl GetArgs {
    /// What is not as it was asked for.
    fn unmet(&self, view: &SecretView, now: SystemTime) -> Option<String> {
        let is_expected = |id: &SpiffeId| {
            let leaf = view.certificates.first();
            leaf.is_some_and(|leaf| leaf.uris.iter().any(|uri| uri == id.as_str()))
        };
        if let Some(id) = self.expect.as_ref().filter(|id| view.key.is_some() && !is_expected(id)) {
            let names = view.certificates.first().map(Certificate::names).unwrap_or_default();
            return Some(format!("{}: the certificate is for {names}, not for {id} (--expect)", view.name));
        }
        let left = |one: &Certificate| match one.not_before > now {
            true => Duration::ZERO,
            false => one.not_after.duration_since(now).unwrap_or_default(),
        };
        let lives = view.certificates.iter().map(left);
        let left = if view.key.is_some() { lives.min() } else { lives.max() }.unwrap_or_default();
        self.min_life.filter(|min| left < *min).map(|min| {
            let min = humantime::format_duration(min);
            format!("{}: {} left, less than {min} (--min-life)", view.name, span(left))
        })
    }
}

fn explain(name: &str, status: &Status) -> String {
    match status.code() {
        Code::NotFound | Code::Unavailable if !status.message().is_empty() => status.message().to_owned(),
        Code::Unimplemented => format!("{name}: the server of this socket does not serve secrets (SDS)"),
        code => format!("{name}: {code:?}: {}", status.message()),
    }
}

/// Retries until every secret is available and valid, or can't become so.
async fn wait(socket: &Path, args: &GetArgs) -> anyhow::Result<Answers> {
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    let left = || deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let (mut reported, mut closed) = (None, 0);
    loop {
        let patience = left().unwrap_or(ROUND).min(ROUND);
        let fetched = fetch(socket, args, patience).await;
        closed =
            if fetched.as_ref().is_err_and(|error| error.is::<ConnectionClosed>()) { closed + 1 } else { 0 };
        let missing = match fetched.map(|answers| only_usable(answers, args)) {
            Ok(answers) if is_final(&answers) => return Ok(answers),
            Ok(answers) => {
                let failed = answers.iter().filter_map(|(name, it)| Some((name, it.as_ref().err()?)));
                failed.map(|(name, status)| explain(name, status)).collect::<Vec<_>>().join("; ")
            }
            // Missing permission does not come by waiting.
            Err(error) if is_forbidden(&error) || closed == MAX_CLOSED => return Err(error),
            Err(error) => super::with_causes(&error),
        };
        if left().is_some_and(|left| left.is_zero()) {
            let timeout = humantime::format_duration(args.timeout.unwrap_or_default());
            bail!("not available within {timeout}: {missing}");
        }
        if reported.as_ref() != Some(&missing) {
            note(&format!("waiting: {missing}"));
            reported = Some(missing);
        }
        tokio::time::sleep(left().unwrap_or(PAUSE).min(PAUSE)).await;
    }
}

/// Whether all secrets are available, or one of them can't become available.
fn is_final(answers: &Answers) -> bool {
    let mut failures = answers.iter().filter_map(|(_, it)| it.as_ref().err()).peekable();
    failures.peek().is_none()
        || failures.any(|status| matches!(status.code(), Code::NotFound | Code::Unimplemented))
}

fn is_forbidden(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ConnectFailed>().is_some_and(ConnectFailed::is_permission_denied)
}

fn only_usable(answers: Answers, args: &GetArgs) -> Answers {
    let now = Clock::system().now();
    let met = |view: SecretView| match args.unmet(&view, now) {
        Some(why) => Err(Status::unavailable(why)),
        None => Ok(view),
    };
    answers.into_iter().map(|(name, it)| (name, it.and_then(usable).and_then(met))).collect()
}

/// Refuses a secret that Envoy can't use now. Attaché sends such a secret only if its clock differs.
fn usable(view: SecretView) -> Result<SecretView, Status> {
    let now = Clock::system().now();
    let is_valid = |one: &Certificate| one.not_before <= now && now < one.not_after;
    let unusable = |why: &str| Err(Status::unavailable(format!("{}: {why}", view.name)));
    match (&view.key, view.certificates.first()) {
        (Some(key), _) if !key.fits => unusable("the private key does not match the certificate"),
        (Some(_), Some(leaf)) if is_valid(leaf) => Ok(view),
        // One valid root is enough.
        (None, Some(_)) if view.certificates.iter().any(is_valid) => Ok(view),
        (_, Some(first)) => unusable(&validity(first, now)),
        (_, None) => unusable("it contains no certificate"),
    }
}

/// Fetches each name by a call of its own, so that each missing one has its own reason.
async fn fetch(socket: &Path, args: &GetArgs, patience: Duration) -> anyhow::Result<Answers> {
    let names = &args.names;
    let answers = with_client(socket, async |client: SdsClient| {
        // All at once: the patience is for all of them.
        let calls: Vec<_> = names
            .iter()
            .map(|name| {
                let (client, request) = (client.clone(), first_request(name, &args.node_id));
                AbortOnDropHandle::new(tokio::spawn(fetch_one(client, request, patience)))
            })
            .collect();
        let mut answers = Vec::new();
        for (name, call) in names.iter().zip(calls) {
            let answer = call.await.unwrap_or_else(|error| Err(Status::internal(error.to_string())));
            answers.push((name.clone(), answer.and_then(SecretView::new)));
        }
        answers
    })
    .await?;
    let is_closed = |(_, it): &(String, Result<_, Status>)| {
        it.as_ref().is_err_and(|status| ConnectionClosed::is_cause_of(status))
    };
    if answers.iter().all(is_closed) {
        return Err(ConnectionClosed::new(socket).into());
    }
    Ok(answers)
}

async fn fetch_one(
    mut client: SdsClient,
    wanted: DiscoveryRequest,
    timeout: Duration,
) -> Result<Secret, Status> {
    static HAS_NO_FETCH: Once = Once::new();
    let mut request = Request::new(wanted.clone());
    request.set_timeout(timeout);
    // The agent answers within the timeout; another server may not.
    let patience = timeout + Duration::from_secs(1);
    let fetched = tokio::time::timeout(patience, client.fetch_secrets(request)).await;
    match fetched.map_err(|_| Status::deadline_exceeded("no answer"))? {
        Ok(response) => {
            let name = wanted.resource_names.concat();
            let empty = || Status::not_found(format!("no secret {name:?}: the answer is empty"));
            secret(response.into_inner(), &name)?.ok_or_else(empty)
        }
        Err(status) if status.code() == Code::Unimplemented => {
            let secret = from_stream(client, wanted, timeout).await?;
            HAS_NO_FETCH.call_once(|| note("the server has no FetchSecrets; secrets taken from streams"));
            Ok(secret)
        }
        Err(status) => Err(status),
    }
}

/// Subscribes to a name, and ends the stream once the secret is there.
async fn from_stream(
    mut client: SdsClient,
    wanted: DiscoveryRequest,
    patience: Duration,
) -> Result<Secret, Status> {
    let name = wanted.resource_names.concat();
    let first = async {
        // A stream of requests that does not end before the answer.
        let requests = tokio_stream::once(wanted).chain(tokio_stream::pending());
        let mut answers = client.stream_secrets(requests).await?.into_inner();
        while let Some(answer) = answers.message().await? {
            if let Some(secret) = secret(answer, &name)? {
                return Ok(secret);
            }
        }
        Err(Status::unavailable(format!("no secret {name:?}: the server closed the stream")))
    };
    tokio::time::timeout(patience, first).await.unwrap_or_else(|_| {
        let patience = humantime::format_duration(patience);
        Err(Status::unavailable(format!("no secret {name:?}: no answer within {patience}")))
    })
}

/// The secret `name` of an answer, or the first one if all have other names.
fn secret(answer: DiscoveryResponse, name: &str) -> Result<Option<Secret>, Status> {
    let mut first = None;
    for any in answer.resources {
        let secret = Secret::decode(any.value);
        let secret = secret.map_err(|error| Status::data_loss(format!("not a Secret message: {error}")))?;
        if secret.name == name {
            return Ok(Some(secret));
        }
        first.get_or_insert(secret);
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::super::secret_view::Key;
    use super::*;

    #[test]
    fn a_trust_bundle_with_one_valid_root_is_usable() {
        let certificate = |year| {
            let mut params = CertificateParams::default();
            params.not_after = date_time_ymd(year, 1, 1);
            let key = KeyPair::generate().unwrap();
            Certificate::parse(params.self_signed(&key).unwrap().der()).unwrap()
        };
        let view = |years: &[i32], key| SecretView {
            name: "it".to_owned(),
            certificates: years.iter().copied().map(certificate).collect(),
            trust_domains: Vec::new(),
            pem: Vec::new(),
            key,
            crls: 0,
        };
        let key = |fits| Some(Key { pem: Vec::new(), fits });
        let (past, future) = (2001, 4001);
        let cases: [(&[i32], Option<Key>, bool); 8] = [
            (&[future], None, true),
            (&[past, future], None, true),
            (&[past, past], None, false),
            (&[], None, false),
            (&[future, past], key(true), true),
            (&[past, future], key(true), false),
            (&[future], key(false), false),
            (&[], key(true), false),
        ];
        for (years, key, is_usable) in cases {
            let case = format!("{years:?} {}", key.is_some());
            assert_eq!(usable(view(years, key)).is_ok(), is_usable, "{case}");
        }
    }
}
