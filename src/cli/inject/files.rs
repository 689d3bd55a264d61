//! The files that the agent reads in its container: volumes that are added for them, and mounts that are missing.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::InjectArgs;
use crate::auth::exchange::Exchange;
use crate::auth::token::{Service, TokenSettings};
use crate::auth::token_file::TokenFile;
use crate::ca::citadel::options::CitadelProvider;
use crate::ca::provider::{ConfiguredProvider, TokenUse};
use crate::config::kubernetes::ApiServer;
use crate::config::{Config, Provider, RunArgs};
use crate::inject::{Purpose, Volume};
use crate::kube::config::SERVICE_ACCOUNT_DIR;
use crate::net::endpoint::Endpoint;
use crate::net::tls::Roots;
use crate::os::command::SHELL;
use crate::source::files::PLATFORM_DIRECTORY;
use crate::source::issuer::IdentitySource;

const ISTIO_TOKEN: &str = "/var/run/secrets/tokens/istio-token";
const ISTIO_ROOT_DIR: &str = "/var/run/secrets/istio";
/// Where distributions have the roots that they trust.
const SYSTEM_ROOTS: [&str; 2] = ["/etc/ssl", "/etc/pki"];
/// The audience of a token that no service gets: the agent takes the workload's name from it.
const OWN_AUDIENCE: &str = "attache";
/// Before a provider's name in the audience of Google's token service; the workload's token has it with `https:`.
const GOOGLES_PROVIDERS: &str = "//iam.googleapis.com/";

/// The files that the options need, in a container with the volumes of `--mount`.
pub(super) struct Files<'a> {
    args: &'a InjectArgs,
    run: &'a RunArgs,
    config: &'a Config,
    pub(super) volumes: Vec<Volume>,
    pub(super) errors: Vec<String>,
}

impl<'a> Files<'a> {
    /// `volumes` are those for what the agent writes; the others are added to them.
    pub(super) fn new(
        args: &'a InjectArgs,
        run: &'a RunArgs,
        config: &'a Config,
        volumes: Vec<Volume>,
    ) -> Self {
        let mut files = Self { args, run, config, volumes, errors: Vec::new() };
        files.add_token();
        files.volumes.extend(files.istiods_root());
        files.check_mounted_files();
        files.check_ca();
        files.check_clusters();
        files.check_passwords();
        files.check_commands();
        files
    }

