use std::path::Path;

use super::*;
use crate::source::files::FilePrefixes;

const FILE: &str = "/etc/attache/workloads/web.toml";

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    args: NodeArgs,
}

fn node(arguments: &str, environment: &[(&str, &str)]) -> Result<NodeConfig, ConfigErrors> {
    use clap::Parser as _;
    let line =
        Line::try_parse_from(["attache node"].into_iter().chain(arguments.split_whitespace())).unwrap();
    let environment =
        environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    NodeConfig::load(&line.args, &environment)
}

fn described(content: &str) -> Result<Description, ConfigErrors> {
    parse_description(Path::new(FILE), content.as_bytes())
}

fn mistakes<T>(result: Result<T, ConfigErrors>) -> String {
    result.err().expect("no mistakes").to_string()
}

const WEB: &str = "socket = \"/run/web.sock\"\nspiffe-id = \"spiffe://example.org/ns/shop/sa/web\"\n";

#[test]
fn a_workload_has_its_own_options_above_those_of_the_agent() {
    let node = node("--ca embedded --workloads /w --state-dir /state --key-type rsa-2048 --cert-ttl 1h", &[])
        .unwrap();
    let web = described(&format!("{WEB}key-type = \"ecdsa-p384\"\nsocket-mode = \"0600\"\n")).unwrap();
    let config = node.template.workload("web", &web).unwrap();
    assert_eq!(config.socket, Path::new("/run/web.sock"));
    assert_eq!(config.socket_mode, 0o600);
    assert_eq!(config.workload.key_type.name(), "ecdsa-p384");
    assert_eq!(config.workload.ttl.as_secs(), 3600);
    assert_eq!(config.workload.state.unwrap().path(), Path::new("/state/web"));
    assert_eq!(config.files.prefixes, FilePrefixes::None);
    assert!(config.files.mounted.is_empty());
}

#[test]
fn the_agents_own_pod_is_none_of_its_workloads() {
    let environment = [("POD_NAMESPACE", "kube-system"), ("SERVICE_ACCOUNT", "attache")];
    let node = node(
        "--ca vault --ca-address vault:8200 --vault-role r --vault-auth-role a --workloads /w",
        &environment,
    );
    let config = node.unwrap().template.workload("web", &described(WEB).unwrap()).unwrap();
    let identity = format!("{:?}", config.workload.identity);
    assert!(identity.contains("/ns/shop/sa/web") && !identity.contains("kube-system"), "{identity}");
}

#[test]
fn istios_ca_needs_a_token_for_each_workload() {
    let node = node("--ca-address istiod:15012 --workloads /w --token-file /var/run/agents", &[]).unwrap();
    let refused = mistakes(node.template.workload("web", &described(WEB).unwrap()));
    assert!(refused.contains("no token of its own") && refused.contains("token-file"), "{refused}");
    let with_file = described(&format!("{WEB}token-file = \"/var/run/web-token\"\n")).unwrap();
    assert!(node.template.workload("web", &with_file).is_ok());
    let brought = Description { token: Some(BroughtToken::default()), ..described(WEB).unwrap() };
    assert!(node.template.workload("web", &brought).is_ok());
}

#[test]
fn with_the_agents_own_token_a_workload_has_none() {
    let node = node("--ca-address istiod:15012 --workloads /w --ca-impersonate", &[]).unwrap();
    let config = node.template.workload("web", &described(WEB).unwrap()).unwrap();
    assert!(format!("{:?}", config.providers).contains("impersonates: true"));
    let with_file = described(&format!("{WEB}token-file = \"/var/run/web-token\"\n")).unwrap();
    assert!(mistakes(node.template.workload("web", &with_file)).contains("contradict each other"));
    let refused = mistakes(self::node("--ca embedded --workloads /w --ca-impersonate", &[]));
    assert!(refused.contains("--ca-impersonate is for --ca citadel alone"), "{refused}");
}

#[test]
fn a_mistake_in_a_file_names_the_line() {
    let text =
        "spiffe-id = \"spiffe://example.org/ns/shop/sa/web\"\nkeytype = \"rsa-2048\"\noutput-hook = \"x\"\n";
    let mistakes = mistakes(described(text));
    for words in [
        "keytype (line 2 of /etc/attache/workloads/web.toml) is not an option; did you mean key-type?",
        "output-hook (line 3 of /etc/attache/workloads/web.toml) is not an option",
        "names no socket",
    ] {
        assert!(mistakes.contains(words), "{words}: {mistakes}");
    }
    let node = node("--ca embedded --workloads /w", &[]).unwrap();
    let bad = described(&format!("{WEB}key-type = \"rsa-12\"\n")).unwrap();
    let mistakes = self::mistakes(node.template.workload("web", &bad));
    assert!(mistakes.contains("line 3 of /etc/attache/workloads/web.toml"), "{mistakes}");
    assert!(self::mistakes(described("socket = \"/run/web.sock\"\n")).contains("names no identity"));
}

#[test]
fn what_is_not_for_a_node_is_refused_wherever_it_is_set() {
    let refused = mistakes(node("--ca embedded --workloads /w --socket /run/s --crl /c", &[]));
    assert!(refused.contains("--socket is not for attache node: each workload has its own"), "{refused}");
    assert!(refused.contains("--crl is not for attache node"), "{refused}");
    let refused = mistakes(node("--ca embedded --workloads /w", &[("ATTACHE_SOCKET", "/run/s")]));
    assert!(refused.contains("ATTACHE_SOCKET is not for attache node"), "{refused}");
    assert!(mistakes(node("--ca embedded", &[])).contains("--workloads DIR"));
    assert!(mistakes(node("--ca none --workloads /w", &[])).contains("choose a CA"));
}

#[test]
fn each_option_that_is_refused_exists() {
    let known = RunArgs::augment_args(Command::new("attache run"));
    let exists = |name: &str| known.get_arguments().any(|arg| arg.get_long() == Some(name));
    let named = NOT_OF_A_NODE.iter().map(|(name, _)| *name).chain(OF_A_WORKLOAD.iter().copied());
    let unknown: Vec<_> = named.filter(|name| !exists(name)).collect();
    assert_eq!(unknown, Vec::<&str>::new());
}

#[test]
fn no_node_has_its_identities_from_a_workload_api() {
    let found = mistakes(node("--ca spiffe --workloads /w", &[("SPIFFE_ENDPOINT_SOCKET", "unix:///a")]));
    assert!(
        found.contains("--ca spiffe is not for attache node: a Workload API gives the identity of"),
        "{found}"
    );
    let found = mistakes(node("--ca embedded --spiffe-endpoint unix:///a --workloads /w", &[]));
    assert!(found.contains("--spiffe-endpoint is not for attache node"), "{found}");
}
