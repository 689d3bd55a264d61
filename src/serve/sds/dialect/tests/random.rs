//! Random conversations, judged by what went over the wire.

use super::*;

/// What went over the wire so far, and what must never happen next:
///
/// 1. A nonce is never used twice. (`Talk` checks it, and that a response is never empty.)
/// 2. A name that is not subscribed is never sent: it was never asked for, or was given up.
/// 3. Only the newest value of a name is sent.
/// 4. The value that a name was sent last, or that the client came back with, is not sent again, unless it asked again.
/// 5. A value that the client rejected is not sent again, unless it asked again or accepted the value meanwhile.
/// 6. Nothing is kept back: every subscribed name that has a value is sent, unless 4 or 5 forbid it.
/// 7. Only names that can never be served are told to be removed, in delta alone, once for each time they are asked
///    for, and always.
/// 8. A verdict is told with exactly what the response that it names held, once; in state of the world only if that
///    is the last response.
#[derive(Default)]
struct Judge {
    is_delta: bool,
    /// Every response: nonce and items.
    responses: Vec<(String, Vec<(String, String)>)>,
    /// Every verdict that counted: which response, and whether it was taken; in the order in which they came.
    verdicts: Vec<(usize, bool)>,
    /// The number of responses before a name was subscribed.
    since: BTreeMap<String, usize>,
    /// Names that were asked for and not answered yet.
    asked: BTreeSet<String>,
    /// What the client came back with. In state of the world it may be sent all the same, because the client's
    /// version speaks of all names at once.
    claimed: BTreeMap<String, String>,
}

impl Judge {
    fn asks(&mut self, name: &str) {
        self.since.entry(name.to_owned()).or_insert(self.responses.len());
        self.asked.insert(name.to_owned());
    }

    fn gives_up(&mut self, name: &str) {
        self.since.remove(name);
        self.asked.remove(name);
        self.claimed.remove(name);
    }

    /// What a verdict must be told with.
    fn verdict(&mut self, nonce: &str, is_taken: bool) -> Vec<(String, Version)> {
        let Some(at) = self.responses.iter().position(|(sent, _)| sent == nonce) else { return Vec::new() };
        let is_heard = self.is_delta || at + 1 == self.responses.len();
        if !is_heard || self.verdicts.iter().any(|(settled, _)| *settled == at) {
            return Vec::new();
        }
        self.verdicts.push((at, is_taken));
        self.responses[at].1.iter().map(|(name, value)| (name.clone(), version(name, value))).collect()
    }

    /// The responses with `name` since it was subscribed, and their values.
    fn sent<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = (usize, &'a str)> {
        let since = self.since.get(name).copied().unwrap_or(usize::MAX);
        let value = move |items: &'a [(String, String)]| {
            items.iter().find(|(sent, _)| sent == name).map(|(_, value)| value.as_str())
        };
        let responses = self.responses.iter().enumerate().skip(since);
        responses.filter_map(move |(at, (_, items))| Some((at, value(items)?)))
    }

    /// What the client was sent last, or came back with.
    fn held<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        let claimed = || self.claimed.get(name).filter(|_| self.is_delta).map(String::as_str);
        self.sent(name).next_back().map(|(_, value)| value).or_else(claimed)
    }

    fn is_rejected(&self, name: &str, value: &str) -> bool {
        let sent: BTreeSet<_> =
            self.sent(name).filter(|(_, sent)| *sent == value).map(|(at, _)| at).collect();
        self.verdicts.iter().rfind(|(at, _)| sent.contains(at)).is_some_and(|(_, is_taken)| !is_taken)
    }

    fn judge<D: Wire>(&mut self, talk: &Talk<D>, (items, removed): Heard) {
        for (name, value) in &items {
            assert!(self.since.contains_key(name), "{name} is not subscribed");
            assert_eq!(talk.world.get(name), Some(value), "{name} has a newer value");
            if !self.asked.contains(name) {
                assert_ne!(self.held(name), Some(value.as_str()), "{name} is held");
                assert!(!self.is_rejected(name, value), "{name} {value} was rejected");
            }
        }
        for name in &removed {
            assert!(self.is_delta && !SERVED.contains(&name.as_str()), "{name} can be served");
            assert!(self.asked.remove(name), "{name} is removed unasked");
        }
        for (name, _) in &items {
            self.asked.remove(name);
        }
        if !items.is_empty() || !removed.is_empty() {
            self.responses.push((talk.last_nonce(), items));
        }
        for name in self.since.keys() {
            let Some(value) = talk.world.get(name) else {
                let is_known = SERVED.contains(&name.as_str());
                assert!(is_known || !self.is_delta || !self.asked.contains(name), "{name} is not told");
                continue;
            };
            let is_claimed = self.claimed.get(name) == Some(value);
            let is_held = self.held(name) == Some(value) || is_claimed;
            let is_kept = self.asked.contains(name) && !is_claimed;
            assert!(!is_kept && (is_held || self.is_rejected(name, value)), "{name} {value} is kept back");
        }
    }
}

