//! One look at files that belong together: read until they no longer change, and checked as exactly these bytes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aws_lc_rs::digest;
use zeroize::Zeroizing;

use crate::base::clock::rfc3339;
use crate::base::limits;
use crate::fs::file;
use crate::fs::walk::{FoundFile, Walk};
use crate::pki::certificate::Certificate;
use crate::pki::key::{NotAKey, PrivateKey};
use crate::pki::pem::{self, NotPem};
use crate::secret::{KeyPair, NotAKeyPair, NotATrustBundle, TrustBundle, Unchained};

/// File name of a certificate chain.
pub const CHAIN_FILE: &str = "cert-chain.pem";
/// File name of its private key.
pub const KEY_FILE: &str = "key.pem";
/// File name of the trust roots.
pub const ROOT_FILE: &str = "root-cert.pem";
pub const NAMES: [&str; 3] = [CHAIN_FILE, KEY_FILE, ROOT_FILE];

/// The file names of Kubernetes' TLS Secrets, which cert-manager uses too.
pub const TLS_NAMES: [&str; 3] = ["tls.crt", "tls.key", "ca.crt"];

/// Why files are not served.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{}", absent(paths))]
    Missing { paths: Vec<PathBuf> },
    #[error("{present} exists, but {absent} does not")]
    Half { present: PathBuf, absent: PathBuf },
    #[error("{path}: {source}")]
    Certificates { path: PathBuf, source: NotPem },
    #[error("{path}: {source}")]
    Key { path: PathBuf, source: NotAKey },
    #[error("{chain} and {key}: {source}")]
    Pair { chain: PathBuf, key: PathBuf, source: NotAKeyPair },
    #[error("{path}: {source}")]
    Bundle { path: PathBuf, source: NotATrustBundle },
    #[error("{path}: expired at {}", show(*at))]
    Expired { path: PathBuf, at: SystemTime },
    #[error("{path}: valid only from {}; check this machine's clock", show(*from))]
    NotYetValid { path: PathBuf, from: SystemTime },
    #[error("{} change faster than they can be read", display(paths))]
    Restless { paths: Vec<PathBuf> },
    #[error("{path} is not used beside {taken}: sets of file names are not mixed; name it with --root-file")]
    OtherSet { path: PathBuf, taken: PathBuf },
    #[error("the file system of {path} does not answer")]
    Unanswered { path: PathBuf },
    #[error(
        "{path}: held back until the key pair beside it can be used, since the certificate that is still served does not \
         chain to it"
    )]
    RootsHeldBack { path: PathBuf },
    #[error(
        "{path}: held back until the roots beside it can be used, since it does not chain to the roots that are still served"
    )]
    PairHeldBack { path: PathBuf },
}

impl FileError {
    /// Whether the files may be in the middle of a change.
    pub fn may_be_transient(&self) -> bool {
        match self {
            Self::Half { .. }
            | Self::Certificates { .. }
            | Self::Key { .. }
            | Self::Pair { .. }
            | Self::Bundle { .. }
            | Self::Restless { .. } => true,
            Self::Unreadable { .. }
            | Self::Missing { .. }
            | Self::OtherSet { .. }
            | Self::Expired { .. }
            | Self::NotYetValid { .. }
            | Self::Unanswered { .. }
            | Self::RootsHeldBack { .. }
            | Self::PairHeldBack { .. } => false,
        }
    }

    /// The metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "unreadable",
            Self::Missing { .. } | Self::OtherSet { .. } => "missing",
            Self::Half { .. } => "incomplete",
            Self::Certificates { .. } | Self::Key { .. } | Self::Bundle { .. } => "not_parsed",
            Self::Pair { .. } => "mismatch",
            Self::Expired { .. } | Self::NotYetValid { .. } => "not_valid",
            Self::Restless { .. } => "restless",
            Self::Unanswered { .. } => "unanswered",
            Self::RootsHeldBack { .. } | Self::PairHeldBack { .. } => "held_back",
        }
    }
}

