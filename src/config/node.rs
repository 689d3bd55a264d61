//! The options of `attache node`, and of each workload that it serves.
//!
//! What all workloads share is read as the options of `attache run`, without those that describe one workload. These
//! stand in the workload's own description: a file of `--workloads`, or what the kubelet says of a volume.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args as _, Command, FromArgMatches};

use super::args::RunArgs;
use super::{Config, csi, options_file, output};
use crate::auth::token_file::BroughtToken;
use crate::ca::provider::ProviderKind;
use crate::ca::providers::ISTIO;
use crate::csi::DriverSettings;
use crate::options::{ConfigErrors, Environment, Level, OptionsFile, Reader};
use crate::source::issuer::StateDir;

/// The options of a workload: the keys of its file.
const OF_A_WORKLOAD: &[&str] = &[
    "socket",
    "socket-mode",
    "allow-uid",
    "allow-gid",
    "spiffe-id",
    "trust-domain",
    "namespace",
    "service-account",
    "token-file",
    "token-from-request",
    "dns-san",
    "common-name",
    "key-type",
    "key-format",
    "cert-ttl",
    "grace-ratio",
    "grace-jitter",
    "output",
    "output-dir",
    "output-key-mode",
    "output-cert-mode",
];

/// The options of `attache run` that a node's agent does not have, and why.
const NOT_OF_A_NODE: &[(&str, &str)] = {
    const ITS_OWN: &str = "each workload has its own: set it in the workload's file";
    const FILES: &str = "a node's agent serves no mounted files, which would be the node's own";
    const NO_COMMAND: &str = "a node's agent runs beside no program";
    const SPIFFE: &str = "a Workload API gives the identity of the process that calls it, so every workload would get the agent's own";
    const SECRETS: &str = "a node's agent serves no Secrets of Kubernetes";
    &[
        ("socket", ITS_OWN),
        ("socket-mode", ITS_OWN),
        ("allow-uid", ITS_OWN),
        ("allow-gid", ITS_OWN),
        ("spiffe-id", ITS_OWN),
        ("namespace", ITS_OWN),
        ("service-account", ITS_OWN),
        ("dns-san", ITS_OWN),
        ("common-name", ITS_OWN),
        ("output", ITS_OWN),
        ("output-dir", ITS_OWN),
        ("output-hook", "no command is run for a workload"),
        ("output-hook-timeout", "no command is run for a workload"),
        ("mint-suffix", "a node's agent issues no certificates for hosts"),
        ("spiffe-endpoint", SPIFFE),
        ("spiffe-hint", SPIFFE),
        ("cert-dir", FILES),
        ("cert-file", FILES),
        ("key-file", FILES),
        ("root-file", FILES),
        ("crl", FILES),
        ("file-mounted-certs", FILES),
        ("file-prefix", FILES),
        ("kubernetes-secrets", SECRETS),
        ("kubeconfig", SECRETS),
        ("kube-context", SECRETS),
        ("kubernetes-bare-names", SECRETS),
        ("authorize", SECRETS),
        ("remote-clusters", SECRETS),
        ("system-namespace", SECRETS),
        ("clusters-dir", SECRETS),
        ("clusters-allow", SECRETS),
        ("restart-on", NO_COMMAND),
        ("restart-debounce", NO_COMMAND),
        ("drain-time", NO_COMMAND),
        ("restart-budget", NO_COMMAND),
        ("wait-timeout", NO_COMMAND),
        ("no-hot-restart", NO_COMMAND),
        ("landlock", "the directories of its workloads are not known at the start"),
    ]
};

/// Variables that describe the Pod of the agent, which is none of its workloads.
const OF_THE_AGENTS_POD: [&str; 5] =
    ["POD_NAMESPACE", "SERVICE_ACCOUNT", "OUTPUT_CERTS", "FILE_MOUNTED_CERTS", "JWT_POLICY"];

/// Whose options are read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Subject<'a> {
    /// `attache run`.
    Sidecar,
    /// What all workloads of `attache node` share. Whether the agent's own credential is used for them.
    Node { impersonates: bool },
    /// One of them.
    Workload { description: &'a Description, impersonates: bool },
}

