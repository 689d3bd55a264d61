//! The options that all CA providers share: credentials, roots, headers.

use std::path::PathBuf;

use http::{HeaderName, HeaderValue};

use super::args::RunArgs;
use super::selection::{ProviderOptions, istios};
use crate::auth::client_cert::ClientCertDir;
use crate::auth::token_file::{BroughtToken, TokenFile};
use crate::ca::provider::{DefaultRoots, Headers, ProviderKind, Selection, TokenUse};
use crate::kube::config::SERVICE_ACCOUNT_DIR;
use crate::net::tls::Roots;
use crate::options::Reader;

/// Where Istio mounts the root of its CA's TLS certificate.
pub(super) const ISTIO_ROOTS: [&str; 2] =
    ["/var/run/secrets/istio/root-cert.pem", "/etc/certs/root-cert.pem"];
const ISTIO_TOKEN: &str = "/var/run/secrets/tokens/istio-token";

/// The credentials for calls to a CA.
pub(super) struct Credentials {
    pub(super) token: TokenFile,
    /// Whether `--token-file` is set.
    pub(super) is_token_named: bool,
    pub(super) client_cert: Option<ClientCertDir>,
}

impl Credentials {
    pub(super) fn new(
        r: &mut Reader<'_>,
        args: &RunArgs,
        options: &ProviderOptions,
        selection: &Selection,
        brought: Option<&BroughtToken>,
    ) -> Self {
        let kind = selection.ca();
        let is_service_account = kind.is_some_and(|kind| kind.token == TokenUse::ServiceAccount);
        let default = if is_service_account || r.variable("JWT_POLICY") == Some("first-party-jwt") {
            format!("{SERVICE_ACCOUNT_DIR}/token")
        } else {
            ISTIO_TOKEN.to_owned()
        };
        let token = r.text("token-file", &args.token_file, &[]);
        Self {
            is_token_named: token.value.is_some() || brought.is_some(),
            token: match brought {
                Some(brought) => brought.clone().into(),
                None => TokenFile::new(token.or(default)),
            },
            client_cert: client_cert_dir(r, options, kind),
        }
    }
}

/// The client certificate's directory, if the certificate can be presented.
fn client_cert_dir(
    r: &mut Reader<'_>,
    options: &ProviderOptions,
    kind: Option<&ProviderKind>,
) -> Option<ClientCertDir> {
    let ProviderOptions { client_cert, addresses, .. } = options;
    let takes_one = kind.is_some_and(|kind| kind.takes_client_cert);
    let directory = client_cert.value.as_ref().filter(|_| takes_one)?;
    if !addresses.value.as_ref().is_some_and(|all| all.iter().all(|address| address.plaintext)) {
        return Some(ClientCertDir::new(directory));
    }
    let why = format!("a client certificate needs TLS, and {} is without", addresses.from);
    if client_cert.level == addresses.level {
        r.mistake(format!("{}: {why}; drop one of them", client_cert.from));
    } else {
        r.note(format!("{} is not used: {why}", client_cert.from));
    }
    None
}

/// The roots for the CA's own TLS certificate.
pub(super) fn roots(
    r: &mut Reader<'_>,
    args: &RunArgs,
    client_cert: Option<&ClientCertDir>,
    kind: Option<&ProviderKind>,
) -> Roots {
    if let Some(text) = r.text("ca-root", &args.ca_root, istios(kind, &["CA_ROOT_CA"])).value {
        return match text.as_str() {
            text if text.eq_ignore_ascii_case("system") => Roots::System,
            path => Roots::File(path.into()),
        };
    }
    let network = kind.and_then(|kind| kind.network.as_ref());
    match network.map_or(DefaultRoots::Istio, |network| network.default_roots) {
        DefaultRoots::System => Roots::System,
        DefaultRoots::Istio if r.variable("PILOT_CERT_PROVIDER") != Some("kubernetes") => {
            let with_certificate = client_cert.map(ClientCertDir::root_file);
            Roots::FirstOf(with_certificate.into_iter().chain(ISTIO_ROOTS.map(PathBuf::from)).collect())
        }
        DefaultRoots::Istio | DefaultRoots::ServiceAccount => {
            Roots::File(format!("{SERVICE_ACCOUNT_DIR}/ca.crt").into())
        }
    }
}

/// Flags `--ca-header K=V`, then variables `CA_HEADER_K`, then the options file; the first of a name wins.
pub(super) fn headers(r: &mut Reader<'_>, args: &RunArgs) -> Headers {
    const PREFIX: &str = "CA_HEADER_";
    // The name in messages: the value may be a secret, and without "=" its start is unknown.
    let split = |text: &'_ str| {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let shown = name.split([':', ' ']).next().unwrap_or_default().to_owned();
        (shown, name.to_owned(), value.to_owned())
    };
    let named = |from: &str, text: &str| {
        let (shown, name, value) = split(text);
        (format!("{from} {shown}"), name, value)
    };
    let typed = args.ca_header.iter().map(|text| named("--ca-header", text));
    let own = r.variable("ATTACHE_CA_HEADER").map(|text| named("ATTACHE_CA_HEADER", text));
    let inherited = r.with_prefix(PREFIX).filter(|(_, value)| !value.is_empty());
    let inherited = inherited.map(|(variable, value)| {
        let name = variable.strip_prefix(PREFIX).unwrap_or(variable);
        (variable.to_owned(), name.to_owned(), value.to_owned())
    });
    let in_file = r.in_file("ca-header").into_iter().flat_map(|(place, values)| {
        values.iter().map(move |text| {
            let (shown, name, value) = split(text);
            (place.with(&shown), name, value)
        })
    });
    let mut headers = Headers::new();
    for (from, name, value) in typed.chain(own).chain(inherited).chain(in_file) {
        match (name.to_ascii_lowercase().parse::<HeaderName>(), value.parse::<HeaderValue>()) {
            (Ok(name), Ok(mut value)) if !value.is_empty() && !name.as_str().ends_with("-bin") => {
                value.set_sensitive(true);
                if headers.iter().all(|(known, _)| *known != name) {
                    headers.push((name, value));
                }
            }
            _ => r.mistake(format!(
                "{from}: the shape is NAME=VALUE, in ASCII, and the name must not end in -bin"
            )),
        }
    }
    headers
}
