//! Random conversations, checked by what was sent and received.

use super::*;

/// Everything sent and received so far, and the rules for what comes next:
///
/// 1. A nonce is never used twice. (`Talk` checks it, and that no response is empty.)
/// 2. A name that is not subscribed, or no longer, is never sent.
/// 3. Only the newest value of a name is sent.
/// 4. The value of a name that was sent last, or that the client reconnected with, is not sent again unless requested again.
/// 5. A rejected value is not sent again, unless the client requested it again or accepted it meanwhile.
/// 6. Every subscribed name that has a value is sent, unless 4 or 5 forbid it.
/// 7. Only names that can never be served are sent as removed, only in delta, and exactly once each time they are
///    requested.
/// 8. A verdict is reported once, with exactly the items of the response that it names; in state of the world only if that
///    is the last response.
#[derive(Default)]
struct Referee {
    is_delta: bool,
    /// The nonce and items of every response.
    responses: Vec<(String, Vec<(String, String)>)>,
    /// Every verdict that counted, in order: which response, and whether it is an ACK.
    verdicts: Vec<(usize, bool)>,
    /// The number of responses before a name was subscribed.
    since: BTreeMap<String, usize>,
    /// Names that were requested and not sent yet.
    requested: BTreeSet<String>,
    /// The values that the client reconnected with. State of the world may send them all the same, because the client's
    /// version covers all names.
    claimed: BTreeMap<String, String>,
}

impl Referee {
    fn subscribe(&mut self, name: &str) {
        self.since.entry(name.to_owned()).or_insert(self.responses.len());
        self.requested.insert(name.to_owned());
    }

    fn unsubscribe(&mut self, name: &str) {
        self.since.remove(name);
        self.requested.remove(name);
        self.claimed.remove(name);
    }

    /// The items that must be reported with a verdict.
    fn verdict(&mut self, nonce: &str, is_ack: bool) -> Vec<(Arc<str>, Version)> {
        let Some(at) = self.responses.iter().position(|(sent, _)| sent == nonce) else { return Vec::new() };
        let counts = self.is_delta || at + 1 == self.responses.len();
        if !counts || self.verdicts.iter().any(|(settled, _)| *settled == at) {
            return Vec::new();
        }
        self.verdicts.push((at, is_ack));
        self.responses[at]
            .1
            .iter()
            .map(|(name, value)| (name.as_str().into(), version(name, value)))
            .collect()
    }

    /// The responses with `name` since it was subscribed, with its values.
    fn sent<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = (usize, &'a str)> {
        let since = self.since.get(name).copied().unwrap_or(usize::MAX);
        let value = move |items: &'a [(String, String)]| {
            items.iter().find(|(sent, _)| sent == name).map(|(_, value)| value.as_str())
        };
        let responses = self.responses.iter().enumerate().skip(since);
        responses.filter_map(move |(at, (_, items))| Some((at, value(items)?)))
    }

    /// The value that the client was sent last, or reconnected with.
    fn held<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        let claimed = || self.claimed.get(name).filter(|_| self.is_delta).map(String::as_str);
        self.sent(name).next_back().map(|(_, value)| value).or_else(claimed)
    }

    fn is_rejected(&self, name: &str, value: &str) -> bool {
        let sent: BTreeSet<_> =
            self.sent(name).filter(|(_, sent)| *sent == value).map(|(at, _)| at).collect();
        self.verdicts.iter().rfind(|(at, _)| sent.contains(at)).is_some_and(|(_, is_ack)| !is_ack)
    }

    fn check<D: ClientDialect>(&mut self, talk: &Talk<D>, (items, removed): Sending) {
        for (name, value) in &items {
            assert!(self.since.contains_key(name), "{name} is not subscribed");
            assert_eq!(talk.published.get(name), Some(value), "{name} has a newer value");
            if !self.requested.contains(name) {
                assert_ne!(self.held(name), Some(value.as_str()), "{name} is held");
                assert!(!self.is_rejected(name, value), "{name} {value} was rejected");
            }
        }
        for name in &removed {
            assert!(self.is_delta && !SERVED.contains(&name.as_str()), "{name} can be served");
            assert!(self.requested.remove(name), "{name} is removed without a request");
        }
        for (name, _) in &items {
            self.requested.remove(name);
        }
        if !items.is_empty() || !removed.is_empty() {
            self.responses.push((talk.last_nonce(), items));
        }
        for name in self.since.keys() {
            let Some(value) = talk.published.get(name) else {
                let is_known = SERVED.contains(&name.as_str());
                assert!(
                    is_known || !self.is_delta || !self.requested.contains(name),
                    "{name} is not removed"
                );
                continue;
            };
            let is_claimed = self.claimed.get(name) == Some(value);
            let is_held = self.held(name) == Some(value) || is_claimed;
            let is_missing = self.requested.contains(name) && !is_claimed;
            assert!(!is_missing && (is_held || self.is_rejected(name, value)), "{name} {value} is missing");
        }
    }
}

