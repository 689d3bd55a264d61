//! What the clusters delivered last, across restarts of the agent: a file for each object that is served.
//!
//! ```text
//! {"version":1,"cluster":…,"kind":…,"namespace":…,"name":…,"parts":[["tls.crt",1234],…]}     one line of JSON
//! what is under the first key, what is under the second one, …
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use zeroize::Zeroizing;

use super::content::KEYS;
use super::follow::Place;
use super::group::lock;
use crate::base::backoff::Backoff;
use crate::base::clock::until;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::fs::replace::{NotReplaced, replace};
use crate::kube::{Object, Version};
use crate::secret;
use crate::store::health::Components;

/// The directory in `--state-dir`.
const DIRECTORY: &str = "kubernetes";
const VERSION: u64 = 1;
/// After a failed write.
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };
/// How long files of an earlier run stay that no stream asks for.
const UNUSED: Duration = Duration::from_secs(3600);

/// Keeps objects in the state directory. Clones are the same.
#[derive(Clone)]
pub struct Keeper(Arc<Shared>);

struct Shared {
    directory: PathBuf,
    disk: Disk,
    components: Components,
    /// The newest content of each file that is not written yet; none to remove it.
    pending: Mutex<HashMap<String, Option<Zeroizing<Vec<u8>>>>>,
    files: Mutex<Files>,
    changed: Notify,
}

/// The files that there are.
#[derive(Default)]
struct Files {
    /// Those of objects that were asked for in this run.
    used: HashSet<String>,
    /// Those of an earlier run; none while that is not known.
    old: Option<HashSet<String>>,
}

/// It holds keys.
impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").field("directory", &self.0.directory).finish_non_exhaustive()
    }
}

/// The file of an object: names of any length fit.
fn file_of(place: &Place) -> String {
    let Place { cluster, object, .. } = place;
    let text = format!("{cluster}\n{object}");
    format!("{}.state", secret::Version::of(text.as_bytes()))
}

impl Keeper {
    /// Keeps objects in `state_dir`, which may be missing. `components` show whether that succeeds.
    pub fn new(state_dir: &Path, disk: Disk, components: Components) -> Self {
        let (pending, files, changed) = Default::default();
        let directory = state_dir.join(DIRECTORY);
        Self(Arc::new(Shared { directory, disk, components, pending, files, changed }))
    }

    /// Writes what is to be kept. Does not return.
    pub async fn run(self) {
        let shared = &self.0;
        self.list().await;
        let (mut log, mut failures) = (FailureLog::default(), 0_u32);
        let mut unused = Some(tokio::time::Instant::now() + UNUSED);
        loop {
            let next = lock(&shared.pending).keys().next().cloned();
            let Some(name) = next else {
                tokio::select! {
                    () = shared.changed.notified() => {}
                    () = until(unused), if unused.is_some() => {
                        unused = None;
                        self.remove_unused();
                    }
                }
                continue;
            };
            let Some(content) = lock(&shared.pending).remove(&name) else { continue };
            let written = self.write(&name, content.clone()).await;
            match &written {
                Ok(()) => {
                    failures = 0;
                    if log.recovered() {
                        shared.components.report_state(Ok(()));
                        tracing::info!(directory = %shared.directory.display(), "state of Secrets saved again");
                    }
                }
                Err(reason) => {
                    failures += 1;
                    if log.is_new(reason) {
                        tracing::warn!(reason, "state of Secrets not saved; they are served all the same");
                    }
                    shared.components.report_state(Err(reason.clone()));
                    // Unless there is a newer one.
                    lock(&shared.pending).entry(name).or_insert(content);
                }
            }
            if failures > 0 {
                tokio::time::sleep(BACKOFF.delay(failures, fastrand::f64())).await;
            }
        }
    }

