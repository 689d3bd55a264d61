//! `attache check`: its findings on a working set-up, and on each kind of mistake.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood, Tls};
use crate::support::files::{Mounted, spiffe, token, write_token};
use crate::support::kube_cluster::{Draft, KubeCluster, Rule};
use crate::support::process::{Agent, Ca, PATIENCE, attache, strs};

/// The findings as lines `STATE ABOUT: TEXT`, the exit code, and standard error.
async fn check(options: &[&str], environment: &[(&str, &str)]) -> (Vec<String>, i32, String) {
    let mut command = attache(&[&["check", "--output", "json"], options].concat());
    command.envs(environment.iter().copied());
    let output =
        tokio::time::timeout(PATIENCE, command.output()).await.expect("attache check does not exit").unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let findings: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Array(Vec::new()));
    let text = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    let line = |one: &Value| format!("{} {}: {}", text(one, "state"), text(one, "about"), text(one, "text"));
    (findings.as_array().unwrap().iter().map(line).collect(), output.status.code().unwrap(), error)
}

fn has(findings: &[String], start: &str, words: &str) {
    let found = findings.iter().any(|line| line.starts_with(start) && line.contains(words));
    assert!(found, "{start} … {words}:\n{findings:#?}");
}

#[tokio::test]
async fn a_good_set_up_is_ok_and_nothing_is_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (socket, ca_dir) = (path("sds.sock"), path("ca"));
    let options = ["--socket", &socket, "--cert-dir", &path("none"), "--status-address", "none"];
    let embedded = [&options[..], &["--ca", "embedded", "--ca-dir", &ca_dir]].concat();
    let (findings, code, error) = check(&embedded, &[]).await;
    assert_eq!((code, error.as_str()), (0, ""), "{findings:#?}");
    assert!(findings.iter().all(|line| line.starts_with("ok ")), "{findings:#?}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is made");

    // A real CA over TLS, with a real call.
    let ca = Ca::start(directory.path()).await;
    let jwt = path("token");
    write_token(jwt.as_ref(), &token("web", "istio-ca", 3600));
    let root = format!("{ca_dir}/root-cert.pem");
    let with_ca = [
        "--issue",
        "--ca-address",
        &ca.address.to_string(),
        "--ca-root",
        &root,
        "--token-file",
        &jwt,
        "--state-dir",
        &path("state"),
    ];
    let (findings, code, error) = check(&[&options[..], &with_ca].concat(), &[]).await;
    assert_eq!((code, error.as_str()), (0, ""), "{findings:#?}");
    has(&findings, "ok CA", "its certificate is valid");
    has(&findings, "ok token", "audience [istio-ca], valid until");
    has(&findings, "ok identity", &spiffe("web"));
    has(&findings, "ok issuance", &spiffe("web"));
    assert!(findings.iter().all(|line| line.starts_with("ok ")), "{findings:#?}");
    assert!(!directory.path().join("state").exists(), "what is for the agent alone is left alone");
    assert!(!directory.path().join("sds.sock").exists());
}

