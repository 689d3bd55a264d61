//! Checks of the program that the agent would keep running.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Access;

use super::{Findings, Severity};
use crate::base::text;
use crate::config::Config;
use crate::os::supervise::{Restarts, validate};

const ABOUT: &str = "command";
/// How long Envoy may take to check its configuration.
const PATIENCE: Duration = Duration::from_secs(20);
/// Where the C library looks if PATH is not set.
const WITHOUT_PATH: &str =
    if cfg!(target_env = "musl") { "/usr/local/bin:/bin:/usr/bin" } else { "/bin:/usr/bin" };

impl Findings {
    /// The program behind `--`: it can be executed, and Envoy accepts its configuration.
    pub(super) async fn command(&mut self, config: &Config) {
        let Some(settings) = &config.command else { return };
        for path in settings.restart_on.iter().filter(|path| !path.exists()) {
            let path = path.display();
            let text =
                format!("--restart-on {path} does not exist: no restart until it appears; is it right?");
            self.note(Severity::Warning, ABOUT, text);
        }
        let line = &settings.line;
        let search = std::env::var_os("PATH").unwrap_or_else(|| WITHOUT_PATH.into());
        let program = match find(line.program(), std::env::split_paths(&search)) {
            Ok(program) => program.display().to_string(),
            Err(reason) => return self.note(Severity::Error, ABOUT, reason),
        };
        if !line.is_envoy() {
            return self.note(Severity::Ok, ABOUT, format!("{program} is executable"));
        }
        let restarts = match line.restarts() {
            Restarts::Hot => "with hot restart",
            Restarts::Cold => "without hot restart",
        };
        match validate(&line.validate(), PATIENCE).await {
            Ok(Ok(())) => {
                self.note(
                    Severity::Ok,
                    ABOUT,
                    format!("{program}, {restarts}: it accepts its configuration"),
                );
            }
            Ok(Err(words)) => {
                let text =
                    format!("{program} --mode validate: {words}; correct its configuration or arguments");
                self.note(Severity::Error, ABOUT, text);
            }
            Err(reason) => {
                let text = format!("{program} --mode validate: no verdict on its configuration: {reason}");
                self.note(Severity::Warning, ABOUT, text);
            }
        }
    }
}

/// The file of `program`, as the kernel will find it. An error is for people.
fn find(program: &str, mut directories: impl Iterator<Item = PathBuf>) -> Result<PathBuf, String> {
    let is_executable = |path: &Path| path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok();
    if !program.contains('/') {
        let file = directories.find_map(|path| Some(path.join(program)).filter(|file| is_executable(file)));
        let program = text::sanitize_for_log(program);
        return file.ok_or_else(|| {
            format!("{program} is in no directory of PATH: is it in this image? Install it, or name its path")
        });
    }
    let path = PathBuf::from(program);
    let shown = text::sanitize_for_log(program);
    match path.metadata() {
        _ if is_executable(&path) => Ok(path),
        Err(error) => Err(format!("{shown}: {error}: is it in this image? Correct the path")),
        Ok(_) => Err(format!("{shown} is not an executable file: name a program, or make it executable")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_as_the_kernel_finds_it() {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("sh");
        std::fs::write(&data, "").unwrap();
        let search = || [directory.path().to_owned(), "/bin".into()].into_iter();
        assert_eq!(
            find("sh", search()).unwrap(),
            Path::new("/bin/sh"),
            "a file that is not executable is passed over"
        );
        assert_eq!(find("/bin/sh", search()).unwrap(), Path::new("/bin/sh"));
        assert!(find("no-such-program", search()).unwrap_err().contains("in no directory of PATH"));
        assert!(find("/no/such/program", search()).unwrap_err().contains("No such file"));
        let data = data.display().to_string();
        assert!(find(&data, search()).unwrap_err().contains("not an executable file"));
    }
}
