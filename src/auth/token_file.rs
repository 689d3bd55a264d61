//! The bearer token: a file that another process rotates, read for each call, or one that the kubelet or a client brings.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderValue;
use zeroize::Zeroizing;

use crate::base::clock::rfc3339;
use crate::base::limits;
use crate::base::spiffe_id::ServiceAccount;
use crate::base::text;
use crate::fs::disk::{Disk, Unresponsive};

/// Where a bearer token is found when it is needed: mostly a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFile(Place);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    File {
        path: PathBuf,
        /// The option that sets the path.
        option: &'static str,
    },
    Brought(BroughtToken),
}

/// A token in memory alone, which the kubelet or a client brings and replaces. Clones are the same place.
#[derive(Clone, Default)]
pub struct BroughtToken(Arc<Brought>);

#[derive(Default)]
struct Brought {
    token: Mutex<Option<Token>>,
    is_of_clients: bool,
}

impl BroughtToken {
    /// A place for what clients bring. Others are the kubelet's.
    pub fn of_clients() -> Self {
        Self(Arc::new(Brought { token: Mutex::default(), is_of_clients: true }))
    }

    /// Keeps the token if it expires later than the one that is held, which is wiped then. True if it is kept.
    pub fn offer(&self, token: Token) -> bool {
        let expires = |token: &Token| token.claims().and_then(|claims| claims.expires);
        let mut held = self.lock();
        let is_newer = held.as_ref().is_none_or(|held| expires(held) < expires(&token));
        if is_newer {
            *held = Some(token);
        }
        is_newer
    }

    /// The subject of the token that is held.
    pub fn subject(&self) -> Option<String> {
        Some(self.lock().as_ref()?.claims()?.subject.clone())
    }

    /// Replaces the token, and wipes the one before.
    pub fn bring(&self, token: Token) {
        *self.lock() = Some(token);
    }

    fn read(&self) -> Result<Token, CredentialError> {
        self.lock().as_ref().map(|token| Token::new(token.secret())).ok_or_else(|| self.absent())
    }

    fn absent(&self) -> CredentialError {
        if self.0.is_of_clients { CredentialError::NotSent } else { CredentialError::NotBrought }
    }

    /// Who brings it.
    fn bringer(&self) -> &'static str {
        if self.0.is_of_clients { "a client" } else { "the kubelet" }
    }

    /// No code panics while it holds this lock.
    fn lock(&self) -> MutexGuard<'_, Option<Token>> {
        self.0.token.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for BroughtToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BroughtToken(hidden)")
    }
}

impl PartialEq for BroughtToken {
    /// Whether both are the same place.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for BroughtToken {}

impl From<BroughtToken> for TokenFile {
    fn from(brought: BroughtToken) -> Self {
        Self(Place::Brought(brought))
    }
}

/// Why a token file gives no token.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error(
        "the token file {path} can't be read: {source}; mount the token there, or set its path with {option}"
    )]
    Unreadable { path: PathBuf, source: io::Error, option: &'static str },
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
    #[error("the token file {path} is empty: its writer has not written it yet, or failed")]
    Empty { path: PathBuf },
    #[error("the token file {path} holds no token: {reason}")]
    NotAToken { path: PathBuf, reason: &'static str },
    #[error(
        "the kubelet has not brought a token for this Pod since the agent started; it comes by about once a minute if the \
         CSIDriver has requiresRepublish"
    )]
    NotBrought,
    #[error(
        "no client has brought a token since the agent started: --token-from-request takes the one in the metadata of a \
         request (authorization: Bearer TOKEN)"
    )]
    NotSent,
}

#[derive(Debug, thiserror::Error)]
#[error("the token can't be sent in a header")]
pub struct UnsendableToken;