const NAMES: [&str; 4] = ["a", "b", "c", "unknown"];
const VALUES: [&str; 4] = ["1", "2", "3", "4"];

fn some_names(random: &mut fastrand::Rng) -> Vec<&'static str> {
    NAMES.into_iter().filter(|_| random.bool()).collect()
}

/// One random conversation; its events are added to `story`.
fn converse<D: ClientDialect>(random: &mut fastrand::Rng, story: &mut Vec<String>) {
    let some_item = |random: &mut fastrand::Rng| (NAMES[random.usize(0..3)], VALUES[random.usize(0..4)]);
    let mut talk = Talk::<D>::default();
    let mut referee = Referee { is_delta: D::IS_DELTA, ..Referee::default() };
    for _ in 0..random.u8(0..4) {
        let (name, value) = some_item(random);
        story.push(format!("publish {name} {value}"));
        talk.publish(name, value);
    }
    let names = some_names(random);
    names.iter().for_each(|name| referee.subscribe(name));
    if random.bool() {
        referee.claimed = talk.published.clone();
        referee.claimed.retain(|name, _| names.contains(&name.as_str()));
        if D::IS_DELTA && random.bool() {
            referee.claimed.values_mut().for_each(|value| VALUES[random.usize(0..4)].clone_into(value));
        }
        referee.requested.retain(|name| !referee.claimed.contains_key(name));
    }
    story.push(format!("open {names:?}, holding {:?}", referee.claimed));
    let held: Vec<_> =
        referee.claimed.iter().map(|(name, value)| (name.clone(), version(name, value))).collect();
    if !held.is_empty() {
        talk.accepted = combined(held.iter().map(|(name, version)| (name.as_str(), version)));
    }
    talk.open(&names, held.into_iter().map(|(name, version)| (name, version.to_string())).collect());
    for _ in 0..40 {
        let mut expected = (Vec::new(), true);
        match random.u8(0..13) {
            0..4 => {
                let (name, value) = some_item(random);
                story.push(format!("publish {name} {value}"));
                talk.publish(name, value);
            }
            4 => {
                let (names, nonce) = (some_names(random), talk.last_nonce());
                story.push(format!("set names {names:?}"));
                expected.0 = referee.verdict(&nonce, true);
                let before = talk.subscribed.clone();
                talk.set_names(&nonce, &names);
                before.difference(&talk.subscribed).for_each(|name| referee.unsubscribe(name));
                talk.subscribed.difference(&before).for_each(|name| referee.subscribe(name));
            }
            5 | 6 if D::IS_DELTA => {
                let (subscribe, unsubscribe) = (some_names(random), some_names(random));
                story.push(format!("subscribe {subscribe:?}, unsubscribe {unsubscribe:?}"));
                talk.change(&subscribe, &unsubscribe);
                unsubscribe.iter().for_each(|name| referee.unsubscribe(name));
                subscribe.iter().for_each(|name| referee.subscribe(name));
            }
            event @ 7..10 if talk.last.is_some() => {
                let nonce = if random.bool() { random.u8(0..9).to_string() } else { talk.last_nonce() };
                let is_ack = event == 7;
                story.push(format!("{} {nonce}", if is_ack { "ack" } else { "nack" }));
                expected = (referee.verdict(&nonce, is_ack), is_ack);
                if is_ack { talk.ack(&nonce) } else { talk.nack(&nonce) }
            }
            _ => {
                let sending = talk.respond();
                story.push(format!("sent {sending:?}"));
                referee.check(&talk, sending);
            }
        }
        let verdict = talk.received.verdict.take();
        let reported = verdict.map(|verdict| (verdict.items, verdict.rejection.is_none()));
        assert_eq!(reported, Some(expected).filter(|(items, _)| !items.is_empty()));
    }
    let sending = talk.respond();
    story.push(format!("sent {sending:?}"));
    referee.check(&talk, sending);
}

fn no_order_of_events_breaks_the_protocol<D: ClientDialect>() {
    for seed in 0..3_000 {
        let mut story = Vec::new();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            converse::<D>(&mut fastrand::Rng::with_seed(seed), &mut story);
        }));
        assert!(outcome.is_ok(), "seed {seed}:\n{}", story.join("\n"));
    }
}

in_both_dialects! { no_order_of_events_breaks_the_protocol }
