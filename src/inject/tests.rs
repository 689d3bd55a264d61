use serde_json::{Value, json};

use super::workload::{CONTAINER_LISTS, path_of};
use super::yaml::Node;
use super::*;

fn sidecar() -> Sidecar {
    Sidecar {
        name: "attache".to_owned(),
        image: "attache:1".to_owned(),
        args: vec!["run".to_owned(), "--ca-address=istiod.istio-system.svc:15012".to_owned()],
        is_native: true,
        run_as: Some(1337),
        socket_dirs: vec!["/run/attache".to_owned()],
        socket: "/run/attache/sds.sock".to_owned(),
        is_open: false,
        admin_socket: Some("/run/attache/sds.sock.admin".to_owned()),
        status_port: Some(15055),
        containers: Vec::new(),
        volumes: vec![Volume {
            purpose: Purpose::Token,
            source: json!({ "projected": { "sources": [{ "serviceAccountToken": { "path": "t" } }] } }),
            path: "/var/run/secrets/tokens".to_owned(),
        }],
        mounts: Vec::new(),
        reads_service_account: false,
        node: None,
    }
}

/// A Deployment whose Pods have this spec, in a block.
fn deployment(spec: &str) -> String {
    let lines: String = spec.lines().map(|line| format!("      {line}\n")).collect();
    format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: web\nspec:\n  template:\n    spec:\n{lines}"
    )
}

fn pod(spec: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nspec: {spec}\n")
}

/// Manifests that have a place for a sidecar.
fn shapes() -> Vec<String> {
    let plain = deployment("containers:\n  - name: web\n    image: web:1\n  - name: envoy\n    image: envoy");
    let texts = [
        plain.clone(),
        plain.replace('\n', "\r\n"),
        plain.trim_end().to_owned(),
        format!("\u{feff}# Ünïcödé, before all\n{plain}"),
        format!("---\n{plain}...\n# between\n---\n{plain}---\n"),
        format!("%YAML 1.2\n---\n{plain}"),
        // Without indentation, with comments everywhere, with blank lines.
        deployment(
            "# of containers\ncontainers: # here\n# of web\n- name: web # its name\n\n  # of image\n  image: web\n\n# end",
        ),
        deployment("containers:\n    -   image: web\n        name: 'web'\n    -   name: \"b\""),
        deployment("containers:\n-\n  name: web\n-\n  name: envoy"),
        deployment("containers:\n- name: web"),
        deployment("containers:\n- name: |-\n    web\n\n"),
        deployment("initContainers:\n- name: one\ncontainers:\n- name: web\n  args:\n  - >-\n    a\n- name: two\n  x:\ny:"),
        deployment("initContainers:\n  # first\n  - name: one\nvolumes: []\ncontainers:\n  - {name: web, image: a}"),
        deployment("volumes:\ncontainers:\n  - name: web\n    volumeMounts:\n    ports:\n      - containerPort: 1"),
        deployment("volumes: ~\ninitContainers: null\ncontainers:\n  - name: web\n    volumeMounts: [ ]"),
        deployment(
            "volumes:\n  - name: a\n    emptyDir: {}\n\n  # b\n  - name: b\n    emptyDir: {}\n\n  # behind\nrestartPolicy: Always\n\
             containers:\n  - name: web\n    args:\n      - |\n        # no comment\n        text\n\n    volumeMounts:\n\
             \x20     - name: a\n        mountPath: |-\n          /a\n\n  # tail",
        ),
        // Anchors, aliases and tags elsewhere.
        deployment(
            "x: &x {a: 1}\ny: *x\ncontainers: &all\n  - &web\n    name: !!str web\n    env: *x\n    command: [\"a\", 'b',\n      c]",
        ),
        pod("{containers: [{name: web}]}"),
        pod("{ \"volumes\": [ {name: a, emptyDir: {}} ], 'containers': [ {name: web, volumeMounts: []}, ] }"),
        pod("\n  {\n    containers: [ # all\n      { name: web } , # the first\n      { name: envoy } # the last\n    ] # end\n  } # all"),
        pod("\n  {\n    containers: [\n      {\n        name: web,\n        image: a\n      }\n    ]\n  }"),
        "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"spec\": {\"containers\": [{\"name\": \"web\"}]}}".to_owned(),
        "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"spec\": {\"volumes\": [{\"name\": \"a\", \"emptyDir\": {}}], \
          \"containers\": [{\"name\": \"web\", \"volumeMounts\": [{\"name\": \"a\", \"mountPath\": \"/a\"}]}]}}"
            .to_owned(),
        "apiVersion: batch/v1\nkind: CronJob\nspec:\n  jobTemplate:\n    spec:\n      template:\n        spec:\n\
         \x20         restartPolicy: Never\n          containers:\n          - name: once\n"
            .to_owned(),
        "kind: List\napiVersion: v1\nitems:\n- apiVersion: v1\n  kind: Service\n- kind: Pod\n  apiVersion: v1\n  spec:\n    \
         containers:\n    - image: a\n      name: b\n- kind: Pod\n  apiVersion: v1\n  spec:\n    containers: [{name: b}]\n"
            .to_owned(),
        // An Envoy that mounts its own volume in the socket's directory.
        deployment(
            "volumes:\n- name: own\n  emptyDir: {}\ncontainers:\n- name: istio-proxy\n  volumeMounts:\n  - mountPath: /run/attache/\n\
             \x20   name: own",
        ),
    ];
    texts.into()
}

