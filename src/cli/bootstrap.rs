//! `attache bootstrap`: an Envoy configuration that works with this agent as it stands.

use std::fmt;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::base::spiffe_id::SpiffeId;

/// The cluster through which Envoy reaches the agent.
const SDS_CLUSTER: &str = "attache_sds";

/// Print an Envoy bootstrap (v3, JSON) that takes its certificate and its trust roots from Attaché
///
/// Envoy gets one mutual TLS listener. Without --upstream it answers by itself and tells the caller who
/// it is; with --outbound-listen and --outbound-to it also opens connections to a peer over mutual TLS.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = "\
Examples:
  Serve mutual TLS and answer with the caller's identity:
    attache bootstrap --socket /run/attache/sds.sock >envoy.json && envoy -c envoy.json
  Protect an application, and let one peer in:
    attache bootstrap --listen 0.0.0.0:8443 --upstream 127.0.0.1:8080 \\
        --allow spiffe://cluster.local/ns/default/sa/web
  Reach a peer: plain HTTP to 127.0.0.1:9000 leaves as mutual TLS:
    attache bootstrap --outbound-listen 127.0.0.1:9000 --outbound-to peer.example:8443 \\
        --outbound-peer spiffe://cluster.local/ns/default/sa/api")]
pub(super) struct BootstrapArgs {
    /// Attaché's SDS socket: a path of at most 107 bytes
    #[arg(
        long,
        value_name = "PATH",
        default_value = crate::config::DEFAULT_SOCKET,
        value_parser = socket_path,
        help_heading = "Agent"
    )]
    pub socket: String,

    /// How long Envoy waits for a secret before its listener opens without one, like 15s or 500ms; 0s: for ever
    ///
    /// A listener that opened without its secrets resets every handshake until they arrive.
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "15s",
        value_parser = crate::config::parse_duration,
        help_heading = "Agent"
    )]
    pub initial_fetch_timeout: Duration,

    /// Ask for secrets by the incremental protocol (DELTA_GRPC) instead of the state of the world (GRPC)
    #[arg(long, help_heading = "Agent")]
    pub delta: bool,

    /// Envoy's node id: the name under which the agent's log and attache status show this Envoy
    #[arg(
        long,
        value_name = "ID",
        default_value = "envoy",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Envoy"
    )]
    pub node_id: String,

    /// Envoy's node cluster: the name of the service that this Envoy belongs to
    #[arg(
        long,
        value_name = "NAME",
        default_value = "attache",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Envoy"
    )]
    pub node_cluster: String,

    /// Envoy's admin address; whoever reaches it controls Envoy
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:15000",
        value_parser = listen_address,
        help_heading = "Envoy"
    )]
    pub admin: SocketAddr,

    /// Where Envoy listens for mutual TLS; port 0 lets the kernel choose
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:8443",
        value_parser = listen_address,
        help_heading = "Inbound"
    )]
    pub listen: SocketAddr,

    /// The plain HTTP application behind the listener [default: Envoy answers by itself]
    #[arg(long, value_name = "HOST:PORT", help_heading = "Inbound")]
    pub upstream: Option<Endpoint>,

    /// A peer that may connect; can be repeated [default: every peer whose chain ends in the trust bundle]
    #[arg(long, value_name = "SPIFFE_ID", help_heading = "Inbound")]
    pub allow: Vec<SpiffeId>,

    /// Where Envoy listens for plain HTTP that leaves as mutual TLS; port 0 lets the kernel choose
    #[arg(
        long,
        value_name = "IP:PORT",
        value_parser = listen_address,
        requires = "outbound_to",
        help_heading = "Outbound"
    )]
    pub outbound_listen: Option<SocketAddr>,

    /// The peer that outbound traffic goes to
    #[arg(long, value_name = "HOST:PORT", requires = "outbound_listen", help_heading = "Outbound")]
    pub outbound_to: Option<Endpoint>,

    /// The identity that the outbound peer must show [default: any whose chain ends in the trust bundle]
    #[arg(long, value_name = "SPIFFE_ID", requires = "outbound_to", help_heading = "Outbound")]
    pub outbound_peer: Option<SpiffeId>,
}

