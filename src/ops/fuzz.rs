//! Fuzz target: requests to the status port, the status page and the admin socket.

use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::{Duration, UNIX_EPOCH};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio_util::sync::CancellationToken;

use super::admin::Admin;
use super::page::Page;
use super::report::{About, Reporter, Subject};
use super::status::Status;
use super::telemetry::{Log, parse_filter};
use crate::base::clock::Clock;
use crate::fs::pending::PendingOperations;
use crate::fs::watch::Watcher;
use crate::metrics::Metrics;
use crate::net::http1::{self, CONNECTION_TIME, Connections};
use crate::store::Cache;
use crate::store::history::History;

/// How long a connection may take whose client has closed it.
const PATIENCE: Duration = Duration::from_secs(60);

/// The three servers of an agent without secrets.
struct Servers {
    status: Status,
    page: Page,
    admin: Admin,
}

fn servers() -> &'static Servers {
    static SERVERS: OnceLock<Servers> = OnceLock::new();
    SERVERS.get_or_init(|| {
        let about = About::without_a_ca();
        let ((cache, workload), clock) = (Cache::with_workload(""), Clock::system());
        let (metrics, watcher) = (Metrics::default(), Watcher::new(PendingOperations::default()));
        let (pending, draining, log) =
            (PendingOperations::default(), CancellationToken::new(), Log::detached());
        let status = Status {
            cache: cache.clone(),
            metrics,
            clock: clock.clone(),
            started: UNIX_EPOCH,
            watcher,
            clusters: Default::default(),
            pending: pending.clone(),
            log: log.clone(),
            is_local: true,
            draining,
        };
        let reporter = Reporter {
            cache,
            workload,
            history: History::default(),
            about,
            clock,
            pending,
            clusters: Default::default(),
        };
        let subject = Subject::One(reporter);
        let page = Page { subject: subject.clone(), is_local: true };
        Servers { status, page, admin: Admin { subject, log } }
    })
}

/// A letter for the server (`S`tatus, `P`age, or the admin socket), and the bytes that a client sends. True if the first
/// request is answered with 200.
pub fn http1(bytes: &[u8]) -> bool {
    let [server, requests @ ..] = bytes else { return false };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else {
        return false;
    };
    let (theirs, ours) = tokio::io::duplex(16 << 10);
    let answers = runtime.block_on(async {
        let (served, answers) =
            tokio::join!(tokio::time::timeout(PATIENCE, serve(*server, ours)), client(theirs, requests));
        assert!(served.is_ok(), "the connection stays open");
        answers
    });
    let is_http =
        answers.is_empty() || answers.starts_with(b"HTTP/1.1 ") || answers.starts_with(b"HTTP/1.0 ");
    assert!(is_http, "{}", answers.escape_ascii());
    let is_ok = answers.get(9..12) == Some(b"200");
    let lines = requests.split(|byte| *byte == b'\n');
    let names_website = matches!(server, b'S' | b'P')
        && lines.take_while(|line| !line.trim_ascii().is_empty()).any(is_website);
    assert!(!is_ok || !names_website, "answered a website");
    let level = servers().admin.log.get();
    assert!(parse_filter(&level).is_ok(), "{level:?} is not a level that --log-level takes");
    is_ok
}

async fn serve(server: u8, io: DuplexStream) {
    let Servers { status, page, admin } = servers();
    let (stop, time) = (CancellationToken::new(), CONNECTION_TIME);
    let Some(place) = Connections::new(1).admit() else { return };
    match server {
        b'S' => {
            let answer = |request| std::future::ready(status.answer(&request));
            http1::serve(io, answer, place, time, stop).await;
        }
        b'P' => {
            http1::serve(io, |request| std::future::ready(page.answer(&request)), place, time, stop).await
        }
        _ => http1::serve(io, |request| admin.answer(request), place, time, stop).await,
    }
}

/// Sends `requests`, closes the connection for writing, and returns what comes back.
async fn client(io: DuplexStream, requests: &[u8]) -> Vec<u8> {
    let (mut reader, mut writer) = tokio::io::split(io);
    let send = async {
        let _ = writer.write_all(requests).await;
        // A server may drop the request of a client that is gone.
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
        let _ = writer.shutdown().await;
    };
    let mut answers = Vec::new();
    let (_, ()) = tokio::join!(reader.read_to_end(&mut answers), send);
    answers
}

/// Whether a line is a `Host` header with a name that resolves to an address somewhere.
fn is_website(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    let Some((name, host)) = line.split_once(':') else { return false };
    let host = host.rsplit('@').next().unwrap_or_default().trim();
    let host = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split_once(':').map_or(host, |(host, _)| host),
    };
    name.eq_ignore_ascii_case("host")
        && !host.eq_ignore_ascii_case("localhost")
        && host.parse::<IpAddr>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_requests_over_http_break_no_rule() {
        let samples = [
            &b"SGET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"[..],
            b"SGET /metrics HTTP/1.1\r\nHost: 127.0.0.1:15055\r\nAccept: application/openmetrics-text;q=0.5,*/*\r\n\r\n",
            b"SHEAD /livez HTTP/1.0\r\nContent-Length: 3\r\n\r\nabcGET /readyz HTTP/1.1\r\n\r\n",
            b"PGET / HTTP/1.1\r\nHost: [::1]:15056\r\n\r\n",
            b"PGET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"AGET /v1/status HTTP/1.1\r\nhost: attache\r\n\r\n",
            b"APUT /v1/log?level=debug HTTP/1.1\r\nhost: attache\r\ncontent-length: 0\r\n\r\n",
            b"APUT /v1/log?a&level=info,h2=warn HTTP/1.1\r\nhost: attache\r\n\r\n",
        ];
        let samples = samples.map(<[u8]>::to_vec);
        seeded("http1", Shape::Bytes, 2_000, &samples, http1);
        let other = |host: &str| format!("PGET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", ""] {
            assert!(!http1(other(host).as_bytes()), "{host}");
        }
        assert!(!http1(b"APOST /v1/renew HTTP/1.1\r\nhost: attache\r\n\r\n"), "there is no source");
        let long = format!("SGET /{} HTTP/1.1\r\n\r\n", "x".repeat(40_000));
        assert!(!http1(long.as_bytes()), "the head is bounded");
    }
}
