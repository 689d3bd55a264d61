//! Which host a request names. A website's name may resolve to loopback (DNS rebinding): a browser then takes this agent for
//! that site, and lets the site's scripts read the agent's answers.

use std::net::IpAddr;

use http::uri::Authority;
use http::{Request, header};

/// Whether a request over loopback can't be one that a website has a browser make. It names no host at all, or this machine,
/// or an IP address, which no name resolves to: a kubelet's probe names the Pod's, also where a proxy in the Pod forwards it.
pub(super) fn is_no_website<B>(request: &Request<B>) -> bool {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let is_named_well = match (hosts.next(), hosts.next()) {
        (None, _) => true,
        (Some(host), None) => Authority::try_from(host.as_bytes()).is_ok_and(|host| is_no_name(&host)),
        (Some(_), Some(_)) => false,
    };
    // The request line may name a host, too.
    is_named_well && request.uri().authority().is_none_or(is_no_name)
}

fn is_no_name(authority: &Authority) -> bool {
    let host = authority.host();
    let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_name_a_website_are_recognized() {
        let good = [
            "localhost",
            "LocalHost:8080",
            "127.0.0.1",
            "127.0.0.1:15056",
            "127.1.2.3:1",
            "10.0.0.1:15056",
            "0.0.0.0:15056",
            "[::1]",
            "[::1]:15056",
            "[fe80::1]",
            "[::ffff:127.0.0.1]",
        ];
        let bad = [
            "",
            "evil.example",
            "evil.example:15056",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example@127.0.0.1.example",
            "localhost/evil",
            "127.1",
            "2130706433",
            "\u{e9}",
        ];
        let is_good = |uri: &str, hosts: &[&str]| {
            let mut request = Request::builder().uri(uri);
            for host in hosts {
                request = request.header(header::HOST, *host);
            }
            is_no_website(&request.body(()).unwrap())
        };
        for host in good {
            assert!(is_good("/", &[host]), "{host}");
        }
        for host in bad {
            assert!(!is_good("/", &[host]), "{host}");
        }
        // No browser leaves it out.
        assert!(is_good("/", &[]));
        assert!(!is_good("/", &["localhost", "evil.example"]));
        assert!(!is_good("http://evil.example/", &["localhost"]) && !is_good("http://evil.example/", &[]));
        assert!(is_good("http://localhost/", &["localhost"]));
    }
}