/// `HOST:PORT` of something that Envoy connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    host: Host,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Ip(IpAddr),
    Name(String),
}

/// Why a text can't be used as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotAnAddress {
    /// A listener can only bind an address.
    #[error("a listener needs an IP address and a port, like 127.0.0.1:8443 or [::1]:8443")]
    Listen,
    /// There is neither a name nor an address in front of the port, or no port.
    #[error("an endpoint is a name or an IP address and a port, like app:8080, 127.0.0.1:8080 or [::1]:8080")]
    Endpoint,
    /// One can listen on port 0, but not connect to it.
    #[error("port 0 can't be connected to; give a port from 1 to 65535")]
    PortZero,
}

impl FromStr for Endpoint {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        let endpoint = match text.parse::<SocketAddr>() {
            Ok(address) => Self { host: Host::Ip(address.ip()), port: address.port() },
            Err(_) => {
                let (name, port) = text.rsplit_once(':').ok_or(NotAnAddress::Endpoint)?;
                let port = port.parse().map_err(|_| NotAnAddress::Endpoint)?;
                if !is_host_name(name) {
                    return Err(NotAnAddress::Endpoint);
                }
                Self { host: Host::Name(name.to_owned()), port }
            }
        };
        if endpoint.port == 0 { Err(NotAnAddress::PortZero) } else { Ok(endpoint) }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// A last label of digits means a mistyped IPv4 address, which no resolver would find.
fn is_host_name(text: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    name.split('.').all(label)
        && !name.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()))
}

fn listen_address(text: &str) -> Result<SocketAddr, NotAnAddress> {
    text.parse().map_err(|_| NotAnAddress::Listen)
}

/// JSON can't carry a path that is not UTF-8, and Envoy refuses one that the kernel can't bind.
fn socket_path(text: &str) -> Result<String, &'static str> {
    match text.len() {
        0 => Err("a socket needs a path"),
        1..=107 => Ok(text.to_owned()),
        _ => Err("the path of a Unix socket can't be longer than 107 bytes"),
    }
}

/// Writes the bootstrap to the standard output.
///
/// # Errors
///
/// When the standard output can't be written.
pub(super) fn run(args: &BootstrapArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:#}", bootstrap(args))
        .and_then(|()| out.flush())
        .context("writing the bootstrap to the standard output")
}

/// The bootstrap that the arguments describe.
pub(super) fn bootstrap(args: &BootstrapArgs) -> Value {
    let tls = Tls { sds: sds_config(args) };
    let mut listeners = vec![inbound(args, &tls)];
    let mut clusters = vec![sds_cluster(&args.socket)];
    if let Some(upstream) = &args.upstream {
        clusters.push(cluster("application", upstream));
    }
    if let (Some(listen), Some(to)) = (args.outbound_listen, &args.outbound_to) {
        listeners.push(listener("outbound", listen, &outbound_http(), None));
        clusters.push(peer_cluster(to, &tls, args.outbound_peer.as_ref()));
    }
    json!({
        "node": { "id": args.node_id, "cluster": args.node_cluster },
        "admin": { "address": address(&args.admin.ip(), args.admin.port()) },
        "static_resources": { "listeners": listeners, "clusters": clusters },
    })
}

/// Envoy opens one stream per secret name and *distinct* SDS configuration: the same one everywhere is what
/// lets the listener and the peer's cluster share their streams, and so see each new secret together.
fn sds_config(args: &BootstrapArgs) -> Value {
    json!({
        "resource_api_version": "V3",
        "initial_fetch_timeout": proto_duration(args.initial_fetch_timeout),
        "api_config_source": {
            "api_type": if args.delta { "DELTA_GRPC" } else { "GRPC" },
            "transport_api_version": "V3",
            // Envoy's node is some 61 kB; without this every acknowledgement carries it again.
            "set_node_on_first_message_only": true,
            "grpc_services": [{ "envoy_grpc": { "cluster_name": SDS_CLUSTER } }],
        },
    })
}

