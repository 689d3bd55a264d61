//! The options of `--ca vault`.

use http::HeaderValue;

use super::args::RunArgs;
use super::choice::{Chosen, ProviderName};
use super::reader::{Found, Reader};
use crate::auth::token;
use crate::auth::token_file::TokenFile;
use crate::ca::vault::{Access, MountPath, RoleName, Settings};

/// What to ask of a Vault; none where the provider is another one, or something is missing, which is among the
/// mistakes then. `jwt` is what Vault is logged in to with.
pub(super) fn settings(
    r: &mut Reader<'_>,
    args: &RunArgs,
    chosen: Chosen,
    jwt: &token::Settings,
) -> Option<Settings> {
    let mount = r.parsed("vault-pki-mount", &args.vault_pki_mount, &[], str::parse::<MountPath>);
    let role = r.parsed("vault-role", &args.vault_role, &[], str::parse::<RoleName>);
    let namespace = r.parsed("vault-namespace", &args.vault_namespace, &[], |text| {
        HeaderValue::from_str(text).map_err(|_| format!("{text:?} can't be sent in a header"))
    });
    let auth_mount = r.parsed("vault-auth-mount", &args.vault_auth_mount, &[], |text| {
        // Vault's own tools name it with and without.
        text.trim_start_matches('/').strip_prefix("auth/").unwrap_or(text).parse::<MountPath>()
    });
    let auth_role = r.text("vault-auth-role", &args.vault_auth_role, &[]);
    let token = r.text("vault-token-file", &args.vault_token_file, &[]);
    let roots = r.text("vault-root", &args.vault_root, &[]);

    let all = [
        mount.set(),
        role.set(),
        namespace.set(),
        auth_mount.set(),
        auth_role.set(),
        token.set(),
        roots.set(),
    ];
    if !chosen.is(r, (ProviderName::Vault, "vault"), &all) {
        return None;
    }
    if role.value.is_none() && !role.was_wrong {
        r.mistake("--ca vault needs the PKI engine's role: --vault-role ROLE".to_owned());
    }
    let access = access(r, auth_mount, auth_role, token, jwt);
    let default = || "pki".parse().ok();
    Some(Settings {
        mount: mount.value.or_else(default)?,
        role: role.value?,
        namespace: namespace.value,
        access: access?,
        roots: roots.value.map(Into::into),
    })
}

/// The way in: a token of Vault's, or a login. Of both, the one of the higher level.
fn access(
    r: &mut Reader<'_>,
    mount: Found<MountPath>,
    role: Found<String>,
    token: Found<String>,
    jwt: &token::Settings,
) -> Option<Access> {
    for (level, from) in [(role.level, &role.from), (mount.level, &mount.from)] {
        if token.value.is_some() && token.level == level {
            r.mistake(format!(
                "{} and {from} contradict each other: Vault is called with a token, or logged in to; drop one of them",
                token.from
            ));
        }
    }
    match (token.value, role.value) {
        (Some(file), _) if token.level >= role.level => {
            Some(Access::Token(TokenFile::named_by("--vault-token-file", file)))
        }
        (_, Some(role)) => {
            let default = || "kubernetes".parse().ok();
            Some(Access::Login { mount: mount.value.or_else(default)?, role, jwt: jwt.clone() })
        }
        _ if token.was_wrong || role.was_wrong => None,
        _ => {
            r.mistake(
                "--ca vault needs a way into Vault: --vault-auth-role ROLE (logs in with the token in --token-file), or \
                 --vault-token-file FILE"
                    .to_owned(),
            );
            None
        }
    }
}