    async fn write(&self, name: &str, content: Option<Zeroizing<Vec<u8>>>) -> Result<(), String> {
        let (directory, name) = (self.0.directory.clone(), name.to_owned());
        let path = directory.join(&name);
        let write = move || {
            let file = directory.join(&name);
            let Some(content) = content else {
                return match fs::remove_file(&file) {
                    Err(source) if source.kind() != io::ErrorKind::NotFound => {
                        Err(NotReplaced { doing: "removing", path: file, source })
                    }
                    _ => Ok(()),
                };
            };
            let known = file::read(&file, limits::KUBE_STATE_BYTES);
            if known.is_ok_and(|known| *known == *content) {
                return Ok(());
            }
            replace(&directory, &name, || Some(content))
        };
        let written = self.0.disk.run(&path, write).await.map_err(|error| error.to_string())?;
        written.map_err(|error| format!("{error}choose another --state-dir"))
    }

    /// Keeps an object.
    pub(super) fn keep(&self, place: &Place, encoded: Zeroizing<Vec<u8>>) {
        let name = file_of(place);
        lock(&self.0.files).used.insert(name.clone());
        self.put(name, Some(encoded));
    }

    /// Forgets an object that does not exist, or that no stream asks for.
    pub(super) fn forget(&self, place: &Place) {
        let name = file_of(place);
        let mut files = lock(&self.0.files);
        let is_old = files.old.as_mut().is_none_or(|old| old.remove(&name));
        // Names that never existed have no file.
        let may_exist = files.used.remove(&name) || is_old;
        drop(files);
        if may_exist {
            self.put(name, None);
        }
    }

    fn put(&self, name: String, content: Option<Zeroizing<Vec<u8>>>) {
        lock(&self.0.pending).insert(name, content);
        self.0.changed.notify_one();
    }

    /// What was kept of an object in this run or an earlier one. Its version is no version of the API server.
    pub(super) async fn load(&self, place: &Place) -> Option<Object> {
        let name = file_of(place);
        let (path, expected) = (self.0.directory.join(&name), place.clone());
        let file = path.clone();
        let loaded = self.0.disk.run(&path, move || read(&file, &expected)).await;
        let reason = match loaded {
            Ok(Ok(None)) => return None,
            Ok(Ok(object)) => {
                lock(&self.0.files).used.insert(name);
                return object;
            }
            Ok(Err(reason)) => reason,
            Err(error) => error.to_string(),
        };
        tracing::warn!(path = %path.display(), reason, "kept Secret is not used");
        None
    }

    /// Finds out which files an earlier run has left.
    async fn list(&self) {
        let directory = self.0.directory.clone();
        let list = move || {
            let entries = fs::read_dir(directory).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
        };
        if let Ok(old) = self.0.disk.run(&self.0.directory, list).await {
            lock(&self.0.files).old = Some(old);
        }
    }

    /// Removes the files of an earlier run that nothing has asked for.
    fn remove_unused(&self) {
        let mut files = lock(&self.0.files);
        let old = files.old.replace(HashSet::new()).unwrap_or_default();
        let unused: Vec<_> = old.into_iter().filter(|name| !files.used.contains(name)).collect();
        drop(files);
        for name in unused {
            self.put(name, None);
        }
    }
}

/// The content of an object's file.
pub(super) fn encode(place: &Place, object: &Object) -> Zeroizing<Vec<u8>> {
    let parts = || KEYS.into_iter().filter_map(|key| Some((key, object.data.get(key)?)));
    let head = json!({
        "version": VERSION,
        "cluster": place.cluster.to_string(),
        "kind": place.object.kind.to_string(),
        "namespace": &*place.object.namespace,
        "name": &*place.object.name,
        "parts": parts().map(|(key, value)| json!([key, value.len()])).collect::<Vec<_>>(),
    });
    let head = head.to_string();
    let size = head.len() + 1 + parts().map(|(_, value)| value.len()).sum::<usize>();
    // Sized beforehand: a buffer that grows leaves copies of the key behind.
    let mut content = Zeroizing::new(Vec::with_capacity(size));
    content.extend_from_slice(head.as_bytes());
    content.push(b'\n');
    parts().for_each(|(_, value)| content.extend_from_slice(value));
    content
}

