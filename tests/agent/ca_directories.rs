//! `attache ca init`, `intermediate`, `announce` and `drop`, and an `attache ca` that serves what they make.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use attache::net::http2::with_connection;
use attache::pki::certificate::Certificate;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use attache::proto::istio::v1::auth::IstioCertificateRequest;
use attache::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use tokio::net::TcpStream;
use tokio::process::Command;
use tonic::Request;

use crate::support::files::token;
use crate::support::process::{Agent, Process, attache, failure, output};
use crate::support::wait::wait_for;

/// Runs `attache ca COMMAND`, which must succeed; returns what it prints.
async fn ca(line: &str) -> String {
    let words: Vec<_> = ["ca"].into_iter().chain(line.split_whitespace()).collect();
    let output = output(&words).await;
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a shell command in `directory`, which must succeed.
async fn shell(directory: &Path, command: &str) -> String {
    let path =
        format!("{}:/usr/bin:/bin", Path::new(env!("CARGO_BIN_EXE_attache")).parent().unwrap().display());
    let output = Command::new("/bin/sh")
        .args(["-ec", command])
        .current_dir(directory)
        .env("PATH", path)
        .output()
        .await
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

async fn serve(directory: &Path) -> (Process, String) {
    let arguments = ["ca", "--plaintext", "--listen", "127.0.0.1:0", "--ca-dir", directory.to_str().unwrap()];
    let mut process = Process::start(attache(&arguments));
    let (_, line) = process.wait_log("CA listening").await;
    let address = line.split_once("address=http://").unwrap().1.split_whitespace().next().unwrap().to_owned();
    (process, address)
}

/// The strings of one answer.
async fn issue(address: &str) -> Vec<String> {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::to_pem(&csr::request(&key, None, &csr::Names::default()).unwrap());
    let mut request = Request::new(IstioCertificateRequest { csr, validity_duration: 60, metadata: None });
    let bearer = format!("Bearer {}", token("web", "istio-ca", 60));
    request.metadata_mut().insert("authorization", bearer.parse().unwrap());
    let origin = format!("http://{address}").parse().unwrap();
    let io = TcpStream::connect(address).await.unwrap();
    let answer = with_connection(io, async |connection| {
        IstioCertificateServiceClient::with_origin(connection, origin).create_certificate(request).await
    });
    answer.await.unwrap().unwrap().into_inner().cert_chain
}

fn counts(answer: &[String]) -> Vec<usize> {
    answer.iter().map(|text| pem::certificates(text.as_bytes()).unwrap().len()).collect()
}

fn serials(text: &str) -> Vec<String> {
    let ders = pem::certificates(text.as_bytes()).unwrap();
    ders.iter().map(|der| Certificate::parse(der).unwrap().serial).collect()
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(path).unwrap()
}

#[tokio::test]
async fn openssl_accepts_the_chain_and_only_the_owner_reads_keys_whatever_the_umask() {
    let place = tempfile::tempdir().unwrap();
    for umask in ["000", "022", "077", "777"] {
        let one = format!(
            "umask {umask}; attache ca init --root r{umask} --path-length 1 --key-type rsa-2048 --organization Shop; \
             attache ca intermediate --root r{umask} --name cluster1 --out c{umask} --key-type ecdsa-p384"
        );
        shell(place.path(), &one).await;
        let [root, ca] = ["r", "c"].map(|name| place.path().join(format!("{name}{umask}")));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&root), mode(&ca)), (0o700, 0o700), "{umask}");
        assert_eq!((mode(&root.join("root-key.pem")), mode(&ca.join("ca-key.pem"))), (0o600, 0o600));
    }
    let shown = shell(
        place.path(),
        "openssl verify -x509_strict -CAfile c022/root-cert.pem c022/ca-cert.pem
         openssl x509 -noout -subject -nameopt RFC2253 -ext basicConstraints -in r022/root-cert.pem
         openssl x509 -noout -subject -nameopt RFC2253 -ext basicConstraints -in c022/ca-cert.pem",
    )
    .await;
    for words in ["c022/ca-cert.pem: OK", "O=Shop", "L=cluster1", "pathlen:1", "pathlen:0"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
}

