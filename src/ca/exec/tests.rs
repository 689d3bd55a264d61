//! Real shells.

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::*;
use crate::base::clock::Clock;
use crate::base::spiffe_id::SpiffeId;
use crate::ca::embedded::DevelopmentCa;
use crate::pki::key::{KeyType, SigningKey};

const PATIENCE: Duration = Duration::from_secs(20);

fn web() -> SpiffeId {
    "spiffe://cluster.local/ns/default/sa/web".parse().unwrap()
}

fn exec(sign: &str, roots: Option<&str>) -> Exec {
    Exec::new(sign.into(), roots.map(ShellCommand::from))
}

/// A key's request, and files with what a CA made of it: `leaf`, `ca`, `root`, and `other`, another CA's root.
fn signed(directory: &Path) -> SigningRequest {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::request(&key, Some(&web()), &csr::Names::default()).unwrap();
    let open = |name: &str| DevelopmentCa::open(&directory.join(name), Clock::system()).unwrap();
    let (ours, others) = (open("ours"), open("others"));
    let leaf = ours.issue(&csr, &web(), Duration::from_secs(3600)).unwrap();
    let [ca, root] = ours.chain();
    for (name, certificate) in [("leaf", &leaf), ("ca", ca), ("root", root), ("other", others.chain()[1])] {
        std::fs::write(directory.join(name), pem::of_certificates([certificate])).unwrap();
    }
    SigningRequest { csr, identity: Some(web()), names: csr::Names::default(), ttl: Duration::from_secs(90) }
}

#[tokio::test]
async fn the_request_goes_in_and_the_certificates_come_out() {
    let directory = tempfile::tempdir().unwrap();
    let request = signed(directory.path());
    let place = directory.path().display();
    let sign = format!(
        "cd {place} && cat > csr && echo \"$ATTACHE_SPIFFE_ID $ATTACHE_TTL_SECONDS\" > asked && cat leaf ca root"
    );
    let answer = exec(&sign, None).sign(&request).await.unwrap();
    assert_eq!((answer.chain.len(), answer.roots.len()), (2, 1));
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    assert_eq!(read("csr"), csr::to_pem(&request.csr));
    assert_eq!(read("asked"), format!("{} 90\n", web()));
    let anonymous = SigningRequest { identity: None, ..request };
    exec(&sign, None).sign(&anonymous).await.unwrap();
    assert_eq!(read("asked"), " 90\n");
    let names = csr::Names {
        dns: vec!["a.example".parse().unwrap(), "b".parse().unwrap()],
        common_name: "web".parse().ok(),
    };
    let with_names = SigningRequest { names, ..signed(directory.path()) };
    let sign =
        format!("cd {place} && echo \"$ATTACHE_DNS_SANS $ATTACHE_COMMON_NAME\" > asked && cat leaf ca root");
    exec(&sign, None).sign(&with_names).await.unwrap();
    assert_eq!(read("asked"), "a.example,b web\n");
}

#[tokio::test]
async fn the_roots_that_a_command_prints_replace_all_others() {
    let directory = tempfile::tempdir().unwrap();
    let request = signed(directory.path());
    let certificates = |names: &str| -> Vec<_> {
        let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
        names.split_whitespace().flat_map(|name| pem::certificates(&read(name)).unwrap()).collect()
    };
    let cases = [
        ("leaf ca", "root", "leaf ca", "root"),
        ("leaf ca root", "root", "leaf ca", "root"),
        ("leaf ca other", "root", "leaf ca", "root"),
        ("leaf ca root", "other root", "leaf ca", "other root"),
        // A bundle of both.
        ("leaf", "ca root", "leaf ca", "root"),
        // An intermediate is no root.
        ("leaf", "ca", "leaf ca", ""),
    ];
    for (printed, roots, chain, expected) in cases {
        // The command does not have to read the CSR.
        let cat = |names: &str| format!("cd {} && cat {names}", directory.path().display());
        let answer = exec(&cat(printed), Some(&cat(roots))).sign(&request).await.unwrap();
        assert_eq!(answer.chain, certificates(chain), "{printed}, {roots}");
        assert_eq!(answer.roots, certificates(expected), "{printed}, {roots}");
    }
}

