//! The last good secret across restarts of the agent: one file, replaced as a whole.
//!
//! ```text
//! {"version":1,"provider":…,"ca":…,"key_type":…,"received":…,"chain":[…],"roots":[…]}     one line of JSON, certificates in base64
//! -----BEGIN PRIVATE KEY-----                                               the key, as PEM
//! ```

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use zeroize::Zeroizing;

use super::trust::Anchor;
use crate::base::clock::rfc3339_millis;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::file;
use crate::metrics::Health;
use crate::pki::key::{KeyType, PrivateKey};
use crate::secret::KeyPair;

/// The file's name in `--state-dir`.
pub(super) const STATE_FILE: &str = "attache.state";
/// What is written before it takes that name.
const NEW_FILE: &str = "attache.state.new";
const VERSION: u64 = 1;
/// Longer than any certificate: they end with the year 9999.
const LONGEST: Duration = Duration::from_secs(10_000 * 366 * 24 * 3600);

/// What is kept. Nothing of it is checked here: it is only as good as the file.
#[derive(Debug)]
pub struct State {
    /// The provider's name, as `--ca` takes it.
    pub provider: String,
    /// The CA that signed, as it was configured.
    pub ca: String,
    /// The kind of key, as `--key-type` takes it.
    pub key_type: String,
    /// When its answer came.
    pub received: SystemTime,
    /// The leaf and its intermediates.
    pub chain: Vec<CertificateDer<'static>>,
    /// The leaf's key.
    pub key: PrivateKey,
    /// What is known of roots.
    pub anchors: Vec<Anchor>,
}

/// Why the state was not read or not written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("it can't be read: {0}")]
    Unreadable(io::Error),
    #[error("it is not what this agent writes: {0}")]
    Foreign(String),
    #[error("it has the format {0}, and this version of the agent knows {VERSION} alone")]
    Version(Value),
    #[error("{doing} {path} failed: {source}; {}choose another --state-dir", file::way_out(source))]
    Unwritable { doing: &'static str, path: PathBuf, source: io::Error },
}

/// A folder that holds the state of one agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateFolder {
    path: PathBuf,
}

impl StateFolder {
    /// The folder at `path`, which is made when there is something to write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the state is.
    pub fn file(&self) -> PathBuf {
        self.path.join(STATE_FILE)
    }

    /// What was written last; none where nothing ever was.
    pub fn read(&self) -> Result<Option<State>, StateError> {
        match file::read(&self.file(), limits::FILE_BYTES) {
            Ok(content) => decode(&content).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StateError::Unreadable(error)),
        }
    }

    /// Replaces what is there: whoever reads sees the old content or the new one, also after a power cut. It waits for
    /// the disk.
    pub fn write(&self, content: &[u8]) -> Result<(), StateError> {
        let (new, file) = (self.path.join(NEW_FILE), self.file());
        let failed = |doing: &'static str, path: &Path| {
            let path = path.to_owned();
            move |source| StateError::Unwritable { doing, path, source }
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.path)
            .map_err(failed("making", &self.path))?;
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &new)(error));
            }
            _ => {}
        }
        let written =
            File::options().write(true).create_new(true).mode(0o600).open(&new).and_then(|mut file| {
                file.write_all(content)?;
                file.sync_all()
            });
        if let Err(error) = written {
            // A half of it would only take room.
            let _ = fs::remove_file(&new);
            return Err(failed("writing", &new)(error));
        }
        fs::rename(&new, &file).map_err(failed("replacing", &file))?;
        File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(failed("syncing", &self.path))
    }
}

/// Writes the state beside the source's own work: a disk that hangs keeps no renewal waiting.
#[derive(Debug)]
pub(super) struct Keeper {
    /// Where.
    pub folder: StateFolder,
    /// The write that is not known to have ended.
    writing: Option<JoinHandle<Result<(), StateError>>>,
    repeats: FailureLog,
    /// For people: how the last write ended.
    health: Health,
}

impl Keeper {
    /// How long a disk may take before the source goes on.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// Nothing is written yet.
    pub(super) fn new(folder: StateFolder, health: Health) -> Self {
        health.send_replace(Some(Ok(())));
        Self { folder, writing: None, repeats: FailureLog::default(), health }
    }

