//! Fuzz target: manifests.

use super::{Injected, Purpose, Sidecar, Volume, inject, yaml};
use crate::base::fuzzing::check_line;

fn sidecar(is_native: bool) -> Sidecar {
    let token =
        serde_json::json!({ "projected": { "sources": [{ "serviceAccountToken": { "path": "t" } }] } });
    Sidecar {
        name: "attache".to_owned(),
        image: "attache:1".to_owned(),
        args: vec!["run".to_owned()],
        is_native,
        run_as: Some(1337),
        socket_dirs: vec!["/run/attache".to_owned()],
        socket: "/run/attache/sds.sock".to_owned(),
        is_open: false,
        admin_socket: Some("/run/attache/sds.sock.admin".to_owned()),
        status_port: Some(15055),
        containers: Vec::new(),
        volumes: vec![Volume { purpose: Purpose::Token, source: token, path: "/run/tokens".to_owned() }],
        mounts: Vec::new(),
        reads_service_account: false,
        node: None,
    }
}

/// Manifests. True if at least one workload gets the sidecar; the result is then YAML, and injecting again changes nothing.
pub fn manifests(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let mut is_injected = false;
    for sidecar in [sidecar(true), sidecar(false)] {
        let injected = match inject(&text, &sidecar) {
            Ok(injected) => injected,
            Err(problem) => {
                check_line(&problem.to_string());
                continue;
            }
        };
        let Injected { text: new, workloads, warnings, .. } = injected;
        warnings.iter().for_each(|warning| check_line(&warning.to_string()));
        workloads.iter().for_each(|outcome| check_line(&outcome.to_string()));
        assert!(!workloads.is_empty() || new == text, "changed without a workload");
        assert!(yaml::read(&new).is_ok(), "no longer YAML: {new}");
        let again = inject(&new, &sidecar).map(|again| (again.text, again.workloads.len()));
        assert_eq!(again, Ok((new, workloads.len())), "{text}");
        is_injected |= !workloads.is_empty();
    }
    is_injected
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_manifests_break_no_rule() {
        let samples = [
            "apiVersion: v1\nkind: Pod\nspec:\n  volumes:\n  x: &a [*a, '\u{e9}']\n  containers:\n  - name: \"w\"\n    args:\n    - |+\n     a\n\n",
            "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"spec\": {\"containers\": [{\"name\": \"web\", \"x\": [1, {}]}]}}",
            r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "\ud83d\ude80"}, "spec": {"containers": [{"name": "a\\ud83d"}]}}"#,
            "apiVersion: apps/v1\r\nkind: Deployment\r\nspec:\r\n  template:\r\n    spec:\r\n      # all\r\n      containers:\r\n      - {name: web}\r\n      - name: envoy\r\n",
            "apiVersion: v1\nkind: List\nitems:\n- apiVersion: batch/v1\n  kind: CronJob\n  spec: {jobTemplate: {spec: {template: {spec: {containers: [{name: a}]}}}}}\n---\n# end\n",
            "apiVersion: v1\nkind: Pod\nmetadata: {annotations: {a: b}}\nspec:\n  hostNetwork: true\n  securityContext: {runAsUser: 7}\n  containers:\n  - name: |-\n      two\n      lines\n  - {name: e, image: envoyproxy/envoy, env: [{name: ENVOY_UID, value: x}]}\n",
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        seeded("manifests", Shape::Bytes, 1_500, &samples, manifests);
    }

    #[test]
    fn many_documents_take_a_time_of_their_number_and_not_of_its_square() {
        let pod = "---\napiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - name: web\n";
        let started = std::time::Instant::now();
        assert_eq!(inject(&pod.repeat(4_000), &sidecar(true)).map(|all| all.workloads.len()), Ok(4_000));
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
    }

    #[test]
    fn aliases_are_not_expanded_and_depth_is_bounded() {
        let bomb: String = (1..30).map(|n| format!("a{n}: &a{n} [*a{0}, *a{0}]\n", n - 1)).collect();
        assert_eq!(
            inject(&format!("a0: &a0 x\n{bomb}"), &sidecar(true)).map(|all| all.workloads.len()),
            Ok(0)
        );
        for deep in ["[", "{a: ", "- ", "? ", "&a ["] {
            assert!(inject(&deep.repeat(20_000), &sidecar(true)).is_err(), "{deep}");
        }
    }
}
