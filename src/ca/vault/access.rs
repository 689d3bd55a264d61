//! Vault's token: read from a file, or obtained by a login and kept until it nears its expiry.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

use super::refusal::VaultRequest;
use super::{Access, MountPath, Server, with_token};
use crate::auth::token::TokenSource;
use crate::auth::token_file::{Token, TokenFile};
use crate::base::clock::Clock;
use crate::ca::{CaError, InvalidResponse};
use crate::fs::disk::Disk;

/// The source of the token for calls.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one, as long as the agent runs")]
pub(super) enum VaultAuth {
    Token(TokenFile),
    Login(Login),
}

/// The token of one call.
#[derive(Debug)]
pub(super) enum VaultToken {
    Read(Token),
    Session { session: Arc<Session>, is_kept: bool },
}

/// A token that Vault issued for the JWT.
#[derive(Debug)]
pub(super) struct Session {
    token: Token,
    /// Its lifetime when it was issued; none if it does not expire.
    lease: Option<Duration>,
    expires: Option<SystemTime>,
    is_renewable: bool,
}

/// The step that a session needs before a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Nothing,
    Renewal,
    Login,
}

/// Logs in with a JWT.
#[derive(Debug)]
pub(super) struct Login {
    mount: MountPath,
    role: String,
    jwt: TokenSource,
    clock: Clock,
    session: Mutex<Option<Arc<Session>>>,
    /// One call at a time logs in; the calls that wait use the same session.
    turn: Semaphore,
}

impl VaultAuth {
    pub(super) fn new(access: Access, clock: Clock, disk: Disk) -> Self {
        match access {
            Access::Token(file) => Self::Token(file),
            Access::Login { mount, role, jwt } => Self::Login(Login {
                mount,
                role,
                jwt: TokenSource::new(jwt, clock.clone(), disk),
                clock,
                session: Mutex::default(),
                turn: Semaphore::new(1),
            }),
        }
    }

    /// A token for a call, but not the one that was just `refused`.
    pub(super) async fn token(
        &self,
        server: &Server,
        refused: Option<&VaultToken>,
    ) -> Result<VaultToken, CaError> {
        match self {
            Self::Token(file) => Ok(VaultToken::Read(file.read(&server.disk).await?)),
            Self::Login(login) => login.token(server, refused).await,
        }
    }

    /// The file of Vault's token.
    pub(super) fn token_file(&self) -> Option<&TokenFile> {
        match self {
            Self::Token(file) => Some(file),
            Self::Login(_) => None,
        }
    }

    /// The error for a workload without a known identity.
    pub(super) async fn no_identity(&self, disk: &Disk) -> CaError {
        const REMEDY: &str = "set --spiffe-id, or --namespace and --service-account";
        let reason = match self {
            Self::Token(_) => "no option sets this workload's",
            Self::Login(login) => {
                if let Some(file) = login.jwt.file()
                    && let Err(missing) = file.read(disk).await
                {
                    // Without the JWT the identity is unknown, too.
                    return missing.into();
                }
                "the token names no service account"
            }
        };
        CaError::Local(format!("requests to Vault need an identity, and {reason}: {REMEDY}"))
    }
}

impl VaultToken {
    pub(super) fn secret(&self) -> &Token {
        match self {
            Self::Read(token) => token,
            Self::Session { session, .. } => &session.token,
        }
    }

    /// Whether it is from an earlier login, and may have been revoked since.
    pub(super) fn is_kept(&self) -> bool {
        matches!(self, Self::Session { is_kept: true, .. })
    }

    fn is_of(&self, other: &Arc<Session>) -> bool {
        matches!(self, Self::Session { session, .. } if Arc::ptr_eq(session, other))
    }
}

