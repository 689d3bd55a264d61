//! `attache completions`: what a shell needs to complete command lines.

use std::io::Write as _;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;

use super::Cli;

/// Print what a shell needs to complete command lines of attache.
///
/// For bash: attache completions bash > /etc/bash_completion.d/attache. For zsh, a file _attache in a folder of fpath; for
/// fish, ~/.config/fish/completions/attache.fish.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct CompletionsArgs {
    /// Which shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

/// Prints to standard output.
pub(super) fn run(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut out = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "attache", &mut out);
    std::io::stdout().write_all(&out).context("writing the answer failed")
}
