//! `attache man`: the manual pages.

use std::io::Write as _;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_mangen::Man;

use super::Cli;
use crate::config::ConfigErrors;

/// Print a manual page in man's own format: that of attache, or of one of its commands.
///
/// To read one: attache man run | man -l -
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ManArgs {
    /// The command [default: attache as a whole]
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
}

/// Prints to standard output.
pub(super) fn run(args: &ManArgs) -> anyhow::Result<()> {
    let mut all = Cli::command();
    all.build();
    let command = match &args.command {
        None => all,
        Some(name) => match all.find_subcommand(name) {
            Some(command) => command.clone(),
            None => {
                let names: Vec<_> = all.get_subcommands().map(clap::Command::get_name).collect();
                let mistake = format!("{name} is not a command of attache; there are {}", names.join(", "));
                return Err(ConfigErrors(vec![mistake]).into());
            }
        },
    };
    let mut out = Vec::new();
    Man::new(command).render(&mut out).context("making the page failed")?;
    std::io::stdout().write_all(&out).context("writing the answer failed")
}
