//! `attache inject`: Kubernetes and the agent accept what it prints.

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use crate::support::kubernetes::{containers, documents, pod_spec, validate};
use crate::support::process::{attache, failure};

const ISTIOD: [&str; 3] = ["--", "--ca-address", "istiod.istio-system.svc:15012"];

/// The exit code, standard output and standard error of `attache inject` with `manifests` as its input.
async fn inject(options: &[&str], manifests: &str) -> (i32, String, String) {
    let mut command = attache(&["inject", "--image", "attache:1"]);
    command.args(options).stdin(std::process::Stdio::piped());
    let mut child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let write = async {
        // With wrong options the command does not read its input.
        let _ = stdin.write_all(manifests.as_bytes()).await;
        drop(stdin);
    };
    let ((), output) = tokio::join!(write, child.wait_with_output());
    let output = output.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

async fn injected(options: &[&str], manifests: &str) -> String {
    let (code, out, error) = inject(options, manifests).await;
    assert_eq!(code, 0, "{options:?}: {error}");
    out
}

/// A workload of each kind, in YAML.
fn workloads() -> String {
    let spec = |restart: &str| json!({ "restartPolicy": restart, "containers": [{ "name": "web", "image": "web" }] });
    let pod = |restart: &str| json!({ "metadata": { "labels": { "app": "web" } }, "spec": spec(restart) });
    let object = |group: &str, kind: &str, spec: Value| json!({ "apiVersion": group, "kind": kind, "metadata": { "name": "web" }, "spec": spec });
    let selector = json!({ "matchLabels": { "app": "web" } });
    let apps = json!({ "selector": selector, "template": pod("Always") });
    let set = json!({ "selector": selector, "serviceName": "web", "template": pod("Always") });
    let job = json!({ "template": pod("Never") });
    let all = [
        object("v1", "Pod", spec("Always")),
        object("apps/v1", "Deployment", apps.clone()),
        object("apps/v1", "DaemonSet", apps.clone()),
        object("apps/v1", "ReplicaSet", apps),
        object("apps/v1", "StatefulSet", set),
        object("batch/v1", "Job", job.clone()),
        object("batch/v1", "CronJob", json!({ "schedule": "@daily", "jobTemplate": { "spec": job } })),
        object("v1", "Service", json!({ "ports": [{ "port": 80 }] })),
    ];
    all.map(|object| format!("{object:#}\n---\n")).concat()
}

#[tokio::test]
async fn each_kind_of_workload_is_valid_with_the_sidecar() {
    let manifests = workloads();
    let options = [&["--container=web"], &ISTIOD[..]].concat();
    let outcome = injected(&options, &manifests).await;
    assert_eq!(validate(&outcome).await, Ok(8));
    assert_eq!(injected(&options, &outcome).await, outcome, "a second injection changes nothing");
    for object in
        documents(&outcome).await.iter().filter(|object| object["kind"] != "Service" && object.is_object())
    {
        let spec = pod_spec(object).unwrap();
        let agent = &spec["initContainers"][0];
        assert_eq!((&agent["name"], &agent["restartPolicy"]), (&json!("attache"), &json!("Always")));
        let volumes: Vec<_> =
            spec["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
        assert_eq!(volumes, ["attache-socket", "attache-token", "attache-ca-root"]);
        assert_eq!(containers(spec).nth(1).unwrap()["volumeMounts"][0]["name"], "attache-socket");
    }
}

#[tokio::test]
async fn istios_gateway_gets_an_agent_with_both_sockets() {
    // As Istio's chart makes it.
    let gateway = "\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: gateway
spec:
  selector:
    matchLabels: {istio: gateway}
  template:
    metadata:
      annotations:
        inject.istio.io/templates: gateway
      labels:
        istio: gateway
        sidecar.istio.io/inject: \"true\"
    spec:
      serviceAccountName: gateway
      containers:
        - name: istio-proxy
          image: auto
";
    let options = [
        "--",
        "--ca-address=istiod:15012",
        "--socket=/var/run/secrets/workload-spiffe-uds/socket",
        "--socket=/var/run/secrets/credential-uds/socket",
        "--socket=/var/run/secrets/credential-uds/another",
    ];
    let outcome = injected(&options, gateway).await;
    assert_eq!(validate(&outcome).await, Ok(1));
    assert_eq!(injected(&options, &outcome).await, outcome);
    let object = documents(&outcome).await.remove(0);
    let spec = pod_spec(&object).unwrap();
    let names = |list: &Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
    };
    let volumes = ["workload-socket", "credential-socket", "attache-token", "attache-ca-root"];
    assert_eq!(names(&spec["volumes"]), volumes, "{outcome}");
    assert_eq!(names(&spec["initContainers"][0]["volumeMounts"]), volumes, "{outcome}");
    let elsewhere = [&options[..], &["--socket=/run/attache/s"]].concat();
    let (code, _, error) = inject(&elsewhere, gateway).await;
    assert!(code == 1 && error.contains("/var/run/secrets/credential-uds"), "{error}");
}

#[tokio::test]
async fn the_new_sidecar_replaces_an_older_one() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/kubernetes/sidecar.yaml");
    let text = std::fs::read_to_string(file).unwrap();
    let options =
        [file, "--", "--socket=/run/attache/sds.sock", "--ca=embedded", "--ca-dir=/ca", "--output-dir=/out"];
    let outcome = injected(&options, "").await;
    assert_eq!(validate(&outcome).await, Ok(2));
    let object = documents(&outcome).await.remove(1);
    let spec = pod_spec(&object).unwrap();
    let names: Vec<_> = containers(spec).map(|container| &container["name"]).collect();
    assert_eq!(names, ["attache", "web", "envoy"]);
    let paths = |container: usize| {
        let mounts = containers(spec).nth(container).unwrap()["volumeMounts"].clone();
        let paths = mounts
            .as_array()
            .into_iter()
            .flatten()
            .map(|mount| mount["mountPath"].as_str().unwrap().to_owned());
        paths.collect::<Vec<_>>()
    };
    assert_eq!(paths(0), ["/run/attache", "/out", "/ca"]);
    assert_eq!(paths(1), [""; 0]);
    assert_eq!(paths(2), ["/run/attache", "/etc/envoy", "/out"]);
    let volumes: Vec<_> = spec["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
    assert_eq!(volumes, ["attache-socket", "envoy", "attache-output", "attache-ca"]);
    // Comments are kept, except those in the replaced container.
    let comments = text.lines().filter(|line| line.trim_start().starts_with('#'));
    assert!(comments.filter(|comment| outcome.contains(comment)).count() >= 12);
}

/// `objects` without all parts of the sidecar, and without empty lists.
fn stripped(mut objects: Value) -> Value {
    match &mut objects {
        Value::Array(items) => {
            items.retain(|item| !item["name"].as_str().is_some_and(|name| name.starts_with("attache")));
            items.iter_mut().for_each(|item| *item = stripped(item.take()));
        }
        Value::Object(fields) => {
            fields.values_mut().for_each(|field| *field = stripped(field.take()));
            fields.retain(|_, field| !field.is_null() && field != &json!([]));
        }
        _ => {}
    }
    objects
}

#[tokio::test]
async fn another_parser_finds_the_original_and_the_sidecar() {
    const TEXT: &str = "\
# before
apiVersion: v1
kind: Pod
spec:
  x: &x {a: 1, b: [ ]}
  # of volumes
  volumes:
  - name: data   # behind
    emptyDir: {}

  # of the second
  - emptyDir: *x
    name: |-
      more

  # of containers
  containers: # here
    # of web
    -   name: web
        args: [ -c, \"a\\n\", 'it''s',
          last ]
        volumeMounts:

        env:
          - name: TEXT
            value: >+
              # no comment

              é


    # of the second
    -   image: envoy
        name: b
        command:
        - |
          sh
        - \"two
          lines\"
# tail
---
kind: ConfigMap
data:
  a: |1
    b
";
    let flow = r#"{"kind": "List", "apiVersion": "v1", "items": [{"apiVersion": "batch/v1", "kind": "Job", "spec":
        {"template": {"spec": {"volumes": [], "containers": [{"name": "web", "env": []}], "restartPolicy": "Never"}}}}]}"#;
    for text in [TEXT.to_owned(), TEXT.replace('\n', "\r\n"), flow.to_owned()] {
        let before = stripped(documents(&text).await.into());
        let mut last = String::new();
        for options in
            [&["--name=attache"][..], &["--native=false"], &["--container=web", "--mount=data=/data"]]
        {
            if text == flow && options != ["--name=attache"] {
                continue;
            }
            let source = if last.is_empty() { &text } else { &last };
            let outcome = injected(&[options, &ISTIOD[..]].concat(), source).await;
            let objects = documents(&outcome).await;
            assert!(!outcome.contains("null"));
            assert_eq!(stripped(objects.into()), before, "{outcome}");
            last = outcome;
        }
    }
}

