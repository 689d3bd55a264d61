mod options_file;
mod sockets;
mod spiffe;
mod tokens;

use clap::Parser;

use super::shared::ISTIO_ROOTS;
use super::*;
use crate::auth::token_file::TokenFile;
use crate::ca::cfssl::options::CfsslProvider;
use crate::ca::citadel::options::CitadelProvider;
use crate::ca::kubernetes::SignerRoots;
use crate::ca::kubernetes::options::KubernetesProvider;
use crate::ca::vault::options::VaultProvider;
use crate::export::output::{Hook, OutputSettings};
use crate::fs::disk::Disk;
use crate::net::tls::Roots;
use crate::pki::key::{KeyFormat, KeyType};
use crate::source::issuer::IdentitySource;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    run: RunArgs,
}

fn config(line: &str, environment: &[(&str, &str)]) -> Result<Config, ConfigErrors> {
    let line = ["attache"].into_iter().chain(line.split_whitespace());
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Config::new(&Line::try_parse_from(line).unwrap().run, &environment.collect())
}

fn mistakes(line: &str, environment: &[(&str, &str)]) -> Vec<String> {
    config(line, environment).map(|_| Vec::new()).unwrap_or_else(|ConfigErrors(all)| all)
}

/// The only CA.
fn only(config: &Config) -> Provider {
    let [one] = config.providers.as_slice() else { panic!("not one CA: {:?}", config.providers) };
    one.clone()
}

#[test]
fn a_flag_wins_over_attaches_variable_and_attaches_over_istios() {
    let environment = [("CA_PROVIDER", "none"), ("SECRET_TTL", "1h0m0s"), ("ATTACHE_CERT_TTL", "2h")];
    let ttl =
        |line: &str, environment: &[_]| config(line, environment).unwrap().workload.ttl.as_secs() / 3600;
    assert_eq!(ttl("--cert-ttl 3h", &environment), 3);
    assert_eq!(ttl("", &environment), 2);
    assert_eq!(ttl("", &environment[..2]), 1);
    assert_eq!(ttl("", &[("CA_PROVIDER", "none"), ("SECRET_TTL", "")]), 24, "empty is not set");
}

#[test]
fn the_report_names_every_mistake_once() {
    let line = "--ca other --cert-ttl 5x --grace-ratio 2 --socket-mode 999 --status-address here --key-type dsa \
                --log-level loud --spiffe-id web --ca-header x";
    let all = mistakes(line, &[("FILE_DEBOUNCE_DURATION", "soon"), ("FILE_MOUNTED_CERTS", "maybe")]);
    let words = [
        "--ca: \"other\"",
        "--cert-ttl: \"5x\"",
        "--grace-ratio: \"2\"",
        "--socket-mode: \"999\"",
        "--status-address: \"here\"",
        "--key-type: \"dsa\"",
        "--log-level: \"loud\"",
        "--spiffe-id: \"web\"",
        "--ca-header x",
        "FILE_DEBOUNCE_DURATION: \"soon\"",
        "FILE_MOUNTED_CERTS: \"maybe\"",
    ];
    for word in words {
        assert_eq!(all.iter().filter(|mistake| mistake.contains(word)).count(), 1, "{word}: {all:#?}");
    }
    assert_eq!(all.len(), words.len(), "{all:#?}");
}

#[test]
fn durations_are_read_in_attaches_and_in_gos_notation() {
    let cases = [
        ("24h", Some(86_400_000)),
        ("24h0m0s", Some(86_400_000)),
        ("1.5h", Some(5_400_000)),
        ("1h30m", Some(5_400_000)),
        ("90s", Some(90_000)),
        ("100ms", Some(100)),
        ("0s", Some(0)),
        ("", None),
        ("5", None),
        ("h", None),
        ("5x", None),
        ("-5s", None),
        ("1000000000h", None),
        ("forever", None),
    ];
    for (text, millis) in cases {
        assert_eq!(parse_duration(text).ok(), millis.map(Duration::from_millis), "{text}");
    }
}

#[test]
fn without_a_ca_the_error_lists_the_choices() {
    let all = mistakes("--cert-dir /nowhere", &[]);
    let [one] = all.as_slice() else { panic!("{all:?}") };
    for word in ["no CA is configured", "/nowhere", "--ca", "citadel", "embedded", "none"] {
        assert!(one.contains(word), "{one}");
    }
}

