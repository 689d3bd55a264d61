//! The manifests of examples/kubernetes: Kubernetes and the present agent accept them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::kubernetes::{containers, documents, pod_spec, validate};
use crate::support::process::{attache, output};

/// Those of sidecars, and of one agent with one identity.
fn examples() -> Vec<(PathBuf, String)> {
    let all: Vec<_> = manifests().into_iter().filter(|(file, _)| !is_of_a_node(file)).collect();
    assert_eq!(all.len(), 6);
    all
}

/// Whether it belongs to `attache node`.
fn is_of_a_node(file: &Path) -> bool {
    file.file_name().unwrap().to_str().unwrap().starts_with("node")
}

fn manifests() -> Vec<(PathBuf, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/kubernetes");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let manifests = files.filter(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    manifests.map(|file| (file.clone(), std::fs::read_to_string(file).unwrap())).collect()
}

/// The specs of all Pods of all examples, with the file's name.
async fn specs() -> Vec<(String, Value)> {
    let mut specs = Vec::new();
    for (file, text) in examples() {
        for document in documents(&text).await {
            specs.extend(pod_spec(&document).map(|spec| (file.display().to_string(), spec.clone())));
        }
    }
    assert_eq!(specs.len(), 7);
    specs
}

fn is_agent(container: &Value) -> bool {
    // In an image with Envoy, the command says so.
    container["image"].as_str().unwrap().starts_with("attache:") || container["command"][0] == "/attache"
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect()
}

/// Monitoring selects by the names of port and container.
#[tokio::test]
async fn prometheus_finds_the_agents_of_every_example_and_of_inject() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("pod.yaml");
    let text =
        "{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {containers: [{name: web, image: web}]}}";
    std::fs::write(&plain, text).unwrap();
    let inject =
        ["inject", "--image", "attache:1", plain.to_str().unwrap(), "--", "--ca-address", "istiod:15012"];
    let injected = String::from_utf8(output(&inject).await.stdout).unwrap();
    let injected = documents(&injected).await.remove(0);
    let specs = [specs().await, vec![("inject".to_owned(), pod_spec(&injected).unwrap().clone())]].concat();

    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/monitoring/README.md");
    let page = std::fs::read_to_string(page).unwrap();
    let after = |text: &str| page.split_once(text).unwrap().1.split(',').next().unwrap();
    let wanted =
        (after("[__meta_kubernetes_pod_container_name], regex: "), after("podMetricsEndpoints: [{port: "));
    let mut found = 0;
    for (name, spec) in &specs {
        for agent in containers(spec).filter(|container| container["ports"][0]["containerPort"] == 15055) {
            let port = agent["ports"][0]["name"].as_str().unwrap();
            assert_eq!((agent["name"].as_str().unwrap(), port), wanted, "{name}");
            found += 1;
        }
    }
    assert_eq!(found, 7);
}

#[tokio::test]
async fn every_field_of_every_example_is_valid() {
    let texts: Vec<_> = manifests().into_iter().map(|(_, text)| text).collect();
    let all = texts.join("---\n");
    assert_eq!(validate(&all).await, Ok(22));
    let (good, broken) = ("readOnlyRootFilesystem", "readOnlyRootFileSystem");
    let error = validate(&all.replacen(good, broken, 1)).await.unwrap_err();
    assert!(error.contains(broken) && error.lines().count() == 1, "{error}");
}

#[tokio::test]
async fn the_agent_accepts_the_arguments_of_every_example() {
    let mut commands = Vec::new();
    for (file, spec) in specs().await {
        for agent in containers(&spec).filter(|container| is_agent(container)) {
            assert!(agent.get("env").is_none(), "{file}: this test would have to pass the variables on");
            commands.push((file.clone(), strings(&agent["args"]).join(" ")));
            for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                if let Some(command) = agent[probe].pointer("/exec/command") {
                    let command = strings(command);
                    assert_eq!(command[0], "/attache", "where the Dockerfile puts it");
                    commands.push((file.clone(), command[1..].join(" ")));
                }
            }
        }
    }
    assert_eq!(commands.len(), 12);
    for (file, command) in commands {
        // An unknown option prevents the start, and must be the only error.
        let mut words: Vec<_> = command.split(' ').collect();
        words.insert(1, "--surely-unknown=");
        let mut command = attache(&words);
        let failed = command.env("KUBERNETES_SERVICE_HOST", "10.0.0.1").output().await.unwrap();
        let (code, error) = (failed.status.code().unwrap(), String::from_utf8(failed.stderr).unwrap());
        let lines: Vec<_> = error.lines().collect();
        assert_eq!(code, 2, "{file}: {error}");
        assert!(matches!(lines[..], ["attache: unknown option --surely-unknown", _]), "{file}: {error}");
    }
}