#[tokio::test]
async fn the_options_after_the_dashes_are_checked_as_the_agent_would() {
    let manifests = "apiVersion: v1\nkind: Pod\nspec: {containers: [{name: web}]}\n";
    let outcome = injected(&ISTIOD, manifests).await;
    let args = documents(&outcome).await[0]["spec"]["initContainers"][0]["args"].clone();
    let mut words: Vec<_> = args.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    assert_eq!(words.last(), Some(&"--status-address=0.0.0.0:15055"));
    words.push("--surely-unknown");
    let (code, error) = failure(&words).await;
    assert_eq!((code, error.lines().next()), (2, Some("attache: unknown option --surely-unknown")));

    for (options, expected) in [
        (&["--", "--ca-adress=x", "--key-type=no"][..], &["3 mistakes", "--ca-address", "--key-type"][..]),
        (&[][..], &["no CA is configured", "for mounted files give --ca none"]),
        (&["--", "--ca-address=a:1", "--status-address=127.0.0.1:1"], &["0.0.0.0:15055"]),
        (&["--", "--ca-address=a:1", "--socket=sock"], &["--socket sock is relative"]),
        (&["--", "--ca=embedded"], &["--ca-dir", "relative"]),
        (
            &["--", "--ca-address=a:1", "--socket=/run/a/s", "--state-dir=/run/a/"],
            &["/run/a is the directory of --socket and --state-dir"],
        ),
        (
            &["--mount=a=/x/", "--", "--ca-address=a:1", "--output-dir=/x"],
            &["/x is an output directory and --mount a"],
        ),
        (
            &["--", "--ca-address=a:1", "--ready-file=/ready/ok", "--admin-socket=/adm/a.sock"],
            &["--ready-file /ready/ok: the container can't write there", "--admin-socket /adm/a.sock"],
        ),
        (
            &["--", "--ca-address=a:1", "--ready-file=ok", "--state-dir=state", "--output-dir=out"],
            &["--ready-file ok is relative", "--state-dir state is", "--output-dir out is"],
        ),
        (&["--mount=attache-ca=/vault", "--", "--ca-address=a:1"], &["--mount attache-ca", "rename yours"]),
        (
            &["--", "--ca-address=a:1", "--token-file=/token"],
            &["the directory of the token would be mounted at /: choose a path in another directory"],
        ),
        (&["--image-has=/", "--", "--ca-address=a:1", "--socket=/sds.sock"], &["would be mounted at /"]),
        (
            &["--", "--ca-address=a:1", "--output=/out,owner=999"],
            &["--output /out: the agent runs as user 1337 without the right to give files to user 999"],
        ),
        (&["--run-as=0", "--", "--ca-address=a:1"], &["--run-as", "root"]),
        (&["--", "--ca-address=a:1", "stray"], &["after --", "stray", "manifests stand before --"]),
        (&["--ca-address=a:1"], &["--ca-address is an option of attache run: put -- before"]),
        (
            &["--crl", "/x", "--", "--ca-address=a:1"],
            &["--crl is an option of attache run", "web.yaml -- --crl"],
        ),
        (
            &["--", "--ca-address=a:1", "--mount=a=/b"],
            &["--mount is an option of attache inject: it stands before --"],
        ),
        (&["--", "--ca-address=a:1", "--crl=/x/crl.pem"], &["--crl /x/crl.pem", "--mount VOLUME=/x"]),
        (&["--", "--ca=none"], &["--cert-dir /etc/certs (the default): no volume is mounted there"]),
        (
            &["--", "--ca-address=a:1", "--output-dir=/out", "--output-hook=nginx -s reload"],
            &["--output-hook runs a command by /bin/sh", "--image-has /bin/sh"],
        ),
        (&["--nativ", "--", "--ca-address=a:1"], &["--native"]),
        (&["--name=No", "--", "--ca-address=a:1"], &["a-z"]),
    ] {
        let (code, out, error) = inject(options, manifests).await;
        assert_eq!((code, out.as_str()), (2, ""), "{options:?}: {error}");
        assert!(expected.iter().all(|text| error.contains(text)), "{options:?}: {error}");
    }
}