    fn provider(&self) -> Option<&'a dyn ConfiguredProvider> {
        self.config.providers.first().map(|provider| &**provider)
    }

    /// Adds the workload's token, if the agent reads it from a file that nothing else mounts.
    fn add_token(&mut self) {
        let Some(provider) = self.provider() else { return };
        if self.config.token_from_request.is_some() {
            return;
        }
        let is_identity = matches!(self.config.workload.identity, IdentitySource::Token { .. });
        // The metadata server's token is no file. The identity may be read from the workload's nevertheless.
        let is_file = |token: &TokenSettings| {
            !matches!(token, TokenSettings::Service { service: Service::Metadata(_), .. })
        };
        let source = provider.token().filter(is_file);
        let audience = match (&source, provider.kind().token) {
            (_, TokenUse::ServiceAccount) => None,
            (None | Some(TokenSettings::Service { service: Service::Metadata(_), .. }), _) => {
                Some(OWN_AUDIENCE.to_owned())
            }
            (Some(TokenSettings::Service { service: Service::Exchange(exchange), .. }), _) => {
                self.check_roots("--token-exchange-root", &exchange.roots, exchange.url.address.plaintext);
                subject_audience(exchange)
            }
            (Some(TokenSettings::File(_)), TokenUse::Source { audience, .. }) => audience.map(str::to_owned),
            (Some(TokenSettings::File(_)), TokenUse::None) => None,
        };
        let is_service_accounts = provider.kind().token == TokenUse::ServiceAccount;
        if (source.is_none() && !is_identity) || (is_service_accounts && self.run.token_file.is_none()) {
            return;
        }
        let path = self.run.token_file.as_deref().unwrap_or(ISTIO_TOKEN);
        let Some((dir, file)) = path.rsplit_once('/').filter(|_| path.starts_with('/')) else {
            self.errors.push(relative("--token-file", path));
            return;
        };
        if self.has(Path::new(path)) {
            return;
        }
        let Some(audience) = self.args.token_audience.clone().or(audience) else {
            self.errors.push(format!(
                "--token-file {path}: the audience of this token is not known; give --token-audience AUDIENCE, and the \
                 kubelet mounts such a token, or mount a volume with --mount VOLUME={dir}"
            ));
            return;
        };
        let token = json!({ "path": file, "audience": audience, "expirationSeconds": 43200 });
        let source = json!({ "projected": { "sources": [{ "serviceAccountToken": token }] } });
        self.volumes.push(Volume {
            purpose: Purpose::Token,
            source,
            path: if dir.is_empty() { "/" } else { dir }.to_owned(),
        });
    }

    /// istiod's root, if the agent looks for it in the default places, and nothing else mounts it.
    fn istiods_root(&self) -> Option<Volume> {
        let Some(Provider::Citadel(CitadelProvider { endpoint, client_cert: None, .. })) =
            self.config.providers.first()
        else {
            return None;
        };
        let is_default = matches!(endpoint.roots, Roots::FirstOf(_)) && !endpoint.address.plaintext;
        let source = json!({ "configMap": { "name": "istio-ca-root-cert" } });
        let is_wanted = is_default && !self.has(Path::new(ISTIO_ROOT_DIR));
        is_wanted.then(|| Volume { purpose: Purpose::CaRoot, source, path: ISTIO_ROOT_DIR.to_owned() })
    }

    fn check_mounted_files(&mut self) {
        let run = self.run;
        match &run.cert_dir {
            Some(dir) => self.check_directory("--cert-dir", Path::new(dir)),
            None if self.config.files.is_alone && self.config.kubernetes.is_none() => {
                self.check_default_cert_dir()
            }
            None => {}
        }
        if let Some(spiffe) = &self.config.spiffe {
            self.check_file("--spiffe-endpoint", &spiffe.socket);
        }
        run.crl.iter().for_each(|file| self.check_file("--crl", Path::new(file)));
        for bundle in &self.config.files.federated {
            self.check_file("--federated-bundle", &bundle.path);
        }
        run.file_prefix.iter().for_each(|dir| self.check_directory("--file-prefix", Path::new(dir)));
    }

    fn check_default_cert_dir(&mut self) {
        let dir = "/etc/certs";
        if !self.has(Path::new(dir)) && !self.has(Path::new(PLATFORM_DIRECTORY)) {
            self.errors.push(format!(
                "--cert-dir {dir} (the default): no volume is mounted there, and without a CA there are no other \
                 certificates; mount the volume that holds them with --mount VOLUME={dir}"
            ));
        }
    }

    /// Checks the files for calls to the CA.
    fn check_ca(&mut self) {
        let run = self.run;
        run.ca_client_cert_dir
            .iter()
            .for_each(|dir| self.check_directory("--ca-client-cert-dir", Path::new(dir)));
        let Some(provider) = self.provider() else { return };
        for file in provider.files() {
            self.check_file(file.option, file.path);
        }
        let endpoints = self.config.providers.iter().filter_map(|provider| provider.endpoint());
        if let Some((endpoint, _)) = endpoints.into_iter().find(|(endpoint, _)| !endpoint.address.plaintext) {
            self.check_roots("--ca-root", &endpoint.roots, false);
        }
    }

    /// Checks the kubeconfigs.
    fn check_clusters(&mut self) {
        let Some(kubernetes) = &self.config.kubernetes else { return };
        if let ApiServer::Kubeconfig { path, .. } = &kubernetes.api_server {
            self.check_file("--kubeconfig", path);
        }
        if let Some(directory) = &kubernetes.remote.directory {
            self.check_directory("--clusters-dir", directory);
        }
    }

    fn check_roots(&mut self, option: &str, roots: &Roots, is_plaintext: bool) {
        if is_plaintext {
            return;
        }
        match roots {
            Roots::File(path) => self.check_file(option, path),
            Roots::Given(_) | Roots::Unverified => {}
            Roots::System => {
                let own = |dir: &str| self.provided().any(|path| path.starts_with(dir));
                if !SYSTEM_ROOTS.iter().any(|dir| self.has(Path::new(dir)) || own(dir)) {
                    self.errors.push(format!(
                        "{option} system: the agent's image has no roots; mount some with --mount VOLUME=/etc/ssl/certs, \
                         name a file with {option} FILE, or give --image-has /etc/ssl/certs if your image has them"
                    ));
                }
            }
            Roots::FirstOf(paths) => {
                if let (false, Some(first)) = (paths.iter().any(|path| self.has(path)), paths.first()) {
                    self.errors.push(format!(
                        "the root of the CA's TLS certificate is missing: name it with {option} FILE and mount its volume \
                         with --mount VOLUME=DIR, or mount it at {}",
                        first.parent().unwrap_or(first).display()
                    ));
                }
            }
        }
    }

    fn check_passwords(&mut self) {
        let outputs = self.config.output.iter().flat_map(|output| &output.directories);
        for file in outputs.filter_map(|output| output.format.password_file()) {
            self.check_file("--output password-file", file);
        }
    }

    fn check_commands(&mut self) {
        let hook = self.config.output.as_ref().and_then(|output| output.hook.as_ref());
        let hook = hook.map(|_| "--output-hook".to_owned());
        let ca = self.provider().filter(|provider| provider.runs_commands());
        let ca = ca.map(|provider| format!("--ca {}", provider.kind().name));
        for option in hook.into_iter().chain(ca) {
            if !self.has(Path::new(SHELL)) {
                self.errors.push(format!(
                    "{option} runs a command by {SHELL}, and the agent's image has no programs besides the agent: use an \
                     image with a shell and what the command calls, and give --image-has {SHELL}"
                ));
            }
        }
    }

    fn check_directory(&mut self, option: &str, dir: &Path) {
        self.check(option, dir, Some(dir));
    }

    fn check_file(&mut self, option: &str, file: &Path) {
        self.check(option, file, file.parent());
    }

    fn check(&mut self, option: &str, path: &Path, dir: Option<&Path>) {
        if !path.is_absolute() {
            self.errors.push(relative(option, &path.display().to_string()));
        } else if !self.has(path) {
            self.errors.push(format!(
                "{option} {}: no volume is mounted there; mount one of the Pods' volumes with --mount VOLUME={}, or give \
                 --image-has {0} if your image has it",
                path.display(),
                dir.unwrap_or(path).display()
            ));
        }
    }

    /// Whether the agent reads a file that only Kubernetes' own mount provides.
    pub(super) fn reads_service_account(&self) -> bool {
        let is_mounted = |path: &Path| self.mounted().any(|dir| path.starts_with(dir));
        let kubernetes = self.config.kubernetes.as_ref().map(|kubernetes| &kubernetes.api_server);
        if matches!(kubernetes, Some(ApiServer::InCluster(_))) && !is_mounted(Path::new(SERVICE_ACCOUNT_DIR))
        {
            return true;
        }
        let Some(provider) = self.provider() else { return false };
        let source = provider.token();
        let token = source.as_ref().and_then(TokenSettings::file).and_then(TokenFile::path);
        let root = match provider.endpoint() {
            Some((Endpoint { roots: Roots::File(path), address, .. }, _)) if !address.plaintext => {
                Some(path.as_path())
            }
            _ => None,
        };
        token.into_iter().chain(root).any(|path| path.starts_with(SERVICE_ACCOUNT_DIR) && !is_mounted(path))
    }

    /// Whether something in the container holds this path.
    fn has(&self, path: &Path) -> bool {
        self.provided().any(|provided| path.starts_with(provided))
    }

    /// Directories that hold something when the agent starts, and paths in its image.
    fn provided(&self) -> impl Iterator<Item = &Path> {
        // The agent may present the certificate that it has written itself.
        let is_filled =
            |volume: &&Volume| !volume.purpose.is_writable() || matches!(volume.purpose, Purpose::Output(_));
        let volumes = self.volumes.iter().filter(is_filled).map(|volume| Path::new(&volume.path));
        self.mounted().chain(volumes).chain([Path::new(SERVICE_ACCOUNT_DIR)])
    }

    /// What the options say is there.
    fn mounted(&self) -> impl Iterator<Item = &Path> {
        let mounts = self.args.mount.iter().map(|(_, dir)| Path::new(dir));
        mounts.chain(self.args.image_has.iter().map(PathBuf::as_path))
    }
}

