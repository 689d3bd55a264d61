//! `--ca spiffe`.

use super::*;
use crate::source::spiffe::Wanted;

const ENDPOINT: &str = "--ca spiffe --spiffe-endpoint unix:///run/spire/agent.sock";

fn only_mistake(line: &str, environment: &[(&str, &str)]) -> String {
    let all = mistakes(line, environment);
    let [one] = all.as_slice() else { panic!("{line}: {all:#?}") };
    one.clone()
}

#[test]
fn the_endpoint_comes_from_the_flag_attaches_variable_spiffes_variable_or_the_file() {
    let variables = [
        ("ATTACHE_SPIFFE_ENDPOINT", "unix:///attache.sock"),
        ("SPIFFE_ENDPOINT_SOCKET", "unix:/spiffe.sock"),
    ];
    let cases = [
        (ENDPOINT, &variables[..], "/run/spire/agent.sock"),
        ("--ca spiffe", &variables, "/attache.sock"),
        ("--ca spiffe", &variables[1..], "/spiffe.sock"),
    ];
    for (line, environment, path) in cases {
        let config = config(line, environment).unwrap();
        let spiffe = config.spiffe.unwrap();
        assert_eq!(spiffe.socket, Path::new(path));
        assert_eq!(spiffe.wanted, Wanted::default());
        assert!(!config.files.is_alone && config.providers.is_empty());
    }
    let missing = only_mistake("--ca spiffe", &[]);
    assert!(missing.contains("needs the endpoint: --spiffe-endpoint unix:///PATH"), "{missing}");
    // The variable is that of the Pod's programs, too.
    assert!(config("--ca embedded", &[("SPIFFE_ENDPOINT_SOCKET", "nonsense")]).unwrap().spiffe.is_none());
}

#[test]
fn an_endpoint_is_a_unix_socket_of_another_process() {
    for (endpoint, words) in [
        ("tcp://127.0.0.1:8000", "the key would pass in plain text; name the Unix socket"),
        ("/run/agent.sock", "the shape is unix:///PATH"),
        ("unix://run/agent.sock", "has no absolute path"),
        ("unix:///run/agent.sock?x", "has no absolute path"),
    ] {
        let one = only_mistake(&format!("--ca spiffe --spiffe-endpoint {endpoint}"), &[]);
        assert!(one.contains(words), "{endpoint}: {one}");
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("sds.sock");
    let link = directory.path().join("link.sock");
    std::fs::write(&socket, "").unwrap();
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    for own in [&socket, &link] {
        let line = format!(
            "--ca spiffe --spiffe-endpoint unix://{} --socket /other.sock --socket {}",
            own.display(),
            socket.display()
        );
        assert!(only_mistake(&line, &[]).contains("is the socket of this agent itself"));
    }
}

#[test]
fn what_the_options_say_of_the_identity_is_expected() {
    let wanted = |line: &str, environment: &[(&str, &str)]| {
        config(&format!("{ENDPOINT} {line}"), environment).unwrap().spiffe.unwrap().wanted
    };
    let id = || Some("spiffe://td/web".parse().unwrap());
    let hint = Some("internal".to_owned());
    let whole = Wanted { id: id(), hint, ..Wanted::default() };
    assert_eq!(wanted("--spiffe-id spiffe://td/web --spiffe-hint internal", &[]), whole);
    let domain = Wanted { trust_domain: Some("td".to_owned()), ..Wanted::default() };
    assert_eq!(wanted("--trust-domain td", &[]), domain);
    let istios = [("TRUST_DOMAIN", "td"), ("POD_NAMESPACE", "shop"), ("SERVICE_ACCOUNT", "web")];
    assert_eq!(wanted("", &istios), domain, "the account of an Istio Pod is not the endpoint's matter");
    assert_eq!(wanted("--spiffe-id spiffe://td/web", &istios).id, id());
}

#[test]
fn options_of_cas_contradict_an_endpoint_of_their_level() {
    for option in [
        "--key-type rsa-2048",
        "--cert-ttl 1h",
        "--grace-ratio 0.3",
        "--dns-san a.example",
        "--common-name a",
        "--namespace shop",
        "--service-account web",
        "--token-file /t",
        "--ca-root /r",
        "--ca-server-name a",
        "--ca-header a=b",
        "--state-dir /s",
        "--ca-address a:1",
    ] {
        let one = only_mistake(&format!("{ENDPOINT} {option}"), &[]);
        let name = option.split(' ').next().unwrap();
        assert!(one.contains(name) && one.contains("--ca spiffe"), "{option}: {one}");
    }
    let lower = [("ATTACHE_STATE_DIR", "/s"), ("ATTACHE_KEY_TYPE", "rsa-2048"), ("SECRET_TTL", "1h")];
    assert_eq!(mistakes(ENDPOINT, &lower), [""; 0]);
    let same = [("CA_PROVIDER", "spiffe"), ("SPIFFE_ENDPOINT_SOCKET", "unix:///a"), ("SECRET_TTL", "1h")];
    assert_eq!(mistakes("", &same), [""; 0], "Istio's variables are in each of its Pods");
    let with_secrets =
        format!("{ENDPOINT} --kubernetes-secrets --kubeconfig /k --namespace shop --state-dir /s");
    let config = config(&with_secrets, &[]).unwrap();
    assert!(config.spiffe.is_some() && config.workload.state.is_some());
    let mint = only_mistake(&format!("{ENDPOINT} --mint-suffix example.com"), &[]);
    assert!(mint.contains("issues no certificates for hosts"), "{mint}");
}

#[test]
fn the_endpoints_options_need_the_endpoint_to_be_selected() {
    for option in ["--spiffe-endpoint unix:///a", "--spiffe-hint a"] {
        let one = only_mistake(&format!("--ca embedded {option}"), &[]);
        assert!(one.contains("is for --ca spiffe alone"), "{one}");
    }
    assert!(config("--ca embedded", &[("ATTACHE_SPIFFE_ENDPOINT", "unix:///a")]).is_ok());
}