impl TokenFile {
    /// The file that `--token-file` names.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::named_by("--token-file", path)
    }

    /// The file at `path`, which `option` names.
    pub fn named_by(option: &'static str, path: impl Into<PathBuf>) -> Self {
        Self(Place::File { path: path.into(), option })
    }

    /// None where the token is no file.
    pub fn path(&self) -> Option<&Path> {
        match &self.0 {
            Place::File { path, .. } => Some(path),
            Place::Brought(_) => None,
        }
    }

    /// Where its token comes from, as a sentence about the token.
    pub fn origin(&self) -> String {
        match &self.0 {
            Place::File { path, .. } => format!("it is read from {}", path.display()),
            Place::Brought(brought) => format!("{} brought it", brought.bringer()),
        }
    }

    pub async fn read(&self, disk: &Disk) -> Result<Token, CredentialError> {
        let (path, option) = match &self.0 {
            Place::File { path, option } => (path, *option),
            Place::Brought(brought) => return brought.read(),
        };
        let unreadable = |source| CredentialError::Unreadable { path: path.clone(), source, option };
        let not_a_token = |reason| CredentialError::NotAToken { path: path.clone(), reason };
        let text = disk.read(path, limits::TOKEN_BYTES).await?.map_err(unreadable)?;
        let token = text.trim_ascii();
        if token.is_empty() {
            return Err(CredentialError::Empty { path: path.clone() });
        }
        Token::parse(token).map_err(not_a_token)
    }
}

impl fmt::Display for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Place::File { path, .. } => write!(f, "the token in {}", path.display()),
            Place::Brought(brought) => write!(f, "the token that {} brought", brought.bringer()),
        }
    }
}

/// A bearer token. Wiped when dropped, never shown.
pub struct Token {
    text: Zeroizing<String>,
    claims: Option<Claims>,
}

/// The claims of a JWT, whose signature is not verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// `sub`.
    pub subject: String,
    /// `aud`.
    pub audiences: Vec<String>,
    /// `nbf`.
    pub not_before: Option<SystemTime>,
    /// `exp`.
    pub expires: Option<SystemTime>,
    /// Of the Pod that Kubernetes has bound the token to: `uid` of `pod` of `kubernetes.io`.
    pub pod_uid: Option<String>,
}

impl Token {
    /// Takes any text as a token, and reads its claims if it is a JWT.
    pub fn new(text: &str) -> Self {
        Self { text: Zeroizing::new(text.to_owned()), claims: Claims::from_jwt(text) }
    }