#[tokio::test]
async fn a_mistake_is_named_and_nothing_is_written() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let (root, out) = (path("root"), path("out"));
    for (arguments, status, words) in [
        (vec!["ca", "init"], 2, "--root"),
        (vec!["ca", "init", "--root", &root, "--key-type", "rsa-1024"], 2, "ecdsa-p256"),
        (vec!["ca", "init", "--root", &root, "--ttl", "0s"], 2, "too short"),
        (vec!["ca", "init", "--root", &root, "--ttl", "900000h"], 2, "is not a duration"),
        (vec!["ca", "init", "--root", &root, "--path-length", "0"], 2, "--path-length"),
        (vec!["ca", "init", "--root", &root, "--common-name", " "], 2, "needs a character"),
        (vec!["ca", "intermediate", "--root", &root, "--name", "a", "--out", &out], 1, "root-cert.pem"),
        (vec!["ca", "announce", "--ca-dir", &out, "--root", &root], 1, "out can't be used"),
        (vec!["ca", "--plaintext", "init", "--root", &root], 2, "cannot be used with"),
    ] {
        let (code, error) = failure(&arguments).await;
        assert!(code == status && error.contains(words), "{arguments:?}: {code} {error}");
    }
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    // A root's directory has no key for workloads, which a check of the options says as well.
    ca(&format!("init --root {root}")).await;
    for arguments in [
        vec!["ca", "--listen", "127.0.0.1:0", "--ca-dir", &root],
        vec!["check", "--ca", "embedded", "--ca-dir", &root, "--cert-dir", "none"],
    ] {
        let output = output(&arguments).await;
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(!output.status.success() && text.contains("whose key signs no workloads"), "{text}");
    }
    // A path that can't be a directory.
    fs::write(path("file"), "").unwrap();
    let (code, error) = failure(&["ca", "init", "--root", &path("file/root")]).await;
    assert!(code == 1 && error.contains("choose another directory"), "{error}");
}

#[tokio::test]
async fn a_served_directory_follows_announcements_and_a_new_intermediate_without_a_restart() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let shown = |name: &str| path(name).display().to_string();
    let (old, new, ca_dir, next) = (shown("old"), shown("new"), shown("ca"), shown("next"));
    ca(&format!("init --root {old}")).await;
    ca(&format!("init --root {new}")).await;
    ca(&format!("intermediate --root {old} --name cluster1 --out {ca_dir}")).await;
    let (mut process, address) = serve(&path("ca")).await;
    let answer = issue(&address).await;
    assert_eq!(counts(&answer), [1, 2, 1]);
    assert_eq!(answer[2], read(path("old/root-cert.pem")));

    ca(&format!("announce --ca-dir {ca_dir} --root {new}")).await;
    process.wait_log_times("CA certificates changed", 1).await;
    let answer = issue(&address).await;
    assert_eq!(counts(&answer), [1, 2, 2]);
    assert_eq!(serials(&answer[1])[1], serials(&read(path("old/root-cert.pem")))[0]);

    // The old root still signs, and can't be dropped.
    let (code, error) = failure(&["ca", "drop", "--ca-dir", &ca_dir, "--root", &old]).await;
    assert!(code == 1 && error.contains("which signs now"), "{error}");

    ca(&format!("intermediate --root {new} --name cluster1 --out {next} --also-root {ca_dir}")).await;
    fs::rename(path("ca"), path("before")).unwrap();
    fs::rename(path("next"), path("ca")).unwrap();
    process.wait_log_times("CA certificates changed", 2).await;
    let answer = issue(&address).await;
    assert_eq!(counts(&answer), [1, 2, 2]);
    assert_eq!(serials(&answer[1])[1], serials(&read(path("new/root-cert.pem")))[0]);

    ca(&format!("drop --ca-dir {ca_dir} --root {old}")).await;
    process.wait_log_times("CA certificates changed", 3).await;
    assert_eq!(counts(&issue(&address).await), [1, 2, 1]);
}