#[track_caller]
fn injected(text: &str, sidecar: &Sidecar) -> String {
    match inject(text, sidecar) {
        Ok(Injected { text, workloads, .. }) => {
            assert!(!workloads.is_empty());
            text
        }
        Err(problem) => panic!("{problem}\n{text}"),
    }
}

/// Whether `injected` is `text` with insertions.
fn is_within(text: &str, injected: &str) -> bool {
    let mut rest = injected.chars();
    text.chars().all(|c| rest.any(|other| other == c))
}

fn specs(text: &str) -> Vec<Value> {
    fn collect(object: &Node, specs: &mut Vec<Value>) {
        object.get("items").into_iter().flat_map(Node::items).for_each(|item| collect(item, specs));
        if let Some((_, path)) = path_of(object) {
            specs.push(path.iter().fold(object, |node, key| node.get(key).unwrap()).value());
        }
    }
    let mut specs = Vec::new();
    yaml::read(text).unwrap().iter().flatten().for_each(|object| collect(object, &mut specs));
    specs
}

#[test]
fn every_shape_gets_the_sidecar_and_keeps_all_other_bytes() {
    for native in [true, false] {
        let sidecar = Sidecar { is_native: native, ..sidecar() };
        for text in shapes() {
            if !native && ["Never", "istio-proxy"].iter().any(|word| text.contains(word)) {
                continue;
            }
            let out = injected(&text, &sidecar);
            if text.starts_with('{') {
                serde_json::from_str::<Value>(&out).unwrap_or_else(|error| panic!("{error}: {out}"));
            }
            // A list replaces null.
            let kept =
                text.replace("volumes: ~", "volumes: ").replace("initContainers: null", "initContainers: ");
            assert!(is_within(&kept, &out), "{text}\n{out}");
            let bare_ends = out.replace("\r\n", "").matches('\n').count();
            assert_eq!(bare_ends == 0, text.contains("\r\n") || !text.contains('\n'), "{out}");
            let (list, others) =
                if native { ("initContainers", "containers") } else { ("containers", "initContainers") };
            for spec in specs(&out) {
                let named = |list: &str| {
                    let items = spec[list].as_array().into_iter().flatten();
                    items.filter(|item| item["name"] == "attache").cloned().collect::<Vec<_>>()
                };
                let shared = spec["volumes"][0]["name"].as_str().filter(|name| *name == "own");
                let is_istio = shared.is_some();
                assert_eq!(named(list), [sidecar.container(&[shared], is_istio)], "{out}");
                assert_eq!(named(others), [json!(null); 0], "{out}");
                let volumes = spec["volumes"].as_array().unwrap();
                let volumes = volumes.iter().map(|volume| volume["name"].as_str().unwrap());
                let own = volumes.filter(|name| name.starts_with("attache-")).count();
                assert_eq!(own, 2 - usize::from(is_istio), "{out}");
            }
        }
    }
}

/// The specs, with volumes and mounts sorted, and without empty lists.
fn sorted(text: &str) -> Vec<Value> {
    fn sort(value: &mut Value) {
        if let Value::Object(fields) = value {
            fields
                .retain(|_, field| !field.is_null() && field.as_array().is_none_or(|list| !list.is_empty()));
            for (key, field) in fields {
                sort(field);
                if let Some(list) = field.as_array_mut().filter(|_| key.starts_with("volume")) {
                    list.sort_by_key(|item| item["name"].to_string());
                }
            }
        } else if let Value::Array(items) = value {
            items.iter_mut().for_each(sort);
        }
    }
    let mut specs = specs(text);
    specs.iter_mut().for_each(sort);
    specs
}

