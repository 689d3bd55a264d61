//! Conversations, told from the client's side and played against the session through its dialect.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::*;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::google::protobuf::Any;
use crate::proto::google::rpc;
use crate::sds::session::Session;

/// One line of a conversation.
#[derive(Debug)]
enum Step {
    /// The client opens a stream for these names.
    Open(&'static [&'static str]),
    /// The client opens a stream for these names, and says that it holds these versions of them all.
    Return(&'static [&'static str], &'static [Item]),
    /// The client wants these names from now on; it says so with the nonce that it saw last.
    Want(&'static [&'static str]),
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
    /// The client is sent nothing.
    Silence,
    /// The last request held a verdict on this.
    Accepted(&'static [Item]),
    /// The last request held a rejection of this.
    Rejected(&'static [Item]),
    /// The last request held no verdict.
    NoVerdict,
}

use Step::*;

/// A name and its value.
type Item = (&'static str, &'static str);

fn version(name: &str, value: &str) -> Version {
    Version::of(format!("{name} {value}").as_bytes())
}

fn owned(items: &[Item]) -> Vec<(String, Version)> {
    items.iter().map(|(name, value)| ((*name).to_owned(), version(name, value))).collect()
}

fn combined_of(items: &[Item]) -> String {
    let items = owned(items);
    combined(items.iter().map(|(name, version)| (name.as_str(), version)))
}

/// Both ends of a stream, with the loop between them cut down to what the protocol needs.
#[derive(Default)]
struct Talk {
    session: Session,
    dialect: StateOfTheWorld,
    resources: HashMap<String, Resource>,
    /// What there is, whether or not somebody subscribed to it.
    world: BTreeMap<String, String>,
    wanted: BTreeSet<String>,
    /// What the client accepted last, as `version_info`.
    accepted: String,
    last: Option<DiscoveryResponse>,
    nonces: BTreeSet<String>,
    received: Received,
}

impl Talk {
    fn request(&self) -> DiscoveryRequest {
        DiscoveryRequest {
            version_info: self.accepted.clone(),
            resource_names: self.wanted.iter().cloned().collect(),
            type_url: SECRET_TYPE_URL.to_owned(),
            response_nonce: self.last.as_ref().map(|last| last.nonce.clone()).unwrap_or_default(),
            ..DiscoveryRequest::default()
        }
    }

    fn receive(&mut self, request: DiscoveryRequest) {
        self.received = self.dialect.receive(&mut self.session, request).unwrap();
        for name in &self.received.removed {
            self.resources.remove(name);
        }
        for name in self.received.added.clone() {
            self.offer(&name);
        }
    }

    fn open(&mut self, names: &[&str]) {
        self.want(names);
        let node = Some(Node { id: "envoy".to_owned(), ..Node::default() });
        self.receive(DiscoveryRequest { node, ..self.request() });
    }

    fn want(&mut self, names: &[&str]) {
        self.wanted = names.iter().map(|name| (*name).to_owned()).collect();
    }

    fn ack(&mut self, nonce: &str) {
        let last = self.last.as_ref().expect("a response to answer");
        if last.nonce == nonce {
            self.accepted.clone_from(&last.version_info);
        }
        self.receive(DiscoveryRequest { response_nonce: nonce.to_owned(), ..self.request() });
    }

    fn nack(&mut self, nonce: &str) {
        let error_detail = Some(rpc::Status { code: 13, message: "no\nway".to_owned() });
        let response_nonce = nonce.to_owned();
        self.receive(DiscoveryRequest { response_nonce, error_detail, ..self.request() });
    }

    fn last_nonce(&self) -> String {
        self.last.as_ref().expect("a response to answer").nonce.clone()
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

    /// What the client is sent: names and values.
    fn respond(&mut self) -> Vec<(String, String)> {
        let Some((_, response)) = self.dialect.respond(&mut self.session, &self.resources) else {
            return Vec::new();
        };
        assert!(self.nonces.insert(response.nonce.clone()), "nonce {} again", response.nonce);
        assert_eq!(response.version_info, combined(self.session.sent()));
        assert_eq!(response.type_url, SECRET_TYPE_URL);
        let text = |any: &Any| String::from_utf8(any.value.to_vec()).unwrap();
        let items = response.resources.iter().map(text);
        let items =
            items.map(|text| text.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap());
        let items = items.collect();
        self.last = Some(response);
        assert_eq!(self.dialect.respond(&mut self.session, &self.resources), None, "everything goes at once");
        items
    }

    fn play(&mut self, step: &Step) {
        let verdict = |items: &[Item], rejection: Option<&str>| {
            Some(Verdict { items: owned(items), rejection: rejection.map(str::to_owned) })
        };
        match *step {
            Open(names) => self.open(names),
            Return(names, held) => {
                self.accepted = combined_of(held);
                self.open(names);
            }
            Want(names) => {
                self.want(names);
                self.receive(self.request());
            }
            Ack => self.ack(&self.last_nonce()),
            Nack => self.nack(&self.last_nonce()),
            AckOf(nonce) => self.ack(nonce),
            NackOf(nonce) => self.nack(nonce),
            Publish(name, value) => self.publish(name, value),
            Sent(items) => {
                let sent = self.respond();
                let sent: Vec<_> = sent.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
                assert_eq!(sent, items);
            }
            Silence => assert_eq!(self.respond(), []),
            Accepted(items) => assert_eq!(self.received.verdict, verdict(items, None)),
            Rejected(items) => assert_eq!(self.received.verdict, verdict(items, Some("no\u{fffd}way"))),
            NoVerdict => assert_eq!(self.received.verdict, None),
        }
    }
}

/// Plays each conversation; what fails is told with its name and line.
fn play(conversations: &[(&str, &[Step])]) {
    for (title, steps) in conversations {
        let mut talk = Talk::default();
        for (line, step) in steps.iter().enumerate() {
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| talk.play(step)));
            assert!(told.is_ok(), "{title:?}, line {}: {step:?}", line + 1);
        }
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
            "what was accepted before comes back when its successor was rejected",
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
fn an_answer_to_an_older_response_changes_nothing() {
    play(&[
        (
            "neither an acceptance nor a rejection",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                AckOf("1"),
                NoVerdict,
                Silence,
                NackOf("1"),
                NoVerdict,
                Silence,
                AckOf("2"),
                Accepted(&[("a", "2")]),
            ],
        ),
        (
            "a nonce that never was is one of them",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                NackOf("77"),
                NoVerdict,
                NackOf("0"),
                NoVerdict,
                Ack,
                Accepted(&[("a", "1")]),
            ],
        ),
        (
            "the newer response's verdict still counts after it",
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
            "a name that nobody gives is never answered and holds nothing back",
            &[
                Open(&["a", "nobody"]),
                Silence,
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
            "it holds an older version of one of them: which, it can't say",
            &[
                Publish("a", "1"),
                Publish("b", "2"),
                Return(&["a", "b"], &[("a", "1"), ("b", "1")]),
                Sent(&[("a", "1"), ("b", "2")]),
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
    ]);
}

#[test]
fn only_the_first_request_must_say_who_sends_it() {
    let request = |node: Option<Node>| DiscoveryRequest {
        node,
        resource_names: vec!["a".to_owned()],
        ..DiscoveryRequest::default()
    };
    let node = |id: &str| Some(Node { id: id.to_owned(), ..Node::default() });
    for nobody in [None, node("")] {
        let (mut session, mut dialect) = (Session::default(), StateOfTheWorld::default());
        let refusal = dialect.receive(&mut session, request(nobody)).unwrap_err();
        assert_eq!(refusal, Refusal::NoNode);
        let status = tonic::Status::from(refusal);
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains("node id"), "{}", status.message());
        assert_eq!(session.names().count(), 0, "a request that is refused subscribes to nothing");
    }
    let (mut session, mut dialect) = (Session::default(), StateOfTheWorld::default());
    dialect.receive(&mut session, request(node("envoy"))).unwrap();
    for later in [None, node(""), node("another")] {
        dialect.receive(&mut session, request(later)).unwrap();
        assert_eq!(dialect.node_id(), "envoy");
    }
}

#[test]
fn only_secrets_are_served() {
    let url = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
    let cases = [("", None), (SECRET_TYPE_URL, None), (url, Some(Refusal::ForeignType(url.to_owned())))];
    for (type_url, refusal) in cases {
        let node = Some(Node { id: "envoy".to_owned(), ..Node::default() });
        let request = DiscoveryRequest { node, type_url: type_url.to_owned(), ..DiscoveryRequest::default() };
        let received = StateOfTheWorld::default().receive(&mut Session::default(), request.clone());
        assert_eq!(received.err(), refusal, "{type_url:?} at first");
        let mut talk = Talk::default();
        talk.open(&["a"]);
        assert_eq!(talk.dialect.receive(&mut talk.session, request).err(), refusal, "{type_url:?} later");
    }
    let status = tonic::Status::from(Refusal::ForeignType(url.to_owned()));
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

#[test]
fn a_stream_has_a_bounded_number_of_names() {
    let names = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>();
    let request = |resource_names| DiscoveryRequest {
        node: Some(Node { id: "envoy".to_owned(), ..Node::default() }),
        resource_names,
        ..DiscoveryRequest::default()
    };
    let (mut session, mut dialect) = (Session::default(), StateOfTheWorld::default());
    let most = limits::NAMES_PER_STREAM;
    dialect.receive(&mut session, request(names(most))).unwrap();
    assert_eq!(session.names().count(), most);
    // Repeated names count once.
    dialect.receive(&mut session, request([names(most), names(most)].concat())).unwrap();
    let refusal = dialect.receive(&mut session, request(names(most + 1))).unwrap_err();
    assert_eq!(refusal, Refusal::TooManyNames(most + 1));
    assert_eq!(tonic::Status::from(refusal).code(), tonic::Code::ResourceExhausted);
    assert_eq!(session.names().count(), most);
}

/// What a random conversation remembers to judge the next response by.
#[derive(Default)]
struct Judge {
    /// What the client was sent last of each name that it wants, since it asked for it.
    sent: BTreeMap<String, String>,
    /// What it came back with. It may be sent again, because the claim speaks of all names at once.
    held: BTreeMap<String, String>,
    rejected: BTreeSet<(String, String)>,
}

impl Judge {
    fn judge(&mut self, talk: &Talk, items: Vec<(String, String)>) {
        for (name, value) in items {
            assert!(talk.wanted.contains(&name), "{name} is not subscribed");
            assert_eq!(talk.world.get(&name), Some(&value), "{name} has a newer value");
            let is_rejected = self.rejected.contains(&(name.clone(), value.clone()));
            assert!(!is_rejected, "{name} {value} was rejected");
            let before = self.sent.insert(name.clone(), value.clone());
            assert_ne!(before, Some(value), "{name} was sent twice");
            self.held.remove(&name);
        }
        for (name, value) in talk.world.iter().filter(|(name, _)| talk.wanted.contains(*name)) {
            let is_rejected = self.rejected.contains(&(name.clone(), value.clone()));
            let is_held = [&self.sent, &self.held].iter().any(|held| held.get(name) == Some(value));
            assert!(is_rejected || is_held, "{name} {value} is kept back");
        }
    }

    fn forget(&mut self, removed: &[String]) {
        for name in removed {
            self.sent.remove(name);
            self.held.remove(name);
            self.rejected.retain(|(rejected, _)| rejected != name);
        }
    }
}

const NAMES: [&str; 4] = ["a", "b", "c", "nobody"];
const VALUES: [&str; 4] = ["1", "2", "3", "4"];

/// One random conversation; what happens in it goes into `story`.
fn converse(random: &mut fastrand::Rng, story: &mut Vec<String>) {
    let some_names =
        |random: &mut fastrand::Rng| -> Vec<_> { NAMES.into_iter().filter(|_| random.bool()).collect() };
    let some_item = |random: &mut fastrand::Rng| (NAMES[random.usize(0..3)], VALUES[random.usize(0..4)]);
    let (mut talk, mut judge) = (Talk::default(), Judge::default());
    for _ in 0..random.u8(0..4) {
        let (name, value) = some_item(random);
        story.push(format!("publish {name} {value}"));
        talk.publish(name, value);
    }
    let names = some_names(random);
    if random.bool() {
        judge.held = talk.world.clone();
        judge.held.retain(|name, _| names.contains(&name.as_str()));
        let held: Vec<_> =
            judge.held.iter().map(|(name, value)| (name.as_str(), version(name, value))).collect();
        if !held.is_empty() {
            talk.accepted = combined(held.iter().map(|(name, version)| (*name, version)));
        }
    }
    story.push(format!("open {names:?}, holding {:?}", judge.held));
    talk.open(&names);
    for _ in 0..40 {
        let event = random.u8(0..11);
        match event {
            0..4 => {
                let (name, value) = some_item(random);
                story.push(format!("publish {name} {value}"));
                talk.publish(name, value);
            }
            4 | 5 => {
                let names = some_names(random);
                story.push(format!("want {names:?}"));
                talk.want(&names);
                talk.receive(talk.request());
            }
            6..9 if talk.last.is_some() => {
                let nonce = if event == 8 { random.u8(0..9).to_string() } else { talk.last_nonce() };
                story.push(format!("{} {nonce}", if event == 6 { "ack" } else { "nack" }));
                if event == 6 { talk.ack(&nonce) } else { talk.nack(&nonce) }
            }
            _ => {
                let items = talk.respond();
                story.push(format!("sent {items:?}"));
                judge.judge(&talk, items);
            }
        }
        judge.forget(&std::mem::take(&mut talk.received.removed));
        if let Some(Verdict { items, rejection: Some(_) }) = talk.received.verdict.take() {
            for (name, refused) in items.into_iter().filter(|(name, _)| talk.wanted.contains(name)) {
                let value = VALUES.into_iter().find(|value| version(&name, value) == refused);
                judge.rejected.insert((name, value.unwrap().to_owned()));
            }
        }
    }
    let items = talk.respond();
    story.push(format!("sent {items:?}"));
    judge.judge(&talk, items);
}

#[test]
fn no_order_of_events_breaks_the_protocol() {
    for seed in 0..2_000 {
        let mut story = Vec::new();
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            converse(&mut fastrand::Rng::with_seed(seed), &mut story);
        }));
        assert!(told.is_ok(), "seed {seed}:\n{}", story.join("\n"));
    }
}
