//! `--ca exec`: its options, checks and client.

use std::path::Path;

use super::Exec;
use crate::base::clock::Clock;
use crate::ca::failover::Member;
use crate::ca::provider::{
    ClientError, ConfiguredProvider, IdentityDefault, NameUse, ProviderArgs, ProviderKind, SharedOptions,
    TokenUse,
};
use crate::fs::disk::Disk;
use crate::options::Reader;
use crate::os::command::ShellCommand;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct ExecArgs {
    /// The command that signs, run by /bin/sh: a PEM CSR on its standard input, the PEM chain on its standard output,
    /// leaf first. ATTACHE_SPIFFE_ID and ATTACHE_TTL_SECONDS say what to request. It is terminated after --ca-timeout
    #[arg(long, value_name = "COMMAND", help_heading = "exec")]
    pub ca_exec: Option<String>,
    /// A command that prints the roots, run after the other [default: the self-signed certificates of the chain]
    #[arg(long, value_name = "COMMAND", help_heading = "exec")]
    pub ca_exec_roots: Option<String>,
}

#[derive(Clone, Debug)]
pub struct ExecProvider {
    /// Reads a CSR, prints a chain.
    pub sign: ShellCommand,
    /// Prints the roots, if the chain does not end in them.
    pub roots: Option<ShellCommand>,
}

impl ProviderArgs for ExecArgs {
    type Provider = ExecProvider;
    const KIND: &'static ProviderKind = &ProviderKind {
        name: "exec",
        alias: None,
        summary: "a command; give --ca-exec",
        network: None,
        token: TokenUse::None,
        identity: IdentityDefault::Token,
        takes_client_cert: false,
        names: NameUse::Requested,
    };

    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<ExecProvider> {
        let sign = r.text("ca-exec", &self.ca_exec, &[]);
        let roots = r.text("ca-exec-roots", &self.ca_exec_roots, &[]);
        if !shared.selection.is(Self::KIND, r, &[sign.set_by(), roots.set_by()]) {
            return Vec::new();
        }
        if sign.is_missing() {
            r.mistake("--ca exec needs a command that signs: --ca-exec COMMAND");
        }
        let roots = roots.value.map(ShellCommand::from);
        sign.value.map(|sign| ExecProvider { sign: sign.into(), roots }).into_iter().collect()
    }
}

impl ConfiguredProvider for ExecProvider {
    fn kind(&self) -> &'static ProviderKind {
        ExecArgs::KIND
    }

    fn client(&self, _clock: &Clock, _disk: &Disk) -> Result<Member, ClientError> {
        Ok(Member::new(&self.name(), Exec::new(self.sign.clone(), self.roots.clone())))
    }

    fn runs_commands(&self) -> bool {
        true
    }

    fn check(
        &self,
        _clock: &Clock,
        _writable: fn(&Path) -> Result<(), String>,
    ) -> Option<Result<String, String>> {
        Some(Ok("a command signs; --issue runs it".to_owned()))
    }
}
