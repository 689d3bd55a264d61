//! Which files belong to which name.

use std::path::{Component, Path, PathBuf};

use super::FileSettings;
use crate::fs::find::OUTSIDE;
use crate::fs::generation::{NAMES, Place, Places, TLS_NAMES};
use crate::secret::SecretName;

/// The file names of GKE's workload certificates.
pub(super) const GKE_NAMES: [&str; 3] = ["certificates.pem", "private_key.pem", "ca_certificates.pem"];
/// Where Istio's agent looks for certificates that the platform has mounted.
pub const PLATFORM_DIRECTORY: &str = "/var/run/secrets/workload-spiffe-credentials";

/// Where Linux distributions have the roots that they trust, in one file: Debian and Alpine, Fedora and RHEL, CentOS,
/// openSUSE, OpenELEC; the last is Alpine's and macOS's.
const SYSTEM_ROOTS: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
];

/// Why no name leads to a file of a node.
const NOT_OF_A_NODE: &str =
    "an agent for a whole node serves no files by name, which would be the node's; file-root:system alone";

/// File names that the user chose, instead of those that a set has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileNames {
    pub chain: Option<String>,
    pub key: Option<String>,
    pub roots: Option<String>,
}

impl FileNames {
    fn over<'a>(&'a self, [chain, key, roots]: [&'a str; 3]) -> [&'a str; 3] {
        [
            self.chain.as_deref().unwrap_or(chain),
            self.key.as_deref().unwrap_or(key),
            self.roots.as_deref().unwrap_or(roots),
        ]
    }
}

/// The places of `default` and `ROOTCA` in `directory`, for each set of file names that counts there: Istio's, those of TLS
/// Secrets, and GKE's where its certificates are mounted.
pub fn places(directory: &Path, names: &FileNames) -> Vec<Place> {
    let mut sets = vec![names.over(NAMES), names.over(TLS_NAMES)];
    if directory == Path::new(PLATFORM_DIRECTORY) {
        sets.push(names.over(GKE_NAMES));
    }
    sets.dedup();
    let place = |(index, set)| Place { is_alternative: index > 0, ..Place::in_directory(directory, set) };
    sets.into_iter().enumerate().map(place).collect()
}

/// `path` from the root directory, without `.` and empty names. A `..` stays where it may follow a link; a relative path
/// starts at `working_directory`, which has none.
pub(super) fn normalized(path: &Path, working_directory: &Path) -> PathBuf {
    let start = if path.is_absolute() { Path::new("/") } else { working_directory };
    let mut normal = PathBuf::with_capacity(start.as_os_str().len() + path.as_os_str().len());
    normal.push(start);
    let mut is_free_of_links = true;
    for component in path.components() {
        match component {
            Component::ParentDir if is_free_of_links => drop(normal.pop()),
            Component::ParentDir | Component::Normal(_) => {
                is_free_of_links = false;
                normal.push(component);
            }
            Component::Prefix(_) | Component::RootDir | Component::CurDir => {}
        }
    }
    normal
}

/// The files of a name that a stream asked for. Different spellings of a path are the same files.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Files {
    KeyPair { chain: Box<Path>, key: Box<Path> },
    Roots(Box<Path>),
    SystemRoots,
}

impl Files {
    /// Not for names that are served without demand.
    pub(super) fn of(name: &SecretName, working_directory: &Path) -> Option<Self> {
        let normalized = |path| normalized(path, working_directory).into_boxed_path();
        match name {
            SecretName::FileKeyPair(name) => {
                Some(Self::KeyPair { chain: normalized(name.chain()), key: normalized(name.key()) })
            }
            SecretName::FileRoots(name) => Some(Self::Roots(normalized(name.path()))),
            SecretName::SystemRoots => Some(Self::SystemRoots),
            SecretName::Workload | SecretName::Roots | SecretName::Federated(_) => None,
            SecretName::Kubernetes(_) | SecretName::Minted(_) => None,
        }
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        let (first, second) = match self {
            Self::KeyPair { chain, key } => (Some(chain), Some(key)),
            Self::Roots(path) => (Some(path), None),
            Self::SystemRoots => (None, None),
        };
        first.into_iter().chain(second).map(|path| &**path)
    }

    pub(super) fn places(&self, settings: &FileSettings) -> Places {
        let roots = |path: &Path| Place { roots: Some(path.to_owned()), ..Place::default() };
        match self {
            Self::KeyPair { chain, key } => {
                let key_pair = Some((chain.to_path_buf(), key.to_path_buf()));
                Places::new(vec![Place { key_pair, ..Place::default() }])
            }
            Self::Roots(path) => Places::new(vec![roots(path)]),
            Self::SystemRoots => {
                let known = || SYSTEM_ROOTS.map(|path| roots(path.as_ref())).to_vec();
                let ranked = settings.system_roots.as_deref().map_or_else(known, |path| vec![roots(path)]);
                Places { is_lenient: true, ..Places::new(ranked) }
            }
        }
    }
}