#[test]
fn contradictions_are_judged_within_one_level() {
    let mounted = ("FILE_MOUNTED_CERTS", "true");
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], Option<&'a str>);
    let cases: [Case<'_>; 28] = [
        ("--ca exec", &[], Some("needs a command that signs: --ca-exec COMMAND")),
        ("--ca exec --ca-exec-roots x", &[], Some("needs a command that signs")),
        ("--ca exec", &[("ATTACHE_CA_EXEC", "x"), ("CA_ADDR", "ca:1")], None),
        ("--ca exec --ca-exec x --ca-address ca:1", &[], Some("the first has no address")),
        ("--ca-exec x", &[("CA_ADDR", "ca:1")], Some("--ca-exec is for --ca exec alone")),
        ("--ca embedded", &[("ATTACHE_CA_EXEC", "x")], None),
        ("--ca cfssl", &[], Some("--ca cfssl needs the CA's address")),
        ("--ca cfssl --ca-address ca --cfssl-profile x", &[("ATTACHE_CA_EXEC", "x")], None),
        ("--ca-address ca --cfssl-profile x", &[], Some("--cfssl-profile is for --ca cfssl alone")),
        ("--ca embedded --cfssl-bundle x", &[], Some("--cfssl-bundle is for --ca cfssl alone")),
        ("--ca embedded --ca-address ca:1", &[], Some("the first has no address")),
        ("--ca none --ca-address ca:1", &[], Some("the first has no address")),
        ("--ca embedded", &[("CA_ADDR", "ca:1")], None),
        ("--ca citadel --ca-address ca:1 --ca-dir x", &[], Some("only embedded has a directory")),
        ("--ca citadel --ca-address ca:1", &[("ATTACHE_CA_DIR", "x")], None),
        ("--ca citadel", &[], Some("needs the CA's address")),
        ("--ca embedded --ca-client-cert-dir x", &[], Some("only citadel takes a client certificate")),
        ("--ca none --ca-client-cert-dir x", &[], Some("only citadel takes a client certificate")),
        ("--ca embedded", &[("PROV_CERT", "x")], None),
        ("--ca-client-cert-dir x", &[], Some("--ca-client-cert-dir needs the CA's address")),
        ("--ca-address http://ca:1 --ca-client-cert-dir x", &[], Some("needs TLS")),
        ("--ca-address http://ca:1", &[("PROV_CERT", "x")], None),
        ("", &[("PROV_CERT", "x"), mounted], None),
        ("--ca embedded --file-mounted-certs", &[], Some("no CA is used")),
        ("", &[("CA_PROVIDER", "Citadel"), ("CA_ADDR", "ca:1"), mounted], Some("no CA is used")),
        ("", &[("CA_ADDR", "ca:1"), mounted], None),
        ("--spiffe-id spiffe://td/a --namespace b", &[mounted], Some("the whole identity")),
        ("--spiffe-id spiffe://td/a", &[mounted, ("POD_NAMESPACE", "b")], None),
    ];
    for (line, environment, expected) in cases {
        let all = mistakes(line, environment);
        match expected {
            None => assert!(all.is_empty(), "{line}: {all:?}"),
            Some(words) => assert!(all.len() == 1 && all[0].contains(words), "{line}: {all:?}"),
        }
    }
}

#[test]
fn cfssl_needs_only_an_address() {
    let found = |line: &str| {
        let config = config(&format!("--ca cfssl {line}"), &[("SECRET_TTL", "1h")]).unwrap();
        let Provider::Cfssl(CfsslProvider { endpoint, profile, .. }) = only(&config) else {
            panic!("{line}")
        };
        (endpoint.address.to_string(), profile, config.notes)
    };
    let (address, profile, notes) = found("--ca-address ca --cfssl-profile mesh");
    assert_eq!((address.as_str(), profile.as_deref(), notes.len()), ("https://ca:8888", Some("mesh"), 0));
    let (address, _, notes) = found("--ca-address http://ca --cert-ttl 2h");
    assert_eq!(address, "http://ca:8888");
    assert!(
        notes[0].contains("--cert-ttl 2h is not used") && notes[1].contains("--cfssl-bundle"),
        "{notes:?}"
    );
    assert_eq!(found("--ca-address http://ca:1 --cfssl-bundle x").2.len(), 0);
}

#[test]
fn the_provider_follows_from_addresses_and_mounted_files() {
    let provider =
        |line: &str, environment: &[_]| match config(line, environment).unwrap().providers.as_slice() {
            [Provider::Citadel(_)] => "citadel",
            [Provider::GoogleCas(_)] => "google-cas",
            [Provider::Vault(_)] => "vault",
            [Provider::Kubernetes(_)] => "kubernetes",
            [Provider::Embedded(_)] => "embedded",
            [Provider::Cfssl(_)] => "cfssl",
            [Provider::Exec(_)] => "exec",
            [] => "none",
            several => panic!("{several:?}"),
        };
    assert_eq!(provider("--ca-address istiod:15012", &[]), "citadel");
    assert_eq!(provider("", &[("CA_ADDR", "istiod:15012")]), "citadel");
    let vault = "--ca vault --ca-address vault --vault-role web --vault-auth-role web";
    assert_eq!(provider(vault, &[]), "vault");
    assert_eq!(provider("", &[("CA_ADDR", "istiod:15012"), ("FILE_MOUNTED_CERTS", "true")]), "none");
    assert_eq!(provider("--ca embedded", &[("FILE_MOUNTED_CERTS", "true")]), "embedded");
    let directory = tempfile::tempdir().unwrap();
    for name in ["cert-chain.pem", "key.pem"] {
        std::fs::write(directory.path().join(name), "").unwrap();
    }
    assert_eq!(provider("", &[("ATTACHE_CERT_DIR", directory.path().to_str().unwrap())]), "none");
}

