//! Fuzz target: the answer of Istio's CA protocol.

use prost::Message as _;

use super::{IssuedChain, IstioCertificateResponse, issued};
use crate::ca::fuzz::check_invalid;

/// An IstioCertificateResponse. True if it holds a chain.
pub fn answer(bytes: &[u8]) -> bool {
    let Ok(message) = IstioCertificateResponse::decode(bytes) else { return false };
    match issued(&message) {
        Ok(IssuedChain { chain, roots }) => {
            assert!(chain.len() + roots.len() <= IssuedChain::LONGEST);
            !chain.is_empty()
        }
        Err(error) => {
            check_invalid(error);
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::ca::fuzz::testing;

    #[test]
    fn almost_valid_answers_break_no_rule() {
        let [leaf, intermediate, root] = testing::issued_pem();
        let chains = [
            vec![leaf.clone(), intermediate.clone(), root.clone()],
            vec![leaf.clone(), format!("{intermediate}{root}"), root.clone()],
            vec![format!("{leaf}{intermediate}{root}")],
        ];
        let samples = chains.map(|cert_chain| IstioCertificateResponse { cert_chain }.encode_to_vec());
        seeded("citadel", Shape::Bytes, 1_500, &samples, answer);
        let many = IstioCertificateResponse { cert_chain: vec![root; IssuedChain::LONGEST + 1] };
        assert!(!answer(&many.encode_to_vec()));
    }
}
