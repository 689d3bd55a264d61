//! `attache man`: the manual pages.

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_mangen::Man;

use super::Cli;
use crate::config::ConfigErrors;

/// Print the manual page of attache, or of one of its commands, in roff.
///
/// To read a page: attache man run | man -l -
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ManArgs {
    /// The command [default: the page of attache itself]
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
}

pub(super) fn run(args: &ManArgs) -> anyhow::Result<()> {
    let mut all = Cli::command();
    all.build();
    let command = match &args.command {
        None => all,
        Some(name) => match all.find_subcommand(name) {
            Some(command) => command.clone(),
            None => {
                let names: Vec<_> = all.get_subcommands().map(clap::Command::get_name).collect();
                let error =
                    format!("{name} is not a command of attache; the commands are {}", names.join(", "));
                return Err(ConfigErrors(vec![error]).into());
            }
        },
    };
    let mut out = Vec::new();
    Man::new(command).render(&mut out).context("rendering the page failed")?;
    super::print(out)
}