#[test]
fn in_a_cluster_kubernetes_needs_only_signer_and_roots() {
    let pod = [
        ("KUBERNETES_SERVICE_HOST", "fd00::1"),
        ("KUBERNETES_SERVICE_PORT", "6443"),
        // Variables that an injector for Istio leaves describe another CA.
        ("CA_ADDR", "istiod:15012"),
        ("CA_ROOT_CA", "/istio.pem"),
        ("ISTIOD_SAN", "istiod"),
    ];
    let fixed = "--ca kubernetes --kubernetes-signer example.com/spiffe --kubernetes-root";
    let found = config(&format!("{fixed} /root.pem"), &pod).unwrap();
    let Provider::Kubernetes(KubernetesProvider { endpoint, token, signer, roots, .. }) = only(&found) else {
        panic!("another CA")
    };
    let directory = Path::new("/var/run/secrets/kubernetes.io/serviceaccount");
    assert_eq!(endpoint.address.to_string(), "https://[fd00::1]:6443");
    assert_eq!((endpoint.roots, endpoint.server_name), (Roots::File(directory.join("ca.crt")), None));
    assert_eq!(token.path(), Some(directory.join("token").as_path()));
    assert_eq!(signer, "example.com/spiffe".parse().unwrap());
    assert_eq!(roots, SignerRoots::File("/root.pem".into()));
    assert!(found.notes.is_empty(), "{:?}", found.notes);

    let line =
        format!("{fixed} cluster --ca-address api.example --ca-root system --token-file t --cert-ttl 5m");
    let found = config(&line, &pod).unwrap();
    let Provider::Kubernetes(KubernetesProvider { endpoint, token, roots, .. }) = only(&found) else {
        panic!("another CA")
    };
    assert_eq!(
        (endpoint.address.to_string().as_str(), endpoint.roots),
        ("https://api.example:443", Roots::System)
    );
    assert_eq!((token.path(), roots), (Some(Path::new("t")), SignerRoots::Cluster));
    assert!(found.notes.len() == 1 && found.notes[0].contains("requested as 600s"), "{:?}", found.notes);

    let all = mistakes("--ca kubernetes", &[("CA_ADDR", "istiod:15012")]);
    for word in ["--ca-address", "--kubernetes-signer", "--kubernetes-root"] {
        assert_eq!(all.iter().filter(|mistake| mistake.contains(word)).count(), 1, "{word}: {all:?}");
    }
    let all = mistakes("--ca kubernetes --kubernetes-signer spiffe --kubernetes-root cluster", &pod);
    assert!(all.len() == 1 && all[0].contains("the shape is example.com/name"), "{all:?}");
    let all = mistakes("--ca embedded --kubernetes-root cluster", &[("ATTACHE_KUBERNETES_SIGNER", "a.b/c")]);
    assert!(all.len() == 1 && all[0].contains("--kubernetes-root is for --ca kubernetes alone"), "{all:?}");
}

#[test]
fn identities_follow_from_options_and_provider() {
    let fixed = |line: &str, environment: &[_]| match config(line, environment).unwrap().workload.identity {
        IdentitySource::Fixed(identity) => identity.to_string(),
        IdentitySource::Unknown => "unknown".to_owned(),
        IdentitySource::Token { trust_domain, .. } => format!("token in {trust_domain}"),
    };
    assert_eq!(fixed("--ca embedded", &[]), "spiffe://cluster.local/ns/default/sa/default");
    assert_eq!(fixed("--ca embedded --namespace shop", &[]), "spiffe://cluster.local/ns/shop/sa/default");
    assert_eq!(fixed("--ca-address ca:1", &[("TRUST_DOMAIN", "td")]), "token in td");
    let pod = [("POD_NAMESPACE", "shop"), ("SERVICE_ACCOUNT", "cart")];
    assert_eq!(fixed("--ca-address ca:1", &pod), "spiffe://cluster.local/ns/shop/sa/cart");
    assert_eq!(fixed("--ca-address ca:1 --spiffe-id spiffe://td/x", &pod), "spiffe://td/x");
    assert!(mistakes("--ca embedded --trust-domain UPPER", &[])[0].contains("--trust-domain"));
}

#[test]
fn names_are_requested_from_the_cas_that_issue_them() {
    let found = |line: &str| config(line, &[]).unwrap();
    let all = "--dns-san web.example,DB.example --dns-san *.web.example --common-name Web";
    let names = found(&format!("--ca embedded {all}")).workload.names;
    assert_eq!(names.dns_list(), "web.example,db.example,*.web.example");
    assert_eq!(names.common_name.unwrap().to_string(), "Web");
    for (line, words) in [
        (
            "--ca-address ca:1",
            "--dns-san web.example,DB.example,*.web.example and --common-name Web is not used with --ca citadel: Istio's CA",
        ),
        ("--ca none", "without a CA there is no certificate to request"),
    ] {
        let found = found(&format!("{line} {all}"));
        assert!(found.workload.names.is_empty(), "{line}");
        assert_eq!(found.notes.iter().filter(|note| note.contains(words)).count(), 1, "{:?}", found.notes);
    }
    let pool = "--ca google-cas --google-cas-pool projects/p/locations/l/caPools/c";
    let all = mistakes(&format!("{pool} --dns-san web.example"), &[]);
    assert!(all.len() == 1 && all[0].contains("needs --spiffe-id with --ca google-cas"), "{all:?}");
    let named = found(&format!("{pool} --dns-san web.example --spiffe-id spiffe://td/web"));
    assert_eq!(named.workload.names.dns_list(), "web.example");
    let all = mistakes("--ca embedded --dns-san 10.0.0.1 --dns-san a,A --common-name=", &[]);
    for words in ["\"10.0.0.1\" is not a DNS name", "a is named twice", "--common-name is empty"] {
        assert!(all.iter().any(|mistake| mistake.contains(words)), "{words}: {all:?}");
    }
}

#[test]
fn renewals_of_a_fleet_are_spread_unless_an_option_or_istios_variable_says_otherwise() {
    let jitter = |line: &str, environment: &[(&str, &str)]| {
        config(&format!("--ca none {line}"), environment).unwrap().workload.grace.jitter
    };
    let istios = [("SECRET_GRACE_PERIOD_RATIO_JITTER", "0.01")];
    assert_eq!(jitter("", &[]), 0.1);
    assert_eq!(jitter("", &istios), 0.01);
    assert_eq!(jitter("--grace-jitter 0.2", &istios), 0.2);
    // Never so much that a certificate is renewed after it has expired, or as soon as it is issued.
    for (ratio, expected) in [("0.5", 0.1), ("0.2", 0.1), ("0.1", 0.05), ("0.9", 0.05), ("0.99", 0.005)] {
        let jitter = jitter(&format!("--grace-ratio {ratio}"), &[]);
        assert!((jitter - expected).abs() < 1e-9, "{ratio}: {jitter}");
    }
}

