//! `attache bootstrap`: prints an Envoy configuration that works with this agent unchanged.

use std::net::SocketAddr;
use std::time::Duration;

use crate::base::spiffe_id::SpiffeId;
use crate::envoy::bootstrap::{Bootstrap, Inbound, Outbound};
use crate::net::address::Address;

/// Print an Envoy bootstrap (v3, JSON) that takes its certificate and its trust roots from Attaché
///
/// Envoy gets one mutual TLS listener. Without --upstream it answers by itself, with the caller's identity;
/// with --outbound-listen and --outbound-to it also opens connections to a peer over mutual TLS. With --gateway it gets a TLS listener
/// for any number of hosts instead. Standard error says how to start Envoy.
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
        conflicts_with_all = ["delta", "allow", "outbound_listen", "outbound_to", "outbound_peer"],
        help_heading = "Inbound"
    )]
    gateway: bool,

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
        requires = "outbound_to",
        help_heading = "Outbound"
    )]
    outbound_listen: Option<SocketAddr>,

    /// The peer of outbound traffic
    #[arg(long, value_name = "HOST:PORT", value_parser = Address::with_required_port, requires = "outbound_listen", help_heading = "Outbound")]
    outbound_to: Option<Address>,

    /// The identity that the outbound peer must present [default: any whose chain ends in the trust bundle]
    #[arg(long, value_name = "SPIFFE_ID", requires = "outbound_to", help_heading = "Outbound")]
    outbound_peer: Option<SpiffeId>,
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

/// Prints the bootstrap.
pub(super) fn run(args: BootstrapArgs) -> anyhow::Result<()> {
    super::print(format!("{:#}\n", args.bootstrap().json()))?;
    super::note(HOW_TO_START);
    Ok(())
}

impl BootstrapArgs {
    fn bootstrap(self) -> Bootstrap {
        let outbound = self.outbound_listen.zip(self.outbound_to);
        Bootstrap {
            socket: self.socket,
            initial_fetch_timeout: self.initial_fetch_timeout,
            delta: self.delta,
            is_gateway: self.gateway,
            node_id: self.node_id,
            node_cluster: self.node_cluster,
            admin: self.admin,
            inbound: Inbound { listen: self.listen, upstream: self.upstream, allow: self.allow },
            outbound: outbound.map(|(listen, to)| Outbound { listen, to, peer: self.outbound_peer }),
        }
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
        ] {
            let line = std::iter::once("bootstrap").chain(line.split_whitespace());
            let Err(error) = Line::try_parse_from(line.clone()) else { panic!("accepted: {line:?}") };
            let error = error.to_string();
            assert!(error.contains(complaint), "{error}");
        }
    }
}