fn display(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn absent(paths: &[PathBuf]) -> String {
    match paths {
        [path] => format!("{} does not exist", path.display()),
        several => format!("none of {} exists", display(several)),
    }
}

/// Files that hold a key pair, a trust bundle, or both. They need not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The files of the chain and of its key.
    pub key_pair: Option<(PathBuf, PathBuf)>,
    pub roots: Option<PathBuf>,
    /// These are other names for the files of the place before it. Of places that are alternatives, one counts: the first that
    /// has all files, else the first that has a key pair, else the first that has a file.
    pub is_alternative: bool,
    /// The key may be in the file of the chain: a credential bundle.
    pub takes_bundle: bool,
}

impl Place {
    /// Files of these names in `directory`.
    pub fn in_directory(directory: &Path, [chain, key, roots]: [&str; 3]) -> Self {
        let key_pair = Some((directory.join(chain), directory.join(key)));
        Self { key_pair, roots: Some(directory.join(roots)), is_alternative: false, takes_bundle: true }
    }

    /// Whether the files of a key pair exist, good or not.
    pub fn holds_key_pair(&self) -> bool {
        let is_bundle =
            |path: &Path| file::read(path, limits::FILE_BYTES).is_ok_and(|text| pem::has_private_key(&text));
        self.key_pair
            .as_ref()
            .is_some_and(|(chain, key)| chain.exists() && (key.exists() || is_bundle(chain)))
    }

    /// The directory of its first file.
    pub fn home(&self) -> Option<&Path> {
        self.paths().next().and_then(|path| path.parent())
    }

    fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.key_pair.iter().flat_map(|(chain, key)| [chain, key]).chain(&self.roots)
    }
}

/// Places in the order of their rank: each secret is served from the first place that has its files.
#[derive(Debug)]
pub struct Places {
    pub ranked: Vec<Place>,
    /// The directories to which the agent itself writes: files there, after all links, count as missing.
    pub own: Vec<PathBuf>,
    /// Certificates among the roots that can't be parsed are left out: bundles of operating systems contain such ones.
    pub is_lenient: bool,
}

/// One look at all places.
#[derive(Debug)]
pub struct Generation {
    pub key_pair: Found<KeyPair>,
    pub roots: Found<TrustBundle>,
    /// Whether the leaf chains to the roots, where both are good.
    pub chained: Option<Result<(), Unchained>>,
}

/// What was found of one secret.
#[derive(Debug)]
pub struct Found<T> {
    /// Good, or missing (`None`), or unusable.
    pub secret: Result<Option<T>, FileError>,
    /// The rank of the place that has it, good or not.
    pub rank: usize,
}

impl Generation {
    /// Holds back the half of this generation that does not fit what is served of the other half, which is unusable: a
    /// generation is taken whole. Nothing is held back where what is served does not fit together either, or has expired.
    pub fn hold_back(&mut self, served: (&KeyPair, &TrustBundle), places: &Places, now: SystemTime) {
        let (pair, bundle) = served;
        if bundle.verify(pair, now).is_err() {
            return;
        }
        match (&self.key_pair.secret, &self.roots.secret) {
            (Err(_), Ok(Some(new))) if new.verify(pair, now).is_err() => {
                let path = places.roots(self.roots.rank);
                self.roots.secret = Err(FileError::RootsHeldBack { path });
            }
            (Ok(Some(new)), Err(_)) if bundle.verify(new, now).is_err() => {
                let path = places.chain(self.key_pair.rank);
                self.key_pair.secret = Err(FileError::PairHeldBack { path });
            }
            _ => {}
        }
    }
}

impl<T> Found<T> {
    pub fn map<U>(self, into: impl FnOnce(T) -> U) -> Found<U> {
        Found { secret: self.secret.map(|secret| secret.map(into)), rank: self.rank }
    }

