use super::*;

fn bootstrap() -> Bootstrap {
    Bootstrap {
        socket: "/run/attache/sds.sock".to_owned(),
        initial_fetch_timeout: Duration::from_secs(15),
        delta: false,
        is_gateway: false,
        node_id: "envoy".to_owned(),
        node_cluster: "attache".to_owned(),
        admin: listen(),
        inbound: Inbound { listen: listen(), upstream: None, allow: Vec::new() },
        outbound: None,
    }
}

fn listen() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn address(text: &str) -> Address {
    Address::with_required_port(text).unwrap()
}

fn outbound(peer: Option<&str>) -> Option<Outbound> {
    Some(Outbound { listen: listen(), to: address("api:8443"), peer: peer.map(|id| id.parse().unwrap()) })
}

/// Collects every value under `key`, at any depth.
fn collect<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, field)| {
            if name == key {
                found.push(field);
            }
            collect(field, key, found);
        }),
        Value::Array(items) => items.iter().for_each(|item| collect(item, key, found)),
        _ => {}
    }
}

fn all<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    let mut found = Vec::new();
    collect(value, key, &mut found);
    found
}

#[test]
fn a_name_is_resolved_and_an_ip_address_is_not() {
    for (upstream, kind, host) in [
        ("app:8080", "STRICT_DNS", "app"),
        ("app.example.:8080", "STRICT_DNS", "app.example."),
        ("4u.example:8080", "STRICT_DNS", "4u.example"),
        ("10.0.0.1:8080", "STATIC", "10.0.0.1"),
        ("[2001:db8::1]:8080", "STATIC", "2001:db8::1"),
    ] {
        let inbound = Inbound { upstream: Some(address(upstream)), ..bootstrap().inbound };
        let json = Bootstrap { inbound, ..bootstrap() }.json();
        let cluster = &json["static_resources"]["clusters"][1];
        assert_eq!(cluster["type"], kind, "{upstream}");
        let addresses = all(cluster, "socket_address");
        assert_eq!(addresses, [&json!({ "address": host, "port_value": 8080 })], "{upstream}");
    }
}

#[test]
fn every_secret_has_the_same_sds_configuration() {
    let initial_fetch_timeout = Duration::from_millis(1500);
    let json = Bootstrap { initial_fetch_timeout, outbound: outbound(None), ..bootstrap() }.json();
    let configs = all(&json, "sds_config");
    assert_eq!(configs.len(), 4, "key pair and roots, inbound and outbound");
    assert!(configs.iter().all(|config| *config == configs[0]));
    assert_eq!(configs[0]["initial_fetch_timeout"], "1.500000000s");
}

#[test]
fn each_side_expects_its_configured_identities() {
    let uri = |id: &str| json!({ "san_type": "URI", "matcher": { "exact": id } });
    for (allow, peer, inbound_sans, outbound_sans) in [
        (&[][..], None, json!([]), json!([])),
        (&["spiffe://td/a"], None, json!([uri("spiffe://td/a")]), json!([])),
        (
            &["spiffe://td/a", "spiffe://td/b"],
            Some("spiffe://td/c"),
            json!([uri("spiffe://td/a"), uri("spiffe://td/b")]),
            json!([uri("spiffe://td/c")]),
        ),
    ] {
        let allow = allow.iter().map(|id| id.parse().unwrap()).collect();
        let inbound = Inbound { allow, ..bootstrap().inbound };
        let json = Bootstrap { inbound, outbound: outbound(peer), ..bootstrap() }.json();
        let sans = all(&json, "match_typed_subject_alt_names");
        assert_eq!(sans, [&inbound_sans, &outbound_sans], "{peer:?}");
    }
}

#[test]
fn a_gateway_asks_for_hosts_over_delta_and_for_more_than_envoys_default_of_streams() {
    let json = Bootstrap { is_gateway: true, ..bootstrap() }.json();
    assert_eq!(all(&json, "api_type"), [&json!("DELTA_GRPC")]);
    assert_eq!(all(&json, "require_client_certificate"), [&json!(null); 0]);
    assert_eq!(all(&json, "max_requests"), [&json!(30_000)]);
    assert_eq!(all(&json, "transport_socket_connect_timeout"), [&json!("15s")]);
    assert_eq!(all(&bootstrap().json(), "circuit_breakers"), [&json!(null); 0]);
}
