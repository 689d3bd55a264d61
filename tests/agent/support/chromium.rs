//! A real headless Chromium, controlled over a pipe (the DevTools protocol).

use std::path::{Path, PathBuf};
use std::process::Stdio;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{Duration, Instant, sleep, timeout};

use super::installed::installed;
use super::process::PATIENCE;

/// The path of Chromium, downloaded by the first test that needs it.
async fn binary() -> PathBuf {
    installed("get-chromium", &[]).await
}

/// A running Chromium with one page; dropping it kills all its processes.
pub struct Chromium {
    _child: Child,
    group: Pid,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    stderr: PathBuf,
    session: Option<String>,
    calls: u64,
    /// The page's events so far.
    events: Vec<Value>,
}

impl Chromium {
    /// Starts it with a fresh profile in `directory`, and opens `url`.
    pub async fn open(directory: &Path, url: &str) -> Self {
        const FLAGS: [&str; 10] = [
            "--headless",
            // The sandbox does not work as root, nor in most containers; the page is our own.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
        ];
        let stderr = directory.join("chromium.log");
        // It reads requests from descriptor 3 and answers on 4.
        let mut child = Command::new("sh")
            .args(["-c", r#"exec "$@" 3<&0 4>&1 </dev/null >&2"#, "sh"])
            .arg(binary().await)
            .args(FLAGS)
            .arg(format!("--user-data-dir={}", directory.join("chromium").display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&stderr).unwrap())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let group = Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
        let requests = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let events = Vec::new();
        let mut this =
            Self { _child: child, group, requests, answers, stderr, session: None, calls: 0, events };
        let target = this.call("Target.createTarget", json!({ "url": "about:blank" })).await;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = this.call("Target.attachToTarget", attach).await;
        this.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            this.call(&format!("{domain}.enable"), json!({})).await;
        }
        let opened = this.call("Page.navigate", json!({ "url": url })).await;
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
        this
    }

    async fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut request = json!({ "id": self.calls, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        let _ = self.requests.write_all(format!("{request}\0").as_bytes()).await;
        let answer = timeout(PATIENCE, async {
            loop {
                let mut message = Vec::new();
                if self.answers.read_until(0, &mut message).await.unwrap_or(0) == 0 {
                    return None;
                }
                message.pop();
                let message: Value = serde_json::from_slice(&message).unwrap();
                if message["id"] == self.calls {
                    return Some(message);
                }
                self.events.push(message);
            }
        });
        let Ok(Some(mut answer)) = answer.await else {
            panic!("{method} is not answered:\n{}", std::fs::read_to_string(&self.stderr).unwrap())
        };
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].take()
    }

    /// The value of an expression in the page.
    pub async fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true });
        let mut answer = self.call("Runtime.evaluate", parameters).await;
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Waits until `condition` holds in the page.
    pub async fn wait(&mut self, condition: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.evaluate(&format!("Boolean({condition})")).await != true {
            if Instant::now() > deadline {
                let text = self.evaluate("document.body.innerText").await;
                panic!(
                    "{condition} does not come true: {}\n{:#?}",
                    text.as_str().unwrap(),
                    self.complaints()
                );
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sets the screen to `width`, and the preferred colour scheme to dark or light.
    pub async fn screen(&mut self, width: u32, scheme: &str) {
        self.resize(width).await;
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", scheme).await;
        // The script redraws after it has received the new width.
        self.wait(&format!("innerWidth === {width} && document.querySelector('svg').clientWidth < {width}"))
            .await;
    }

    /// Sets the screen to `width`.
    pub async fn resize(&mut self, width: u32) {
        let metrics = json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.call("Emulation.setDeviceMetricsOverride", metrics).await;
        self.wait(&format!("innerWidth === {width}")).await;
    }

    /// Saves a screenshot of the whole page.
    pub async fn picture(&mut self, file: &Path) {
        let parameters = json!({ "format": "png", "captureBeyondViewport": true });
        let answer = self.call("Page.captureScreenshot", parameters).await;
        std::fs::write(file, STANDARD.decode(answer["data"].as_str().unwrap()).unwrap()).unwrap();
    }

    /// The URL of each request of the page.
    pub fn requests(&self) -> Vec<&str> {
        let requests = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        requests.map(|event| event["params"]["request"]["url"].as_str().unwrap()).collect()
    }

    /// The browser's complaints about the page, and what its script throws or prints.
    pub fn complaints(&self) -> Vec<&Value> {
        let complaints = ["Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"];
        self.events.iter().filter(|event| complaints.iter().any(|name| event["method"] == *name)).collect()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = kill_process_group(self.group, Signal::KILL);
    }
}