    /// When it becomes good without a change of the files.
    pub fn starts(&self) -> Option<SystemTime> {
        match &self.secret {
            Err(FileError::NotYetValid { from, .. }) => Some(*from),
            _ => None,
        }
    }

    pub fn good(&self) -> Option<&T> {
        self.secret.as_ref().ok().and_then(Option::as_ref)
    }
}

/// What the files of a place hold.
struct Held {
    key_pair: Option<(Content, Content)>,
    roots: Option<Content>,
}

impl Held {
    /// How much of a set this is: 3 is all, 2 a key pair, 1 less, 0 nothing.
    fn completeness(&self) -> u8 {
        let exists = |content: &Content| !matches!(content, Ok(None));
        let has_roots = self.roots.as_ref().is_some_and(exists);
        let pair = self.key_pair.as_ref();
        let has_pair = pair.is_some_and(|(chain, key)| {
            exists(chain) && exists(key) || matches!(chain, Ok(Some(text)) if pem::has_private_key(text))
        });
        let has_half = pair.is_some_and(|(chain, key)| exists(chain) || exists(key));
        match (has_pair, has_roots || has_half) {
            (true, _) => 2 + u8::from(has_roots),
            (false, has_any) => u8::from(has_any),
        }
    }
}

type Content = Result<Option<Zeroizing<Vec<u8>>>, FileError>;

pub type Digest = [u8; 32];

/// What the files of [`Places::paths`] held at one moment.
#[derive(Debug)]
pub struct Contents(Vec<Content>);

impl Contents {
    /// Distinguishes two contents.
    pub fn digest(&self) -> Digest {
        let mut digest = digest::Context::new(&digest::SHA256);
        for content in &self.0 {
            let text;
            let (kind, bytes): (u8, &[u8]) = match content {
                Ok(None) => (0, &[]),
                Ok(Some(content)) => (1, content),
                Err(error) => {
                    text = error.to_string();
                    (2, text.as_bytes())
                }
            };
            digest.update(&[kind]);
            digest.update(&bytes.len().to_le_bytes());
            digest.update(bytes);
        }
        digest.finish().as_ref().try_into().unwrap_or_default()
    }

    /// Parses the files of `places`, and checks them as of `now`. Roots that are those of `before` are not parsed again.
    pub fn parse(self, places: &Places, before: Option<&TrustBundle>, now: SystemTime) -> Generation {
        let mut contents = self.0.into_iter();
        let mut next = || contents.next().unwrap_or(Ok(None));
        let mut held: Vec<_> = places
            .ranked
            .iter()
            .map(|place| Held {
                key_pair: place.key_pair.as_ref().map(|_| (next(), next())),
                roots: place.roots.as_ref().map(|_| next()),
            })
            .collect();
        let other_set = places.drop_other_sets(&mut held);
        let (mut pairs, mut bundles) = (Vec::new(), Vec::new());
        for (place, held) in places.ranked.iter().zip(held) {
            let pair = place.key_pair.as_ref().zip(held.key_pair);
            pairs.push(pair.map(|((chain, key), (chain_text, key_text))| {
                let key_text = match (&chain_text, key_text) {
                    (Ok(Some(both)), Ok(None)) if place.takes_bundle && pem::has_private_key(both) => {
                        Ok(Some(both.clone()))
                    }
                    (_, key_text) => key_text,
                };
                let pair = parse_pair((chain, chain_text), (key, key_text));
                pair.and_then(|pair| check_time(chain, pair, now))
            }));
            let roots = place.roots.as_ref().zip(held.roots);
            bundles.push(roots.map(|(path, content)| places.parse_roots(path, content, before, now)));
        }
        let (key_pair, mut roots) = (first(pairs), first(bundles));
        if let (Ok(None), Some(error)) = (&roots.secret, other_set) {
            roots.secret = Err(error);
        }
        let both = key_pair.good().zip(roots.good());
        let chained = both.map(|(pair, roots): (&KeyPair, &TrustBundle)| roots.verify(pair, now));
        Generation { key_pair, roots, chained }
    }
}

