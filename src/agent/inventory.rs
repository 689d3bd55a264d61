//! The paths whose modes are checked at the start.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::auth::token;
use crate::auth::token_file::TokenFile;
use crate::ca::embedded;
use crate::config::{Config, Provider};
use crate::fs::file;
use crate::fs::generation::{KEY_FILE, Place};
use crate::net::tls::Roots;
use crate::os::permissions::{Inventory, Socket};
use crate::source::issuer::StateDir;

/// The paths of an agent with its sockets at `sds` and `admin`.
pub(crate) fn inventory(config: &Config, sds: &[PathBuf], admin: Option<&Path>) -> Inventory {
    let outputs = config.output.iter().flat_map(|output| &output.directories);
    let exported_keys = outputs.map(|output| (output.directory.clone(), output.key_mode));
    Inventory {
        sockets: sockets(config, sds, admin),
        directories: directories(config, sds, admin),
        secrets: secrets(config),
        settings: settings(config),
        exported_keys: exported_keys.collect(),
    }
}

/// The admin socket, and the SDS sockets unless the options limit their peers.
fn sockets(config: &Config, sds: &[PathBuf], admin: Option<&Path>) -> Vec<Socket> {
    let is_limited = !config.allowed.uids.is_empty() || !config.allowed.gids.is_empty();
    let sds = sds.iter().filter(|_| !is_limited).map(|sds| Socket {
        path: sds.clone(),
        what: "the SDS socket, and get the workload's key",
        remedy: "set --socket-mode 0660 (SocketMode= in a .socket unit), or limit the peers with --allow-uid or --allow-gid",
    });
    let admin = admin.map(|admin| Socket {
        path: admin.to_owned(),
        what: "the admin socket",
        remedy: "set its mode to 0600 (SocketMode= in a .socket unit)",
    });
    sds.chain(admin).collect()
}

/// Directories in which other users should not replace anything.
fn directories(config: &Config, sds: &[PathBuf], admin: Option<&Path>) -> Vec<(PathBuf, &'static str)> {
    let of = |file: &Path, what: &'static str| (file::directory_of(file).to_owned(), what);
    let sockets = sds.iter().map(PathBuf::as_path).chain(admin);
    let mut directories: Vec<_> = sockets.map(|socket| of(socket, "the directory of the socket")).collect();
    directories
        .extend(config.workload.state.iter().map(|state| (state.path().to_owned(), "the --state-dir")));
    let outputs = config.output.iter().flat_map(|output| output.paths());
    directories.extend(outputs.map(|path| (path.clone(), "the output directory")));
    for provider in &config.providers {
        directories.extend(provider.directory().map(|directory| (directory.to_owned(), "the --ca-dir")));
        let roots = match provider.endpoint().map(|(endpoint, _)| &endpoint.roots) {
            Some(Roots::File(file)) => Some(file),
            Some(Roots::FirstOf(files)) => files.iter().find(|file| file.exists()),
            Some(Roots::System | Roots::Given(_) | Roots::Unverified) | None => None,
        };
        directories.extend(roots.map(|file| of(file, "the directory of the CA's root")));
        let credentials = credentials(provider);
        directories
            .extend(credentials.iter().map(|file| of(file, "the directory of a credential for the CA")));
        let certificate = provider.client_cert();
        directories
            .extend(certificate.map(|directory| (directory.path().to_owned(), "the --ca-client-cert-dir")));
    }
    let options = config.options_file.iter();
    directories.extend(options.map(|file| of(file.path(), "the directory of the options file")));
    let mounted = config.files.mounted.iter().filter_map(Place::home);
    let served = "a directory whose certificates are served";
    directories.extend(mounted.map(|directory| (directory.to_owned(), served)));
    directories
}

/// Files that other users should not read.
fn secrets(config: &Config) -> BTreeMap<PathBuf, &'static str> {
    let mut secrets = BTreeMap::new();
    for provider in &config.providers {
        let credentials = credentials(provider).into_iter();
        secrets.extend(credentials.map(|file| (file, "which contains a credential for the CA")));
        let certificate = provider.client_cert();
        secrets.extend(certificate.map(|directory| (directory.path().join(KEY_FILE), "a private key")));
        let key = provider.directory().map(|directory| directory.join(embedded::KEY_FILE));
        secrets.extend(key.map(|key| (key, "the key of the embedded CA")));
    }
    let keys = config.files.mounted.iter().filter_map(Place::key_file);
    secrets.extend(keys.map(|key| (key.to_owned(), "a private key")));
    let outputs = config.output.iter().flat_map(|output| &output.directories);
    let passwords = outputs.filter_map(|output| output.format.password_file());
    secrets.extend(passwords.map(|file| (file.clone(), "which contains the password of a keystore")));
    let headers = config.options_file.iter().filter(|file| file.get("ca-header").is_some());
    secrets
        .extend(headers.map(|file| (file.path().to_owned(), "which contains headers for calls to the CA")));
    let state = config.workload.state.iter().map(StateDir::file);
    secrets.extend(state.map(|file| (file, "which contains the last key")));
    secrets
}

/// Files that other users should not change.
fn settings(config: &Config) -> BTreeMap<PathBuf, &'static str> {
    let file = config.options_file.iter();
    file.map(|file| (file.path().to_owned(), "the options file, and decide what the agent does")).collect()
}

/// The files with credentials of `provider`, except for a client certificate.
fn credentials(provider: &Provider) -> Vec<PathBuf> {
    let token = provider.token();
    let token = token.as_ref().and_then(token::TokenSettings::file).and_then(TokenFile::path);
    let others = provider.files().into_iter().filter(|file| !file.is_pem).map(|file| file.path);
    token.into_iter().chain(others).map(Path::to_owned).collect()
}
