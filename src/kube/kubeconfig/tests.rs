use super::*;

pub(super) const CLUSTER: &str = "{server: 'https://api.east:6443'}";

/// A kubeconfig with one context.
pub(super) fn config(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\npreferences: {{}}\ncurrent-context: east\ncontexts:\n- name: east\n  context:\n    cluster: east-api\n    \
         user: reader\n    namespace: istio-system\nclusters:\n- name: east-api\n  cluster: {cluster}\nusers:\n- name: reader\n  \
         user: {user}\n"
    )
}

const STRICT: Policy<'_> = Policy::Foreign { allows: &[], option: "--allow" };
fn own() -> Policy<'static> {
    Policy::Own { directory: Path::new("/home/me/.kube") }
}

fn parse(text: &str, policy: &Policy<'_>) -> Result<Kubeconfig, String> {
    Kubeconfig::parse(text.as_bytes(), None, policy).map_err(|error| error.to_string())
}

#[test]
fn a_context_leads_to_its_server_credential_and_namespace() {
    let text = config("{server: 'https://proxy/k8s/c-1/', tls-server-name: kube}", "{token: abc}");
    let found = parse(&text, &STRICT).unwrap();
    assert_eq!((found.context.as_str(), found.namespace.as_deref()), ("east", Some("istio-system")));
    let endpoint = &found.config.endpoint;
    assert_eq!(
        (endpoint.address.to_string(), found.config.path.as_str()),
        ("https://proxy:443".to_owned(), "/k8s/c-1")
    );
    assert_eq!((endpoint.server_name.as_deref(), &endpoint.roots), (Some("kube"), &Roots::System));
    assert!(matches!(&found.config.credential, Credential::Token(token) if token.secret() == "abc"));
    assert!(!format!("{found:?}").contains("abc"));
}

#[test]
fn another_context_can_be_named_and_unknown_names_list_the_known_ones() {
    let text = config(CLUSTER, "{}").replace(
        "clusters:",
        "- {name: west, context: {cluster: gone}}\n- {name: none, context: {}}\nclusters:",
    );
    let named =
        |name| Kubeconfig::parse(text.as_bytes(), Some(name), &STRICT).map_err(|error| error.to_string());
    assert!(matches!(named("east").unwrap().config.credential, Credential::None));
    let error = named("nowhere").unwrap_err();
    assert_eq!(error, "the kubeconfig has no context \"nowhere\"; it has: east, west, none");
    let error = named("west").unwrap_err();
    assert_eq!(
        error,
        "the kubeconfig has no cluster \"gone\", which its context \"west\" names; it has: east-api"
    );
    assert!(named("none").unwrap_err().contains("names no cluster"));
    let error = parse(&text.replace("current-context: east", ""), &STRICT).unwrap_err();
    assert!(error.contains("name one of its contexts: east, west, none"), "{error}");
    let error = parse(&text.replace("user: reader", "user: writer"), &STRICT).unwrap_err();
    assert!(error.contains("no user \"writer\"") && error.contains("it has: reader"), "{error}");
}

#[test]
fn a_foreign_kubeconfig_is_refused_for_any_risk_in_it_unless_that_is_allowed() {
    let risks = [
        ("{server: 'https://a', certificate-authority: /etc/ca.crt}", "{}", "certificate-authority", "files"),
        (
            "{server: 'https://a', insecure-skip-tls-verify: true}",
            "{}",
            "insecure-skip-tls-verify",
            "insecure-server",
        ),
        ("{server: 'http://a'}", "{token: t}", "a server with http://", "insecure-server"),
        (CLUSTER, "{tokenFile: /etc/shadow}", "tokenFile", "files"),
        (CLUSTER, "{client-certificate: /c, client-key: /k}", "client-certificate", "files"),
    ];
    for (cluster, user, field, value) in risks {
        let text = config(cluster, user);
        let error = parse(&text, &STRICT).unwrap_err();
        let remedy = format!("--allow {value} allows it");
        assert!(error.contains("is refused") && error.contains(field) && error.contains(&remedy), "{error}");
        let allowing = Policy::Foreign { allows: &Risk::ALL, option: "--allow" };
        let outcome = parse(&text, &allowing);
        assert!(!outcome.is_err_and(|error| error.contains("refused")), "{field}");
        // Also where its context does not use it.
        let unused = config(CLUSTER, "{}") + &format!("- {{name: other, user: {user}}}\n");
        let unused = unused.replace("users:", &format!("- {{name: other, cluster: {cluster}}}\nusers:"));
        assert!(parse(&unused, &STRICT).unwrap_err().contains(field));
    }
    let unset = config(
        "{server: 'https://a', insecure-skip-tls-verify: false, proxy-url: '', certificate-authority: null}",
        "{exec: null, username: '', as-groups: []}",
    );
    assert!(parse(&unset, &STRICT).is_ok());
}