#[tokio::test]
async fn each_mistake_is_named_with_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let ca = FakeCa::start_tls(directory.path(), &spiffe("web"), Tls::Never).await;
    std::fs::write(path("old"), token("web", "istio-ca", -60)).unwrap();
    std::fs::write(path("other"), token("web", "vault", 3600)).unwrap();
    std::fs::write(path("good"), token("web", "istio-ca", 3600)).unwrap();
    Mounted::new(&directory.path().join("another-ca"), "web").write(&directory.path().join("certs"));
    std::fs::remove_file(directory.path().join("certs/key.pem")).unwrap();
    std::fs::write(path("crl"), "no CRL").unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let address = format!("https://{}", ca.address);
    let another = path("another-ca/root-cert.pem");
    let cases: [(&[&str], &str, &str); 11] = [
        (&["--socket", &path("no/sds.sock")], "error socket", "create or mount it"),
        (&["--socket", &path("good")], "error socket", "is not a socket: remove it"),
        (&["--status-address", &taken], "error status address", "choose another --status-address"),
        (&["--cert-dir", &path("certs")], "error mounted files", "key.pem"),
        (&["--crl", &path("crl")], "error CRLs", &path("crl")),
        (&["--crl", &path("no-crl")], "warning CRLs", "revoked certificates are accepted"),
        (&["--token-file", &path("none")], "error token", "--token-file"),
        (&["--token-file", &path("old")], "error token", "EXPIRED"),
        (&["--token-file", &path("other")], "warning token", "a token for the audience istio-ca"),
        (&["--ca-root", &another], "error CA", "set --ca-root to its root"),
        (&["--output-dir", &path("good/below")], "error directories", "is not a directory; fix that"),
    ];
    let base = [
        ("--socket", path("sds.sock")),
        ("--status-address", "none".to_owned()),
        ("--cert-dir", path("none")),
        ("--token-file", path("good")),
        ("--ca-root", "system".to_owned()),
        ("--ca-address", address.clone()),
    ];
    for (options, start, words) in cases {
        let rest = base.iter().filter(|(option, _)| !options.contains(option));
        let mut line = options.to_vec();
        line.extend(rest.flat_map(|(option, value)| [*option, value.as_str()]));
        let (findings, code, error) = check(&line, &[]).await;
        has(&findings, start, words);
        // The CA's root is not one of the system's: here that is always an error.
        assert!(code == 1 && error.contains("error"), "{line:?}: {code} {error}");
    }
    assert!(ca.calls().is_empty(), "no certificate is asked for");
    let base: Vec<_> = base.iter().flat_map(|(option, value)| [*option, value.as_str()]).collect();
    let page = ["--admin-address", &taken, "--ready-file", &path("no/ready")];
    let (findings, ..) = check(&[&base[..], &page].concat(), &[]).await;
    has(&findings, "error status page", "choose another --admin-address");
    has(&findings, "error directories", "create or mount it");
    let admin = ["--admin-socket", &path("no/admin.sock"), "--ready-file", &path("crl")];
    let (findings, ..) = check(&[&base[..], &admin].concat(), &[]).await;
    has(&findings, "error directories", "is not the ready file of an agent");
    has(&findings, "error admin socket", "create or mount it");
    std::fs::write(directory.path().join("another-ca/ca-key.pem"), "no key").unwrap();
    let broken = ["--ca", "embedded", "--socket", &path("sds.sock"), "--ca-dir", &path("another-ca")];
    let (findings, code, _) = check(&broken, &[]).await;
    has(&findings, "error CA", "ca-key.pem");
    assert_eq!(code, 1);
    let broken = [
        "--ca",
        "cfssl",
        "--ca-address",
        &address,
        "--cfssl-bundle",
        &path("crl"),
        "--socket",
        &path("sds.sock"),
    ];
    let (findings, ..) = check(&broken, &[]).await;
    has(&findings, "error files", "--cfssl-bundle");
    let _other = std::os::unix::net::UnixListener::bind(path("other.sock")).unwrap();
    let foreign = ["--ca", "embedded", "--socket", &path("other.sock")];
    let (findings, ..) = check(&foreign, &[]).await;
    has(&findings, "warning socket", "has not answered within 2s");
    let other = std::os::unix::net::UnixListener::bind(path("http.sock")).unwrap();
    std::thread::spawn(move || {
        for mut stream in other.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let foreign = ["--ca", "embedded", "--socket", &path("http.sock")];
    let (findings, code, _) = check(&foreign, &[]).await;
    has(&findings, "error socket", "is not an attache agent");
    assert_eq!(code, 1);
    let both = ["--status-address", "127.0.0.1:9", "--admin-address", "0.0.0.0:9"];
    let (_, code, error) = check(&[&base[..2], &["--ca", "embedded"], &both].concat(), &[]).await;
    assert!(code == 2 && error.contains("a port of its own"), "{code} {error}");
    let open = path("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (findings, ..) = check(&[&base[..], &["--state-dir", &open]].concat(), &[]).await;
    has(&findings, "warning modes", "remove that right");
    let (_, code, error) = check(&["--ca", "embedded", "--bogus", "--cert-ttl", "soon"], &[]).await;
    assert!(code == 2 && error.contains("--bogus") && error.contains("soon"), "{code} {error}");
}

#[tokio::test]
async fn check_recognizes_a_running_agent_and_what_pods_need() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let client = ca.client(directory.path());
    let agent = Agent::ready(directory.path(), "web", &strs(&client)).await;
    let socket = agent.socket.to_str().unwrap();
    let mut line = strs(&client);
    line.extend(["--socket", socket, "--cert-dir", "/nowhere"]);
    let (findings, code, error) = check(&line, &[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]).await;
    assert_eq!((code, error.as_str()), (0, ""), "{findings:#?}");
    has(&findings, "ok socket", &format!("process {}", agent.process.pid().as_raw_nonzero()));
    has(&findings, "warning peers", "1337");
    has(&findings, "warning status address", "--status-address 0.0.0.0:15055");
    has(&findings, "warning options", "in plain text");
    let limited = [&line[..], &["--allow-uid", "7", "--socket-mode", "0666"]].concat();
    let (findings, ..) = check(&limited, &[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]).await;
    has(&findings, "warning peers", "only users [7]");
    line.extend(["--socket-mode", "0666", "--status-address", "0.0.0.0:0", "--issue"]);
    let (findings, ..) = check(&line, &[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]).await;
    has(&findings, "warning peers", "lets every user connect and get the workload's key");
    has(&findings, "ok status address", "0.0.0.0:0");
    has(&findings, "ok issuance", &spiffe("web"));
    ca.set(Mood::Refuse(Code::PermissionDenied));
    let (findings, code, _) = check(&line, &[]).await;
    has(&findings, "error issuance", "PermissionDenied");
    assert_eq!(code, 1);
}

#[tokio::test]
async fn outputs_are_checked_with_their_passwords() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(path("good"), "secret\n").unwrap();
    std::fs::write(path("bad"), "").unwrap();
    let output =
        |name: &str| format!("{},format=pkcs12,password-file={}", path(&format!("out-{name}")), path(name));
    let [good, bad, missing] = ["good", "bad", "missing"].map(output);
    let fixed = ["--socket", &path("sds.sock"), "--cert-dir", &path("none"), "--status-address", "none"];
    let ca = ["--ca", "embedded", "--ca-dir", &path("ca")];
    let outputs = ["--output", &good, "--output", &bad, "--output", &missing];
    let (findings, code, _) = check(&[&fixed[..], &ca, &outputs].concat(), &[]).await;
    assert_eq!(code, 1, "{findings:#?}");
    has(&findings, "ok directories", &format!("--output {} is writable", path("out-good")));
    has(
        &findings,
        "ok directories",
        &format!("password-file of --output {}: it holds a password", path("out-good")),
    );
    has(&findings, "error directories", &format!("{}: it holds no password on its first line", path("bad")));
    has(&findings, "error directories", &format!("{}: No such file", path("missing")));
}

