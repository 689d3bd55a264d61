//! What Vault means when it refuses, for whoever has to mend it.

use http::StatusCode;
use serde_json::Value;

use super::texts;
use crate::auth::token::TokenSource;
use crate::auth::token_file::{Token, TokenFile};

/// What Vault was asked.
#[derive(Debug)]
pub(super) enum Asked<'a> {
    Sign { path: &'a str, token: Option<&'a TokenFile> },
    Login { path: &'a str, role: &'a str, jwt: &'a TokenSource },
    Renewal,
}

/// What a refusal says, and what to do about it. `secret` is what the call was made with.
pub(super) fn explain(status: StatusCode, body: &[u8], asked: &Asked<'_>, secret: &Token) -> String {
    let said = match serde_json::from_slice::<Value>(body) {
        Ok(body) if body.get("errors").is_some() => texts(body.get("errors")).join("; "),
        // A proxy, or no Vault at all.
        _ => String::from_utf8_lossy(body).trim().to_owned(),
    };
    let said = secret.redact(&said);
    let mut message = match asked {
        Asked::Sign { path, .. } | Asked::Login { path, .. } => (*path).to_owned(),
        Asked::Renewal => "renewing the token".to_owned(),
    };
    let way_out = way_out(status, &said, asked, secret);
    for part in [said, way_out].into_iter().filter(|part| !part.is_empty()) {
        message = format!("{message}: {part}");
    }
    message
}

fn way_out(status: StatusCode, said: &str, asked: &Asked<'_>, secret: &Token) -> String {
    match asked {
        Asked::Sign { path, token } => of_signing(status.as_u16(), said, path, *token),
        Asked::Login { role, jwt, .. } => of_login(status.as_u16(), said, role, || jwt.describe(secret)),
        Asked::Renewal => None,
    }
    .or_else(|| of_the_server(status.as_u16()).map(str::to_owned))
    .unwrap_or_default()
}

fn of_signing(status: u16, said: &str, path: &str, token: Option<&TokenFile>) -> Option<String> {
    /// What a role may object to, and what to change.
    const ROLE: [(&str, &str); 6] = [
        ("URI Subject Alternative Names", "its allowed_uri_sans must allow this workload's SPIFFE ID"),
        (
            "common_name field is required",
            "it needs require_cn=false: SPIFFE certificates have no common name",
        ),
        ("keys of type", "give it key_type=any, or choose another --key-type here"),
        ("-bit key", "lower its key_bits, or choose another --key-type here"),
        ("unknown role", "there is none of this name; is --vault-role right?"),
        (
            "beyond the expiration of the CA",
            "ask for less with --cert-ttl, or set leaf_not_after_behavior=truncate on the issuer, and renew the CA",
        ),
    ];
    let role = path.replace("/sign/", "/roles/");
    match status {
        400 => {
            let known = ROLE.iter().find(|(words, _)| said.contains(words));
            let what =
                known.map_or("what it allows decides, and the key and name asked for", |(_, what)| what);
            Some(format!("see the role {role}: {what}"))
        }
        403 => {
            let token = match token {
                Some(file) => format!("the token in {}", file.path().display()),
                None => "the token of the login".to_owned(),
            };
            Some(format!("{token} has ended, or no policy of its allows update on {path}"))
        }
        404 | 405 => Some(
            "there is no PKI engine at this path; are --vault-pki-mount and --vault-namespace right?"
                .to_owned(),
        ),
        _ => None,
    }
}

fn of_login(status: u16, said: &str, role: &str, jwt: impl Fn() -> String) -> Option<String> {
    match status {
        400 if said.contains("role") => {
            Some(format!("is there a role {role:?} in this auth method? It is named by --vault-auth-role"))
        }
        // Older versions answer 500 where later ones answer 403.
        400 | 401 | 403 | 500 => Some(format!(
            "the role {role:?} must be bound to this service account, its namespace and the token's audience ({})",
            jwt()
        )),
        404 | 405 => Some(
            "there is no auth method at this path; are --vault-auth-mount and --vault-namespace right?"
                .to_owned(),
        ),
        502 => Some("Vault could not ask Kubernetes about the token".to_owned()),
        _ => None,
    }
}

