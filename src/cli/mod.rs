//! The command line: the table of commands, and what they share.

mod admin;
mod bootstrap;
mod ca;
mod check;
mod completions;
mod get;
mod help;
mod inject;
mod log;
mod man;
mod remote_secret;
mod renew;
mod report_table;
mod run;
mod sds_client;
mod secret_view;
mod status;
mod variables;
mod watch;

use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};
use tokio::io::Interest;
use tokio::net::unix::pipe::Sender;
use tokio::runtime::Runtime;

use crate::config::{ConfigErrors, NodeArgs, RunArgs, agents_option};
use crate::os::supervise::{CommandFailed, launch};
use crate::os::systemd::StartError;

/// A node-local Secret Discovery Service agent for Envoy.
#[derive(Debug, Parser)]
#[command(name = "attache", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(RunArgs),
    Node(Box<NodeArgs>),
    Ca(ca::CaArgs),
    Get(get::GetArgs),
    Watch(watch::WatchArgs),
    Status(status::StatusArgs),
    Renew(renew::RenewArgs),
    Check(check::CheckArgs),
    Log(log::LogArgs),
    Bootstrap(bootstrap::BootstrapArgs),
    Completions(completions::CompletionsArgs),
    Man(man::ManArgs),
    Inject(inject::InjectArgs),
    RemoteSecret(remote_secret::RemoteSecretArgs),
}

// `attache run` alone: describing all commands takes time, and memory that the agent would keep. A doc comment here would
// end up in the help.
#[derive(Debug, Parser)]
#[command(name = "run", bin_name = "attache run")]
struct RunLine {
    #[command(flatten)]
    args: RunArgs,
}

// `attache node` alone, likewise.
#[derive(Debug, Parser)]
#[command(name = "node", bin_name = "attache node")]
struct NodeLine {
    #[command(flatten)]
    args: NodeArgs,
}

/// The command failed. A requested stop exits with 0.
const FAILED: u8 = 1;
/// The command line or the configuration is wrong.
const USAGE_ERROR: u8 = 2;

const HINT: &str = "\nSee attache --help, or attache COMMAND --help.";

/// Runs the command line `arguments`, the first of which is the program's name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut arguments: Vec<_> = arguments.into_iter().collect();
    if launch::is_launch(&arguments) {
        return launch::launch(&arguments);
    }
    let without_command = without_command(&arguments);
    let mut process = None;
    let parsed = match arguments.get(1).and_then(|command| command.to_str()) {
        Some("run") => {
            process = Some(run::Process::new());
            arguments.remove(0);
            parse::<RunLine>(arguments).map(|(line, unknown)| (Command::Run(line.args), unknown))
        }
        Some("node") => {
            process = Some(run::Process::new());
            arguments.remove(0);
            parse::<NodeLine>(arguments).map(|(line, unknown)| (Command::Node(Box::new(line.args)), unknown))
        }
        _ => parse::<Cli>(arguments).map(|(line, unknown)| (line.command, unknown)),
    };
    let parsed = parsed.map(|(command, mut unknown)| {
        if matches!(command, Command::Run(_) | Command::Check(_)) {
            unknown.extend(without_command);
        }
        (command, unknown)
    });
    let outcome = match parsed {
        Ok((Command::Run(args), unknown)) => {
            process.unwrap_or_else(run::Process::new).and_then(|process| process.run(args, unknown))
        }
        Ok((Command::Node(args), unknown)) => {
            process.unwrap_or_else(run::Process::new).and_then(|process| process.run_node(*args, unknown))
        }
        Ok((Command::Check(args), unknown)) => check::run(&args, unknown),
        Ok((Command::Inject(_), unknown)) if !unknown.is_empty() => {
            Err(ConfigErrors(inject::before_the_dashes(unknown)).into())
        }
        Ok((_, unknown)) if !unknown.is_empty() => Err(ConfigErrors(unknown).into()),
        Ok((Command::Ca(args), _)) => ca::run(&args),
        Ok((Command::Get(args), _)) => get::run(&args),
        Ok((Command::Watch(args), _)) => watch::run(&args),
        Ok((Command::Status(args), _)) => status::run(&args),
        Ok((Command::Renew(args), _)) => renew::run(&args),
        Ok((Command::Log(args), _)) => log::run(&args),
        Ok((Command::Bootstrap(args), _)) => bootstrap::run(args),
        Ok((Command::Completions(args), _)) => completions::run(&args),
        Ok((Command::Man(args), _)) => man::run(&args),
        Ok((Command::Inject(args), _)) => inject::run(&args),
        Ok((Command::RemoteSecret(args), _)) => remote_secret::run(&args),
        Err(NotParsed { error, .. }) if !error.use_stderr() => print(error.render().to_string()),
        Err(not_parsed) => return not_parsed.report(),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    if let Some(failed) = error.downcast_ref::<CommandFailed>() {
        last_note(failed.to_string());
        return ExitCode::from(failed.code());
    }
    let is_config_error = error.is::<ConfigErrors>();
    let is_usage_error = is_config_error || error.is::<StartError>();
    let hint = if is_config_error { HINT } else { "" };
    last_note(format!("{}{hint}", with_causes(&error)));
    ExitCode::from(if is_usage_error { USAGE_ERROR } else { FAILED })
}

/// The mistake of a line that ends with `--`.
fn without_command(arguments: &[OsString]) -> Option<String> {
    let first = arguments.iter().position(|argument| argument == "--")?;
    (first + 1 == arguments.len()).then(|| {
        "nothing stands behind --: name a COMMAND for the agent to keep running, or leave -- out".to_owned()
    })
}

