//! Conversations, told from the client's side and played against the session through each dialect.

/// A test that is told once and runs in each dialect.
macro_rules! in_both_dialects {
    ($($name:ident)*) => {
        mod sotw { $(#[test] fn $name() { super::$name::<super::StateOfTheWorld>(); })* }
        mod delta { $(#[test] fn $name() { super::$name::<super::Delta>(); })* }
    };
}

mod random;

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

#[test]
fn a_version_is_sent_once_and_the_next_one_is_pushed() {
    play(&[
        (
            "what is there is sent at once, and not again",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                NoVerdict,
                Sent(&[("a", "1")]),
                Silence,
                Ack,
                Accepted(&[("a", "1")]),
                Silence,
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "a renewal is pushed once",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Accepted(&[("a", "2")]),
                Silence,
            ],
        ),
        (
            "of two updates before a push the newest is sent",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Publish("a", "3"),
                Sent(&[("a", "3")]),
                Ack,
                Accepted(&[("a", "3")]),
                Silence,
            ],
        ),
        (
            "an update that is taken back before it is pushed is no update",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "an answer that never comes holds nothing back",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Publish("a", "3"),
                Sent(&[("a", "3")]),
                Ack,
                Accepted(&[("a", "3")]),
                Silence,
            ],
        ),
        (
            "an answer twice is one verdict",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Accepted(&[("a", "1")]),
                Ack,
                NoVerdict,
                Nack,
                NoVerdict,
                Silence,
            ],
        ),
    ]);
}

#[test]
fn a_rejected_version_is_not_sent_again() {
    play(&[
        (
            "the next different version is sent",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Nack,
                Rejected(&[("a", "2")]),
                Silence,
                Publish("a", "2"),
                Silence,
                Publish("a", "3"),
                Sent(&[("a", "3")]),
                Ack,
                Accepted(&[("a", "3")]),
                Silence,
            ],
        ),
        (
            "nor when it comes back after a version that was accepted",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Nack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Publish("a", "1"),
                Silence,
                Publish("a", "3"),
                Sent(&[("a", "3")]),
            ],
        ),
        (
            "nor when it comes back after another that was rejected",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Nack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Nack,
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "what was accepted before its successor was rejected replaces that when it comes back",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Nack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
                Publish("a", "3"),
                Sent(&[("a", "3")]),
            ],
        ),
        (
            "names that were in another response are not touched by it",
            &[
                Publish("a", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("b", "1"),
                Sent(&[("b", "1")]),
                Nack,
                Rejected(&[("b", "1")]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Accepted(&[("a", "2")]),
            ],
        ),
        (
            "asking anew for the name answers it even so",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Nack,
                Want(&[]),
                Want(&["a"]),
                Sent(&[("a", "1")]),
            ],
        ),
    ]);
}