#[test]
fn key_types_follow_from_flags_and_istios_variables() {
    use KeyFormat::{Pkcs8, Traditional};
    use KeyType::{EcdsaP256, EcdsaP384, Ed25519, Rsa2048, Rsa3072, Rsa4096};
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], KeyType, KeyFormat, bool);
    let ecdsa = ("ECC_SIGNATURE_ALGORITHM", "ECDSA");
    let (curve, rsa) = (("ECC_CURVE", "P384"), ("WORKLOAD_RSA_KEY_SIZE", "2048"));
    let cases: [Case<'_>; 20] = [
        ("", &[], EcdsaP256, Pkcs8, false),
        ("", &[curve], EcdsaP256, Pkcs8, false),
        ("", &[ecdsa], EcdsaP256, Pkcs8, false),
        ("", &[ecdsa, ("ECC_CURVE", "P256")], EcdsaP256, Pkcs8, false),
        ("", &[ecdsa, curve], EcdsaP384, Pkcs8, false),
        ("", &[ecdsa, curve, rsa], EcdsaP384, Pkcs8, false),
        ("", &[curve, rsa], Rsa2048, Pkcs8, false),
        ("", &[("WORKLOAD_RSA_KEY_SIZE", "3072")], Rsa3072, Pkcs8, false),
        ("", &[("WORKLOAD_RSA_KEY_SIZE", "4096")], Rsa4096, Pkcs8, false),
        ("", &[rsa, ("ATTACHE_KEY_TYPE", "ecdsa-p384")], EcdsaP384, Pkcs8, false),
        ("--key-type rsa-3072", &[ecdsa, ("ATTACHE_KEY_TYPE", "ecdsa-p384")], Rsa3072, Pkcs8, false),
        ("--key-type ed25519", &[("PKCS8_KEY", "true")], Ed25519, Pkcs8, false),
        ("", &[("PKCS8_KEY", "false")], EcdsaP256, Traditional, false),
        ("", &[("PKCS8_KEY", "false"), ("ATTACHE_KEY_FORMAT", "pkcs8")], EcdsaP256, Pkcs8, false),
        ("--key-format traditional", &[("PKCS8_KEY", "true")], EcdsaP256, Traditional, false),
        ("--key-format pkcs8", &[("ATTACHE_KEY_FORMAT", "traditional")], EcdsaP256, Pkcs8, false),
        // Of two contradictory settings the stronger one counts.
        ("--key-type ed25519", &[("PKCS8_KEY", "false")], Ed25519, Pkcs8, true),
        ("--key-type ed25519", &[("ATTACHE_KEY_FORMAT", "traditional")], Ed25519, Pkcs8, true),
        ("--key-format traditional", &[("ATTACHE_KEY_TYPE", "ed25519")], EcdsaP256, Traditional, true),
        ("--key-format traditional", &[("ATTACHE_KEY_TYPE", "ed25519"), rsa], Rsa2048, Traditional, true),
    ];
    for (line, environment, key_type, key_format, is_unused) in cases {
        let with_ca: Vec<_> = environment.iter().copied().chain([("CA_PROVIDER", "embedded")]).collect();
        let config = config(line, &with_ca).unwrap();
        let found = (config.workload.key_type, config.workload.key_format);
        assert_eq!(found, (key_type, key_format), "{line} {environment:?}");
        let warnings = config.notes.iter().filter(|note| note.contains("signature_algorithms")).count();
        assert_eq!(warnings, usize::from(key_type == Ed25519), "{:?}", config.notes);
        let is_ignored = config.notes.iter().any(|note| note.contains("is not used: Ed25519 keys have no"));
        assert_eq!(is_ignored, is_unused, "{line} {environment:?}: {:?}", config.notes);
    }

    type Wrong<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str);
    let cases: [Wrong<'_>; 8] = [
        ("", &[("WORKLOAD_RSA_KEY_SIZE", "512")], "choose 2048, 3072 or 4096"),
        ("", &[ecdsa, ("ECC_CURVE", "P521")], "choose P256 or P384"),
        ("", &[("ECC_SIGNATURE_ALGORITHM", "RSA")], "only ECDSA is known"),
        ("", &[("PKCS8_KEY", "maybe")], "PKCS8_KEY: \"maybe\" is neither true nor false"),
        ("--key-format true", &[], "choose pkcs8 or traditional"),
        ("--key-format=", &[("PKCS8_KEY", "false")], "--key-format is empty"),
        ("--key-type ed25519 --key-format traditional", &[], "Ed25519 keys have no traditional form"),
        (
            "",
            &[("ATTACHE_KEY_TYPE", "ed25519"), ("ATTACHE_KEY_FORMAT", "traditional")],
            "choose pkcs8, or another key type",
        ),
    ];
    for (line, environment, words) in cases {
        let with_ca: Vec<_> = environment.iter().copied().chain([("CA_PROVIDER", "embedded")]).collect();
        let all = mistakes(line, &with_ca);
        assert!(all.len() == 1 && all[0].contains(words), "{line} {environment:?}: {all:?}");
    }
}

