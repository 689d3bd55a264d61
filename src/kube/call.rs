//! Calls to one API server: their credential, deadline, retries and refusals.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, USER_AGENT};
use http::{Method, Request, Response, StatusCode, Uri};
use serde_json::Value;
use tokio::time::{Instant, timeout};

use super::connection::Lease;
use super::pool::Connections;
use super::{ClusterConfig, Credential, KubeError};
use crate::auth::token_file::{CredentialError, Token};
use crate::base::clock::Clock;
use crate::base::limits;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::net::buffer::{Buffer, wipe};
use crate::net::error::{TransportError, retry_after};

/// Of a call whose caller has no deadline.
const PATIENCE: Duration = Duration::from_secs(10);
/// TCP, TLS and HTTP/2 have this long each: together less than a call, so that the error says which of them hangs.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// A token that was read is used this long: thousands of calls may begin at the same moment.
const TOKEN_USE: Duration = Duration::from_secs(1);
/// How often one call is sent.
const TRIES: u32 = 3;

/// What the calls and watches of one API server share.
pub(super) struct Caller {
    /// The API server's, as messages name it.
    pub(super) address: String,
    /// The URL of `/`.
    base: String,
    credential: Credential,
    connections: Connections,
    clock: Clock,
    disk: Disk,
    /// How long a call may take; of a watch, until it begins.
    patience: Duration,
    /// The last token of the file, and when it was read.
    token: Mutex<Option<(Instant, Arc<Token>)>>,
}

/// A request.
pub(super) struct Call<'a> {
    pub(super) method: Method,
    /// Path and query.
    pub(super) path: &'a str,
    pub(super) body: Option<Bytes>,
    /// A second one does no harm: it is sent again when the connection breaks.
    pub(super) is_repeatable: bool,
}

impl<'a> Call<'a> {
    pub(super) fn get(path: &'a str) -> Self {
        Self { method: Method::GET, path, body: None, is_repeatable: true }
    }
}

/// An answer whose body is still to come.
pub(super) struct Answer {
    pub(super) response: Response<RecvStream>,
    pub(super) lease: Lease,
    token: Option<Arc<Token>>,
}

impl Caller {
    pub(super) fn new(config: ClusterConfig, disk: &Disk, clock: Clock) -> Self {
        Self::patient(config, disk.within(PATIENCE), clock, PATIENCE, HANDSHAKE)
    }

    /// One whose callers have deadlines.
    pub(super) fn without_deadline(config: ClusterConfig, disk: Disk, clock: Clock) -> Self {
        Self::patient(config, disk, clock, Duration::MAX, Duration::MAX)
    }

    fn patient(
        config: ClusterConfig,
        disk: Disk,
        clock: Clock,
        patience: Duration,
        handshake: Duration,
    ) -> Self {
        let ClusterConfig { endpoint, path, credential } = config;
        let certificate = match &credential {
            Credential::Certificate(pair) => Some(pair.clone()),
            _ => None,
        };
        Self {
            address: endpoint.address.to_string(),
            base: endpoint.address.origin() + &path,
            credential,
            connections: Connections::new(endpoint, certificate, disk.clone(), handshake),
            clock,
            disk,
            patience,
            token: Mutex::default(),
        }
    }

    pub(super) fn unreadable(&self, reason: impl Into<String>) -> KubeError {
        KubeError::Unreadable { address: self.address.clone(), reason: reason.into() }
    }

    pub(super) fn expired(&self) -> KubeError {
        KubeError::Expired { address: self.address.clone() }
    }

    /// Makes a call, and returns the JSON in its answer. For answers without secrets.
    pub(super) async fn json(&self, call: &Call<'_>, limit: usize) -> Result<Value, KubeError> {
        let body = self.body(call, limit).await?;
        let value = serde_json::from_slice(body.as_slice());
        value.map_err(|_| self.unreadable("it is not JSON"))
    }

    /// Makes a call, and returns the body of its answer.
    pub(super) async fn body(&self, call: &Call<'_>, limit: usize) -> Result<Buffer, KubeError> {
        self.in_time(async {
            let Answer { response, lease, .. } = self.start(call).await?;
            Ok(read(response, &lease, limit).await?)
        })
        .await
    }

    /// Makes a call, and returns the head of its answer, which is a success.
    pub(super) async fn open(&self, call: &Call<'_>) -> Result<Answer, KubeError> {
        self.in_time(self.start(call)).await
    }

    async fn in_time<T>(&self, work: impl Future<Output = Result<T, KubeError>>) -> Result<T, KubeError> {
        let silent = || KubeError::Silent { address: self.address.clone(), patience: self.patience };
        let result = timeout(self.patience, work).await.unwrap_or_else(|_| Err(silent()));
        result.map_err(|error| self.located(error))
    }

    /// The error with the address of the server.
    pub(super) fn located(&self, error: KubeError) -> KubeError {
        match error {
            // The callers ask for less then.
            KubeError::Transport(TransportError::TooLong { .. }) => error,
            KubeError::Transport(source) => KubeError::Unreachable { address: self.address.clone(), source },
            other => other,
        }
    }

