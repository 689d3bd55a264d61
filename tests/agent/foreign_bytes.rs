//! Whatever bytes come from outside, they are refused or taken, and nothing panics.

use attache::ca::Answer;
use attache::ca::endpoint::Address;
use attache::config::parse_duration;
use attache::credential::Token;
use attache::identity::SpiffeId;
use attache::pki::certificate::Certificate;
use attache::pki::key::PrivateKey;
use attache::pki::pem;
use attache::secret::{KeyPair, SecretName, TrustBundle};
use rustls::pki_types::CertificateDer;

use crate::support::files::{Mounted, token};

/// `bytes` with a few of them changed, doubled or gone.
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
fn certificates_keys_and_chains() {
    let folder = tempfile::tempdir().unwrap();
    let mounted = Mounted::new(folder.path(), "web");
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
                // It parses, but what a CA signed is not this: never a good answer.
                let answer = Answer::from_groups(vec![vec![der.clone(), ders[1].clone()]]);
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
fn tokens_names_addresses_and_durations() {
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