#[test]
fn bundles_of_other_trust_domains_are_named_once_and_are_not_the_own() {
    let ca = "--ca embedded --trust-domain one.example ";
    let with = |bundles: &str| format!("{ca}{bundles}");
    let two =
        config(&with("--federated-bundle two.example=/a.pem --federated-bundle spiffe://three=b=c"), &[]);
    let two = two.unwrap();
    let paths: Vec<_> =
        two.files.federated.iter().map(|one| (one.name.as_str(), one.path.to_str().unwrap())).collect();
    assert_eq!(paths, [("spiffe://two.example", "/a.pem"), ("spiffe://three", "b=c")]);
    for (line, expected) in [
        ("--federated-bundle two.example", "is not DOMAIN=FILE"),
        ("--federated-bundle Two=/a", "lower-case"),
        ("--federated-bundle spiffe://two/web=/a", "no path"),
        ("--federated-bundle one.example=/a", "own trust domain"),
        ("--federated-bundle two=/a --federated-bundle two=/b", "names two twice"),
        ("--spiffe-validator on", "\"on\" is none of off, spiffe-names, all"),
    ] {
        let all = mistakes(&with(line), &[]);
        assert!(all.len() == 1 && all[0].contains(expected), "{line}: {all:?}");
    }
    assert_eq!(two.spiffe_validator, SpiffeValidator::SpiffeNames);
    assert_eq!(config(&with("--spiffe-validator all"), &[]).unwrap().spiffe_validator, SpiffeValidator::All);
}

#[test]
fn the_default_crl_file_may_be_missing() {
    let crl = |line: &str, environment: &[_]| config(line, environment).unwrap().crl;
    let default = crl("--ca embedded", &[]);
    assert_eq!(default.path.to_str(), Some("/var/run/secrets/istio/crl/ca-crl.pem"));
    assert!(!default.is_named);
    let named = [crl("--ca embedded --crl a.pem", &[]), crl("--ca embedded", &[("ATTACHE_CRL", "a.pem")])];
    for crl in named {
        assert_eq!((crl.path.to_str(), crl.is_named), (Some("a.pem"), true));
    }
}

#[test]
fn headers_come_from_flags_and_variables() {
    let environment = [("CA_HEADER_X_TENANT", "inherited"), ("CA_HEADER_OTHER", "b")];
    let config = config("--ca-address ca:1 --ca-header X_Tenant=typed", &environment).unwrap();
    let Provider::Citadel(CitadelProvider { headers, .. }) = only(&config) else { panic!("not citadel") };
    let headers: Vec<_> =
        headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(headers, [("x_tenant", "typed"), ("other", "b")]);
}

#[test]
fn a_cert_signer_is_for_citadel_and_istios_variable_is_ignored_elsewhere() {
    let signer = |line: &str, environment: &[_]| match config(line, environment).unwrap().providers.as_slice()
    {
        [Provider::Citadel(CitadelProvider { cert_signer, .. })] => cert_signer.clone(),
        _ => None,
    };
    let istio = [("ISTIO_META_CERT_SIGNER", "blue")];
    assert_eq!(signer("--ca-address ca:1", &[]), None);
    assert_eq!(signer("--ca-address ca:1", &istio).as_deref(), Some("blue"));
    assert_eq!(signer("--ca-address ca:1 --cert-signer red", &istio).as_deref(), Some("red"));
    let files = [("FILE_MOUNTED_CERTS", "true"), istio[0]];
    assert_eq!([signer("", &files), signer("--ca embedded", &istio)], [None, None]);
    let mistakes = config("--ca embedded --cert-signer red", &[]).unwrap_err().to_string();
    assert!(mistakes.contains("--cert-signer is for --ca citadel alone"), "{mistakes}");
}

/// The `--cert-dir`, if it is one of the places where mounted files are looked for.
fn cert_dir(files: &mounted::FileSettings) -> Option<PathBuf> {
    let homes = files.mounted.iter().filter_map(Place::home);
    homes.map(Path::to_owned).find(|home| home != Path::new(mounted::PLATFORM_DIRECTORY))
}

#[test]
fn names_of_mounted_files_are_beneath_their_directory() {
    let line = "--ca none --cert-dir /certs --cert-file web.pem --key-file keys/web.key";
    let files = config(line, &[("ATTACHE_ROOT_FILE", "mesh.pem")]).unwrap().files;
    let place = &files.mounted[0];
    let pair = place.key_pair.as_ref().map(|(chain, key)| [chain.as_path(), key]);
    assert_eq!(pair, Some([Path::new("/certs/web.pem"), Path::new("/certs/keys/web.key")]));
    assert_eq!(place.roots.as_deref(), Some(Path::new("/certs/mesh.pem")));
    assert!(!files.mounted[1].is_alternative, "one set of names is left");
    for flag in ["--cert-file", "--key-file", "--root-file"] {
        for bad in ["/tls/web.pem", "../web.pem"] {
            let mistakes = config(&format!("--ca none {flag} {bad}"), &[]).unwrap_err().to_string();
            assert!(mistakes.contains(&format!("{flag}: {bad} is not beneath --cert-dir")), "{mistakes}");
        }
    }
}

