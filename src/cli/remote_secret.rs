//! `attache remote-secret`: the Secret by which agents, and istiod, find another cluster.

mod account;
mod manifest;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use http::{Method, StatusCode};

use self::account::TokenSecret;
use self::manifest::Manifest;
use crate::base::clock::Clock;
use crate::fs::disk::Disk;
use crate::kube::kubeconfig::Kubeconfig;
use crate::kube::{Cluster, KubeError};

/// Print or delete the Secret by which agents, and istiod, find another cluster.
///
/// The Secret holds a kubeconfig with the token of a service account of that cluster. Agents with --remote-clusters read it in
/// their own cluster, in the namespace of --system-namespace.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RemoteSecretArgs {
    #[command(subcommand)]
    command: RemoteSecretCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum RemoteSecretCommand {
    Create(CreateArgs),
    Delete(DeleteArgs),
}

/// Print the Secret for a cluster, for kubectl apply in another one.
///
/// Reads the cluster through a kubeconfig: its server, and the token and the root of a service account. The token comes from the
/// Secret ACCOUNT-istio-remote-secret-token beside the account, which is created if it is missing, and does not expire. The
/// account itself must exist: docs/multicluster.md has one with the rights that an agent needs.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  The cluster east, for agents in the cluster west:
    attache remote-secret create --name east --context east | kubectl apply --context west -f -
  The same without kubectl:
    attache remote-secret create --name east --context east --apply --to-context west")]
struct CreateArgs {
    #[command(flatten)]
    remote: Remote,
    /// The URL of the cluster's API server, as agents in other clusters reach it [default: that of the kubeconfig]
    #[arg(long, value_name = "URL", value_parser = server)]
    server: Option<String>,
    /// Write the Secret into the cluster of --to-context instead of printing it
    #[arg(long)]
    apply: bool,
    #[command(flatten)]
    to: To,
}

/// Delete the Secret for a cluster: agents no longer use the cluster.
///
/// The token stays valid, unless --revoke deletes its Secret as well, in the cluster that --context names.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Agents in the cluster west forget the cluster east:
    attache remote-secret delete --name east --to-context west
  The token is revoked, too:
    attache remote-secret delete --name east --to-context west --revoke --context east")]
struct DeleteArgs {
    #[command(flatten)]
    remote: Remote,
    /// Also delete the Secret with the token in the cluster that --context names
    #[arg(long)]
    revoke: bool,
    #[command(flatten)]
    to: To,
}

/// The cluster that the Secret describes.
#[derive(Clone, Debug, clap::Args)]
struct Remote {
    /// The cluster's id, and the end of the Secret's name
    #[arg(long, value_name = "CLUSTER", value_parser = name)]
    name: String,
    /// The kubeconfig with the cluster [default: the first file in KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The cluster's context [default: the current one]
    #[arg(long, value_name = "CONTEXT")]
    context: Option<String>,
    /// The namespace of the account in that cluster, and of the Secret in the other one
    #[arg(long, value_name = "NAMESPACE", default_value = "istio-system", value_parser = name)]
    namespace: String,
    /// The service account whose token the Secret holds
    #[arg(long, value_name = "NAME", default_value = "attache-remote-reader", value_parser = name)]
    service_account: String,
}

/// The cluster that gets the Secret.
#[derive(Clone, Debug, clap::Args)]
struct To {
    /// The kubeconfig with the cluster that gets the Secret [default: the first file in KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE", help_heading = "The cluster that gets the Secret")]
    to_kubeconfig: Option<PathBuf>,
    /// The context of the cluster that gets the Secret [default: the current one]
    #[arg(long, value_name = "CONTEXT", help_heading = "The cluster that gets the Secret")]
    to_context: Option<String>,
}

/// What names of objects look like.
fn name(text: &str) -> Result<String, &'static str> {
    let is_end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_good = text.chars().all(|c| is_end(c) || c == '-' || c == '.');
    let has_ends = text.starts_with(is_end) && text.ends_with(is_end);
    if is_good && has_ends && text.len() <= 200 {
        Ok(text.to_owned())
    } else {
        Err(
            "a name has at most 200 of the characters a-z, 0-9, - and ., and none of the last two at its ends",
        )
    }
}

fn server(text: &str) -> Result<String, &'static str> {
    let is_good = |c: char| c.is_ascii_graphic() && c != '"' && c != '\\';
    let host = text.strip_prefix("https://").filter(|host| !host.is_empty() && host.chars().all(is_good));
    host.map(|_| text.to_owned()).ok_or("the shape is https://HOST:PORT")
}

pub(super) fn run(args: &RemoteSecretArgs) -> anyhow::Result<()> {
    super::block_on(async {
        match &args.command {
            RemoteSecretCommand::Create(args) => create(args).await,
            RemoteSecretCommand::Delete(args) => delete(args).await,
        }
    })
}

/// A cluster of a kubeconfig, and the URL of its server.
struct Opened {
    cluster: Cluster,
    server: String,
}

impl Opened {
    async fn new(kubeconfig: Option<&Path>, context: Option<&str>) -> anyhow::Result<Self> {
        let path = match kubeconfig {
            Some(path) => path.to_owned(),
            None => default_kubeconfig()?,
        };
        let disk = Disk::default();
        let config = Kubeconfig::read(&path, context, &disk).await?.config;
        let server = format!("{}{}", config.endpoint.address, config.path);
        Ok(Self { cluster: Cluster::new(config, disk, Clock::system()), server })
    }

