//! `attache bootstrap`: prints an Envoy configuration that works with this agent unchanged.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use crate::base::spiffe_id::SpiffeId;
use crate::config::ConfigErrors;
use crate::envoy::bootstrap::east_west::{EastWest, Route};
use crate::envoy::bootstrap::endpoints::{self, Endpoint, Service};
use crate::envoy::bootstrap::outbound::{Outbound, Peers, load_name};
use crate::envoy::bootstrap::{Bootstrap, Inbound};
use crate::net::address::Address;

/// Print an Envoy bootstrap (v3, JSON) that takes its certificate and its trust roots from Attaché
///
/// Envoy gets one mutual TLS listener. Without --upstream it answers by itself, with the caller's identity;
/// with --outbound-listen and --outbound-to it also opens connections to a peer over mutual TLS. With --gateway it gets a TLS listener
/// for any number of hosts instead, with --east-west one that passes TLS on between clusters. Standard error says how to start Envoy.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = "\
Examples:
  Serve mutual TLS and answer with the caller's identity:
    attache bootstrap --socket /run/attache/sds.sock >envoy.json
  Protect an application, and let one peer in:
    attache bootstrap --listen 0.0.0.0:8443 --upstream 127.0.0.1:8080 \\
        --allow spiffe://cluster.local/ns/default/sa/web
  A second Envoy on the same machine:
    attache bootstrap --socket /run/attache/sds.sock --node-id second \\
        --listen 127.0.0.1:8444 --admin 127.0.0.1:9902 >second.json \\
        && envoy -c second.json --base-id 1
  Reach a peer: plain HTTP to 127.0.0.1:9000 leaves as mutual TLS:
    attache bootstrap --outbound-listen 127.0.0.1:9000 \\
        --outbound-to peer.example:8443 \\
        --outbound-peer spiffe://cluster.local/ns/default/sa/api
  Reach a service here and, through the gateway of another cluster, there:
    attache bootstrap --outbound-listen 127.0.0.1:9000 \\
        --outbound-service helloworld.sample.svc.cluster.local:5000 \\
        --outbound-to 10.0.0.7:8443,region=west \\
        --outbound-to 203.0.113.8:15443,region=east,weight=2 \\
        --outbound-peer spiffe://cluster.local/ns/sample/sa/helloworld
  That gateway:
    attache bootstrap --east-west --listen 0.0.0.0:15443 \\
        --route helloworld.sample.svc.cluster.local:5000=10.1.0.9:8443
  A gateway that fetches the certificate of each host when a client names it:
    attache bootstrap --gateway --listen 0.0.0.0:8443 --upstream 127.0.0.1:8080")]
