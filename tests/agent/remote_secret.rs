//! `attache remote-secret` against a fake API server.

use std::path::Path;
use std::process::Output;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::support::kube_cluster::resource::Key;
use crate::support::kube_cluster::{Draft, KubeCluster};
use crate::support::process::{attache, output};

const ACCOUNT: &str = "attache-remote-reader";
const TOKEN: &str = "attache-remote-reader-istio-remote-secret-token";
const SECRET: &str = "istio-remote-secret-east";

/// A cluster, and a kubeconfig of its administrator.
async fn cluster(directory: &Path, name: &str) -> (KubeCluster, String) {
    let cluster = KubeCluster::start(directory, name).await;
    let kubeconfig = cluster.write_kubeconfig(&cluster.admin()).display().to_string();
    (cluster, kubeconfig)
}

async fn remote_secret(words: &[&str]) -> Output {
    output(&[&["remote-secret"], words].concat()).await
}

fn texts(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test]
async fn the_printed_secret_is_the_one_that_is_applied_and_its_kubeconfig_works() {
    let directory = tempfile::tempdir().unwrap();
    let (east, east_config) = cluster(directory.path(), "east").await;
    let (west, west_config) = cluster(directory.path(), "west").await;
    east.put(&Draft::of("serviceaccounts", "istio-system", ACCOUNT));
    west.put(&Draft::config_map("istio-system", "another"));

    let create = ["create", "--name", "east", "--kubeconfig", &east_config];
    let (code, printed, notes) = texts(&remote_secret(&create).await);
    assert_eq!(code, 0, "{notes}");
    assert!(notes.contains("agents elsewhere need --server URL"), "{notes}");
    for line in [
        "kind: Secret",
        "  name: \"istio-remote-secret-east\"",
        "    istio/multiCluster: \"true\"",
        "    networking.istio.io/cluster: \"east\"",
    ] {
        assert!(printed.lines().any(|own| own == line), "{line}\n{printed}");
    }
    let apply = [&create[..], &["--apply", "--to-kubeconfig", &west_config]].concat();
    let (code, out, notes) = texts(&remote_secret(&apply).await);
    assert!(
        code == 0 && out.is_empty() && notes.contains("Secret istio-system/istio-remote-secret-east applied"),
        "{notes}"
    );
    let applied = west.object(&Key::new("secrets", "istio-system", SECRET)).unwrap();
    assert_eq!(applied["metadata"]["labels"]["istio/multiCluster"], "true");
    assert_eq!(applied["metadata"]["annotations"]["networking.istio.io/cluster"], "east");
    let kubeconfig = STANDARD.decode(applied["data"]["east"].as_str().unwrap()).unwrap();
    let kubeconfig = String::from_utf8(kubeconfig).unwrap();
    let (_, block) = printed.split_once("  \"east\": |\n").unwrap();
    let block: String =
        block.lines().map(|line| format!("{}\n", line.strip_prefix("    ").unwrap())).collect();
    assert_eq!(block, kubeconfig, "the same, and the same token");

    // A client with this kubeconfig is the account, which has no rights here.
    let path = directory.path().join("remote");
    std::fs::write(&path, &kubeconfig).unwrap();
    let as_account = ["create", "--name", "east", "--kubeconfig", path.to_str().unwrap()];
    let (code, _, error) = texts(&remote_secret(&as_account).await);
    let user = format!("system:serviceaccount:istio-system:{ACCOUNT}");
    assert!(code == 1 && error.contains(&user) && error.contains("cannot get resource"), "{error}");

    // The default kubeconfig and the current context.
    let mut command = attache(&["remote-secret", "create", "--name", "east"]);
    let by_default = command.env("KUBECONFIG", format!(":{east_config}:/nowhere")).output().await.unwrap();
    assert_eq!(texts(&by_default).1, printed);
    let (code, _, error) = texts(&remote_secret(&["create", "--name", "east"]).await);
    assert!(code == 1 && error.contains("name one with --kubeconfig"), "{error}");

    // Another address, for the others.
    let elsewhere = [&create[..], &["--server", "https://east.example:6443"]].concat();
    let (_, printed, notes) = texts(&remote_secret(&elsewhere).await);
    assert!(printed.contains("    server: \"https://east.example:6443\"") && notes.is_empty(), "{notes}");

    let delete = ["delete", "--name", "east", "--to-kubeconfig", &west_config];
    let (code, _, notes) = texts(&remote_secret(&delete).await);
    assert!(code == 0 && notes.contains("deleted"), "{notes}");
    assert!(west.object(&Key::new("secrets", "istio-system", SECRET)).is_none());
    assert!(east.object(&Key::new("secrets", "istio-system", TOKEN)).is_some());
    let revoke = [&delete[..], &["--revoke", "--kubeconfig", &east_config]].concat();
    let (code, _, notes) = texts(&remote_secret(&revoke).await);
    assert!(code == 0 && notes.contains("does not exist") && notes.contains("no longer valid"), "{notes}");
    assert!(east.object(&Key::new("secrets", "istio-system", TOKEN)).is_none());
    let (code, _, error) = texts(&remote_secret(&as_account).await);
    assert!(code == 1 && error.contains("401"), "{error}");
}

#[tokio::test]
async fn what_is_missing_or_wrong_is_named_with_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let (east, config) = cluster(directory.path(), "east").await;
    let create = ["create", "--name", "east", "--kubeconfig", &config];
    let (code, out, error) = texts(&remote_secret(&create).await);
    assert!(
        code == 1 && out.is_empty() && error.contains(&format!("no service account istio-system/{ACCOUNT}")),
        "{error}"
    );
    assert!(error.contains("ClusterRole attache-remote-reader in docs/multicluster.md"), "{error}");

    east.put(&Draft::of("serviceaccounts", "istio-system", ACCOUNT));
    let same = [&create[..], &["--apply", "--to-kubeconfig", &config]].concat();
    let (code, _, error) = texts(&remote_secret(&same).await);
    assert!(code == 1 && error.contains("into the cluster that it describes"), "{error}");
    assert!(east.object(&Key::new("secrets", "istio-system", TOKEN)).is_none(), "nothing is created");
    let (code, _, error) = texts(&remote_secret(&[&create[..], &["--to-context", "a"]].concat()).await);
    assert!(code == 1 && error.contains("give --apply, or drop them"), "{error}");
    let (code, _, error) = texts(&remote_secret(&[&create[..], &["--context", "west"]].concat()).await);
    assert!(code == 1 && error.contains("west"), "{error}");

    // A Secret of that name that is for something else.
    east.put(&Draft::of("secrets", "istio-system", SECRET));
    let (code, _, error) =
        texts(&remote_secret(&["delete", "--name", "east", "--to-kubeconfig", &config]).await);
    assert!(code == 1 && error.contains("has no label istio/multiCluster=true"), "{error}");
    assert!(east.object(&Key::new("secrets", "istio-system", SECRET)).is_some());
}