#[tokio::test]
async fn the_api_servers_that_secrets_come_from_are_called() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let home = KubeCluster::start(directory.path(), "home").await;
    let token = home.account("shop", "gateway");
    let kubeconfig = home.write_kubeconfig(&token).display().to_string();
    let (socket, none) = (path("sds.sock"), path("none"));
    let common =
        ["--socket", &socket, "--cert-dir", &none, "--status-address", "none", "--kubernetes-secrets"];
    let check = async |more: &[&str]| check(&[&common[..], more].concat(), &[]).await;
    let own = ["--kubeconfig", &kubeconfig, "--namespace", "shop"];

    let (findings, code, error) = check(&own).await;
    assert_eq!((code, error.as_str()), (0, ""), "{findings:#?}");
    has(&findings, "ok API server", "it knows the agent as system:serviceaccount:shop:gateway");
    has(&findings, "ok Secrets", "the namespace shop");

    // Remote clusters: no right, then one.
    let east = KubeCluster::start(directory.path(), "east").await;
    let good = east.kubeconfig(&east.account("istio-system", "reader"));
    let clusters = path("clusters");
    std::fs::create_dir(&clusters).unwrap();
    std::fs::write(format!("{clusters}/east"), &good).unwrap();
    std::fs::write(format!("{clusters}/plugin"), east.kubeconfig_of(&json!({ "exec": { "command": "x" } })))
        .unwrap();
    std::fs::write(format!("{clusters}/useless"), east.kubeconfig("useless")).unwrap();
    std::fs::write(format!("{clusters}/Kubernetes"), &good).unwrap();
    let remote = [&own[..], &["--remote-clusters", "--clusters-dir", &clusters]].concat();
    let (findings, code, _) = check(&remote).await;
    assert_eq!(code, 1);
    has(&findings, "error remote clusters", "may not list Secrets in istio-system");
    has(
        &findings,
        "ok remote clusters",
        &format!("cluster east ({clusters}/east): https://{}", east.address),
    );
    has(&findings, "error remote clusters", "cluster plugin");
    has(&findings, "error remote clusters", "expired, revoked, or of another cluster");
    has(&findings, "warning remote clusters", "cluster Kubernetes");
    let rule = Rule::to(&["list", "watch"], "secrets").within("istio-system");
    home.allow_account("shop", "gateway", rule);
    let secret = Draft::secret("istio-system", "one").label("istio/multiCluster", "true");
    home.put(&secret.entry("west", good.as_bytes()));
    let (findings, ..) = check(&remote).await;
    has(&findings, "ok remote clusters", "1 labelled Secret(s) in istio-system");
    has(&findings, "ok remote clusters", "cluster west (Secret istio-system/one)");

    // Who may is asked for.
    let rbac = [&own[..], &["--service-account", "gateway", "--authorize", "rbac"]].concat();
    let (findings, code, _) = check(&rbac).await;
    assert_eq!(code, 1);
    has(&findings, "error Secrets", "need create on subjectaccessreviews");
    let (findings, ..) = check(&["--kubeconfig", &kubeconfig, "--authorize", "rbac"]).await;
    has(&findings, "error Secrets", "set --namespace and --service-account");

    home.revoke_token(&token);
    let (findings, code, _) = check(&own).await;
    assert_eq!(code, 1);
    has(&findings, "error API server", "expired, revoked, or of another cluster: replace it");
}

