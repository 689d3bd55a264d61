//! OCSP responses that a server staples to its certificate.
//!
//! Envoy rejects a whole secret for a staple that it can't read or that is of another certificate. The rules here are
//! Envoy's, and stricter where it reads past something. Neither checks the signature: TLS clients do.

use std::fmt;
use std::time::SystemTime;

use super::certificate::{Certificate, hexadecimal};
use super::der::{
    BIT_STRING, ENUMERATED, GENERALIZED_TIME, INTEGER, OCTET_STRING, OID, Part, SEQUENCE, is_time, parts,
};
use crate::base::clock::rfc3339;
use crate::base::limits;

/// id-pkix-ocsp-basic.
const BASIC: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 0x30, 1, 1];
// Optional or chosen fields that hold other values.
const FIELD_0: u8 = 0xa0;
const FIELD_1: u8 = 0xa1;
const FIELD_2: u8 = 0xa2;

/// An OCSP response about one certificate.
#[derive(Clone, PartialEq, Eq)]
pub struct Staple {
    der: Vec<u8>,
    /// Of the certificate that it is for, in lower-case hexadecimal.
    pub serial: String,
    pub this_update: SystemTime,
    pub next_update: SystemTime,
}

/// Why bytes are no staple for a certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAStaple {
    #[error("not an OCSP response in DER")]
    Malformed,
    #[error("{size} bytes are too many for an OCSP response (at most {})", limits::OCSP_STAPLE_BYTES)]
    TooLong { size: usize },
    #[error("the OCSP responder answered {0} instead of a response")]
    Unsuccessful(&'static str),
    #[error("it answers for {0} certificates: a staple is for one")]
    NotOne(usize),
    #[error("it has no time of the next update: Envoy never staples such a response")]
    Unlimited,
    #[error("it is for the certificate with serial {staple}, and the leaf has serial {leaf}")]
    Foreign { staple: String, leaf: String },
    #[error("it is not valid before {}", rfc3339(*.0))]
    NotYetValid(SystemTime),
    #[error("it expired at {}", rfc3339(*.0))]
    Expired(SystemTime),
}

impl Staple {
    /// Parses an OCSPResponse in DER.
    pub fn parse(der: &[u8]) -> Result<Self, NotAStaple> {
        if der.len() > limits::OCSP_STAPLE_BYTES {
            return Err(NotAStaple::TooLong { size: der.len() });
        }
        let single = all(single_response(basic_response(der)?)?)?;
        let [(SEQUENCE, id), status, begin, end @ ..] = without_last(&single, FIELD_1) else {
            return Err(NotAStaple::Malformed);
        };
        if !is_status(*status) {
            return Err(NotAStaple::Malformed);
        }
        let (serial, this_update) = (serial(id)?, moment(*begin)?);
        let next_update = match end {
            [(FIELD_0, end)] => match *all(end)? {
                [end] => moment(end)?,
                _ => return Err(NotAStaple::Malformed),
            },
            [] => return Err(NotAStaple::Unlimited),
            _ => return Err(NotAStaple::Malformed),
        };
        Ok(Self { der: der.to_vec(), serial, this_update, next_update })
    }

    /// Whether it is for `leaf`.
    pub fn check(&self, leaf: &Certificate) -> Result<(), NotAStaple> {
        match self.serial == leaf.serial {
            true => Ok(()),
            false => Err(NotAStaple::Foreign { staple: self.serial.clone(), leaf: leaf.serial.clone() }),
        }
    }

    /// Whether TLS clients accept it at `now`.
    pub fn check_time(&self, now: SystemTime) -> Result<(), NotAStaple> {
        if self.next_update <= now {
            return Err(NotAStaple::Expired(self.next_update));
        }
        if self.this_update > now {
            return Err(NotAStaple::NotYetValid(self.this_update));
        }
        Ok(())
    }

    pub fn der(&self) -> &[u8] {
        &self.der
    }
}

impl fmt::Debug for Staple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staple(serial {}, until {})", self.serial, rfc3339(self.next_update))
    }
}

/// The BasicOCSPResponse in an OCSPResponse.
fn basic_response(der: &[u8]) -> Result<&[u8], NotAStaple> {
    let bytes = match *sequence(der)? {
        [(ENUMERATED, [0]), (FIELD_0, bytes)] => bytes,
        [(ENUMERATED, [1])] => return Err(NotAStaple::Unsuccessful("malformedRequest")),
        [(ENUMERATED, [2])] => return Err(NotAStaple::Unsuccessful("internalError")),
        [(ENUMERATED, [3])] => return Err(NotAStaple::Unsuccessful("tryLater")),
        [(ENUMERATED, [5])] => return Err(NotAStaple::Unsuccessful("sigRequired")),
        [(ENUMERATED, [6])] => return Err(NotAStaple::Unsuccessful("unauthorized")),
        _ => return Err(NotAStaple::Malformed),
    };
    match *sequence(bytes)? {
        [(OID, BASIC), (OCTET_STRING, basic)] => Ok(basic),
        _ => Err(NotAStaple::Malformed),
    }
}

