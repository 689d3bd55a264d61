//! Kubernetes manifests, parsed and validated by tools other than the agent.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::OnceCell;

use super::installed::installed;

/// A Python with kubernetes-validate and PyYAML, installed by the first test that needs it.
async fn python() -> &'static Path {
    static PYTHON: OnceCell<PathBuf> = OnceCell::const_new();
    PYTHON.get_or_init(|| installed("get-kubernetes-validate", &[])).await
}

/// The number of documents in `manifests`, if all match Kubernetes' schemas without an unknown field; else the errors.
pub async fn validate(manifests: &str) -> Result<usize, String> {
    let said = pipe(&["-m", "kubernetes_validate", "--strict", "-"], manifests).await;
    // Kinds without a schema are reported as a warning.
    let (good, bad): (Vec<_>, Vec<_>) = said.lines().partition(|line| line.starts_with("INFO"));
    if bad.is_empty() { Ok(good.len()) } else { Err(bad.join("\n")) }
}

/// The documents of `manifests`, parsed by PyYAML.
pub async fn documents(manifests: &str) -> Vec<Value> {
    const READ: &str =
        "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin.buffer))))";
    let said = pipe(&["-c", READ], manifests).await;
    serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}\n{manifests}"))
}

/// Python's output for `input`.
async fn pipe(arguments: &[&str], input: &str) -> String {
    let mut command = Command::new(python().await);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let write = async {
        // If it has exited already, its output says why.
        let _ = stdin.write_all(input.as_bytes()).await;
        drop(stdin);
    };
    let ((), output) = tokio::join!(write, child.wait_with_output());
    let output = output.unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

/// The Pod spec of a workload, or of a Pod.
pub fn pod_spec(object: &Value) -> Option<&Value> {
    let path = match object["kind"].as_str()? {
        "Pod" => "/spec",
        "CronJob" => "/spec/jobTemplate/spec/template/spec",
        _ => "/spec/template/spec",
    };
    object.pointer(path)
}

/// The init containers of a Pod, then the others.
pub fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"].into_iter().flat_map(|list| spec[list].as_array().into_iter().flatten())
}
