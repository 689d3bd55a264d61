//! What etcd and the watch cache hold: objects, their one growing version, and the changes that watches may still ask for.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, OnceLock};

use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::resource::{Key, Resource, Selection};

/// An object as it is stored: without `kind` and `apiVersion`, which each answer adds.
#[derive(Debug)]
pub struct Stored {
    pub key: Key,
    pub version: u64,
    pub value: Value,
    json: OnceLock<Bytes>,
}

impl Stored {
    fn new(key: Key, version: u64, mut value: Value) -> Arc<Self> {
        value["metadata"]["resourceVersion"] = json!(version.to_string());
        Arc::new(Self { key, version, value, json: OnceLock::new() })
    }

    /// The same object with another version, as events of deletions show it.
    fn at(&self, version: u64) -> Arc<Self> {
        Self::new(self.key.clone(), version, self.value.clone())
    }

    pub fn text(&self, path: &[&str]) -> Option<&str> {
        path.iter().try_fold(&self.value, |value, part| value.get(part))?.as_str()
    }

    /// The JSON of an answer, or of an item of a list (which has no kind, unless it is custom).
    pub fn json(&self, version: &str, is_item: bool) -> Vec<u8> {
        let resource = Resource::of(self.key.plural);
        let rest = self.json.get_or_init(|| serde_json::to_vec(&self.value).unwrap().into());
        if is_item && !resource.is_custom {
            return rest.to_vec();
        }
        let api = resource.api_version(version);
        let mut text = format!("{{\"kind\":\"{}\",\"apiVersion\":\"{api}\",", resource.kind).into_bytes();
        text.extend_from_slice(&rest[1..]);
        text
    }
}

/// One event: the object before and after it.
#[derive(Debug)]
pub struct Change {
    pub version: u64,
    before: Option<Arc<Stored>>,
    after: Option<Arc<Stored>>,
}

impl Change {
    /// The type and the object of the event in a watch of `selection`; none where it does not concern it.
    pub fn seen_by(&self, selection: &Selection) -> Option<(&'static str, Arc<Stored>)> {
        let had = self.before.as_ref().filter(|object| selection.has(object));
        let has = self.after.as_ref().filter(|object| selection.has(object));
        match (had, has) {
            (None, None) => None,
            (None, Some(new)) => Some(("ADDED", Arc::clone(new))),
            (Some(_), Some(new)) => Some(("MODIFIED", Arc::clone(new))),
            (Some(old), None) => Some(("DELETED", old.at(self.version))),
        }
    }
}

/// What reaches an open watch.
#[derive(Clone, Debug)]
pub enum Signal {
    Changed(Arc<Change>),
    Bookmark(u64),
    /// These bytes, as they are.
    Raw(Bytes),
    /// The end of the stream.
    End,
    /// Half of an event, then the end of the stream.
    Truncate,
    /// Half of an event, then an error of the stream.
    Reset,
}

/// An open watch.
pub struct Watcher {
    pub selection: Selection,
    pub user: String,
    signals: mpsc::UnboundedSender<Signal>,
    /// While silent, what it would get.
    held: Option<Vec<Signal>>,
}

impl Watcher {
    fn send(&mut self, signal: Signal) {
        match &mut self.held {
            Some(held) => held.push(signal),
            None => drop(self.signals.send(signal)),
        }
    }
}

/// What a watch begins with.
pub type Begin = (Vec<Arc<Change>>, mpsc::UnboundedReceiver<Signal>, u64);

#[derive(Default)]
pub struct Store {
    objects: BTreeMap<Key, Arc<Stored>>,
    pub version: u64,
    history: VecDeque<Arc<Change>>,
    /// Changes after this version are in the history.
    oldest: u64,
    /// The last number of an open watch or of a snapshot.
    numbers: u64,
    watchers: HashMap<u64, Watcher>,
    /// Watches of one name, by kind and name; and all others.
    by_name: HashMap<(&'static str, String), Vec<u64>>,
    broad: Vec<u64>,
    /// What is left of lists that are read in pages.
    snapshots: HashMap<u64, (u64, VecDeque<Arc<Stored>>)>,
}

/// As many changes as the watch cache keeps at least.
const HISTORY: usize = 10_000;

impl Store {
    pub fn object(&self, key: &Key) -> Option<Arc<Stored>> {
        self.objects.get(key).cloned()
    }

    /// All objects of a kind.
    pub fn all(&self, plural: &'static str) -> impl Iterator<Item = &Arc<Stored>> {
        self.objects
            .range(Key::new(plural, "", "")..)
            .map(|(_, object)| object)
            .take_while(move |object| object.key.plural == plural)
    }

    pub fn select(&self, selection: &Selection) -> VecDeque<Arc<Stored>> {
        self.all(selection.plural).filter(|object| selection.has(object)).cloned().collect()
    }

    /// Stores an object, new or changed.
    pub fn write(&mut self, key: Key, value: Value) -> Arc<Stored> {
        let before = self.objects.get(&key).cloned();
        let new = Stored::new(key.clone(), self.version + 1, value);
        self.objects.insert(key, Arc::clone(&new));
        self.change(before, Some(Arc::clone(&new)));
        new
    }