impl<'a> Subject<'a> {
    pub(super) fn has_mounted_files(self) -> bool {
        matches!(self, Self::Sidecar)
    }

    pub(super) fn description(self) -> Option<&'a OptionsFile> {
        match self {
            Self::Workload { description, .. } => Some(&description.options),
            Self::Sidecar | Self::Node { .. } => None,
        }
    }

    pub(super) fn token(self) -> Option<&'a BroughtToken> {
        match self {
            Self::Workload { description, .. } => description.token.as_ref(),
            Self::Sidecar | Self::Node { .. } => None,
        }
    }

    pub(super) fn impersonates(self) -> bool {
        match self {
            Self::Sidecar => false,
            Self::Node { impersonates } | Self::Workload { impersonates, .. } => impersonates,
        }
    }
}

/// What describes a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its options.
    pub options: OptionsFile,
    /// Its token, if that is no file.
    pub token: Option<BroughtToken>,
}

/// Serve many workloads of this machine, each on a socket of its own with its own identity.
///
/// Workloads come from files (--workloads): each has its own socket, key, credential and state, and is added, changed
/// and removed while the agent runs.
///
/// The other options are those of attache run that concern all workloads. Every option also reads ATTACHE_<OPTION> from the
/// environment and the options file (--config). A flag wins over ATTACHE_<OPTION>, that over Istio's variable, and that over
/// the file.
#[allow(
    rustdoc::invalid_html_tags,
    reason = "this comment is the text of --help, which has brackets of its own"
)]
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_long_help = "\
Examples:
  Workloads of a virtual machine, to try things out:
    attache node --ca embedded --ca-dir /var/lib/attache-ca \\
        --workloads /etc/attache/workloads
  Each with the token in its file, signed by istiod:
    attache node --ca-address istiod.istio-system.svc:15012 \\
        --workloads /etc/attache/workloads
  The Pods of a node, through the kubelet:
    attache node --ca-address istiod.istio-system.svc:15012 \\
        --csi-socket /var/lib/kubelet/plugins/csi.attache.dev/csi.sock \\
        --state-dir /var/lib/attache")]
pub struct NodeArgs {
    /// A directory with a TOML file for each workload, which is named after its file without .toml. Keys are options of attache
    /// run: socket, and spiffe-id or token-file; socket-mode, allow-uid, allow-gid, key-type, cert-ttl, dns-san, output-dir
    /// and further ones (see docs/node.md). Files may be added, changed and removed at any time
    #[arg(long, value_name = "DIR", help_heading = "Workloads")]
    pub workloads: Option<String>,
    /// How many certificates are requested at a time, the most urgent first [default: 8]
    #[arg(long, value_name = "NUMBER", help_heading = "Workloads")]
    pub ca_concurrency: Option<String>,
    /// Request each workload's certificate with the agent's own token, by Istio's ImpersonatedIdentity, instead of a token for
    /// each. istiod allows it to the accounts in its CA_TRUSTED_NODE_ACCOUNTS, for Pods of the agent's node: who steals the
    /// agent's token has all their identities
    #[arg(long, help_heading = "Workloads")]
    pub ca_impersonate: bool,
    #[command(flatten)]
    pub csi: CsiArgs,
    #[command(flatten)]
    pub shared: SharedArgs,
}

impl NodeArgs {
    /// Changes the values of `--output`, which is an option of workloads, and of commands that print.
    pub fn change_output(&mut self, change: impl FnOnce(&mut Vec<String>)) {
        let SharedArgs { run, refused } = &mut self.shared;
        change(&mut run.output);
        refused.retain(|name| *name != "output" || !run.output.is_empty());
    }
}

