//! `attache get`: asks a socket for secrets and shows them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Request, Status};

use super::{Closed, NoAgent, connect, note, sds_socket};
use crate::base::clock::{Clock, rfc3339, span};
use crate::config::parse_duration;
use crate::net::http2;
use crate::pki::certificate::Certificate;
use crate::pki::key::PrivateKey;
use crate::pki::{crl, pem};
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::{DataSource, Node, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3::{Secret, secret::Type};
use crate::proto::envoy::service::discovery::v3::DiscoveryRequest;
use crate::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;

/// Between rounds in which something was missing, where the agent has not let them take longer.
const PAUSE: Duration = Duration::from_millis(500);
/// How long the agent may hold back an answer with --wait: so often it is told what is missing.
const ROUND: Duration = Duration::from_secs(2);
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// So many connections that are closed one after the other are not those of an agent that is just stopping.
const CLOSED: u32 = 4;

/// Fetch secrets from an SDS socket and show them.
///
/// Names are default (the workload's key pair) and ROOTCA (its trust roots). Private keys are shown only with
/// --show-key. Exits with 1 if one of the secrets is not there.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct GetArgs {
    /// Resource names
    #[arg(value_name = "NAME", default_values = ["default", "ROOTCA"])]
    names: Vec<String>,
    /// The socket to ask [default: ATTACHE_SOCKET, else /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// What to print: a table, the certificates as PEM, JSON, or none
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Print private keys too (with pem and json)
    #[arg(long)]
    show_key: bool,
    /// Wait until all of them are there and valid, and the agent too: for init containers. What is missing is told on
    /// standard error when that changes. A name that the agent does not know is not waited for
    #[arg(long)]
    wait: bool,
    /// How long to wait for secrets that are not there yet [default: 5s; with --wait without an end]
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

/// What became of each name.
type Answers = Vec<(String, Result<Shown, Status>)>;

/// Asks, and prints to standard output.
pub(super) fn run(args: &GetArgs) -> anyhow::Result<()> {
    let socket = sds_socket(args.socket.as_deref());
    let ask = async {
        match args.wait {
            true => wait(&socket, args).await,
            false => fetch(&socket, &args.names, args.timeout.unwrap_or(DEFAULT_TIMEOUT)).await,
        }
    };
    let answers = super::block_on(ask)?;
    let now = Clock::system().now();
    let mut out = Vec::new();
    let mut missing = Vec::new();
    let mut values = Vec::new();
    for (name, answer) in answers {
        let shown = match answer {
            Ok(shown) => shown,
            Err(status) => {
                missing.push(explain(&name, &status));
                continue;
            }
        };
        match args.output {
            Output::Table => out.extend_from_slice(shown.table(now).as_bytes()),
            Output::Pem => shown.write_pem(args.show_key, &mut out),
            Output::Json => values.push(shown.json(args.show_key)),
            Output::None => {}
        }
    }
    if args.output == Output::Json {
        writeln!(out, "{:#}", Value::Array(values))?;
    }
    std::io::stdout().write_all(&out).context("writing the answer failed")?;
    if missing.is_empty() { Ok(()) } else { bail!("{}", missing.join("\nattache: ")) }
}

fn explain(name: &str, status: &Status) -> String {
    match status.code() {
        Code::NotFound | Code::Unavailable if !status.message().is_empty() => status.message().to_owned(),
        Code::Unimplemented => {
            format!("{name}: this socket's server has no FetchSecrets: it is not attache's")
        }
        code => format!("{name}: {code:?}: {}", status.message()),
    }
}

/// Asks again and again until all names are there and valid, or can't come.
async fn wait(socket: &Path, args: &GetArgs) -> anyhow::Result<Answers> {
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    let left = || deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let (mut told, mut closed) = (None, 0);
    loop {
        let patience = left().unwrap_or(ROUND).min(ROUND);
        let fetched = fetch(socket, &args.names, patience).await;
        closed = if fetched.as_ref().is_err_and(|error| error.is::<Closed>()) { closed + 1 } else { 0 };
        let missing = match fetched {
            Ok(answers) => {
                let answers: Answers =
                    answers.into_iter().map(|(name, it)| (name, it.and_then(valid))).collect();
                let failed = |(name, it): &(String, Result<Shown, Status>)| {
                    Some((name.clone(), it.as_ref().err()?.clone()))
                };
                let failed: Vec<_> = answers.iter().filter_map(failed).collect();
                let can_not_come =
                    |status: &Status| matches!(status.code(), Code::NotFound | Code::Unimplemented);
                if failed.is_empty() || failed.iter().any(|(_, status)| can_not_come(status)) {
                    return Ok(answers);
                }
                let explained = failed.iter().map(|(name, status)| explain(name, status));
                explained.collect::<Vec<_>>().join("; ")
            }
            // That this user may not connect does not change by itself.
            Err(error) if is_forbidden(&error) || closed == CLOSED => return Err(error),
            Err(error) => super::told(&error),
        };
        if left().is_some_and(|left| left.is_zero()) {
            let timeout = args.timeout.unwrap_or_default();
            bail!("not there within {}: {missing}", humantime::format_duration(timeout));
        }
        if told.as_ref() != Some(&missing) {
            note(&format!("waiting: {missing}"));
            told = Some(missing);
        }
        tokio::time::sleep(left().unwrap_or(PAUSE).min(PAUSE)).await;
    }
}

fn is_forbidden(error: &anyhow::Error) -> bool {
    let refused = error.downcast_ref::<NoAgent>();
    refused.is_some_and(|refused| refused.source.kind() == std::io::ErrorKind::PermissionDenied)
}

/// What Envoy can use now. Attaché sends nothing else but for a clock that differs.
fn valid(shown: Shown) -> Result<Shown, Status> {
    let now = Clock::system().now();
    let is_valid = |one: &Certificate| one.not_before <= now && now < one.not_after;
    let unfit = |why: &str| Err(Status::unavailable(format!("{}: {why}", shown.name)));
    match (&shown.key, shown.certificates.first()) {
        (Some(key), _) if !key.fits => unfit("the private key does not fit"),
        (Some(_), Some(leaf)) if is_valid(leaf) => Ok(shown),
        // Of several roots one is enough.
        (None, Some(_)) if shown.certificates.iter().any(is_valid) => Ok(shown),
        (_, Some(first)) => unfit(&validity(first, now)),
        (_, None) => unfit("it holds no certificate"),
    }
}

/// Each name is asked for by itself, so that one that is missing tells its own reason.
async fn fetch(socket: &Path, names: &[String], patience: Duration) -> anyhow::Result<Answers> {
    let io = connect(socket).await?;
    let ask = async |connection| {
        let client =
            SecretDiscoveryServiceClient::with_origin(connection, http::Uri::from_static("http://attache"));
        // At the same time: the patience is for all of them.
        let asked: Vec<_> = names
            .iter()
            .map(|name| {
                let (client, name) = (client.clone(), name.clone());
                AbortOnDropHandle::new(tokio::spawn(async move { fetch_one(client, &name, patience).await }))
            })
            .collect();
        let mut answers = Vec::new();
        for (name, asked) in names.iter().zip(asked) {
            let answer = asked.await.unwrap_or_else(|error| Err(Status::internal(error.to_string())));
            answers.push((name.clone(), answer.and_then(Shown::new)));
        }
        answers
    };
    let is_closed =
        |(_, it): &(String, Result<Shown, Status>)| it.as_ref().is_err_and(|status| Closed::is_why(status));
    match http2::with_connection(io, ask).await {
        Ok(answers) if answers.iter().all(is_closed) => Err(Closed::new(socket).into()),
        Err(error) if Closed::is_why(&error) => Err(Closed::new(socket).into()),
        asked => asked.with_context(|| format!("{} does not speak HTTP/2", socket.display())),
    }
}

async fn fetch_one(
    mut client: SecretDiscoveryServiceClient<http2::Connection>,
    name: &str,
    timeout: Duration,
) -> Result<Secret, Status> {
    let node = Node { id: "attache-get".to_owned(), cluster: String::new() };
    let mut request = Request::new(DiscoveryRequest {
        node: Some(node),
        resource_names: vec![name.to_owned()],
        type_url: SECRET_TYPE_URL.to_owned(),
        ..DiscoveryRequest::default()
    });
    request.set_timeout(timeout);
    // The server answers before this; whoever else is there may not.
    let patience = timeout + Duration::from_secs(1);
    let response = tokio::time::timeout(patience, client.fetch_secrets(request))
        .await
        .map_err(|_| Status::deadline_exceeded("no answer"))??
        .into_inner();
    let any = response.resources.into_iter().next();
    let any = any.ok_or_else(|| Status::not_found(format!("no secret {name:?}: the answer is empty")))?;
    Secret::decode(any.value).map_err(|error| Status::data_loss(format!("not a Secret message: {error}")))
}

/// A secret, taken apart to be shown.
pub(super) struct Shown {
    name: String,
    certificates: Vec<Certificate>,
    pem: Vec<u8>,
    /// Of a key pair.
    key: Option<Key>,
    /// With a trust bundle.
    crls: usize,
}

struct Key {
    pem: Vec<u8>,
    fits: bool,
}

impl Shown {
    pub(super) fn new(secret: Secret) -> Result<Self, Status> {
        let bad = |what: &str| Status::data_loss(format!("{}: {what}", secret.name));
        let (chain, key) = match &secret.r#type {
            Some(Type::TlsCertificate(pair)) => (&pair.certificate_chain, Some(&pair.private_key)),
            Some(Type::ValidationContext(context)) => (&context.trusted_ca, None),
            None => return Err(bad("neither a key pair nor a trust bundle")),
        };
        let chain = inline(chain.as_ref()).ok_or_else(|| bad("its certificates are not inline"))?;
        let ders = pem::certificates(chain).map_err(|error| bad(&error.to_string()))?;
        let certificates = ders.iter().map(Certificate::parse).collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|error| bad(&error.to_string()))?;
        let key = key.map(|key| {
            let pem = inline(key.as_ref()).unwrap_or_default();
            let public = PrivateKey::from_pem(pem).and_then(|key| key.public_key()).ok();
            let fits = public.as_ref() == certificates.first().map(|leaf| &leaf.public_key);
            Key { pem: pem.to_vec(), fits }
        });
        let crls = match &secret.r#type {
            Some(Type::ValidationContext(context)) => inline(context.crl.as_ref()),
            _ => None,
        };
        let crls = crls.map_or(Ok(0), |crls| crl::from_pem(crls).map(|crls| crls.len()));
        let crls = crls.map_err(|error| bad(&format!("its CRLs: {error}")))?;
        Ok(Self { name: secret.name.clone(), certificates, pem: pem::of_certificates(&ders), key, crls })
    }

    pub(super) fn table(&self, now: SystemTime) -> String {
        let mut out = String::new();
        let kind = if self.key.is_some() { "key pair" } else { "trust bundle" };
        let count = match self.certificates.len() {
            1 => "1 certificate".to_owned(),
            count => format!("{count} certificates"),
        };
        // Writing to a String does not fail.
        let crls = match self.crls {
            0 => String::new(),
            1 => ", 1 CRL".to_owned(),
            count => format!(", {count} CRLs"),
        };
        let _ = writeln!(out, "{}: {kind}, {count}{crls}", self.name);
        for (index, certificate) in self.certificates.iter().enumerate() {
            let role = match (&self.key, index) {
                (Some(_), 0) => "leaf",
                (Some(_), _) => "intermediate",
                (None, _) => "root",
            };
            let mut row = |label: &str, value: &str| {
                let _ = writeln!(out, "    {label:<12} {value}");
            };
            row(role, &certificate.names());
            if !certificate.subject.is_empty() && certificate.names() != certificate.subject {
                row("subject", &certificate.subject);
            }
            row("issuer", &certificate.issuer);
            row("serial", &certificate.serial);
            row("valid", &validity(certificate, now));
            let fits = match &self.key {
                Some(key) if index == 0 && key.fits => ", the private key fits",
                Some(_) if index == 0 => ", THE PRIVATE KEY DOES NOT FIT",
                _ => "",
            };
            row("key", &format!("{}{fits}", certificate.key_type));
            if index + 1 < self.certificates.len() {
                out.push('\n');
            }
        }
        out.push('\n');
        out
    }

    fn write_pem(&self, show_key: bool, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.pem);
        if let Some(key) = self.key.as_ref().filter(|_| show_key) {
            out.extend_from_slice(&key.pem);
        }
    }

    pub(super) fn json(&self, show_key: bool) -> Value {
        let show = |moment| rfc3339(moment).to_string();
        let certificate = |certificate: &Certificate| {
            json!({
                "subject": certificate.subject,
                "issuer": certificate.issuer,
                "serial": certificate.serial,
                "uris": certificate.uris,
                "dns_names": certificate.dns_names,
                "ip_addresses": certificate.ip_addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "not_before": show(certificate.not_before),
                "not_after": show(certificate.not_after),
                "key_type": certificate.key_type,
            })
        };
        let mut value = json!({
            "name": self.name,
            "kind": if self.key.is_some() { "key_pair" } else { "trust_bundle" },
            "certificates": self.certificates.iter().map(certificate).collect::<Vec<_>>(),
            "pem": String::from_utf8_lossy(&self.pem),
        });
        if let (None, Some(fields)) = (&self.key, value.as_object_mut()) {
            fields.insert("crls".to_owned(), json!(self.crls));
        }
        if let (Some(key), Some(fields)) = (&self.key, value.as_object_mut()) {
            fields.insert("key_fits".to_owned(), json!(key.fits));
            if show_key {
                fields.insert("private_key".to_owned(), json!(String::from_utf8_lossy(&key.pem)));
            }
        }
        value
    }
}

