//! The command line: a table of commands.

mod admin;
mod bootstrap;
mod ca;
mod check;
mod completions;
mod get;
mod inject;
mod log;
mod man;
mod renew;
mod run;
mod status;
mod watch;

use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};
use tokio::net::UnixStream;

use crate::config::{ConfigErrors, DEFAULT_SOCKET, RunArgs};
use crate::os::systemd::StartError;

/// A node-local Secret Discovery Service agent for Envoy.
#[derive(Debug, Parser)]
#[command(name = "attache", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(RunArgs),
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
}

// `attache run` by itself: to describe all commands takes time, and memory that the agent would keep. A doc comment here
// would be the help's.
#[derive(Debug, Parser)]
#[command(name = "run", bin_name = "attache run", max_term_width = 100)]
struct RunLine {
    #[command(flatten)]
    args: RunArgs,
}

/// Exit codes: 0 stopped as asked, 1 failed while running, 2 wrong use.
const FAILED: u8 = 1;
const WRONG_USE: u8 = 2;

/// Runs the command line `arguments` (with the program's name first).
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut arguments: Vec<_> = arguments.into_iter().collect();
    let parsed = if arguments.get(1).is_some_and(|command| command == "run") {
        arguments.remove(0);
        parse::<RunLine>(arguments).map(|(line, unknown)| (Command::Run(line.args), unknown))
    } else {
        parse::<Cli>(arguments).map(|(line, unknown)| (line.command, unknown))
    };
    let outcome = match parsed {
        Ok((Command::Run(args), unknown)) => run::run(&args, unknown),
        Ok((Command::Check(args), unknown)) => check::run(&args, unknown),
        Ok((_, unknown)) if !unknown.is_empty() => Err(ConfigErrors(unknown).into()),
        Ok((Command::Ca(args), _)) => ca::run(&args),
        Ok((Command::Get(args), _)) => get::run(&args),
        Ok((Command::Watch(args), _)) => watch::run(&args),
        Ok((Command::Status(args), _)) => status::run(&args),
        Ok((Command::Renew(args), _)) => renew::run(&args),
        Ok((Command::Log(args), _)) => log::run(&args),
        Ok((Command::Bootstrap(args), _)) => bootstrap::run(&args),
        Ok((Command::Completions(args), _)) => completions::run(&args),
        Ok((Command::Man(args), _)) => man::run(&args),
        Ok((Command::Inject(args), _)) => inject::run(&args),
        Err(error) => {
            // Help and version come this way too, with code 0.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(WRONG_USE));
        }
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    let has_mistakes = error.is::<ConfigErrors>();
    let is_wrong_use = has_mistakes || error.is::<StartError>();
    let way_out = if has_mistakes { "\nSee attache --help, or attache COMMAND --help." } else { "" };
    note(&format!("{}{way_out}", told(&error)));
    ExitCode::from(if is_wrong_use { WRONG_USE } else { FAILED })
}

/// An error with its causes; a cause that is told already is not told twice.
fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Parses all of it, and collects unknown options instead of stopping at the first.
fn parse<P: Parser>(mut arguments: Vec<OsString>) -> Result<(P, Vec<String>), clap::Error> {
    let mut unknown = Vec::new();
    loop {
        let error = match P::try_parse_from(&arguments) {
            Ok(line) => return Ok((line, unknown)),
            Err(error) => error,
        };
        let text = |kind| match error.get(kind) {
            Some(ContextValue::String(text)) => Some(text.clone()),
            _ => None,
        };
        let name = text(ContextKind::InvalidArg).filter(|name| name.starts_with("--"));
        let at = name.as_ref().and_then(|name| {
            let is_it = |argument: &OsString| {
                let argument = argument.to_string_lossy();
                argument == name.as_str() || argument.starts_with(&format!("{name}="))
            };
            arguments.iter().position(is_it)
        });
        let (ErrorKind::UnknownArgument, Some(name), Some(at)) = (error.kind(), name, at) else {
            return Err(error);
        };
        let hint = text(ContextKind::SuggestedArg).map(|known| format!("; did you mean {known}?"));
        unknown.push(format!("unknown option {name}{}", hint.unwrap_or_default()));
        let removed = arguments.remove(at);
        // Its value, if it has one, is not a mistake of its own.
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

/// Runs `work` on a runtime of this one thread.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(work);
    // A name server that does not answer must not hold the exit back.
    runtime.shutdown_background();
    outcome
}

/// The SDS socket: the one that was typed, else the agent's own where this runs in its container.
fn sds_socket(typed: Option<&Path>) -> PathBuf {
    typed.map(Path::to_owned).or_else(|| variable("ATTACHE_SOCKET")).unwrap_or_else(|| DEFAULT_SOCKET.into())
}

/// A path from the environment. One that is empty counts as not set, as it does for the agent.
fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Why the SDS socket can't be asked.
#[derive(Debug, thiserror::Error)]
#[error("connecting to {} failed: {source}; is `attache run` running, and is --socket the same?", socket.display())]
struct NoAgent {
    socket: PathBuf,
    source: io::Error,
}

/// Connects to an SDS socket.
async fn connect(socket: &Path) -> Result<UnixStream, NoAgent> {
    let connected = UnixStream::connect(socket).await;
    connected.map_err(|source| NoAgent { socket: socket.to_owned(), source })
}

/// The SDS socket's server has ended the connection without an answer, as it does with those whom it does not serve.
#[derive(Debug, thiserror::Error)]
#[error("the agent at {} closed the connection: is user {uid} in its --allow-uid or --allow-gid?", socket.display())]
struct Closed {
    socket: PathBuf,
    uid: u32,
}

impl Closed {
    fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), uid: rustix::process::getuid().as_raw() }
    }

    /// Whether `error` says so: it has many words for it.
    fn is_why(error: &(dyn std::error::Error + 'static)) -> bool {
        let mut causes = std::iter::successors(Some(error), |error| error.source());
        causes.any(|cause| {
            let hyper = cause.downcast_ref::<hyper::Error>();
            let is_gone = hyper.is_some_and(|error| error.is_canceled() || error.is_closed());
            is_gone
                || cause.downcast_ref::<h2::Error>().is_some_and(h2::Error::is_io)
                || cause.is::<io::Error>()
        })
    }
}

/// What is not the answer goes to standard error.
fn note(words: &str) {
    let _ = writeln!(io::stderr(), "attache: {words}");
}

/// `word`, green if it is good and red if not, where there are colours.
fn paint(word: &str, is_good: bool, colours: bool) -> String {
    match (colours, is_good) {
        (false, _) => word.to_owned(),
        (true, true) => format!("\x1b[32m{word}\x1b[0m"),
        (true, false) => format!("\x1b[31m{word}\x1b[0m"),
    }
}

#[cfg(test)]
mod options_page;