/// protobuf's JSON form of a duration knows seconds only.
fn proto_duration(duration: Duration) -> String {
    match duration.subsec_nanos() {
        0 => format!("{}s", duration.as_secs()),
        nanos => format!("{}.{nanos:09}s", duration.as_secs()),
    }
}

fn sds_cluster(socket: &str) -> Value {
    json!({
        "name": SDS_CLUSTER,
        "type": "STATIC",
        "connect_timeout": "1s",
        // Without HTTP/2 no stream is ever opened, and Envoy does not say so.
        "typed_extension_protocol_options": http_options(
            "explicit_http_config",
            &json!({ "http2_protocol_options": {} }),
        ),
        "load_assignment": assignment(SDS_CLUSTER, &json!({ "pipe": { "path": socket } })),
    })
}

/// The two TLS contexts, which differ only in who must show which identity.
struct Tls {
    sds: Value,
}

impl Tls {
    fn listener(&self, allowed: &[SpiffeId]) -> Value {
        json!({
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": type_url("extensions.transport_sockets.tls.v3.DownstreamTlsContext"),
                "require_client_certificate": true,
                "common_tls_context": self.common(allowed, &["h2", "http/1.1"]),
            },
        })
    }

    /// The cluster's HTTP options choose the protocols to offer.
    fn peer(&self, expected: &[SpiffeId], host: &Host) -> Value {
        let mut context = json!({
            "@type": type_url("extensions.transport_sockets.tls.v3.UpstreamTlsContext"),
            "common_tls_context": self.common(expected, &[]),
        });
        if let Host::Name(name) = host {
            insert(&mut context, "sni", json!(name.trim_end_matches('.')));
        }
        json!({ "name": "envoy.transport_sockets.tls", "typed_config": context })
    }

    fn common(&self, peers: &[SpiffeId], alpn: &[&str]) -> Value {
        let sans: Vec<Value> = peers
            .iter()
            .map(|peer| json!({ "san_type": "URI", "matcher": { "exact": peer.as_str() } }))
            .collect();
        json!({
            "tls_params": {
                "tls_minimum_protocol_version": "TLSv1_2",
                // As a client Envoy may stop at TLS 1.2 otherwise.
                "tls_maximum_protocol_version": "TLSv1_3",
            },
            "alpn_protocols": alpn,
            "tls_certificate_sds_secret_configs": [{ "name": "default", "sds_config": self.sds }],
            "combined_validation_context": {
                // Empty: any identity that the trust bundle vouches for.
                "default_validation_context": { "match_typed_subject_alt_names": sans },
                "validation_context_sds_secret_config": { "name": "ROOTCA", "sds_config": self.sds },
            },
        })
    }
}

fn inbound(args: &BootstrapArgs, tls: &Tls) -> Value {
    let routes = match args.upstream {
        Some(_) => route_to("application"),
        None => json!({
            "name": "itself",
            "domains": ["*"],
            "response_headers_to_add": [
                peer_header("x-peer-uri-san", "%DOWNSTREAM_PEER_URI_SAN%"),
                peer_header("x-peer-serial", "%DOWNSTREAM_PEER_SERIAL%"),
            ],
            "routes": [{
                "match": { "prefix": "/" },
                "direct_response": {
                    "status": 200,
                    "body": { "inline_string": "mutual TLS works: x-peer-uri-san says who you are\n" },
                },
            }],
        }),
    };
    let mut manager = http_manager("inbound", &routes);
    // Whatever a caller writes into this header is dropped: the application may trust it.
    insert(&mut manager, "forward_client_cert_details", json!("SANITIZE_SET"));
    insert(&mut manager, "set_current_client_cert_details", json!({ "uri": true }));
    listener("inbound", args.listen, &manager, Some(&tls.listener(&args.allow)))
}

