//! `--ca embedded`: its options, checks and client.

use std::path::{Path, PathBuf};

use super::directory::{KEY_FILE, ROOT_FILE, ROOT_KEY_FILE, SIGNER_FILE};
use super::{DevelopmentCa, Embedded, root_file};
use crate::base::clock::Clock;
use crate::ca::failover::Member;
use crate::ca::provider::{
    ClientError, ConfiguredProvider, IdentityDefault, NameUse, ProviderArgs, ProviderKind, SharedOptions,
    TokenUse,
};
use crate::fs::disk::Disk;
use crate::options::Reader;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct EmbeddedArgs {
    /// The embedded CA's directory; agents that share it share a root [default: ./attache-ca]
    #[arg(long, value_name = "DIR", help_heading = "CA")]
    pub ca_dir: Option<String>,
}

#[derive(Clone, Debug)]
pub struct EmbeddedProvider {
    pub directory: PathBuf,
}

impl ProviderArgs for EmbeddedArgs {
    type Provider = EmbeddedProvider;
    const KIND: &'static ProviderKind = &ProviderKind {
        name: "embedded",
        alias: None,
        summary: "a CA of its own, for development",
        network: None,
        token: TokenUse::None,
        identity: IdentityDefault::Account { namespace: "default", name: "default" },
        takes_client_cert: false,
        names: NameUse::Requested,
    };

    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<EmbeddedProvider> {
        let directory = r.text("ca-dir", &self.ca_dir, &[]);
        let selection = &shared.selection;
        // Not a mistake without --ca, or on another level: it may be set for every agent of a machine.
        if !selection.is(Self::KIND, r, &[]) {
            selection.contradict(r, directory.set_by(), "only embedded has a directory");
            return Vec::new();
        }
        vec![EmbeddedProvider { directory: directory.or("./attache-ca").into() }]
    }
}

impl ConfiguredProvider for EmbeddedProvider {
    fn kind(&self) -> &'static ProviderKind {
        EmbeddedArgs::KIND
    }

    fn client(&self, clock: &Clock, disk: &Disk) -> Result<Member, ClientError> {
        let ca = Embedded::open(&self.directory, clock, disk);
        let ca = ca.map_err(|error| ClientError(error.to_string()))?;
        tracing::warn!(
            root = %root_file(&self.directory).display(),
            "the embedded CA is for development: any user who can read its directory can issue any identity"
        );
        Ok(Member::new(&self.name(), ca))
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.directory)
    }

    /// Opens the CA, or checks that one can be created.
    fn check(
        &self,
        clock: &Clock,
        writable: fn(&Path) -> Result<(), String>,
    ) -> Option<Result<String, String>> {
        let directory = &self.directory;
        let shown = directory.display();
        // With a part of the files, opening it says what is missing.
        if [KEY_FILE, ROOT_KEY_FILE, ROOT_FILE, SIGNER_FILE].iter().any(|name| directory.join(name).exists())
        {
            let opened = DevelopmentCa::open(directory, clock.clone());
            let opened = opened.map(|_| format!("the development CA in {shown}"));
            return Some(opened.map_err(|error| error.to_string()));
        }
        let existing = directory.ancestors().find(|parent| parent.exists()).unwrap_or(Path::new("."));
        let checked = writable(existing).map(|()| format!("a new development CA in {shown}"));
        Some(checked.map_err(|reason| format!("--ca-dir {shown}: {reason}; choose another one")))
    }
}