/// The only SingleResponse in a BasicOCSPResponse.
fn single_response(basic: &[u8]) -> Result<&[u8], NotAStaple> {
    let basic = sequence(basic)?;
    let [(SEQUENCE, data), (SEQUENCE, _), (BIT_STRING, _)] = without_last(&basic, FIELD_0) else {
        return Err(NotAStaple::Malformed);
    };
    let data = all(data)?;
    let data = match data.as_slice() {
        [(FIELD_0, [INTEGER, 1, 0]), data @ ..] => data,
        data => data,
    };
    let [(FIELD_1 | FIELD_2, _), produced, (SEQUENCE, responses)] = without_last(data, FIELD_1) else {
        return Err(NotAStaple::Malformed);
    };
    moment(*produced)?;
    match *all(responses)? {
        [(SEQUENCE, single)] => Ok(single),
        [_] => Err(NotAStaple::Malformed),
        ref responses => Err(NotAStaple::NotOne(responses.len())),
    }
}

/// The serial number in a CertID.
fn serial(id: &[u8]) -> Result<String, NotAStaple> {
    match *all(id)? {
        [(SEQUENCE, _), (OCTET_STRING, _), (OCTET_STRING, _), (INTEGER, serial)] if is_number(serial) => {
            Ok(hexadecimal(serial))
        }
        _ => Err(NotAStaple::Malformed),
    }
}

/// Good, revoked or unknown.
fn is_status(part: Part<'_>) -> bool {
    matches!(part, (0x80 | 0x82, []) | (FIELD_1, _))
}

/// Whether an integer is not negative, and in its only encoding.
fn is_number(content: &[u8]) -> bool {
    matches!(content, [0] | [1..=0x7f, ..] | [0, 0x80..=0xff, ..])
}

fn moment(part: Part<'_>) -> Result<SystemTime, NotAStaple> {
    let (GENERALIZED_TIME, digits) = part else { return Err(NotAStaple::Malformed) };
    let text = std::str::from_utf8(digits).ok().filter(|_| is_time(part));
    let fields = text.and_then(|text| {
        let [year, month, day, hour, minute, second] =
            [0..4, 4..6, 6..8, 8..10, 10..12, 12..14].map(|range| text.get(range));
        Some(format!("{}-{}-{}T{}:{}:{}Z", year?, month?, day?, hour?, minute?, second?))
    });
    fields.and_then(|text| humantime::parse_rfc3339(&text).ok()).ok_or(NotAStaple::Malformed)
}

/// The parts of the only value in `bytes`, a sequence.
fn sequence(bytes: &[u8]) -> Result<Vec<Part<'_>>, NotAStaple> {
    match *all(bytes)? {
        [(SEQUENCE, content)] => all(content),
        _ => Err(NotAStaple::Malformed),
    }
}

fn all(bytes: &[u8]) -> Result<Vec<Part<'_>>, NotAStaple> {
    parts(bytes).ok_or(NotAStaple::Malformed)
}

/// Without the last part if that is the optional one with this tag.
fn without_last<'a, 'b>(parts: &'a [Part<'b>], tag: u8) -> &'a [Part<'b>] {
    match parts {
        [parts @ .., (last, _)] if *last == tag => parts,
        parts => parts,
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    fn tlv(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        let length = match length {
            [0, short @ ..0x80] => vec![short],
            [0, medium] => vec![0x81, medium],
            [a, b] => vec![0x82, a, b],
        };
        [&[tag], length.as_slice(), content].concat()
    }

    fn time(at: SystemTime) -> Vec<u8> {
        let digits: String = rfc3339(at).to_string().chars().filter(char::is_ascii_digit).collect();
        tlv(GENERALIZED_TIME, format!("{digits}Z").as_bytes())
    }

    /// A SingleResponse: good, for the certificate with this serial number in hexadecimal.
    pub(crate) fn single(serial: &str, from: SystemTime, until: Option<SystemTime>) -> Vec<u8> {
        let mut serial: Vec<u8> = (0..serial.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&serial[at..at + 2], 16).unwrap())
            .collect();
        if serial[0] >= 0x80 {
            serial.insert(0, 0);
        }
        let sha1 = tlv(SEQUENCE, &[tlv(OID, &[0x2b, 14, 3, 2, 26]), vec![5, 0]].concat());
        let hash = tlv(OCTET_STRING, &[7; 20]);
        let id = tlv(SEQUENCE, &[sha1, hash.clone(), hash, tlv(INTEGER, &serial)].concat());
        let until = until.map(|until| tlv(FIELD_0, &time(until))).unwrap_or_default();
        tlv(SEQUENCE, &[id, vec![0x80, 0], time(from), until].concat())
    }

    /// An OCSPResponse with an invalid signature.
    pub(crate) fn response(from: SystemTime, singles: &[Vec<u8>]) -> Vec<u8> {
        let responder = tlv(FIELD_2, &tlv(OCTET_STRING, &[7; 20]));
        let data = tlv(SEQUENCE, &[responder, time(from), tlv(SEQUENCE, &singles.concat())].concat());
        let algorithm = tlv(SEQUENCE, &tlv(OID, &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2]));
        let basic = tlv(SEQUENCE, &[data, algorithm, tlv(BIT_STRING, &[0, 1, 2, 3])].concat());
        let bytes = tlv(SEQUENCE, &[tlv(OID, BASIC), tlv(OCTET_STRING, &basic)].concat());
        tlv(SEQUENCE, &[vec![ENUMERATED, 1, 0], tlv(FIELD_0, &bytes)].concat())
    }

    /// A response for one certificate.
    pub(crate) fn staple(serial: &str, from: SystemTime, until: SystemTime) -> Vec<u8> {
        response(from, &[single(serial, from, Some(until))])
    }
}

#[cfg(test)]
mod tests;
