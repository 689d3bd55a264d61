//! Hints for options on the wrong side of `--`.

use clap::{Args as _, Command};

use super::InjectArgs;
use crate::config::RunArgs;

/// `unknown` options of `attache inject`; those of `attache run` belong behind `--`.
pub(in crate::cli) fn before_the_dashes(unknown: Vec<String>) -> Vec<String> {
    hinted(unknown, &RunArgs::augment_args(Command::new("run")), |option| {
        format!(
            "{option} is an option of attache run: put -- before the first of these, as in attache inject --image IMAGE \
             web.yaml -- {option}"
        )
    })
}

/// `unknown` options of `attache run`; those of `attache inject` belong before `--`.
pub(super) fn behind_the_dashes(unknown: Vec<String>) -> Vec<String> {
    hinted(unknown, &InjectArgs::augment_args(Command::new("inject")), |option| {
        format!(
            "{option} is an option of attache inject: it stands before --, and those of attache run behind it"
        )
    })
}

/// The messages, with a `hint` instead of those about options of `other`.
fn hinted(unknown: Vec<String>, other: &Command, hint: impl Fn(&str) -> String) -> Vec<String> {
    let is_known = |option: &&str| {
        other
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .any(|long| option.strip_prefix("--") == Some(long))
    };
    let message = |message: String| {
        let mut words = message.split([' ', ';', ',', ':', '=']);
        words.find(|word| word.starts_with("--")).filter(is_known).map(&hint).unwrap_or(message)
    };
    unknown.into_iter().map(message).collect()
}
