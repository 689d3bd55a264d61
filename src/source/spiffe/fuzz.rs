//! Fuzz target: the messages of a Workload API.

use std::time::UNIX_EPOCH;

use bytes::Bytes;

use super::Wanted;
use super::answer::read;
use crate::base::fuzzing::{check_line, moment, sections};
use crate::pki::key::KeyFormat;

/// Sections: `M` a message, `T` the time, `I` the identity that is wanted, `D` the trust domain. True if what it holds is
/// published.
pub fn answer(bytes: &[u8]) -> bool {
    let (mut message, mut wanted, mut now) = (Bytes::new(), Wanted::default(), UNIX_EPOCH);
    for (tag, section) in sections(bytes) {
        let text = String::from_utf8_lossy(section);
        match tag {
            b'M' => message = section.to_vec().into(),
            b'T' => now = moment(section),
            b'I' => wanted.id = text.parse().ok(),
            // Options are checked where they are read.
            _ => wanted.trust_domain = Some(text.escape_debug().to_string()),
        }
    }
    let answer = match read(message, &wanted, KeyFormat::Pkcs8, now) {
        Ok(answer) => answer,
        Err(error) => {
            check_line(&error.to_string());
            return false;
        }
    };
    let id = answer.pair.spiffe_id();
    assert!(id.is_some() && (wanted.id.is_none() || wanted.id == id), "{id:?}");
    let domain = id.as_ref().map(|id| id.trust_domain());
    assert!(wanted.id.is_some() || wanted.trust_domain.is_none() || wanted.trust_domain.as_deref() == domain);
    assert!(answer.pair.leaf().not_before <= now && now < answer.pair.not_after(), "not valid now");
    assert!(answer.bundle.verify(&answer.pair, now).is_ok(), "no root for {:?}", answer.pair);
    assert_eq!(answer.pair.key().public_key().as_ref(), Ok(&answer.pair.leaf().public_key));
    answer.others.iter().chain(answer.crls.as_ref().err()).for_each(|text| check_line(text));
    answer.foreign.problems().for_each(|text| check_line(text));
    true
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message as _;

    use super::*;
    use crate::base::fuzzing::{Shape, join, seeded};
    use crate::source::spiffe::tests::fake::{self, Ca};

    #[test]
    fn almost_valid_answers_are_published_only_if_they_pass_every_check() {
        let (ca, now) = (Ca::new("ca"), UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let time = 1_800_000_600_u64.to_be_bytes();
        let mut several = fake::answer([ca.svid("spiffe://td/web", now), ca.svid("spiffe://td/db", now)]);
        several.crl = vec![ca.crl(now, now + Duration::from_secs(3600))];
        several.federated_bundles = [("spiffe://two".to_owned(), Ca::new("two").root().into())].into();
        let one = fake::answer([ca.svid("spiffe://td/db", now)]).encode_to_vec();
        let several = several.encode_to_vec();
        let time = (b'T', &time[..]);
        let samples = [
            join([time, (b'M', &one)]),
            join([time, (b'M', &one), (b'D', b"td")]),
            join([time, (b'M', &several), (b'I', b"spiffe://td/db")]),
        ];
        seeded("spiffe", Shape::Sections, 1500, &samples, answer);
    }
}