impl Session {
    /// Parses `auth` of an answer that was received at `now`.
    pub(super) fn new(mut reply: Value, now: SystemTime) -> Result<Self, CaError> {
        let token = match reply.pointer_mut("/auth/client_token").map(Value::take) {
            Some(Value::String(text)) if !text.is_empty() => Token::new(&Zeroizing::new(text)),
            _ => return Err(InvalidResponse::Unreadable("it has no auth.client_token".to_owned()).into()),
        };
        let field = |name: &str| reply.get("auth").and_then(|auth| auth.get(name));
        let seconds = field("lease_duration").and_then(Value::as_u64).unwrap_or_default();
        // Zero means that it never expires.
        let lease = Some(Duration::from_secs(seconds)).filter(|lease| !lease.is_zero());
        let is_renewable = field("renewable").and_then(Value::as_bool).unwrap_or_default();
        Ok(Self { token, lease, expires: lease.and_then(|lease| now.checked_add(lease)), is_renewable })
    }

    /// The step before a call at `now`. A session is renewed in the last quarter of its lease.
    pub(super) fn need(&self, now: SystemTime) -> Need {
        let (Some(lease), Some(expires)) = (self.lease, self.expires) else { return Need::Nothing };
        match expires.duration_since(now) {
            Ok(left) if left > lease / 4 => Need::Nothing,
            Ok(left) if !left.is_zero() && self.is_renewable => Need::Renewal,
            _ => Need::Login,
        }
    }
}

/// The statuses with which versions of Vault refuse a JWT.
const REFUSALS: [u16; 4] = [400, 401, 403, 500];

impl Login {
    async fn token(&self, server: &Server, refused: Option<&VaultToken>) -> Result<VaultToken, CaError> {
        let turn = self.turn.acquire().await;
        let _turn = turn.map_err(|error| CaError::Local(error.to_string()))?;
        let kept = self.stored().clone().filter(|kept| !refused.is_some_and(|refused| refused.is_of(kept)));
        let session = match kept {
            Some(kept) => match kept.need(self.clock.now()) {
                Need::Nothing => Some(kept),
                Need::Renewal => self.renew(server, &kept).await?,
                Need::Login => None,
            },
            None => None,
        };
        if let Some(session) = session {
            return Ok(VaultToken::Session { session, is_kept: true });
        }
        // A useless session is dropped even if the login fails.
        *self.stored() = None;
        let session = self.log_in(server).await?;
        Ok(VaultToken::Session { session, is_kept: false })
    }

    async fn log_in(&self, server: &Server) -> Result<Arc<Session>, CaError> {
        let path = format!("auth/{}/login", self.mount);
        let request = VaultRequest::Login { path: &path, role: &self.role, jwt: &self.jwt };
        let post = async |jwt: &Token| {
            let body = login_body(&self.role, jwt)?;
            server.post(&format!("/v1/{path}"), <_>::default(), body, &request, jwt).await
        };
        let mut jwt = self.jwt.token().await?;
        let mut reply = post(&jwt).await;
        while matches!(&reply, Err(CaError::Status { status, .. }) if REFUSALS.contains(&status.as_u16()))
            && let Some(other) = self.jwt.another(&jwt).await
        {
            jwt = other;
            reply = post(&jwt).await;
        }
        let reply = reply?;
        let session = Session::new(reply, self.clock.now())?;
        tracing::debug!(
            path,
            role = self.role,
            lease_s = session.lease.map(|lease| lease.as_secs()),
            "Vault login succeeded"
        );
        Ok(self.store(session))
    }

    /// The same session with a later expiry; none if Vault refuses, so that a login is needed.
    async fn renew(&self, server: &Server, kept: &Session) -> Result<Option<Arc<Session>>, CaError> {
        let path = "/v1/auth/token/renew-self";
        let headers = with_token(&kept.token)?;
        let body = Zeroizing::new(b"{}".to_vec());
        let reply = match server.post(path, headers, body, &VaultRequest::Renewal, &kept.token).await {
            Err(CaError::Status { message, .. }) => {
                tracing::debug!(reason = message, "Vault token not renewed");
                return Ok(None);
            }
            reply => reply?,
        };
        let mut session = Session::new(reply, self.clock.now())?;
        // Near the token's maximum lifetime Vault grants shorter and shorter leases.
        session.lease = session.lease.max(kept.lease);
        if session.need(self.clock.now()) != Need::Nothing {
            return Ok(None);
        }
        Ok(Some(self.store(session)))
    }

