//! Tokens that clients bring in the metadata of their calls (`authorization: Bearer …`): the workload's credential for calls to
//! CAs.
//!
//! They are no credential for the call itself, which the socket's mode and `--allow-uid` decide on: a client without one is
//! served, too.

use http::header::{AUTHORIZATION, HeaderMap};
use tonic::Status;

use super::Service;
use crate::auth::token_file::{BroughtToken, Token};
use crate::base::limits;
use crate::base::spiffe_id::{ServiceAccount, SpiffeId};
use crate::base::text;
use crate::secret::{Secret, SecretName};
use crate::store::Key;

/// Takes the tokens of a workload's clients.
#[derive(Clone, Debug)]
pub struct Bearer {
    /// Where the newest valid one is kept.
    place: BroughtToken,
    /// The configured identity; none where it follows from the token.
    identity: Option<SpiffeId>,
}

/// What a call with a token is to.
#[derive(Debug, PartialEq, Eq)]
enum Judged {
    /// It is the newest.
    New,
    Known,
    /// It can't be used, and the call goes on without it.
    Unusable(&'static str),
    /// It is another workload's.
    Foreign(String),
}

impl Bearer {
    pub fn new(place: BroughtToken, identity: Option<SpiffeId>) -> Self {
        Self { place, identity }
    }

    /// Takes the token out of `headers`. An error ends the call.
    pub(super) fn take(&self, headers: &mut HeaderMap, service: &Service) -> Result<(), Status> {
        let Some(value) = headers.remove(AUTHORIZATION) else { return Ok(()) };
        match self.judge(value.as_bytes(), service) {
            Judged::New => service.cache.renew_if_needed(&key_pair(service)),
            Judged::Known => {}
            Judged::Unusable(reason) => {
                service.refuse("bad_token", &format!("a client's token is not used: {reason}"));
            }
            Judged::Foreign(reason) => {
                service.refuse("foreign_token", &reason);
                return Err(Status::permission_denied(reason));
            }
        }
        Ok(())
    }

    fn judge(&self, value: &[u8], service: &Service) -> Judged {
        let text = match value.split_at_checked("bearer ".len()) {
            Some((scheme, text)) if scheme.eq_ignore_ascii_case(b"bearer ") => text.trim_ascii(),
            _ => return Judged::Unusable("authorization is not of the scheme Bearer"),
        };
        if text.len() > limits::BROUGHT_TOKEN_BYTES {
            return Judged::Unusable("it is longer than 16 kB");
        }
        let Ok(token) = Token::parse(text) else { return Judged::Unusable("it is not printable ASCII") };
        let Some(claims) = token.claims() else { return Judged::Unusable("it is not a JWT") };
        if let Some(reason) = self.stranger(&token, service) {
            return Judged::Foreign(reason);
        }
        let now = service.clock.now();
        match (claims.not_before, claims.expires) {
            (_, None) => Judged::Unusable("it has no expiry"),
            (_, Some(at)) if at <= now => Judged::Unusable("it has expired"),
            (Some(from), _) if from > now => Judged::Unusable("it is not valid yet"),
            _ if self.place.offer(token) => Judged::New,
            _ => Judged::Known,
        }
    }

    /// Why the token is not of this workload. Before its first certificate a workload of which the options name no identity
    /// takes any: a CA decides whether it is good.
    fn stranger(&self, token: &Token, service: &Service) -> Option<String> {
        let served = || {
            let good = service.cache.good(&key_pair(service))?;
            match &good.secret {
                Secret::KeyPair(pair) => Some(pair.spiffe_id()),
                Secret::TrustBundle(_) => None,
            }
        };
        let (identity, is_served) = match (&self.identity, served()) {
            (Some(identity), _) => (Some(identity.clone()), false),
            (None, Some(identity)) => (identity, true),
            (None, None) => return None,
        };
        let subject = &token.claims()?.subject;
        let is_same = match identity.as_ref().and_then(SpiffeId::service_account) {
            Some(own) => token.service_account().is_some_and(|account: ServiceAccount| account == own),
            // The identity says nothing of tokens: they must agree with each other.
            None => self.place.subject().is_none_or(|held| held == *subject),
        };
        let whose = if is_served { "the certificate that is served is for" } else { "this workload is" };
        (!is_same).then(|| {
            let identity = identity.as_ref().map_or("another identity", SpiffeId::as_str);
            let subject = text::sanitize_for_log(subject);
            format!(
                "the call's token is for {subject}, and {whose} {identity}: use the socket of that workload"
            )
        })
    }
}

fn key_pair(service: &Service) -> Key {
    Key { workload: service.workload, name: SecretName::Workload }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::base::clock::Clock;
    use crate::metrics::Metrics;
    use crate::serve::sds::{Capacity, SecretDiscovery};
    use crate::store::Cache;

    fn bearer(account: &str, expires: u64) -> Vec<u8> {
        let part = |text: String| URL_SAFE_NO_PAD.encode(text);
        let claims = format!(r#"{{"sub":"system:serviceaccount:shop:{account}","exp":{expires}}}"#);
        format!("Bearer {}.{}.c2ln", part("{}".to_owned()), part(claims)).into_bytes()
    }

    fn service() -> SecretDiscovery {
        let (cache, workload) = Cache::with_workload("");
        let clock = Clock::starting_at(UNIX_EPOCH + Duration::from_secs(1000));
        let stop = CancellationToken::new();
        SecretDiscovery::new(cache, workload, Metrics::default(), clock, stop, Capacity::default())
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_valid_token_is_kept_and_one_of_another_identity_is_foreign() {
        let service = service();
        let place = BroughtToken::of_clients();
        let own = Bearer::new(place.clone(), "spiffe://td/ns/shop/sa/cart".parse().ok());
        let judge = |value: &[u8]| own.judge(value, &service.0);
        assert_eq!(judge(&bearer("cart", 2000)), Judged::New);
        assert_eq!(judge(&bearer("cart", 2000)), Judged::Known);
        assert_eq!(judge(&bearer("cart", 1500)), Judged::Known, "the one that lives longer stays");
        assert_eq!(judge(&bearer("cart", 3000)), Judged::New);
        assert!(matches!(judge(&bearer("other", 4000)), Judged::Foreign(_)));
        for bad in [&bearer("cart", 999)[..], b"Basic abc", b"Bearer opaque", b"Bearer ", b""] {
            assert!(matches!(judge(bad), Judged::Unusable(_)), "{}", String::from_utf8_lossy(bad));
        }
        let long = [b"Bearer ", &vec![b'a'; limits::BROUGHT_TOKEN_BYTES + 1][..]].concat();
        assert!(matches!(judge(&long), Judged::Unusable(_)));
        assert_eq!(place.subject().as_deref(), Some("system:serviceaccount:shop:cart"));
        assert!(!format!("{own:?}").contains("c2ln"));
    }

    #[tokio::test(start_paused = true)]
    async fn before_the_first_certificate_the_identity_is_not_settled() {
        let service = service();
        let any = Bearer::new(BroughtToken::of_clients(), None);
        assert_eq!(any.judge(&bearer("wrong", 2000), &service.0), Judged::New);
        assert_eq!(any.judge(&bearer("cart", 3000), &service.0), Judged::New);
    }
}
