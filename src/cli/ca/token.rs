//! `attache ca token`: a token for the development CA.

use std::time::Duration;

use crate::base::clock::Clock;
use crate::base::spiffe_id::{ServiceAccount, SpiffeId};
use crate::ca::embedded::{server, token};

/// Print a token of a service account, which the development CA takes.
///
/// The token has no signature: no other CA takes it. The agent reads it with --token-file.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct TokenArgs {
    /// The namespace of the service account
    #[arg(value_name = "NAMESPACE", value_parser = parse_part)]
    namespace: String,
    /// The service account
    #[arg(value_name = "ACCOUNT", value_parser = parse_part)]
    account: String,
    /// How long the token is valid
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = super::parse_ttl)]
    ttl: Duration,
}

pub(super) fn run(TokenArgs { namespace, account, ttl }: &TokenArgs) -> anyhow::Result<()> {
    let account = ServiceAccount { namespace: namespace.clone(), name: account.clone() };
    let token = token::unsigned(&account, server::AUDIENCE, Clock::system().now(), *ttl);
    super::super::print(format!("{token}\n"))
}

/// A part of the SPIFFE ID that the CA makes of the token.
fn parse_part(text: &str) -> Result<String, String> {
    let account = ServiceAccount { namespace: text.to_owned(), name: text.to_owned() };
    let identity = SpiffeId::for_service_account("cluster.local", &account);
    match identity.map_err(|error| error.to_string())?.service_account() {
        Some(_) => Ok(text.to_owned()),
        None => Err(format!("{text:?} holds a slash")),
    }
}
