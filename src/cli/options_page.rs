//! `docs/options.md` is generated from the command line.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, ArgAction, Command, CommandFactory as _};

use super::Cli;

/// Set to rewrite the page.
const UPDATE: &str = "ATTACHE_UPDATE_DOCS";

const HEAD: &str = "# Commands and options

The text of `attache COMMAND --help` on one page. A test writes it: after a change of the command line, run
`ATTACHE_UPDATE_DOCS=1 cargo test --lib options_page`.

";

/// Splits a help text from the brackets at its end, which hold the default and the variables of Istio's agent.
fn parts(help: &str) -> (String, Option<String>, Vec<String>) {
    let mut text = help.trim().to_owned();
    let (mut default, mut variables) = (None, Vec::new());
    while let Some(inner) = text.strip_suffix(']') {
        let Some((before, bracket)) = inner.rsplit_once('[') else { break };
        match bracket.strip_prefix("default") {
            Some(value) => default = Some(value.trim_start_matches(':').trim().to_owned()),
            None => variables = bracket.split(", ").map(str::to_owned).chain(variables).collect(),
        }
        text = before.trim_end().to_owned();
    }
    (text, default, variables)
}

fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|").replace('<', "\\<")
}

fn code(words: &[String]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

fn name(arg: &Arg) -> String {
    let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    match (arg.get_long(), value.filter(|_| arg.get_action().takes_values())) {
        (Some(long), Some(value)) => format!("--{long} {value}"),
        (Some(long), None) => format!("--{long}"),
        (None, value) => value.unwrap_or_default(),
    }
}

/// A line that sets the option in the options file.
fn key(arg: &Arg) -> String {
    let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    match (arg.get_long(), value, arg.get_action()) {
        // The file does not name another one.
        (None | Some("config"), ..) => String::new(),
        (Some(long), Some(value), ArgAction::Set) => format!("`{long} = \"{value}\"`"),
        (Some(long), Some(value), ArgAction::Append) => format!("`{long} = [\"{value}\", …]`"),
        (Some(long), ..) => format!("`{long} = true`"),
    }
}

/// `line` is the command with those that it is a part of.
fn write_command(page: &mut String, line: &str, command: &Command, has_environment: bool) {
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string);
    let about = about.unwrap_or_default().trim().replace('<', "\\<");
    let _ = writeln!(page, "## {line}\n\n{about}\n");
    let is_listed = |arg: &&Arg| match command.get_name() {
        // The other options are those of `attache run`.
        "check" => arg.get_help_heading() == Some("Check"),
        // Likewise those of `attache node`.
        "node" if !has_environment => false,
        "node" => matches!(arg.get_help_heading(), Some("Workloads" | "CSI")),
        _ => arg.get_id() != "help",
    };
    let args: Vec<_> = command.get_arguments().filter(is_listed).collect();
    let mut headings = Vec::new();
    for heading in args.iter().map(|arg| arg.get_help_heading()) {
        // The options of a heading need not stand together: CA providers have some of theirs under CA.
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    for heading in headings {
        if let Some(heading) = heading {
            let _ = writeln!(page, "### {heading}\n");
        }
        let (column, rule) = if has_environment { (" options file |", "---|") } else { ("", "") };
        let _ =
            writeln!(page, "| option | meaning | default | environment |{column}\n|---|---|---|---|{rule}");
        for arg in args.iter().filter(|arg| arg.get_help_heading() == heading) {
            let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
            let (text, mut default, mut variables) = parts(&help);
            let values: Vec<_> = arg.get_default_values().iter().map(|it| it.to_string_lossy()).collect();
            if default.is_none() && arg.get_action().takes_values() && !values.is_empty() {
                default = Some(values.join(" "));
            }
            if let Some(long) = arg.get_long().filter(|_| has_environment) {
                variables.insert(0, format!("ATTACHE_{}", long.to_uppercase().replace('-', "_")));
                variables.dedup();
            }
            let possible: Vec<_> =
                arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
            let possible = match possible.as_slice() {
                all if all.is_empty() || !arg.get_action().takes_values() => String::new(),
                all => format!(" ({})", all.join(", ")),
            };
            let (text, default) = (cell(&format!("{text}{possible}")), cell(&default.unwrap_or_default()));
            let key = if has_environment { format!(" {} |", key(arg)) } else { String::new() };
            let _ = writeln!(page, "| `{}` | {text} | {default} | {} |{key}", name(arg), code(&variables));
        }
        let _ = writeln!(page);
    }
    for command in command.get_subcommands().filter(|command| command.get_name() != "help") {
        write_command(page, &format!("{line} {}", command.get_name()), command, false);
    }
}

#[test]
fn the_options_page_is_up_to_date() {
    let mut all = Cli::command();
    all.build();
    let mut page = HEAD.to_owned();
    for command in all.get_subcommands().filter(|command| command.get_name() != "help") {
        let line = format!("attache {}", command.get_name());
        write_command(&mut page, &line, command, matches!(command.get_name(), "run" | "node"));
    }
    let page = page.trim_end().to_owned() + "\n";
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/options.md");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(written == page, "docs/options.md is out of date; run {UPDATE}=1 cargo test --lib options_page");
}

#[test]
fn brackets_at_the_end_of_a_help_text_are_split_off() {
    let help = "Who signs (any) [see above] or not [default: citadel; else none] [CA_PROVIDER, CA_TOO]";
    let variables = vec!["CA_PROVIDER".to_owned(), "CA_TOO".to_owned()];
    let expected =
        ("Who signs (any) [see above] or not".to_owned(), Some("citadel; else none".to_owned()), variables);
    assert_eq!(parts(help), expected);
}