#[tokio::test]
async fn files_are_joined_and_a_bad_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let service = file("service.yaml", "kind: Service # the first");
    let map = file("map.yaml", "---\nkind: ConfigMap\n");
    let (code, out, error) = inject(&[&[&*service, &map, "-"], &ISTIOD[..]].concat(), "a: 1\n").await;
    assert_eq!((code, &*out), (0, "kind: Service # the first\n---\nkind: ConfigMap\n---\na: 1\n"));
    assert!(error.contains("nothing injected"), "{error}");

    // Before a directive, the earlier document needs an explicit end.
    let directive = file("directive.yaml", "# of the second\n%YAML 1.2\n---\nb: 1\n");
    let (_, out, _) = inject(&[&[&*service, &directive], &ISTIOD[..]].concat(), "").await;
    assert_eq!(out, "kind: Service # the first\n...\n# of the second\n%YAML 1.2\n---\nb: 1\n");
    assert_eq!(inject(&ISTIOD, &out).await.1, out);

    let bad = file("bad.yaml", "a: 1\n---\nb: [1\n");
    let missing = dir.path().join("missing").to_str().unwrap().to_owned();
    let binary = dir.path().join("binary").to_str().unwrap().to_owned();
    std::fs::write(&binary, b"\xff\xfe").unwrap();
    for (file, expected) in
        [(bad, "bad.yaml: document 2, line "), (missing, "missing"), (binary, "save it as UTF-8")]
    {
        let (code, out, error) = inject(&[&[&*service, &file], &ISTIOD[..]].concat(), "").await;
        assert_eq!((code, &*out), (1, ""));
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn options_decide_on_volumes_and_users_and_warnings_do_not_prevent_the_injection() {
    let manifests = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  hostNetwork: true\n  volumes: \
                     [{name: own, emptyDir: {}}]\n  containers: [{name: web, image: web}]\n";
    let options = [
        "--run-as=none",
        "--mount=own=/var/run/secrets/istio",
        "--",
        "--ca-address=a:1",
        "--socket=/run/attache/s",
        "--state-dir=/state",
        "--ready-file=/state/ready",
        "--admin-socket=/run/attache/admin",
    ];
    let (code, out, error) = inject(&options, manifests).await;
    assert_eq!(code, 0, "{error}");
    let lines: Vec<_> = error.lines().collect();
    let expected = [
        "Pod web: sidecar attache added, socket in no container, volumes attache-state, attache-token",
        "document 1, line 5: this Pod uses the node's network",
        "document 1, line 5: no container gets the socket, since none of web is an Envoy",
    ];
    assert_eq!(lines.len(), expected.len(), "{error}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(&format!("attache: standard input: {expected}")), "{error}");
    }
    assert_eq!(validate(&out).await, Ok(1));
    let spec = documents(&out).await.remove(0)["spec"].take();
    let context = &spec["initContainers"][0]["securityContext"];
    assert_eq!((context.get("runAsUser"), &context["runAsNonRoot"]), (None, &json!(true)));
    let volumes: Vec<_> = spec["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
    assert_eq!(volumes, ["own", "attache-socket", "attache-state", "attache-token"]);
    // It holds a key, which must not be written to the node's disk.
    assert_eq!(spec["volumes"][2]["emptyDir"], json!({ "medium": "Memory", "sizeLimit": "1Mi" }));
}

#[tokio::test]
async fn the_istio_example_stays_an_istio_example() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/kubernetes/istio-drop-in.yaml");
    let text = std::fs::read_to_string(file).unwrap();
    // The manifest without the agent has neither annotation nor volume, and gets both.
    let agent = text.split_once("      initContainers:\n").unwrap();
    let rest = agent.1.split_once("      containers:\n").unwrap().1;
    let rest = rest.split_once("      volumes:\n").unwrap().0;
    let annotations = text.split_once("      annotations:\n").unwrap().1.split_once("    spec:\n").unwrap().0;
    let bare = format!("{}      containers:\n{rest}", agent.0)
        .replace(&format!("      annotations:\n{annotations}"), "");
    assert_ne!(bare, text);
    let (_, _, error) = inject(&[&["--name=second"], &ISTIOD[..]].concat(), &text).await;
    assert!(error.contains("container attache is already an agent"), "{error}");
    for manifests in [&text, &bare] {
        let outcome = injected(&["--", "--ca-address=istiod.istio-system.svc:15012"], manifests).await;
        assert_eq!(validate(&outcome).await, Ok(2));
        assert_eq!(injected(&ISTIOD, &outcome).await, injected(&ISTIOD, manifests).await);
        let (wanted, found) = (documents(&text).await.remove(1), documents(&outcome).await.remove(1));
        let order = "/spec/template/metadata/annotations/sidecar.istio.io~1nativeSidecar";
        assert_eq!(found.pointer(order), Some(&json!("false")));
        let (wanted, found) = (pod_spec(&wanted).unwrap(), pod_spec(&found).unwrap());
        assert_eq!(found["volumes"], wanted["volumes"]);
        assert_eq!(found["containers"], wanted["containers"]);
        let [wanted, found] = [wanted, found].map(|spec| &spec["initContainers"][0]);
        for same in ["args", "ports", "volumeMounts", "restartPolicy"] {
            assert_eq!(found[same], wanted[same], "{same}");
        }
        assert_eq!(found["startupProbe"]["exec"]["command"][1], "get");
    }
}

#[tokio::test]
async fn standard_error_has_one_line_for_each_workload_and_then_the_warnings() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/kubernetes/native-sidecar.yaml");
    let json = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rocket", "annotations": {"a": "\ud83d\ude80"}},
        "spec": {"containers": [{"name": "proxy", "image": "envoyproxy/envoy:v1.36.0"}]}}"#;
    let options = [&[file, "-"], &ISTIOD[..]].concat();
    let (code, out, error) = inject(&options, json).await;
    assert_eq!(code, 0, "{error}");
    assert!(out.contains(r"\ud83d\ude80"), "{out}");
    assert!(documents(&out).await.iter().any(|object| object["metadata"]["annotations"]["a"] == "\u{1f680}"));
    let lines: Vec<_> = error.lines().map(|line| line.strip_prefix("attache: ").unwrap()).collect();
    let [first, second, others, warning] = lines.as_slice() else { panic!("{error}") };
    assert!(first.starts_with(&format!("{file}: Deployment ")), "{error}");
    assert!(
        first.contains("sidecar attache updated, socket in envoy, volumes attache-token, attache-ca-root"),
        "{error}"
    );
    assert_eq!(
        *second,
        "standard input: Pod rocket: sidecar attache added, socket in proxy, volumes attache-token, attache-ca-root"
    );
    assert!(others.ends_with("without Pods: unchanged"), "{error}");
    assert!(
        warning.contains("container proxy runs as user 101, to which the entry point of its image switches"),
        "{error}"
    );
}

