//! Runs arbitrary bytes as the requests of a stream, for the fuzzer and for a test with almost valid bytes. Not part of the
//! agent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Buf as _;
use prost::Message;

use super::dialect::{Delta, Dialect, StateOfTheWorld};
use super::session::Session;
use crate::base::limits;
use crate::secret::{Payload, Resource, Version};

/// Names that can be served.
const SERVED: [&str; 3] = ["default", "ROOTCA", "a"];

/// In the first byte of a chunk: send a response after the request.
const RESPOND: u8 = 0x10;
/// In the first byte of a chunk: before the request, publish a new value. The lower four bits select name and content.
const OFFER: u8 = 0x20;

/// What happened in one dialect.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Requests that were accepted.
    pub received: usize,
    /// Requests with a verdict.
    pub verdicts: usize,
    /// Requests that ended the stream, and with it the run.
    pub refused: usize,
    pub responses: usize,
    /// Names that were sent as removed.
    pub removed: usize,
}

/// Runs `bytes` against a session of each dialect, and panics if a rule of the protocol is broken.
///
/// Each chunk is a control byte, the length of a request in two bytes, big-endian, and that many bytes (the last chunk may be
/// shorter). Bytes that are not a request are skipped.
pub fn requests(bytes: &[u8]) -> [Outcome; 2] {
    [run::<StateOfTheWorld>(bytes), run::<Delta>(bytes)]
}

fn run<D>(mut bytes: &[u8]) -> Outcome
where
    D: Dialect<Request: Message + Default>,
{
    let mut stream = Stream::<D>::default();
    while let [control, high, low, rest @ ..] = bytes {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (request, rest) = rest.split_at(length);
        bytes = rest;
        if control & OFFER != 0 {
            stream.publish(usize::from(control & 3), control >> 2 & 3);
        }
        if let Ok(request) = D::Request::decode(request)
            && !stream.receive(request)
        {
            break;
        }
        if control & RESPOND != 0 {
            stream.respond();
        }
    }
    stream.respond();
    stream.outcome
}

/// A stream, and what an observer knows about it.
#[derive(Default)]
struct Stream<D> {
    dialect: D,
    session: Session,
    /// All published values, whether or not subscribed.
    published: BTreeMap<&'static str, Resource>,
    subscribed: BTreeSet<String>,
    nonces: BTreeSet<u64>,
    /// Responses without a verdict.
    waiting: Vec<Vec<(Arc<str>, Version)>>,
    outcome: Outcome,
}

