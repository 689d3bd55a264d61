//! `-h` and `--help`: their width, and what is short in the one and long in the other.

use std::ffi::OsString;
use std::io;

use clap::{Arg, Command};
use rustix::termios::tcgetwinsize;

/// Where the terminal's width is unknown.
const WIDTH: usize = 80;
/// Longer lines are hard to read.
const MAX_WIDTH: usize = 100;
/// Characters of an option's text in `-h`, without its default.
const SHORT: usize = 76;
/// Characters of a default that `-h` shows.
const SHORT_DEFAULT: usize = 30;

/// The width of help texts: that of the terminal.
pub(super) fn width() -> usize {
    let terminal = tcgetwinsize(io::stdout()).ok().map(|size| usize::from(size.ws_col));
    let columns = || std::env::var("COLUMNS").ok()?.parse().ok();
    let width = terminal.filter(|width| *width > 0).or_else(columns);
    width.filter(|width| *width > 0).unwrap_or(WIDTH).min(MAX_WIDTH)
}

/// Whether the command line may ask for help. Other command lines do without its texts.
pub(super) fn is_asked_for(arguments: &[OsString]) -> bool {
    arguments.iter().skip(1).any(|argument| argument == "-h" || argument == "--help" || argument == "help")
}

/// Gives each option a short text for `-h`. `--help` shows the whole one.
pub(super) fn with_short_texts(command: Command) -> Command {
    command.mut_args(with_short_text).mut_subcommands(with_short_texts)
}

fn with_short_text(arg: Arg) -> Arg {
    let (Some(whole), None) = (arg.get_help().map(ToString::to_string), arg.get_long_help()) else {
        return arg;
    };
    let short = short(&whole);
    if short == whole { arg } else { arg.help(short).long_help(whole) }
}

/// The first clause of `text`, and its default if that is short.
fn short(text: &str) -> String {
    let (words, default) = match text.find("[default") {
        Some(at) => text.split_at(at),
        None => (text.split(" [").next().unwrap_or(text), ""),
    };
    let mut clause = until(words, &[". ", "; "], 0);
    if clause.chars().count() > SHORT {
        clause = until(clause, &[": ", " (", ", "], SHORT / 4);
    }
    let clause = clause.trim().trim_end_matches('.');
    let default = default.split_inclusive(']').next().unwrap_or_default();
    match default.chars().count() {
        1..=SHORT_DEFAULT => format!("{clause} {default}"),
        _ => clause.to_owned(),
    }
}

/// `text` up to the first of `ends` outside parentheses, from the byte `least` on.
fn until<'a>(text: &'a str, ends: &[&str], least: usize) -> &'a str {
    let is_outside = |at: usize| {
        let before = text.get(..at).unwrap_or_default();
        before.matches('(').count() == before.matches(')').count()
    };
    let places = ends.iter().flat_map(|end| text.match_indices(end)).map(|(at, _)| at);
    let first = places.filter(|at| *at >= least && is_outside(*at)).min();
    first.and_then(|at| text.get(..at)).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::super::{Cli, RunLine};
    use super::*;

    #[test]
    fn a_short_text_is_the_first_clause_and_a_short_default() {
        let cases = [
            ("The socket [default: /a]", "The socket [default: /a]"),
            ("The socket [default: /var/run/secrets/workload-spiffe-uds/socket] [X]", "The socket"),
            (
                "The name in it [default: the address's host] [ISTIOD_SAN]",
                "The name in it [default: the address's host]",
            ),
            ("Read it again. For this agent alone; none", "Read it again"),
            ("A group (the one; not others) of users; more", "A group (the one; not others) of users"),
            ("A header [CA_HEADER_<NAME>]", "A header"),
        ];
        for (whole, expected) in cases {
            assert_eq!(short(whole), expected);
        }
    }

    #[test]
    fn short_help_fits_a_terminal_and_long_help_has_the_whole_text() {
        let mut command = with_short_texts(RunLine::command().term_width(WIDTH));
        command.build();
        let (short, long) = (command.render_help().to_string(), command.render_long_help().to_string());
        assert!(short.lines().count() * 3 < long.lines().count() * 2, "{short}");
        for text in [&short, &long] {
            let longest = text.lines().max_by_key(|line| line.chars().count()).unwrap();
            // A default or a choice of words without a space can't be wrapped.
            assert!(longest.chars().count() <= WIDTH, "{longest}");
        }
        for arg in command.get_arguments().filter(|arg| arg.get_id() != "help") {
            let text = arg.get_help().unwrap().to_string();
            assert!(text.chars().count() <= SHORT + SHORT_DEFAULT + 30, "{text}");
        }
        assert!(long.contains("[CA_ADDR]") && !short.contains("[CA_ADDR]"), "{short}");
    }

    #[test]
    fn each_example_can_be_pasted_at_the_narrowest_width() {
        let mut all = with_short_texts(Cli::command().term_width(WIDTH));
        all.build();
        let mut examples = 0;
        for command in all.get_subcommands_mut() {
            let help = command.render_long_help().to_string();
            let Some((_, text)) = help.split_once("Examples:\n") else { continue };
            for example in text.replace("\\\n", " ").lines().filter_map(|line| line.strip_prefix("    ")) {
                examples += 1;
                let line = example.split(" | ").next().unwrap_or_default();
                let line = line.split(" >").next().unwrap_or_default();
                let words: Vec<_> = line.split_whitespace().collect();
                assert_eq!(words.first(), Some(&"attache"), "{example}");
                if let Err(error) = Cli::command().try_get_matches_from(&words) {
                    panic!("{example}: {error}");
                }
            }
        }
        assert!(examples >= 10, "{examples}");
    }
}
