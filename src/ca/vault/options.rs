//! `--ca vault`: its options, checks and client.

use http::HeaderValue;

use super::{Access, MountPath, PORT, RoleName, Vault, VaultSettings};
use crate::auth::token;
use crate::auth::token_file::TokenFile;
use crate::base::clock::Clock;
use crate::ca::failover::Member;
use crate::ca::provider::{
    self, CaNetwork, ClientError, ConfiguredProvider, DefaultRoots, Headers, IdentityDefault, MetadataToken,
    NameUse, ProviderArgs, ProviderFile, ProviderKind, SharedOptions, TokenUse,
};
use crate::fs::disk::Disk;
use crate::net::address::Address;
use crate::net::endpoint::{Endpoint, Protocol};
use crate::options::{Reader, Setting};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct VaultArgs {
    /// The mount path of the PKI secrets engine [default: pki]
    #[arg(long, value_name = "PATH", help_heading = "Vault")]
    pub vault_pki_mount: Option<String>,
    /// The PKI engine's role that signs: its allowed_uri_sans must allow the workload's SPIFFE ID
    #[arg(long, value_name = "ROLE", help_heading = "Vault")]
    pub vault_role: Option<String>,
    /// The namespace of both mounts [default: none]
    #[arg(long, value_name = "NAMESPACE", help_heading = "Vault")]
    pub vault_namespace: Option<String>,
    /// Log in by this role of the auth method, with the token in --token-file
    #[arg(long, value_name = "ROLE", help_heading = "Vault")]
    pub vault_auth_role: Option<String>,
    /// The mount path of the auth method, a kubernetes or jwt method [default: kubernetes]
    #[arg(long, value_name = "PATH", help_heading = "Vault")]
    pub vault_auth_mount: Option<String>,
    /// Don't log in: use the Vault token in this file, read again for each call
    #[arg(long, value_name = "FILE", help_heading = "Vault")]
    pub vault_token_file: Option<String>,
    /// A PEM file of the roots, read again for each call [default: the roots that come with each certificate]
    #[arg(long, value_name = "FILE", help_heading = "Vault")]
    pub vault_root: Option<String>,
}

#[derive(Clone, Debug)]
pub struct VaultProvider {
    pub endpoint: Endpoint,
    pub settings: VaultSettings,
    pub headers: Headers,
}

impl ProviderArgs for VaultArgs {
    type Provider = VaultProvider;
    const KIND: &'static ProviderKind = &ProviderKind {
        name: "vault",
        alias: None,
        summary: "HashiCorp Vault or OpenBao",
        network: Some(CaNetwork {
            parse_address: |text| Address::with_ports(text, PORT, PORT),
            default_address: |_| None,
            has_istio_variables: true,
            default_roots: DefaultRoots::Istio,
        }),
        token: TokenUse::Source {
            exchange: None,
            metadata: MetadataToken::Identity { audience: None },
            audience: Some("vault"),
        },
        identity: IdentityDefault::Token,
        takes_client_cert: false,
        names: NameUse::Requested,
    };

    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<VaultProvider> {
        let Some(settings) = self.settings(r, shared) else { return Vec::new() };
        shared.note_plaintext(r, "the workload's token and Vault's go");
        let (headers, settings) = (&shared.headers, &settings);
        let provider =
            |endpoint| VaultProvider { endpoint, settings: settings.clone(), headers: headers.clone() };
        shared.endpoints().map(provider).collect()
    }
}

impl VaultArgs {
    /// None if another provider is selected, or an option is missing or invalid, which is in the report then.
    fn settings(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Option<VaultSettings> {
        let mount = r.parsed("vault-pki-mount", &self.vault_pki_mount, &[], str::parse::<MountPath>);
        let role = r.parsed("vault-role", &self.vault_role, &[], str::parse::<RoleName>);
        let namespace = r.parsed("vault-namespace", &self.vault_namespace, &[], |text| {
            HeaderValue::from_str(text).map_err(|_| format!("{text:?} can't be sent in a header"))
        });
        let auth_mount = r.parsed("vault-auth-mount", &self.vault_auth_mount, &[], |text| {
            // Vault's own tools write it with and without the prefix.
            text.trim_start_matches('/').strip_prefix("auth/").unwrap_or(text).parse::<MountPath>()
        });
        let auth_role = r.text("vault-auth-role", &self.vault_auth_role, &[]);
        let token = r.text("vault-token-file", &self.vault_token_file, &[]);
        let roots = r.text("vault-root", &self.vault_root, &[]);

        let all = [
            mount.set_by(),
            role.set_by(),
            namespace.set_by(),
            auth_mount.set_by(),
            auth_role.set_by(),
            token.set_by(),
            roots.set_by(),
        ];
        if !shared.selection.is(Self::KIND, r, &all) {
            return None;
        }
        if role.is_missing() {
            r.mistake("--ca vault needs the PKI engine's role: --vault-role ROLE");
        }
        let access = access(r, auth_mount, auth_role, token, &shared.token);
        let default = || "pki".parse().ok();
        Some(VaultSettings {
            mount: mount.value.or_else(default)?,
            role: role.value?,
            namespace: namespace.value,
            access: access?,
            roots: provider::path(roots),
        })
    }
}

/// A Vault token from a file, or a login: the one of the higher level. `jwt` is the token that a login presents.
fn access(
    r: &mut Reader<'_>,
    mount: Setting<MountPath>,
    role: Setting<String>,
    token: Setting<String>,
    jwt: &token::TokenSettings,
) -> Option<Access> {
    for (level, from) in [role.set_by(), mount.set_by()] {
        if token.value.is_some() && token.level == level {
            r.mistake(format!(
                "{} and {from} contradict each other: calls carry a token from a file, or one from a login; drop one \
                 of them",
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
        _ if token.is_invalid || role.is_invalid => None,
        _ => {
            r.mistake(
                "--ca vault needs a login or a token: --vault-auth-role ROLE (logs in with the token in \
                 --token-file), or --vault-token-file FILE",
            );
            None
        }
    }
}

impl ConfiguredProvider for VaultProvider {
    fn kind(&self) -> &'static ProviderKind {
        VaultArgs::KIND
    }

    fn client(&self, clock: &Clock, disk: &Disk) -> Result<Member, ClientError> {
        let (endpoint, settings) = (self.endpoint.clone(), self.settings.clone());
        Ok(Member::new(
            &self.name(),
            Vault::new(endpoint, settings, &self.headers, clock.clone(), disk.clone()),
        ))
    }

    fn endpoint(&self) -> Option<(&Endpoint, Protocol)> {
        Some((&self.endpoint, Protocol::Http1))
    }

    fn token(&self) -> Option<token::TokenSettings> {
        match &self.settings.access {
            Access::Login { jwt, .. } => Some(jwt.clone()),
            Access::Token(_) => None,
        }
    }

    fn files(&self) -> Vec<ProviderFile<'_>> {
        let token = match &self.settings.access {
            Access::Token(file) => file.path(),
            Access::Login { .. } => None,
        };
        let token = token.map(|path| ProviderFile::credential("--vault-token-file", path));
        let roots = self.settings.roots.as_deref();
        let roots = roots.map(|path| ProviderFile::certificates("--vault-root", path));
        token.into_iter().chain(roots).collect()
    }
}
