//! Fuzz target: the check of a CA's response, whatever its protocol.

use std::time::UNIX_EPOCH;

use rustls::pki_types::CertificateDer;

use super::{CaError, InvalidResponse, IssuedChain};
use crate::base::fuzzing::{check_line, moment, sections};
use crate::base::spiffe_id::SpiffeId;
use crate::pki::certificate::is_self_issued;
use crate::pki::csr::Names;
use crate::pki::key::PrivateKey;
use crate::pki::pem;

/// Checks the message about a response that is refused.
pub(super) fn check_invalid(error: InvalidResponse) {
    assert!(!error.label().is_empty());
    check_line(&error.to_string());
    check_line(&CaError::from(error).to_string());
}

/// Checks what is said about a call with `secret` that was refused.
pub(super) fn check_refusal(message: &str, secret: &str) {
    check_line(message);
    assert!(!message.contains(secret), "{message}");
    assert!(message.len() < 4_000, "{} bytes", message.len());
}

/// Checks a sorted response: every certificate of `all` is in it once for each time that it came.
fn check_sorted(sorted: &IssuedChain, all: &[CertificateDer<'static>]) {
    assert_eq!(sorted.chain.len() + sorted.roots.len(), all.len(), "a certificate is lost");
    assert!(all.len() <= IssuedChain::LONGEST);
    assert!(sorted.chain.iter().chain(&sorted.roots).all(|der| all.contains(der)));
}

/// Sections: `K` a key in PKCS#8, `I` the identity that was asked for, `T` the time, `C` a certificate, `G` the start of the
/// next group of certificates, `O` a certificate from elsewhere. True if the response is published.
pub fn response(bytes: &[u8]) -> bool {
    let (mut key, mut identity, mut now) = (None, None, UNIX_EPOCH);
    let (mut groups, mut others): (Vec<Vec<CertificateDer<'static>>>, Vec<_>) =
        (vec![Vec::new()], Vec::new());
    for (tag, section) in sections(bytes) {
        match tag {
            b'K' => key = Some(section),
            b'I' => identity = String::from_utf8_lossy(section).parse::<SpiffeId>().ok(),
            b'T' => now = moment(section),
            b'C' => groups.last_mut().into_iter().for_each(|group| group.push(section.to_vec().into())),
            b'O' => others.push(CertificateDer::from(section.to_vec())),
            _ => groups.push(Vec::new()),
        }
    }
    let all = groups.concat();
    let elsewhere = IssuedChain::with_others(all.clone(), others.clone());
    let mut sorted = vec![IssuedChain::from_groups(groups).inspect(|sorted| check_sorted(sorted, &all))];
    if !others.is_empty() {
        sorted.push(elsewhere.inspect(|sorted| {
            assert!(
                sorted.roots.iter().all(|der| is_self_issued(der) == Ok(true)),
                "a root that Envoy would refuse"
            );
        }));
    }
    let mut is_published = false;
    for sorted in sorted {
        // A key is not cloned: it is read again.
        let key = key.and_then(|der| PrivateKey::from_pem(&pem::encode("PRIVATE KEY", der)).ok());
        let checked = match (sorted, key) {
            (Ok(sorted), Some(key)) => sorted.check(key, identity.as_ref(), &Names::default(), now),
            (Ok(_), None) => continue,
            (Err(error), _) => Err(error),
        };
        match checked {
            Err(error) => check_invalid(error),
            Ok((pair, bundle)) => {
                is_published = true;
                let names = pair.spiffe_id();
                assert!(names.is_some() && (identity.is_none() || identity == names), "{names:?}");
                assert!(pair.leaf().not_before <= now && now < pair.not_after(), "not valid now");
                assert!(bundle.verify(&pair, now).is_ok(), "no root for {pair:?}");
                assert_eq!(pair.key().public_key().as_ref(), Ok(&pair.leaf().public_key));
            }
        }
    }
    is_published
}

#[cfg(test)]
pub(super) mod testing {
    use std::time::Duration;

    use super::*;
    use crate::base::clock::Clock;
    use crate::ca::embedded::DevelopmentCa;
    use crate::pki::csr;
    use crate::pki::key::{KeyType, SigningKey};

    pub(in crate::ca) const IDENTITY: &str = "spiffe://cluster.local/ns/default/sa/web";

    /// The response of a real CA: leaf, intermediate, root, and the key of the leaf.
    pub(in crate::ca) fn issued() -> ([CertificateDer<'static>; 3], PrivateKey) {
        let directory = tempfile::tempdir().unwrap();
        let ca = DevelopmentCa::open(directory.path(), Clock::system()).unwrap();
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let identity = IDENTITY.parse().unwrap();
        let csr = csr::request(&key, Some(&identity), &csr::Names::default()).unwrap();
        let leaf = ca.issue(&csr, &identity, Duration::from_secs(24 * 3600)).unwrap();
        let [intermediate, root] = ca.chain().map(Clone::clone);
        ([leaf, intermediate, root], key.to_private_key())
    }

    /// The same in PEM.
    pub(in crate::ca) fn issued_pem() -> [String; 3] {
        issued().0.map(|der| String::from_utf8(pem::of_certificates([&der])).unwrap())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::clock::Clock;
    use crate::base::fuzzing::{Shape, join, seeded};

    #[test]
    fn almost_valid_responses_are_published_only_if_they_pass_every_check() {
        let ([leaf, intermediate, root], key) = testing::issued();
        let now = Clock::system().now() + Duration::from_secs(60);
        let now = now.duration_since(UNIX_EPOCH).unwrap().as_secs().to_be_bytes();
        let fixed = [(b'K', key.der().secret_der()), (b'I', testing::IDENTITY.as_bytes()), (b'T', &now)];
        let layouts: [&[(u8, &[u8])]; 4] = [
            &[(b'C', &leaf), (b'G', b""), (b'C', &intermediate), (b'G', b""), (b'C', &root)],
            &[(b'C', &leaf), (b'C', &intermediate), (b'C', &root)],
            &[(b'C', &leaf), (b'C', &intermediate), (b'G', b""), (b'C', &root), (b'C', &root)],
            &[(b'C', &leaf), (b'O', &intermediate), (b'O', &root)],
        ];
        let samples = layouts.map(|layout| join([&fixed, layout].concat()));
        seeded("response", Shape::Sections, 600, &samples, response);
    }
}
