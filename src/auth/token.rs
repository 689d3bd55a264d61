//! The source of the bearer token for calls to a CA: a file, a token service that exchanges it, or the metadata server of
//! Google's machines.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use zeroize::Zeroizing;

use super::exchange::Exchange;
use super::metadata_server::MetadataServer;
use crate::auth::token_file::{CredentialError, Token, TokenFile};
use crate::base::clock::Clock;
use crate::base::limits;
use crate::base::retry::Class;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::net::error::{ConnectionOptions, TransportError};

/// The configured source of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSettings {
    File(TokenFile),
    Service {
        service: Service,
        /// The timeout of the service. Less than that of a call to the CA, so that the error names the slow one.
        patience: Duration,
    },
}

/// A service that issues tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Service {
    /// A token service that exchanges the token in a file.
    Exchange(Exchange),
    Metadata(MetadataServer),
}

impl From<TokenFile> for TokenSettings {
    fn from(file: TokenFile) -> Self {
        Self::File(file)
    }
}

impl TokenSettings {
    /// The file with the workload's own token.
    pub fn file(&self) -> Option<&TokenFile> {
        match self {
            Self::File(file) => Some(file),
            Self::Service { service: Service::Exchange(exchange), .. } => Some(&exchange.subject),
            Self::Service { service: Service::Metadata(_), .. } => None,
        }
    }
}

impl Service {
    async fn fetch(&self, patience: Duration, now: SystemTime, disk: &Disk) -> Result<Granted, NoToken> {
        let fetched = match self {
            Self::Exchange(exchange) => {
                let subject = exchange.subject.read(disk).await?;
                timeout(patience, exchange.fetch(&subject, now, disk)).await
            }
            Self::Metadata(server) => timeout(patience, server.fetch(now, disk)).await,
        };
        let timed_out =
            |_| Err(Failure::new(Class::Transient, format!("it did not answer within {patience:?}")));
        fetched.unwrap_or_else(timed_out).map_err(|Failure { reason, class, retry_after }| NoToken::Service {
            service: self.to_string(),
            reason,
            class,
            retry_after,
        })
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchange(exchange) => write!(f, "the token service at {}", exchange.url.address),
            Self::Metadata(server) => write!(f, "the metadata server at {}", server.address),
        }
    }
}

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum NoToken {
    #[error(transparent)]
    File(#[from] CredentialError),
    #[error("{service} issued no token: {reason}")]
    Service { service: String, reason: String, class: Class, retry_after: Option<Duration> },
}

impl NoToken {
    /// Whether a retry may succeed without a change by a person.
    pub fn class(&self) -> Class {
        match self {
            // The file may be about to be written.
            Self::File(_) => Class::Transient,
            Self::Service { class, .. } => *class,
        }
    }
}

/// Why a service issued no token.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) reason: String,
    pub(super) class: Class,
    pub(super) retry_after: Option<Duration>,
}

impl Failure {
    pub(super) fn new(class: Class, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), class, retry_after: None }
    }

    /// A call that failed; `if_unreachable` is the remedy where the service can't be reached.
    pub(super) fn of_call(error: &TransportError, options: &ConnectionOptions, if_unreachable: &str) -> Self {
        let reason = match error {
            TransportError::Unreachable(_) => format!("{error}; {if_unreachable}"),
            error => error.explain(options),
        };
        Self::new(error.class(), reason)
    }
}

/// A token that a service issued.
#[derive(Debug)]
pub(super) struct Granted {
    token: Arc<Token>,
    /// Its lifetime when it was issued, and its expiry; none if unknown.
    validity: Option<(Duration, SystemTime)>,
}

impl Granted {
    pub(super) fn new(token: Token, expires_in: Option<Duration>, now: SystemTime) -> Self {
        /// The longest use of a token, whatever its lifetime: it may be revoked.
        const LONGEST: Duration = Duration::from_secs(24 * 3600);
        let claimed = token.claims().and_then(|claims| claims.expires?.duration_since(now).ok());
        // `expires_in` does not depend on two clocks.
        let lifetime = expires_in.or(claimed).map(|lifetime| lifetime.min(LONGEST));
        Self { token: Arc::new(token), validity: lifetime.map(|lifetime| (lifetime, now + lifetime)) }
    }