    async fn remote(remote: &Remote) -> anyhow::Result<Self> {
        Self::new(remote.kubeconfig.as_deref(), remote.context.as_deref()).await
    }

    async fn to(to: &To) -> anyhow::Result<Self> {
        Self::new(to.to_kubeconfig.as_deref(), to.to_context.as_deref()).await
    }
}

fn default_kubeconfig() -> anyhow::Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(files) = set("KUBECONFIG") {
        let first = std::env::split_paths(&files).find(|file| !file.as_os_str().is_empty());
        return first.context("KUBECONFIG names no file: name one with --kubeconfig");
    }
    let home =
        set("HOME").context("there is no default kubeconfig without HOME: name one with --kubeconfig")?;
    Ok(Path::new(&home).join(".kube/config"))
}

async fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let CreateArgs { remote, server, apply, to } = args;
    if !apply && (to.to_kubeconfig.is_some() || to.to_context.is_some()) {
        bail!(
            "--to-kubeconfig and --to-context name the cluster that --apply writes to: give --apply, or drop them"
        );
    }
    let described = Opened::remote(remote).await?;
    // Before anything is created.
    let target = match apply {
        true => Some(Opened::to(to).await?),
        false => None,
    };
    if let Some(target) = &target
        && target.server == described.server
    {
        bail!(
            "the Secret would be written into the cluster that it describes ({}): name the other one with --to-context",
            target.server
        );
    }
    let account = TokenSecret::new(&remote.namespace, &remote.service_account);
    let secret = account.read(&described.cluster).await?;
    if server.is_none() && is_of_this_machine(&described.server) {
        super::note(&format!(
            "{} can be reached from this machine alone: agents elsewhere need --server URL",
            described.server
        ));
    }
    let server = server.as_ref().unwrap_or(&described.server);
    let manifest = Manifest { cluster: &remote.name, namespace: &remote.namespace, server, account: &secret };
    let Some(target) = target else { return super::print(manifest.yaml().as_bytes()) };
    let path = format!("{}?fieldManager=attache&force=true", path_of(remote));
    target.cluster.call(Method::PATCH, &path, Some(&manifest.json())).await?;
    super::note(&format!("Secret {} applied at {}", shown(remote), target.server));
    Ok(())
}

async fn delete(args: &DeleteArgs) -> anyhow::Result<()> {
    let DeleteArgs { remote, revoke, to } = args;
    let target = Opened::to(to).await?;
    let path = path_of(remote);
    let label = match target.cluster.call(Method::GET, &path, None).await {
        Err(KubeError::Status { status: StatusCode::NOT_FOUND, .. }) => None,
        found => Some(manifest::is_labelled(&found?)),
    };
    match label {
        Some(false) => bail!(
            "Secret {} at {} has no label {}: it is not for a cluster, and stays",
            shown(remote),
            target.server,
            manifest::LABEL
        ),
        Some(true) => {
            remove(&target.cluster, &path).await?;
            super::note(&format!("Secret {} deleted at {}", shown(remote), target.server));
        }
        None => super::note(&format!("Secret {} does not exist at {}", shown(remote), target.server)),
    }
    if *revoke {
        let described = Opened::remote(remote).await?;
        let account = TokenSecret::new(&remote.namespace, &remote.service_account);
        remove(&described.cluster, &account.path()).await?;
        super::note(&format!(
            "Secret {account} deleted at {}: its token is no longer valid",
            described.server
        ));
    }
    Ok(())
}

/// Deletes an object; it may be gone already.
async fn remove(cluster: &Cluster, path: &str) -> Result<(), KubeError> {
    match cluster.call(Method::DELETE, path, None).await {
        Err(KubeError::Status { status: StatusCode::NOT_FOUND, .. }) => Ok(()),
        deleted => deleted.map(drop),
    }
}

fn path_of(remote: &Remote) -> String {
    let Remote { name, namespace, .. } = remote;
    format!("/api/v1/namespaces/{namespace}/secrets/{}", manifest::secret_name(name))
}

fn shown(remote: &Remote) -> String {
    format!("{}/{}", remote.namespace, manifest::secret_name(&remote.name))
}

/// Whether only this machine reaches the server.
fn is_of_this_machine(server: &str) -> bool {
    let host = server.trim_start_matches("https://").trim_start_matches('[');
    ["127.", "localhost", "::1]"].iter().any(|own| host.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_objects_and_servers_have_tls() {
        for good in ["east", "east-1", "a.b", "0"] {
            assert_eq!(name(good).as_deref(), Ok(good));
        }
        for bad in ["", "East", "-a", "a.", "a/b", "a b", &"a".repeat(201)] {
            assert!(name(bad).is_err(), "{bad}");
        }
        assert!(server("https://10.0.0.1:6443").is_ok());
        for bad in ["http://a", "https://", "a:6443", "https://a\"b", "https://a\nb"] {
            assert!(server(bad).is_err(), "{bad}");
        }
        for own in ["https://127.0.0.1:6443", "https://localhost:1", "https://[::1]:6443"] {
            assert!(is_of_this_machine(own), "{own}");
        }
        assert!(!is_of_this_machine("https://10.0.0.1:6443"));
    }
}