    async fn start(&self, call: &Call<'_>) -> Result<Answer, KubeError> {
        let Answer { response, lease, token } = self.send(call).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(Answer { response, lease, token });
        }
        let retry_after = retry_after(response.headers());
        let body = read(response, &lease, limits::ANSWER_BYTES).await?;
        Err(self.refused(status, retry_after, body.as_slice(), token.as_deref()))
    }

    /// Sends a request until a connection takes it, and once more where the file has another token than the refused one.
    async fn send(&self, call: &Call<'_>) -> Result<Answer, KubeError> {
        let mut token = self.token(None).await?;
        let (mut tries, mut has_other_token) = (0, false);
        loop {
            let (lease, is_new) = self.connections.lease().await?;
            let request = self.request(call, token.as_deref())?;
            tries += 1;
            let failed = match lease.send(request, call.body.clone()).await {
                Ok(response) if response.status() == StatusCode::UNAUTHORIZED && !has_other_token => {
                    has_other_token = true;
                    match self.other_than(token.as_deref()).await {
                        Some(other) => token = Some(other),
                        None => return Ok(Answer { response, lease, token }),
                    }
                    continue;
                }
                Ok(response) => return Ok(Answer { response, lease, token }),
                Err(failed) => failed,
            };
            // A connection that was open before may have broken when the server restarted.
            let is_stale = !is_new && call.is_repeatable;
            if tries >= TRIES || !(failed.is_unprocessed || is_stale) {
                return Err(failed.error.into());
            }
        }
    }

    fn request(&self, call: &Call<'_>, token: Option<&Token>) -> Result<Request<()>, TransportError> {
        let uri: Result<Uri, _> = format!("{}{}", self.base, call.path).parse();
        let mut request = Request::new(());
        *request.method_mut() = call.method.clone();
        *request.uri_mut() =
            uri.map_err(|_| TransportError::Request(format!("{:?} is not a URL path", call.path)))?;
        let headers = request.headers_mut();
        if let Some(token) = token {
            let header = token.bearer_header().map_err(|error| TransportError::Request(error.to_string()))?;
            headers.insert(AUTHORIZATION, header);
        }
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("attache/", env!("CARGO_PKG_VERSION"))));
        if let Some(body) = &call.body {
            let content_type = match call.method {
                Method::PATCH => "application/apply-patch+yaml",
                _ => "application/json",
            };
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
            headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        }
        Ok(request)
    }

    /// The token for a call; not the one that was `refused`, unless the file has no other.
    async fn token(&self, refused: Option<&Token>) -> Result<Option<Arc<Token>>, CredentialError> {
        let file = match &self.credential {
            Credential::None | Credential::Certificate(_) => return Ok(None),
            Credential::Token(token) => return Ok(Some(Arc::clone(token))),
            Credential::TokenFile(file) => file,
        };
        if let Some((read, token)) = self.kept().as_ref()
            && read.elapsed() < TOKEN_USE
            && refused.is_none_or(|refused| refused.secret() != token.secret())
        {
            return Ok(Some(Arc::clone(token)));
        }
        let token = Arc::new(file.read(&self.disk).await?);
        *self.kept() = Some((Instant::now(), Arc::clone(&token)));
        Ok(Some(token))
    }

    async fn other_than(&self, refused: Option<&Token>) -> Option<Arc<Token>> {
        let refused = refused?;
        self.token(Some(refused)).await.ok().flatten().filter(|other| other.secret() != refused.secret())
    }

    fn kept(&self) -> MutexGuard<'_, Option<(Instant, Arc<Token>)>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A refusal: an object of the kind Status, or what a proxy says.
    pub(super) fn refused(
        &self,
        status: StatusCode,
        retry_after: Option<Duration>,
        body: &[u8],
        token: Option<&Token>,
    ) -> KubeError {
        let object = serde_json::from_slice::<Value>(body).ok();
        let message = object.as_ref().and_then(|status| status.get("message")?.as_str()).map(str::to_owned);
        let message = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
        let mut message = redacted(message.trim(), token);
        if status == StatusCode::UNAUTHORIZED
            && let Some(token) = token
        {
            let described = token.describe(self.clock.now());
            message += &match &self.credential {
                Credential::TokenFile(file) => {
                    format!(" ({described}; {})", file.origin())
                }
                _ => format!(" ({described})"),
            };
        }
        KubeError::Status { address: self.address.clone(), status, message, retry_after }
    }

    /// The failure in an event of a watch, as an object of the kind Status.
    pub(super) fn failed(&self, status: &Value) -> KubeError {
        let code = status.get("code").and_then(Value::as_u64).and_then(|code| u16::try_from(code).ok());
        let code = code.and_then(|code| StatusCode::from_u16(code).ok());
        if code == Some(StatusCode::GONE) {
            return self.expired();
        }
        let token = match &self.credential {
            Credential::Token(token) => Some(Arc::clone(token)),
            _ => self.kept().as_ref().map(|(_, token)| Arc::clone(token)),
        };
        let message = status.get("message").and_then(Value::as_str).unwrap_or("the watch has failed");
        let seconds = status.pointer("/details/retryAfterSeconds").and_then(Value::as_u64);
        KubeError::Status {
            address: self.address.clone(),
            status: code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            message: redacted(message, token.as_deref()),
            retry_after: seconds.filter(|seconds| *seconds > 0).map(Duration::from_secs),
        }
    }
}

fn redacted(message: &str, token: Option<&Token>) -> String {
    token.map_or_else(|| text::sanitize_for_log(message), |token| token.redact(message))
}

async fn read(response: Response<RecvStream>, lease: &Lease, limit: usize) -> Result<Buffer, TransportError> {
    let length = response.headers().get(CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    let mut all = Buffer::with_capacity(length.unwrap_or_default().min(limit));
    let mut body = response.into_body();
    while let Some(part) = body.data().await {
        let part = part.map_err(|error| lease.failure(&error))?;
        // Fails for a stream that has ended, which needs no window.
        let _ = body.flow_control().release_capacity(part.len());
        if all.len() + part.len() > limit {
            return Err(TransportError::TooLong { limit });
        }
        all.extend(&part);
        wipe(part);
    }
    Ok(all)
}
