//! The bounds on what comes from outside, in one place.

/// Bytes of one request on the SDS socket. Envoy's first one has 61 kB.
pub const REQUEST_BYTES: usize = 1 << 20;
/// Resource names that one stream may be subscribed to.
pub const NAMES_PER_STREAM: usize = 10_000;
/// Bytes of all these names together: as many as one request can list.
pub const NAME_BYTES_PER_STREAM: usize = REQUEST_BYTES;
/// Names of files that streams may ask for, all together.
pub const NAMES_ON_DEMAND: usize = 20_000;
/// Bytes of a path in such a name. The kernel takes no longer one (`PATH_MAX` less its final NUL).
pub const PATH_BYTES: usize = 4095;
/// Characters of a client's text (node id, NACK reason) that go into a log line.
pub const FOREIGN_TEXT: usize = 400;
/// Bytes of one mounted file.
pub const FILE_BYTES: u64 = 1 << 20;
/// Certificates in one file. Operating systems trust about 150 roots; each costs parsing and the check of a signature.
pub const CERTIFICATES: usize = 500;
/// CRLs in one file.
pub const CRLS: usize = 100;
/// Bytes of a token file.
pub const TOKEN_BYTES: u64 = 64 << 10;
/// Roots that no CA names any more and that peers' leaves may still come from.
pub const OLD_ROOTS: usize = 32;
/// Bytes of a CA's answer.
pub const ANSWER_BYTES: usize = 1 << 20;
/// Bytes that are kept of the words of a command of the user's.
pub const COMMAND_WORDS_BYTES: usize = 4 << 10;
/// Generations of the output folder that may lie there for those who are still reading them.
pub const OUTPUT_GENERATIONS: usize = 32;
/// Names of clients that hold one version of a secret, for people.
pub const NODES_TOLD: usize = 20;
/// Users whose refusal is told in the log, a line each.
pub const PEERS_TOLD: usize = 100;
/// Changes of secrets that are remembered for people.
pub const EVENTS: usize = 200;
/// Connections to the status address at a time, and as many to the admin address.
pub const STATUS_CONNECTIONS: usize = 64;
/// Bytes of the longest path of a Unix socket (`sun_path` less its final NUL).
pub const SOCKET_PATH_BYTES: usize = 107;

/// Bytes of the manifests that `attache inject` reads from one file.
pub const MANIFESTS: usize = 16 << 20;

/// Items of a list that one message shows.
const SHOWN: usize = 5;

/// The first of `items` with `separator` between them, and how many more there are.
pub fn listed<T: ToString>(items: impl IntoIterator<Item = T>, separator: &str) -> String {
    let mut items = items.into_iter();
    let shown: Vec<_> = items.by_ref().take(SHOWN).map(|item| item.to_string()).collect();
    let shown = shown.join(separator);
    match items.count() {
        0 => shown,
        more => format!("{shown}{separator}and {more} more"),
    }
}

/// `text` cut to [`FOREIGN_TEXT`], without control characters: fit for a log line.
pub fn sanitize_for_log(text: &str) -> String {
    text.chars().take(FOREIGN_TEXT).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn long_lists_are_cut() {
        assert_eq!(super::listed([1, 2, 3, 4, 5], "; "), "1; 2; 3; 4; 5");
        assert_eq!(super::listed(1..=2300, "; "), "1; 2; 3; 4; 5; and 2295 more");
    }
}
