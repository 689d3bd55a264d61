//! The options for mounted files.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::args::RunArgs;
use super::node::Subject;
use crate::fs::disk;
use crate::fs::generation::Place;
use crate::options::{Reader, Setting};
use crate::secret::FederatedName;
use crate::source::crl::CrlFile;
use crate::source::files::{self, FederatedBundle, FileNames};
use crate::source::issuer::IdentitySource;

/// The default of `--cert-dir`.
const CERT_DIR: &str = "/etc/certs";
/// Where Istio mounts the CRLs of its CAs.
const ISTIO_CRL: &str = "/var/run/secrets/istio/crl/ca-crl.pem";

/// The default of `--file-prefix`, beside `--cert-dir`: where certificates and the system's roots usually lie.
/// `/var/run` is mostly a link to `/run`.
const FILE_PREFIXES: [&str; 6] = [
    CERT_DIR,
    "/etc/istio",
    "/var/run/secrets",
    "/run/secrets",
    "/etc/ssl/certs",
    "/etc/pki/ca-trust/extracted",
];

/// How long a disk may take to answer before the agent starts without.
const PATIENCE: Duration = Duration::from_secs(1);

/// The options for mounted files. Which directories are searched also depends on what the agent writes.
pub(super) struct FileOptions {
    cert_dir: Setting<String>,
    /// Beneath `cert_dir`.
    names: FileNames,
    prefixes: files::FilePrefixes,
    system_roots: Option<PathBuf>,
    debounce: Duration,
    federated: Vec<FederatedBundle>,
}

/// A directory whose files are not served, and why.
pub(super) type OwnDir<'a> = (&'a Path, &'a str);

impl FileOptions {
    pub(super) fn new(r: &mut Reader<'_>, args: &RunArgs) -> Self {
        let debounce =
            r.duration("file-debounce", &args.file_debounce, &["FILE_DEBOUNCE_DURATION"], Duration::ZERO);
        let cert_dir = r.text("cert-dir", &args.cert_dir, &[]);
        Self {
            names: FileNames {
                chain: r.parsed("cert-file", &args.cert_file, &[], beneath).value,
                key: r.parsed("key-file", &args.key_file, &[], beneath).value,
                roots: r.parsed("root-file", &args.root_file, &[], beneath).value,
            },
            prefixes: prefixes(r, args, cert_dir.value.as_deref()),
            cert_dir,
            system_roots: r.variable("SSL_CERT_FILE").map(PathBuf::from),
            debounce: debounce.or(Duration::from_millis(100)),
            federated: federated(r, args),
        }
    }

    pub(super) fn cert_dir(&self) -> &Path {
        Path::new(self.cert_dir.value.as_deref().unwrap_or(CERT_DIR))
    }