fn inline(source: Option<&DataSource>) -> Option<&[u8]> {
    match source?.specifier.as_ref()? {
        Specifier::InlineBytes(bytes) => Some(bytes),
        Specifier::InlineString(text) => Some(text.as_bytes()),
        Specifier::Filename(_) => None,
    }
}

fn validity(certificate: &Certificate, now: SystemTime) -> String {
    let show = |moment| rfc3339(moment);
    let (from, until) = (certificate.not_before, certificate.not_after);
    let state = match (from.duration_since(now), until.duration_since(now)) {
        (Ok(ahead), _) if !ahead.is_zero() => format!("NOT YET VALID: {} to go", span(ahead)),
        (_, Ok(left)) => format!("{} left", span(left)),
        (_, Err(past)) => format!("EXPIRED {} ago", span(past.duration())),
    };
    format!("{} to {} ({state})", show(from), show(until))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    #[test]
    fn of_a_trust_bundle_any_valid_root_will_do() {
        let certificate = |year| {
            let mut params = CertificateParams::default();
            params.not_after = date_time_ymd(year, 1, 1);
            let key = KeyPair::generate().unwrap();
            Certificate::parse(params.self_signed(&key).unwrap().der()).unwrap()
        };
        let shown = |years: &[i32], key| Shown {
            name: "it".to_owned(),
            certificates: years.iter().copied().map(certificate).collect(),
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
        for (years, key, is_fit) in cases {
            let case = format!("{years:?} {}", key.is_some());
            assert_eq!(valid(shown(years, key)).is_ok(), is_fit, "{case}");
        }
    }
}
