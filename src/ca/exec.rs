//! A user's command as the CA: it reads a CSR and prints a chain.

pub mod options;

use std::convert::Infallible;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{ChildStdin, Command};
use tokio::sync::Semaphore;

use super::{CaError, CertificateAuthority, Class, InvalidResponse, IssuedChain, SigningRequest};
use crate::base::limits;
use crate::os::command::{CapturedOutput, SHELL, ShellCommand};
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
    /// Held by the running command.
    turn: Arc<Semaphore>,
}

/// Why a command printed nothing that could be parsed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("was not run: {SHELL} can't be started: {0}; commands need a shell where the agent runs")]
    NotStarted(#[from] io::Error),
    #[error(
        "failed with exit status 127: the shell found no such program; is it installed where the agent runs, and in its PATH?"
    )]
    NotFound,
    #[error(
        "failed with exit status 126: the program that it calls is not executable, or not for the agent's user"
    )]
    NotExecutable,
    #[error("failed with {0}")]
    Status(ExitStatus),
    #[error("was stopped: it printed more than {} bytes", limits::ANSWER_BYTES)]
    TooMuch,
    #[error("exited 0 without output")]
    Nothing,
}

impl Failure {
    /// Whether a retry may succeed without a change by a person. Of the exit statuses in sysexits.h only EX_TEMPFAIL (75)
    /// says so; other exit statuses have no agreed meaning, and count as transient.
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
            // The first command of a pipe may have failed.
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

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let text = csr::to_pem(&request.csr);
        let chain = self.certificates(SIGN, &self.sign, request, Some(text)).await?;
        let Some(roots) = &self.roots else { return Ok(IssuedChain::read_groups(vec![chain]).await?) };
        let roots = self.certificates(ROOTS, roots, request, None).await?;
        // The roots of a command replace all others.
        Ok(IssuedChain::read_with_others(chain, roots).await?)
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match answer {
            InvalidResponse::NoRoot => Some(
                "the command of --ca-exec must print it after the chain, or that of --ca-exec-roots must print it",
            ),
            InvalidResponse::ForeignKey { .. } => {
                Some("the command of --ca-exec must sign the CSR that it reads from standard input")
            }
            InvalidResponse::NoIdentity { .. } | InvalidResponse::WrongIdentity { .. } => {
                Some("the command of --ca-exec gets the identity in the CSR, and in ATTACHE_SPIFFE_ID")
            }
            InvalidResponse::MissingNames { .. } => Some(
                "the command of --ca-exec gets them in the CSR, and in ATTACHE_DNS_SANS and ATTACHE_COMMON_NAME",
            ),
            _ => None,
        }
    }
}

impl Exec {
    /// `sign` reads a CSR and prints its chain, leaf first. `roots` prints the roots; without it the self-signed
    /// certificates of the chain are the roots.
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
        let (said, writer) =
            CapturedOutput::for_log().map_err(|error| failed(error.into(), String::new()))?;
        let mut stderr = Stderr { said, option, is_reported: false };
        let output = self.output(command, request, input, &mut stderr, writer).await;
        let said = stderr.report(output.is_err());
        let output = output.map_err(|failure| failed(failure, said.clone()))?;
        let certificates = pem::certificates(&output);
        Ok(certificates.map_err(|error| {
            InvalidResponse::Unreadable(format!(
                "the command of {option} printed something, but {error}{said}"
            ))
        })?)
    }

    /// The output of `command`, if it exits 0.
    async fn output(
        &self,
        command: &ShellCommand,
        request: &SigningRequest,
        input: Option<String>,
        stderr: &mut Stderr,
        writer: io::PipeWriter,
    ) -> Result<Vec<u8>, Failure> {
        let (mut printed, stdout) = CapturedOutput::with_limit(limits::ANSWER_BYTES)?;
        let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
        let prepare = |command: &mut Command| {
            command.stdin(stdin).stdout(stdout).stderr(writer);
            command.env("ATTACHE_TTL_SECONDS", request.ttl.as_secs().to_string());
            if let Some(identity) = &request.identity {
                command.env("ATTACHE_SPIFFE_ID", identity.as_str());
            }
            if !request.names.dns.is_empty() {
                command.env("ATTACHE_DNS_SANS", request.names.dns_list());
            }
            if let Some(name) = &request.names.common_name {
                command.env("ATTACHE_COMMON_NAME", name.to_string());
            }
        };
        // A cancelled command may take a moment to exit. The semaphore is never closed.
        let turn = Arc::clone(&self.turn).acquire_owned().await.ok();
        let mut running = command.start(prepare, &[&printed, &stderr.said], turn)?;
        let input = running.stdin().zip(input);
        let status = tokio::select! {
            status = running.wait() => status?,
            () = printed.exceeded() => return Err(Failure::TooMuch),
            never = stderr.said.read_forever() => match never {},
            never = feed(input) => match never {},
        };
        if let Some(failure) = Failure::of(status) {
            return Err(failure);
        }
        let printed = printed.into_bytes().ok_or(Failure::TooMuch)?;
        if printed.trim_ascii().is_empty() { Err(Failure::Nothing) } else { Ok(printed) }
    }
}

/// Writes the CSR. A command may have it from elsewhere and not read it: its output decides.
async fn feed(input: Option<(ChildStdin, String)>) -> Infallible {
    if let Some((mut stdin, text)) = input {
        let _ = stdin.write_all(text.as_bytes()).await;
    }
    std::future::pending().await
}

/// The standard error of a command.
struct Stderr {
    said: CapturedOutput,
    option: &'static str,
    is_reported: bool,
}

impl Stderr {
    /// The text for the error of a command that failed; that of others is logged at debug.
    fn report(mut self, has_failed: bool) -> String {
        self.is_reported = has_failed;
        match self.said.text() {
            said if said.is_empty() => String::new(),
            said => format!("; stderr: {said}"),
        }
    }
}

/// Logs the standard error of a cancelled command, which no error reports.
impl Drop for Stderr {
    fn drop(&mut self) {
        let said = self.said.text();
        if !self.is_reported && !said.is_empty() {
            tracing::debug!(option = self.option, said, "command wrote to stderr");
        }
    }
}

#[cfg(test)]
mod tests;
