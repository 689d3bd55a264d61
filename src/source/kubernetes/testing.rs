//! A cluster in memory that keeps the rules of an API server as far as the source relies on them, and can fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use http::StatusCode;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use zeroize::Zeroizing;

use crate::kube::{
    Access, Account, Api, Event, Grant, Kind, KubeError, List, Object, ObjectId, Of, Selection, Version,
    Watch,
};
use crate::pki::crl::testing::Authority;
use crate::pki::pem;

/// An object with these entries.
pub(super) fn object<V: AsRef<[u8]>>(name: &str, version: u64, data: &[(&str, V)]) -> Object {
    let value = |bytes: &V| Zeroizing::new(bytes.as_ref().to_vec());
    Object {
        name: name.into(),
        version: Version(version.to_string().into()),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        data: data.iter().map(|(key, bytes)| ((*key).into(), value(bytes))).collect(),
    }
}

/// The PEM of a certificate chain of `ca`, and of its key.
pub(super) fn pair_from(ca: &Authority) -> (String, String) {
    let (chain, key) = ca.issue();
    let chain = String::from_utf8(pem::of_certificates(&chain)).unwrap();
    (chain, String::from_utf8(key.to_pem().to_vec()).unwrap())
}

pub(super) fn pair_of(ca: &str) -> (String, String) {
    pair_from(&Authority::root(ca))
}

/// The PEM of a root.
pub(super) fn root_of(name: &str) -> String {
    String::from_utf8(pem::of_certificates([&Authority::root(name).certificate])).unwrap()
}

/// Clones are the same cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct FakeApi(Arc<Mutex<State>>);

type Data = Vec<(String, Vec<u8>)>;

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) objects: BTreeMap<ObjectId, (u64, Data)>,
    version: u64,
    /// Versions before this one are too old to watch from.
    oldest: u64,
    history: Vec<(u64, ObjectId, Option<Data>)>,
    watchers: Vec<Watcher>,
    /// What was called, like `get Secret shop/web`.
    pub(super) calls: Vec<String>,
    /// Nothing answers.
    pub(super) is_away: bool,
    /// Verbs that are forbidden; "watch all" of a whole namespace.
    pub(super) forbidden: BTreeSet<&'static str>,
    /// Answers of reviews: which accounts may do what, like `gateway get shop/web`.
    pub(super) rights: BTreeSet<String>,
    pub(super) grants: Vec<Grant>,
    /// Reviews fail.
    pub(super) reviews_fail: bool,
    /// Objects that answer 500.
    pub(super) broken: BTreeSet<String>,
    /// Reading this object takes so long.
    pub(super) slow: Option<(String, Duration)>,
    /// Pages behind the first one answer 500.
    pub(super) breaks_lists: bool,
    /// How long reading any other one takes.
    pub(super) pace: Option<Duration>,
    /// Every call answers 429.
    pub(super) throttles: Option<Duration>,
}

#[derive(Debug)]
struct Watcher {
    selection: String,
    wanted: Box<dyn Selects>,
    events: mpsc::UnboundedSender<Result<Event, KubeError>>,
}

trait Selects: std::fmt::Debug + Send {
    fn selects(&self, id: &ObjectId) -> bool;
    fn wants(&self, name: &str) -> bool;
}

struct OfSelection(Selection);

impl std::fmt::Debug for OfSelection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&shown(&self.0))
    }
}

impl Selects for OfSelection {
    fn selects(&self, id: &ObjectId) -> bool {
        let is_named = match &self.0.of {
            Of::Name(name) => *name == id.name,
            Of::Label(_) | Of::Wanted(_) => true,
        };
        is_named && id.kind == self.0.kind && id.namespace == self.0.namespace
    }

    fn wants(&self, name: &str) -> bool {
        match &self.0.of {
            Of::Wanted(wanted) => wanted(name),
            _ => true,
        }
    }
}

fn shown(selection: &Selection) -> String {
    let of = match &selection.of {
        Of::Name(name) => &**name,
        Of::Label(label) => label,
        Of::Wanted(_) => "*",
    };
    format!("{} {}/{of}", selection.kind, selection.namespace)
}