#[tokio::test]
async fn a_command_that_can_not_run_or_is_configured_wrong_is_an_error_with_the_programs_own_words() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (socket, ca_dir, none) = (path("sds.sock"), path("ca"), path("none"));
    let options = [
        "--socket",
        &socket,
        "--cert-dir",
        &none,
        "--status-address",
        "none",
        "--ca",
        "embedded",
        "--ca-dir",
        &ca_dir,
    ];
    let fake = format!("{}/tests/agent/support/fake_envoy.py", env!("CARGO_MANIFEST_DIR"));
    let control = path("control");
    std::fs::create_dir(&control).unwrap();
    let watched = path("envoy.yaml");
    let envoy = ["--restart-on", &watched, "--", "python3", &fake, &control];
    let (findings, code, _) = check(&[&options[..], &envoy].concat(), &[]).await;
    assert_eq!(code, 0, "{findings:#?}");
    has(&findings, "ok command", "/python3, with hot restart: it accepts its configuration");
    has(&findings, "warning command", "envoy.yaml does not exist");
    let journal = || std::fs::read_to_string(format!("{control}/journal")).unwrap();
    assert_eq!(journal(), "validate\n", "nothing is started");

    std::fs::write(format!("{control}/refuse"), "").unwrap();
    let (findings, code, _) = check(&[&options[..], &envoy].concat(), &[]).await;
    assert_eq!(code, 1);
    has(&findings, "error command", "no such field: 'wrong'; correct its configuration");

    let (findings, code, _) = check(&[&options[..], &["--", "no-such-envoy"]].concat(), &[]).await;
    assert_eq!(code, 1);
    has(&findings, "error command", "no-such-envoy is in no directory of PATH");
    let other = ["--no-hot-restart", "--", "/bin/sh", "-c", "exit 3"];
    let (findings, ..) = check(&[&options[..], &other].concat(), &[]).await;
    has(&findings, "ok command", "/bin/sh is executable");
}