    /// Takes `text` as a token if it can be sent in a header.
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        match std::str::from_utf8(text) {
            Ok(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Ok(Self::new(text))
            }
            _ => Err("a token is one line of printable ASCII"),
        }
    }

    pub fn secret(&self) -> &str {
        &self.text
    }

    /// The value of the header `authorization`.
    pub fn bearer_header(&self) -> Result<HeaderValue, UnsendableToken> {
        let text = Zeroizing::new(format!("Bearer {}", self.secret()));
        let mut header = HeaderValue::from_str(&text).map_err(|_| UnsendableToken)?;
        header.set_sensitive(true);
        Ok(header)
    }

    /// None if it is not a JWT.
    pub fn claims(&self) -> Option<&Claims> {
        self.claims.as_ref()
    }

    /// The service account in its `sub`.
    pub fn service_account(&self) -> Option<ServiceAccount> {
        ServiceAccount::from_subject(&self.claims.as_ref()?.subject)
    }

    /// Describes its claims, for the message about a CA that refused it.
    pub fn describe(&self, now: SystemTime) -> String {
        let Some(claims) = &self.claims else { return "the token is not a JWT".to_owned() };
        let show = rfc3339;
        let validity = match (claims.not_before, claims.expires) {
            (_, Some(at)) if at <= now => format!("EXPIRED at {}", show(at)),
            (Some(from), _) if from > now => format!("NOT VALID before {}", show(from)),
            (_, Some(at)) => format!("valid until {}", show(at)),
            (_, None) => "without expiry".to_owned(),
        };
        let subject = text::sanitize_for_log(&claims.subject);
        let audiences = text::sanitize_for_log(&claims.audiences.join(", "));
        format!("the token is for {subject}, audience [{audiences}], {validity}")
    }

    /// A server's message without this token, safe for a log line: some servers quote the token that they refuse.
    pub fn redact(&self, message: &str) -> String {
        text::sanitize_for_log(&message.replace(self.secret(), "(the token)"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

impl Claims {
    fn from_jwt(text: &str) -> Option<Self> {
        let mut parts = text.split('.');
        let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
        let payload = URL_SAFE_NO_PAD.decode(payload.trim_end_matches('=')).ok()?;
        let payload: serde_json::Value = serde_json::from_slice(&payload).ok()?;
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        let audiences = match payload.get("aud") {
            Some(serde_json::Value::Array(all)) => all.iter().filter_map(text).collect(),
            Some(one) => text(one).into_iter().collect(),
            None => Vec::new(),
        };
        let moment = |name: &str| {
            /// The end of the year 9999: later moments can't be written as a date.
            const LAST: f64 = 253_402_300_799.0;
            // Some issuers write fractions of seconds.
            let seconds = payload.get(name).and_then(serde_json::Value::as_f64).filter(|it| *it <= LAST)?;
            UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?)
        };
        Some(Self {
            subject: payload.get("sub").and_then(text).unwrap_or_default(),
            audiences,
            not_before: moment("nbf"),
            expires: moment("exp"),
            pod_uid: payload.pointer("/kubernetes.io/pod/uid").and_then(text),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jwt(payload: &str) -> String {
        format!("{}.{}.c2ln", URL_SAFE_NO_PAD.encode("{}"), URL_SAFE_NO_PAD.encode(payload))
    }

    #[test]
    fn a_description_names_service_account_audience_and_expiry() {
        let payload = r#"{"sub":"system:serviceaccount:shop:cart","aud":["istio-ca"],"exp":1000}"#;
        let token = Token::new(&jwt(payload));
        let account = token.service_account().unwrap();
        assert_eq!((account.namespace.as_str(), account.name.as_str()), ("shop", "cart"));
        let later = UNIX_EPOCH + Duration::from_secs(2000);
        let words = token.describe(later);
        assert!(words.contains("EXPIRED at 1970-01-01T00:16:40Z") && words.contains("istio-ca"), "{words}");
    }

    #[test]
    fn a_description_says_whether_the_token_is_valid_now() {
        let cases = [
            (r#"{"exp":100}"#, 99, "valid until 1970-01-01T00:01:40Z"),
            (r#"{"exp":100}"#, 100, "EXPIRED at 1970-01-01T00:01:40Z"),
            (r#"{"nbf":50,"exp":100}"#, 49, "NOT VALID before 1970-01-01T00:00:50Z"),
            (r#"{"nbf":50,"exp":100}"#, 50, "valid until"),
            (r#"{"nbf":50}"#, 50, "without expiry"),
            (r#"{"nbf":200,"exp":100}"#, 150, "EXPIRED at"),
            (r#"{"exp":253402300799}"#, 100, "valid until 9999-12-31T23:59:59Z"),
            (r#"{"exp":253402300800}"#, 100, "without expiry"),
        ];
        for (payload, now, words) in cases {
            let described = Token::new(&jwt(payload)).describe(UNIX_EPOCH + Duration::from_secs(now));
            assert!(described.contains(words), "{payload} at {now}: {described}");
        }
    }

    #[test]
    fn a_token_that_a_server_quotes_is_redacted() {
        let said = Token::new("s3cr3t").redact("bad s3cr3t\n, s3cr3t!");
        assert_eq!(said, "bad (the token)\u{fffd}, (the token)!");
    }

    #[test]
    fn odd_claims_do_not_break_a_token() {
        let odd = Token::new(&jwt(r#"{"aud":"one","exp":1e300}"#));
        let claims = odd.claims().unwrap();
        assert_eq!((claims.audiences.as_slice(), claims.expires), (&["one".to_owned()][..], None));
        for text in ["opaque", "a.b", "a.!!.c", &jwt("[]"), &jwt("not json")] {
            assert!(Token::new(text).service_account().is_none(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_bad_token_file_is_named_with_a_remedy() {
        let disk = Disk::default();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let file = TokenFile::new(&path);
        assert!(file.read(&disk).await.unwrap_err().to_string().contains("--token-file"));
        for (content, words) in [("", "empty"), (" \n", "empty"), ("two\nlines", "one line")] {
            std::fs::write(&path, content).unwrap();
            let error = file.read(&disk).await.unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("token"), "{error}");
        }
        std::fs::write(&path, "secret-token\n").unwrap();
        let token = file.read(&disk).await.unwrap();
        assert_eq!(token.secret(), "secret-token");
        assert_eq!(format!("{token:?}"), "Token(hidden)");
    }
}