/// An error message with its causes, each of them once.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// A command line that can't be parsed, or that asks for help or the version.
struct NotParsed {
    error: clap::Error,
    /// Unknown options before the error.
    unknown: Vec<String>,
}

impl NotParsed {
    /// Prints what is wrong.
    fn report(self) -> ExitCode {
        let Self { error, mut unknown } = self;
        if unknown.is_empty() {
            last_note_as_is(error.render().to_string());
            return ExitCode::from(USAGE_ERROR);
        }
        // Without the unknown options there may be nothing left, which is no mistake of its own.
        let is_empty = matches!(
            error.kind(),
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand
        );
        let text = error.render().to_string();
        let first = text.lines().next().unwrap_or_default();
        unknown.extend((!is_empty).then(|| first.trim_start_matches("error: ").to_owned()));
        last_note(format!("{}{HINT}", ConfigErrors(unknown)));
        ExitCode::from(USAGE_ERROR)
    }
}

/// Parses the command line, and collects unknown options instead of stopping at the first.
fn parse<P: Parser>(mut arguments: Vec<OsString>) -> Result<(P, Vec<String>), NotParsed> {
    let mut unknown = Vec::new();
    loop {
        let mut command = P::command().term_width(help::width());
        if help::is_asked_for(&arguments) {
            command = help::with_short_texts(command);
        }
        let parsed = command.try_get_matches_from_mut(&arguments);
        let error = match parsed.and_then(|matches| P::from_arg_matches(&matches)) {
            Ok(line) => return Ok((line, unknown)),
            Err(error) => error.format(&mut command),
        };
        let text = |kind| match error.get(kind) {
            Some(ContextValue::String(text)) => Some(text.clone()),
            _ => None,
        };
        let name = text(ContextKind::InvalidArg).filter(|name| name.starts_with("--"));
        let at = name.as_ref().and_then(|name| {
            let is_unknown = |argument: &OsString| {
                let argument = argument.to_string_lossy();
                argument == name.as_str() || argument.starts_with(&format!("{name}="))
            };
            arguments.iter().position(is_unknown)
        });
        let (ErrorKind::UnknownArgument, Some(name), Some(at)) = (error.kind(), name, at) else {
            return Err(NotParsed { error, unknown });
        };
        let hint = text(ContextKind::SuggestedArg).map(|known| format!("; did you mean {known}?"));
        unknown.push(format!("unknown option {name}{}", hint.unwrap_or_default()));
        let removed = arguments.remove(at);
        // Its value, if any, is not an error of its own.
        let is_command = |text: &str| P::command().find_subcommand(text).is_some();
        let is_value = |next: &OsString| {
            let next = next.to_string_lossy();
            !next.starts_with('-') && !is_command(&next)
        };
        if !removed.to_string_lossy().contains('=') && arguments.get(at).is_some_and(is_value) {
            arguments.remove(at);
        }
    }
}

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Runs `work` on a single-threaded runtime.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(work);
    // An unresponsive name server must not delay the exit.
    runtime.shutdown_background();
    outcome
}

/// The agent's SDS sockets: the only path in the environment that is repeatable and that other commands read.
const SOCKETS: &str = "ATTACHE_SOCKET";

/// A path from the environment, or from the options file that it names. An empty variable counts as not set, as for the
/// agent.
fn variable(name: &str) -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let in_file = || {
        let option = name.strip_prefix("ATTACHE_")?.to_ascii_lowercase().replace('_', "-");
        let file = ("ATTACHE_CONFIG".to_owned(), variable("ATTACHE_CONFIG")?.into_string().ok()?);
        agents_option(&[file].into(), &option)
    };
    let path = |value: OsString| match name == SOCKETS {
        true => std::env::split_paths(&value).next().unwrap_or_default(),
        false => value.into(),
    };
    variable(name).map(path).or_else(|| in_file().map(PathBuf::from))
}

/// Prints the command's result to standard output.
fn print(text: impl AsRef<[u8]>) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        // A reader like `head` has what it wanted.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("writing to standard output failed"),
    }
}

/// Runs `printing` until it ends, or until the reader of standard output closes it, if that is a pipe or a socket.
async fn until_output_is_closed(printing: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let closed = async {
        let output = io::stdout().as_fd().try_clone_to_owned().and_then(Sender::from_owned_fd_unchecked);
        match output {
            Ok(output) if output.ready(Interest::ERROR).await.is_ok() => {}
            _ => std::future::pending().await,
        }
    };
    tokio::select! {
        ended = printing => ended,
        () = closed => Ok(()),
    }
}

/// Prints a message to standard error.
fn note(message: &str) {
    let _ = writeln!(io::stderr(), "attache: {message}");
}

/// Prints a message to standard error, unless that is blocked: the command must end nevertheless.
fn last_note(message: String) {
    last_note_as_is(format!("attache: {message}\n"));
}

fn last_note_as_is(text: String) {
    let (done, printed) = std::sync::mpsc::channel::<()>();
    let print = std::thread::Builder::new().spawn(move || {
        let _ = io::stderr().write_all(text.as_bytes());
        drop(done);
    });
    if print.is_ok() {
        // It is disconnected once the message is printed.
        let _ = printed.recv_timeout(Duration::from_millis(500));
    }
}

/// `word` in green if it is good and in red if not, where `colours` are on.
fn paint(word: &str, is_good: bool, colours: bool) -> String {
    match (colours, is_good) {
        (false, _) => word.to_owned(),
        (true, true) => format!("\x1b[32m{word}\x1b[0m"),
        (true, false) => format!("\x1b[31m{word}\x1b[0m"),
    }
}

#[cfg(test)]
mod options_page;
