//! Endpoints of a cluster: where they are, how much they get, and what is used when they are away.

use std::str::FromStr;

use serde_json::{Value, json};

use super::{insert, ip, socket_address, type_url};
use crate::net::address::Address;

/// An endpoint as it is typed: `HOST:PORT[,KEY=VALUE]…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: Address,
    /// Its share of the requests, relative to the others.
    weight: Option<u32>,
    /// Endpoints of another priority than 0 are used when those of the priority before are away.
    priority: u32,
    region: Option<String>,
    zone: Option<String>,
    health: Option<Health>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Healthy,
    Unhealthy,
    Draining,
}

impl Health {
    const ALL: [(&'static str, &'static str, Self); 3] = [
        ("healthy", "HEALTHY", Self::Healthy),
        ("unhealthy", "UNHEALTHY", Self::Unhealthy),
        ("draining", "DRAINING", Self::Draining),
    ];
}

const KEYS: &str = "weight, priority, region, zone, health";
/// Envoy's limit.
const MAX_PRIORITY: u32 = 127;
/// Far below Envoy's limit for the sum of all weights of a locality.
const MAX_WEIGHT: u32 = 1_000_000;

impl From<Address> for Endpoint {
    fn from(address: Address) -> Self {
        Self { address, weight: None, priority: 0, region: None, zone: None, health: None }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let address = Address::with_required_port(parts.next().unwrap_or_default())?;
        let mut endpoint = Self::from(address);
        let mut seen = Vec::new();
        for part in parts {
            let (key, value) = part
                .split_once('=')
                .filter(|(_, value)| !value.is_empty())
                .ok_or_else(|| format!("{part:?} is not KEY=VALUE; keys are {KEYS}"))?;
            if seen.contains(&key) {
                return Err(format!("{key} is given twice"));
            }
            seen.push(key);
            endpoint.set(key, value)?;
        }
        if endpoint.zone.is_some() && endpoint.region.is_none() {
            return Err("a zone is in a region: give region, too".to_owned());
        }
        Ok(endpoint)
    }
}

impl Endpoint {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let number = |range: std::ops::RangeInclusive<u32>| {
            let number = value.parse().ok().filter(|number| range.contains(number));
            number.ok_or_else(|| {
                format!("{key}={value} is not a number from {} to {}", range.start(), range.end())
            })
        };
        match key {
            "weight" => self.weight = Some(number(1..=MAX_WEIGHT)?),
            "priority" => self.priority = number(0..=MAX_PRIORITY)?,
            "region" => self.region = Some(value.to_owned()),
            "zone" => self.zone = Some(value.to_owned()),
            "health" => {
                let known = Health::ALL.iter().find(|(name, ..)| *name == value);
                let known =
                    known.ok_or_else(|| format!("health={value} is not healthy, unhealthy or draining"))?;
                self.health = Some(known.2);
            }
            _ => return Err(format!("there is no {key:?}; keys are {KEYS}")),
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let host = self.address.host();
        let mut endpoint = json!({ "endpoint": { "address": socket_address(&host, self.address.port()) } });
        if let Some(weight) = self.weight {
            insert(&mut endpoint, "load_balancing_weight", json!(weight));
        }
        if let Some((_, name, _)) = self.health.and_then(|own| Health::ALL.iter().find(|it| it.2 == own)) {
            insert(&mut endpoint, "health_status", json!(name));
        }
        endpoint
    }

    /// What endpoints of one group have in common.
    fn group(&self) -> (u32, Option<&str>, Option<&str>) {
        (self.priority, self.region.as_deref(), self.zone.as_deref())
    }
}

/// Checks what only all endpoints of a cluster together show.
pub fn check(endpoints: &[Endpoint]) -> Result<(), String> {
    let highest = endpoints.iter().map(|endpoint| endpoint.priority).max().unwrap_or_default();
    let missing = (0..highest).find(|one| endpoints.iter().all(|endpoint| endpoint.priority != *one));
    match missing {
        Some(missing) => Err(format!(
            "priorities begin at 0 and leave none out: no endpoint has priority {missing}, and one has {highest}"
        )),
        None => Ok(()),
    }
}

/// The ClusterLoadAssignment of `endpoints`, in groups of one locality and priority.
pub(super) fn assignment(cluster: &str, endpoints: &[Endpoint]) -> Value {
    let mut groups: Vec<(&Endpoint, Vec<Value>)> = Vec::new();
    for endpoint in endpoints {
        match groups.iter_mut().find(|(first, _)| first.group() == endpoint.group()) {
            Some((_, members)) => members.push(endpoint.json()),
            None => groups.push((endpoint, vec![endpoint.json()])),
        }
    }
    let groups = groups.into_iter().map(|(first, members)| {
        let mut group = json!({ "lb_endpoints": members });
        if first.priority > 0 {
            insert(&mut group, "priority", json!(first.priority));
        }
        if let Some(region) = &first.region {
            let mut locality = json!({ "region": region });
            if let Some(zone) = &first.zone {
                insert(&mut locality, "zone", json!(zone));
            }
            insert(&mut group, "locality", locality);
        }
        group
    });
    json!({ "cluster_name": cluster, "endpoints": groups.collect::<Vec<_>>() })
}

/// A file of endpoints, as Envoy reads it: EDS' response with one cluster. Envoy resolves no names in it.
pub fn file(cluster: &str, endpoints: &[Endpoint]) -> Result<Value, String> {
    if let Some(name) = endpoints.iter().find(|endpoint| ip(&endpoint.address).is_none()) {
        return Err(format!(
            "{} is a name, and Envoy resolves none in a file of endpoints: give its IP address",
            name.address.host()
        ));
    }
    let mut resource = assignment(cluster, endpoints);
    insert(&mut resource, "@type", json!(type_url("config.endpoint.v3.ClusterLoadAssignment")));
    Ok(json!({ "resources": [resource] }))
}

/// A service as Istio names it between clusters: host, port and subset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    host: String,
    port: u16,
    subset: String,
}

/// Bytes of a name in SNI.
const MAX_SNI: usize = 255;

impl FromStr for Service {
    type Err = String;

    /// `HOST:PORT[/SUBSET]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let shape = || {
            format!(
                "{text:?} is not a service; the shape is HOST:PORT or HOST:PORT/SUBSET, like helloworld.sample.svc.cluster.local:5000"
            )
        };
        let (address, subset) = text.split_once('/').unwrap_or((text, ""));
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if text.ends_with('/') || !subset.chars().all(is_part) {
            return Err(shape());
        }
        let address = Address::with_required_port(address).map_err(|_| shape())?;
        if ip(&address).is_some() {
            return Err(shape());
        }
        let host = address.host().trim_end_matches('.').to_ascii_lowercase();
        let service = Self { host, port: address.port(), subset: subset.to_ascii_lowercase() };
        match service.sni().len() {
            ..=MAX_SNI => Ok(service),
            long => Err(format!("its name in SNI has {long} bytes, more than {MAX_SNI}")),
        }
    }
}

impl Service {
    /// The name in the TLS handshake by which an east-west gateway knows where the connection goes.
    pub fn sni(&self) -> String {
        let Self { host, port, subset } = self;
        format!("outbound_.{port}_.{subset}_.{host}")
    }
}
