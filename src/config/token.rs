//! The source of the bearer token.

use std::time::Duration;

use super::args::RunArgs;
use super::node::Subject;
use super::shared::Credentials;
use crate::auth::exchange::{Exchange, Url};
use crate::auth::metadata_server::{self, MetadataServer, Wanted};
use crate::auth::token::{Service, TokenSettings};
use crate::auth::token_file::BroughtToken;
use crate::ca::provider::{MetadataToken, Selection, TokenUse};
use crate::ca::providers;
use crate::net::address::Address;
use crate::net::tls::Roots;
use crate::options::{Reader, SetBy, Setting};

/// `--token-source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceKind {
    File,
    Exchange,
    Gce,
}

/// The options of token sources.
struct TokenOptions {
    source: Setting<SourceKind>,
    url: Setting<Url>,
    audience: Setting<String>,
    scope: Setting<String>,
    root: Setting<String>,
    gce_audience: Setting<String>,
}

/// The source of the token, for a CA that takes one.
pub(super) fn source(
    r: &mut Reader<'_>,
    args: &RunArgs,
    selection: &Selection,
    credentials: &Credentials,
    timeout: Duration,
) -> TokenSettings {
    let file = credentials.token.clone();
    let options = TokenOptions::new(r, args);
    let Some(TokenUse::Source { exchange, metadata, .. }) = selection.ca().map(|kind| kind.token) else {
        options.refuse(r, selection);
        return file.into();
    };
    let kind = options.kind(metadata, credentials.is_token_named);
    options.refuse_unused(r, kind);
    let service = match kind {
        SourceKind::File => return file.into(),
        SourceKind::Exchange => {
            let exchange = options.exchange(r, credentials, exchange);
            exchange.map(Service::Exchange)
        }
        SourceKind::Gce => options.metadata_server(r, selection, metadata).map(Service::Metadata),
    };
    match service {
        Some(service) => TokenSettings::Service { service, patience: timeout / 2 },
        None => file.into(),
    }
}

/// The place of the token that clients bring; none without `--token-from-request`.
pub(super) fn from_request(
    r: &mut Reader<'_>,
    args: &RunArgs,
    selection: &Selection,
    subject: Subject<'_>,
) -> Option<BroughtToken> {
    let wanted = r.switch("token-from-request", args.token_from_request, &[]);
    // The kubelet brings that of a Pod.
    if wanted.value != Some(true) || subject.token().is_some() {
        return None;
    }
    let file = r.text("token-file", &args.token_file, &[]);
    if file.level > wanted.level {
        return None;
    }
    if file.level == wanted.level {
        r.mistake(format!(
            "{} and {} contradict each other: the token is in a file, or clients bring it; drop one of them",
            wanted.from, file.from
        ));
    }
    if subject.impersonates() {
        r.mistake(format!(
            "{} and --ca-impersonate contradict each other: with the latter all certificates are requested with the agent's \
             own token; drop one of them",
            wanted.from
        ));
    }
    let source = r.text("token-source", &args.token_source, &[]);
    if source.value.as_deref() == Some("gce") {
        r.mistake(format!(
            "{} and {} contradict each other: the metadata server has a token of its own; drop one of them",
            wanted.from, source.from
        ));
    }
    let takes_one = matches!(selection.ca().map(|kind| kind.token), Some(TokenUse::Source { .. }));
    if !takes_one && selection.choice.is_some() {
        let takers = providers::names_of_token_takers();
        r.mistake(format!(
            "{} is for CAs that take such a token ({takers}): choose one with --ca, or drop it",
            wanted.from
        ));
    }
    takes_one.then(BroughtToken::of_clients)
}

impl TokenOptions {
    fn new(r: &mut Reader<'_>, args: &RunArgs) -> Self {
        Self {
            source: r.parsed("token-source", &args.token_source, &[], |text| match text {
                "file" => Ok(SourceKind::File),
                "exchange" => Ok(SourceKind::Exchange),
                "gce" => Ok(SourceKind::Gce),
                _ => Err(format!("{text:?} is not a token source; choose file, exchange or gce")),
            }),
            url: r.parsed("token-exchange-url", &args.token_exchange_url, &[], str::parse::<Url>),
            audience: r.text("token-exchange-audience", &args.token_exchange_audience, &[]),
            scope: r.text("token-exchange-scope", &args.token_exchange_scope, &[]),
            root: r.text("token-exchange-root", &args.token_exchange_root, &[]),
            gce_audience: r.text("gce-audience", &args.gce_audience, &[]),
        }
    }