impl Places {
    /// Places without restrictions.
    pub fn new(ranked: Vec<Place>) -> Self {
        Self { ranked, own: Vec::new(), is_lenient: false }
    }

    /// Every file of every place.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.ranked.iter().flat_map(Place::paths).cloned().collect()
    }

    /// How many of [`Places::paths`] are of the first place.
    pub fn files_of_first(&self) -> usize {
        self.ranked.first().map_or(0, |place| place.paths().count())
    }

    /// The place of this rank, for people: its directory, or the file if there is only one.
    pub fn shown(&self, rank: usize) -> String {
        let place = self.ranked.get(rank);
        let shown = place.and_then(|place| match place {
            Place { key_pair: None, roots: Some(file), .. } => Some(file.as_path()),
            _ => place.home(),
        });
        shown.map(|path| path.display().to_string()).unwrap_or_default()
    }

    /// Each place once, for people.
    pub fn homes(&self) -> Vec<PathBuf> {
        let mut homes: Vec<_> = (0..self.ranked.len()).map(|rank| self.shown(rank).into()).collect();
        homes.dedup();
        homes
    }

    /// The file of the roots in the place of this rank.
    fn roots(&self, rank: usize) -> PathBuf {
        self.ranked.get(rank).and_then(|place| place.roots.clone()).unwrap_or_default()
    }

    /// The file of the certificate chain in the place of this rank.
    fn chain(&self, rank: usize) -> PathBuf {
        let pair = self.ranked.get(rank).and_then(|place| place.key_pair.as_ref());
        pair.map(|(chain, _)| chain.clone()).unwrap_or_default()
    }

    /// The error that the key pair is missing, or the roots.
    pub fn missing(&self, key_pairs: bool) -> FileError {
        let places = self.ranked.iter().filter(|place| !place.is_alternative);
        let paths = places.flat_map(|place| match key_pairs {
            true => place.key_pair.iter().flat_map(|(chain, key)| [chain, key]).cloned().collect::<Vec<_>>(),
            false => place.roots.iter().cloned().collect(),
        });
        FileError::Missing { paths: paths.collect() }
    }

    /// Reads all files together and checks them as of `now`.
    pub fn look(&self, now: SystemTime) -> Generation {
        let mut walk = Walk::new(self.paths());
        let look = walk.read(limits::FILE_BYTES, self.refusal());
        self.contents(look.files, look.is_restless).parse(self, None, now)
    }

    /// The reason why a file at this path, which has no links, is not read: it lies where the agent itself writes.
    pub fn refusal(&self) -> impl Fn(&Path) -> Option<io::Error> + use<'_> {
        let own: Vec<_> = self.own.iter().filter_map(|directory| directory.canonicalize().ok()).collect();
        move |real| {
            let is_own = own.iter().any(|directory| real.starts_with(directory));
            is_own.then(|| io::ErrorKind::NotFound.into())
        }
    }

    /// Names the contents of files that were found at [`Places::paths`].
    pub fn contents(&self, found: Vec<FoundFile>, is_restless: bool) -> Contents {
        let content = |(path, file): (PathBuf, FoundFile)| match file.content {
            _ if is_restless => Err(FileError::Restless { paths: self.homes() }),
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(FileError::Unreadable { path, source }),
        };
        Contents(self.paths().into_iter().zip(found).map(content).collect())
    }

    /// Leaves one set of files of those that are alternatives. Returns the error for roots of another set than the key pair.
    fn drop_other_sets(&self, held: &mut [Held]) -> Option<FileError> {
        let mut error = None;
        let starts = self.ranked.iter().enumerate().filter(|(_, place)| !place.is_alternative);
        let mut starts: Vec<_> = starts.map(|(start, _)| start).chain([held.len()]).collect();
        starts.dedup();
        for group in starts.windows(2) {
            let &[start, end] = group else { continue };
            let best = (start..end).rev().max_by_key(|index| held.get(*index).map(Held::completeness));
            let Some(best) = best else { continue };
            let has_no_roots = held.get(best).is_some_and(|held| held.completeness() == 2);
            for index in (start..end).filter(|index| *index != best) {
                let Some(other) = held.get_mut(index) else { continue };
                let dropped = std::mem::replace(other, Held { key_pair: None, roots: None });
                if has_no_roots && matches!(dropped.roots, Some(Ok(Some(_)))) {
                    error.get_or_insert(FileError::OtherSet {
                        path: self.roots(index),
                        taken: self.chain(best),
                    });
                }
            }
        }
        error
    }

    fn parse_roots(
        &self,
        path: &Path,
        content: Content,
        before: Option<&TrustBundle>,
        now: SystemTime,
    ) -> Result<Option<TrustBundle>, FileError> {
        let Some(content) = content? else { return Ok(None) };
        let path = || path.to_owned();
        let parse = if self.is_lenient { pem::readable_certificates } else { pem::certificates };
        let mut roots = parse(&content).map_err(|source| FileError::Certificates { path: path(), source })?;
        if self.is_lenient {
            roots.retain(|root| Certificate::parse(root).is_ok());
        }
        let bundle =
            TrustBundle::of(roots, before).map_err(|source| FileError::Bundle { path: path(), source })?;
        if bundle.not_after() <= now {
            return Err(FileError::Expired { path: path(), at: bundle.not_after() });
        }
        Ok(Some(bundle))
    }
}

