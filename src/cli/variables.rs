//! Variables of the environment that are spelled like options and are none.

use clap::Command;

use crate::base::text;
use crate::config::Environment;

const PREFIX: &str = "ATTACHE_";
/// Variables that are not named after an option: the last three are those that the agent sets for commands that it runs.
const OTHERS: [&str; 4] = ["ATTACHE_LOG", "ATTACHE_TTL_SECONDS", "ATTACHE_DNS_SANS", "ATTACHE_OUTPUT_DIRS"];

/// A mistake for each variable in `environment` that no option of `command` reads.
pub(super) fn mistakes(environment: &Environment, command: fn() -> Command) -> Vec<String> {
    let is_option = |name: &str, value: &str| {
        name.starts_with(PREFIX) && !value.is_empty() && !is_of_service(name, value)
    };
    let mut set = environment.iter().filter(|(name, value)| is_option(name, value)).peekable();
    if set.peek().is_none() {
        return Vec::new();
    }
    let of_option = |option: &str| format!("{PREFIX}{}", option.to_ascii_uppercase().replace('-', "_"));
    let known: Vec<_> =
        command().get_arguments().filter_map(|option| option.get_long()).map(of_option).collect();
    let is_known = |name: &str| OTHERS.contains(&name) || known.iter().any(|known| known == name);
    set.filter(|(name, _)| !is_known(name))
        .map(|(name, _)| match text::closest(name, known.iter().map(String::as_str)) {
            Some(known) => format!("unknown variable {name}; did you mean {known}?"),
            None => format!("unknown variable {name}: no option has this name; unset it"),
        })
        .collect()
}

/// Whether Kubernetes or Docker sets this variable in each container, for a service whose name begins with `attache`:
/// `ATTACHE_SERVICE_HOST`, `ATTACHE_SERVICE_PORT_HTTP`, `ATTACHE_PORT=tcp://…`, `ATTACHE_CA_PORT_15012_TCP_ADDR`.
fn is_of_service(name: &str, value: &str) -> bool {
    let has = |part: &str| name.ends_with(part) || name.contains(&format!("{part}_"));
    let is_url = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    let words: Vec<_> = name.split('_').collect();
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let has_port = words
        .windows(3)
        .any(|three| matches!(three, ["PORT", number, "TCP" | "UDP" | "SCTP"] if is_number(number)));
    name.ends_with("_SERVICE_HOST") || has("_SERVICE_PORT") || name.ends_with("_PORT") && is_url || has_port
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::RunLine;

    #[test]
    fn unknown_variables_are_mistakes_and_those_of_kubernetes_services_are_not() {
        let environment = |set: &[(&str, &str)]| {
            set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let fine = [
            ("ATTACHE_SOCKET", "/a"),
            ("ATTACHE_LOG", "debug"),
            ("ATTACHE_LANDLOCK", "true"),
            ("ATTACHE_CONFIG", "/a"),
            ("ATTACHE_OUTPUT", "/a;/b"),
            ("ATTACHE_OUTPUT_DIRS", "/a:/b"),
            ("ATTACHE_VAULT_ROLE", "web"),
            ("ATTACHE_NO_SUCH", ""),
            ("OTHER_NO_SUCH", "1"),
            // Services named attache, attache-ca and attache-ca-port.
            ("ATTACHE_SERVICE_HOST", "10.0.0.1"),
            ("ATTACHE_SERVICE_PORT", "15012"),
            ("ATTACHE_SERVICE_PORT_GRPC_CA", "15012"),
            ("ATTACHE_PORT", "tcp://10.0.0.1:15012"),
            ("ATTACHE_PORT_15012_TCP", "tcp://10.0.0.1:15012"),
            ("ATTACHE_PORT_15012_TCP_PROTO", "tcp"),
            ("ATTACHE_PORT_15012_UDP_PORT", "15012"),
            ("ATTACHE_CA_SERVICE_HOST", "10.0.0.1"),
            ("ATTACHE_CA_PORT", "udp://10.0.0.1:15012"),
            ("ATTACHE_CA_PORT_PORT_15012_SCTP_ADDR", "10.0.0.1"),
        ];
        assert_eq!(mistakes(&environment(&fine), RunLine::command), Vec::<String>::new());
        let wrong = [
            (
                "ATTACHE_CA_ADRESS",
                "a:1",
                "unknown variable ATTACHE_CA_ADRESS; did you mean ATTACHE_CA_ADDRESS?",
            ),
            ("ATTACHE_PORT", "15012", "unknown variable ATTACHE_PORT"),
            ("ATTACHE_PORT_TCP", "1", "unknown variable ATTACHE_PORT_TCP"),
            ("ATTACHE_ZZZZ", "1", "unknown variable ATTACHE_ZZZZ: no option has this name; unset it"),
        ];
        for (name, value, words) in wrong {
            let found = mistakes(&environment(&[(name, value)]), RunLine::command);
            assert!(found.len() == 1 && found[0].starts_with(words), "{found:?}");
        }
    }
}
