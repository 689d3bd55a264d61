//! A command of the user's as the CA: a CSR goes in, a chain comes out.

pub mod options;

use std::convert::Infallible;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{ChildStdin, Command};
use tokio::sync::Semaphore;

use super::{Answer, CaError, CertificateAuthority, Class, InvalidResponse, SigningRequest};
use crate::base::limits;
use crate::os::command::{SHELL, Said, ShellCommand};
use crate::pki::{csr, pem};

/// The option of the command that signs.
const SIGN: &str = "--ca-exec";
/// The option of the command that prints the roots.
const ROOTS: &str = "--ca-exec-roots";

/// Runs a command for each call.
#[derive(Debug)]
pub struct Exec {
    sign: ShellCommand,
    roots: Option<ShellCommand>,
    /// Held by the command that runs.
    turn: Arc<Semaphore>,
}

/// Why a command gave nothing that could be looked at.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("was not run, because {SHELL} can't be started: {0}; commands need a shell where the agent runs")]
    NotStarted(#[from] io::Error),
    #[error(
        "ended with exit status 127: the shell found no such program; is it where the agent runs, and in its PATH?"
    )]
    NotFound,
    #[error("ended with exit status 126: what it calls is no program, or not one for the agent's user")]
    NotExecutable,
    #[error("ended with {0}")]
    Status(ExitStatus),
    #[error("was ended: it printed more than {} bytes", limits::CA_ANSWER_BYTES)]
    TooMuch,
    #[error("ended well, but printed nothing")]
    Nothing,
}

impl Failure {
    /// Whether it may pass by itself. Of the exit statuses of sysexits.h only EX_TEMPFAIL (75) says so; others, which have
    /// no meaning that is agreed on, may.
    pub fn class(&self) -> Class {
        match self {
            Self::NotStarted(error) => match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => Class::Permanent,
                _ => Class::Transient,
            },
            Self::NotFound | Self::NotExecutable | Self::TooMuch => Class::Permanent,
            Self::Status(status) => match status.code() {
                Some(64..=74 | 76..=78) => Class::Permanent,
                _ => Class::Transient,
            },
            // The first of two commands in a pipe may have failed.
            Self::Nothing => Class::Transient,
        }
    }

    fn of(status: ExitStatus) -> Option<Self> {
        match status.code() {
            Some(0) => None,
            Some(126) => Some(Self::NotExecutable),
            Some(127) => Some(Self::NotFound),
            _ => Some(Self::Status(status)),
        }
    }
}

#[tonic::async_trait]
impl CertificateAuthority for Exec {
    fn name(&self) -> &'static str {
        "exec"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<Answer, CaError> {
        let text = csr::to_pem(&request.csr);
        let chain = self.certificates(SIGN, &self.sign, request, Some(text)).await?;
        let Some(roots) = &self.roots else { return Ok(Answer::from_groups(vec![chain])?) };
        let roots = self.certificates(ROOTS, roots, request, None).await?;
        // Who has a command say what the roots are means these, and no others.
        Ok(Answer::with_others(chain, roots)?)
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match answer {
            InvalidResponse::NoRoot => Some(
                "the command of --ca-exec prints it behind the chain, or that of --ca-exec-roots prints it alone",
            ),
            InvalidResponse::ForeignKey { .. } => {
                Some("the command of --ca-exec has to have the CSR signed that it reads from standard input")
            }
            InvalidResponse::NoIdentity { .. } | InvalidResponse::WrongIdentity { .. } => {
                Some("what the command of --ca-exec is to ask for is in the CSR, and in ATTACHE_SPIFFE_ID")
            }
            _ => None,
        }
    }
}

impl Exec {
    /// `sign` reads a CSR and prints its chain, leaf first. Where there are `roots`, they print the roots; else the
    /// self-signed certificates of the chain are that.
    pub fn new(sign: ShellCommand, roots: Option<ShellCommand>) -> Self {
        Self { sign, roots, turn: Arc::new(Semaphore::new(1)) }
    }

    /// The certificates that `command` prints.
    async fn certificates(
        &self,
        option: &'static str,
        command: &ShellCommand,
        request: &SigningRequest,
        input: Option<String>,
    ) -> Result<Vec<CertificateDer<'static>>, CaError> {
        let failed = |failure, said| CaError::Command { option, failure, said };
        let (words, stderr) = Said::words().map_err(|error| failed(error.into(), String::new()))?;
        let mut words = Words { said: words, option, is_told: false };
        let output = self.output(command, request, input, &mut words, stderr).await;
        let said = words.tell(output.is_err());
        let output = output.map_err(|failure| failed(failure, said.clone()))?;
        let certificates = pem::certificates(&output);
        Ok(certificates.map_err(|error| {
            InvalidResponse::Unreadable(format!(
                "the command of {option} printed something, but {error}{said}"
            ))
        })?)
    }

    /// What `command` prints, if it ends well.
    async fn output(
        &self,
        command: &ShellCommand,
        request: &SigningRequest,
        input: Option<String>,
        words: &mut Words,
        stderr: io::PipeWriter,
    ) -> Result<Vec<u8>, Failure> {
        let (mut printed, stdout) = Said::pipe(limits::CA_ANSWER_BYTES)?;
        let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
        let prepare = |command: &mut Command| {
            command.stdin(stdin).stdout(stdout).stderr(stderr);
            command.env("ATTACHE_TTL_SECONDS", request.ttl.as_secs().to_string());
            if let Some(identity) = &request.identity {
                command.env("ATTACHE_SPIFFE_ID", identity.as_str());
            }
        };
        // One that was given up on may take a moment to go away. The semaphore is never closed.
        let turn = Arc::clone(&self.turn).acquire_owned().await.ok();
        let mut running = command.start(prepare, &[&printed, &words.said], turn)?;
        let input = running.stdin().zip(input);
        let status = tokio::select! {
            status = running.wait() => status?,
            () = printed.overflow() => return Err(Failure::TooMuch),
            never = words.said.listen() => match never {},
            never = feed(input) => match never {},
        };
        if let Some(failure) = Failure::of(status) {
            return Err(failure);
        }
        let printed = printed.into_bytes().ok_or(Failure::TooMuch)?;
        if printed.trim_ascii().is_empty() { Err(Failure::Nothing) } else { Ok(printed) }
    }
}

/// Writes the CSR. A command that does not read it may know it from elsewhere: its answer tells.
async fn feed(input: Option<(ChildStdin, String)>) -> Infallible {
    if let Some((mut stdin, text)) = input {
        let _ = stdin.write_all(text.as_bytes()).await;
    }
    std::future::pending().await
}

/// What a command says on standard error.
struct Words {
    said: Said,
    option: &'static str,
    is_told: bool,
}

impl Words {
    /// For the error of a command that failed; the log has those of others, at debug.
    fn tell(mut self, has_failed: bool) -> String {
        self.is_told = has_failed;
        match self.said.text() {
            said if said.is_empty() => String::new(),
            said => format!("; it said: {said}"),
        }
    }
}

/// Nobody else would hear of what was said by a command that was given up on.
impl Drop for Words {
    fn drop(&mut self) {
        let said = self.said.text();
        if !self.is_told && !said.is_empty() {
            tracing::debug!(option = self.option, said, "the command said");
        }
    }
}

#[cfg(test)]
mod tests;