#[tokio::test]
async fn every_container_that_mounts_the_socket_runs_as_its_owner() {
    let mut agents = 0;
    for (file, spec) in specs().await {
        let user = |container: &Value| {
            let context = &container["securityContext"];
            (context["runAsUser"].as_u64().unwrap(), context["runAsGroup"].as_u64().unwrap())
        };
        for container in containers(&spec) {
            let name = format!("{file}: {}", container["name"]);
            let mounts_socket = container["volumeMounts"].as_array().into_iter().flatten().any(|mount| {
                ["attache-socket", "workload-socket"].contains(&mount["name"].as_str().unwrap())
            });
            let is_directory_maker = container["name"] == "directory";
            agents += usize::from(is_agent(container));
            assert_eq!(user(container) == (1337, 1337), mounts_socket && !is_directory_maker, "{name}");
            let context = &container["securityContext"];
            assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(context["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(context["capabilities"]["drop"], serde_json::json!(["ALL"]), "{name}");
            let is_never_root = [&spec["securityContext"], context].iter().any(|c| c["runAsNonRoot"] == true);
            assert_eq!(is_never_root, !is_directory_maker, "{name}");
        }
        assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{file}");
        assert_eq!(spec["automountServiceAccountToken"], false, "{file}");
    }
    assert_eq!(agents, 6);
}

#[tokio::test]
async fn every_mount_has_a_volume_and_every_volume_is_mounted() {
    for (file, spec) in specs().await {
        let names = |list: &Value| -> BTreeSet<String> {
            let all = list.as_array().into_iter().flatten();
            all.map(|one| one["name"].as_str().unwrap().to_owned()).collect()
        };
        let mounted = containers(&spec).flat_map(|container| names(&container["volumeMounts"])).collect();
        assert_eq!(names(&spec["volumes"]), mounted, "{file}");
    }
}

#[tokio::test]
async fn socket_and_probes_match_the_agents_options() {
    let mut probes = 0;
    for (file, spec) in specs().await {
        for agent in containers(&spec).filter(|container| is_agent(container)) {
            let args = strings(&agent["args"]);
            let option = |name: &str| args.iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='));
            let socket = option("--socket").unwrap_or("/var/run/secrets/workload-spiffe-uds/socket");
            let dir = Path::new(socket).parent().unwrap().to_str().unwrap();
            let mounts = agent["volumeMounts"].as_array().unwrap();
            let socket_mount = mounts.iter().find(|mount| mount["mountPath"] == dir);
            assert_eq!(socket_mount.unwrap().get("readOnly"), None, "{file}");
            let status: std::net::SocketAddr = option("--status-address").unwrap().parse().unwrap();
            assert!(status.ip().is_unspecified(), "{file}: the kubelet can't reach {status}");
            let ports = agent["ports"].as_array().unwrap();
            let port = |name: &Value| ports.iter().find(|port| port["name"] == *name).unwrap();
            for (probe, path) in
                [("startupProbe", "/readyz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")]
            {
                if let Some(get) = agent[probe].get("httpGet") {
                    probes += 1;
                    assert_eq!(get["path"], path, "{file}");
                    assert_eq!(port(&get["port"])["containerPort"], status.port(), "{file}");
                }
            }
        }
    }
    assert_eq!(probes, 9);
}

#[tokio::test]
async fn the_agent_of_a_node_has_the_kubelets_directories_at_their_own_paths_and_no_capability() {
    let (_, text) = manifests().into_iter().find(|(file, _)| file.ends_with("node.yaml")).unwrap();
    let all = documents(&text).await;
    let driver = all.iter().find(|object| object["kind"] == "CSIDriver").unwrap();
    let spec = all.iter().find(|object| object["kind"] == "DaemonSet").and_then(pod_spec).unwrap();
    let agent = containers(spec).next().unwrap();
    let context = &agent["securityContext"];
    assert_eq!(context["capabilities"], serde_json::json!({ "drop": ["ALL"] }));
    assert_eq!(
        (&context["privileged"], &context["allowPrivilegeEscalation"]),
        (&Value::Null, &Value::Bool(false))
    );
    let volumes = spec["volumes"].as_array().unwrap();
    for mount in agent["volumeMounts"].as_array().unwrap() {
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        if let Some(path) = volume.pointer("/hostPath/path") {
            assert_eq!(*path, mount["mountPath"]);
        }
    }
    let args = strings(&agent["args"]);
    let name = driver["metadata"]["name"].as_str().unwrap();
    assert!(args.iter().any(|arg| arg.starts_with("--csi-socket=") && arg.contains(name)), "{args:?}");
    // Of the 1.35 manifest only one line differs.
    let (_, newer) =
        manifests().into_iter().find(|(file, _)| file.ends_with("node-csidriver-1.35.yaml")).unwrap();
    let mut newer = documents(&newer).await.remove(0);
    let spec = newer["spec"].as_object_mut().unwrap();
    assert_eq!(spec.remove("serviceAccountTokenInSecrets"), Some(Value::Bool(true)));
    assert_eq!(newer["spec"], driver["spec"]);
    // An unknown option prevents the start, and must be the only error.
    let mut words = args.clone();
    words.insert(1, "--surely-unknown=");
    let failed = attache(&words).env("NODE_NAME", "node-1").output().await.unwrap();
    let error = String::from_utf8(failed.stderr).unwrap();
    let lines: Vec<_> = error.lines().collect();
    assert!(matches!(lines[..], ["attache: unknown option --surely-unknown", _]), "{error}");
}