/// The directories in which files must lie that streams name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Prefixes(Option<Vec<PathBuf>>);

impl Prefixes {
    /// No directory at all.
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// `given` are the directories as the user spelled them, and with their links resolved.
    pub(super) fn new(given: &[PathBuf], working_directory: &Path) -> Self {
        Self(Some(given.iter().map(|prefix| normalized(prefix, working_directory)).collect()))
    }

    /// Whether these files may be looked at, decided from their paths alone.
    pub(super) fn admit(&self, files: &Files) -> Result<(), &'static str> {
        let is_admitted = |path: &Path| self.length(path).is_some();
        match files.paths().all(is_admitted) {
            true => Ok(()),
            false if self.0.is_none() => Err(NOT_OF_A_NODE),
            false => Err(OUTSIDE),
        }
    }

    /// How many names of `path` are the directory that it must not lead out of. A path that goes up may leave any
    /// directory but the root.
    pub(super) fn length(&self, path: &Path) -> Option<usize> {
        let goes_up = path.components().any(|component| component == Component::ParentDir);
        let may_hold = |prefix: &&PathBuf| !goes_up || prefix.parent().is_none();
        let holder = self.0.iter().flatten().filter(may_hold).filter(|prefix| path.starts_with(prefix));
        holder.map(|prefix| prefix.components().count() - 1).max()
    }
}

/// Warns of the agent's own files, which count as missing although they exist and are good.
pub(super) fn warn_of_own(places: &Places) {
    // Usually there are none, and nothing to look up.
    if places.own.is_empty() {
        return;
    }
    let refusal = places.refusal();
    let is_own = |path: &PathBuf| path.canonicalize().is_ok_and(|real| refusal(&real).is_some());
    for path in places.paths().into_iter().filter(is_own) {
        tracing::warn!(path = %path.display(), "file ignored: its path leads to where the agent itself writes");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(name: &str) -> Files {
        Files::of(&name.parse().unwrap(), Path::new("/work/here")).unwrap()
    }

    #[test]
    fn spellings_of_a_path_are_the_same_files() {
        for (spelled, normal) in [
            ("/a/b", "/a/b"),
            ("/a//b", "/a/b"),
            ("//a/./b/.", "/a/b"),
            ("b", "/work/here/b"),
            ("./b", "/work/here/b"),
            ("../b", "/work/b"),
            ("../../../b", "/b"),
            ("/../a", "/a"),
            // What is before it may be a link.
            ("/a/../b", "/a/../b"),
            ("c/../b", "/work/here/c/../b"),
        ] {
            let normal = || Path::new(normal).into();
            assert_eq!(files(&format!("file-root:{spelled}")), Files::Roots(normal()), "{spelled}");
            let pair = files(&format!("file-cert:{spelled}~/key"));
            assert_eq!(pair, Files::KeyPair { chain: normal(), key: Path::new("/key").into() }, "{spelled}");
        }
        assert_eq!(files("file-root:system"), Files::SystemRoots);
        assert_eq!(files("file-root:./system"), Files::Roots(Path::new("/work/here/system").into()));
    }

    #[test]
    fn a_prefix_admits_by_the_text_of_a_path() {
        let given = ["/tls", "certs/", "/tls/deep"].map(PathBuf::from);
        let prefixes = Prefixes::new(&given, Path::new("/work/here"));
        for (name, is_admitted) in [
            ("file-root:/tls/a", true),
            ("file-root://tls/./a", true),
            ("file-root:certs/a", true),
            ("file-root:/work/here/certs/a", true),
            ("file-root:../here/certs/a", true),
            ("file-root:system", true),
            ("file-cert:/tls/a~certs/b", true),
            ("file-cert:/tls/a~/etc/b", false),
            ("file-cert:/etc/a~/tls/b", false),
            ("file-root:/tls-too/a", false),
            ("file-root:/a", false),
            ("file-root:a", false),
            ("file-root:/tls/../a", false),
            ("file-root:/tls/a/../b", false),
            ("file-root:/etc/../tls/b", false),
        ] {
            assert_eq!(prefixes.admit(&files(name)).is_ok(), is_admitted, "{name}");
            let everywhere = Prefixes::new(&["/".into()], Path::new("/work/here"));
            assert_eq!(everywhere.admit(&files(name)), Ok(()));
            let is_system = name == "file-root:system";
            assert_eq!(Prefixes::default().admit(&files(name)).is_ok(), is_system, "{name}");
        }
        let length = |path: &str| prefixes.length(Path::new(path));
        assert_eq!([length("/tls/a"), length("/tls/deep/a"), length("/a")], [Some(1), Some(2), None]);
    }
}