#[tokio::test]
async fn an_agent_that_reads_secrets_needs_the_pods_account_or_its_kubeconfigs() {
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  automountServiceAccountToken: false\n  containers: [{name: web, image: web}]\n";
    let secrets = ["--", "--kubernetes-secrets"];
    let (code, _, error) = inject(&secrets, pod).await;
    assert!(code != 0 && error.contains("automountServiceAccountToken: false"), "{error}");
    let outcome = injected(&secrets, &pod.replace("  automountServiceAccountToken: false\n", "")).await;
    assert!(outcome.contains("--kubernetes-secrets"), "{outcome}");
    let named = [&secrets[..], &["--kubeconfig=/kube/config", "--clusters-dir=/clusters"]].concat();
    let (code, _, error) = inject(&named, pod).await;
    assert!(
        code != 0 && error.contains("--mount VOLUME=/kube") && error.contains("--mount VOLUME=/clusters"),
        "{error}"
    );
}

/// The exit code, standard output and standard error of `attache inject --node`.
async fn inject_node(options: &[&str], manifests: &str) -> (Option<i32>, String, String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("in.yaml");
    std::fs::write(&file, manifests).unwrap();
    let line = [&["inject", "--node"], options, &[file.to_str().unwrap()]].concat();
    let output = crate::support::process::output(&line).await;
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn each_kind_of_workload_gets_the_volume_of_the_nodes_agent_and_no_container() {
    let manifests = workloads();
    let options =
        ["--container=web", "--csi-attribute=key-type=ecdsa-p384", "--csi-driver-name=csi.example.com"];
    let (code, outcome, notes) = inject_node(&options, &manifests).await;
    assert_eq!(code, Some(0), "{notes}");
    assert!(notes.contains("volume of the node's agent added, socket in web"), "{notes}");
    assert_eq!(validate(&outcome).await, Ok(8));
    let (_, again, notes) = inject_node(&options, &outcome).await;
    assert_eq!(again, outcome, "a second injection changes nothing");
    assert!(notes.contains("volume of the node's agent unchanged"), "{notes}");
    for object in
        documents(&outcome).await.iter().filter(|object| object["kind"] != "Service" && object.is_object())
    {
        let spec = pod_spec(object).unwrap();
        assert_eq!(containers(spec).count(), 1, "{outcome}");
        let attributes = json!({ "key-type": "ecdsa-p384" });
        let csi = json!({ "driver": "csi.example.com", "readOnly": true, "volumeAttributes": attributes });
        assert_eq!(spec["volumes"], json!([{ "name": "attache-socket", "csi": csi }]));
        let path = "/var/run/secrets/workload-spiffe-uds";
        let mount = json!({ "name": "attache-socket", "mountPath": path, "readOnly": true });
        assert_eq!(spec["containers"][0]["volumeMounts"], json!([mount]));
    }
    // From a sidecar to the node's agent, and back.
    let with_sidecar = injected(&[&["--container=web"], &ISTIOD[..]].concat(), &manifests).await;
    let (code, moved, notes) = inject_node(&options, &with_sidecar).await;
    assert_eq!(code, Some(0), "{notes}");
    let found = documents(&moved).await;
    let spec = pod_spec(&found[0]).unwrap();
    assert_eq!((containers(spec).count(), spec["volumes"].as_array().unwrap().len()), (1, 1), "{moved}");
    let back = injected(&[&["--container=web"], &ISTIOD[..]].concat(), &moved).await;
    let found = documents(&back).await;
    assert!(pod_spec(&found[0]).unwrap()["volumes"][0]["emptyDir"].is_object(), "{back}");
}

#[tokio::test]
async fn istios_later_proxy_gets_the_volume_of_the_nodes_agent_in_the_place_of_its_own() {
    let pod = "\
apiVersion: v1
kind: Pod
metadata:
  name: web
  labels:
    sidecar.istio.io/inject: \"true\"
spec:
  containers:
    - name: web
      image: web
";
    let (code, outcome, notes) = inject_node(&[], pod).await;
    assert_eq!(code, Some(0), "{notes}");
    assert_eq!(validate(&outcome).await, Ok(1));
    let object = documents(&outcome).await.remove(0);
    let csi = json!({ "driver": "csi.attache.dev", "readOnly": true });
    assert_eq!(object["spec"]["volumes"], json!([{ "name": "workload-socket", "csi": csi }]));
    assert!(object["metadata"]["annotations"].is_null(), "the agent runs before the Pod starts");
    assert_eq!(inject_node(&[], &outcome).await.1, outcome);
    let (code, _, error) = inject_node(&["--container=web"], pod).await;
    assert!(code == Some(1) && error.contains("drop --container"), "{error}");
}

#[tokio::test]
async fn options_of_the_sidecar_are_refused_beside_the_nodes_agent() {
    let line = [
        "inject",
        "--node",
        "--image=a",
        "--run-as=5",
        "--csi-attribute=keytype=x",
        "-",
        "--",
        "--ca=embedded",
    ];
    let (code, error) = failure(&line).await;
    assert_eq!(code, 2, "{error}");
    for part in [
        "--image is for",
        "--run-as is for",
        "what stands behind -- is for",
        "keytype",
        "did you mean key-type?",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}