fn of_the_server(status: u16) -> Option<&'static str> {
    Some(match status {
        301 | 302 | 307 | 308 => {
            "it sends callers elsewhere, as a standby does that may not forward them; \
             give --ca-address the address that leads to the active node"
        }
        412 => "it has not caught up with the rest of its cluster yet",
        429 => "it is called too often (a quota on its side), or is a standby",
        472 => {
            "it is a secondary for disaster recovery, which signs nothing; point --ca-address at the primary"
        }
        473 => "it is a performance standby, which does not answer this",
        500 => "its own log says more",
        501 => "it is not initialized",
        502 => "something that it depends on has failed",
        503 => "it is sealed or in maintenance; somebody has to unseal it",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::base::clock::Clock;

    #[test]
    fn each_refusal_comes_with_what_to_do() {
        let file = TokenFile::new("/run/token");
        let sign = Asked::Sign { path: "pki/sign/web", token: None };
        let with_file = Asked::Sign { path: "pki/sign/web", token: Some(&file) };
        let now = UNIX_EPOCH + Duration::from_secs(9);
        let jwt = TokenSource::new(file.clone().into(), Clock::starting_at(now));
        let login = Asked::Login { path: "auth/kubernetes/login", role: "web", jwt: &jwt };
        let uri = "URI Subject Alternative Names were provided via CSR which are not valid for this role";
        let expiry = "cannot satisfy request, as TTL would result in notAfter of X that is beyond the expiration of the CA certificate at Y";
        let cases = [
            (400, uri, &sign, "pki/roles/web: its allowed_uri_sans"),
            (400, "the common_name field is required, or must be", &sign, "require_cn=false"),
            (400, "role requires keys of type rsa", &sign, "key_type=any"),
            (400, "role requires a minimum of a 384-bit key, but", &sign, "key_bits"),
            (400, "unknown role: web", &sign, "--vault-role"),
            (400, expiry, &sign, "--cert-ttl"),
            (400, "something else", &sign, "see the role pki/roles/web"),
            (403, "permission denied", &sign, "the token of the login has ended, or no policy"),
            (403, "permission denied", &with_file, "the token in /run/token has ended, or no policy"),
            (404, "no handler for route", &sign, "--vault-pki-mount"),
            (405, "unsupported operation", &sign, "--vault-pki-mount"),
            (400, "invalid role name \"web\"", &login, "--vault-auth-role"),
            (403, "service account name not authorized", &login, "read from /run/token"),
            (500, "namespace not authorized", &login, "must be bound"),
            (404, "no handler for route", &login, "--vault-auth-mount"),
            (502, "", &login, "Kubernetes"),
            (307, "", &sign, "active node"),
            (412, "", &sign, "caught up"),
            (429, "", &sign, "too often"),
            (472, "", &sign, "the primary"),
            (473, "", &sign, "standby"),
            (500, "", &sign, "log"),
            (501, "", &sign, "not initialized"),
            (502, "", &sign, "depends on"),
            (503, "Vault is sealed", &sign, "unseal"),
            (503, "Vault is sealed", &login, "unseal"),
            (503, "", &Asked::Renewal, "renewing the token: it is sealed"),
        ];
        for (status, said, asked, words) in cases {
            let body = serde_json::json!({ "errors": [said] }).to_string();
            let status = StatusCode::from_u16(status).unwrap();
            let message = explain(status, body.as_bytes(), asked, &Token::new("opaque"));
            assert!(message.contains(said) && message.contains(words), "{status} {said}: {message}");
            assert!(!message.contains(": :") && !message.ends_with(' '), "{message}");
        }
    }

    #[test]
    fn a_refusal_that_is_no_vaults_is_shown_in_part_and_without_the_token() {
        let sign = Asked::Sign { path: "pki/sign/web", token: None };
        let explain =
            |body: &str| explain(StatusCode::FORBIDDEN, body.as_bytes(), &sign, &Token::new("s3cr3t"));
        let html = explain(&format!("<html>\n{}", "x".repeat(9999)));
        assert!(html.contains("<html>") && html.len() < 700 && !html.contains('\n'), "{html}");
        let quoted = explain(r#"{"errors":["bad token s3cr3t","two"]}"#);
        assert!(quoted.contains("bad token (the token); two: the token of the login"), "{quoted}");
        assert!(explain(r#"{"errors":[]}"#).starts_with("pki/sign/web: the token"));
        assert!(explain(r#"{"errors":7}"#).starts_with("pki/sign/web: the token"));
        assert!(explain("").starts_with("pki/sign/web: the token"));
    }
}