/// Reads the file of `place`, if it exists.
fn read(path: &Path, place: &Place) -> Result<Option<Object>, String> {
    let opened = match file::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| error.to_string())?,
    };
    let mode = opened.metadata().map_err(|error| error.to_string())?.mode();
    if mode & 0o077 != 0 {
        return Err(format!(
            "others may read or write it (mode {:04o}): its key may be known",
            mode & 0o7777
        ));
    }
    let content = file::content(&opened, limits::KUBE_STATE_BYTES).map_err(|error| error.to_string())?;
    decode(&content, place)
        .ok_or_else(|| "it is damaged, or of another version of the agent".to_owned())
        .map(Some)
}

fn decode(content: &[u8], place: &Place) -> Option<Object> {
    let end = content.iter().position(|byte| *byte == b'\n')?;
    let (head, mut rest) = (content.get(..end)?, content.get(end + 1..)?);
    let head: Value = serde_json::from_slice(head).ok()?;
    let is = |field: &str, text: &str| head.get(field).and_then(Value::as_str) == Some(text);
    let is_it = head.get("version")?.as_u64() == Some(VERSION)
        && is("cluster", &place.cluster.0)
        && is("kind", &place.object.kind.to_string())
        && is("namespace", &place.object.namespace)
        && is("name", &place.object.name);
    if !is_it {
        return None;
    }
    let mut data = BTreeMap::new();
    for part in head.get("parts")?.as_array()? {
        let key = part.get(0)?.as_str()?;
        let length = usize::try_from(part.get(1)?.as_u64()?).ok()?;
        let (value, left) = rest.split_at_checked(length)?;
        data.insert(key.into(), Zeroizing::new(value.to_vec()));
        rest = left;
    }
    rest.is_empty().then(|| Object {
        name: (&*place.object.name).into(),
        version: Version("".into()),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        data,
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{object, secret};
    use super::*;
    use crate::kube::ClusterId;

    fn place() -> Place {
        Place { cluster: ClusterId("home".into()), cluster_number: 0, object: secret("shop", "web") }
    }

    #[test]
    fn what_is_kept_of_an_object_is_what_is_served_of_it() {
        let whole =
            object("web", 7, &[("tls.crt", "chain\n"), ("tls.key", "key"), ("other", "x"), ("ca.crt", "")]);
        let encoded = encode(&place(), &whole);
        let decoded = decode(&encoded, &place()).unwrap();
        let keys: Vec<_> = decoded.data.iter().map(|(key, value)| (&**key, value.len())).collect();
        assert_eq!(keys, [("ca.crt", 0), ("tls.crt", 6), ("tls.key", 3)]);
        let other = Place { cluster: ClusterId("away".into()), ..place() };
        assert!(decode(&encoded, &other).is_none(), "of another cluster");
        for cut in [0, 10, encoded.len() - 1] {
            assert!(decode(&encoded[..cut], &place()).is_none());
        }
        assert!(decode(&[&encoded[..], b"x"].concat(), &place()).is_none());
    }

    #[tokio::test]
    async fn a_failed_write_names_the_file_and_the_option() {
        let directory = tempfile::tempdir().unwrap();
        let taken = directory.path().join("taken");
        fs::write(&taken, "a file").unwrap();
        let (cache, workload) = crate::store::Cache::with_workload("");
        let disk =
            Disk::new(crate::fs::pending::PendingOperations::default(), crate::base::clock::Clock::system());
        let keeper = Keeper::new(&taken, disk, cache.components(workload));
        let error = keeper.write("x.state", Some(Zeroizing::new(vec![1]))).await.unwrap_err();
        assert!(
            error.contains(taken.to_str().unwrap()) && error.ends_with("choose another --state-dir"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_others_may_read_is_not_used() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x");
        fs::write(&path, &*encode(&place(), &object("web", 1, &[("tls.crt", "a")]))).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read(&path, &place()).unwrap_err().contains("mode 0640"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(read(&path, &place()).unwrap().is_some());
        assert!(read(&directory.path().join("none"), &place()).unwrap().is_none());
    }
}
