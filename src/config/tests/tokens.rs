//! Token sources, and Google's CA, which depends on them most.

use super::*;
use crate::auth::exchange::Exchange;
use crate::auth::metadata_server::{MetadataServer, Wanted};
use crate::auth::token::{Service, TokenSettings};
use crate::auth::token_file::TokenFile;
use crate::ca::google_cas::options::GoogleCasProvider;
use crate::ca::vault;
use crate::net::tls::Roots;
use crate::source::issuer::IdentitySource;

const POOL: &str = "projects/p/locations/l/caPools/mesh";

fn token(line: &str, environment: &[(&str, &str)]) -> TokenSettings {
    match only(&config(line, environment).unwrap()) {
        Provider::Citadel(CitadelProvider { token, .. }) => token,
        Provider::GoogleCas(GoogleCasProvider { token, .. }) => token,
        Provider::Vault(VaultProvider { settings, .. }) => match settings.access {
            vault::Access::Login { jwt, .. } => jwt,
            vault::Access::Token(_) => panic!("no login"),
        },
        other => panic!("it takes no token: {other:?}"),
    }
}

fn exchange(line: &str, environment: &[(&str, &str)]) -> Exchange {
    match token(line, environment) {
        TokenSettings::Service { service: Service::Exchange(exchange), .. } => exchange,
        other => panic!("not an exchange: {other:?}"),
    }
}

fn metadata(line: &str, environment: &[(&str, &str)]) -> MetadataServer {
    match token(line, environment) {
        TokenSettings::Service { service: Service::Metadata(server), .. } => server,
        other => panic!("not a metadata server: {other:?}"),
    }
}

#[test]
fn the_token_source_follows_from_the_options() {
    let google = format!("--ca google-cas --google-cas-pool {POOL}");
    let default = TokenFile::new("/var/run/secrets/tokens/istio-token");
    assert_eq!(token("--ca-address ca:1", &[]), default.clone().into());
    assert_eq!(token(&format!("{google} --token-file t"), &[]), TokenFile::new("t").into());
    assert_eq!(metadata(&google, &[]).wanted, Wanted::Access);
    let unused = config(&format!("{google} --gce-audience a"), &[]);
    assert!(unused.is_ok_and(|config| config.notes[0].contains("--gce-audience is not used")));

    let url = "https://sts.example:8443/a/token?b=c";
    let line = format!(
        "--ca-address ca:1 --token-exchange-url {url} --token-exchange-audience istio-ca --ca-timeout 4s"
    );
    let found = exchange(&line, &[("ATTACHE_TOKEN_EXCHANGE_SCOPE", "a b")]);
    assert_eq!((found.url, found.roots, found.subject), (url.parse().unwrap(), Roots::System, default));
    assert_eq!((found.audience.as_deref(), found.scope.as_deref()), (Some("istio-ca"), Some("a b")));
    let TokenSettings::Service { patience, .. } = token(&line, &[]) else { panic!("a file") };
    assert_eq!(patience, Duration::from_secs(2), "half of the time is left for the CA");

    let line =
        format!("{google} --token-source exchange --token-exchange-root r.pem --token-exchange-audience a");
    let found = exchange(&line, &[]);
    assert_eq!(found.url.address.to_string(), "https://sts.googleapis.com:443");
    assert_eq!(found.roots, Roots::File("r.pem".into()));
    assert_eq!(found.scope.as_deref(), Some("https://www.googleapis.com/auth/cloud-platform"));
    let vault = "--ca vault --ca-address v --vault-role r --vault-auth-role a";
    assert_eq!(exchange(&format!("{vault} --token-exchange-url http://sts/t"), &[]).scope, None);
    let plain = config("--ca-address ca:1 --token-exchange-url http://sts/t", &[]).unwrap();
    assert!(
        plain.notes.iter().any(|note| note.contains("goes to http://sts:80 in plain text")),
        "{:?}",
        plain.notes
    );
}

#[test]
fn the_metadata_server_is_asked_for_the_token_that_the_ca_takes() {
    let found = metadata("--ca-address ca:1 --token-source gce", &[]);
    assert_eq!(found.address.to_string(), "http://metadata.google.internal:80");
    let audience = |audience: &str| Wanted::Identity { audience: audience.to_owned() };
    assert_eq!(found.wanted, audience("istio-ca"));
    let vault = "--ca vault --ca-address v --vault-role r --vault-auth-role a --gce-audience vault";
    let environment = [("ATTACHE_TOKEN_SOURCE", "gce"), ("GCE_METADATA_HOST", "127.0.0.1:8080")];
    let found = metadata(vault, &environment);
    assert_eq!(
        (found.address.to_string().as_str(), found.wanted),
        ("http://127.0.0.1:8080", audience("vault"))
    );
}

