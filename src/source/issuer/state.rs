//! The last good secret across restarts of the agent: one file, replaced as a whole.
//!
//! ```text
//! {"version":1,"provider":…,"ca":…,"key_type":…,"received":…,"chain":[…],"roots":[…]}     one line of JSON, certificates in base64
//! -----BEGIN PRIVATE KEY-----                                               the key, as PEM
//! ```

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::trust::Anchor;
use crate::base::clock::rfc3339_millis;
use crate::base::limits;
use crate::fs::create::private_directories;
use crate::fs::file;
use crate::fs::replace::{NotReplaced, replace};
use crate::pki::key::{KeyType, PrivateKey};
use crate::secret::KeyPair;

/// The file's name in `--state-dir`.
pub(super) const STATE_FILE: &str = "attache.state";
const VERSION: u64 = 1;
/// Longer than any certificate: the last possible notAfter is the end of the year 9999.
const LONGEST: Duration = Duration::from_secs(10_000 * 366 * 24 * 3600);

/// The content of the file. Only its syntax is checked here.
#[derive(Debug)]
pub(super) struct SavedState {
    /// The provider's name, as `--ca` takes it.
    pub(super) provider: String,
    /// The CA that signed, as it was configured.
    pub(super) ca: String,
    /// The key type, as `--key-type` takes it.
    pub(super) key_type: String,
    /// When the CA's answer came.
    pub(super) received: SystemTime,
    /// The leaf and its intermediates.
    pub(super) chain: Vec<CertificateDer<'static>>,
    /// The leaf's key.
    pub(super) key: PrivateKey,
    /// The roots, and how long each stays.
    pub(super) anchors: Vec<Anchor>,
}

/// Why the state was not read or not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateError {
    #[error("it can't be read: {0}")]
    Unreadable(io::Error),
    #[error("it is not a state file of this agent: {0}")]
    Foreign(String),
    #[error("it has the format {0}, and this version of the agent knows only {VERSION}")]
    Version(u64),
    #[error("{0}choose another --state-dir")]
    Unwritable(#[from] NotReplaced),
}

/// The directory with the state of one workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// The directory at `path`. It is created when there is something to write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the state file.
    pub fn file(&self) -> PathBuf {
        self.path.join(STATE_FILE)
    }

    /// Creates the directory unless it exists. Only the agent's user may enter it.
    pub fn create(&self) -> io::Result<()> {
        private_directories(&self.path)
    }

    /// Removes what was kept, when its workload is gone. Waits for the disk.
    pub fn clear(&self) -> io::Result<()> {
        let unless_gone = |removed: io::Result<()>| match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
        // An agent that ended in between has left the directory alone.
        unless_gone(std::fs::remove_file(self.file()))?;
        unless_gone(std::fs::remove_dir(&self.path))
    }

    /// What was written last; none where nothing ever was.
    pub(super) fn read(&self) -> Result<Option<SavedState>, StateError> {
        match file::read(&self.file(), limits::FILE_BYTES) {
            Ok(content) => decode(&content).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StateError::Unreadable(error)),
        }
    }

    /// Replaces the file by `content`, as [`replace`] does. Waits for the disk.
    pub(super) fn write(
        &self,
        content: impl FnOnce() -> Option<Zeroizing<Vec<u8>>>,
    ) -> Result<(), StateError> {
        Ok(replace(&self.path, STATE_FILE, content)?)
    }
}

/// The content of the file.
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

pub(super) fn decode(content: &[u8]) -> Result<SavedState, StateError> {
    let foreign = |what: &str| StateError::Foreign(what.to_owned());
    let end =
        content.iter().position(|byte| *byte == b'\n').ok_or_else(|| foreign("it has no first line"))?;
    let (head, key) = content.split_at(end);
    let head: Value = serde_json::from_slice(head).map_err(|_| foreign("its first line is not JSON"))?;
    match head.get("version") {
        Some(version) => match version.as_u64() {
            Some(VERSION) => {}
            Some(other) => return Err(StateError::Version(other)),
            None => return Err(foreign("its version is not a number")),
        },
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
    Ok(SavedState { provider, ca, key_type, received, chain, key, anchors })
}

fn anchor(value: &Value) -> Option<Anchor> {
    Some(Anchor {
        root: certificate(value.get("certificate")?)?,
        named_by: value.get("named_by")?.as_array()?.iter().map(text).collect::<Option<BTreeSet<_>>>()?,
        // The sum with a moment would overflow.
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
