//! The `attache` binary: see [`attache::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    attache::cli::main(std::env::args_os())
}