/// What the first place with files has. A place with half of a pair is passed over for one with a whole pair.
fn first<T>(places: Vec<Option<Result<Option<T>, FileError>>>) -> Found<T> {
    let mut half = None;
    let mut last = 0;
    for (rank, secret) in places.into_iter().enumerate() {
        last = rank;
        match secret {
            None | Some(Ok(None)) => {}
            Some(Err(error @ FileError::Half { .. })) => {
                half.get_or_insert(Found { secret: Err(error), rank });
            }
            Some(secret) => return Found { secret, rank },
        }
    }
    half.unwrap_or(Found { secret: Ok(None), rank: last })
}

fn show(moment: SystemTime) -> String {
    rfc3339(moment).to_string()
}

fn check_time(path: &Path, pair: Option<KeyPair>, now: SystemTime) -> Result<Option<KeyPair>, FileError> {
    let Some(pair) = pair else { return Ok(None) };
    let path = path.to_owned();
    if pair.not_after() <= now {
        return Err(FileError::Expired { path, at: pair.not_after() });
    }
    if pair.leaf().not_before > now {
        return Err(FileError::NotYetValid { path, from: pair.leaf().not_before });
    }
    Ok(Some(pair))
}

fn parse_pair(
    (chain_path, chain): (&Path, Content),
    (key_path, key): (&Path, Content),
) -> Result<Option<KeyPair>, FileError> {
    let half = |present: &Path, absent: &Path| FileError::Half {
        present: present.to_owned(),
        absent: absent.to_owned(),
    };
    let (chain, key) = match (chain?, key?) {
        (None, None) => return Ok(None),
        (Some(_), None) => return Err(half(chain_path, key_path)),
        (None, Some(_)) => return Err(half(key_path, chain_path)),
        (Some(chain), Some(key)) => (chain, key),
    };
    let chain = pem::certificates(&chain)
        .map_err(|source| FileError::Certificates { path: chain_path.to_owned(), source })?;
    let key =
        PrivateKey::from_pem(&key).map_err(|source| FileError::Key { path: key_path.to_owned(), source })?;
    let pair = KeyPair::new(chain, key).map_err(|source| FileError::Pair {
        chain: chain_path.to_owned(),
        key: key_path.to_owned(),
        source,
    })?;
    Ok(Some(pair))
}