    /// The places where mounted files are looked for, and notes. A directory of the agent's `own` files, links
    /// resolved, is not among them: what it writes must not come back as what it reads.
    pub(super) fn places(&self, own: &[OwnDir<'_>]) -> (Vec<Place>, Vec<String>) {
        let typed = self.cert_dir.value.as_deref().map(Path::new);
        let (mut places, mut notes) = (Vec::new(), Vec::new());
        let directories = [self.cert_dir(), Path::new(files::PLATFORM_DIRECTORY)];
        let names = [&self.names, &FileNames::default()];
        // Usually there are none, and nothing to look up.
        let own_resolved = resolved(own.iter().map(|(own, _)| *own));
        let resolved = if own.is_empty() { Vec::new() } else { resolved(directories) };
        for (index, (directory, names)) in directories.into_iter().zip(names).enumerate() {
            let is_same = |own: &(&PathBuf, &OwnDir<'_>)| resolved.get(index) == Some(own.0);
            match own_resolved.iter().zip(own).find(is_same).map(|(_, own)| own) {
                None => places.extend(files::places(directory, names)),
                Some((_, why)) if typed == Some(directory) => {
                    notes.push(format!("the files in {} are not served: {why}", directory.display()));
                }
                Some(_) => {}
            }
        }
        (places, notes)
    }

    pub(super) fn into_settings(
        self,
        mounted: Vec<Place>,
        own: Vec<PathBuf>,
        private: Vec<PathBuf>,
        is_alone: bool,
        subject: Subject<'_>,
    ) -> files::FileSettings {
        let Self { prefixes, system_roots, debounce, federated, .. } = self;
        // Of all workloads of a node, its agent publishes them once.
        let federated = if subject.description().is_some() { Vec::new() } else { federated };
        let prefixes = if subject.has_mounted_files() { prefixes } else { files::FilePrefixes::None };
        files::FileSettings { mounted, own, private, is_alone, debounce, prefixes, system_roots, federated }
    }
}

/// The trust bundles of other trust domains.
fn federated(r: &mut Reader<'_>, args: &RunArgs) -> Vec<FederatedBundle> {
    let bundle = |text: &str| -> Result<_, String> {
        let (domain, path) = text.split_once('=').filter(|(_, path)| !path.is_empty()).ok_or_else(|| {
            format!("{text:?} is not DOMAIN=FILE, like partner.example=/etc/federation/partner.pem")
        })?;
        let name = FederatedName::new(domain).map_err(|error| error.to_string())?;
        Ok(FederatedBundle { name, path: path.into() })
    };
    let all = r.list("federated-bundle", &args.federated_bundle, &[], ',', bundle).value.unwrap_or_default();
    for (index, one) in all.iter().enumerate() {
        if all.iter().take(index).any(|other| other.name == one.name) {
            r.mistake(format!(
                "--federated-bundle names {} twice: put all of its roots into one file",
                one.name.domain()
            ));
        }
    }
    all
}

/// Reports a bundle of the workload's own trust domain, if that is known: its roots come with its certificate.
pub(super) fn check_federated(r: &mut Reader<'_>, files: &FileOptions, identity: &IdentitySource) {
    let own = match identity {
        IdentitySource::Fixed(id) => id.trust_domain(),
        IdentitySource::Token { trust_domain, .. } => trust_domain,
        IdentitySource::Unknown => return,
    };
    if files.federated.iter().any(|one| one.name.domain() == own) {
        r.mistake(format!(
            "--federated-bundle names {own}, which is the workload's own trust domain: its roots come from its CA or its \
             mounted files; drop it"
        ));
    }
}

/// A file name beneath `--cert-dir`.
fn beneath(text: &str) -> Result<String, String> {
    let is_beneath = Path::new(text).components().all(|component| matches!(component, Component::Normal(_)));
    match is_beneath {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text} is not beneath --cert-dir: give the directory with --cert-dir, and here a file name"
        )),
    }
}

pub(super) fn crl(r: &mut Reader<'_>, args: &RunArgs) -> CrlFile {
    let crl = r.text("crl", &args.crl, &[]);
    CrlFile { is_named: crl.value.is_some(), path: crl.or(ISTIO_CRL).into() }
}

/// Each of `paths` with its links resolved, as far as it exists and its file system answers.
pub(super) fn resolved<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Vec<PathBuf> {
    let paths: Vec<_> = paths.into_iter().map(Path::to_owned).collect();
    if paths.is_empty() {
        return paths;
    }
    let look = |paths: Vec<PathBuf>| {
        disk::attempt(PATIENCE, move || paths.iter().map(|path| links_resolved(path)).collect::<Vec<_>>())
    };
    let each = || paths.iter().map(|path| look(vec![path.clone()]).and_then(|mut one| one.pop()));
    look(paths.clone()).unwrap_or_else(|| {
        each().zip(&paths).map(|(found, path)| found.unwrap_or_else(|| path.clone())).collect()
    })
}

fn links_resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (path.canonicalize(), path.parent(), path.file_name()) {
        (Ok(path), ..) => path,
        (Err(_), Some(parent), Some(name)) => links_resolved(parent).join(name),
        _ => path,
    }
}

/// Whether `place` holds a key pair; none if its file system does not answer.
pub(super) fn holds_key_pair(place: &Place) -> Option<bool> {
    let place = place.clone();
    disk::attempt(PATIENCE, move || place.holds_key_pair())
}

/// Directories that files named by Envoy must be in; in the environment separated by ":", as in PATH.
fn prefixes(r: &mut Reader<'_>, args: &RunArgs, cert_dir: Option<&str>) -> files::FilePrefixes {
    // An empty one would not limit anything, and a user who sets it wants a limit.
    let directory = |text: &str| match text {
        "" => Err("it is empty: name a directory, or leave it out for the usual ones"),
        directory => Ok(PathBuf::from(directory)),
    };
    match r.list("file-prefix", &args.file_prefix, &[], ':', directory).value {
        Some(given) => files::FilePrefixes::Given(given),
        None => {
            let usual = FILE_PREFIXES.into_iter().chain(cert_dir);
            files::FilePrefixes::Usual(usual.map(PathBuf::from).collect())
        }
    }
}