impl<D> Stream<D>
where
    D: Dialect<Request: Message>,
{
    fn publish(&mut self, name: usize, value: u8) {
        let Some(name) = SERVED.get(name) else { return };
        let value = format!("{name} {value}").into_bytes();
        let version = Version::of(&value);
        self.published.insert(name, Resource::new(version, Payload::from_bytes(value.into())));
        self.offer_to_session(name);
    }

    fn offer_to_session(&mut self, name: &str) {
        let resource = self.published.get(name).filter(|_| self.subscribed.contains(name));
        if let (Some(resource), Some(id)) = (resource, self.session.id(name)) {
            self.session.offer(id, resource.clone());
        }
    }

    /// False if the request ends the stream.
    fn receive(&mut self, request: D::Request) -> bool {
        let received = match self.dialect.receive(&mut self.session, request) {
            Ok(received) => received,
            Err(refusal) => {
                let status = tonic::Status::from(refusal);
                let is_valid = !status.message().is_empty() && status.message().len() < 5_000;
                assert!(is_valid && !status.message().contains('\n'), "{}", status.message());
                self.outcome.refused += 1;
                return false;
            }
        };
        self.outcome.received += 1;
        assert!(!self.dialect.node_id().is_empty(), "a stream without node ID");
        if let Some(verdict) = received.verdict {
            let at = self.waiting.iter().position(|items| *items == verdict.items);
            assert!(at.is_some(), "a verdict on a response that was not sent");
            at.map(|at| self.waiting.swap_remove(at));
            let reason = verdict.rejection.unwrap_or_default();
            assert!(reason.chars().count() <= limits::FOREIGN_TEXT, "a reason of {} bytes", reason.len());
            self.outcome.verdicts += 1;
        }
        for (_, name) in received.removed {
            assert!(self.subscribed.remove(&*name), "{name:?} was not subscribed");
        }
        for id in received.added {
            let name = self.session.name(id).map(|name| name.to_string()).unwrap_or_default();
            assert!(self.subscribed.insert(name.clone()), "{name:?} was subscribed");
            if SERVED.contains(&name.as_str()) {
                self.offer_to_session(&name);
            } else {
                self.dialect.refuse(&mut self.session, id);
            }
        }
        let names: BTreeSet<_> = self.session.names().collect();
        assert!(names.iter().eq(&self.subscribed), "the session has other names than were subscribed");
        assert_eq!(self.session.len(), names.len());
        assert_eq!(self.session.name_bytes(), names.iter().map(|name| name.len()).sum::<usize>());
        assert!(self.subscribed.len() <= limits::NAMES_PER_STREAM);
        assert!(self.subscribed.iter().map(String::len).sum::<usize>() <= limits::NAME_BYTES_PER_STREAM);
        true
    }

    fn respond(&mut self) {
        let Some((push, response)) = self.dialect.respond(&mut self.session) else { return };
        assert!(self.nonces.insert(push.nonce), "a nonce is used twice");
        assert!(!push.items.is_empty() || !push.removed.is_empty(), "an empty response");
        assert!(push.items.len() <= SERVED.len());
        for item in &push.items {
            let name = &*item.name;
            assert!(self.subscribed.contains(name), "{name:?} is not subscribed");
            let newest = self.published.get(name).map(|resource| &resource.version);
            assert_eq!(newest, Some(&item.resource.version), "{name:?} has a newer value");
        }
        for name in &push.removed {
            assert!(self.subscribed.contains(&**name), "{name:?} is not subscribed");
            assert!(!SERVED.contains(&&**name), "{name:?} can be served");
        }
        assert!(response.remaining() < 2 * limits::NAME_BYTES_PER_STREAM);
        self.outcome.responses += 1;
        self.outcome.removed += push.removed.len();
        let items = push.items.into_iter().map(|item| (item.name, item.resource.version.clone()));
        self.waiting.push(items.collect());
        assert!(self.dialect.respond(&mut self.session).is_none(), "a response was incomplete");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::SECRET_TYPE_URL;
    use crate::serve::sds::dialect::client::{ClientDialect, RequestFields};

    fn chunk(control: u8, request: &[u8]) -> Vec<u8> {
        let length = u16::try_from(request.len()).unwrap().to_be_bytes();
        [&[control], length.as_slice(), request].concat()
    }

    fn some(random: &mut fastrand::Rng, texts: &[&str]) -> Vec<String> {
        texts.iter().filter(|_| random.u8(0..3) == 0).map(|text| (*text).to_owned()).collect()
    }

    /// A request as a client may send it.
    fn request<D: ClientDialect<Request: Message>>(random: &mut fastrand::Rng, is_first: bool) -> Vec<u8> {
        let names = ["default", "ROOTCA", "a", "unknown", "*", "", "default"];
        let nonces = ["", "1", "2", "3", "4", "5", "6", "77"];
        let version = Version::of(format!("a {}", random.u8(0..4)).as_bytes()).to_string();
        let fields = RequestFields {
            node: RequestFields::node().filter(|_| is_first),
            type_url: random.choice(["", SECRET_TYPE_URL]).unwrap().to_owned(),
            nonce: (*random.choice(&nonces).unwrap()).to_owned(),
            rejection: (random.u8(0..3) == 0).then(|| "no\nway".repeat(random.usize(0..99))),
            names: some(random, &names),
            version: version.clone(),
            subscribe: some(random, &names),
            unsubscribe: some(random, &names),
            held: some(random, &names).into_iter().map(|name| (name, version.clone())).collect(),
        };
        D::request(fields).encode_to_vec()
    }

    /// Changes, adds or removes some bytes.
    fn mutate(random: &mut fastrand::Rng, bytes: &mut Vec<u8>) {
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..=bytes.len());
            match random.u8(0..5) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, random.u8(..)),
                2 => drop(bytes.drain(at..(at + random.usize(0..9)).min(bytes.len()))),
                3 => bytes.extend_from_within(at..),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << random.u8(0..8)),
            }
        }
    }

    fn conversation<D: ClientDialect<Request: Message>>(random: &mut fastrand::Rng) -> Vec<u8> {
        let mut bytes = Vec::new();
        for at in 0..random.usize(1..20) {
            let mut request = request::<D>(random, at == 0);
            if random.u8(0..4) == 0 {
                mutate(random, &mut request);
            }
            bytes.extend(chunk(random.u8(..), &request));
        }
        if random.u8(0..4) == 0 {
            mutate(random, &mut bytes);
        }
        bytes
    }

    #[test]
    fn almost_valid_requests_break_no_rule() {
        let mut sums = [Outcome::default(), Outcome::default()];
        for seed in 0..3_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let is_delta = seed % 2 == 1;
            let bytes = if is_delta {
                conversation::<Delta>(&mut random)
            } else {
                conversation::<StateOfTheWorld>(&mut random)
            };
            let outcomes = std::panic::catch_unwind(|| requests(&bytes));
            assert!(outcomes.is_ok(), "seed {seed}: {}", bytes.escape_ascii());
            let [sotw, delta] = outcomes.unwrap();
            // The other dialect runs them too, but most of the bytes are not requests there.
            let outcome = if is_delta { delta } else { sotw };
            let sum = &mut sums[usize::from(is_delta)];
            sum.received += outcome.received;
            sum.verdicts += outcome.verdicts;
            sum.refused += outcome.refused;
            sum.responses += outcome.responses;
            sum.removed += outcome.removed;
        }
        // Every outcome was reached, and often.
        for (is_delta, sum) in [false, true].into_iter().zip(sums) {
            let least = [sum.received, sum.verdicts, sum.refused, sum.responses].into_iter().min();
            assert!(least > Some(100) && (sum.removed > 100) == is_delta, "{sum:?}");
        }
    }

    #[test]
    fn random_bytes_break_no_rule() {
        for seed in 0..1_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let bytes: Vec<_> = (0..random.usize(0..300)).map(|_| random.u8(..)).collect();
            requests(&bytes);
        }
    }
}