#[test]
fn what_the_agent_does_not_support_is_refused_with_a_way_out() {
    let cases = [
        (CLUSTER, "{exec: {command: aws}}", "service account's token"),
        (CLUSTER, "{auth-provider: {name: oidc}}", "service account's token"),
        (CLUSTER, "{username: a, password: b}", "service account's token"),
        (CLUSTER, "{token: t, as: admin}", "impersonate"),
        ("{server: 'https://a', proxy-url: 'http://p'}", "{}", "directly"),
    ];
    for (cluster, user, words) in cases {
        let text = config(cluster, user);
        for policy in [STRICT, own(), Policy::Foreign { allows: &Risk::ALL, option: "--allow" }] {
            let error = parse(&text, &policy).unwrap_err();
            assert!(error.contains("is refused") && error.contains(words), "{error}");
        }
    }
    let unused = config(CLUSTER, "{}") + "- {name: other, user: {exec: {command: aws}}}\n";
    assert!(parse(&unused, &own()).is_ok(), "the user's other contexts do not matter");
    assert!(parse(&unused, &STRICT).is_err());
}

#[test]
fn the_users_own_file_may_name_files_beside_it() {
    let text = config("{server: 'https://a', certificate-authority: ca.crt}", "{tokenFile: /run/token}");
    let config = parse(&text, &own()).unwrap().config;
    assert_eq!(config.endpoint.roots, Roots::File("/home/me/.kube/ca.crt".into()));
    assert!(
        matches!(&config.credential, Credential::TokenFile(file) if file.path() == Some(Path::new("/run/token")))
    );
    let text = super::tests::config("{server: 'https://a', insecure-skip-tls-verify: true}", "{}");
    assert_eq!(parse(&text, &own()).unwrap().config.endpoint.roots, Roots::Unverified);
    let text = super::tests::config("{server: 'http://a'}", "{token: t}");
    assert_eq!(parse(&text, &own()).unwrap().config.endpoint.address.to_string(), "http://a:80");
}

#[test]
fn inline_certificates_and_keys_are_read() {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate =
        rcgen::CertificateParams::new(vec!["web".to_owned()]).unwrap().self_signed(&key).unwrap();
    let root = STANDARD.encode(pem::of_certificates([certificate.der()]));
    let key = STANDARD.encode(pem::encode("PRIVATE KEY", &key.serialize_der()));
    let cluster = format!("{{server: 'https://a', certificate-authority-data: {root}}}");
    let user = format!("{{client-certificate-data: {root}, client-key-data: {key}, token: t}}");
    let found = parse(&config(&cluster, &user), &STRICT).unwrap().config;
    assert!(matches!(found.endpoint.roots, Roots::Given(_)));
    assert!(matches!(found.credential, Credential::Certificate(_)));
    for (user, words) in [
        (format!("{{client-certificate-data: {root}}}"), "without a client-key"),
        (format!("{{client-key-data: {key}}}"), "without a client-certificate"),
        (
            format!("{{client-certificate-data: {root}, client-key-data: '?'}}"),
            "client-key-data is not base64",
        ),
        (
            format!("{{client-certificate-data: {root}, client-key-data: {root}}}"),
            "client-key-data: it holds no PEM",
        ),
    ] {
        let error = parse(&config(CLUSTER, &user), &STRICT).unwrap_err();
        assert!(error.contains(words) && error.contains("user \"reader\""), "{error}");
    }
}

#[test]
fn what_is_no_kubeconfig_is_an_error_that_names_the_place() {
    let long = format!("a: {}", "x".repeat(1 << 20));
    let cases = [
        ("", "no clusters"),
        ("just text", "no clusters"),
        ("a: [", "not YAML"),
        ("clusters: {}", "clusters is not a list"),
        ("clusters: [{cluster: {}}]", "a name is missing in an entry of clusters"),
        ("users: [{name: a}, {name: a}]", "\"a\" is the name of two entries of users"),
        ("a: 1\nb: 2\na: 3", "line 3: \"a\" is set twice"),
        ("a: &x 1\nb: *x", "line 2: aliases"),
        ("a: 1\n---\nb: 2", "second document"),
        (long.as_str(), "more than 1048576 bytes"),
    ];
    for (text, words) in cases {
        let error = parse(text, &STRICT).unwrap_err();
        assert!(error.contains("this is no kubeconfig") && error.contains(words), "{error}");
    }
    for (cluster, words) in [
        ("{}", "has no server"),
        ("{server: [1]}", "its server is not a text"),
        ("{server: 'ftp://a'}", "is no URL"),
        ("{server: 'https://a/x y'}", "is no URL"),
        ("{server: 'https://a', insecure-skip-tls-verify: yes}", "insecure-skip-tls-verify"),
        ("{server: 'https://a', certificate-authority-data: AQID}", "certificate-authority-data"),
    ] {
        let error = parse(&config(cluster, "{}"), &own()).unwrap_err();
        assert!(error.contains("cluster \"east-api\"") && error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn a_missing_file_is_named() {
    let error = Kubeconfig::read(Path::new("/nowhere/config"), None, &Disk::default()).await.unwrap_err();
    assert!(error.to_string().contains("/nowhere/config"), "{error}");
}
