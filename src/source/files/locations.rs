//! Which files belong to which name.

use std::path::Path;

use super::FileSettings;
use crate::fs::file;
use crate::fs::generation::{NAMES, Place, Places};
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

/// The places of `default` and `ROOTCA` in `directory`. GKE's file names count where its certificates are mounted.
pub fn places(directory: &Path) -> Vec<Place> {
    let mut places = vec![Place::in_directory(directory, NAMES)];
    if directory == Path::new(PLATFORM_DIRECTORY) {
        places.push(Place::in_directory(directory, GKE_NAMES));
    }
    places
}

/// The files behind a name that a stream asked for.
pub(super) fn places_of(name: &SecretName, settings: &FileSettings) -> Places {
    // Readers of the log don't know the agent's working directory.
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let roots = |path: &Path| Place { roots: Some(absolute(path)), key_pair: None };
    let named = |place| {
        let (inside, own) = (settings.prefixes.clone(), settings.own.clone());
        Places { inside, own, ..Places::new(vec![place]) }
    };
    match name {
        SecretName::FileKeyPair(name) => {
            let key_pair = Some((absolute(name.chain()), absolute(name.key())));
            named(Place { key_pair, roots: None })
        }
        SecretName::FileRoots(name) => named(roots(name.path())),
        SecretName::SystemRoots => {
            let known = || SYSTEM_ROOTS.map(|path| roots(path.as_ref())).to_vec();
            let ranked = settings.system_roots.as_deref().map_or_else(known, |path| vec![roots(path)]);
            Places { is_lenient: true, ..Places::new(ranked) }
        }
        // Never on demand: they are served from the start.
        SecretName::Workload | SecretName::Roots => named(Place::default()),
    }
}

/// Warns of the agent's own files, which count as missing although they exist and are good.
pub(super) fn warn_of_own(places: &Places) {
    for path in places.paths().iter().filter(|path| file::is_within(path, &places.own)) {
        tracing::warn!(path = %path.display(), "file ignored: its path leads to where the agent itself writes");
    }
}
