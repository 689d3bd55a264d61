//! Fuzz target: the answers of Google's Certificate Authority Service.

use prost::Message as _;

use super::{IssuedChain, api, is_self_issued, issued, pool_roots};
use crate::base::fuzzing::sections;
use crate::ca::fuzz::check_invalid;

/// Sections: `R` a FetchCaCertsResponse, `C` a Certificate. True if they hold a chain and its roots.
pub fn answers(bytes: &[u8]) -> bool {
    let (mut roots, mut chain) = (Vec::new(), Vec::new());
    for (tag, message) in sections(bytes) {
        let read = if tag == b'R' {
            let Ok(fetched) = api::FetchCaCertsResponse::decode(message) else { continue };
            pool_roots(&fetched).map(|found| roots = found)
        } else {
            let Ok(created) = api::Certificate::decode(message) else { continue };
            issued(&created).map(|found| chain = found)
        };
        if let Err(error) = read {
            check_invalid(error);
        }
    }
    assert!(roots.iter().all(|der| is_self_issued(der) == Ok(true)), "a root that Envoy would refuse");
    let is_complete = !roots.is_empty() && !chain.is_empty();
    match IssuedChain::with_others(chain, roots) {
        Ok(_) => is_complete,
        Err(error) => {
            check_invalid(error);
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, join, seeded};
    use crate::base::limits;
    use crate::ca::fuzz::testing;
    use crate::pki::crl::testing::Authority;
    use crate::pki::pem;

    fn fetched(certificates: Vec<String>) -> api::FetchCaCertsResponse {
        let chain = api::fetch_ca_certs_response::CertChain { certificates };
        api::FetchCaCertsResponse { ca_certs: vec![chain] }
    }

    #[test]
    fn almost_valid_answers_break_no_rule() {
        let [leaf, intermediate, root] = testing::issued_pem();
        let created = api::Certificate {
            pem_certificate: leaf,
            pem_certificate_chain: vec![intermediate.clone(), root.clone()],
            ..api::Certificate::default()
        };
        let fetched = fetched(vec![intermediate, root]);
        let sample = join([(b'R', fetched.encode_to_vec()), (b'C', created.encode_to_vec())]);
        seeded("google_cas", Shape::Sections, 600, &[sample], answers);
    }

    #[test]
    fn the_certificates_of_a_pool_are_bounded() {
        let text = |name: usize| {
            let root = Authority::root(&name.to_string()).certificate;
            String::from_utf8(pem::of_certificates([&root])).unwrap()
        };
        let all: Vec<_> = (0..=limits::CERTIFICATES).map(text).collect();
        assert_eq!(pool_roots(&fetched(vec![all[0].clone(); 2_000])).map(|roots| roots.len()), Ok(1));
        let error = pool_roots(&fetched(all)).unwrap_err().to_string();
        assert!(error.contains("ca_certs: more than 500"), "{error}");
    }
}