#[test]
fn each_mistake_about_token_sources_names_its_remedy() {
    let ca = "--ca-address ca:1";
    let cases: [(String, &[&str]); 11] = [
        (format!("{ca} --token-source vault"), &["choose file, exchange or gce"]),
        (format!("{ca} --token-source exchange"), &["--token-exchange-url URL"]),
        (format!("{ca} --token-exchange-url sts.example/token"), &["the shape is https://HOST/PATH"]),
        (format!("{ca} --token-exchange-url https://me@sts.example/"), &["the shape is https://HOST/PATH"]),
        (
            format!("{ca} --token-exchange-audience a --token-exchange-scope b"),
            &[
                "--token-exchange-audience is for --token-source exchange alone",
                "--token-exchange-scope is for --token-source exchange alone",
            ],
        ),
        (
            format!("{ca} --token-source gce --token-exchange-url https://a/"),
            &["--token-exchange-url https://a/ is for --token-source exchange alone"],
        ),
        (format!("{ca} --gce-audience a"), &["--gce-audience is for --token-source gce alone"]),
        (
            "--ca vault --ca-address v --vault-role r --vault-auth-role a --token-source gce".to_owned(),
            &["--gce-audience AUDIENCE"],
        ),
        (
            "--ca embedded --token-source gce --token-exchange-root r".to_owned(),
            &["--token-source gce is for CAs that take such a token", "--token-exchange-root is for CAs"],
        ),
        ("--ca google-cas".to_owned(), &["needs the CA pool: --google-cas-pool projects/"]),
        (
            format!("--ca google-cas --google-cas-pool mesh --google-cas-ca a/b --namespace n {ca}"),
            &["\"mesh\" is not a CA pool", "\"a/b\" is not the id of a CA", "--namespace is not enough"],
        ),
    ];
    for (line, words) in cases {
        let all = mistakes(&line, &[]);
        assert_eq!(all.len(), words.len(), "{line}: {all:#?}");
        for word in words {
            assert!(all.iter().any(|mistake| mistake.contains(word)), "{word}: {all:#?}");
        }
    }
    let inherited = [("ATTACHE_TOKEN_SOURCE", "gce"), ("ATTACHE_TOKEN_EXCHANGE_URL", "https://a/")];
    assert!(mistakes("--ca embedded", &inherited).is_empty(), "a lower level is silenced");
    assert_eq!(
        token(&format!("{ca} --token-source file"), &inherited[1..]),
        token(ca, &[]),
        "a lower level is silenced"
    );
}

#[test]
fn google_cas_needs_only_its_pool() {
    let google = |line: &str, environment: &[_]| {
        let config = config(line, environment).unwrap();
        let Provider::GoogleCas(GoogleCasProvider { endpoint, settings, .. }) = only(&config) else {
            panic!("another CA")
        };
        (endpoint, settings, config.workload.identity)
    };
    // As Istio's agent reads it, with further variables that an injector leaves.
    let istios = [
        ("CA_PROVIDER", "GoogleCAS"),
        ("CA_ADDR", POOL),
        ("CA_ROOT_CA", "/istio.pem"),
        ("ISTIOD_SAN", "istiod"),
        ("POD_NAMESPACE", "shop"),
        ("SERVICE_ACCOUNT", "cart"),
    ];
    let (endpoint, settings, identity) = google("", &istios);
    assert_eq!(endpoint.address.to_string(), "https://privateca.googleapis.com:443");
    assert_eq!((endpoint.roots, endpoint.server_name), (Roots::System, None));
    assert_eq!((settings.pool, settings.ca), (POOL.parse().unwrap(), None));
    assert_eq!(identity, IdentitySource::Unknown, "the service takes the caller's name");

    let line =
        format!("--ca google-cas --google-cas-pool {POOL} --google-cas-ca one --trust-domain p.svc.id.goog");
    let (_, settings, identity) = google(&line, &[("CA_ADDR", "istiod:15012"), istios[4], istios[5]]);
    assert_eq!(settings.ca, Some("one".parse().unwrap()));
    let expected = "spiffe://p.svc.id.goog/ns/shop/sa/cart".parse().unwrap();
    assert_eq!(identity, IdentitySource::Fixed(expected));
}
