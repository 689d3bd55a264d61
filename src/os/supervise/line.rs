//! The command line of the program, and what the agent adds to it.

use std::path::{Path, PathBuf};

/// Ends the options.
const END: &str = "--";
const RESTART_EPOCH: &str = "--restart-epoch";
const DISABLE_HOT_RESTART: &str = "--disable-hot-restart";
const DYNAMIC_BASE_ID: &str = "--use-dynamic-base-id";
const BASE_ID: &str = "--base-id";
const BASE_ID_PATH: &str = "--base-id-path";
const ADMIN_PATH: &str = "--admin-address-path";
const DRAIN_TIME: &str = "--drain-time-s";
const PARENT_SHUTDOWN: &str = "--parent-shutdown-time-s";
const MODE: &str = "--mode";

/// How the program is restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restarts {
    /// By Envoy's hot restart.
    Hot,
    /// Stopped, then started.
    Cold,
}

/// A program with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    program: String,
    arguments: Vec<String>,
    restarts: Restarts,
}

/// What the agent tells an Envoy.
#[derive(Clone, Copy, Debug)]
pub struct ForEnvoy<'a> {
    pub epoch: u32,
    /// Where the agent keeps files of its own.
    pub files: &'a OwnFiles,
    /// The base id that the first epoch has chosen.
    pub base_id: Option<&'a str>,
    pub drain_seconds: u64,
    pub parent_shutdown_seconds: u64,
}

/// The files that Envoy writes for the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnFiles {
    /// The address of Envoy's admin endpoint.
    pub admin: PathBuf,
    /// The base id, if Envoy chooses it.
    pub base_id: PathBuf,
}

impl OwnFiles {
    /// Beside the socket: the one directory in which the agent can write.
    pub fn beside(socket: &Path) -> Self {
        let with = |suffix: &str| {
            let mut path = socket.as_os_str().to_owned();
            path.push(suffix);
            PathBuf::from(path)
        };
        Self { admin: with(".envoy-admin"), base_id: with(".envoy-base-id") }
    }
}

impl CommandLine {
    /// `words` are the program and its arguments. Errors are mistakes, for people. `is_cold` without hot restart.
    pub fn new(words: &[String], is_cold: bool) -> Result<Self, Vec<String>> {
        let Some((program, arguments)) = words.split_first().filter(|(program, _)| !program.is_empty())
        else {
            return Err(vec!["the COMMAND behind -- is empty: name a program".to_owned()]);
        };
        let mut line =
            Self { program: program.clone(), arguments: arguments.to_vec(), restarts: Restarts::Hot };
        if is_cold || line.has(DISABLE_HOT_RESTART) {
            line.restarts = Restarts::Cold;
        }
        let mut mistakes = Vec::new();
        if line.is_envoy() && line.has(RESTART_EPOCH) {
            mistakes.push(format!(
                "{RESTART_EPOCH} in the COMMAND behind --: the agent numbers the epochs; leave it out"
            ));
        }
        if line.is_envoy() && line.has(MODE) {
            mistakes.push(format!(
                "{MODE} in the COMMAND behind --: the agent keeps an Envoy running that serves; leave it out"
            ));
        }
        if mistakes.is_empty() { Ok(line) } else { Err(mistakes) }
    }

    /// The program, as it is named.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The program's name without its directory.
    pub fn name(&self) -> &str {
        let name = Path::new(&self.program).file_name().and_then(|name| name.to_str());
        name.unwrap_or(&self.program)
    }

    pub fn restarts(&self) -> Restarts {
        self.restarts
    }

    /// Whether the program takes Envoy's options: hot restart needs that. Of another program only its name says so.
    pub fn is_envoy(&self) -> bool {
        self.restarts == Restarts::Hot || self.name().starts_with("envoy") || self.has(DISABLE_HOT_RESTART)
    }

    /// Whether Envoy chooses its base id, which later epochs have to be started with.
    pub fn chooses_base_id(&self) -> bool {
        self.restarts == Restarts::Hot && self.has(DYNAMIC_BASE_ID)
    }

    /// The seconds of `--drain-time-s` in the arguments.
    pub fn drain_seconds(&self) -> Option<u64> {
        self.value(DRAIN_TIME)?.parse().ok()
    }

    /// The seconds of `--parent-shutdown-time-s` in the arguments.
    pub fn parent_shutdown_seconds(&self) -> Option<u64> {
        self.value(PARENT_SHUTDOWN)?.parse().ok()
    }

    /// The base id of the shared memory and the sockets of hot restart, unless Envoy chooses it.
    pub fn base_id(&self) -> &str {
        self.value(BASE_ID).unwrap_or("0")
    }

    /// The file in which Envoy leaves its admin address.
    pub fn admin_file<'a>(&'a self, files: &'a OwnFiles) -> &'a Path {
        self.value(ADMIN_PATH).map_or(&files.admin, Path::new)
    }

    /// The file in which Envoy leaves the base id that it chose.
    pub fn base_id_file<'a>(&'a self, files: &'a OwnFiles) -> &'a Path {
        self.value(BASE_ID_PATH).map_or(&files.base_id, Path::new)
    }