    fn of_exchange(&self) -> [SetBy<'_>; 4] {
        [self.url.set_by(), self.audience.set_by(), self.scope.set_by(), self.root.set_by()]
    }

    /// Reports these options: the selected CA takes no such token.
    fn refuse(&self, r: &mut Reader<'_>, selection: &Selection) {
        let own = [self.source.set_by(), self.gce_audience.set_by()];
        let all = self.of_exchange().into_iter().chain(own);
        // If no CA is selected, the report says so already.
        for (_, from) in all.filter(|(level, _)| selection.choice.is_some() && selection.judges(*level)) {
            let takers = providers::names_of_token_takers();
            r.mistake(format!(
                "{from} is for CAs that take such a token ({takers}): choose one with --ca, or drop it"
            ));
        }
    }

    fn kind(&self, metadata: MetadataToken, is_file_named: bool) -> SourceKind {
        match self.source.value {
            Some(kind) => kind,
            None if !self.url.is_missing() => SourceKind::Exchange,
            None if metadata == MetadataToken::Access && !is_file_named => SourceKind::Gce,
            None => SourceKind::File,
        }
    }

    /// Reports the options of another source than `kind`.
    fn refuse_unused(&self, r: &mut Reader<'_>, kind: SourceKind) {
        if self.source.is_invalid {
            return;
        }
        let mut alone = |own: SourceKind, name: &str, options: &[SetBy<'_>]| {
            let set = options.iter().filter(|(level, _)| level.is_some() && *level >= self.source.level);
            for (_, from) in set.filter(|_| kind != own) {
                r.mistake(format!("{from} is for --token-source {name} alone: add that, or drop it"));
            }
        };
        alone(SourceKind::Exchange, "exchange", &self.of_exchange());
        alone(SourceKind::Gce, "gce", &[self.gce_audience.set_by()]);
    }

    /// The token service. `default` is its URL and scope, where none are given.
    fn exchange(
        self,
        r: &mut Reader<'_>,
        credentials: &Credentials,
        default: Option<(&str, &str)>,
    ) -> Option<Exchange> {
        if self.url.is_missing() && default.is_none() {
            r.mistake("--token-source exchange needs the token service: --token-exchange-url URL");
        }
        let url = self.url.value.or_else(|| default.and_then(|(url, _)| url.parse().ok()))?;
        if url.address.plaintext {
            r.note(format!("the workload's token goes to {} in plain text", url.address));
        }
        let roots = match self.root.value {
            Some(text) if !text.eq_ignore_ascii_case("system") => Roots::File(text.into()),
            _ => Roots::System,
        };
        let scope = self.scope.value.or_else(|| default.map(|(_, scope)| scope.to_owned()));
        let subject = credentials.token.clone();
        Some(Exchange { url, roots, subject, audience: self.audience.value, scope })
    }

    fn metadata_server(
        self,
        r: &mut Reader<'_>,
        selection: &Selection,
        metadata: MetadataToken,
    ) -> Option<MetadataServer> {
        let host = r.variable("GCE_METADATA_HOST").unwrap_or(metadata_server::HOST);
        let Ok(address) = Address::with_ports(&format!("http://{host}"), 80, 80) else {
            r.mistake(format!("GCE_METADATA_HOST {host:?}: the shape is HOST or HOST:PORT"));
            return None;
        };
        let wanted = match metadata {
            MetadataToken::Access => {
                if self.gce_audience.value.is_some() {
                    let ca = selection.ca().map(|kind| kind.name).unwrap_or_default();
                    r.note(format!("{} is not used: {ca} gets an access token", self.gce_audience.from));
                }
                Wanted::Access
            }
            MetadataToken::Identity { audience: default } => {
                let Some(audience) = self.gce_audience.value.or(default.map(str::to_owned)) else {
                    r.mistake(
                        "--token-source gce needs the audience of the identity token: --gce-audience AUDIENCE",
                    );
                    return None;
                };
                Wanted::Identity { audience }
            }
        };
        Some(MetadataServer { address, wanted })
    }
}
