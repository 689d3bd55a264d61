//! `--ca google-cas`: its options, checks and client.

use std::time::Duration;

use super::{CaId, CaPool, GoogleCas, GoogleCasSettings, HOST};
use crate::auth::exchange::{GOOGLES_SCOPE, GOOGLES_URL};
use crate::auth::token::{self, TokenSource};
use crate::base::clock::Clock;
use crate::ca::failover::Member;
use crate::ca::provider::{
    CaNetwork, ClientError, ConfiguredProvider, DefaultRoots, Headers, IdentityDefault, MetadataToken,
    NameUse, ProviderArgs, ProviderKind, SharedOptions, TokenUse,
};
use crate::fs::disk::Disk;
use crate::net::address::Address;
use crate::net::endpoint::{Endpoint, Protocol};
use crate::net::grpc::Connections;
use crate::options::{Level, Reader};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct GoogleCasArgs {
    /// The CA pool, like projects/PROJECT/locations/LOCATION/caPools/POOL; needed with --ca google-cas
    /// [CA_ADDR, with CA_PROVIDER=GoogleCAS]
    #[arg(long, value_name = "NAME", help_heading = "Google CAS")]
    pub google_cas_pool: Option<String>,
    /// The id of the pool's CA that is to sign [default: any of them]
    #[arg(long, value_name = "ID", help_heading = "Google CAS")]
    pub google_cas_ca: Option<String>,
}

#[derive(Clone, Debug)]
pub struct GoogleCasProvider {
    pub endpoint: Endpoint,
    pub settings: GoogleCasSettings,
    /// The source of the access token.
    pub token: token::TokenSettings,
    pub headers: Headers,
    /// How long one call may take.
    pub timeout: Duration,
}

impl ProviderArgs for GoogleCasArgs {
    type Provider = GoogleCasProvider;
    const KIND: &'static ProviderKind = &ProviderKind {
        name: "google-cas",
        alias: Some("googlecas"),
        summary: "Google's Certificate Authority Service; give --google-cas-pool",
        network: Some(CaNetwork {
            parse_address: |text| Address::with_ports(text, 443, 80),
            default_address: |_| Address::with_ports(HOST, 443, 80).ok(),
            has_istio_variables: false,
            default_roots: DefaultRoots::System,
        }),
        token: TokenUse::Source {
            exchange: Some((GOOGLES_URL, GOOGLES_SCOPE)),
            metadata: MetadataToken::Access,
            audience: None,
        },
        identity: IdentityDefault::Caller { trust_domain: "PROJECT.svc.id.goog" },
        takes_client_cert: false,
        names: NameUse::WithIdentity,
    };

    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<GoogleCasProvider> {
        let Some(settings) = self.settings(r, shared) else { return Vec::new() };
        shared.note_plaintext(r, "the access token goes");
        let provider = |endpoint| GoogleCasProvider {
            endpoint,
            settings: settings.clone(),
            token: shared.token.clone(),
            headers: shared.headers.clone(),
            timeout: shared.timeout,
        };
        shared.endpoints().map(provider).collect()
    }
}

impl GoogleCasArgs {
    /// None if another provider is selected, or an option is missing or invalid, which is in the report then.
    fn settings(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Option<GoogleCasSettings> {
        let selection = &shared.selection;
        // Istio's agent takes the pool as an address. If Istio's variables name another CA, CA_ADDR is not the pool.
        let is_istios = selection.ca() == Some(Self::KIND) && selection.level == Some(Level::Istio);
        let istios: &[&str] = if is_istios { &["CA_ADDR"] } else { &[] };
        let pool = r.parsed("google-cas-pool", &self.google_cas_pool, istios, str::parse::<CaPool>);
        let ca = r.parsed("google-cas-ca", &self.google_cas_ca, &[], str::parse::<CaId>);
        if !selection.is(Self::KIND, r, &[pool.set_by(), ca.set_by()]) {
            return None;
        }
        if pool.is_missing() {
            r.mistake(
                "--ca google-cas needs the CA pool: --google-cas-pool projects/PROJECT/locations/LOCATION/caPools/POOL",
            );
        }
        Some(GoogleCasSettings { pool: pool.value?, ca: ca.value })
    }
}

impl ConfiguredProvider for GoogleCasProvider {
    fn kind(&self) -> &'static ProviderKind {
        GoogleCasArgs::KIND
    }

    fn client(&self, clock: &Clock, disk: &Disk) -> Result<Member, ClientError> {
        let (endpoint, settings) = (self.endpoint.clone(), self.settings.clone());
        let token = TokenSource::new(self.token.clone(), clock.clone(), disk.clone());
        let client = GoogleCas::new(
            endpoint,
            settings,
            token,
            self.headers.clone(),
            Connections::new(self.timeout, disk.clone()),
        );
        Ok(Member::new(&self.name(), client))
    }

    fn endpoint(&self) -> Option<(&Endpoint, Protocol)> {
        Some((&self.endpoint, Protocol::Http2))
    }

    fn token(&self) -> Option<token::TokenSettings> {
        Some(self.token.clone())
    }
}
