//! The status page: the state that `attache status` prints, in a browser. It is read-only.
//!
//! | request | response |
//! |---|---|
//! | `GET /` | the page, which loads `/page.css`, `/shared.js` and `/page.js`; of an agent with many workloads `/node.css` and `/node.js` |
//! | `GET /v1/status` | the report (`docs/status.md`), as on the admin socket; of one of many workloads with `?workload=NAME` |

use http::{HeaderValue, Method, Request, StatusCode, header};
use hyper::body::Incoming;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::net::http1::{self, Answer, CONNECTION_TIME, Place, text};
use crate::ops::admin;
use crate::ops::host;
use crate::ops::report::Subject;

const HTML: &str = include_str!("page/page.html");
const CSS: &str = include_str!("page/page.css");
const JS: &str = include_str!("page/page.js");
/// What the pages of all agents share.
const SHARED_JS: &str = include_str!("page/shared.js");
const NODE_HTML: &str = include_str!("page/node.html");
const NODE_CSS: &str = include_str!("page/node.css");
const NODE_JS: &str = include_str!("page/node.js");

/// The browser may run the page's script, which calls this agent, and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

#[derive(Clone, Debug)]
pub struct Page {
    pub subject: Subject,
    /// The page listens on loopback and refuses requests for other host names (DNS rebinding).
    pub is_local: bool,
}

impl Page {
    /// Serves one connection.
    pub async fn serve(self, io: TcpStream, place: Place, stop: CancellationToken) {
        let answer = |request: Request<Incoming>| std::future::ready(self.answer(&request));
        http1::serve(io, answer, place, CONNECTION_TIME, stop).await;
    }

    pub(super) fn answer<B>(&self, request: &Request<B>) -> Answer {
        let mut answer = self.call(request);
        let headers = [
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::X_FRAME_OPTIONS, "DENY"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-store"),
        ];
        for (name, value) in headers {
            answer.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        answer
    }

    /// The state of all workloads or one of many, less what a hook printed: other users may read the page, and only the agent's user its log.
    fn report(&self, workload: &str) -> Result<Value, String> {
        let mut report = match workload {
            "" => self.subject.report(),
            name => self.subject.of(name)?.report(),
        };
        if let Some(output) = report.get_mut("output").and_then(Value::as_object_mut) {
            output.remove("hook_last_lines");
        }
        Ok(report)
    }

    fn call<B>(&self, request: &Request<B>) -> Answer {
        if self.is_local && !host::is_no_website(request) {
            let message = "this page is for this machine only: open it as localhost, 127.0.0.1 or [::1]; for requests by other \
                           names set --admin-address to an address that is not loopback\n";
            return text(StatusCode::FORBIDDEN, message);
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is allowed here\n");
        }
        let found = |content_type, body: &str| http1::answer(StatusCode::OK, content_type, body.to_owned());
        match request.uri().path() {
            "/" => found(
                "text/html; charset=utf-8",
                match self.subject {
                    Subject::One(_) => HTML,
                    Subject::Node(_) => NODE_HTML,
                },
            ),
            "/page.css" => found("text/css; charset=utf-8", CSS),
            "/page.js" => found("text/javascript; charset=utf-8", JS),
            "/shared.js" => found("text/javascript; charset=utf-8", SHARED_JS),
            "/node.css" => found("text/css; charset=utf-8", NODE_CSS),
            "/node.js" => found("text/javascript; charset=utf-8", NODE_JS),
            "/v1/status" => match self.report(&admin::workload(request).unwrap_or_default()) {
                Ok(report) => http1::json(StatusCode::OK, &report),
                Err(reason) => text(StatusCode::NOT_FOUND, &format!("{reason}\n")),
            },
            _ => text(StatusCode::NOT_FOUND, "not found; the paths are / and /v1/status\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::base::clock::Clock;
    use crate::fs::pending::PendingOperations;
    use crate::ops::report::About;
    use crate::ops::report::Reporter;
    use crate::store::Cache;
    use crate::store::history::History;

    fn page(is_local: bool) -> Page {
        let about = About::without_a_ca();
        let ((cache, workload), history) = (Cache::with_workload(""), History::default());
        let (pending, clock) = (PendingOperations::default(), Clock::starting_at(UNIX_EPOCH));
        let reporter =
            Reporter { cache, workload, history, pending, clusters: Default::default(), about, clock };
        Page { subject: Subject::One(reporter), is_local }
    }

    fn ask(page: &Page, method: &str, uri: &str, hosts: &[&str]) -> Answer {
        let mut request = Request::builder().method(method).uri(uri);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        page.answer(&request.body(()).unwrap())
    }

    #[tokio::test]
    async fn on_loopback_no_website_is_answered() {
        let status = |is_local, host: &str| ask(&page(is_local), "GET", "/v1/status", &[host]).status();
        assert_eq!(status(true, "localhost:15056"), StatusCode::OK);
        assert_eq!(status(true, "evil.example"), StatusCode::FORBIDDEN);
        assert_eq!(status(false, "node.example"), StatusCode::OK);
    }

    #[tokio::test]
    async fn every_response_forbids_what_the_page_does_not_need() {
        let page = page(true);
        let calls = [
            ("GET", "/", "localhost", 200),
            ("HEAD", "/", "localhost", 200),
            ("GET", "/page.css", "localhost", 200),
            ("GET", "/page.js", "localhost", 200),
            ("GET", "/v1/status", "localhost", 200),
            ("GET", "/v1/log", "localhost", 404),
            ("GET", "/v1/renew", "localhost", 404),
            ("GET", "/readyz", "localhost", 404),
            ("POST", "/v1/renew", "localhost", 405),
            ("PUT", "/v1/log?level=trace", "localhost", 405),
            ("POST", "/v1/status", "localhost", 405),
            ("OPTIONS", "/", "localhost", 405),
            ("GET", "/", "evil.example", 403),
        ];
        for (method, uri, host, status) in calls {
            let answer = ask(&page, method, uri, &[host]);
            assert_eq!(answer.status(), status, "{method} {uri}");
            let header = |name: &str| answer.headers().get(name).unwrap().to_str().unwrap();
            let policy = header("content-security-policy");
            assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{policy}");
            assert!(policy.contains("frame-ancestors 'none'"), "{policy}");
            assert_eq!(header("x-content-type-options"), "nosniff");
            assert_eq!(header("cache-control"), "no-store");
            assert_eq!(header("referrer-policy"), "no-referrer");
            assert_eq!(header("x-frame-options"), "DENY");
            assert!(answer.headers().get("access-control-allow-origin").is_none());
        }
    }

    #[test]
    fn the_page_is_small_and_loads_nothing_from_elsewhere() {
        let sidecar = [HTML, CSS, SHARED_JS, JS];
        let node = [NODE_HTML, CSS, NODE_CSS, SHARED_JS, NODE_JS];
        let size = |parts: &[&str]| parts.iter().map(|part| part.len()).sum::<usize>();
        assert!(size(&sidecar) < 16_000 && size(&node) < 16_000, "{} {}", size(&sidecar), size(&node));
        for part in sidecar.into_iter().chain(node) {
            let elsewhere = part.replace("http://www.w3.org/2000/svg", "");
            assert!(!elsewhere.contains("://"), "a part is not from this agent");
        }
        // Names and reasons are untrusted.
        for unsafe_call in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!([SHARED_JS, JS, NODE_JS].iter().all(|js| !js.contains(unsafe_call)), "{unsafe_call}");
        }
    }
}
