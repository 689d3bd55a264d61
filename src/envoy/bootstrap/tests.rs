use super::endpoints::{Endpoint, Service};
use super::outbound::Peers;
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
    Some(Outbound {
        listen: listen(),
        to: Peers::Fixed(vec![address("api:8443").into()]),
        peers: peer.into_iter().map(|id| id.parse().unwrap()).collect(),
        service: None,
        requests_per_connection: None,
        health_check: None,
    })
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

fn endpoints(texts: &[&str]) -> Vec<Endpoint> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn to(texts: &[&str]) -> Value {
    let outbound = Outbound { to: Peers::Fixed(endpoints(texts)), ..outbound(None).unwrap() };
    let json = Bootstrap { outbound: Some(outbound), ..bootstrap() }.json();
    json["static_resources"]["clusters"][1].clone()
}

#[test]
fn endpoints_of_one_locality_and_priority_are_one_group_with_their_weights() {
    let near = ["10.0.0.1:80,region=a,zone=z,weight=3", "10.0.0.2:80,region=a,zone=z,health=draining"];
    let far = ["10.1.0.1:80,region=b,priority=1"];
    let cluster = to(&[near[0], far[0], near[1]]);
    let groups = cluster["load_assignment"]["endpoints"].as_array().unwrap();
    let [first, second] = groups.as_slice() else { panic!("{groups:#?}") };
    assert_eq!(first["locality"], json!({ "region": "a", "zone": "z" }));
    assert_eq!(first["priority"], json!(null));
    assert_eq!(all(first, "port_value").len(), 2);
    assert_eq!(all(first, "load_balancing_weight"), [&json!(3)]);
    assert_eq!(all(first, "health_status"), [&json!("DRAINING")]);
    assert_eq!((&second["locality"], &second["priority"]), (&json!({ "region": "b" }), &json!(1)));
    assert_eq!(cluster["type"], "STATIC");
    assert_eq!(to(&["10.0.0.1:80", "app:80"])["type"], "STRICT_DNS");
}

#[test]
fn only_a_peer_with_alternatives_has_retries_and_leaves_unreachable_endpoints_alone() {
    for (texts, expected) in [(&["10.0.0.1:80"][..], 0), (&["10.0.0.1:80", "10.0.0.2:80"], 1)] {
        let outbound = Outbound { to: Peers::Fixed(endpoints(texts)), ..outbound(None).unwrap() };
        let json = Bootstrap { outbound: Some(outbound), ..bootstrap() }.json();
        for key in ["retry_policy", "outlier_detection", "healthy_panic_threshold"] {
            assert_eq!(all(&json, key).len(), expected, "{key}");
        }
    }
}

#[test]
fn a_gap_between_priorities_is_refused() {
    for (texts, gap) in [
        (&["a:1", "b:1,priority=2", "c:1,priority=1"][..], None),
        (&["a:1,priority=1"], Some("no endpoint has priority 0")),
        (&["a:1", "b:1,priority=2"], Some("no endpoint has priority 1")),
    ] {
        let checked = endpoints::check(&endpoints(texts));
        assert_eq!(checked.is_err(), gap.is_some());
        assert!(gap.is_none_or(|words| checked.unwrap_err().contains(words)));
    }
}

#[test]
fn a_service_is_named_as_istio_names_it() {
    for (text, sni) in [
        ("helloworld.sample.svc.cluster.local:5000", "outbound_.5000_._.helloworld.sample.svc.cluster.local"),
        ("Hello.sample:80/v1", "outbound_.80_.v1_.hello.sample"),
    ] {
        let service: Service = text.parse().unwrap();
        assert_eq!(service.sni(), sni);
        let outbound = Outbound { service: Some(service), ..outbound(None).unwrap() };
        let json = Bootstrap { outbound: Some(outbound), ..bootstrap() }.json();
        assert_eq!(all(&json, "sni"), [&json!(sni)]);
    }
    assert!(format!("{}a:80", "b.".repeat(120)).parse::<Service>().unwrap_err().contains("more than 255"));
}

#[test]
fn the_sni_is_the_name_that_all_endpoints_have() {
    for (texts, sni) in [
        (&["app.example.:80"][..], Some("app.example")),
        (&["app:80", "app:81"], Some("app")),
        (&["app:80", "other:80"], None),
        (&["10.0.0.1:80"], None),
    ] {
        let expected: Vec<_> = sni.map(|sni| json!(sni)).into_iter().collect();
        let cluster = to(texts);
        assert_eq!(all(&cluster, "sni"), expected.iter().collect::<Vec<_>>(), "{texts:?}");
    }
}

#[test]
fn a_file_of_endpoints_has_addresses_only() {
    let file = endpoints::file("peer", &endpoints(&["10.0.0.1:80,weight=2"])).unwrap();
    assert_eq!(file["resources"][0]["cluster_name"], "peer");
    let error = endpoints::file("peer", &endpoints(&["10.0.0.1:80", "app:80"])).unwrap_err();
    assert!(error.contains("app is a name"), "{error}");
}

#[test]
fn what_serves_several_endpoints_or_clusters_has_no_limit_of_connections_and_retries() {
    let two = || vec![address("api:8443").into(), address("other:8443").into()];
    let limits = |json: &Value| {
        let found = all(json, "thresholds").into_iter().cloned();
        found.map(|it| ["max_connections", "max_retries"].map(|key| it[0][key].as_u64())).collect::<Vec<_>>()
    };
    let unlimited = [Some(u64::from(UNLIMITED)); 2];
    let outbound = |to| Bootstrap { outbound: outbound(None).map(|it| Outbound { to, ..it }), ..bootstrap() };
    assert_eq!(limits(&outbound(Peers::Fixed(two())).json()), [unlimited]);
    assert_eq!(limits(&outbound(Peers::File("/endpoints.json".to_owned())).json()), [unlimited]);
    assert!(limits(&outbound(Peers::Fixed(vec![address("api:8443").into()])).json()).is_empty());
    for endpoints in [two(), vec![address("api:8443").into()]] {
        let service = "api.shop.svc.cluster.local:8443".parse().unwrap();
        let east_west = east_west::EastWest {
            node_id: "gateway".to_owned(),
            node_cluster: "attache".to_owned(),
            admin: listen(),
            listen: listen(),
            routes: vec![east_west::Route { service, endpoints }],
        };
        assert_eq!(limits(&east_west.json()), [unlimited]);
    }
}