#[tokio::test]
async fn a_failure_reports_stderr_and_has_a_class() {
    let directory = tempfile::tempdir().unwrap();
    let request = signed(directory.path());
    let leaf = directory.path().join("leaf").display().to_string();
    let print_leaf = format!("cat {leaf}");
    let cases: [(&str, Option<&str>, Class, &[&str]); 14] = [
        ("echo no luck >&2; exit 3", None, Class::Transient, &["--ca-exec ", "status: 3", "stderr: no luck"]),
        ("exit 75", None, Class::Transient, &["status: 75"]),
        ("exit 77", None, Class::Permanent, &["status: 77"]),
        (
            "no-such-program",
            None,
            Class::Permanent,
            &["found no such program", "stderr: ", "no-such-program"],
        ),
        (&leaf, None, Class::Permanent, &["126", "is not executable, or not for the agent's user"]),
        ("kill -9 $$", None, Class::Transient, &["signal: 9"]),
        ("true", None, Class::Transient, &["without output"]),
        ("echo; echo down >&2", None, Class::Transient, &["without output; stderr: down"]),
        ("echo '<html>'; echo hm >&2", None, Class::Permanent, &["no PEM certificate", "stderr: hm"]),
        ("cat", None, Class::Permanent, &["no PEM certificate"]),
        ("yes", None, Class::Permanent, &["printed more than 1048576 bytes"]),
        ("head -c 1048577 /dev/zero", None, Class::Permanent, &["printed more than 1048576 bytes"]),
        (&print_leaf, Some("exit 4"), Class::Transient, &["--ca-exec-roots failed with", "status: 4"]),
        (&print_leaf, Some("echo x"), Class::Permanent, &["--ca-exec-roots", "no PEM certificate"]),
    ];
    for (sign, roots, class, words) in cases {
        let error = timeout(PATIENCE, exec(sign, roots).sign(&request)).await.unwrap().unwrap_err();
        assert_eq!(error.class(), class, "{sign}: {error}");
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{sign}: {text}");
        }
        assert!(text.len() < 1000, "{text}");
    }
}

#[tokio::test]
async fn without_a_root_the_remedy_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let request = signed(directory.path());
    let exec = exec(&format!("cd {} && cat leaf ca", directory.path().display()), None);
    assert!(exec.sign(&request).await.unwrap().roots.is_empty());
    assert!(exec.remedy(&InvalidResponse::NoRoot).unwrap().contains("--ca-exec-roots"));
}

#[tokio::test]
async fn a_cancelled_command_may_clean_up_and_the_next_waits_for_its_exit() {
    let directory = tempfile::tempdir().unwrap();
    let request = signed(directory.path());
    let place = directory.path().display();
    let sign = format!(
        "cd {place}; if [ -e first ]; then [ -e gone ] && cat leaf ca root; exit; fi
         trap 'sleep 0.3; touch gone; exit' TERM; touch first; while :; do sleep 0.05; done"
    );
    let exec = exec(&sign, None);
    let is_running = async {
        while !directory.path().join("first").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        answer = exec.sign(&request) => panic!("{answer:?}"),
        () = is_running => {}
    }
    let answer = exec.sign(&request).await.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(answer.chain.len(), 2, "the first had exited");
}

#[tokio::test]
async fn a_command_that_ignores_sigterm_is_killed_with_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let request = signed(directory.path());
    let place = directory.path().display();
    let sign = format!("trap '' TERM; cd {place}; sleep 1000 & echo $! $$ > new && mv new pids; wait; wait");
    let exec = exec(&sign, None);
    let pids = async {
        loop {
            match std::fs::read_to_string(directory.path().join("pids")) {
                Ok(pids) => return pids,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    let pids = tokio::select! {
        answer = exec.sign(&request) => panic!("{answer:?}"),
        pids = pids => pids,
    };
    let started = Instant::now();
    for pid in pids.split_whitespace() {
        let stat = format!("/proc/{pid}/stat");
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(started.elapsed() < PATIENCE, "process {pid} still runs");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn a_background_process_that_holds_the_pipes_does_not_delay_the_call() {
    let directory = tempfile::tempdir().unwrap();
    let request = signed(directory.path());
    let place = directory.path().display();
    let sign = format!("cd {place} && cat leaf ca root; sleep 1000 & echo $! > pid");
    let answer = timeout(PATIENCE, exec(&sign, None).sign(&request)).await.unwrap().unwrap();
    assert_eq!(answer.roots.len(), 1);
    let pid = std::fs::read_to_string(directory.path().join("pid")).unwrap();
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn the_command_is_not_shown() {
    let shown = format!("{:?}", exec("curl -u me:s3cret", Some("echo s3cret")));
    assert!(!shown.contains("s3cret"), "{shown}");
}