fn status(status: StatusCode, retry_after: Option<Duration>) -> KubeError {
    KubeError::Status {
        address: "fake".to_owned(),
        status,
        message: "refused by the test".to_owned(),
        retry_after,
    }
}

impl State {
    fn call(&mut self, verb: &'static str, what: &str) -> Result<(), KubeError> {
        self.calls.push(format!("{verb} {what}"));
        if self.is_away {
            return Err(KubeError::Silent { address: "fake".to_owned(), patience: Duration::from_secs(10) });
        }
        if let Some(delay) = self.throttles {
            return Err(status(StatusCode::TOO_MANY_REQUESTS, Some(delay)));
        }
        let is_of_all = verb == "watch" && what.ends_with("/*");
        match self.forbidden.contains(verb) || is_of_all && self.forbidden.contains("watch all") {
            true => Err(status(StatusCode::FORBIDDEN, None)),
            false => Ok(()),
        }
    }

    fn found(&self, id: &ObjectId) -> Option<Object> {
        let (version, data) = self.objects.get(id)?;
        Some(made(id, *version, data))
    }

    fn tell(&mut self, version: u64, id: &ObjectId, data: Option<&Data>) {
        self.watchers.retain(|watcher| {
            !watcher.wanted.selects(id)
                || watcher.events.send(Ok(event(&*watcher.wanted, version, id, data))).is_ok()
        });
    }
}

fn made(id: &ObjectId, version: u64, data: &Data) -> Object {
    let data: Vec<_> = data.iter().map(|(key, bytes)| (key.as_str(), bytes)).collect();
    object(&id.name, version, &data)
}

fn event(wanted: &dyn Selects, version: u64, id: &ObjectId, data: Option<&Data>) -> Event {
    let at = Version(version.to_string().into());
    match data {
        _ if !wanted.wants(&id.name) => Event::Version(at),
        Some(data) => Event::Object(made(id, version, data)),
        None => Event::Deleted { name: (&*id.name).into(), version: at },
    }
}

pub(super) fn secret(namespace: &str, name: &str) -> ObjectId {
    ObjectId { kind: Kind::Secret, namespace: namespace.into(), name: name.into() }
}

impl FakeApi {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(super) fn put<V: AsRef<[u8]>>(&self, id: &ObjectId, data: &[(&str, V)]) {
        let mut state = self.lock();
        state.version += 1;
        let version = state.version;
        let data: Data =
            data.iter().map(|(key, bytes)| ((*key).to_owned(), bytes.as_ref().to_vec())).collect();
        state.objects.insert(id.clone(), (version, data.clone()));
        state.history.push((version, id.clone(), Some(data.clone())));
        state.tell(version, id, Some(&data));
    }

    pub(super) fn delete(&self, id: &ObjectId) {
        let mut state = self.lock();
        state.version += 1;
        let version = state.version;
        if state.objects.remove(id).is_some() {
            state.history.push((version, id.clone(), None));
            state.tell(version, id, None);
        }
    }

    /// A watch reports a deletion that has not happened.
    pub(super) fn lie(&self, id: &ObjectId) {
        let mut state = self.lock();
        let version = state.version;
        state.tell(version, id, None);
    }

    /// All watches end with an error.
    pub(super) fn disconnect(&self) {
        for watcher in self.lock().watchers.drain(..) {
            let error = KubeError::Silent { address: "fake".to_owned(), patience: Duration::from_secs(25) };
            let _ = watcher.events.send(Err(error));
        }
    }

    /// What happened so far is forgotten.
    pub(super) fn compact(&self) {
        let mut state = self.lock();
        state.version += 1;
        state.oldest = state.version;
        state.history.clear();
    }

    /// How many calls there were that begin with `words`.
    pub(super) fn count(&self, words: &str) -> usize {
        self.lock().calls.iter().filter(|call| call.starts_with(words)).count()
    }

    /// The watches that are open.
    pub(super) fn watches(&self) -> Vec<String> {
        let mut state = self.lock();
        state.watchers.retain(|watcher| !watcher.events.is_closed());
        state.watchers.iter().map(|watcher| watcher.selection.clone()).collect()
    }
}