fn outbound_http() -> Value {
    http_manager("outbound", &route_to("peer"))
}

fn peer_cluster(to: &Endpoint, tls: &Tls, expected: Option<&SpiffeId>) -> Value {
    let mut peer = cluster("peer", to);
    let expected: Vec<SpiffeId> = expected.cloned().into_iter().collect();
    insert(&mut peer, "transport_socket", tls.peer(&expected, &to.host));
    // HTTP/2 where the peer's TLS agrees to it, HTTP/1.1 otherwise.
    let both = json!({ "http_protocol_options": {}, "http2_protocol_options": {} });
    insert(&mut peer, "typed_extension_protocol_options", http_options("auto_config", &both));
    peer
}

fn listener(name: &str, at: SocketAddr, manager: &Value, transport_socket: Option<&Value>) -> Value {
    let mut chain = json!({
        "filters": [{ "name": "envoy.filters.network.http_connection_manager", "typed_config": manager }],
    });
    if let Some(transport_socket) = transport_socket {
        insert(&mut chain, "transport_socket", transport_socket.clone());
    }
    json!({ "name": name, "address": address(&at.ip(), at.port()), "filter_chains": [chain] })
}

fn http_manager(name: &str, virtual_host: &Value) -> Value {
    json!({
        "@type": type_url("extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": name,
        "codec_type": "AUTO",
        "route_config": { "name": name, "virtual_hosts": [virtual_host] },
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": { "@type": type_url("extensions.filters.http.router.v3.Router") },
        }],
    })
}

/// The timeout is the application's own business: Envoy would cut every answer after 15 s.
fn route_to(cluster: &str) -> Value {
    json!({
        "name": cluster,
        "domains": ["*"],
        "routes": [{ "match": { "prefix": "/" }, "route": { "cluster": cluster, "timeout": "0s" } }],
    })
}