const NAMES: [&str; 4] = ["a", "b", "c", "nobody"];
const VALUES: [&str; 4] = ["1", "2", "3", "4"];

fn some_names(random: &mut fastrand::Rng) -> Vec<&'static str> {
    NAMES.into_iter().filter(|_| random.bool()).collect()
}

/// One random conversation; what happens in it goes into `story`.
fn converse<D: Wire>(random: &mut fastrand::Rng, story: &mut Vec<String>) {
    let some_item = |random: &mut fastrand::Rng| (NAMES[random.usize(0..3)], VALUES[random.usize(0..4)]);
    let mut talk = Talk::<D>::default();
    let mut judge = Judge { is_delta: D::IS_DELTA, ..Judge::default() };
    for _ in 0..random.u8(0..4) {
        let (name, value) = some_item(random);
        story.push(format!("publish {name} {value}"));
        talk.publish(name, value);
    }
    let names = some_names(random);
    names.iter().for_each(|name| judge.asks(name));
    if random.bool() {
        judge.claimed = talk.world.clone();
        judge.claimed.retain(|name, _| names.contains(&name.as_str()));
        if D::IS_DELTA && random.bool() {
            judge.claimed.values_mut().for_each(|value| VALUES[random.usize(0..4)].clone_into(value));
        }
        judge.asked.retain(|name| !judge.claimed.contains_key(name));
    }
    story.push(format!("open {names:?}, holding {:?}", judge.claimed));
    let held: Vec<_> =
        judge.claimed.iter().map(|(name, value)| (name.clone(), version(name, value))).collect();
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
                story.push(format!("want {names:?}"));
                expected.0 = judge.verdict(&nonce, true);
                let before = talk.wanted.clone();
                talk.want(&nonce, &names);
                before.difference(&talk.wanted).for_each(|name| judge.gives_up(name));
                talk.wanted.difference(&before).for_each(|name| judge.asks(name));
            }
            5 | 6 if D::IS_DELTA => {
                let (ask, give_up) = (some_names(random), some_names(random));
                story.push(format!("ask for {ask:?}, give up {give_up:?}"));
                talk.change(&ask, &give_up);
                give_up.iter().for_each(|name| judge.gives_up(name));
                ask.iter().for_each(|name| judge.asks(name));
            }
            event @ 7..10 if talk.last.is_some() => {
                let nonce = if random.bool() { random.u8(0..9).to_string() } else { talk.last_nonce() };
                let is_taken = event == 7;
                story.push(format!("{} {nonce}", if is_taken { "take" } else { "reject" }));
                expected = (judge.verdict(&nonce, is_taken), is_taken);
                if is_taken { talk.ack(&nonce) } else { talk.nack(&nonce) }
            }
            _ => {
                let heard = talk.respond();
                story.push(format!("sent {heard:?}"));
                judge.judge(&talk, heard);
            }
        }
        let verdict = talk.received.verdict.take();
        let told = verdict.map(|verdict| (verdict.items, verdict.rejection.is_none()));
        assert_eq!(told, Some(expected).filter(|(items, _)| !items.is_empty()));
    }
    let heard = talk.respond();
    story.push(format!("sent {heard:?}"));
    judge.judge(&talk, heard);
}

fn no_order_of_events_breaks_the_protocol<D: Wire>() {
    for seed in 0..3_000 {
        let mut story = Vec::new();
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            converse::<D>(&mut fastrand::Rng::with_seed(seed), &mut story);
        }));
        assert!(told.is_ok(), "seed {seed}:\n{}", story.join("\n"));
    }
}

in_both_dialects! { no_order_of_events_breaks_the_protocol }
