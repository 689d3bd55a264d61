//! Programs that the first test that needs them downloads.

use std::path::{Path, PathBuf};

use tokio::process::Command;

/// The path that `examples/SCRIPT` prints, after it has installed the program into `target/`.
pub async fn installed(script: &str, arguments: &[&str]) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(script);
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let output = Command::new(&script).args(arguments).env("CARGO_TARGET_DIR", target).output().await;
    let output = output.unwrap_or_else(|error| panic!("running {}: {error}", script.display()));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {arguments:?} failed:\n{log}", script.display());
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end())
}
