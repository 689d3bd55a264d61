//! The meaning of Vault's refusals, with remedies.

use http::StatusCode;
use serde_json::Value;

use super::texts;
use crate::auth::token::TokenSource;
use crate::auth::token_file::{Token, TokenFile};

/// The request that Vault refused.
#[derive(Debug)]
pub(super) enum VaultRequest<'a> {
    Sign { path: &'a str, token: Option<&'a TokenFile> },
    Login { path: &'a str, role: &'a str, jwt: &'a TokenSource },
    Renewal,
}

/// Describes a refusal, with its remedy. `secret` is the token of the call.
pub(super) fn explain(status: StatusCode, body: &[u8], request: &VaultRequest<'_>, secret: &Token) -> String {
    let said = match serde_json::from_slice::<Value>(body) {
        Ok(body) if body.get("errors").is_some() => texts(body.get("errors")).join("; "),
        // The answer of a proxy, or of another server.
        _ => String::from_utf8_lossy(body).trim().to_owned(),
    };
    let said = secret.redact(&said);
    let mut message = match request {
        VaultRequest::Sign { path, .. } | VaultRequest::Login { path, .. } => (*path).to_owned(),
        VaultRequest::Renewal => "renewing the token".to_owned(),
    };
    let remedy = remedy(status, &said, request, secret);
    for part in [said, remedy].into_iter().filter(|part| !part.is_empty()) {
        message = format!("{message}: {part}");
    }
    message
}

fn remedy(status: StatusCode, said: &str, request: &VaultRequest<'_>, secret: &Token) -> String {
    match request {
        VaultRequest::Sign { path, token } => of_signing(status.as_u16(), said, path, *token),
        VaultRequest::Login { role, jwt, .. } => {
            of_login(status.as_u16(), said, role, || jwt.describe(secret))
        }
        VaultRequest::Renewal => None,
    }
    .or_else(|| of_the_server(status.as_u16()).map(str::to_owned))
    .unwrap_or_default()
}

fn of_signing(status: u16, said: &str, path: &str, token: Option<&TokenFile>) -> Option<String> {
    /// A role's objections, and their remedies.
    const ROLE: [(&str, &str); 8] = [
        ("URI Subject Alternative Names", "its allowed_uri_sans must allow this workload's SPIFFE ID"),
        (
            "common_name field is required",
            "it needs require_cn=false: SPIFFE certificates have no common name, unless --common-name gives them one",
        ),
        (
            "subject alternate name",
            "its allowed_domains must allow the names of --dns-san, with allow_bare_domains or allow_subdomains",
        ),
        (
            "common name",
            "its allowed_domains must allow --common-name (or set allow_any_name=true and enforce_hostnames=false)",
        ),
        ("keys of type", "give it key_type=any, or choose another --key-type here"),
        ("-bit key", "lower its key_bits, or choose another --key-type here"),
        ("unknown role", "there is no role of this name; is --vault-role right?"),
        (
            "beyond the expiration of the CA",
            "lower --cert-ttl, or set leaf_not_after_behavior=truncate on the issuer, and renew the CA",
        ),
    ];
    let role = path.replace("/sign/", "/roles/");
    match status {
        400 => {
            let known = ROLE.iter().find(|(words, _)| said.contains(words));
            let what = known.map_or("does it allow the requested key and name?", |(_, what)| what);
            Some(format!("see the role {role}: {what}"))
        }
        403 => {
            let token = match token {
                Some(file) => file.to_string(),
                None => "the token of the login".to_owned(),
            };
            Some(format!("{token} has expired, or none of its policies allows update on {path}"))
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
            Some(format!("does this auth method have a role {role:?}? --vault-auth-role sets it"))
        }
        // Older versions answer 500, later ones 403.
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
            "it redirects, like a standby that may not forward calls; set --ca-address to an address that leads to the \
             active node"
        }
        412 => "it has not caught up with its cluster yet",
        429 => "it is called too often (a quota on its side), or is a standby",
        472 => "it is a disaster recovery secondary, which signs nothing; point --ca-address at the primary",
        473 => "it is a performance standby, which does not answer this",
        500 => "see its log",
        501 => "it is not initialized",
        502 => "a service that it depends on has failed",
        503 => "it is sealed or in maintenance; unseal it",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::base::clock::Clock;
    use crate::fs::disk::Disk;

    #[test]
    fn each_refusal_comes_with_a_remedy() {
        let file = TokenFile::new("/run/token");
        let sign = VaultRequest::Sign { path: "pki/sign/web", token: None };
        let with_file = VaultRequest::Sign { path: "pki/sign/web", token: Some(&file) };
        let now = UNIX_EPOCH + Duration::from_secs(9);
        let jwt = TokenSource::new(file.clone().into(), Clock::starting_at(now), Disk::default());
        let login = VaultRequest::Login { path: "auth/kubernetes/login", role: "web", jwt: &jwt };
        let uri = "URI Subject Alternative Names were provided via CSR which are not valid for this role";
        let expiry = "cannot satisfy request, as TTL would result in notAfter of X that is beyond the expiration of the CA certificate at Y";
        let cases = [
            (400, uri, &sign, "pki/roles/web: its allowed_uri_sans"),
            (400, "the common_name field is required, or must be", &sign, "require_cn=false"),
            (400, "role requires keys of type rsa", &sign, "key_type=any"),
            (400, "role requires a minimum of a 384-bit key, but", &sign, "key_bits"),
            (400, "unknown role: web", &sign, "--vault-role"),
            (400, expiry, &sign, "--cert-ttl"),
            (400, "subject alternate name web.example not allowed by this role", &sign, "names of --dns-san"),
            (400, "common name web.example not allowed by this role", &sign, "must allow --common-name"),
            (400, "something else", &sign, "see the role pki/roles/web"),
            (403, "permission denied", &sign, "the token of the login has expired, or none of its policies"),
            (
                403,
                "permission denied",
                &with_file,
                "the token in /run/token has expired, or none of its policies",
            ),
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
            (503, "", &VaultRequest::Renewal, "renewing the token: it is sealed"),
        ];
        for (status, said, request, words) in cases {
            let body = serde_json::json!({ "errors": [said] }).to_string();
            let status = StatusCode::from_u16(status).unwrap();
            let message = explain(status, body.as_bytes(), request, &Token::new("opaque"));
            assert!(message.contains(said) && message.contains(words), "{status} {said}: {message}");
            assert!(!message.contains(": :") && !message.ends_with(' '), "{message}");
        }
    }

    #[test]
    fn a_refusal_by_another_server_is_shortened_and_has_no_token() {
        let sign = VaultRequest::Sign { path: "pki/sign/web", token: None };
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