    pub fn delete(&mut self, key: &Key) -> Option<Arc<Stored>> {
        let old = self.objects.remove(key)?;
        self.change(Some(Arc::clone(&old)), None);
        Some(old)
    }

    /// Open watches see the object's deletion, which has not happened.
    pub fn pretend_deleted(&mut self, key: &Key) {
        let old = self.objects.get(key).cloned();
        self.version += 1;
        let change = Arc::new(Change { version: self.version, before: old, after: None });
        self.tell(&change);
    }

    /// Something else in the cluster has changed.
    pub fn pass(&mut self, versions: u64) {
        self.version += versions;
    }

    fn change(&mut self, before: Option<Arc<Stored>>, after: Option<Arc<Stored>>) {
        self.version += 1;
        let change = Arc::new(Change { version: self.version, before, after });
        self.history.push_back(Arc::clone(&change));
        while self.history.len() > HISTORY {
            self.oldest = self.history.pop_front().unwrap().version;
        }
        self.tell(&change);
    }

    fn tell(&mut self, change: &Arc<Change>) {
        let Some(object) = change.after.as_ref().or(change.before.as_ref()) else { return };
        let named = self.by_name.get(&(object.key.plural, object.key.name.clone()));
        for number in named.into_iter().flatten().chain(&self.broad) {
            let watcher = self.watchers.get_mut(number).unwrap();
            if change.seen_by(&watcher.selection).is_some() {
                watcher.send(Signal::Changed(Arc::clone(change)));
            }
        }
    }

    /// Forgets all changes so far: watches from an older version get 410.
    pub fn forget_history(&mut self) {
        self.history.clear();
        self.oldest = self.version;
        self.snapshots.clear();
    }

    /// Opens a watch: the events that it begins with, those that follow, and its number. None if it asks for a version that is
    /// forgotten.
    pub fn watch(&mut self, selection: &Selection, from: Option<u64>, user: &str) -> Option<Begin> {
        let first = match from {
            None => {
                let objects = self.select(selection);
                let added = |after| Arc::new(Change { version: 0, before: None, after: Some(after) });
                objects.into_iter().map(added).collect()
            }
            Some(from) if from < self.oldest => return None,
            Some(from) => {
                let since = self.history.iter().filter(|change| change.version > from);
                since.filter(|change| change.seen_by(selection).is_some()).cloned().collect()
            }
        };
        self.numbers += 1;
        let number = self.numbers;
        let (signals, received) = mpsc::unbounded_channel();
        let selection = selection.clone();
        match &selection.name {
            Some(name) => self.by_name.entry((selection.plural, name.clone())).or_default().push(number),
            None => self.broad.push(number),
        }
        self.watchers.insert(number, Watcher { selection, user: user.to_owned(), signals, held: None });
        Some((first, received, number))
    }

    pub fn end_watch(&mut self, number: u64) {
        let Some(watcher) = self.watchers.remove(&number) else { return };
        match watcher.selection.name {
            Some(name) => {
                let place = (watcher.selection.plural, name);
                let others = self.by_name.get_mut(&place).unwrap();
                others.retain(|other| *other != number);
                if others.is_empty() {
                    self.by_name.remove(&place);
                }
            }
            None => self.broad.retain(|other| *other != number),
        }
    }

    pub fn watchers(&self) -> impl Iterator<Item = &Watcher> {
        self.watchers.values()
    }

    /// Sends to one watch.
    pub fn signal(&mut self, number: u64, signal: Signal) {
        if let Some(watcher) = self.watchers.get_mut(&number) {
            watcher.send(signal);
        }
    }

    /// Sends a bookmark to a watch, if it takes one.
    pub fn mark(&mut self, number: Option<u64>) {
        if let Some(number) = number {
            self.signal(number, Signal::Bookmark(self.version));
        }
    }

    /// Sends to all open watches.
    pub fn signal_all(&mut self, signal: &Signal) {
        for watcher in self.watchers.values_mut() {
            watcher.send(signal.clone());
        }
    }

    /// From now on the open watches get nothing.
    pub fn silence_watches(&mut self) {
        for watcher in self.watchers.values_mut() {
            watcher.held.get_or_insert_default();
        }
    }

    /// The silent watches get what was held back.
    pub fn release_watches(&mut self) {
        for watcher in self.watchers.values_mut() {
            for signal in watcher.held.take().into_iter().flatten() {
                watcher.send(signal);
            }
        }
    }

    /// Keeps the rest of a list for its next page.
    pub fn keep(&mut self, version: u64, rest: VecDeque<Arc<Stored>>) -> u64 {
        self.numbers += 1;
        self.snapshots.insert(self.numbers, (version, rest));
        self.numbers
    }

    /// The rest of a list; it stays, since a page may be asked for twice.
    pub fn rest(&self, number: u64) -> Option<(u64, VecDeque<Arc<Stored>>)> {
        self.snapshots.get(&number).cloned()
    }
}