#[test]
fn a_verdict_is_about_the_response_that_it_names() {
    play(&[
        (
            "an older response: delta hears each, state of the world only the last one",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                AckOf("1"),
                InSotw(&[NoVerdict]),
                InDelta(&[Accepted(&[("a", "1")])]),
                Silence,
                NackOf("1"),
                NoVerdict,
                Silence,
                AckOf("2"),
                Accepted(&[("a", "2")]),
                Silence,
            ],
        ),
        (
            "a nonce that never was is no verdict",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                AckOf("1"),
                NoVerdict,
                Sent(&[("a", "1")]),
                NackOf("77"),
                NoVerdict,
                NackOf("0"),
                NoVerdict,
                NackOf("01"),
                NoVerdict,
                NackOf("+1"),
                NoVerdict,
                NackOf("one\n"),
                NoVerdict,
                Ack,
                Accepted(&[("a", "1")]),
                Silence,
            ],
        ),
        (
            "the newer response's verdict still counts after the older one's",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                AckOf("1"),
                NackOf("2"),
                Rejected(&[("a", "2")]),
                Silence,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "the newer response's verdict comes first",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                AckOf("2"),
                Accepted(&[("a", "2")]),
                AckOf("1"),
                InDelta(&[Accepted(&[("a", "1")])]),
                Publish("a", "3"),
                Sent(&[("a", "3")]),
                Nack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "it refuses the newer response and then takes the older one",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                NackOf("2"),
                AckOf("1"),
                InDelta(&[
                    Accepted(&[("a", "1")]),
                    Publish("a", "1"),
                    Sent(&[("a", "1")]),
                    Publish("a", "2"),
                    Silence,
                    Publish("a", "3"),
                    Sent(&[("a", "3")]),
                ]),
                InSotw(&[NoVerdict]),
            ],
        ),
        (
            "it refuses an older response: that version is not sent again, the newer one stands",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                InDelta(&[NackOf("1"), Rejected(&[("a", "1")]), Silence]),
                AckOf("2"),
                Accepted(&[("a", "2")]),
                InDelta(&[Publish("a", "1"), Silence, Publish("a", "2"), Silence]),
                Publish("a", "3"),
                Sent(&[("a", "3")]),
            ],
        ),
        (
            "it refuses a version and takes it when it comes a second time",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
                NackOf("1"),
                InSotw(&[NoVerdict]),
                InDelta(&[Rejected(&[("a", "1")])]),
                Silence,
                AckOf("3"),
                Accepted(&[("a", "1")]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "responses about several names, answered in any order",
            &[
                Publish("a", "1"),
                Open(&["a", "b", "c"]),
                Sent(&[("a", "1")]),
                Publish("b", "1"),
                Sent(&[("b", "1")]),
                Publish("c", "1"),
                Sent(&[("c", "1")]),
                InDelta(&[
                    NackOf("2"),
                    Rejected(&[("b", "1")]),
                    AckOf("3"),
                    Accepted(&[("c", "1")]),
                    AckOf("1"),
                    Accepted(&[("a", "1")]),
                ]),
                InSotw(&[NackOf("2"), NoVerdict, AckOf("3"), Accepted(&[("c", "1")]), AckOf("1"), NoVerdict]),
                Silence,
            ],
        ),
        (
            "one verdict is about all names of its response",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Nack,
                Rejected(&[("a", "1"), ("b", "1")]),
                Silence,
                Publish("b", "2"),
                Sent(&[("b", "2")]),
                Ack,
                Accepted(&[("b", "2")]),
                Silence,
            ],
        ),
        (
            "other names in an answer to an older response: delta hears them, state of the world waits for the last",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                WantOf("1", &["a", "b"]),
                InSotw(&[NoVerdict, Silence, Want(&["a", "b"]), Accepted(&[("a", "2")])]),
                InDelta(&[Accepted(&[("a", "1")])]),
                Sent(&[("b", "1")]),
            ],
        ),
    ]);
}