    fn store(&self, session: Session) -> Arc<Session> {
        let session = Arc::new(session);
        *self.stored() = Some(Arc::clone(&session));
        session
    }

    fn stored(&self) -> std::sync::MutexGuard<'_, Option<Arc<Session>>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `{"role": …, "jwt": …}`, written once, into memory that is wiped.
fn login_body(role: &str, jwt: &Token) -> Result<Zeroizing<Vec<u8>>, CaError> {
    let unwritable = |error: serde_json::Error| CaError::Local(error.to_string());
    // An escape takes up to six bytes. Allocated at full size: a buffer that grows leaves copies in memory.
    let size = 6 * (role.len() + jwt.secret().len()) + 32;
    let mut body = Zeroizing::new(Vec::with_capacity(size));
    body.extend_from_slice(b"{\"role\":");
    serde_json::to_writer(&mut *body, role).map_err(unwritable)?;
    body.extend_from_slice(b",\"jwt\":");
    serde_json::to_writer(&mut *body, jwt.secret()).map_err(unwritable)?;
    body.push(b'}');
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use serde_json::json;

    use super::*;

    fn session(lease: u64, is_renewable: bool) -> Session {
        let auth =
            json!({ "client_token": "hvs.secret", "lease_duration": lease, "renewable": is_renewable });
        Session::new(json!({ "auth": auth }), UNIX_EPOCH).unwrap()
    }

    #[test]
    fn a_renewable_session_is_renewed_in_its_last_quarter() {
        let cases = [
            (3600, true, 0, Need::Nothing),
            (3600, true, 2699, Need::Nothing),
            (3600, true, 2700, Need::Renewal),
            (3600, false, 2700, Need::Login),
            (3600, true, 3599, Need::Renewal),
            (3600, true, 3600, Need::Login),
            (3600, true, 9999, Need::Login),
            (0, false, 1 << 40, Need::Nothing),
        ];
        for (lease, is_renewable, at, expected) in cases {
            let need = session(lease, is_renewable).need(UNIX_EPOCH + Duration::from_secs(at));
            assert_eq!(need, expected, "{lease} s, renewable {is_renewable}, at {at} s");
        }
    }

    #[test]
    fn a_session_is_never_shown() {
        assert!(!format!("{:?}", session(1, true)).contains("secret"));
    }

    #[test]
    fn an_answer_without_a_token_is_no_session() {
        for odd in
            [json!(null), json!([]), json!({ "auth": null }), json!({ "auth": { "client_token": "" } })]
        {
            let error = Session::new(odd.clone(), UNIX_EPOCH).unwrap_err().to_string();
            assert!(error.contains("auth.client_token"), "{odd}: {error}");
        }
        let odd = json!({ "auth": { "client_token": "x", "lease_duration": -1, "renewable": "yes" } });
        let session = Session::new(odd, UNIX_EPOCH).unwrap();
        assert_eq!((session.lease, session.is_renewable), (None, false));
        let endless = json!({ "auth": { "client_token": "x", "lease_duration": u64::MAX } });
        let session = Session::new(endless, UNIX_EPOCH).unwrap();
        assert_eq!(session.need(UNIX_EPOCH), Need::Nothing);
    }

    #[test]
    fn the_login_body_is_json_for_any_role_and_token() {
        let body = login_body("a \"role\"\n", &Token::new("jw\"t\\")).unwrap();
        let read: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(read, json!({ "role": "a \"role\"\n", "jwt": "jw\"t\\" }));
        assert!(body.capacity() >= body.len());
    }
}
