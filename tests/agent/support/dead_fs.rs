//! A file system that does not answer: a FUSE mount whose other end reads no request. It needs no root, since agent and
//! mount are in a user and a mount namespace of their own.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::io::AsyncWriteExt as _;
use tokio::process::{ChildStdin, Command};

use super::process::Agent;
use super::wait::wait_until;

/// Mounts it on "$@". The descriptor is the shell's alone.
const MOUNT: &str = r#"mount_dead() {
    exec 4<>/dev/fuse
    mount -i -t fuse -o fd=4,rootmode=40000,user_id=0,group_id=0 dead "$1"
    first=$1
    shift
    for place; do mount --bind "$first" "$place" 4<&-; done
}
"#;

/// The shell in the agent's namespaces. Its end is the end of the mounts.
pub struct DeadFs {
    shell: ChildStdin,
    /// Where the file system is mounted.
    places: Vec<PathBuf>,
    /// Files here say that a command is done.
    directory: PathBuf,
    commands: usize,
}

impl DeadFs {
    /// Starts an agent in whose namespace each of `places`, existing directories, is on a file system that does not
    /// answer. Outside that namespace they stay as they are: what a test writes there is seen by the agent once the
    /// file system is unmounted.
    pub fn agent(directory: &Path, name: &str, arguments: &[&str], places: &[&Path]) -> (Agent, Self) {
        let flags = "-Urm";
        let tried = std::process::Command::new("unshare").args([flags, "true"]).output();
        let tried = tried.expect("this test needs unshare, of util-linux");
        let error = String::from_utf8_lossy(&tried.stderr);
        assert!(tried.status.success(), "this test needs user namespaces, and there are none: {error}");
        let opened = std::fs::File::options().read(true).write(true).open("/dev/fuse");
        opened.expect(
            "this test opens /dev/fuse: load the module fuse, and give every user access (mode 0666)",
        );
        let mounted = if places.is_empty() { String::new() } else { format!("mount_dead {}", words(places)) };
        // Behind the agent, the shell runs one line of its standard input after the other.
        let shell = "while read -r line; do eval \"$line\"; done <&3 >/dev/null";
        let script =
            format!("{MOUNT}{mounted}\nexec 3<&0\n{shell} &\nexec \"$0\" \"$@\" 3<&- 4<&- </dev/null");
        let inside = |agent: Command| {
            let mut command = Command::new("unshare");
            command.args([flags, "sh", "-e", "-c", &script]);
            command.arg(agent.as_std().get_program()).args(agent.as_std().get_args());
            command.env_clear().kill_on_drop(true).stdin(Stdio::piped());
            command
        };
        let mut agent = Agent::start_as(directory, name, arguments, inside);
        let shell = agent.process.input();
        let places = places.iter().map(|place| place.to_path_buf()).collect();
        (agent, Self { shell, places, directory: directory.to_owned(), commands: 0 })
    }

    /// Lets the file system of `places` no longer answer from now on. It must not do so already.
    pub async fn die(&mut self, places: &[&Path]) {
        assert!(self.places.is_empty(), "one at a time");
        self.places = places.iter().map(|place| place.to_path_buf()).collect();
        self.run(&format!("mount_dead {}", words(places))).await;
    }

    /// Ends the file system: what waits for it gets an error, and what comes afterwards reaches the directories below it.
    pub async fn revive(&mut self) {
        let places = std::mem::take(&mut self.places);
        let places: Vec<_> = places.iter().map(PathBuf::as_path).collect();
        // First the mounts, so that what is retried at once finds the directories.
        self.run(&format!("umount -l {}; exec 4<&-", words(&places))).await;
    }

    async fn run(&mut self, command: &str) {
        self.commands += 1;
        let done = self.directory.join(format!("dead-fs-command-{}", self.commands));
        let line = format!("{command}; : >'{}'\n", done.display());
        self.shell.write_all(line.as_bytes()).await.unwrap();
        wait_until("the shell in the namespace has run a command", || done.exists()).await;
    }
}

fn words(places: &[&Path]) -> String {
    places.iter().map(|place| format!("'{}'", place.display())).collect::<Vec<_>>().join(" ")
}
