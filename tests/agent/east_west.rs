//! Traffic between clusters: a gateway that passes TLS on by its SNI, and peers that take the place of others.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use serde_json::Value;

use crate::support::envoy::{Envoy, NEWEST, OLDEST, http_get};
use crate::support::files::spiffe;
use crate::support::mesh::api_envoy;
use crate::support::process::{Agent, Ca, output, strs};

const SERVICE: &str = "api.shop.svc.cluster.local:8443";

async fn printed(arguments: &[&str]) -> Value {
    let all = [&["bootstrap", "--listen", "127.0.0.1:0"], arguments].concat();
    let output = output(&all).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The agents of both sides, the Envoy of `api`, and a gateway before it.
struct Mesh {
    web: Agent,
    _api: (Agent, Envoy, Ca),
    gateway: Envoy,
    gateway_address: SocketAddr,
}

impl Mesh {
    async fn start(directory: &Path, version: &str) -> Self {
        let ca = Ca::start(directory).await;
        let agent = async |name: &str| Agent::ready(directory, name, &strs(&ca.client(name))).await;
        let (web, api) = (agent("web").await, agent("api").await);
        let api_envoy = api_envoy(directory, &api).await;
        let route = format!("{SERVICE}={}", api_envoy.listener_address("inbound").await);
        let gateway = printed(&["--east-west", "--route", &route]).await;
        let gateway = Envoy::start_version(version, gateway, directory, "gateway").await;
        gateway.wait_listeners(&["east_west"]).await;
        let gateway_address = gateway.listener_address("east_west").await;
        Self { web, _api: (api, api_envoy, ca), gateway, gateway_address }
    }

    /// An Envoy of `web` that calls these endpoints.
    async fn caller(&self, directory: &Path, version: &str, name: &str, more: &[&str]) -> Envoy {
        let socket = self.web.socket.to_str().unwrap();
        let all = [&["--socket", socket, "--outbound-listen", "127.0.0.1:0"], more].concat();
        let caller = Envoy::start_version(version, printed(&all).await, directory, name).await;
        caller.wait_listeners(&["outbound"]).await;
        caller
    }
}

async fn status(caller: &Envoy) -> u16 {
    http_get(caller.listener_address("outbound").await, "/").await.unwrap().0
}

async fn a_gateway_passes_on_what_it_knows(version: &str) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mesh = Mesh::start(directory, version).await;
    let (gateway, api, other) = (mesh.gateway_address.to_string(), spiffe("api"), spiffe("other"));
    let to =
        |service, peer| ["--outbound-to", &gateway, "--outbound-service", service, "--outbound-peer", peer];

    let good = mesh.caller(directory, version, "good", &to(SERVICE, &api)).await;
    let (code, headers, _) = http_get(good.listener_address("outbound").await, "/").await.unwrap();
    assert_eq!(code, 200);
    assert_eq!(headers["x-peer-uri-san"], spiffe("web"), "the gateway does not end TLS");

    // The client checks the identity at the other end, whatever the gateway connects to.
    let wrong_peer = mesh.caller(directory, version, "wrong-peer", &to(SERVICE, &other)).await;
    assert_eq!(status(&wrong_peer).await, 503);
    assert!(wrong_peer.stat("cluster.peer.ssl.fail_verify_san").await >= 1);

    for (name, service) in
        [("port", "api.shop.svc.cluster.local:80"), ("subset", "api.shop.svc.cluster.local:8443/v1")]
    {
        let unknown = mesh.caller(directory, version, name, &to(service, &api)).await;
        assert_eq!(status(&unknown).await, 503, "{service}");
    }
    let refused = mesh.gateway.stats().await;
    let refused = refused.iter().filter(|(name, _)| name.ends_with("no_filter_chain_match"));
    assert_eq!(refused.map(|(_, count)| count).sum::<u64>(), 2);
}

#[tokio::test]
async fn a_gateway_passes_on_the_services_that_it_knows_and_no_other_name() {
    a_gateway_passes_on_what_it_knows(NEWEST).await;
}

#[tokio::test]
async fn the_oldest_envoy_passes_on_the_services_that_it_knows_and_no_other_name() {
    a_gateway_passes_on_what_it_knows(OLDEST).await;
}

/// The first request already: it is sent again until the endpoint that is away counts as such.
#[tokio::test]
async fn no_request_fails_while_another_endpoint_can_take_the_place_of_one_that_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mesh = Mesh::start(directory, NEWEST).await;
    // A port on which nothing listens.
    let nothing = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (name, away, there) in [("priority", "", ",priority=1"), ("turns", ",region=a,weight=9", ",region=b")]
    {
        let (away, there) = (format!("{nothing}{away}"), format!("{}{there}", mesh.gateway_address));
        let options = ["--outbound-to", &away, "--outbound-to", &there, "--outbound-service", SERVICE];
        let caller = mesh.caller(directory, NEWEST, name, &options).await;
        // More at once than Envoy's default limit of retries allows.
        let at = caller.listener_address("outbound").await;
        let requests = (0..30).map(|_| tokio::spawn(async move { http_get(at, "/").await.map(|it| it.0) }));
        for request in requests.collect::<Vec<_>>() {
            assert_eq!(request.await.unwrap().unwrap(), 200, "{name}: one of the first requests");
        }
        for request in 0..20 {
            assert_eq!(status(&caller).await, 200, "{name}: request {request}");
        }
    }
}