pub(super) struct BootstrapArgs {
    /// Attaché's SDS socket: a path of at most 107 bytes
    #[arg(
        long,
        value_name = "PATH",
        default_value = crate::config::DEFAULT_SOCKET,
        value_parser = socket_path,
        help_heading = "Agent"
    )]
    socket: String,

    /// How long Envoy waits for a secret before its listener opens without one, like 15s or 500ms; 0s waits forever.
    ///
    /// A listener that opened without its secrets resets every handshake until they arrive.
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "15s",
        value_parser = crate::config::parse_duration,
        help_heading = "Agent"
    )]
    initial_fetch_timeout: Duration,

    /// Use the incremental protocol (DELTA_GRPC) instead of state of the world (GRPC)
    #[arg(long, help_heading = "Agent")]
    delta: bool,

    /// Serve TLS for any number of hosts, without client certificates: Envoy asks the agent for the secret with the host's
    /// name when a client first names the host (SNI). Needs Envoy 1.37 and an agent that serves bare names
    /// (--kubernetes-bare-names)
    #[arg(
        long,
        conflicts_with_all = ["delta", "allow", "outbound_listen", "outbound_to", "outbound_endpoints", "outbound_peer"],
        help_heading = "Inbound"
    )]
    gateway: bool,

    /// Pass TLS connections from other clusters on to services of this one, by the name in their SNI
    /// (outbound_.PORT_.SUBSET_.HOST, as Istio's sidecars send it). This Envoy takes no secrets and needs no agent; other
    /// names are refused
    #[arg(
        long,
        requires = "route",
        conflicts_with_all = [
            "gateway", "socket", "initial_fetch_timeout", "delta", "upstream", "allow", "outbound_listen", "outbound_to",
            "outbound_endpoints", "endpoints_only",
        ],
        help_heading = "Between clusters"
    )]
    east_west: bool,

    /// A service of this cluster, and where it is: HOST:PORT[/SUBSET]=ENDPOINT, with an endpoint like those of
    /// --outbound-to; repeatable, also for further endpoints of one service
    #[arg(
        long,
        value_name = "SERVICE=ENDPOINT",
        value_parser = route,
        requires = "east_west",
        help_heading = "Between clusters"
    )]
    route: Vec<(Service, Endpoint)>,

    /// Envoy's node id: the name under which the agent's log and attache status show this Envoy
    #[arg(
        long,
        value_name = "ID",
        default_value = "envoy",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Envoy"
    )]
    node_id: String,

    /// Envoy's node cluster: the name of the service that this Envoy belongs to
    #[arg(
        long,
        value_name = "NAME",
        default_value = "attache",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Envoy"
    )]
    node_cluster: String,

    /// Envoy's admin address; every client that can connect to it controls Envoy
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:15000",
        value_parser = listen_address,
        help_heading = "Envoy"
    )]
    admin: SocketAddr,

    /// Where Envoy listens for mutual TLS; with port 0 the kernel chooses a free port
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:8443",
        value_parser = listen_address,
        help_heading = "Inbound"
    )]
    listen: SocketAddr,

    /// The plain HTTP application behind the listener [default: Envoy answers by itself]
    #[arg(long, value_name = "HOST:PORT", value_parser = Address::with_required_port, help_heading = "Inbound")]
    upstream: Option<Address>,

    /// A peer that may connect; repeatable [default: every peer whose chain ends in the trust bundle]
    #[arg(long, value_name = "SPIFFE_ID", help_heading = "Inbound")]
    allow: Vec<SpiffeId>,

    /// Where Envoy listens for plain HTTP that it forwards over mutual TLS; with port 0 the kernel chooses a free port
    #[arg(
        long,
        value_name = "IP:PORT",
        value_parser = listen_address,
        requires = "outbound_where",
        group = "outbound_use",
        help_heading = "Outbound"
    )]
    outbound_listen: Option<SocketAddr>,

    /// An endpoint of outbound traffic: HOST:PORT[,KEY=VALUE]…; repeatable. Keys: weight (its share, like 3), priority
    /// (endpoints of 1 are used when too many of 0 are away), region and zone, health (healthy, unhealthy, draining).
    ///
    /// With several endpoints Envoy takes turns, leaves those alone that it can't reach, and retries requests that did not
    /// reach one.
    #[arg(
        long,
        value_name = "ENDPOINT",
        value_parser = str::parse::<Endpoint>,
        requires = "outbound_use",
        group = "outbound_where",
        help_heading = "Outbound"
    )]
    outbound_to: Vec<Endpoint>,

    /// A file with the endpoints instead (EDS), which Envoy watches: it is read again when another file is renamed to it.
    /// --endpoints-only prints one
    #[arg(
        long,
        value_name = "FILE",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        requires = "outbound_listen",
        conflicts_with = "outbound_to",
        group = "outbound_where",
        help_heading = "Outbound"
    )]
    outbound_endpoints: Option<String>,

    /// Print the endpoints of --outbound-to alone, as a file for --outbound-endpoints
    #[arg(
        long,
        requires = "outbound_to",
        conflicts_with = "outbound_listen",
        group = "outbound_use",
        conflicts_with_all = ["socket", "upstream", "allow", "outbound_peer", "gateway"],
        help_heading = "Outbound"
    )]
    endpoints_only: bool,

    /// An identity that the outbound peer may present; repeatable [default: any whose chain ends in the trust bundle]
    #[arg(long, value_name = "SPIFFE_ID", requires = "outbound_where", help_heading = "Outbound")]
    outbound_peer: Vec<SpiffeId>,

    /// The service that the peer is asked for (HOST:PORT[/SUBSET]), in the form by which gateways between clusters find it
    /// [default: the name of the endpoints, if they have one]
    #[arg(
        long,
        value_name = "SERVICE",
        value_parser = str::parse::<Service>,
        requires = "outbound_where",
        help_heading = "Outbound"
    )]
    outbound_service: Option<Service>,

    /// Close an outbound connection after so many requests: the next handshake has the newest certificates [default: never]
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        requires = "outbound_listen",
        help_heading = "Outbound"
    )]
    outbound_requests_per_connection: Option<u32>,

    /// Check each endpoint so often, like 5s, with a connection and its TLS handshake [default: only requests show it]
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = interval,
        requires = "outbound_listen",
        help_heading = "Outbound"
    )]
    outbound_health_check: Option<Duration>,
}