#[test]
fn the_client_certificate_decides_on_roots_and_mounted_files() {
    let found = |line: &str, environment: &[_]| {
        let config = config(line, environment).unwrap();
        let Provider::Citadel(CitadelProvider { endpoint, client_cert, .. }) = only(&config) else {
            panic!("not citadel")
        };
        let Roots::FirstOf(roots) = endpoint.roots else { panic!("not a list of places") };
        (
            client_cert.map(|directory| directory.path().to_owned()),
            roots,
            self::cert_dir(&config.files),
            config.notes,
        )
    };
    let defaults = ISTIO_ROOTS.map(PathBuf::from);
    let certs = || Some(PathBuf::from("/etc/certs"));
    assert_eq!(found("--ca-address ca:1", &[]), (None, defaults.to_vec(), certs(), vec![]));

    let (client, roots, cert_dir, notes) = found("--ca-address ca:1", &[("PROV_CERT", "/prov")]);
    assert_eq!((client, cert_dir, notes), (Some("/prov".into()), certs(), vec![]));
    assert_eq!(roots, [&[PathBuf::from("/prov/root-cert.pem")], &defaults[..]].concat());

    // The same directory: for the CA, not for Envoy.
    let (client, _, cert_dir, notes) = found("--ca-address ca:1", &[("PROV_CERT", "/etc/./certs/")]);
    assert_eq!((client, cert_dir, notes), (Some("/etc/./certs/".into()), None, vec![]));
    let directory = tempfile::tempdir().unwrap();
    let (real, link) = (directory.path().join("real"), directory.path().join("link"));
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let line =
        format!("--ca-address ca:1 --cert-dir {} --ca-client-cert-dir {}", real.display(), link.display());
    let (_, _, cert_dir, notes) = found(&line, &[]);
    assert!(cert_dir.is_none() && notes[0].contains("are not served"), "{notes:?}");

    let (client, roots, _, notes) = found("--ca-address http://ca:1", &[("PROV_CERT", "/prov")]);
    assert_eq!((client, roots), (None, defaults.to_vec()));
    assert!(notes.iter().any(|note| note.contains("PROV_CERT is not used")), "{notes:?}");
    let served = config("", &[("FILE_MOUNTED_CERTS", "true"), ("PROV_CERT", "/etc/certs")]).unwrap();
    assert_eq!(self::cert_dir(&served.files), certs(), "without a CA they can only be for Envoy");
    let served = config("--ca embedded", &[("PROV_CERT", "/etc/certs")]).unwrap();
    assert_eq!(self::cert_dir(&served.files), certs(), "this CA takes no client certificate");
    let environment = [("FILE_MOUNTED_CERTS", "true"), ("PROV_CERT", "/etc/certs")];
    let (client, _, cert_dir, _) = found("--ca citadel --ca-address ca:1", &environment);
    assert_eq!((client, cert_dir), (Some("/etc/certs".into()), None), "flags outrank variables");
}

#[test]
fn output_options_need_an_output_directory() {
    let output = |line: &str, environment: &[_]| config(line, environment).unwrap().output;
    let only = |output: Option<OutputSettings>| {
        let mut output = output.unwrap();
        (output.directories.pop().unwrap(), output.hook)
    };
    assert!(output("--ca none", &[]).is_none());
    let istio = [("CA_PROVIDER", "none"), ("OUTPUT_CERTS", "/out")];
    let (settings, hook) = only(output("", &istio));
    assert_eq!(
        (settings.directory.to_str(), settings.key_mode, settings.cert_mode),
        (Some("/out"), 0o600, 0o644)
    );
    assert_eq!(hook, None);
    let line = "--output-dir out --output-key-mode 0640 --output-cert-mode 444 --output-hook true --output-hook-timeout 5s";
    let (settings, hook) = only(output(line, &istio));
    assert!(
        settings.directory.is_absolute() && settings.directory.ends_with("out"),
        "{:?}",
        settings.directory
    );
    assert_eq!((settings.key_mode, settings.cert_mode), (0o640, 0o444));
    let timeout = Duration::from_secs(5);
    assert_eq!(hook, Some(Hook { command: "true".into(), timeout }));
    let variables = [("ATTACHE_OUTPUT", "/a"), ("ATTACHE_OUTPUT_KEY_MODE", "0640")];
    let all = mistakes("--ca none", &variables);
    assert!(all.iter().any(|mistake| mistake.contains("with --output DIR write mode=MODE")), "{all:?}");
    let all = mistakes("--ca none --output-hook x --output-key-mode 9 --output-hook-timeout 1ms", &[]);
    for words in
        ["--output-hook needs a directory to write: --output-dir", "--output-key-mode: \"9\"", "100ms"]
    {
        assert_eq!(all.iter().filter(|mistake| mistake.contains(words)).count(), 1, "{words}: {all:?}");
    }
}

#[test]
fn several_outputs_have_a_directory_each_and_one_hook() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    std::fs::create_dir(at("a")).unwrap();
    std::os::unix::fs::symlink(at("a"), at("link")).unwrap();
    let directories = |line: &str, environment: &[_]| {
        let output = config(&format!("--ca none {line}"), environment).unwrap().output.unwrap();
        output.directories.into_iter().map(|it| (it.option, it.directory)).collect::<Vec<_>>()
    };
    let line = format!("--output {},format=jks --output-hook true --output-dir {}", at("b"), at("a"));
    let [plain, jks] = [("--output-dir", at("a").into()), ("--output", at("b").into())];
    assert_eq!(directories(&line, &[]), [plain.clone(), jks.clone()]);
    let variables = [("ATTACHE_OUTPUT", format!("{},format=jks; {}", at("b"), at("c")))];
    let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
    assert_eq!(directories("", &variables), [jks, ("--output", at("c").into())]);
    let twice = format!("--ca none --output {} --output {},format=jks", at("a"), at("link"));
    let all = mistakes(&twice, &[]);
    assert!(all.len() == 1 && all[0].contains("/link names a directory for the second time"), "{all:?}");
    let line = format!("--ca none --output-key-mode 0640 --output {},frmat=jks", at("a"));
    let all = mistakes(&line, &[]);
    for words in [
        "--output: there is no \"frmat\" (did you mean format?)",
        "--output-key-mode 0640 is for --output-dir alone",
    ] {
        assert!(all.iter().any(|mistake| mistake.contains(words)), "{words}: {all:?}");
    }
    assert_eq!(all.len(), 2, "{all:?}");
}