/// The options of the CSI driver.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct CsiArgs {
    /// Be a CSI driver of the kubelet on this socket: each ephemeral volume of a Pod is a workload, with its socket in the
    /// volume (see docs/node.md) [default: none]
    #[arg(long, value_name = "PATH", help_heading = "CSI")]
    pub csi_socket: Option<String>,
    /// The directory in which the kubelet looks for drivers [default: plugins_registry in --kubelet-dir]
    #[arg(long, value_name = "DIR", help_heading = "CSI")]
    pub csi_registration_dir: Option<String>,
    /// The name of the driver, that of the CSIDriver object [default: csi.attache.dev]
    #[arg(long, value_name = "NAME", help_heading = "CSI")]
    pub csi_driver_name: Option<String>,
    /// The path of --csi-socket as the kubelet sees it [default: the same]
    #[arg(long, value_name = "PATH", help_heading = "CSI")]
    pub csi_endpoint: Option<String>,
    /// The kubelet's directory, which the agent must have at the same path [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR", help_heading = "CSI")]
    pub kubelet_dir: Option<String>,
    /// Where the kubelet puts a Pod's token: volume-context, or secrets if the CSIDriver has serviceAccountTokenInSecrets
    /// [default: volume-context]
    #[arg(long, value_name = "PLACE", help_heading = "CSI")]
    pub csi_token_source: Option<String>,
    /// The audience of the token, if the CSIDriver requests several [default: its only one]
    #[arg(long, value_name = "AUDIENCE", help_heading = "CSI")]
    pub csi_token_audience: Option<String>,
    /// The name of the node, as Kubernetes knows it [default: the host name] [NODE_NAME]
    #[arg(long, value_name = "NAME", help_heading = "CSI")]
    pub node_name: Option<String>,
}

/// The options that a node's agent has in common with `attache run`.
#[derive(Clone, Debug, Default)]
pub struct SharedArgs {
    run: RunArgs,
    /// Options that are not for a node.
    refused: Vec<&'static str>,
}

impl clap::Args for SharedArgs {
    fn augment_args(command: Command) -> Command {
        let (about, long_about) = (command.get_about().cloned(), command.get_long_about().cloned());
        let after = command.get_after_long_help().cloned();
        let hide = |arg: clap::Arg| {
            let is_refused = arg.get_long().is_none_or(|name| reason_against(name).is_some());
            if is_refused { arg.hide(true) } else { arg }
        };
        let mut command = RunArgs::augment_args(command).mut_args(hide);
        command = command.after_long_help(after.map_or(Resettable::Reset, Resettable::Value));
        if let Some(about) = about {
            command = command.about(about);
        }
        if let Some(long_about) = long_about {
            command = command.long_about(long_about);
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SharedArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_set =
            |name: &&str| matches.value_source(&name.replace('-', "_")) == Some(ValueSource::CommandLine);
        let refused = NOT_OF_A_NODE.iter().map(|(name, _)| *name).filter(is_set).collect();
        Ok(Self { run: RunArgs::from_arg_matches(matches)?, refused })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Why an option of `attache run` is not for a node; none if it is.
fn reason_against(option: &str) -> Option<&'static str> {
    NOT_OF_A_NODE.iter().find(|(name, _)| *name == option).map(|(_, why)| *why)
}

/// A valid configuration of `attache node`.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// What all workloads share.
    pub shared: Config,
    /// The directory with their files.
    pub workloads: Option<PathBuf>,
    /// The CSI driver.
    pub csi: Option<DriverSettings>,
    /// How many certificates are requested at a time.
    pub concurrency: NonZeroUsize,
    pub template: WorkloadTemplate,
}

/// Makes the configurations of workloads. Clones make the same.
#[derive(Clone)]
pub struct WorkloadTemplate {
    args: RunArgs,
    environment: Environment,
    file: Option<OptionsFile>,
    /// The directory of `--state-dir`.
    state: Option<PathBuf>,
    impersonates: bool,
    /// Warnings that concern all of them.
    notes: BTreeSet<String>,
}

impl std::fmt::Debug for WorkloadTemplate {
    /// Without the environment.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkloadTemplate").field("state", &self.state).finish_non_exhaustive()
    }
}

