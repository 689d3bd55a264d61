//! Fuzz target: kubeconfigs that others have written.

use super::{Credential, Kubeconfig, Policy, Roots};
use crate::base::fuzzing::{check_hidden_in_place, check_line};

/// What stands before the secret of the samples.
const PLACE: &[u8] = b"{token: ";
const SECRET: &[u8] = b"eyJhbGciOiJub25lIn0.eyJzdWIiOiJ3ZWIifQ.c2lnbmF0dXJl";

/// A kubeconfig of a remote cluster. True if it can be used.
pub fn kubeconfig(bytes: &[u8]) -> bool {
    let policy = Policy::Foreign { allows: &[], option: "--allow" };
    match Kubeconfig::parse(bytes, None, &policy) {
        Ok(found) => {
            let shown = format!("{found:?}");
            check_hidden_in_place(&shown, bytes, PLACE, SECRET);
            assert!(matches!(found.config.endpoint.roots, Roots::System | Roots::Given(_)), "{shown}");
            assert!(!matches!(found.config.credential, Credential::TokenFile(_)), "{shown}");
            let named = Kubeconfig::parse(bytes, Some(&found.context), &policy);
            assert_eq!(named.map(|named| format!("{named:?}")).ok(), Some(shown));
            true
        }
        Err(error) => {
            let text = error.to_string();
            check_line(&text);
            check_hidden_in_place(&text, bytes, PLACE, SECRET);
            assert!(text.len() < 8_000, "{} bytes", text.len());
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{CLUSTER, config};
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_kubeconfigs_break_no_rule() {
        let token = format!("{{token: {}}}", String::from_utf8_lossy(SECRET));
        let yaml = config(CLUSTER, &token);
        let json = r#"{"current-context":"c","contexts":[{"name":"c","context":{"cluster":"k","namespace":"n"}}],
            "clusters":[{"name":"k","cluster":{"server":"https://[::1]:6443/k8s","tls-server-name":"kube"}}]}"#;
        let samples = [yaml.into_bytes(), json.as_bytes().to_vec()];
        seeded("kubeconfig", Shape::Bytes, 5_000, &samples, kubeconfig);
        for bad in ["[".repeat(200), "{a: ".repeat(200), "a: &x [*x]".to_owned(), "\0".to_owned()] {
            assert!(!kubeconfig(bad.as_bytes()), "{bad}");
        }
    }
}