#[test]
fn the_output_directory_is_no_source_of_mounted_files() {
    let directory = tempfile::tempdir().unwrap();
    let certs = directory.path().join("certs");
    std::os::unix::fs::symlink(&certs, directory.path().join("link")).unwrap();
    let line = |output: &str| {
        format!("--cert-dir {} --output-dir {}/{output}", certs.display(), directory.path().display())
    };
    for is_there in [false, true] {
        if is_there {
            std::fs::create_dir(&certs).unwrap();
            for name in ["cert-chain.pem", "key.pem"] {
                std::fs::write(certs.join(name), "").unwrap();
            }
        }
        let same = config(&format!("--ca-address ca:1 {}", line("certs/")), &[]).unwrap();
        assert_eq!(cert_dir(&same.files), None);
        assert!(same.notes[0].contains("the agent writes its own files there"), "{:?}", same.notes);
        assert!(mistakes(&line("certs"), &[])[0].starts_with("no CA is configured, and"));
        for none in ["--ca none", "--file-mounted-certs"] {
            let same = if is_there { "link" } else { "certs" };
            let mistake = &mistakes(&format!("{none} {}", line(same)), &[])[0];
            assert!(mistake.contains("there are no other files to write"), "{mistake}");
            assert!(config(&format!("{none} {}", line("other")), &[]).is_ok());
        }
        let other = config(&format!("--ca-address ca:1 {}", line("other")), &[]).unwrap();
        assert_eq!((cert_dir(&other.files), other.notes.len()), (Some(certs.clone()), 0));
    }
    let linked = config(&format!("--ca-address ca:1 {}", line("link")), &[]).unwrap();
    assert_eq!(cert_dir(&linked.files), None, "links are resolved");
}

#[tokio::test]
async fn vault_reports_missing_and_contradictory_options() {
    use crate::ca::vault::Access;
    let vault = |line: &str, environment: &[_]| match only(
        &config(&format!("--ca vault {line}"), environment).unwrap(),
    ) {
        Provider::Vault(VaultProvider { endpoint, settings, .. }) => (endpoint.address.to_string(), settings),
        other => panic!("not vault: {other:?}"),
    };
    let (address, settings) =
        vault("--ca-address vault.vault.svc --vault-role web --vault-auth-role app", &[]);
    assert_eq!(address, "https://vault.vault.svc:8200");
    assert_eq!((settings.mount.to_string(), settings.role.to_string()), ("pki".into(), "web".into()));
    assert_eq!((settings.namespace, settings.roots), (None, None));
    let Access::Login { mount, role, jwt } = settings.access else { panic!("no login") };
    assert_eq!((mount.to_string(), role.as_str()), ("kubernetes".to_owned(), "app"));
    assert_eq!(jwt, TokenFile::new("/var/run/secrets/tokens/istio-token").into());

    let line = "--ca-address http://vault --vault-pki-mount /teams/blue/pki/ --vault-role a.b --vault-auth-role app \
                --vault-auth-mount auth/jwt/ --vault-namespace team-a/ --vault-root r.pem";
    let (address, settings) = vault(line, &[("ATTACHE_VAULT_TOKEN_FILE", "/t")]);
    assert_eq!(
        (address.as_str(), settings.mount.to_string()),
        ("http://vault:8200", "teams/blue/pki".into())
    );
    assert_eq!(settings.namespace.unwrap(), "team-a/");
    assert_eq!(settings.roots, Some("r.pem".into()));
    let Access::Login { mount, .. } = settings.access else { panic!("the flag is stronger") };
    assert_eq!(mount.to_string(), "jwt");
    let (_, settings) = vault("--ca-address v --vault-role a", &[("ATTACHE_VAULT_TOKEN_FILE", "/t")]);
    let Access::Token(file) = settings.access else { panic!("no token") };
    assert!(file.read(&Disk::default()).await.unwrap_err().to_string().contains("--vault-token-file"));

    let cases: [(&str, &[&str]); 7] = [
        ("--ca vault", &["needs the CA's address", "--vault-role ROLE", "--vault-auth-role ROLE"]),
        ("--ca vault --ca-address v --vault-role a/b --vault-auth-role c", &["--vault-role: \"a/b\""]),
        ("--ca vault --ca-address v --vault-role a. --vault-token-file c", &["--vault-role: \"a.\""]),
        (
            "--ca vault --ca-address v --vault-role a --vault-token-file c --vault-auth-role d",
            &["--vault-token-file and --vault-auth-role contradict each other"],
        ),
        (
            "--ca vault --ca-address v --vault-role a --vault-token-file c --vault-auth-mount d",
            &["--vault-token-file and --vault-auth-mount d contradict each other"],
        ),
        (
            "--ca vault --ca-address v --vault-role a --vault-auth-role c --vault-pki-mount a//b --vault-auth-mount ?",
            &["--vault-pki-mount: \"a//b\"", "--vault-auth-mount: \"?\""],
        ),
        (
            "--ca embedded --vault-role a --vault-root b",
            &["--vault-role a is for --ca vault alone", "--vault-root is for --ca vault alone"],
        ),
    ];
    for (line, words) in cases {
        let all = mistakes(line, &[]);
        assert_eq!(all.len(), words.len(), "{line}: {all:#?}");
        for word in words {
            assert!(all.iter().any(|mistake| mistake.contains(word)), "{word}: {all:#?}");
        }
    }
    assert!(
        mistakes("--ca embedded", &[("ATTACHE_VAULT_ROLE", "a")]).is_empty(),
        "a lower level is silenced"
    );
}