/// The audience of the token that is exchanged at Google's token service, which the other one's follows from.
fn subject_audience(exchange: &Exchange) -> Option<String> {
    let provider = exchange.audience.as_ref().filter(|audience| audience.starts_with(GOOGLES_PROVIDERS))?;
    Some(format!("https:{provider}"))
}

pub(super) fn relative(option: &str, path: &str) -> String {
    format!("{option} {path} is relative; a container needs the absolute path")
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, Parser};

    use super::*;
    use crate::cli::inject::sidecar;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: InjectArgs,
    }

    /// The sidecar's volumes as `purpose=path`, with the audience of a token, or the error.
    fn volumes(before: &[&str], after: &[&str]) -> Result<Vec<String>, String> {
        let words = ["inject", "--image=attache:1"].iter().chain(before).chain(&["--"]).chain(after);
        let sidecar = sidecar::sidecar(&Line::parse_from(words).args).map_err(|error| error.to_string())?;
        let audience = |volume: &Volume| {
            let audience = volume.source.pointer("/projected/sources/0/serviceAccountToken/audience");
            audience.and_then(serde_json::Value::as_str).map(|audience| format!(" for {audience}"))
        };
        let shown = |volume: &Volume| {
            format!("{:?}={}{}", volume.purpose, volume.path, audience(volume).unwrap_or_default())
        };
        Ok(sidecar.volumes.iter().map(shown).collect())
    }

    const ISTIOD: &[&str] = &["--ca-address=a:1"];
    const VAULT: &[&str] =
        &["--ca=vault", "--ca-address=http://a:1", "--vault-role=r", "--spiffe-id=spiffe://td/a"];
    const CFSSL: &[&str] = &["--ca=cfssl", "--ca-address=http://a:1", "--spiffe-id=spiffe://td/a"];
    const KUBERNETES: &[&str] = &["--ca=kubernetes", "--kubernetes-signer=example.com/a"];
    const SPIFFE: &[&str] = &["--ca=spiffe"];
    const EXEC: &[&str] = &["--ca=exec", "--spiffe-id=spiffe://td/a"];
    const STS: &[&str] = &[
        "--ca-address=a:1",
        "--token-exchange-url=https://sts.example/token",
        "--token-exchange-root=/sts/root.pem",
    ];

    /// Options that name what the agent reads in its container, with the other options that they need.
    const READ: [(&str, &str, &[&[&str]]); 18] = [
        ("spiffe-endpoint", "unix:///needed/agent.sock", &[SPIFFE]),
        ("cert-dir", "/needed", &[&["--ca=none"]]),
        ("crl", "/needed/crl", &[ISTIOD]),
        ("federated-bundle", "two.example=/needed/roots.pem", &[ISTIOD]),
        ("file-prefix", "/needed", &[ISTIOD]),
        ("ca-root", "/needed/root.pem", &[ISTIOD]),
        ("ca-client-cert-dir", "/needed", &[ISTIOD, &["--ca-root=/etc/ssl/certs/ca.pem"]]),
        ("token-exchange-root", "/needed/root.pem", &[STS]),
        ("vault-token-file", "/needed/token", &[VAULT]),
        ("vault-root", "/needed/root.pem", &[VAULT, &["--vault-auth-role=r"]]),
        ("kubernetes-root", "/needed/root.pem", &[KUBERNETES]),
        ("cfssl-auth-key-file", "/needed/key", &[CFSSL]),
        ("cfssl-bundle", "/needed/bundle.pem", &[CFSSL]),
        ("kubeconfig", "/needed/config", &[ISTIOD, &["--kubernetes-secrets"]]),
        ("clusters-dir", "/needed", &[ISTIOD, &["--kubernetes-secrets"]]),
        ("output-hook", "true", &[ISTIOD, &["--output-dir=/out"]]),
        ("ca-exec", "true", &[EXEC]),
        ("ca-exec-roots", "true", &[EXEC, &["--ca-exec=true"]]),
    ];
    /// Options whose directories are added.
    const ADDED: [&str; 8] =
        ["token-file", "state-dir", "output-dir", "output", "ca-dir", "ready-file", "socket", "admin-socket"];
    /// Paths in Vault, a file that is refused, and what a sidecar beside Envoy has no use for.
    const NO_FILES: [&str; 4] = ["vault-pki-mount", "vault-auth-mount", "config", "restart-on"];

    #[test]
    fn every_option_that_names_a_file_is_known_here() {
        let command = RunArgs::augment_args(Command::new("run"));
        let is_path = |arg: &&clap::Arg| {
            let names = arg.get_value_names().unwrap_or_default();
            arg.get_action().takes_values()
                && names.iter().map(|name| name.strip_prefix("unix:///").unwrap_or(name)).any(|name| {
                    ["FILE", "DIR", "PATH", "COMMAND", "DOMAIN=FILE"]
                        .iter()
                        .any(|kind| name.starts_with(kind))
                })
        };
        let mut found: Vec<_> =
            command.get_arguments().filter(is_path).filter_map(clap::Arg::get_long).collect();
        let read = READ.iter().map(|(option, ..)| *option);
        let mut known: Vec<_> = read.chain(ADDED).chain(NO_FILES).collect();
        found.sort_unstable();
        known.sort_unstable();
        assert_eq!(found, known, "attache inject must add, or ask for, what such an option names");
    }

    #[test]
    fn each_output_directory_gets_a_volume_and_its_password_file_must_be_mounted() {
        let after =
            ["--ca-address=a:1", "--output-dir=/a", "--output=/b,format=pkcs12,password-file=/p/word"];
        let refused = volumes(&[], &after).unwrap_err();
        assert!(refused.contains("--output password-file /p/word: no volume is mounted there"), "{refused}");
        let added = volumes(&["--mount=passwords=/p"], &after).unwrap();
        let outputs: Vec<_> = added.iter().filter(|volume| volume.starts_with("Output")).collect();
        assert_eq!(outputs, ["Output(0)=/a", "Output(1)=/b"]);
        assert_eq!(
            volumes(&[], &["--ca-address=a:1", "--output=b"]).unwrap_err(),
            "--output b is relative; a container needs the absolute path"
        );
    }

    #[test]
    fn what_the_agent_reads_must_be_mounted_or_in_its_image() {
        for (option, value, others) in READ {
            let flag = format!("--{option}={value}");
            let prefix = format!("--{option}=");
            let mut after: Vec<&str> =
                others.concat().into_iter().filter(|other| !other.starts_with(&prefix)).collect();
            after.push(&flag);
            let (mounts, image): (&[&str], &str) = match value {
                "true" => (&["--mount=v=/bin"], "--image-has=/bin/sh"),
                _ => (&["--mount=v=/needed"], "--image-has=/needed"),
            };
            let system = "--image-has=/etc/ssl/certs";
            let refused = volumes(&[system, "--token-audience=a"], &after).unwrap_err();
            let expected = if value == "true" { "--image-has /bin/sh" } else { "--mount VOLUME=/needed" };
            assert!(refused.contains(expected) && refused.lines().count() == 1, "{option}: {refused}");
            for before in [mounts, &[image]] {
                let before = [before, &[system, "--token-audience=a"]].concat();
                volumes(&before, &after).unwrap_or_else(|error| panic!("{option}: {error}"));
            }
        }
        let relative = volumes(&[], &["--ca-address=a:1", "--crl=crl.pem"]).unwrap_err();
        assert!(relative.contains("--crl crl.pem is relative"), "{relative}");
    }

    #[test]
    fn defaults_that_the_container_lacks_are_named() {
        for (after, expected) in [
            (&["--ca=none"][..], "--cert-dir /etc/certs (the default)"),
            (
                &[&VAULT[..1], &["--ca-address=a:1"], &VAULT[2..], &["--vault-auth-role=r"]].concat(),
                "--ca-root FILE",
            ),
            (&["--ca-address=a:1", "--ca-root=system"], "--ca-root system: the agent's image has no roots"),
            (&["--ca=google-cas", "--google-cas-pool=projects/p/locations/l/caPools/c"], "--ca-root system"),
            (
                &["--ca-address=a:1", "--token-exchange-url=https://sts.example/token"],
                "--token-exchange-root system",
            ),
        ] {
            let refused = volumes(&["--token-audience=a"], after).unwrap_err();
            assert!(refused.contains(expected), "{after:?}: {refused}");
        }
        for before in [
            "--mount=v=/etc/certs",
            "--mount=v=/var/run/secrets/workload-spiffe-credentials",
            "--image-has=/",
        ] {
            assert_eq!(volumes(&[before], &["--ca=none"]), Ok(Vec::new()));
        }
        let own = ["--ca-address=a:1", "--output-dir=/out", "--ca-client-cert-dir=/out"];
        assert!(volumes(&[], &own).is_ok(), "the agent may present what it has written");
    }

    #[test]
    fn the_service_accounts_own_files_are_noticed() {
        let reads = |before: &[&str], after: &[&[&str]]| {
            let words = ["inject", "--image=attache:1"].iter().chain(before).chain(&["--"]);
            let after = after.concat();
            sidecar::sidecar(&Line::parse_from(words.chain(&after)).args).unwrap().reads_service_account
        };
        let own = format!("--token-file={SERVICE_ACCOUNT_DIR}/token");
        let cluster: &[&str] = &["--kubernetes-root=cluster"];
        assert!(reads(&[], &[KUBERNETES, cluster]));
        assert!(reads(&[], &[VAULT, &["--vault-auth-role=r", &own]]));
        assert!(!reads(&[], &[VAULT, &["--vault-auth-role=r"]]));
        assert!(!reads(&[], &[ISTIOD]));
        let secrets: &[&str] = &["--kubernetes-secrets"];
        assert!(reads(&[], &[ISTIOD, secrets]) && reads(&[], &[secrets]));
        assert!(!reads(&["--mount=v=/k"], &[ISTIOD, secrets, &["--kubeconfig=/k/config"]]));
        assert!(!reads(&[&format!("--mount=v={SERVICE_ACCOUNT_DIR}")], &[ISTIOD, secrets]));
        assert!(!reads(&[&format!("--mount=v={SERVICE_ACCOUNT_DIR}")], &[KUBERNETES, cluster]));
    }

    #[test]
    fn the_token_is_for_the_audience_that_its_reader_documents() {
        let token = |before: &[&str], after: &[&[&str]]| {
            let before = [before, &["--image-has=/etc/ssl/certs"]].concat();
            let all = volumes(&before, &after.concat()).unwrap_or_else(|error| panic!("{error}"));
            all.into_iter().filter(|volume| volume.starts_with("Token")).collect::<Vec<_>>().join(" ")
        };
        let login: &[&str] = &["--vault-auth-role=r"];
        let google: &[&str] = &[
            "--ca=google-cas",
            "--google-cas-pool=projects/p/locations/l/caPools/c",
            "--token-source=exchange",
            "--token-exchange-audience=//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        ];
        let dir = "Token=/var/run/secrets/tokens";
        assert_eq!(token(&[], &[ISTIOD]), format!("{dir} for istio-ca"));
        assert_eq!(token(&[], &[VAULT, login]), format!("{dir} for vault"));
        assert_eq!(token(&["--token-audience=v"], &[VAULT, login]), format!("{dir} for v"));
        assert_eq!(
            token(&[], &[google, &["--token-file=/t/token"]]),
            "Token=/t for https://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q"
        );
        let metadata: &[&str] = &["--token-source=gce", "--gce-audience=v"];
        assert_eq!(token(&[], &[VAULT, login, metadata]), "", "the identity is given");
        let named_by_token = [&VAULT[..3], login, metadata].concat();
        assert_eq!(token(&[], &[&named_by_token]), format!("{dir} for attache"));
        // The agent reads only the workload's name from it.
        let unnamed = [&CFSSL[..2], &["--token-file=/t/token"]].concat();
        assert_eq!(token(&[], &[&unnamed]), "Token=/t for attache");
        assert_eq!(token(&[], &[CFSSL]), "");
        assert_eq!(token(&[], &[KUBERNETES, &["--kubernetes-root=cluster"]]), "");
        assert_eq!(token(&["--mount=v=/t"], &[ISTIOD, &["--token-file=/t/token"]]), "");

        let sts = ["--ca-address=a:1", "--token-exchange-url=http://sts.example/token"];
        let refused = volumes(&[], &sts).unwrap_err();
        assert!(refused.contains("give --token-audience"), "{refused}");
        assert!(volumes(&["--token-audience=sts"], &sts).is_ok());
    }
}