/// How many objects a page of a list has.
const PAGE: usize = 60;

#[tonic::async_trait]
impl Api for FakeApi {
    async fn get(&self, id: &ObjectId) -> Result<Option<Object>, KubeError> {
        let (found, takes) = {
            let mut state = self.lock();
            state.call("get", &id.to_string())?;
            if state.broken.contains(&id.to_string()) {
                return Err(status(StatusCode::INTERNAL_SERVER_ERROR, None));
            }
            let slow = state.slow.as_ref().filter(|(slow, _)| *slow == id.to_string());
            (
                state.found(id),
                slow.map_or(state.pace.unwrap_or(Duration::from_millis(2)), |(_, takes)| *takes),
            )
        };
        tokio::time::sleep(takes).await;
        Ok(found)
    }

    /// The version is that of the first page: what changes meanwhile comes in a watch.
    async fn page(&self, selection: &Selection, next: &str) -> Result<List, KubeError> {
        let of = OfSelection(selection.clone());
        let mut list = {
            let mut state = self.lock();
            let (version, last) = match next.split_once(' ') {
                Some((version, last)) => (version.parse().unwrap(), last),
                None => {
                    state.call("list", &shown(selection))?;
                    (state.version, "")
                }
            };
            if version < state.oldest {
                return Err(KubeError::Expired { address: "fake".to_owned() });
            }
            if state.breaks_lists && !next.is_empty() {
                return Err(status(StatusCode::INTERNAL_SERVER_ERROR, None));
            }
            let all = state.objects.keys().filter(|id| of.selects(id) && *id.name > *last);
            let objects: Vec<_> = all.filter_map(|id| state.found(id)).take(PAGE).collect();
            let more = objects.get(PAGE - 1).map(|last| format!("{version} {}", last.name));
            List { objects, version: Version(version.to_string().into()), next: more.unwrap_or_default() }
        };
        tokio::time::sleep(Duration::from_millis(20)).await;
        list.objects.retain(|object| of.wants(&object.name));
        Ok(list)
    }

    async fn watch(&self, selection: &Selection, from: Option<&Version>) -> Result<Watch, KubeError> {
        tokio::time::sleep(Duration::from_millis(2)).await;
        let mut state = self.lock();
        state.call("watch", &shown(selection))?;
        let wanted = OfSelection(selection.clone());
        let (events, receiver) = mpsc::unbounded_channel();
        match from {
            None => {
                let present = state.objects.iter().filter(|(id, _)| wanted.selects(id));
                for (id, (version, data)) in present {
                    let _ = events.send(Ok(event(&wanted, *version, id, Some(data))));
                }
            }
            Some(Version(from)) => {
                let from: u64 = from.parse().unwrap();
                if from < state.oldest {
                    return Err(KubeError::Expired { address: "fake".to_owned() });
                }
                let since =
                    state.history.iter().filter(|(version, id, _)| *version > from && wanted.selects(id));
                for (version, id, data) in since {
                    let _ = events.send(Ok(event(&wanted, *version, id, data.as_ref())));
                }
            }
        }
        let (selection, wanted) = (shown(selection), Box::new(wanted));
        state.watchers.push(Watcher { selection, wanted, events });
        Ok(Watch(Box::pin(UnboundedReceiverStream::new(receiver))))
    }

    async fn may(&self, account: &Account, access: &Access) -> Result<bool, KubeError> {
        let name = access.name.as_deref().unwrap_or("*");
        let right = format!("{} {} {}/{name}", account.name, access.verb, access.namespace);
        let mut state = self.lock();
        state.call("review", &right)?;
        match state.reviews_fail {
            true => Err(status(StatusCode::TOO_MANY_REQUESTS, None)),
            false => Ok(state.rights.contains(&right)),
        }
    }

    async fn grants(&self, namespace: &str) -> Result<Vec<Grant>, KubeError> {
        let mut state = self.lock();
        state.call("grants", namespace)?;
        Ok(state.grants.clone())
    }

    async fn probe(&self) -> Result<(), KubeError> {
        self.lock().call("probe", "")
    }
}