    /// Has `content` written. What can't be written is told.
    pub(super) async fn keep(&mut self, content: Zeroizing<Vec<u8>>) {
        let folder = self.folder.clone();
        // One at a time: an old state must not replace a newer one.
        let outcome = match self.settle().await {
            // If the one before failed late, that is over now.
            Some(_) => {
                self.writing = Some(tokio::task::spawn_blocking(move || folder.write(&content)));
                self.settle().await
            }
            None => None,
        };
        let reason = match outcome {
            Some(Ok(())) => {
                self.health.send_replace(Some(Ok(())));
                if self.repeats.recovered() {
                    tracing::info!(file = %self.folder.file().display(), "the state is written again");
                }
                return;
            }
            Some(Err(reason)) => reason,
            None => format!(
                "{}: the disk has not answered within {:?}; see what is wrong with it, or choose another --state-dir",
                self.folder.path().display(),
                Self::PATIENCE
            ),
        };
        self.health.send_replace(Some(Err(reason.clone())));
        if self.repeats.is_new(&reason) {
            tracing::warn!(
                reason,
                "the state is not kept: after a restart there would be no certificate until the CA has signed one"
            );
        }
    }

    /// The end of the write that goes on; none if it goes on still.
    async fn settle(&mut self) -> Option<Result<(), String>> {
        let Some(writing) = &mut self.writing else { return Some(Ok(())) };
        let ended = tokio::time::timeout(Self::PATIENCE, writing).await.ok()?;
        self.writing = None;
        Some(match ended {
            Ok(written) => written.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        })
    }
}

/// The state as it is written.
pub(super) fn encode(
    provider: &str,
    ca: &str,
    key_type: KeyType,
    received: SystemTime,
    pair: &KeyPair,
    anchors: &[Anchor],
) -> Zeroizing<Vec<u8>> {
    let moment = |moment| rfc3339_millis(moment).to_string();
    let roots = anchors.iter().map(|anchor| {
        json!({
            "certificate": STANDARD.encode(&anchor.root),
            "named_by": anchor.named_by,
            "lifetime_seconds": anchor.lifetime.as_secs(),
            "until": anchor.until.map(moment),
        })
    });
    let head = json!({
        "version": VERSION,
        "provider": provider,
        "ca": ca,
        "key_type": key_type.name(),
        "received": moment(received),
        "chain": pair.chain().iter().map(|der| STANDARD.encode(der)).collect::<Vec<_>>(),
        "roots": roots.collect::<Vec<_>>(),
    });
    let (head, key) = (head.to_string(), pair.key().to_pem());
    // Sized beforehand: a buffer that grows leaves copies of the key behind.
    let mut content = Zeroizing::new(Vec::with_capacity(head.len() + 1 + key.len()));
    content.extend_from_slice(head.as_bytes());
    content.push(b'\n');
    content.extend_from_slice(&key);
    content
}

fn decode(content: &[u8]) -> Result<State, StateError> {
    let foreign = |what: &str| StateError::Foreign(what.to_owned());
    let end =
        content.iter().position(|byte| *byte == b'\n').ok_or_else(|| foreign("it has no first line"))?;
    let (head, key) = content.split_at(end);
    let head: Value = serde_json::from_slice(head).map_err(|_| foreign("its first line is no JSON"))?;
    match head.get("version") {
        Some(version) if version.as_u64() == Some(VERSION) => {}
        Some(version) => return Err(StateError::Version(version.clone())),
        None => return Err(foreign("it names no version")),
    }
    let state = || {
        let anchors = head.get("roots")?.as_array()?.iter().map(anchor).collect::<Option<Vec<_>>>()?;
        Some((
            text(head.get("provider")?)?,
            text(head.get("ca")?)?,
            text(head.get("key_type")?)?,
            moment(head.get("received")?)?,
            head.get("chain")?.as_array()?.iter().map(certificate).collect::<Option<Vec<_>>>()?,
            anchors,
        ))
    };
    let (provider, ca, key_type, received, chain, anchors) =
        state().ok_or_else(|| foreign("a part of its first line is missing or damaged"))?;
    let key = PrivateKey::from_pem(key).map_err(|error| StateError::Foreign(error.to_string()))?;
    Ok(State { provider, ca, key_type, received, chain, key, anchors })
}

fn anchor(value: &Value) -> Option<Anchor> {
    Some(Anchor {
        root: certificate(value.get("certificate")?)?,
        named_by: value.get("named_by")?.as_array()?.iter().map(text).collect::<Option<BTreeSet<_>>>()?,
        // A moment that far away can't be reckoned with.
        lifetime: value
            .get("lifetime_seconds")?
            .as_u64()
            .map(Duration::from_secs)
            .filter(|it| *it < LONGEST)?,
        until: match value.get("until")? {
            Value::Null => None,
            until => Some(moment(until)?),
        },
    })
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn moment(value: &Value) -> Option<SystemTime> {
    humantime::parse_rfc3339(value.as_str()?).ok()
}

fn certificate(value: &Value) -> Option<CertificateDer<'static>> {
    STANDARD.decode(value.as_str()?).ok().map(CertificateDer::from)
}
