//! Conversations, told from the client's side and played against the session through each dialect.

/// A test that is told once and runs in each dialect.
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

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::client::{Answer, Wire, Words};
use super::*;
use crate::proto::google::protobuf::Any;
use crate::serve::sds::session::Session;

/// One line of a conversation.
#[derive(Debug)]
enum Step {
    /// The client opens a stream for these names.
    Open(&'static [&'static str]),
    /// The client opens a stream for these names, and says that it holds these versions.
    Return(&'static [&'static str], &'static [Item]),
    /// The client wants these names from now on; it says so with the nonce that it saw last, and so takes what it
    /// got last.
    Want(&'static [&'static str]),
    /// The same, with an older nonce.
    WantOf(&'static str, &'static [&'static str]),
    /// The client asks for some names, again for those that it has, and gives others up. It answers nothing with it.
    /// Only delta can say this.
    Change { ask: &'static [&'static str], give_up: &'static [&'static str] },
    /// The client takes what it got last.
    Ack,
    /// The client refuses what it got last.
    Nack,
    /// The client takes the response with this nonce.
    AckOf(&'static str),
    /// The client refuses the response with this nonce.
    NackOf(&'static str),
    /// This is the newest value of a name.
    Publish(&'static str, &'static str),
    /// The client is sent this, and no more.
    Sent(&'static [Item]),
    /// The client is sent this, and told that these names can never be served: in state of the world it is not told.
    Told(&'static [Item], &'static [&'static str]),
    /// The client is sent nothing.
    Silence,
    /// The last request held a verdict on this.
    Accepted(&'static [Item]),
    /// The last request held a rejection of this.
    Rejected(&'static [Item]),
    /// The last request held no verdict.
    NoVerdict,
    /// How it goes in state of the world alone.
    InSotw(&'static [Step]),
    /// How it goes in delta alone.
    InDelta(&'static [Step]),
}

use Step::*;

/// A name and its value.
type Item = (&'static str, &'static str);

/// Names that can be served. No other ever is.
const SERVED: [&str; 3] = ["a", "b", "c"];

fn version(name: &str, value: &str) -> Version {
    Version::of(format!("{name} {value}").as_bytes())
}

fn owned(items: &[Item]) -> Vec<(String, Version)> {
    items.iter().map(|(name, value)| ((*name).to_owned(), version(name, value))).collect()
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// Both ends of a stream, with the loop between them cut down to what the protocol needs.
#[derive(Default)]
struct Talk<D> {
    session: Session,
    dialect: D,
    resources: HashMap<String, Resource>,
    /// What there is, whether or not somebody subscribed to it.
    world: BTreeMap<String, String>,
    wanted: BTreeSet<String>,
    /// What the client accepted last, as `version_info`.
    accepted: String,
    last: Option<Answer>,
    nonces: BTreeSet<String>,
    received: Received,
}

/// What the client is sent: names and values, and the names that it is told not to wait for.
type Heard = (Vec<(String, String)>, Vec<String>);

impl<D: Wire> Talk<D> {
    /// What every request of this client says.
    fn words(&self) -> Words {
        Words {
            type_url: SECRET_TYPE_URL.to_owned(),
            names: self.wanted.iter().cloned().collect(),
            version: self.accepted.clone(),
            ..Words::default()
        }
    }

    fn receive(&mut self, words: Words) {
        self.received = self.dialect.receive(&mut self.session, D::request(words)).unwrap();
        for name in &self.received.removed {
            self.resources.remove(name);
        }
        for name in self.received.added.clone() {
            if SERVED.contains(&name.as_str()) {
                self.offer(&name);
            } else {
                self.dialect.refuse(&mut self.session, &name);
            }
        }
    }

    /// `held` are names and versions, as text.
    fn open(&mut self, names: &[&str], held: Vec<(String, String)>) {
        let subscribe = strings(names);
        self.wanted = subscribe.iter().cloned().collect();
        self.receive(Words { node: Words::node(), subscribe, held, ..self.words() });
    }

    fn want(&mut self, nonce: &str, names: &[&str]) {
        let wanted: BTreeSet<_> = strings(names).into_iter().collect();
        let subscribe = wanted.difference(&self.wanted).cloned().collect();
        let unsubscribe = self.wanted.difference(&wanted).cloned().collect();
        self.wanted = wanted;
        self.receive(Words { nonce: nonce.to_owned(), subscribe, unsubscribe, ..self.words() });
    }

    fn change(&mut self, subscribe: &[&str], unsubscribe: &[&str]) {
        let (subscribe, unsubscribe) = (strings(subscribe), strings(unsubscribe));
        self.wanted.retain(|name| !unsubscribe.contains(name));
        self.wanted.extend(subscribe.iter().cloned());
        self.receive(Words { subscribe, unsubscribe, ..self.words() });
    }

    fn ack(&mut self, nonce: &str) {
        if let Some(last) = self.last.as_ref().filter(|last| last.nonce == nonce) {
            self.accepted.clone_from(&last.version);
        }
        self.receive(Words { nonce: nonce.to_owned(), ..self.words() });
    }

    fn nack(&mut self, nonce: &str) {
        let rejection = Some("no\nway".to_owned());
        self.receive(Words { nonce: nonce.to_owned(), rejection, ..self.words() });
    }

    fn last_nonce(&self) -> String {
        self.last.as_ref().map(|last| last.nonce.clone()).unwrap_or_default()
    }

    fn publish(&mut self, name: &str, value: &str) {
        self.world.insert(name.to_owned(), value.to_owned());
        self.offer(name);
    }

    /// As the cache does for whoever subscribes: the newest value, now and at each change.
    fn offer(&mut self, name: &str) {
        if let Some(value) = self.world.get(name).filter(|_| self.wanted.contains(name)) {
            let version = version(name, value);
            let value = format!("{name} {value}").into_bytes().into();
            let any = Any { type_url: SECRET_TYPE_URL.to_owned(), value };
            self.session.offer(name, version.clone());
            self.resources.insert(name.to_owned(), Resource { version, any });
        }
    }

    fn respond(&mut self) -> Heard {
        let Some((_, response)) = self.dialect.respond(&mut self.session, &self.resources) else {
            return Heard::default();
        };
        let answer = D::answer(response);
        assert!(self.nonces.insert(answer.nonce.clone()), "nonce {} again", answer.nonce);
        assert_eq!(answer.type_url, SECRET_TYPE_URL);
        let item = |any: &Any| {
            assert_eq!(any.type_url, SECRET_TYPE_URL);
            let text = String::from_utf8(any.value.to_vec()).unwrap();
            text.split_once(' ').map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap()
        };
        let items: Vec<_> = answer.resources.iter().map(item).collect();
        let labels: Vec<_> =
            items.iter().map(|(name, value)| (name.clone(), version(name, value).to_string())).collect();
        assert_eq!(answer.labels, D::IS_DELTA.then_some(labels));
        let removed = answer.removed.clone();
        assert!(!items.is_empty() || !removed.is_empty(), "an empty response");
        self.last = Some(answer);
        assert!(
            self.dialect.respond(&mut self.session, &self.resources).is_none(),
            "everything goes at once"
        );
        (items, removed)
    }

    fn expect(&mut self, items: &[Item], removed: &[&str]) {
        let (sent, told) = self.respond();
        let sent: Vec<_> = sent.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!((sent.as_slice(), told), (items, strings(removed)));
    }

    fn play(&mut self, step: &Step) {
        let verdict = |items: &[Item], rejection: Option<&str>| {
            Some(Verdict { items: owned(items), rejection: rejection.map(str::to_owned) })
        };
        match *step {
            Open(names) => self.open(names, Vec::new()),
            Return(names, items) => {
                let held: Vec<_> = owned(items);
                self.accepted = combined(held.iter().map(|(name, version)| (name.as_str(), version)));
                let held = held.into_iter().map(|(name, version)| (name, version.to_string())).collect();
                self.open(names, held);
            }
            Want(names) => self.want(&self.last_nonce(), names),
            WantOf(nonce, names) => self.want(nonce, names),
            Change { ask, give_up } => {
                assert!(D::IS_DELTA, "only delta can say this");
                self.change(ask, give_up);
            }
            Ack => self.ack(&self.last_nonce()),
            Nack => self.nack(&self.last_nonce()),
            AckOf(nonce) => self.ack(nonce),
            NackOf(nonce) => self.nack(nonce),
            Publish(name, value) => self.publish(name, value),
            Sent(items) => self.expect(items, &[]),
            Told(items, removed) => self.expect(items, if D::IS_DELTA { removed } else { &[] }),
            Silence => self.expect(&[], &[]),
            Accepted(items) => assert_eq!(self.received.verdict, verdict(items, None)),
            Rejected(items) => assert_eq!(self.received.verdict, verdict(items, Some("no\u{fffd}way"))),
            NoVerdict => assert_eq!(self.received.verdict, None),
            InSotw(steps) if !D::IS_DELTA => steps.iter().for_each(|step| self.play(step)),
            InDelta(steps) if D::IS_DELTA => steps.iter().for_each(|step| self.play(step)),
            InSotw(_) | InDelta(_) => {}
        }
    }
}

/// Plays each conversation in both dialects; what fails is told with its name and line.
fn play(conversations: &[(&str, &[Step])]) {
    fn play_in<D: Wire>(title: &str, steps: &[Step]) {
        let mut talk = Talk::<D>::default();
        for (line, step) in steps.iter().enumerate() {
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| talk.play(step)));
            let dialect = if D::IS_DELTA { "delta" } else { "sotw" };
            assert!(told.is_ok(), "{title:?} in {dialect}, line {}: {step:?}", line + 1);
        }
    }
    for (title, steps) in conversations {
        play_in::<StateOfTheWorld>(title, steps);
        play_in::<Delta>(title, steps);
    }
}
