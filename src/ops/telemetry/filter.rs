//! Levels of the log, for the agent and for parts of it.

use tracing_subscriber::filter::Targets;

use crate::base::text;

/// The parts of the agent that log, by module.
const PARTS: [&str; 42] = [
    "agent",
    "agent::command",
    "agent::kubernetes",
    "agent::node",
    "agent::requests",
    "agent::sockets",
    "agent::workloads",
    "auth::token",
    "ca::citadel",
    "ca::embedded",
    "ca::exec",
    "ca::kubernetes",
    "ca::vault",
    "cli::ca",
    "csi::driver",
    "csi::registration",
    "csi::restore",
    "csi::volumes",
    "export::output",
    "export::ready_file",
    "fs::pending",
    "fs::pool",
    "fs::watch",
    "net::http1",
    "net::http2",
    "ops::admin",
    "ops::telemetry",
    "os::command",
    "os::hardening",
    "os::stderr",
    "os::supervise",
    "os::systemd",
    "serve::listener",
    "serve::peer",
    "serve::sds",
    "serve::workload_api",
    "source::crl",
    "source::files",
    "source::issuer",
    "source::kubernetes",
    "source::mint",
    "source::spiffe",
];
const OWN: &str = "attache";
/// Libraries that log through the agent.
const LIBRARIES: [&str; 4] = ["h2", "hyper_util", "tonic", "tower"];

/// Levels by target, as `--log-level` takes them.
pub fn parse_filter(text: &str) -> Result<Targets, String> {
    let wrong = || format!("{text:?} is not a log level; choose error, warn, info, debug or trace");
    // `Targets` takes any word for the name of a target.
    if !text.contains(['=', ',']) && text.parse::<tracing::level_filters::LevelFilter>().is_err() {
        return Err(wrong());
    }
    let targets: Targets = text.parse().map_err(|_| wrong())?;
    match targets.iter().find(|(target, _)| !is_known(target)) {
        Some((target, _)) => Err(unknown(target)),
        None => Ok(targets),
    }
}

/// Whether `target` is a part that logs, above one, or beneath one.
fn is_known(target: &str) -> bool {
    // Others may have a meaning in filters.
    if !target.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':')) {
        return false;
    }
    let is_within = |inner: &str, outer: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let Some(part) = target.strip_prefix(OWN) else {
        return LIBRARIES.iter().any(|library| is_within(target, library));
    };
    let Some(part) = part.strip_prefix("::") else { return part.is_empty() };
    // The room of wiring logs itself; what is beneath it is listed.
    PARTS.iter().any(|known| is_within(known, part) || known.contains("::") && is_within(part, known))
}

fn unknown(target: &str) -> String {
    let rooms = PARTS.iter().filter_map(|part| part.split("::").next());
    let part = target.strip_prefix("attache::").unwrap_or(target);
    let closest = match text::closest(part, rooms.chain(PARTS)) {
        Some(known) => Some(format!("{OWN}::{known}")),
        None => text::closest(target, LIBRARIES.into_iter().chain([OWN])).map(str::to_owned),
    };
    let target = text::sanitize_for_log(target);
    match closest {
        Some(known) => format!("no part of the agent logs as {target:?}; did you mean {known}?"),
        None => format!(
            "no part of the agent logs as {target:?}; attache=LEVEL is all of it, attache::source=LEVEL a part"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn a_target_that_logs_nothing_is_a_mistake_with_a_suggestion() {
        for good in [
            "info",
            "OFF",
            "attache=debug",
            "info,attache::source=debug,h2=warn",
            "attache::source::files::publisher=trace",
            "attache::agent=debug",
            "attache::fs::watch::backend=debug",
            // An empty directive is none.
            "info,",
        ] {
            assert!(parse_filter(good).is_ok(), "{good}: {:?}", parse_filter(good));
        }
        let cases = [
            ("loud", "is not a log level"),
            ("attache=loud", "is not a log level"),
            ("info,source=debug", "did you mean attache::source?"),
            ("source::files=debug", "did you mean attache::source::files?"),
            ("attache::sourse=debug", "did you mean attache::source?"),
            ("attache::source::isuer=debug", "no part of the agent logs as"),
            ("atache=debug", "no part of the agent logs as \"atache\""),
            ("envoy=debug", "attache=LEVEL is all of it"),
            ("h2::{{;[x=debug", "no part of the agent logs as"),
            ("VmSil=info,VmSize:{{;{[{Tracp", "no part of the agent logs as"),
        ];
        for (text, words) in cases {
            let error = parse_filter(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn every_module_that_logs_is_a_known_part() {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (mut found, mut directories) = (BTreeSet::new(), vec![src.clone()]);
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
                if !["error", "warn", "info", "debug", "trace"]
                    .iter()
                    .any(|level| text.contains(&format!("tracing::{level}!(")))
                {
                    continue;
                }
                let module = path.strip_prefix(&src).unwrap().with_extension("");
                let module = module.to_str().unwrap().replace('/', "::");
                found.insert(module.strip_suffix("::mod").unwrap_or(&module).to_owned());
            }
        }
        found.retain(|module| !module.ends_with("tests") && !module.contains("::tests::"));
        assert!(found.len() > 30, "{found:?}");
        for module in &found {
            assert!(is_known(&format!("{OWN}::{module}")), "{module} logs and is not among the parts");
        }
        for part in PARTS {
            let logs = found.iter().any(|module| module == part || module.starts_with(&format!("{part}::")));
            assert!(logs, "{part} logs nothing");
        }
    }
}
