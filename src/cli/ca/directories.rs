//! `attache ca init`, `intermediate`, `announce`, `drop` and `exchange`: the directories of roots and intermediates.

use std::path::PathBuf;
use std::time::Duration;

use crate::base::clock::{Clock, rfc3339};
use crate::ca::embedded::directory::{ROOT_FILE, ROOT_KEY_FILE};
use crate::ca::embedded::exchange::{self, Exchanged};
use crate::ca::embedded::make::{self, Made, NewCa};
use crate::ca::embedded::roots;
use crate::pki::key::KeyType;

/// Make a root: its certificate (root-cert.pem) and its key (root-key.pem), in a directory of its own.
///
/// The key signs intermediates only (attache ca intermediate); keep it where no server runs. A key is never overwritten.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct InitArgs {
    /// The root's directory; it must be new or empty, and gets mode 0700
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
    /// The root's lifetime, like 87600h
    #[arg(long, value_name = "DURATION", default_value = "87600h", value_parser = super::parse_ttl)]
    ttl: Duration,
    #[command(flatten)]
    certificate: CertificateArgs,
    /// How many intermediates may follow each other below it; attache ca intermediate needs 1 [default: any number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    path_length: Option<u8>,
}

/// Make an intermediate of a root: what attache ca, or Istio's CA, signs workloads with in one cluster.
///
/// The directory has Istio's file names: ca-cert.pem, ca-key.pem, cert-chain.pem (the intermediate, then the root) and
/// root-cert.pem (all roots). Its files are those of Istio's Secret cacerts, too. A key is never overwritten.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct IntermediateArgs {
    /// The root's directory, as attache ca init has made it
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
    /// The name of the cluster: the locality in the intermediate's subject, and a part of its common name
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    name: String,
    /// The intermediate's directory; it must be new or empty, and gets mode 0700
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Roots to name besides: a PEM file, or a directory with a root-cert.pem; repeatable. They stand before the root that
    /// signs
    #[arg(long, value_name = "PATH")]
    also_root: Vec<PathBuf>,
    /// The intermediate's lifetime, like 17520h; it ends with the root's at the latest
    #[arg(long, value_name = "DURATION", default_value = "17520h", value_parser = super::parse_ttl)]
    ttl: Duration,
    #[command(flatten)]
    certificate: CertificateArgs,
}

/// What both kinds of certificate have.
#[derive(Clone, Debug, clap::Args)]
struct CertificateArgs {
    /// The type of its key: ecdsa-p256, ecdsa-p384, rsa-2048, rsa-3072, rsa-4096 or ed25519
    #[arg(long, value_name = "TYPE", default_value = "ecdsa-p256")]
    key_type: KeyType,
    /// The common name in its subject [default: Root CA and a part of its serial number; of an
    /// intermediate its name, and "intermediate CA"]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    common_name: Option<String>,
    /// The organization in its subject; empty for none
    #[arg(long, value_name = "NAME", default_value = "Attache", value_parser = parse_organization)]
    organization: String,
}

impl CertificateArgs {
    fn with_ttl(&self, ttl: Duration) -> NewCa {
        let Self { key_type, common_name, organization } = self.clone();
        NewCa { common_name, organization, ttl, key_type }
    }
}

/// Name a further root in the directory of an intermediate, before it signs: append it to root-cert.pem.
///
/// A running attache ca delivers it with the next certificates.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AnnounceArgs {
    /// The intermediate's directory
    #[arg(long, value_name = "DIR")]
    ca_dir: PathBuf,
    /// The root: its directory, or a PEM file
    #[arg(long, value_name = "PATH")]
    root: PathBuf,
}

/// Name a root no longer: remove it from the root-cert.pem of an intermediate.
///
/// The root that signs now is not removed.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct DropArgs {
    /// The intermediate's directory
    #[arg(long, value_name = "DIR")]
    ca_dir: PathBuf,
    /// The root: its directory, or a PEM file
    #[arg(long, value_name = "PATH")]
    root: PathBuf,
}

/// Put another directory of an intermediate in the place of the one that is served, in one step.
///
/// The old one is in the other place then. The new one is checked first; a running attache ca signs with it a moment later.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ExchangeArgs {
    /// The intermediate's directory
    #[arg(long, value_name = "DIR")]
    ca_dir: PathBuf,
    /// The directory that takes its place, on the same file system
    #[arg(long, value_name = "DIR")]
    with: PathBuf,
}

pub(super) fn init(args: &InitArgs) -> anyhow::Result<()> {
    let wish = args.certificate.with_ttl(args.ttl);
    let root = make::init(&args.root, &wish, args.path_length, Clock::system().now())?;
    let until = rfc3339(root.not_after);
    let directory = args.root.display();
    super::super::print(format!(
        "{directory}/{ROOT_FILE}: root {}, valid until {until}\n{directory}/{ROOT_KEY_FILE}: its key\n",
        root.subject
    ))
}

pub(super) fn intermediate(args: &IntermediateArgs) -> anyhow::Result<()> {
    let IntermediateArgs { root, name, out, also_root, .. } = args;
    let wish = args.certificate.with_ttl(args.ttl);
    let made = make::intermediate(root, name, out, &wish, also_root, Clock::system().now())?;
    let Made { intermediate, is_cut, roots } = made;
    let (out, until) = (out.display(), rfc3339(intermediate.not_after));
    if is_cut {
        super::super::note(&format!(
            "the intermediate expires with its root, at {until}, earlier than --ttl"
        ));
    }
    let roots = roots.join("; ");
    super::super::print(format!(
        "{out}: intermediate {}, valid until {until}, with the roots {roots}\n",
        intermediate.subject
    ))
}

pub(super) fn announce(AnnounceArgs { ca_dir, root }: &AnnounceArgs) -> anyhow::Result<()> {
    let added = roots::announce(ca_dir, root, Clock::system().now())?;
    let file = ca_dir.join(ROOT_FILE);
    let file = file.display();
    super::super::print(match added.as_slice() {
        [] => format!("{file} has this root already\n"),
        added => format!("{file}: {} added\n", added.join("; ")),
    })
}

pub(super) fn withdraw(DropArgs { ca_dir, root }: &DropArgs) -> anyhow::Result<()> {
    let removed = roots::withdraw(ca_dir, root, Clock::system().now())?;
    let file = ca_dir.join(ROOT_FILE);
    let file = file.display();
    super::super::print(match removed.as_slice() {
        [] => format!("{file} does not have this root\n"),
        removed => format!("{file}: {} removed\n", removed.join("; ")),
    })
}

pub(super) fn exchange(ExchangeArgs { ca_dir, with }: &ExchangeArgs) -> anyhow::Result<()> {
    let Exchanged { subject, not_after } = exchange::exchange(ca_dir, with, Clock::system().now())?;
    let (ca_dir, with) = (ca_dir.display(), with.display());
    super::super::print(format!(
        "{ca_dir}: intermediate {subject}, valid until {not_after}\n{with}: what was there before\n"
    ))
}

/// A part of a subject: at most 64 characters, as X.509 has it.
fn parse_name(text: &str) -> Result<String, String> {
    match parse_organization(text)? {
        name if name.trim().is_empty() => Err("a name needs a character".to_owned()),
        name => Ok(name),
    }
}

fn parse_organization(text: &str) -> Result<String, String> {
    if text.chars().any(char::is_control) {
        return Err(format!("{text:?} holds a control character"));
    }
    match text.chars().count() {
        0..=64 => Ok(text.to_owned()),
        long => Err(format!("it has {long} characters; names in certificates have at most 64")),
    }
}
