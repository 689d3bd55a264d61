//! `--ca cfssl`: its options, checks and client.

use std::path::PathBuf;

use super::{Cfssl, PORT};
use crate::base::clock::Clock;
use crate::ca::failover::Member;
use crate::ca::provider::{
    self, CaNetwork, ClientError, ConfiguredProvider, DefaultRoots, Headers, IdentityDefault, NameUse,
    ProviderArgs, ProviderFile, ProviderKind, SharedOptions, TokenUse,
};
use crate::fs::disk::Disk;
use crate::net::address::Address;
use crate::net::endpoint::{Endpoint, Protocol};
use crate::net::rest;
use crate::options::Reader;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct CfsslArgs {
    /// The profile, which decides what is in the certificate, its lifetime included [default: cfssl's default]
    #[arg(long, value_name = "NAME", help_heading = "cfssl")]
    pub cfssl_profile: Option<String>,
    /// Which of several signers is to sign (multirootca)
    #[arg(long, value_name = "NAME", help_heading = "cfssl")]
    pub cfssl_label: Option<String>,
    /// A file with the profile's auth_key, hexadecimal, read again for each call; requests then go to authsign
    #[arg(long, value_name = "FILE", help_heading = "cfssl")]
    pub cfssl_auth_key_file: Option<String>,
    /// A PEM file with the roots, and with intermediates between them and the signer, read again for each call
    /// [default: cfssl's own certificate is the root]
    #[arg(long, value_name = "FILE", help_heading = "cfssl")]
    pub cfssl_bundle: Option<String>,
}

#[derive(Clone, Debug)]
pub struct CfsslProvider {
    pub endpoint: Endpoint,
    pub profile: Option<String>,
    /// Its signer.
    pub label: Option<String>,
    /// The file of the key for requests.
    pub auth_key: Option<PathBuf>,
    /// The file of its roots.
    pub bundle: Option<PathBuf>,
    pub headers: Headers,
}

impl ProviderArgs for CfsslArgs {
    type Provider = CfsslProvider;
    const KIND: &'static ProviderKind = &ProviderKind {
        name: "cfssl",
        alias: None,
        summary: "give --ca-address",
        network: Some(CaNetwork {
            parse_address: |text| Address::with_ports(text, PORT, PORT),
            default_address: |_| None,
            has_istio_variables: true,
            default_roots: DefaultRoots::Istio,
        }),
        token: TokenUse::None,
        identity: IdentityDefault::Token,
        takes_client_cert: false,
        names: NameUse::Requested,
    };

    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<CfsslProvider> {
        let [profile, label, auth_key, bundle] = [
            ("cfssl-profile", &self.cfssl_profile),
            ("cfssl-label", &self.cfssl_label),
            ("cfssl-auth-key-file", &self.cfssl_auth_key_file),
            ("cfssl-bundle", &self.cfssl_bundle),
        ]
        .map(|(flag, typed)| r.text(flag, typed, &[]));
        let all = [profile.set_by(), label.set_by(), auth_key.set_by(), bundle.set_by()];
        if !shared.selection.is(Self::KIND, r, &all) {
            return Vec::new();
        }
        if let Some(ttl) = &shared.ttl_option {
            r.note(format!("{ttl} is not used: the profile of cfssl decides on lifetimes"));
        }
        let (auth_key, bundle) = (provider::path(auth_key), provider::path(bundle));
        for address in shared.plaintext_addresses().filter(|_| bundle.is_none()) {
            r.note(format!(
                "the roots that {address} returns in plain text are trusted: an attacker on the path can replace them; \
                 use https://, or name the roots with --cfssl-bundle"
            ));
        }
        let provider = |endpoint| CfsslProvider {
            endpoint,
            profile: profile.value.clone(),
            label: label.value.clone(),
            auth_key: auth_key.clone(),
            bundle: bundle.clone(),
            headers: shared.headers.clone(),
        };
        shared.endpoints().map(provider).collect()
    }
}

impl ConfiguredProvider for CfsslProvider {
    fn kind(&self) -> &'static ProviderKind {
        CfsslArgs::KIND
    }

    fn client(&self, _clock: &Clock, disk: &Disk) -> Result<Member, ClientError> {
        let client = Cfssl {
            endpoint: self.endpoint.clone(),
            profile: self.profile.clone(),
            label: self.label.clone(),
            auth_key: self.auth_key.clone(),
            bundle: self.bundle.clone(),
            headers: rest::headers(&self.headers),
            disk: disk.clone(),
        };
        Ok(Member::new(&self.name(), client))
    }

    fn endpoint(&self) -> Option<(&Endpoint, Protocol)> {
        Some((&self.endpoint, Protocol::Http1))
    }

    fn files(&self) -> Vec<ProviderFile<'_>> {
        let auth_key = self.auth_key.as_deref();
        let auth_key = auth_key.map(|path| ProviderFile::credential("--cfssl-auth-key-file", path));
        let bundle = self.bundle.as_deref();
        let bundle = bundle.map(|path| ProviderFile::certificates("--cfssl-bundle", path));
        auth_key.into_iter().chain(bundle).collect()
    }
}