    /// Parses the response of a service that issues access tokens.
    pub(super) fn from_json(body: &[u8], now: SystemTime) -> Result<Self, String> {
        let mut reply: Value =
            serde_json::from_slice(body).map_err(|_| "its answer is not JSON".to_owned())?;
        let Some(Value::String(text)) = reply.get_mut("access_token").map(Value::take) else {
            return Err("its answer has no access_token".to_owned());
        };
        let text = Zeroizing::new(text);
        if let Some(kind) = reply.get("token_type").and_then(Value::as_str)
            && !["bearer", "n_a"].contains(&kind.to_ascii_lowercase().as_str())
        {
            return Err(format!(
                "its token is of the type {:?}, not a bearer token",
                text::sanitize_for_log(kind)
            ));
        }
        // Some services write the number as text.
        let seconds = reply.get("expires_in");
        let seconds = seconds.and_then(|value| value.as_f64().or_else(|| value.as_str()?.parse().ok()));
        let expires_in = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Ok(Self::new(parse_token(text.as_bytes())?, expires_in, now))
    }

    /// Whether a call at `now` can use it: not in the last quarter of its lifetime.
    fn is_fresh(&self, now: SystemTime) -> bool {
        let Some((lifetime, expires)) = self.validity else { return false };
        expires.duration_since(now).is_ok_and(|left| left > lifetime / 4)
    }
}

pub(super) fn parse_token(text: &[u8]) -> Result<Token, String> {
    let text = text.trim_ascii();
    if u64::try_from(text.len()).is_ok_and(|length| length > limits::TOKEN_BYTES) {
        return Err(format!("its token is longer than {} bytes", limits::TOKEN_BYTES));
    }
    Token::parse(text).map_err(|reason| format!("its answer holds no token: {reason}"))
}

/// The token of one call.
#[derive(Clone, Debug)]
pub struct Bearer {
    token: Arc<Token>,
    /// Whether it was issued for an earlier call.
    is_kept: bool,
}

impl Deref for Bearer {
    type Target = Token;

    fn deref(&self) -> &Token {
        &self.token
    }
}

/// Provides calls with a token. The token of a service is kept until it nears its expiry, or a CA refuses it.
#[derive(Debug)]
pub struct TokenSource {
    settings: TokenSettings,
    clock: Clock,
    disk: Disk,
    kept: Mutex<Option<Granted>>,
    /// One call at a time asks the service; the calls that wait use the same token.
    turn: Semaphore,
}

impl TokenSource {
    pub fn new(settings: TokenSettings, clock: Clock, disk: Disk) -> Self {
        Self { settings, clock, disk, kept: Mutex::default(), turn: Semaphore::new(1) }
    }

    /// The file with the workload's own token, from which its identity follows.
    pub fn file(&self) -> Option<&TokenFile> {
        self.settings.file()
    }

    /// A token for a call. The caller sets the deadline; a caller that gives up blocks no other.
    pub async fn token(&self) -> Result<Bearer, NoToken> {
        let (service, patience) = match &self.settings {
            // Other processes rotate the file: its token is never kept.
            TokenSettings::File(file) => {
                let token = Arc::new(file.read(&self.disk).await?);
                return Ok(Bearer { token, is_kept: false });
            }
            TokenSettings::Service { service, patience } => (service, *patience),
        };
        // The semaphore is never closed; at worst there would be one call too many.
        let _turn = self.turn.acquire().await;
        let now = self.clock.now();
        if let Some(kept) = self.kept().as_ref().filter(|kept| kept.is_fresh(now)) {
            return Ok(Bearer { token: Arc::clone(&kept.token), is_kept: true });
        }
        let granted = service.fetch(patience, now, &self.disk).await?;
        let lifetime_s = granted.validity.map(|(lifetime, _)| lifetime.as_secs());
        tracing::debug!(%service, lifetime_s, "token received");
        let token = Arc::clone(&granted.token);
        *self.kept() = Some(granted);
        Ok(Bearer { token, is_kept: false })
    }

    /// Another token for a call whose token was `refused`; none where an immediate retry is pointless: the file has not
    /// changed, or the service has only just issued the token. Call this for each refusal: the refused token is dropped.
    pub async fn another(&self, refused: &Bearer) -> Option<Bearer> {
        let is_service = matches!(self.settings, TokenSettings::Service { .. });
        if is_service {
            self.kept().take_if(|kept| Arc::ptr_eq(&kept.token, &refused.token));
        }
        if is_service && !refused.is_kept {
            return None;
        }
        self.token().await.ok().filter(|other| other.secret() != refused.secret())
    }

    /// Describes `token` and its source, for the message about a CA that refused it.
    pub fn describe(&self, token: &Token) -> String {
        let described = token.describe(self.clock.now());
        match &self.settings {
            TokenSettings::File(file) => format!("{described}; {}", file.origin()),
            TokenSettings::Service { service: service @ Service::Exchange(exchange), .. } => {
                format!("{described}; {service} issued it for {}", exchange.subject)
            }
            TokenSettings::Service { service, .. } => format!("{described}; {service} issued it"),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Option<Granted>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
