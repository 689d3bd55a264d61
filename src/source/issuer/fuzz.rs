//! Fuzz target: the state file.

use super::state::{SavedState, decode, encode};
use crate::base::fuzzing::check_line;
use crate::pki::key::KeyType;
use crate::secret::KeyPair;

/// The content of a state file. True if it holds a key pair, and then it is the same once it is written again.
pub fn state(bytes: &[u8]) -> bool {
    let state = match decode(bytes) {
        Ok(state) => state,
        Err(error) => {
            let message = error.to_string();
            check_line(&message);
            assert!(message.len() < 500, "{} bytes: {message}", message.len());
            return false;
        }
    };
    let Some(first) = written(state) else { return false };
    let Ok(state) = decode(&first) else { unreachable!("it can't be read again") };
    assert!(written(state).is_some_and(|second| second == first), "it changes");
    true
}

/// `state` as the agent would write it.
fn written(state: SavedState) -> Option<Vec<u8>> {
    let SavedState { provider, ca, key_type, received, chain, key, anchors } = state;
    let key_type: KeyType = key_type.parse().ok()?;
    let pair = KeyPair::new(chain, key).ok()?;
    Some(encode(&provider, &ca, key_type, received, &pair, &anchors).to_vec())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::pki::crl::testing::Authority;
    use crate::source::issuer::trust::Anchor;

    #[test]
    fn almost_valid_states_break_no_rule() {
        let (root, old) = (Authority::root("root"), Authority::root("old"));
        let (chain, key) = root.issue();
        let pair = KeyPair::new(chain, key).unwrap();
        let (now, hour) = (UNIX_EPOCH + Duration::from_millis(1_700_000_000_123), Duration::from_secs(3600));
        let named_by: BTreeSet<_> = ["istiod:15012".to_owned(), "other\u{e9}".to_owned()].into();
        let anchor = |ca: &Authority, named_by, until| Anchor {
            root: ca.certificate.clone(),
            named_by,
            lifetime: hour,
            until,
        };
        let anchors = [anchor(&root, named_by, None), anchor(&old, BTreeSet::new(), Some(now + hour))];
        let write =
            |anchors| encode("citadel", "istiod:15012", KeyType::EcdsaP256, now, &pair, anchors).to_vec();
        let samples = [write(&anchors), write(&[])];
        seeded("state", Shape::Bytes, 3_000, &samples, state);
    }

    #[test]
    fn a_state_of_an_unknown_version_causes_a_short_message() {
        for version in
            [format!("\"{}\"", "x".repeat(100_000)), format!("[{}1]", "1,".repeat(9_999)), "2".to_owned()]
        {
            assert!(!state(format!("{{\"version\":{version}}}\n").as_bytes()));
        }
        let error = decode(b"{\"version\":2}\n").unwrap_err().to_string();
        assert!(error.contains("the format 2,"), "{error}");
    }
}