#[test]
fn subscriptions_change_while_the_stream_is_open() {
    play(&[
        (
            "a name that is added is answered alone",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Want(&["a", "b"]),
                NoVerdict,
                Sent(&[("b", "1")]),
                Ack,
                Accepted(&[("b", "1")]),
                Silence,
            ],
        ),
        (
            "a name that is added with an acceptance is answered",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&["a", "b"]),
                Accepted(&[("a", "1")]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "a name that is added before the first response is answered with it",
            &[
                Open(&["a"]),
                Silence,
                Want(&["a", "b"]),
                Silence,
                Publish("a", "1"),
                Publish("b", "1"),
                Sent(&[("a", "1"), ("b", "1")]),
            ],
        ),
        (
            "nothing is sent for a name that is no longer wanted",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                Want(&["b"]),
                Publish("a", "2"),
                Silence,
                Publish("b", "2"),
                Sent(&[("b", "2")]),
            ],
        ),
        (
            "a name that is asked for anew is answered, unchanged as it is",
            &[
                Publish("a", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1")]),
                Ack,
                Want(&["b"]),
                Silence,
                Want(&["a", "b"]),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
            ],
        ),
        (
            "a verdict on a name that is no longer wanted is still told",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&[]),
                Accepted(&[("a", "1")]),
                Silence,
            ],
        ),
        (
            "a rejection of a name that is no longer wanted is told too, and is no obstacle to asking anew",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { ask: &[], give_up: &["a"] },
                    NoVerdict,
                    Nack,
                    Rejected(&[("a", "1")]),
                    Silence,
                ]),
                InSotw(&[Want(&[])]),
                Publish("a", "2"),
                Publish("a", "1"),
                Silence,
                Want(&["a"]),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "it gives up one name with its answer and asks for another",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&["b"]),
                Accepted(&[("a", "1")]),
                Sent(&[("b", "1")]),
                Publish("a", "2"),
                Silence,
                Publish("b", "2"),
                Sent(&[("b", "2")]),
            ],
        ),
        (
            "a name is given up before it is there",
            &[
                Open(&["a", "b"]),
                Want(&["b"]),
                Publish("a", "1"),
                Silence,
                Publish("b", "1"),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "the last name is given up: the stream stays open for others",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&[]),
                Publish("a", "2"),
                Silence,
                Publish("b", "1"),
                Silence,
                Want(&["b"]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "names that are asked for before anything is there are answered each when it comes",
            &[
                Open(&[]),
                Silence,
                Want(&["a"]),
                Silence,
                Want(&["a", "b"]),
                Publish("b", "1"),
                Sent(&[("b", "1")]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
    ]);
}

/// What only delta can say: there is no other way to ask twice, nor to speak of names without an answer.
#[test]
fn a_name_that_is_asked_for_again_is_answered_again() {
    const AGAIN: Step = Change { ask: &["a"], give_up: &[] };
    play(&[
        (
            "although it is unchanged and was taken",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                InDelta(&[AGAIN, NoVerdict, Sent(&[("a", "1")]), Ack, Accepted(&[("a", "1")])]),
                Silence,
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "although it was not answered yet, and each answer has its verdict",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    AGAIN,
                    Sent(&[("a", "1")]),
                    AckOf("1"),
                    Accepted(&[("a", "1")]),
                    AckOf("2"),
                    Accepted(&[("a", "1")]),
                ]),
                Silence,
            ],
        ),
        (
            "although it was rejected, and it can be rejected again",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Nack,
                InDelta(&[AGAIN, Sent(&[("a", "1")]), Nack, Rejected(&[("a", "1")])]),
                Silence,
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "although its rejection comes after the question",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, NackOf("1"), Rejected(&[("a", "1")]), Sent(&[("a", "1")])]),
            ],
        ),
        (
            "although its acceptance comes after the question",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, AckOf("1"), Accepted(&[("a", "1")]), Sent(&[("a", "1")])]),
            ],
        ),
        (
            "once, although the rejection of the first answer comes after the second",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    AGAIN,
                    Sent(&[("a", "1")]),
                    NackOf("1"),
                    Rejected(&[("a", "1")]),
                    Silence,
                    AckOf("2"),
                    Accepted(&[("a", "1")]),
                ]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
        (
            "and what it was answered with stands, although the first answer was rejected",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                InDelta(&[
                    AGAIN,
                    Sent(&[("a", "2")]),
                    NackOf("2"),
                    Rejected(&[("a", "2")]),
                    Publish("a", "1"),
                    Sent(&[("a", "1")]),
                ]),
            ],
        ),
        (
            "once, however often it is asked for in between",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, Change { ask: &["a", "a"], give_up: &[] }, AGAIN, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
        (
            "alone, without the names that are not asked for again",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                InDelta(&[AGAIN, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
        (
            "with the newest value, and once",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Silence,
            ],
        ),
        (
            "when it comes, if it is not there yet",
            &[Open(&["a"]), InDelta(&[AGAIN]), Silence, Publish("a", "1"), Sent(&[("a", "1")]), Silence],
        ),
        (
            "given up and asked for in one request",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                InDelta(&[
                    Change { ask: &["a"], give_up: &["a"] },
                    Sent(&[("a", "1")]),
                    Publish("a", "2"),
                    Sent(&[("a", "2")]),
                ]),
                Silence,
            ],
        ),
        (
            "given up and asked for in two requests",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                InDelta(&[Change { ask: &[], give_up: &["a"] }, Silence, AGAIN, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
        (
            "given up and asked for while a response is unanswered: its verdict is not about the next one",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { ask: &["a"], give_up: &["a"] },
                    Sent(&[("a", "1")]),
                    NackOf("1"),
                    Rejected(&[("a", "1")]),
                    Silence,
                    AckOf("2"),
                    Accepted(&[("a", "1")]),
                    Silence,
                    Publish("a", "2"),
                    Sent(&[("a", "2")]),
                ]),
            ],
        ),
        (
            "what was taken before it was given up is not held when it is asked for anew",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { ask: &["a"], give_up: &["a"] },
                    Publish("a", "2"),
                    Sent(&[("a", "2")]),
                    AckOf("1"),
                    Accepted(&[("a", "1")]),
                    NackOf("2"),
                    Publish("a", "1"),
                    Sent(&[("a", "1")]),
                ]),
            ],
        ),
        (
            "names that were never asked for are given up without a word",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { ask: &[], give_up: &["b", "nobody", "b", ""] },
                    Silence,
                    Change { ask: &[], give_up: &[] },
                    Silence,
                ]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
    ]);
}

