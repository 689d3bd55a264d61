//! Addresses of servers, as people write them.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// `[https://|http://]HOST[:PORT]`. Without a scheme the connection is TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(super) host: String,
    pub(super) port: u16,
    /// Whether the connection is without TLS.
    pub plaintext: bool,
}

impl Address {
    /// Parses `text`; these are the ports where it names none.
    pub fn with_ports(text: &str, tls_port: u16, plaintext_port: u16) -> Result<Self, String> {
        let invalid = || {
            format!(
                "{text:?} is not an address; the shape is HOST:PORT (TLS) or http://HOST:PORT (plaintext)"
            )
        };
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), rest)) => (Some(scheme), rest),
            Some(_) => return Err(invalid()),
            None => (None, text),
        };
        let plaintext = scheme == Some("http");
        let authority: http::uri::Authority = rest.trim_end_matches('/').parse().map_err(|_| invalid())?;
        let bracketed = authority.host().strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let host = bracketed.unwrap_or(authority.host()).to_owned();
        // Brackets are for IPv6 addresses only.
        if host.is_empty()
            || host.contains(['[', ']'])
            || bracketed.is_some() != host.contains(':')
            || authority.as_str().contains('@')
        {
            return Err(invalid());
        }
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") if plaintext => plaintext_port,
            Some("") => tls_port,
            Some(port) => port.trim_start_matches(':').parse().map_err(|_| invalid())?,
            None => return Err(invalid()),
        };
        Ok(Self { host, port, plaintext })
    }

    /// `HOST:PORT` with neither a scheme nor a default: an IP address or a DNS name, and a port that is not 0.
    pub fn with_required_port(text: &str) -> Result<Self, String> {
        let parsed = Self::with_ports(text, 0, 0).ok().filter(|address| {
            let is_host = match text.starts_with('[') {
                true => address.host.parse::<Ipv6Addr>().is_ok(),
                false => address.host.parse::<Ipv4Addr>().is_ok() || is_dns_name(&address.host),
            };
            is_host && address.port != 0 && !text.contains('/')
        });
        parsed.ok_or_else(|| {
            "an endpoint is a name or an IP address and a port from 1 to 65535, like app:8080, 127.0.0.1:8080 or [::1]:8080"
                .to_owned()
        })
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `https://HOST:PORT`, as gRPC's `:scheme` and `:authority`.
    pub fn origin(&self) -> String {
        let scheme = if self.plaintext { "http" } else { "https" };
        format!("{scheme}://{}", self.authority())
    }

    /// `HOST:PORT`.
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

/// A last label of digits means a mistyped IPv4 address, which no resolver would find.
fn is_dns_name(text: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    let last = name.rsplit('.').next().unwrap_or_default();
    name.split('.').all(is_label) && !last.bytes().all(|byte| byte.is_ascii_digit())
}

/// With the ports of HTTPS and HTTP where the text names none.
impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::with_ports(text, 443, 80)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.origin())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let cases = [
            ("vault.example:8200", Some("https://vault.example:8200")),
            ("http://vault:8200", Some("http://vault:8200")),
            ("https://ca.example", Some("https://ca.example:443")),
            ("http://127.0.0.1", Some("http://127.0.0.1:80")),
            ("http://[::1]:80/", Some("http://[::1]:80")),
            ("[::1]:15012", Some("https://[::1]:15012")),
            ("", None),
            (":15012", None),
            ("host:", None),
            ("host:99999", None),
            ("host:1/path", None),
            ("ftp://host", None),
            ("user@host:1", None),
            ("two words", None),
            ("1[fe80::1]:15012", None),
            ("[[::1]]:15012", None),
            ("[ca.example]:15012", None),
        ];
        for (text, expected) in cases {
            let parsed = text.parse::<Address>();
            assert_eq!(parsed.as_ref().map(Address::origin).ok().as_deref(), expected, "{text}: {parsed:?}");
        }
    }
}