impl WorkloadTemplate {
    /// The configuration of the workload `name`. Does not touch a disk.
    pub fn workload(&self, name: &str, description: &Description) -> Result<Config, ConfigErrors> {
        let Self { args, environment, file, impersonates, notes, .. } = self;
        let subject = Subject::Workload { description, impersonates: *impersonates };
        let mut config = Config::with_file(args, environment, file.as_ref(), Vec::new(), subject)?;
        config.workload.state = self.state(name);
        config.notes.retain(|note| !notes.contains(note));
        Ok(config)
    }

    /// Where the workload `name` is kept across restarts.
    pub fn state(&self, name: &str) -> Option<StateDir> {
        self.state.as_ref().map(|directory| StateDir::new(directory.join(name)))
    }

    /// Whether all certificates are requested with the agent's own credential.
    pub fn impersonates(&self) -> bool {
        self.impersonates
    }
}

impl NodeConfig {
    /// Reads all options: from flags, environment, and the options file that these name.
    pub fn load(args: &NodeArgs, environment: &Environment) -> Result<Self, ConfigErrors> {
        let known = || NodeArgs::augment_args(Command::new("attache node"));
        let read = options_file::read_for(&args.shared.run.config, environment, &known)?;
        let (file, mut mistakes) = read.unzip();
        let mistakes = mistakes.get_or_insert_default();
        for name in &args.shared.refused {
            let why = reason_against(name).unwrap_or_default();
            mistakes.push(format!("--{name} is not for attache node: {why}"));
        }
        if !args.shared.run.command.is_empty() {
            mistakes
                .push("attache node runs beside no program: drop -- and what stands behind it".to_owned());
        }
        let environment = environment_of_a_node(environment, mistakes);
        Self::new(args, environment, file, std::mem::take(mistakes))
    }

    fn new(
        args: &NodeArgs,
        environment: Environment,
        file: Option<OptionsFile>,
        mistakes: Vec<String>,
    ) -> Result<Self, ConfigErrors> {
        let NodeArgs { workloads, ca_concurrency, ca_impersonate, csi, shared: SharedArgs { run, .. } } =
            args;
        let mut r = Reader::new(&environment, file.as_ref());
        let workloads = r.text("workloads", workloads, &[]);
        let concurrency = r.parsed("ca-concurrency", ca_concurrency, &[], |text| {
            text.parse::<NonZeroUsize>().map_err(|_| format!("{text:?} is not a number from 1 on"))
        });
        let impersonates = r.switch("ca-impersonate", *ca_impersonate, &[]);
        let state = output::state(&mut r, run);
        let state = state.as_ref().map(StateDir::path);
        if workloads.is_missing() && csi.csi_socket.is_none() && r.text("csi-socket", &None, &[]).is_missing()
        {
            r.mistake(
                "there are no workloads: name the directory of their files with --workloads DIR, or be a CSI driver with \
                 --csi-socket PATH",
            );
        }
        let csi = csi::driver(&mut r, csi, state, impersonates.value == Some(true));
        let of_node = r.finish(());
        let subject = Subject::Node { impersonates: impersonates.value == Some(true) };
        let shared = Config::with_file(run, &environment, file.as_ref(), mistakes, subject);
        let shared = match (of_node, shared) {
            (Ok(()), shared) => shared?,
            (Err(ConfigErrors(own)), Ok(_)) => return Err(ConfigErrors(own)),
            (Err(ConfigErrors(own)), Err(ConfigErrors(others))) => {
                return Err(ConfigErrors([own, others].concat()));
            }
        };
        if shared.providers.is_empty() {
            return Err(ConfigErrors(vec![
                "--ca none is not for attache node, which serves no mounted files: choose a CA".to_owned(),
            ]));
        }
        let absolute = |path: String| std::path::absolute(&path).unwrap_or_else(|_| path.into());
        Ok(Self {
            workloads: workloads.value.map(absolute),
            csi,
            concurrency: concurrency.or(DEFAULT_CONCURRENCY),
            template: WorkloadTemplate {
                args: run.clone(),
                state: shared.workload.state.as_ref().map(|state| state.path().to_owned()),
                impersonates: subject.impersonates(),
                notes: shared.notes.iter().cloned().collect(),
                environment,
                file,
            },
            shared,
        })
    }
}