fn peer_header(name: &str, value: &str) -> Value {
    json!({ "header": { "key": name, "value": value }, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD" })
}

fn cluster(name: &str, endpoint: &Endpoint) -> Value {
    let mut cluster = json!({
        "name": name,
        "type": match endpoint.host {
            Host::Ip(_) => "STATIC",
            Host::Name(_) => "STRICT_DNS",
        },
        "connect_timeout": "5s",
        "load_assignment": assignment(name, &address(&endpoint.host, endpoint.port)),
    });
    if let Host::Name(_) = endpoint.host {
        // By default IPv6 addresses hide the IPv4 ones: "localhost" would miss a server on 127.0.0.1. With
        // ALL, every address is a host of its own, and those that don't answer get their share of requests.
        insert(&mut cluster, "dns_lookup_family", json!("V4_PREFERRED"));
    }
    cluster
}

fn assignment(cluster: &str, address: &Value) -> Value {
    json!({
        "cluster_name": cluster,
        "endpoints": [{ "lb_endpoints": [{ "endpoint": { "address": address } }] }],
    })
}

fn address(host: &dyn fmt::Display, port: u16) -> Value {
    json!({ "socket_address": { "address": host.to_string(), "port_value": port } })
}

fn http_options(which: &str, options: &Value) -> Value {
    const NAME: &str = "extensions.upstreams.http.v3.HttpProtocolOptions";
    json!({ format!("envoy.{NAME}"): { "@type": type_url(NAME), which: options } })
}

fn type_url(message: &str) -> String {
    format!("type.googleapis.com/envoy.{message}")
}

fn insert(object: &mut Value, key: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(key.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BootstrapArgs,
    }

    fn parse(line: &str) -> Result<BootstrapArgs, clap::Error> {
        Line::try_parse_from(std::iter::once("bootstrap").chain(line.split_whitespace()))
            .map(|line| line.args)
    }

    fn printed(line: &str) -> Value {
        bootstrap(&parse(line).unwrap())
    }

    /// Every value that stands under `key`, at any depth.
    fn under<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, field)| {
                if name == key {
                    found.push(field);
                }
                under(field, key, found);
            }),
            Value::Array(items) => items.iter().for_each(|item| under(item, key, found)),
            _ => {}
        }
    }

    fn all<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
        let mut found = Vec::new();
        under(value, key, &mut found);
        found
    }

    #[test]
    fn what_is_not_an_address_is_refused_with_the_wanted_shape() {
        for (line, complaint) in [
            ("--listen localhost:8443", "127.0.0.1:8443"),
            ("--admin 127.0.0.1", "127.0.0.1:8443"),
            ("--upstream app", "app:8080"),
            ("--upstream ::1:8080", "[::1]:8080"),
            ("--upstream 10.0.0.300:8080", "app:8080"),
            ("--upstream a..b:8080", "app:8080"),
            ("--upstream app:65536", "app:8080"),
            ("--upstream app:0", "1 to 65535"),
            ("--allow web", "spiffe://"),
            ("--initial-fetch-timeout 15", "90s"),
            ("--socket=", "path"),
            ("--node-id=", "--node-id"),
            ("--outbound-listen 127.0.0.1:0", "--outbound-to"),
            ("--outbound-to app:8443", "--outbound-listen"),
            ("--outbound-peer spiffe://td/api", "--outbound-to"),
        ] {
            let error = parse(line).expect_err(line).to_string();
            assert!(error.contains(complaint), "{line}: {error}");
        }
    }

    #[test]
    fn a_name_is_looked_up_and_an_address_is_not() {
        for (endpoint, kind, host) in [
            ("app:8080", "STRICT_DNS", "app"),
            ("app.example.:8080", "STRICT_DNS", "app.example."),
            ("4u.example:8080", "STRICT_DNS", "4u.example"),
            ("10.0.0.1:8080", "STATIC", "10.0.0.1"),
            ("[2001:db8::1]:8080", "STATIC", "2001:db8::1"),
        ] {
            let bootstrap = printed(&format!("--upstream {endpoint}"));
            let cluster = &bootstrap["static_resources"]["clusters"][1];
            assert_eq!(cluster["type"], kind, "{endpoint}");
            let addresses = all(cluster, "socket_address");
            assert_eq!(addresses, [&json!({ "address": host, "port_value": 8080 })], "{endpoint}");
        }
    }

    #[test]
    fn every_secret_is_asked_for_with_the_same_configuration() {
        let bootstrap =
            printed("--outbound-listen 127.0.0.1:0 --outbound-to api:8443 --initial-fetch-timeout 1500ms");
        let configs = all(&bootstrap, "sds_config");
        assert_eq!(configs.len(), 4, "key pair and roots, inbound and outbound");
        assert!(configs.iter().all(|config| *config == configs[0]));
        assert_eq!(configs[0]["initial_fetch_timeout"], "1.500000000s");
    }

    #[test]
    fn each_side_expects_the_identities_it_was_given() {
        let uri = |id: &str| json!({ "san_type": "URI", "matcher": { "exact": id } });
        let outbound = "--outbound-listen 127.0.0.1:0 --outbound-to api:8443";
        for (line, inbound, peer) in [
            (outbound.to_owned(), json!([]), json!([])),
            (format!("{outbound} --allow spiffe://td/a"), json!([uri("spiffe://td/a")]), json!([])),
            (
                format!(
                    "{outbound} --allow spiffe://td/a --allow spiffe://td/b --outbound-peer spiffe://td/c"
                ),
                json!([uri("spiffe://td/a"), uri("spiffe://td/b")]),
                json!([uri("spiffe://td/c")]),
            ),
        ] {
            let bootstrap = printed(&line);
            assert_eq!(all(&bootstrap, "match_typed_subject_alt_names"), [&inbound, &peer], "{line}");
        }
    }
}