    /// What to execute for an epoch.
    pub fn start(&self, envoy: &ForEnvoy<'_>) -> Vec<String> {
        if !self.is_envoy() {
            return self.with(Vec::new());
        }
        let mut line = self.clone();
        let mut added = Vec::new();
        let mut add = |words: &[&str]| added.extend(words.iter().map(|&word| word.to_owned()));
        let path = |path: &Path| path.to_string_lossy().into_owned();
        match self.restarts {
            Restarts::Hot => {
                add(&[RESTART_EPOCH, &envoy.epoch.to_string()]);
                if !self.has(PARENT_SHUTDOWN) {
                    add(&[PARENT_SHUTDOWN, &envoy.parent_shutdown_seconds.to_string()]);
                }
                match envoy.base_id.filter(|_| envoy.epoch > 0 && self.chooses_base_id()) {
                    Some(base_id) => {
                        line.arguments.retain(|word| word != DYNAMIC_BASE_ID);
                        add(&[BASE_ID, base_id]);
                    }
                    None if self.chooses_base_id() && !self.has(BASE_ID_PATH) => {
                        add(&[BASE_ID_PATH, &path(&envoy.files.base_id)]);
                    }
                    None => {}
                }
            }
            Restarts::Cold if !self.has(DISABLE_HOT_RESTART) => add(&[DISABLE_HOT_RESTART]),
            Restarts::Cold => {}
        }
        if !self.has(DRAIN_TIME) {
            add(&[DRAIN_TIME, &envoy.drain_seconds.to_string()]);
        }
        if !self.has(ADMIN_PATH) {
            add(&[ADMIN_PATH, &path(&envoy.files.admin)]);
        }
        line.with(added)
    }

    /// What to execute to have Envoy check its configuration.
    pub fn validate(&self) -> Vec<String> {
        self.with(vec![MODE.to_owned(), "validate".to_owned()])
    }

    /// The words with more options, before whatever ends them.
    fn with(&self, added: Vec<String>) -> Vec<String> {
        let end = self.options().len();
        let (options, rest) = self.arguments.split_at(end.min(self.arguments.len()));
        let program = std::iter::once(&self.program);
        program.chain(options).cloned().chain(added).chain(rest.iter().cloned()).collect()
    }

    fn options(&self) -> &[String] {
        self.arguments.split(|word| word == END).next().unwrap_or_default()
    }

    fn has(&self, option: &str) -> bool {
        self.options().iter().any(|word| split(word).0 == option)
    }

    fn value(&self, option: &str) -> Option<&str> {
        let index = self.options().iter().position(|word| split(word).0 == option)?;
        let word = self.arguments.get(index)?;
        split(word).1.or_else(|| self.arguments.get(index + 1).map(String::as_str))
    }
}

/// An option, and the value that is in the same word.
fn split(word: &str) -> (&str, Option<&str>) {
    word.split_once('=').map_or((word, None), |(option, value)| (option, Some(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn line(text: &str) -> CommandLine {
        CommandLine::new(&words(text), false).unwrap()
    }

    fn started(line: &CommandLine, epoch: u32) -> String {
        let files = OwnFiles::beside(Path::new("/s"));
        let envoy = ForEnvoy {
            epoch,
            files: &files,
            base_id: Some("7"),
            drain_seconds: 45,
            parent_shutdown_seconds: 60,
        };
        line.start(&envoy).join(" ")
    }

    #[test]
    fn envoy_is_given_its_epoch_and_the_times_that_its_arguments_do_not_set() {
        let cases = [
            (
                "envoy -c a",
                "envoy -c a --restart-epoch 3 --parent-shutdown-time-s 60 --drain-time-s 45 --admin-address-path \
                 /s.envoy-admin",
            ),
            (
                "run.sh --drain-time-s 9 --parent-shutdown-time-s=12 --admin-address-path /a -- x",
                "run.sh --drain-time-s 9 --parent-shutdown-time-s=12 --admin-address-path /a --restart-epoch 3 -- x",
            ),
            (
                "envoy --disable-hot-restart",
                "envoy --disable-hot-restart --drain-time-s 45 --admin-address-path /s.envoy-admin",
            ),
            (
                "envoy --use-dynamic-base-id -c a",
                "envoy -c a --restart-epoch 3 --parent-shutdown-time-s 60 --base-id 7 --drain-time-s 45 \
                 --admin-address-path /s.envoy-admin",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(started(&line(text), 3), expected);
        }
        let first = started(&line("envoy --use-dynamic-base-id"), 0);
        assert!(
            first.contains("--use-dynamic-base-id") && first.contains("--base-id-path /s.envoy-base-id"),
            "{first}"
        );
        assert_eq!(line("envoy -c a -- x").validate().join(" "), "envoy -c a --mode validate -- x");
    }

    #[test]
    fn any_other_program_gets_its_arguments_unchanged() {
        let other = CommandLine::new(&words("/bin/sleep 5 --restart-epoch"), true).unwrap();
        assert_eq!((started(&other, 3).as_str(), other.is_envoy()), ("/bin/sleep 5 --restart-epoch", false));
        let envoy = CommandLine::new(&words("/usr/bin/envoy-1.40 -c a"), true).unwrap();
        assert!(envoy.is_envoy() && started(&envoy, 0).contains("--disable-hot-restart"));
    }

    #[test]
    fn arguments_that_only_the_agent_can_give_are_mistakes() {
        for (text, words_of_it) in [
            ("envoy --restart-epoch 1", "the agent numbers the epochs"),
            ("envoy --restart-epoch=1 --mode validate", "the agent numbers the epochs"),
            ("envoy --mode=validate", "keeps an Envoy running that serves"),
        ] {
            let mistakes = CommandLine::new(&words(text), false).unwrap_err();
            assert!(mistakes.concat().contains(words_of_it), "{mistakes:?}");
        }
        assert!(CommandLine::new(&[], false).is_err());
        assert!(CommandLine::new(&[String::new()], true).is_err());
    }
}