#[tokio::test]
async fn a_directory_that_does_not_fit_together_leaves_the_last_good_ca_signing() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let shown = |name: &str| path(name).display().to_string();
    for root in ["root", "other"] {
        ca(&format!("init --root {}", shown(root))).await;
        ca(&format!(
            "intermediate --root {} --name {root} --out {}",
            shown(root),
            shown(&format!("{root}-ca"))
        ))
        .await;
    }
    let (mut process, address) = serve(&path("root-ca")).await;
    let before = issue(&address).await;
    // The key of another intermediate, then the rest of its files.
    fs::copy(path("other-ca/ca-key.pem"), path("root-ca/ca-key.pem")).unwrap();
    let (_, line) = process.wait_log("changed CA directory not used").await;
    assert!(line.contains("ca-key.pem") && line.contains("it is not the key of ca-cert.pem"), "{line}");
    assert_eq!(issue(&address).await[1..], before[1..]);
    for name in ["ca-cert.pem", "cert-chain.pem", "root-cert.pem"] {
        fs::copy(path("other-ca").join(name), path("root-ca").join(name)).unwrap();
    }
    process.wait_log("CA certificates changed").await;
    assert_eq!(issue(&address).await[2], read(path("other/root-cert.pem")));
    assert!(!process.log().contains("PRIVATE"), "{}", process.log());
}

/// As Istio's guide makes it with openssl: RSA keys, and a chain file that ends in the root.
#[tokio::test]
async fn a_directory_that_openssl_made_is_served() {
    let place = tempfile::tempdir().unwrap();
    shell(
        place.path(),
        "mkdir ca
         openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj '/O=Istio/CN=Root CA' -keyout root-key.pem \
             -addext 'keyUsage=critical,digitalSignature,keyCertSign' -out ca/root-cert.pem
         openssl genrsa -traditional -out ca/ca-key.pem 2048
         openssl req -new -key ca/ca-key.pem -subj '/O=Istio/CN=Intermediate CA/L=cluster1' -out ca.csr
         printf 'basicConstraints=critical,CA:true,pathlen:0\\nkeyUsage=critical,keyCertSign\\nsubjectKeyIdentifier=hash\\n' >ext
         openssl x509 -req -days 30 -in ca.csr -CA ca/root-cert.pem -CAkey root-key.pem -CAcreateserial \
             -extfile ext -out ca/ca-cert.pem
         cat ca/ca-cert.pem ca/root-cert.pem >ca/cert-chain.pem",
    )
    .await;
    assert!(read(place.path().join("ca/ca-key.pem")).contains("BEGIN RSA PRIVATE KEY"));
    let (_process, address) = serve(&place.path().join("ca")).await;
    let answer = issue(&address).await;
    fs::write(place.path().join("leaf.pem"), &answer[0]).unwrap();
    assert_eq!(counts(&answer), [1, 2, 1]);
    let verify = "openssl verify -CAfile ca/root-cert.pem -untrusted ca/ca-cert.pem leaf.pem";
    assert!(shell(place.path(), verify).await.contains("leaf.pem: OK"));
}

/// `--ca embedded` reads the directory for each certificate.
#[tokio::test]
async fn an_agent_with_an_embedded_ca_serves_all_roots_and_follows_the_directory() {
    let place = tempfile::tempdir().unwrap();
    let shown = |name: &str| place.path().join(name).display().to_string();
    let (root, new, ca_dir) = (shown("root"), shown("new"), shown("ca"));
    ca(&format!("init --root {root}")).await;
    ca(&format!("init --root {new}")).await;
    ca(&format!("intermediate --root {root} --name cluster1 --out {ca_dir}")).await;
    let options = ["--ca", "embedded", "--ca-dir", &ca_dir, "--cert-ttl", "4s"];
    let agent = Agent::ready(place.path(), "web", &options).await;
    let roots = async || {
        let socket = agent.socket.to_str().unwrap();
        let output = output(&["get", "ROOTCA", "--output", "pem", "--socket", socket]).await;
        pem::certificates(&output.stdout).map_or(0, |roots| roots.len())
    };
    assert_eq!(roots().await, 1);
    ca(&format!("announce --ca-dir {ca_dir} --root {new}")).await;
    wait_for("the new root is served", async || (roots().await == 2).then_some(())).await;
}