fn route(text: &str) -> Result<(Service, Endpoint), String> {
    let (service, endpoint) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is not SERVICE=ENDPOINT, like app.ns.svc:80=10.0.0.7:8443"))?;
    Ok((service.parse()?, endpoint.parse()?))
}

fn interval(text: &str) -> Result<Duration, String> {
    match crate::config::parse_duration(text)? {
        Duration::ZERO => Err("an interval is longer than 0s".to_owned()),
        interval => Ok(interval),
    }
}

fn listen_address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "a listener needs an IP address and a port, like 127.0.0.1:8443 or [::1]:8443")
}

/// JSON can't carry a path that is not UTF-8, and Envoy refuses one that the kernel can't bind.
fn socket_path(text: &str) -> Result<String, &'static str> {
    match text.len() {
        0 => Err("a socket needs a path"),
        1..=107 => Ok(text.to_owned()),
        _ => Err("the path of a Unix socket can't be longer than 107 bytes"),
    }
}

/// Printed to standard error: Envoy's JSON has no comments.
const HOW_TO_START: &str = "\
start Envoy with this output in a file: envoy -c envoy.json
attache: a second Envoy on the same machine needs other ports (--admin, --listen, --outbound-listen) here, and --base-id 1 or \
--disable-hot-restart on its own command line";

/// Printed to standard error with a file of endpoints.
const HOW_TO_REPLACE: &str =
    "write this output to a file beside the one that Envoy watches, and rename it to that one (mv)";

/// Prints the bootstrap.
pub(super) fn run(args: BootstrapArgs) -> anyhow::Result<()> {
    let (json, note) = match args {
        BootstrapArgs { endpoints_only: true, .. } => (args.endpoints(), HOW_TO_REPLACE),
        BootstrapArgs { east_west: true, .. } => (args.east_west(), HOW_TO_START),
        _ => (args.bootstrap().map(|bootstrap| bootstrap.json()), HOW_TO_START),
    };
    let json = json.map_err(|mistake| ConfigErrors(vec![mistake]))?;
    super::print(format!("{json:#}\n"))?;
    super::note(note);
    Ok(())
}

impl BootstrapArgs {
    fn bootstrap(self) -> Result<Bootstrap, String> {
        let to = match self.outbound_endpoints {
            Some(file) => Peers::File(file),
            None => Peers::Fixed(checked(self.outbound_to, "--outbound-to")?),
        };
        Ok(Bootstrap {
            socket: self.socket,
            initial_fetch_timeout: self.initial_fetch_timeout,
            delta: self.delta,
            is_gateway: self.gateway,
            node_id: self.node_id,
            node_cluster: self.node_cluster,
            admin: self.admin,
            inbound: Inbound { listen: self.listen, upstream: self.upstream, allow: self.allow },
            outbound: self.outbound_listen.map(|listen| Outbound {
                listen,
                to,
                peers: self.outbound_peer,
                service: self.outbound_service,
                requests_per_connection: self.outbound_requests_per_connection,
                health_check: self.outbound_health_check,
            }),
        })
    }

    fn endpoints(self) -> Result<Value, String> {
        let all = checked(self.outbound_to, "--outbound-to")?;
        let file = endpoints::file(&load_name(self.outbound_service.as_ref()), &all);
        file.map_err(|mistake| format!("--outbound-to: {mistake}"))
    }