#[test]
fn a_second_injection_changes_nothing_and_other_options_change_only_the_sidecar() {
    let ordinary = Sidecar { is_native: false, ..sidecar() };
    let other = Sidecar {
        image: "attache:2".to_owned(),
        volumes: vec![
            Volume { purpose: Purpose::State, source: json!({ "emptyDir": {} }), path: "/state".to_owned() },
            Volume {
                purpose: Purpose::Output(0),
                source: json!({ "emptyDir": {} }),
                path: "/out".to_owned(),
            },
        ],
        ..sidecar()
    };
    let bare = Sidecar { volumes: Vec::new(), status_port: None, ..sidecar() };
    for text in shapes() {
        let needs_native = ["Never", "istio-proxy"].iter().any(|word| text.contains(word));
        let all = if needs_native { vec![&other, &bare] } else { vec![&ordinary, &other, &bare] };
        let first = injected(&text, &sidecar());
        assert_eq!(injected(&first, &sidecar()), first);
        for then in all {
            let second = injected(&first, then);
            if text.starts_with('{') {
                // From the most volumes to none: several items are removed at once.
                let least = injected(&second, &bare);
                for json in [&second, &least] {
                    serde_json::from_str::<Value>(json).unwrap_or_else(|error| panic!("{error}: {json}"));
                }
            }
            assert_eq!(injected(&second, then), second);
            // The result does not depend on an earlier sidecar.
            assert_eq!(sorted(&second), sorted(&injected(&text, then)), "{second}");
            let back = injected(&second, &sidecar());
            assert_eq!(sorted(&back), sorted(&first), "{back}");
        }
    }
}

#[test]
fn the_result_looks_written_by_hand() {
    let text = deployment(
        "# the Pod\ncontainers:\n  # the application\n  - name: envoy\n    image: envoy\n    ports:\n      - containerPort: 1",
    );
    let bare = Sidecar { volumes: Vec::new(), status_port: None, ..sidecar() };
    let expected = deployment(
        "initContainers:
  - name: attache
    image: \"attache:1\"
    restartPolicy: Always
    args:
      - run
      - --ca-address=istiod.istio-system.svc:15012
    securityContext:
      runAsNonRoot: true
      runAsUser: 1337
      runAsGroup: 1337
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop:
          - ALL
      seccompProfile:
        type: RuntimeDefault
    resources:
      requests:
        cpu: \"5m\"
        memory: \"16Mi\"
      limits:
        cpu: \"200m\"
        memory: \"64Mi\"
    volumeMounts:
      - name: attache-socket
        mountPath: /run/attache
volumes:
  - name: attache-socket
    emptyDir:
      medium: Memory
      sizeLimit: \"1Mi\"
# the Pod
containers:
  # the application
  - name: envoy
    image: envoy
    ports:
      - containerPort: 1
    volumeMounts:
      - name: attache-socket
        mountPath: /run/attache
        readOnly: true",
    );
    let expected = expected.replace("\"attache:1\"", "attache:1");
    assert_eq!(injected(&text, &bare), expected);
}

#[test]
fn objects_that_are_not_workloads_stay_unchanged() {
    for text in [
        "",
        "# nothing\n",
        "---\n---\n",
        "- a\n- b\n",
        "apiVersion: v1\nkind: Service\nspec: {containers: [{name: a}]}\n",
        "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\nspec: 1\n",
        "kind: Pod\n",
        "text: &a [1]\nmore: *a",
    ] {
        let outcome = inject(text, &sidecar()).unwrap();
        assert_eq!((outcome.text.as_str(), outcome.workloads, outcome.warnings), (text, vec![], vec![]));
        assert_eq!(outcome.others, text.matches("kind: ").count());
    }
}