#[test]
fn a_name_that_can_never_be_served_is_told_once() {
    play(&[
        (
            "alone",
            &[
                Open(&["nobody"]),
                Told(&[], &["nobody"]),
                Silence,
                InDelta(&[Ack, NoVerdict, Nack, NoVerdict]),
                Silence,
            ],
        ),
        (
            "with what is ready, in one response",
            &[
                Publish("a", "1"),
                Open(&["a", "nobody", "another"]),
                Told(&[("a", "1")], &["another", "nobody"]),
                Ack,
                Accepted(&[("a", "1")]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
        (
            "a rejection of that response is about what was sent",
            &[
                Publish("a", "1"),
                Open(&["a", "nobody"]),
                Told(&[("a", "1")], &["nobody"]),
                Nack,
                Rejected(&[("a", "1")]),
                Silence,
            ],
        ),
        (
            "never one that is known and merely not there yet",
            &[
                Open(&["a", "b", "nobody"]),
                Told(&[], &["nobody"]),
                Want(&["a", "nobody"]),
                Silence,
                InDelta(&[Change { ask: &["a"], give_up: &[] }, Silence]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "when it is asked for later",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&["a", "nobody"]),
                Accepted(&[("a", "1")]),
                Told(&[], &["nobody"]),
                Silence,
            ],
        ),
        (
            "again when it is asked for again",
            &[
                Open(&["nobody"]),
                Told(&[], &["nobody"]),
                InDelta(&[
                    Change { ask: &["nobody"], give_up: &[] },
                    Told(&[], &["nobody"]),
                    Change { ask: &["nobody"], give_up: &["nobody"] },
                    Told(&[], &["nobody"]),
                ]),
                Want(&[]),
                Silence,
                Want(&["nobody"]),
                Told(&[], &["nobody"]),
                Silence,
            ],
        ),
        (
            "not if it is given up first",
            &[Open(&["a", "nobody"]), Want(&["a"]), Silence, Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "also one that the client says it holds",
            &[Return(&["nobody"], &[("nobody", "1")]), Told(&[], &["nobody"]), Silence],
        ),
        (
            "all names at once are not meant by a star, nor by an empty name",
            &[
                Publish("a", "1"),
                Open(&["*", ""]),
                Told(&[], &["", "*"]),
                Silence,
                Want(&["*", "", "a"]),
                Sent(&[("a", "1")]),
                Publish("b", "1"),
                Silence,
                Want(&["a"]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
    ]);
}

#[test]
fn every_name_has_its_own_fate() {
    play(&[
        (
            "what is ready is sent at once, the rest when it comes",
            &[
                Publish("b", "1"),
                Open(&["a", "b", "c"]),
                Sent(&[("b", "1")]),
                Ack,
                Publish("c", "1"),
                Sent(&[("c", "1")]),
                Ack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
            ],
        ),
        (
            "a name that nobody gives is never sent and holds nothing back",
            &[
                Open(&["a", "nobody"]),
                Told(&[], &["nobody"]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Want(&["nobody"]),
                Silence,
            ],
        ),
        (
            "several names that are ready go in one response, sorted",
            &[
                Publish("b", "1"),
                Publish("a", "1"),
                Open(&["b", "a"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                Accepted(&[("a", "1"), ("b", "1")]),
            ],
        ),
        (
            "a name that is asked for twice is one name",
            &[Publish("a", "1"), Open(&["a", "a"]), Sent(&[("a", "1")]), Ack, Silence],
        ),
        ("no name at all is no answer", &[Publish("a", "1"), Open(&[]), Silence]),
    ]);
}

#[test]
fn a_client_that_comes_back_is_sent_only_what_it_does_not_hold() {
    play(&[
        (
            "it holds the one name's newest version",
            &[
                Publish("a", "1"),
                Return(&["a"], &[("a", "1")]),
                NoVerdict,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
        (
            "it holds an older version",
            &[Publish("a", "2"), Return(&["a"], &[("a", "1")]), Sent(&[("a", "2")]), Ack, Silence],
        ),
        (
            "it holds the newest version of all names",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Return(&["a", "b"], &[("a", "1"), ("b", "1")]),
                Silence,
                Publish("b", "2"),
                Sent(&[("b", "2")]),
            ],
        ),
        (
            "it holds an older version of one of them: which, it can say in delta alone",
            &[
                Publish("a", "1"),
                Publish("b", "2"),
                Return(&["a", "b"], &[("a", "1"), ("b", "1")]),
                InSotw(&[Sent(&[("a", "1"), ("b", "2")])]),
                InDelta(&[Sent(&[("b", "2")])]),
                Silence,
            ],
        ),
        (
            "it never held one of them, because there was none",
            &[
                Publish("a", "1"),
                Return(&["a", "b"], &[("a", "1")]),
                Silence,
                Publish("b", "1"),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "what it holds comes only after it: it is judged then",
            &[Return(&["a"], &[("a", "1")]), Silence, Publish("a", "1"), Silence],
        ),
        (
            "its claim is judged only once",
            &[
                Publish("a", "2"),
                Return(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Ack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "its claim holds for what it asked for then, not for a name that it asks for anew",
            &[Return(&["a"], &[("a", "1")]), Want(&[]), Want(&["a"]), Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "a name that it adds later is answered although it comes back with the rest",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Return(&["a"], &[("a", "1")]),
                Silence,
                Want(&["a", "b"]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "the newer version of what it holds was refused: the older one replaces that when it comes back",
            &[
                Publish("a", "2"),
                Return(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Nack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "it holds versions of names that it does not want: in delta they don't matter",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Return(&["a"], &[("a", "1"), ("b", "1"), ("nobody", "1")]),
                InDelta(&[Silence, Want(&["a", "b"])]),
                InSotw(&[Sent(&[("a", "1")]), Want(&["a", "b"])]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "it says that it holds nothing that ever was here",
            &[
                Publish("a", "1"),
                Return(&["a"], &[("a", "of another agent")]),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
            ],
        ),
        (
            "it holds what it asks for again: it is answered",
            &[
                Publish("a", "1"),
                Return(&["a"], &[("a", "1")]),
                Silence,
                InDelta(&[Change { ask: &["a"], give_up: &[] }, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
    ]);
}

/// Situations of the tests of SPIRE's agent (`sds/v3`) and of Istio's (`sds` and `xds`), which are not named above.
#[test]
fn what_other_agents_test_holds_here() {
    play(&[
        (
            "SPIRE: key pair and bundle on one stream, then both renewed",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                Publish("a", "2"),
                Publish("b", "2"),
                Sent(&[("a", "2"), ("b", "2")]),
                Ack,
                Accepted(&[("a", "2"), ("b", "2")]),
                Silence,
            ],
        ),
        (
            "SPIRE: an update that is not about what was asked for is not sent",
            &[Publish("a", "1"), Open(&["a"]), Sent(&[("a", "1")]), Ack, Publish("b", "1"), Silence],
        ),
        (
            "SPIRE: a wrong nonce is ignored, and the stream goes on",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                AckOf("FOO"),
                NoVerdict,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Accepted(&[("a", "2")]),
            ],
        ),
        (
            "SPIRE: a refused version waits for the next update",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Nack,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Accepted(&[("a", "2")]),
            ],
        ),
        (
            "SPIRE: the names change from one to another with the answer",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&["b"]),
                Sent(&[("b", "1")]),
                Want(&["a", "b"]),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "SPIRE: no name at all subscribes to nothing, not to everything",
            &[Publish("a", "1"), Publish("b", "1"), Open(&[]), Silence, Publish("a", "2"), Silence],
        ),
        (
            "Istio: one of two secrets changes, it alone is pushed",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                Publish("b", "2"),
                Sent(&[("b", "2")]),
                Ack,
                Accepted(&[("b", "2")]),
                Publish("b", "2"),
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "Istio: a client that was away while the secret changed gets the newer one alone",
            &[
                Publish("a", "2"),
                Publish("b", "1"),
                Return(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Ack,
                Silence,
            ],
        ),
        (
            "Istio: a secret that failed at first is pushed when it can be made",
            &[Open(&["a"]), Silence, Want(&["a"]), Silence, Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "Istio: no push after the client gave the name up, though it has not answered",
            &[
                Publish("a", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1")]),
                InDelta(&[Change { ask: &[], give_up: &["a"] }, NoVerdict]),
                InSotw(&[Want(&["b"])]),
                Publish("a", "2"),
                Silence,
                InDelta(&[Ack, Accepted(&[("a", "1")]), Silence]),
            ],
        ),
    ]);
}

fn request<D: Wire>(node: Option<&str>, type_url: &str, names: Vec<String>) -> D::Request {
    D::request(Words {
        node: node.map(|id| Node { id: id.to_owned(), ..Node::default() }),
        type_url: type_url.to_owned(),
        subscribe: names.clone(),
        names,
        ..Words::default()
    })
}

in_both_dialects! {
    only_the_first_request_must_say_who_sends_it
    only_secrets_are_served
    a_stream_has_a_bounded_number_of_names
    the_names_of_a_stream_have_a_bounded_length
}

fn only_the_first_request_must_say_who_sends_it<D: Wire>() {
    let request = |node| request::<D>(node, "", strings(&["a"]));
    for nobody in [None, Some("")] {
        let (mut session, mut dialect) = (Session::default(), D::default());
        let refusal = dialect.receive(&mut session, request(nobody)).unwrap_err();
        assert_eq!(refusal, Refusal::NoNode);
        let status = tonic::Status::from(refusal);
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains("node id"), "{}", status.message());
        assert_eq!(session.names().count(), 0, "a request that is refused subscribes to nothing");
    }
    let (mut session, mut dialect) = (Session::default(), D::default());
    dialect.receive(&mut session, request(Some("envoy"))).unwrap();
    for later in [None, Some(""), Some("another")] {
        dialect.receive(&mut session, request(later)).unwrap();
        assert_eq!(&*dialect.node_id(), "envoy");
    }
}

fn only_secrets_are_served<D: Wire>() {
    let url = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
    let cases = [("", None), (SECRET_TYPE_URL, None), (url, Some(Refusal::ForeignType(url.to_owned())))];
    for (type_url, refusal) in cases {
        let request = || request::<D>(Some("envoy"), type_url, Vec::new());
        let received = D::default().receive(&mut Session::default(), request());
        assert_eq!(received.err(), refusal, "{type_url:?} at first");
        let mut talk = Talk::<D>::default();
        talk.open(&["a"], Vec::new());
        assert_eq!(talk.dialect.receive(&mut talk.session, request()).err(), refusal, "{type_url:?} later");
    }
    let status = tonic::Status::from(Refusal::ForeignType(url.to_owned()));
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

fn a_stream_has_a_bounded_number_of_names<D: Wire>() {
    let names = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>();
    let request = |names| request::<D>(Some("envoy"), "", names);
    let (mut session, mut dialect) = (Session::default(), D::default());
    let most = limits::NAMES_PER_STREAM;
    dialect.receive(&mut session, request(names(most))).unwrap();
    assert_eq!(session.names().count(), most);
    // Repeated names count once.
    dialect.receive(&mut session, request([names(most), names(most)].concat())).unwrap();
    assert_eq!(session.names().count(), most);
    let refusal = dialect.receive(&mut session, request(names(most + 1))).unwrap_err();
    assert_eq!(refusal, Refusal::TooManyNames(most + 1));
    assert_eq!(tonic::Status::from(refusal).code(), tonic::Code::ResourceExhausted);
}

fn the_names_of_a_stream_have_a_bounded_length<D: Wire>() {
    let most = limits::NAME_BYTES_PER_STREAM;
    let (mut session, mut dialect) = (Session::default(), D::default());
    let long = vec!["x".repeat(most - 1)];
    dialect.receive(&mut session, request::<D>(Some("envoy"), "", long.clone())).unwrap();
    let more = |more: &str| request::<D>(None, "", [long.clone(), strings(&[more])].concat());
    dialect.receive(&mut session, more("y")).unwrap();
    let refusal = dialect.receive(&mut session, more("zz")).unwrap_err();
    // In delta the other one is still there.
    assert_eq!(refusal, Refusal::TooLongNames(most + if D::IS_DELTA { 2 } else { 1 }));
    assert_eq!(tonic::Status::from(refusal).code(), tonic::Code::ResourceExhausted);
}

#[test]
fn a_claim_that_is_no_version_is_nothing_that_is_held() {
    let junk = [
        "",
        "1",
        "\0\n",
        "0123456789ABCDEF0123456789ABCDEF",
        "é".repeat(16).as_str(),
        "f".repeat(100_000).as_str(),
    ]
    .map(str::to_owned);
    for claim in junk {
        let mut talk = Talk::<Delta>::default();
        talk.open(
            &["a", "nobody"],
            vec![("a".to_owned(), claim.clone()), ("nobody".to_owned(), claim.clone())],
        );
        talk.expect(&[], &["nobody"]);
        assert_eq!(talk.last.as_ref().unwrap().version, combined([].into_iter()), "{claim:?} comes back");
        talk.publish("a", "1");
        talk.expect(&[("a", "1")], &[]);
    }
}

#[test]
fn only_the_first_request_says_what_is_kept_from_an_earlier_stream() {
    let mut talk = Talk::<Delta>::default();
    talk.publish("a", "1");
    talk.open(&[], Vec::new());
    talk.wanted.insert("a".to_owned());
    let held = vec![("a".to_owned(), version("a", "1").to_string())];
    talk.receive(Words { subscribe: strings(&["a"]), held, ..talk.words() });
    talk.expect(&[("a", "1")], &[]);
}

#[test]
fn an_empty_first_request_is_answered_with_nothing() {
    fn nothing<D: Wire>() {
        let mut talk = Talk::<D>::default();
        talk.publish("a", "1");
        talk.receive(Words { node: Words::node(), ..Words::default() });
        assert_eq!(talk.received, Received::default());
        talk.expect(&[], &[]);
    }
    nothing::<StateOfTheWorld>();
    nothing::<Delta>();
}