/// Certificates that are requested at a time.
const DEFAULT_CONCURRENCY: NonZeroUsize = NonZeroUsize::new(8).unwrap();

/// The environment without what describes the agent's own Pod. A variable for an option that a node's agent does not have is
/// a mistake.
fn environment_of_a_node(environment: &Environment, mistakes: &mut Vec<String>) -> Environment {
    let mut environment: BTreeMap<_, _> = environment.clone();
    environment.retain(|name, _| !OF_THE_AGENTS_POD.contains(&name.as_str()));
    for (option, why) in NOT_OF_A_NODE {
        let variable = format!("ATTACHE_{}", option.to_ascii_uppercase().replace('-', "_"));
        if environment.remove(&variable).is_some_and(|value| !value.is_empty()) {
            mistakes.push(format!("{variable} is not for attache node: {why}"));
        }
    }
    environment
}

/// The options in `content`, the file of a workload at `path`; all mistakes in them are errors.
pub fn parse_description(path: &Path, content: &[u8]) -> Result<Description, ConfigErrors> {
    let (description, mistakes) = read_description(path, content)?;
    if mistakes.is_empty() { Ok(description) } else { Err(ConfigErrors(mistakes)) }
}

/// The same with the mistakes beside it: what is right can be checked further.
pub fn read_description(path: &Path, content: &[u8]) -> Result<(Description, Vec<String>), ConfigErrors> {
    let hide = |arg: clap::Arg| {
        let is_known = arg.get_long().is_some_and(|name| OF_A_WORKLOAD.contains(&name));
        if is_known { arg } else { arg.hide(true) }
    };
    let known = RunArgs::augment_args(Command::new("workload")).mut_args(hide);
    let (options, mut mistakes) = OptionsFile::parse(path, content, &known)?;
    let shown = path.display();
    match options.get("socket").map(|socket| (socket.line, socket.values.len())) {
        None => mistakes.push(format!("{shown} names no socket: add socket = \"PATH\"")),
        Some((line, several)) if several > 1 => {
            mistakes.push(format!("socket ({}) names {several} paths: name one", options.place(line)));
        }
        Some(_) => {}
    }
    if ["spiffe-id", "token-file", "token-from-request"].iter().all(|key| options.get(key).is_none()) {
        mistakes.push(format!(
            "{shown} names no identity: add spiffe-id = \"spiffe://…\", or token-file = \"PATH\" with the workload's token"
        ));
    }
    Ok((Description { options, token: None }, mistakes))
}

/// Reports a credential that would not give a workload its identity: Istio's CA issues the identity of the token, unless the
/// agent's own may request those of others, which no other CA knows.
pub(super) fn check_token(
    r: &mut Reader<'_>,
    args: &RunArgs,
    kind: Option<&ProviderKind>,
    subject: Subject<'_>,
    is_from_request: bool,
) {
    let Some(kind) = kind else { return };
    if subject.impersonates() && kind != ISTIO {
        r.mistake(format!("--ca-impersonate is for --ca {} alone: drop it", ISTIO.name));
    }
    let Subject::Workload { description, impersonates } = subject else { return };
    let token = r.text("token-file", &args.token_file, &[]);
    let has_its_own = description.token.is_some() || is_from_request || token.level == Some(Level::Workload);
    match (impersonates, has_its_own) {
        (true, true) => r.mistake(format!(
            "{} and --ca-impersonate contradict each other: with the latter all certificates are requested with the agent's \
             own token; drop one of them, and name the identity with spiffe-id",
            token.from
        )),
        (false, false) if kind == ISTIO => r.mistake(format!(
            "--ca {} issues the identity of the token, and the workload has no token of its own: add token-file = \"PATH\", or \
             start the agent with --ca-impersonate",
            kind.name
        )),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
