//! Tokens that the development CA takes: it reads a token's claims and checks no signature, so these have none.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use crate::base::spiffe_id::ServiceAccount;

/// A token for `account`, valid for `audience` until `ttl` after `now`.
pub fn unsigned(account: &ServiceAccount, audience: &str, now: SystemTime, ttl: Duration) -> String {
    let issued = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let ServiceAccount { namespace, name } = account;
    let claims = json!({
        "sub": format!("system:serviceaccount:{namespace}:{name}"),
        "aud": [audience],
        "iat": issued,
        "exp": issued.saturating_add(ttl.as_secs()),
    });
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    // As RFC 7519 has it for tokens without a signature.
    format!("{}.{}.", part(&json!({ "alg": "none" })), part(&claims))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::token_file::Token;

    #[test]
    fn a_token_has_the_claims_that_it_was_made_for() {
        let account = ServiceAccount { namespace: "shop".to_owned(), name: "cart".to_owned() };
        let now = UNIX_EPOCH + Duration::from_secs(1_000_000);
        let token =
            Token::parse(unsigned(&account, "istio-ca", now, Duration::from_secs(60)).as_bytes()).unwrap();
        let claims = token.claims().unwrap();
        assert_eq!(token.service_account(), Some(account));
        assert_eq!(claims.audiences, ["istio-ca"]);
        assert_eq!(claims.expires, Some(now + Duration::from_secs(60)));
    }
}
