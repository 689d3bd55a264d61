//! Conversations from the client's view, played against a session in each dialect.

/// Runs generic tests in each dialect.
macro_rules! in_both_dialects {
    ($($name:ident)*) => {
        mod sotw { $(#[test] fn $name() { super::$name::<super::StateOfTheWorld>(); })* }
        mod delta { $(#[test] fn $name() { super::$name::<super::Delta>(); })* }
    };
}

mod other_agents;
mod pushes;
mod random;
mod reconnects;
mod requests;
mod resubscriptions;
mod subscriptions;
mod unknown_names;
mod verdicts;

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;

use super::client::{ClientDialect, RequestFields, ResponseFields, payload, value};
use super::*;
use crate::proto::envoy::extensions::transport_sockets::tls::v3::Secret;
use crate::proto::google::protobuf::Any;
use crate::secret::{Resource, Version};
use crate::serve::sds::session::Session;
use crate::serve::sds::version::Combined;

/// One line of a conversation.
#[derive(Debug)]
enum Step {
    /// The client opens a stream for these names.
    Open(&'static [&'static str]),
    /// The client opens a stream for these names and holds these versions.
    Reconnect(&'static [&'static str], &'static [Item]),
    /// The client subscribes to exactly these names, with the last nonce: this also acknowledges the last response.
    SetNames(&'static [&'static str]),
    /// Like `SetNames`, with this nonce.
    SetNamesOf(&'static str, &'static [&'static str]),
    /// The client subscribes to some names, perhaps again, and unsubscribes from others, without a nonce. Delta only.
    Change { subscribe: &'static [&'static str], unsubscribe: &'static [&'static str] },
    /// The client acknowledges the last response.
    Ack,
    /// The client rejects the last response.
    Nack,
    /// The client acknowledges the response with this nonce.
    AckOf(&'static str),
    /// The client rejects the response with this nonce.
    NackOf(&'static str),
    /// A name has a new value.
    Publish(&'static str, &'static str),
    /// The client is sent exactly this.
    Sent(&'static [Item]),
    /// The client is sent this, and in delta also that these names are removed.
    SentAndRemoved(&'static [Item], &'static [&'static str]),
    /// The client is sent nothing.
    Silence,
    /// The last request acknowledged this.
    Accepted(&'static [Item]),
    /// The last request rejected this.
    Rejected(&'static [Item]),
    /// The last request had no verdict.
    NoVerdict,
    /// Exactly this has turned out to be held from an earlier stream, since the last such step.
    Held(&'static [Item]),
    /// Steps for state of the world only.
    InSotw(&'static [Step]),
    /// Steps for delta only.
    InDelta(&'static [Step]),
}

use Step::*;

/// A name and its value.
type Item = (&'static str, &'static str);

/// The only names that can be served.
const SERVED: [&str; 3] = ["a", "b", "c"];

fn version(name: &str, value: &str) -> Version {
    Version::of(format!("{name} {value}").as_bytes())
}

fn owned(items: &[Item]) -> Vec<(Arc<str>, Version)> {
    items.iter().map(|(name, value)| ((*name).into(), version(name, value))).collect()
}

/// One version for several names.
fn combined<'a>(versions: impl Iterator<Item = (&'a str, &'a Version)>) -> String {
    versions.collect::<Combined>().to_string()
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// Both ends of a stream, with the loop between them reduced to the protocol.
#[derive(Default)]
struct Talk<D> {
    session: Session,
    dialect: D,
    /// All published values, whether or not subscribed.
    published: BTreeMap<String, String>,
    subscribed: BTreeSet<String>,
    /// The version that the client accepted last, as `version_info`.
    accepted: String,
    last: Option<ResponseFields>,
    nonces: BTreeSet<String>,
    received: Received,
    /// What the client has turned out to hold since an earlier stream.
    confirmed: Vec<(Arc<str>, Version)>,
}

/// What the client is sent: names and values, and removed names.
type Sending = (Vec<(String, String)>, Vec<String>);

impl<D: ClientDialect> Talk<D> {
    /// The fields that every request of this client has.
    fn fields(&self) -> RequestFields {
        RequestFields {
            type_url: SECRET_TYPE_URL.to_owned(),
            names: self.subscribed.iter().cloned().collect(),
            version: self.accepted.clone(),
            ..RequestFields::default()
        }
    }

    fn receive(&mut self, fields: RequestFields) {
        self.received = self.dialect.receive(&mut self.session, D::request(fields)).unwrap();
        for id in self.received.added.clone() {
            let name = Arc::clone(self.session.name(id).unwrap());
            if SERVED.contains(&&*name) {
                self.offer(&name);
            } else {
                self.dialect.refuse(&mut self.session, id);
            }
        }
    }

    /// `held` has names and versions, as text.
    fn open(&mut self, names: &[&str], held: Vec<(String, String)>) {
        let subscribe = strings(names);
        self.subscribed = subscribe.iter().cloned().collect();
        self.receive(RequestFields { node: RequestFields::node(), subscribe, held, ..self.fields() });
    }

    fn set_names(&mut self, nonce: &str, names: &[&str]) {
        let names: BTreeSet<_> = strings(names).into_iter().collect();
        let subscribe = names.difference(&self.subscribed).cloned().collect();
        let unsubscribe = self.subscribed.difference(&names).cloned().collect();
        self.subscribed = names;
        self.receive(RequestFields { nonce: nonce.to_owned(), subscribe, unsubscribe, ..self.fields() });
    }

    fn change(&mut self, subscribe: &[&str], unsubscribe: &[&str]) {
        let (subscribe, unsubscribe) = (strings(subscribe), strings(unsubscribe));
        self.subscribed.retain(|name| !unsubscribe.contains(name));
        self.subscribed.extend(subscribe.iter().cloned());
        self.receive(RequestFields { subscribe, unsubscribe, ..self.fields() });
    }

    fn ack(&mut self, nonce: &str) {
        if let Some(last) = self.last.as_ref().filter(|last| last.nonce == nonce) {
            self.accepted.clone_from(&last.version);
        }
        self.receive(RequestFields { nonce: nonce.to_owned(), ..self.fields() });
    }

    fn nack(&mut self, nonce: &str) {
        let rejection = Some("no\nway".to_owned());
        self.receive(RequestFields { nonce: nonce.to_owned(), rejection, ..self.fields() });
    }

    fn last_nonce(&self) -> String {
        self.last.as_ref().map(|last| last.nonce.clone()).unwrap_or_default()
    }

    fn publish(&mut self, name: &str, value: &str) {
        self.published.insert(name.to_owned(), value.to_owned());
        self.offer(name);
    }

    /// Like the store for a subscription: offers the newest value, now and at each change.
    fn offer(&mut self, name: &str) {
        if let Some(value) = self.published.get(name).filter(|_| self.subscribed.contains(name)) {
            let resource = Resource::new(version(name, value), payload(value));
            self.session.offer(self.session.id(name).unwrap(), resource);
        }
    }

    fn respond(&mut self) -> Sending {
        let response = self.dialect.respond(&mut self.session);
        self.confirmed.extend(self.session.take_confirmed());
        let Some((_, response)) = response else { return Sending::default() };
        let fields = D::response(response);
        assert!(self.nonces.insert(fields.nonce.clone()), "nonce {} again", fields.nonce);
        assert_eq!(fields.type_url, SECRET_TYPE_URL);
        let item = |any: &Any| {
            assert_eq!(any.type_url, SECRET_TYPE_URL);
            let secret = Secret::decode(any.value.clone()).unwrap();
            (secret.name.clone(), value(secret))
        };
        let items: Vec<_> = fields.resources.iter().map(item).collect();
        let labels: Vec<_> =
            items.iter().map(|(name, value)| (name.clone(), version(name, value).to_string())).collect();
        assert_eq!(fields.labels, D::IS_DELTA.then_some(labels));
        let removed = fields.removed.clone();
        assert!(!items.is_empty() || !removed.is_empty(), "an empty response");
        self.last = Some(fields);
        assert!(self.dialect.respond(&mut self.session).is_none(), "one response has everything");
        (items, removed)
    }

    fn expect(&mut self, items: &[Item], removed: &[&str]) {
        let (sent, removed_names) = self.respond();
        let sent: Vec<_> = sent.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!((sent.as_slice(), removed_names), (items, strings(removed)));
    }

    fn play(&mut self, step: &Step) {
        let verdict = |items: &[Item], rejection: Option<&str>| {
            Some(Verdict { items: owned(items), rejection: rejection.map(str::to_owned) })
        };
        match *step {
            Open(names) => self.open(names, Vec::new()),
            Reconnect(names, items) => {
                let held: Vec<_> = owned(items);
                self.accepted = combined(held.iter().map(|(name, version)| (&**name, version)));
                let held =
                    held.iter().map(|(name, version)| (name.to_string(), version.to_string())).collect();
                self.open(names, held);
            }
            SetNames(names) => self.set_names(&self.last_nonce(), names),
            SetNamesOf(nonce, names) => self.set_names(nonce, names),
            Change { subscribe, unsubscribe } => {
                assert!(D::IS_DELTA, "this step is for delta only");
                self.change(subscribe, unsubscribe);
            }
            Ack => self.ack(&self.last_nonce()),
            Nack => self.nack(&self.last_nonce()),
            AckOf(nonce) => self.ack(nonce),
            NackOf(nonce) => self.nack(nonce),
            Publish(name, value) => self.publish(name, value),
            Sent(items) => self.expect(items, &[]),
            SentAndRemoved(items, removed) => self.expect(items, if D::IS_DELTA { removed } else { &[] }),
            Silence => self.expect(&[], &[]),
            Accepted(items) => assert_eq!(self.received.verdict, verdict(items, None)),
            Rejected(items) => assert_eq!(self.received.verdict, verdict(items, Some("no\u{fffd}way"))),
            NoVerdict => assert_eq!(self.received.verdict, None),
            Held(items) => assert_eq!(std::mem::take(&mut self.confirmed), owned(items)),
            InSotw(steps) if !D::IS_DELTA => steps.iter().for_each(|step| self.play(step)),
            InDelta(steps) if D::IS_DELTA => steps.iter().for_each(|step| self.play(step)),
            InSotw(_) | InDelta(_) => {}
        }
    }
}

/// Plays each conversation in both dialects; a failure is reported with its title and line.
fn play(conversations: &[(&str, &[Step])]) {
    fn play_in<D: ClientDialect>(title: &str, steps: &[Step]) {
        let mut talk = Talk::<D>::default();
        for (line, step) in steps.iter().enumerate() {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| talk.play(step)));
            let dialect = if D::IS_DELTA { "delta" } else { "sotw" };
            assert!(outcome.is_ok(), "{title:?} in {dialect}, line {}: {step:?}", line + 1);
        }
    }
    for (title, steps) in conversations {
        play_in::<StateOfTheWorld>(title, steps);
        play_in::<Delta>(title, steps);
    }
}