#[test]
fn named_containers_get_the_socket_else_envoys_and_no_others() {
    let mounting = |text: &str, containers: &[&str]| {
        let containers = containers.iter().map(|name| (*name).to_owned()).collect();
        let out = injected(text, &Sidecar { containers, ..sidecar() });
        let spec = specs(&out).remove(0);
        let all =
            CONTAINER_LISTS.into_iter().flat_map(|list| spec[list].as_array().cloned().unwrap_or_default());
        let mounting = all.filter(|container| {
            container["name"] != "attache" && container["volumeMounts"][0]["name"] == "attache-socket"
        });
        mounting.map(|container| container["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let text = pod("{containers: [{name: a}, {name: b, image: x/envoy:1}], initContainers: [{name: c}]}");
    assert_eq!(mounting(&text, &[]), ["b"]);
    assert_eq!(mounting(&text, &["a", "c"]), ["c", "a"]);
    assert_eq!(mounting(&pod("{containers: [{name: a}, {name: b}]}"), &[]), [""; 0]);
    assert_eq!(mounting(&pod("{containers: [{name: a}, {name: b}]}"), &["b"]), ["b"]);
    for (container, is_envoy) in [
        ("{name: istio-proxy}", true),
        ("{name: envoy, image: 'edge:1'}", true),
        ("{name: a, image: 'envoyproxy/envoy:v1.36.0'}", true),
        ("{name: a, image: 'registry.example:5000/envoy-distroless@sha256:00'}", true),
        ("{name: a, image: cilium-envoy}", true),
        ("{name: a, image: 'envoyproxy/ratelimit:master'}", false),
        ("{name: a, image: 'envoyproxy/gateway:v1.5.0'}", false),
        ("{name: a, image: 'registry.example/tools:envoy'}", false),
        ("{name: wait-for-envoy, image: busybox}", false),
    ] {
        let found = mounting(&pod(&format!("{{containers: [{container}, {{name: web}}]}}")), &[]);
        assert_eq!(found.len(), usize::from(is_envoy), "{container}");
    }
    // A container that is no longer selected loses the socket.
    let once = injected(&text, &sidecar());
    assert_eq!(mounting(&once, &["a"]), ["a"]);
}

#[test]
fn an_obstacle_is_reported_with_its_line() {
    let named = Sidecar { containers: vec!["envoy".to_owned()], ..sidecar() };
    let mounts = Sidecar { mounts: vec![("root".to_owned(), "/root".to_owned())], ..sidecar() };
    let ordinary = Sidecar { is_native: false, ..sidecar() };
    let merge = "base: &b {volumeMounts: []}\ncontainers:\n- <<: *b\n  name: web";
    let double = "volumes: &v []\nmore: *v\ncontainers: [{name: a}]";
    for (text, sidecar, line, expected) in [
        ("a: [".to_owned(), sidecar(), 2, "not YAML"),
        ("a: 1\n\tb: 2\n".to_owned(), sidecar(), 1, "not YAML"),
        ("a: {{ .Values.x }}\nb: {{- if }}\n".to_owned(), sidecar(), 2, "template"),
        (format!("a: 1\n---\n{}x", "[".repeat(200)), sidecar(), 3, "deep"),
        (pod("{}"), sidecar(), 3, "no container that"),
        (pod("{containers: 1}"), sidecar(), 3, "not a list"),
        (pod("{containers: []}"), sidecar(), 3, "no container that"),
        ("apiVersion: apps/v1\nkind: Deployment\n".to_owned(), sidecar(), 1, "no spec.template.spec"),
        (deployment(merge), sidecar(), 10, "merge"),
        (deployment(double), sidecar(), 8, "alias"),
        (format!("x: &s {{containers: []}}\n{}", pod("*s")), sidecar(), 4, "alias"),
        (pod("{containers: [{name: a}], containers: [{name: a}]}"), sidecar(), 3, "duplicate key"),
        (pod("{containers: [{name: web}]}"), named, 3, "are web"),
        (pod("{containers: [{name: web}]}"), mounts, 3, "no volume"),
        (pod("{restartPolicy: Never, containers: [{name: web}]}"), ordinary, 3, "--native=false"),
        (
            pod("{automountServiceAccountToken: false, containers: [{name: web}]}"),
            Sidecar { reads_service_account: true, ..sidecar() },
            3,
            "Kubernetes does not mount",
        ),
        (pod("{volumes: , containers: [{name: web}]}"), sidecar(), 3, "no place"),
        (
            deployment("containers:\n- name: a\n  x: |\n    text").trim_end().to_owned(),
            Sidecar { is_native: false, ..self::sidecar() },
            11,
            "newline",
        ),
    ] {
        let problem = inject(&text, &sidecar).expect_err(&text);
        assert!(problem.to_string().contains(expected), "{problem}\n{text}");
        assert_eq!(problem.line, line, "{problem}\n{text}");
    }
}

/// The error of an injection into `text`.
#[track_caller]
fn refusal(text: &str, sidecar: &Sidecar) -> String {
    inject(text, sidecar).expect_err(text).to_string()
}

fn at_istios_path() -> Sidecar {
    let dir = "/var/run/secrets/workload-spiffe-uds";
    Sidecar { socket_dirs: vec![dir.to_owned()], socket: format!("{dir}/socket"), ..sidecar() }
}

#[test]
fn if_istio_injects_its_proxy_later_the_socket_is_in_the_volume_that_the_proxy_mounts() {
    let sidecar = at_istios_path();
    let pod = |metadata: &str, spec: &str| {
        format!(
            "kind: Pod\napiVersion: v1\nmetadata: # here\n{metadata}spec:\n  containers:\n  - name: web\n{spec}"
        )
    };
    let volume = "  volumes:\n  - name: workload-socket\n    emptyDir: {medium: Memory}\n";
    let label = "  labels:\n    sidecar.istio.io/inject: \"true\"\n  # end\n";
    for (metadata, spec) in [
        (label, ""),
        (label, volume),
        ("  annotations:\n    sidecar.istio.io/inject: 'true'\n", ""),
        ("  labels: {istio.io/rev: canary}\n  annotations: {}\n", ""),
        ("  annotations:\n    sidecar.istio.io/nativeSidecar: \"false\"\n    x: y\n", ""),
        ("  name: web\n", volume),
        (label, "  - name: istio-proxy\n    image: auto\n"),
    ] {
        let text = pod(metadata, spec);
        let out = injected(&text, &sidecar);
        assert!(is_within(&text, &out), "{out}");
        assert_eq!(injected(&out, &sidecar), out);
        let object = yaml::read(&out).unwrap().remove(0).unwrap().value();
        assert_eq!(object["metadata"]["annotations"]["sidecar.istio.io/nativeSidecar"], "false", "{out}");
        let names = |list: &Value| -> Vec<String> {
            list.as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names(&object["spec"]["volumes"]), ["workload-socket", "attache-token"], "{out}");
        let agent = &object["spec"]["initContainers"][0];
        assert_eq!(names(&agent["volumeMounts"]), ["workload-socket", "attache-token"], "{out}");
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            assert_eq!(agent[probe]["exec"]["command"][0], "/attache", "{out}");
        }
        assert_eq!(object["spec"]["containers"][0].get("volumeMounts"), None, "{out}");
    }
    // No mark of Istio's, or one that prevents its injection.
    let own = "  labels: {sidecar.istio.io/inject: \"false\", istio.io/rev: canary}\n";
    for metadata in ["  name: web\n", own] {
        assert!(injected(&pod(metadata, ""), &sidecar).contains("attache-socket"));
    }

    // A gateway, which looks for a second socket.
    let both = Sidecar {
        socket_dirs: ["workload-spiffe-uds", "credential-uds"]
            .map(|dir| format!("/var/run/secrets/{dir}"))
            .into(),
        ..sidecar.clone()
    };
    let gateway = "  volumes:\n  - name: credential-socket\n    emptyDir: {}\n";
    for spec in ["", gateway] {
        let text = pod(label, spec);
        let out = injected(&text, &both);
        assert_eq!(injected(&out, &both), out);
        let spec = specs(&out).remove(0);
        let mut names: Vec<_> = spec["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|volume| volume["name"].as_str().unwrap())
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["attache-token", "credential-socket", "workload-socket"], "{out}");
        let mounts = &spec["initContainers"][0]["volumeMounts"];
        assert_eq!(
            mounts[1],
            json!({ "name": "credential-socket", "mountPath": "/var/run/secrets/credential-uds" })
        );
    }

    let text = pod(label, "");
    let native =
        "  annotations: {sidecar.istio.io/nativeSidecar: \"true\", sidecar.istio.io/inject: \"true\"}\n";
    for (text, sidecar, expected) in [
        (text.clone(), self::sidecar(), "leave --socket out"),
        (text.clone(), Sidecar { is_native: false, ..sidecar.clone() }, "drop --native=false"),
        (text.clone(), Sidecar { containers: vec!["web".to_owned()], ..sidecar.clone() }, "drop --container"),
        (pod(native, ""), sidecar.clone(), "is not \"false\""),
        (pod(&format!("{label}  annotations:\n"), ""), sidecar.clone(), "annotations is empty"),
        (text.replace("metadata: # here\n", "").replace(label, "") + volume, sidecar.clone(), "no metadata"),
    ] {
        let refusal = refusal(&text, &sidecar);
        assert!(refusal.contains(expected), "{refusal}");
    }
}

#[test]
fn each_directory_with_a_socket_is_a_volume_of_agent_and_envoy() {
    let dirs = ["/run/a", "/run/attache", "/run/c"].map(str::to_owned);
    let sidecar = Sidecar { socket_dirs: dirs.into(), ..sidecar() };
    let text = deployment(
        "volumes:\n- name: own\n  emptyDir: {}\ncontainers:\n- name: envoy\n  volumeMounts:\n  - mountPath: /run/attache/\n\
         \x20   name: own",
    );
    let out = injected(&text, &sidecar);
    assert_eq!(injected(&out, &sidecar), out);
    let spec = specs(&out).remove(0);
    let names = |list: &Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        names(&spec["volumes"]),
        ["own", "attache-socket", "attache-socket-2", "attache-token"],
        "{out}"
    );
    let agent = names(&spec["initContainers"][0]["volumeMounts"]);
    assert_eq!(agent, ["attache-socket", "own", "attache-socket-2", "attache-token"], "{out}");
    assert_eq!(
        names(&spec["containers"][0]["volumeMounts"]),
        ["own", "attache-socket", "attache-socket-2"],
        "{out}"
    );
    // With fewer sockets the others' volumes go.
    let one = Sidecar { socket_dirs: vec!["/run/attache".to_owned()], ..sidecar };
    assert!(!injected(&out, &one).contains("attache-socket"), "{}", injected(&out, &one));
}

#[test]
fn a_native_sidecar_stands_before_the_proxy_that_needs_it() {
    let sidecar = sidecar();
    for text in [
        deployment(
            "initContainers:\n- name: one\n- name: istio-proxy\n  restartPolicy: Always\n- name: attache\n  image: old\n- name: two\n\
             containers:\n- name: web",
        ),
        pod(
            "{containers: [{name: web}], initContainers: [{name: one}, {name: istio-proxy}, {name: two}, {name: attache}]}",
        ),
    ] {
        let out = injected(&text, &sidecar);
        let spec = specs(&out).remove(0);
        let names: Vec<_> =
            spec["initContainers"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["attache", "one", "istio-proxy", "two"], "{out}");
        assert_eq!(injected(&out, &sidecar), out);
        let ordinary = Sidecar { is_native: false, ..sidecar.clone() };
        assert!(refusal(&out, &ordinary).contains("drop --native=false"));
    }
}

#[test]
fn the_users_own_volumes_and_mounts_stay() {
    let output =
        Volume { purpose: Purpose::Output(0), source: json!({ "emptyDir": {} }), path: "/out".to_owned() };
    let sidecar = Sidecar { volumes: vec![output], ..sidecar() };
    let map = "volumes:\n- name: attache-ca\n  configMap: {name: ca}\n";
    let web = "containers:\n- name: web\n  volumeMounts:\n  - name: attache-ca\n    mountPath: /ca\n";
    for text in [
        deployment(&format!("{map}{web}")),
        deployment(&format!("{map}{web}- name: attache\n")),
        deployment(&format!("volumes: [{{name: attache-output, emptyDir: {{}}}}]\n{web}")),
    ] {
        let refusal = refusal(&text, &sidecar);
        assert!(refusal.contains("of its own; rename it, or give the sidecar another --name"), "{refusal}");
    }
    // A mount of the output that was written by hand stays.
    let text = deployment(
        "containers:\n- name: envoy\n- name: web\n  volumeMounts:\n  - name: attache-output\n    mountPath: /here\n  - name: \
         attache-ca\n    mountPath: /ca",
    );
    let out = injected(&text, &sidecar);
    let mounts = specs(&out).remove(0)["containers"][1]["volumeMounts"].clone();
    let names: Vec<_> = mounts.as_array().unwrap().iter().map(|mount| &mount["name"]).collect();
    assert_eq!(names, ["attache-output", "attache-ca"]);
    assert_eq!(injected(&out, &sidecar), out);
    // One whose volume goes cannot stay.
    let without = injected(&out, &Sidecar { volumes: Vec::new(), ..sidecar.clone() });
    let mut other = sidecar;
    other.volumes.extend(other.volumes.clone());
    other.volumes[0].purpose = Purpose::Output(1);
    let fewer =
        injected(&injected(&text, &other), &Sidecar { volumes: vec![other.volumes.remove(0)], ..other });
    for out in [without, fewer] {
        let mounts = specs(&out).remove(0)["containers"][1]["volumeMounts"].clone();
        let names: Vec<_> = mounts.as_array().unwrap().iter().map(|mount| &mount["name"]).collect();
        assert_eq!(names, ["attache-ca"], "{out}");
    }
}

#[test]
fn two_agents_do_not_serve_on_one_socket() {
    let second = Sidecar { name: "second".to_owned(), ..sidecar() };
    for text in [pod("{containers: [{name: envoy}]}"), pod("{containers: [{name: envoy}, {name: web}]}")] {
        let refusal = refusal(&injected(&text, &sidecar()), &second);
        assert!(refusal.contains("give --name attache"), "{refusal}");
        let elsewhere = Sidecar { socket_dirs: vec!["/run/second".to_owned()], ..second.clone() };
        injected(&injected(&text, &sidecar()), &elsewhere);
    }
}

#[test]
fn the_liveness_probe_calls_the_admin_socket_or_is_omitted() {
    let text = pod("{containers: [{name: istio-proxy}]}");
    let probes = |sidecar: &Sidecar| {
        let container = specs(&injected(&text, sidecar)).remove(0)["initContainers"][0].clone();
        ["startupProbe", "livenessProbe"].map(|probe| container[probe]["exec"]["command"].clone())
    };
    let get = json!(["/attache", "get", "--timeout=500ms", "--socket=/run/attache/sds.sock"]);
    let log = json!(["/attache", "log", "--admin-socket=/run/attache/sds.sock.admin"]);
    assert_eq!(probes(&sidecar()), [get.clone(), log.clone()]);
    // The proxy starts after the agent, with or without a status port.
    assert_eq!(probes(&Sidecar { status_port: None, ..sidecar() }), [get.clone(), log]);
    assert_eq!(probes(&Sidecar { admin_socket: None, ..sidecar() }), [get, Value::Null]);
}

/// The warnings about a Pod with this spec, one on each line.
fn warnings(spec: &str, sidecar: &Sidecar) -> String {
    let warnings = inject(&pod(spec), sidecar).unwrap_or_else(|problem| panic!("{problem}: {spec}")).warnings;
    warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_container_that_is_not_known_to_run_as_the_agents_user_is_a_warning() {
    let sidecar = sidecar();
    let own = "document 1, line 3: container envoy runs as user 101 and can't open the socket of user 1337: give --run-as 101";
    let switched = "document 1, line 3: container envoy runs as user 101, to which the entry point of its image switches, and \
                    can't open the socket of user 1337: set runAsUser: 1337 in its securityContext, or give --run-as 101";
    let unknown = "document 1, line 3: container envoy runs as the user of its image, which may be unable to open the socket of \
                   user 1337: set runAsUser: 1337 in its securityContext, or give --run-as with the image's user";
    let unreadable = "has its user in an alias or a merge key";
    // The container's other fields, the Pod's securityContext, and the warning.
    for (container, context, expected) in [
        ("securityContext: {runAsUser: 101}", "{}", own),
        ("x: y", "{runAsUser: 101, runAsGroup: 5}", own),
        ("securityContext: {}", "{}", unknown),
        ("image: 'edge:1'", "{}", unknown),
        ("image: 'envoyproxy/envoy:distroless-v1.36.0'", "{}", unknown),
        ("image: envoyproxy/envoy-distroless", "{}", unknown),
        ("image: 'envoyproxy/envoy:v1.36.0'", "{}", switched),
        ("image: mirror.example/envoyproxy/envoy-contrib, args: [-c, /a]", "{runAsUser: 0}", switched),
        // The entry point drops the groups of the Pod, and its own.
        ("image: envoyproxy/envoy", "{fsGroup: 7, supplementalGroups: [1337]}", switched),
        ("image: envoyproxy/envoy, securityContext: {runAsGroup: 1337}", "{}", switched),
        (
            "image: envoyproxy/envoy, env: [{name: ENVOY_UID, valueFrom: {}}]",
            "{}",
            "switches to the user in ENVOY_UID and ENVOY_GID, which are not known here",
        ),
        ("image: envoyproxy/envoy, env: [{name: ENVOY_UID, value: '7'}]", "{}", "runs as user 7, to which"),
        ("x: &x {runAsUser: 5}, securityContext: *x", "{runAsUser: 1337}", unreadable),
        ("x: &x {runAsUser: 5}, securityContext: {<<: *x}", "{}", unreadable),
        // Able to open the socket:
        ("securityContext: {runAsUser: 1337}", "{runAsUser: 101}", ""),
        ("image: envoyproxy/envoy, securityContext: {runAsUser: 1337}", "{}", ""),
        ("image: envoyproxy/envoy, env: [{name: ENVOY_UID, value: '1337'}]", "{}", ""),
        ("image: envoyproxy/envoy, env: [{name: ENVOY_GID, value: '1337'}]", "{}", ""),
        ("image: envoyproxy/envoy, env: [{name: ENVOY_UID, value: '0'}]", "{}", ""),
        ("image: envoyproxy/envoy, command: [envoy]", "{fsGroup: 7}", ""),
        ("x: y", "{runAsUser: 1337}", ""),
        ("securityContext: {runAsUser: 101, runAsGroup: 1337}", "{}", ""),
        ("securityContext: {runAsUser: 0}", "{}", ""),
        ("securityContext: {runAsUser: 101}", "{fsGroup: 7}", ""),
        ("x: y", "{fsGroup: 7}", ""),
        ("securityContext: {runAsUser: 101}", "{supplementalGroups: [7, 1337]}", ""),
        ("x: &x {runAsUser: 5}, securityContext: {runAsUser: 1337, <<: *x}", "{}", ""),
    ] {
        let spec = format!(
            "{{securityContext: {context}, containers: [{{name: envoy, {container}}}, {{name: web}}]}}"
        );
        let found = warnings(&spec, &sidecar);
        assert!(found == expected || (found.contains(expected) && !expected.is_empty()), "{spec}: {found}");
    }
    let bare = "{containers: [{name: envoy}]}";
    for other in [Sidecar { run_as: None, ..sidecar.clone() }, Sidecar { is_open: true, ..sidecar.clone() }] {
        assert_eq!(warnings(bare, &other), "");
    }
    assert_eq!(
        warnings(
            "{containers: [{name: e, image: envoyproxy/envoy}]}",
            &Sidecar { run_as: Some(101), ..sidecar }
        ),
        ""
    );
}

#[test]
fn likely_failures_are_warnings() {
    let sidecar = sidecar();
    let node = warnings("{hostNetwork: true, containers: [{name: web}]}", &sidecar);
    assert!(node.contains("the agent takes port 15055 on the node"), "{node}");
    let unused = warnings("{containers: [{name: web}, {name: sql}]}", &sidecar);
    let expected = "document 1, line 3: no container gets the socket, since none of web, sql is an Envoy by its name or \
                    image; name those that get it with --container";
    assert_eq!(unused, expected);
    // The proxy is not there yet.
    let later = "apiVersion: v1\nkind: Pod\nmetadata: {labels: {istio.io/rev: a}}\nspec: {containers: [{name: web}]}\n";
    assert_eq!(inject(later, &at_istios_path()).unwrap().warnings, []);
}

#[test]
fn each_workload_has_a_line_that_says_what_was_done() {
    let lines = |text: &str, sidecar: &Sidecar| {
        let injected = inject(text, sidecar).unwrap();
        let lines: Vec<_> = injected.workloads.iter().map(ToString::to_string).collect();
        (lines.join("\n"), injected.others, injected.text)
    };
    let text = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service}\n- apiVersion: v1\n  kind: Pod\n  metadata: \
                {name: web, namespace: shop}\n  spec:\n    containers:\n    - name: envoy\n    - name: istio-proxy\n---\n\
                apiVersion: batch/v1\nkind: Job\nmetadata: {generateName: once-}\nspec: {template: {spec: {containers: [{name: a}]}}}\n";
    let (first, others, out) = lines(text, &sidecar());
    let expected = "Pod shop/web: sidecar attache added, socket in envoy, istio-proxy, volumes attache-token\n\
                    Job once-: sidecar attache added, socket in no container, volumes attache-token";
    assert_eq!((first.as_str(), others), (expected, 1));
    let again = lines(&out, &sidecar()).0;
    assert_eq!(again, expected.replace("added", "unchanged"));
    let other = Sidecar { image: "attache:2".to_owned(), volumes: Vec::new(), ..sidecar() };
    let updated = expected.replace("added", "updated").replace(", volumes attache-token", "");
    assert_eq!(lines(&out, &other).0, updated);
    let later = "apiVersion: v1\nkind: Pod\nmetadata: {labels: {istio.io/rev: a}}\nspec: {containers: [{name: web}]}\n";
    let line = lines(later, &at_istios_path()).0;
    assert!(
        line.starts_with(
            "Pod without a name: sidecar attache added, socket for the proxy that Istio injects"
        ),
        "{line}"
    );
}

#[test]
fn a_document_without_a_place_is_named() {
    let sidecar = Sidecar { is_native: false, ..sidecar() };
    let text = format!(
        "{}---\n{}",
        pod("{containers: [{name: a}]}"),
        pod("{containers: [\n  name: envoy # behind\n]}")
    );
    let problem = inject(&text, &sidecar).unwrap_err();
    assert_eq!((problem.document, problem.line), (2, 5), "{problem}");
}

#[test]
fn json_is_taken_with_every_escape_that_json_has() {
    let sidecar = sidecar();
    for value in [
        r#""\ud83d\ude80""#,
        r#""\uD83D\uDE80 \ud83d\ude80\ud83d\ude80é\\ud83d\\ude80 \\\ud83d\ude80""#,
        r#""\u0041\u00e9\u2028\"\\\/\b\f\n\r\t""#,
        r#""\\ud83d\ude80""#.replace(r"\ude80", r"\\ude80").as_str(),
        "\"\u{1f680}\"",
    ] {
        for text in [
            format!(
                "{{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {{\"annotations\": {{\"a\": {value}}}}}, \"spec\": \
                 {{\"containers\": [{{\"name\": \"envoy\", \"env\": [{{\"name\": \"X\", \"value\": {value}}}]}}]}}}}"
            ),
            format!(
                "{{\n\t\"kind\": \"List\",\n\t\"apiVersion\": \"v1\",\n\t\"items\": [\n\t\t{{\n\t\t\t\"x\": {value},\n\t\t\t\"apiVersion\": \"v1\", \
                 \"kind\": \"Pod\", \"spec\": {{\"containers\": [{{\"name\": \"envoy\"}}]}}\n\t\t}}\n\t]\n}}\n"
            ),
        ] {
            let before: Value = serde_json::from_str(&text).unwrap();
            let out = injected(&text, &sidecar);
            let after: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"));
            assert!(is_within(&text, &out), "{out}");
            assert_eq!(after["metadata"], before["metadata"]);
            assert_eq!(after["items"][0]["x"], before["items"][0]["x"]);
            assert_eq!(
                after["spec"]["containers"][0]["env"], before["spec"]["containers"][0]["env"],
                "{out}"
            );
            assert_eq!(injected(&out, &sidecar), out);
        }
    }
    // Kubernetes reads YAML as YAML, where half a character is a mistake.
    let yaml = "x: \"\\ud83d\\ude80\"\n";
    assert!(refusal(yaml, &sidecar).contains("not YAML"));
    let text = "kind: List # \\ud83d\\ude80\n";
    assert_eq!(inject(text, &sidecar).unwrap().text, text);
}