    fn east_west(self) -> Result<Value, String> {
        let mut routes: Vec<Route> = Vec::new();
        for (service, endpoint) in self.route {
            match routes.iter_mut().find(|route| route.service == service) {
                Some(route) => route.endpoints.push(endpoint),
                None => routes.push(Route { service, endpoints: vec![endpoint] }),
            }
        }
        for route in &mut routes {
            route.endpoints = checked(std::mem::take(&mut route.endpoints), "--route")?;
        }
        let gateway = EastWest {
            node_id: self.node_id,
            node_cluster: self.node_cluster,
            admin: self.admin,
            listen: self.listen,
            routes,
        };
        Ok(gateway.json())
    }
}

fn checked(endpoints: Vec<Endpoint>, option: &str) -> Result<Vec<Endpoint>, String> {
    endpoints::check(&endpoints).map_err(|mistake| format!("{option}: {mistake}"))?;
    Ok(endpoints)
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

    #[test]
    fn an_invalid_value_is_refused_with_the_expected_shape() {
        for (line, complaint) in [
            ("--listen localhost:8443", "127.0.0.1:8443"),
            ("--admin 127.0.0.1", "127.0.0.1:8443"),
            ("--upstream app", "app:8080"),
            ("--upstream ::1:8080", "[::1]:8080"),
            ("--upstream 10.0.0.300:8080", "app:8080"),
            ("--upstream a..b:8080", "app:8080"),
            ("--upstream app:65536", "app:8080"),
            ("--upstream app:0", "1 to 65535"),
            ("--upstream http://app:80", "app:8080"),
            ("--upstream app:80/", "app:8080"),
            ("--upstream [app]:80", "[::1]:8080"),
            ("--allow web", "spiffe://"),
            ("--initial-fetch-timeout 15", "90s"),
            ("--socket=", "path"),
            ("--node-id=", "--node-id"),
            ("--outbound-listen 127.0.0.1:0", "--outbound-to"),
            ("--outbound-to app:8443", "--outbound-listen"),
            ("--outbound-peer spiffe://td/api", "--outbound-to"),
            ("--gateway --allow spiffe://td/api", "--allow"),
            ("--gateway --delta", "--delta"),
            ("--endpoints-only", "--outbound-to"),
            ("--endpoints-only --outbound-to app:1 --allow spiffe://td/api", "cannot be used with"),
            ("--outbound-endpoints /eds.json", "--outbound-listen"),
            (
                "--outbound-listen 127.0.0.1:0 --outbound-to app:1 --outbound-endpoints /eds.json",
                "cannot be used with",
            ),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app", "app:8080"),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1,weight=0", "weight=0 is not a number from 1"),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1,priority=128", "from 0 to 127"),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1,weight=1,weight=2", "given twice"),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1,colour=red", "keys are weight, priority"),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1,weight", "is not KEY=VALUE"),
            (
                "--outbound-listen 127.0.0.1:0 --outbound-to app:1,health=ill",
                "healthy, unhealthy or draining",
            ),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1,zone=a", "give region, too"),
            ("--outbound-service app.ns.svc:80", "--outbound-to"),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1 --outbound-service app", "HOST:PORT/SUBSET"),
            (
                "--outbound-listen 127.0.0.1:0 --outbound-to app:1 --outbound-service 10.0.0.1:80",
                "HOST:PORT/SUBSET",
            ),
            (
                "--outbound-listen 127.0.0.1:0 --outbound-to app:1 --outbound-service app:80/",
                "HOST:PORT/SUBSET",
            ),
            (
                "--outbound-listen 127.0.0.1:0 --outbound-to app:1 --outbound-health-check 0s",
                "longer than 0s",
            ),
            ("--outbound-listen 127.0.0.1:0 --outbound-to app:1 --outbound-requests-per-connection 0", "1.."),
            ("--east-west", "--route"),
            ("--route app:80=10.0.0.1:80", "--east-west"),
            ("--east-west --route app:80", "SERVICE=ENDPOINT"),
            ("--east-west --route app:80=10.0.0.1:80 --socket /s", "--socket"),
            ("--east-west --route app:80=10.0.0.1:80 --upstream app:80", "--upstream"),
        ] {
            let line = std::iter::once("bootstrap").chain(line.split_whitespace());
            let Err(error) = Line::try_parse_from(line.clone()) else { panic!("accepted: {line:?}") };
            let error = error.to_string();
            assert!(error.contains(complaint), "{error}");
        }
    }
}
