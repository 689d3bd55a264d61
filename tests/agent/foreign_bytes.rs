//! Bytes from outside are refused or accepted, and nothing panics.

use attache::auth::token_file::Token;
use attache::base::spiffe_id::SpiffeId;
use attache::ca::IssuedChain;
use attache::config::parse_duration;
use attache::inject::{Injected, Sidecar, inject};
use attache::net::address::Address;
use attache::pki::certificate::Certificate;
use attache::pki::key::PrivateKey;
use attache::pki::pem;
use attache::secret::{KeyPair, SecretName, TrustBundle};
use rustls::pki_types::CertificateDer;

use crate::support::files::{Mounted, token};

/// `bytes` with a few of them changed, doubled or removed.
fn mutated(random: &mut fastrand::Rng, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(..bytes.len().max(1)).min(bytes.len());
        match random.u8(..5) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.u8(..)),
            2 => bytes.extend_from_within(at..),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random.u8(..);
                }
            }
        }
    }
    bytes
}

#[test]
fn mutated_certificates_keys_and_chains_never_panic() {
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::new(directory.path(), "web");
    let ders = pem::certificates(&mounted.chain).unwrap();
    let key = || PrivateKey::from_pem(&mounted.key).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..5000 {
        let der = CertificateDer::from(mutated(&mut random, &ders[0]));
        match Certificate::parse(&der) {
            Ok(certificate) => {
                taken += 1;
                assert!(!certificate.serial.is_empty());
                let _ = (certificate.names(), certificate.spiffe_id());
                // It parses, but it is not what a CA signed: never a good answer.
                let answer = IssuedChain::from_groups(vec![vec![der.clone(), ders[1].clone()]]);
                let _ = answer.map(|answer| answer.check(key(), None, certificate.not_before));
                let _ = KeyPair::new(vec![der.clone()], key());
                let _ = TrustBundle::new(vec![der]);
            }
            Err(_) => refused += 1,
        }
        for text in [&mounted.chain, &mounted.key] {
            let text = mutated(&mut random, text);
            let _ = pem::certificates(&text);
            let _ = PrivateKey::from_pem(&text).map(|key| key.public_key());
        }
    }
    assert!(taken > 100 && refused > 100, "{taken} taken, {refused} refused");
}

#[test]
fn mutated_tokens_names_addresses_and_durations_never_panic() {
    let token = token("web", "istio-ca", 60);
    let seeds = [
        token.as_str(),
        "spiffe://cluster.local/ns/default/sa/web",
        "https://[::1]:15012",
        "24h0m0s",
        "default",
    ];
    let mut random = fastrand::Rng::with_seed(2);
    let mut equal = 0;
    for round in 0..20_000 {
        let seed = seeds[round % seeds.len()];
        let text = String::from_utf8_lossy(&mutated(&mut random, seed.as_bytes())).into_owned();
        let described = Token::new(&text).describe(std::time::UNIX_EPOCH);
        assert!(described.len() < 4000, "bounded for the log: {}", described.len());
        if let Ok(id) = text.parse::<SpiffeId>() {
            assert_eq!(id.as_str(), text);
        }
        if let Ok(address) = text.parse::<Address>() {
            assert_eq!(address.origin().parse::<Address>().unwrap(), address, "{text}");
        }
        let _ = parse_duration(&text);
        match text.parse::<SecretName>() {
            Ok(name) => {
                equal += 1;
                assert_eq!(name.as_str(), text);
            }
            Err(error) => assert!(error.to_string().len() < 3000),
        }
    }
    assert!(equal > 0, "some mutations change nothing");
}

#[test]
fn mutated_manifests_never_panic() {
    let sidecar = Sidecar {
        name: "attache".to_owned(),
        image: "attache".to_owned(),
        args: vec!["run".to_owned()],
        is_native: true,
        run_as: Some(1337),
        socket_dir: "/run/attache".to_owned(),
        socket: "/run/attache/sds.sock".to_owned(),
        is_open: false,
        admin_socket: None,
        status_port: Some(15055),
        containers: Vec::new(),
        volumes: Vec::new(),
        mounts: Vec::new(),
    };
    let examples = [
        include_str!("../../examples/kubernetes/sidecar.yaml"),
        include_str!("../../examples/kubernetes/istio-drop-in.yaml"),
        "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"spec\": {\"containers\": [{\"name\": \"web\", \"x\": [1, {}]}]}}",
        "apiVersion: v1\nkind: Pod\nspec:\n  volumes:\n  x: &a [*b, 'é']\n  containers:\n  - name: \"w\"\n    args:\n    - |+\n     a\n\n",
    ];
    let ordinary = Sidecar { is_native: false, ..sidecar.clone() };
    let mut random = fastrand::Rng::with_seed(3);
    let (mut taken, mut refused) = (0, 0);
    for round in 0..4000 {
        // Short examples more often: in long ones, most changes hit words.
        let example = examples[[0, 1, 2, 3, 2, 3, 2, 3][round % 8]];
        let text = String::from_utf8_lossy(&mutated(&mut random, example.as_bytes())).into_owned();
        let sidecar = if round % 16 < 8 { &sidecar } else { &ordinary };
        match inject(&text, sidecar) {
            Ok(Injected { text: injected, workloads: 0, .. }) => assert_eq!(injected, text),
            Ok(injected) => {
                taken += 1;
                let again = inject(&injected.text, sidecar).map(|again| (again.text, again.workloads));
                assert_eq!(again, Ok((injected.text, injected.workloads)), "{text}");
            }
            Err(problem) => {
                refused += 1;
                assert!(problem.to_string().len() < 1000, "{problem}");
            }
        }
    }
    assert!(taken > 100 && refused > 100, "{taken} taken, {refused} refused");

    // Aliases are not expanded, and depth is bounded.
    let bomb: String = (1..30).map(|n| format!("a{n}: &a{n} [*a{0}, *a{0}]\n", n - 1)).collect();
    assert_eq!(inject(&format!("a0: &a0 x\n{bomb}"), &sidecar).map(|all| all.workloads), Ok(0));
    for deep in ["[", "{a: ", "- ", "? ", "&a ["] {
        assert!(inject(&deep.repeat(20_000), &sidecar).is_err(), "{deep}");
    }
}
