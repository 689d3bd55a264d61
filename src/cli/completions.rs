//! `attache completions`: a shell's completion script.

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::Cli;

/// Print a shell's completion script for attache.
///
/// For bash: attache completions bash > /etc/bash_completion.d/attache. For zsh, a file _attache in a directory of fpath; for
/// fish, ~/.config/fish/completions/attache.fish.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

pub(super) fn run(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut out = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "attache", &mut out);
    super::print(out)
}