#[test]
fn several_addresses_are_several_cas_in_order() {
    let names = |line: &str, environment: &[_]| -> Vec<String> {
        config(line, environment).unwrap().providers.iter().map(|provider| provider.name()).collect()
    };
    assert_eq!(names("--ca-address b --ca-address a:1", &[]), ["https://b:15012", "https://a:1"]);
    assert_eq!(names("", &[("CA_ADDR", "b, a:1")]), ["https://b:15012", "https://a:1"]);
    assert_eq!(
        names("--ca-address c", &[("CA_ADDR", "a,b")]),
        ["https://c:15012"],
        "a higher level replaces the whole list"
    );
    for (line, word) in [("--ca-address a --ca-address a:15012", "twice"), ("--ca-address a,", "address")] {
        let report = config(line, &[]).unwrap_err().to_string();
        assert!(report.contains(word) && report.contains("--ca-address"), "{report}");
    }
}

#[test]
fn the_state_directory_is_no_source_and_unused_without_a_ca() {
    let with_ca =
        config("--ca-address ca --state-dir /state --cert-dir /state --drop-old-roots", &[]).unwrap();
    assert_eq!(with_ca.workload.state, Some(StateDir::new("/state")));
    assert!(with_ca.workload.drops_old_roots);
    assert_eq!((cert_dir(&with_ca.files), with_ca.notes.len()), (None, 1), "{:?}", with_ca.notes);
    assert_eq!(with_ca.files.own, [Path::new("/state")]);
    let without = config("--ca none --state-dir /state", &[]).unwrap();
    assert!(
        without.notes.iter().any(|note| note.contains("--state-dir /state is not used")),
        "{:?}",
        without.notes
    );
}

#[test]
fn the_agents_own_directories_are_private() {
    let private = |line: &str, environment: &[_]| config(line, environment).unwrap().files.private;
    let current = std::env::current_dir().unwrap();
    assert_eq!(private("--ca embedded", &[]), [current.join("attache-ca")]);
    let all = "--ca embedded --ca-dir /ca --state-dir /state --output-dir out";
    let mut expected = [Path::new("/ca").into(), Path::new("/state").into(), current.join("out")];
    expected.sort_unstable();
    assert_eq!(private(all, &[]), expected, "sorted, wherever the tests run");
    let client = "--ca-address ca --ca-client-cert-dir /client --cert-dir /client";
    assert_eq!(
        private(client, &[("ATTACHE_CA_DIR", "/ca")]),
        [Path::new("/ca"), Path::new("/client")],
        "the directory of another agent's CA holds a key as well"
    );
    assert_eq!(private("--ca none", &[("PROV_CERT", "/certs")]), [] as [&Path; 0], "no CA is shown it");
}

#[test]
fn allowed_peers_are_numbers() {
    let found =
        config("--ca embedded --allow-uid 1337 --allow-uid 0", &[("ATTACHE_ALLOW_GID", "5, 6")]).unwrap();
    assert_eq!(found.allowed, Allowed { uids: vec![1337, 0], gids: vec![5, 6] });
    let report = config("--ca embedded --allow-uid istio-proxy", &[]).unwrap_err().to_string();
    assert!(report.contains("--allow-uid") && report.contains("not a number"), "{report}");
}

#[test]
fn the_status_page_is_on_loopback_unless_an_option_says_otherwise() {
    let found = |line: &str| {
        let config = config(&format!("--ca embedded {line}"), &[]).unwrap();
        (config.admin_address.map(|address| address.to_string()), config.notes)
    };
    let cases = [
        ("", None),
        ("--admin-address none", None),
        ("--admin-address 15056", Some("127.0.0.1:15056")),
        ("--admin-address [::1]:80", Some("[::1]:80")),
        ("--admin-address 127.0.0.1:15055 --status-address none", Some("127.0.0.1:15055")),
        ("--admin-address 127.0.0.1:0 --status-address 127.0.0.1:0", Some("127.0.0.1:0")),
    ];
    for (line, address) in cases {
        assert_eq!(found(line), (address.map(str::to_owned), Vec::new()), "{line}");
    }
    for line in ["--admin-address 0.0.0.0:15056", "--admin-address [::]:1", "--admin-address 10.0.0.1:1"] {
        let (_, notes) = found(line);
        assert!(
            notes.len() == 1 && notes[0].starts_with(line) && notes[0].contains("identities"),
            "{notes:?}"
        );
    }
    for (line, word) in [
        ("--admin-address 15055", "--status-address is the same"),
        ("--admin-address 127.0.0.1", "15056, or none"),
        ("--admin-address 65536", "15056, or none"),
    ] {
        let all = mistakes(&format!("--ca embedded {line}"), &[]);
        assert!(all.len() == 1 && all[0].contains(word) && all[0].contains("--admin-address"), "{all:?}");
    }
    assert_eq!(
        config("--ca embedded", &[("ATTACHE_ADMIN_ADDRESS", "1")]).unwrap().admin_address.unwrap().port(),
        1
    );
}
