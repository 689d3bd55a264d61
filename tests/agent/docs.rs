//! The documentation: its links have targets, its command lines are accepted, and README does what it says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use tokio::process::Command;

/// The project's root directory.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// A link's target: a file, and an anchor in it.
#[derive(Debug)]
struct Link {
    file: PathBuf,
    anchor: Option<String>,
}

/// The parts of a Markdown page that are checked.
#[derive(Debug, Default)]
struct Page {
    links: Vec<Link>,
    anchors: BTreeSet<String>,
    /// The commands in its console blocks, each on one line.
    commands: Vec<String>,
}

impl Page {
    fn new(directory: &Path, text: &str) -> Self {
        let mut page = Self::default();
        let (mut prose, mut fence) = (String::new(), None::<String>);
        let mut headings = BTreeMap::<String, usize>::new();
        for line in text.replace("\\\n", " ").lines() {
            match (line.trim_start().strip_prefix("```"), &fence) {
                (Some(language), None) => fence = Some(language.to_owned()),
                (Some(_), Some(_)) => fence = None,
                (None, Some(language)) if language == "console" => {
                    page.commands.extend(line.trim_start().strip_prefix("$ ").map(str::to_owned));
                }
                (None, Some(_)) => {}
                (None, None) => {
                    prose.push_str(line);
                    prose.push('\n');
                    let text = line.trim_start_matches('#');
                    if let (true, Some(title)) = (line.starts_with('#'), text.strip_prefix(' ')) {
                        let slug = slug(title);
                        let seen = headings.entry(slug.clone()).or_default();
                        page.anchors.insert(if *seen == 0 { slug } else { format!("{slug}-{seen}") });
                        *seen += 1;
                    }
                }
            }
        }
        // Code contains no links; a link's text may be code.
        let prose: String = prose.split('`').step_by(2).collect();
        let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let own = targets.filter(|target| !target.contains("://"));
        page.links = own.map(|target| Link::new(directory, target)).collect();
        page
    }
}

impl Link {
    /// The link `target` on a page in `directory`; both are relative to the project's root. An empty file means the page
    /// itself.
    fn new(directory: &Path, target: &str) -> Self {
        let (file, anchor) = match target.split_once('#') {
            Some((file, anchor)) => (file, Some(anchor.to_owned())),
            None => (target, None),
        };
        let mut path = PathBuf::new();
        let whole = if file.is_empty() { PathBuf::new() } else { directory.join(file) };
        for part in whole.components() {
            match part {
                Component::ParentDir => assert!(path.pop(), "{target} leads out of the project"),
                Component::Normal(name) => path.push(name),
                _ => {}
            }
        }
        Self { file: path, anchor }
    }
}

/// A heading's anchor, as GitHub makes it.
fn slug(title: &str) -> String {
    let title = title.trim().to_lowercase();
    let kept = title.chars().filter(|one| one.is_alphanumeric() || matches!(one, ' ' | '-' | '_'));
    kept.map(|one| if one == ' ' { '-' } else { one }).collect()
}

/// Every page of the project, by path.
fn pages() -> BTreeMap<PathBuf, Page> {
    let (mut pages, mut directories) = (BTreeMap::new(), vec![PathBuf::new()]);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(root().join(&directory)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let path = directory.join(&name);
            if entry.file_type().unwrap().is_dir() {
                if name != "target" && !name.starts_with('.') {
                    directories.push(path);
                }
            } else if name.ends_with(".md") {
                let text = std::fs::read_to_string(entry.path()).unwrap();
                pages.insert(path, Page::new(&directory, &text));
            }
        }
    }
    assert!(pages.len() > 20, "{:?}", pages.keys());
    pages
}

#[test]
fn every_link_has_a_target() {
    let pages = pages();
    let mut broken = Vec::new();
    for (path, page) in &pages {
        for Link { file, anchor } in &page.links {
            let file = if file.as_os_str().is_empty() { path } else { file };
            let is_there = match (anchor, pages.get(file)) {
                (Some(anchor), Some(page)) => page.anchors.contains(anchor),
                (Some(_), None) => false,
                (None, _) => root().join(file).exists(),
            };
            if !is_there {
                broken.push(format!("{}: {} {anchor:?}", path.display(), file.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_page_can_be_reached_from_the_index() {
    let pages = pages();
    let mut reached = BTreeSet::new();
    let mut next = vec![PathBuf::from("docs/README.md")];
    while let Some(path) = next.pop() {
        if reached.insert(path.clone()) {
            let links = pages.get(&path).map(|page| page.links.as_slice()).unwrap_or_default();
            let files = links.iter().map(|link| link.file.clone());
            next.extend(files.filter(|file| !file.as_os_str().is_empty()));
        }
    }
    for entry in std::fs::read_dir(root().join("docs")).unwrap() {
        let path = Path::new("docs").join(entry.unwrap().file_name());
        assert!(reached.contains(&path), "nothing leads from docs/README.md to {}", path.display());
    }
    let outside = pages.keys().filter(|path| path.starts_with("examples"));
    outside.for_each(|path| assert!(reached.contains(path), "nothing leads to {}", path.display()));
}

#[tokio::test]
async fn every_command_line_of_the_agent_is_accepted() {
    let directory = Path::new(env!("CARGO_BIN_EXE_attache")).parent().unwrap();
    let mut count = 0;
    for (path, page) in pages() {
        for command in page.commands.iter().filter(|command| command.starts_with("attache run ")) {
            let mut shell = Command::new("/bin/sh");
            // What runs in the background has no exit status.
            shell.args(["-c", command.trim_end_matches(" &")]).env_clear().env("PATH", directory);
            // The kubelet's variables in a pod, and one mistake: any others would be reported beside it.
            shell.envs([("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", "1")]);
            shell.env("ATTACHE_DRAIN_TIMEOUT", "a while");
            let output = shell.kill_on_drop(true).output().await.unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            let page = path.display();
            assert_eq!(output.status.code(), Some(2), "{page}: {command}: {error}");
            assert!(error.contains("ATTACHE_DRAIN_TIMEOUT: \"a while\" is not a duration"), "{error}");
            assert!(!error.contains("mistakes in the options"), "{page}: {command}: {error}");
            count += 1;
        }
    }
    assert!(count > 10, "{count}");
}

#[tokio::test]
async fn every_injection_and_bootstrap_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let manifest = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  volumes: [{name: spiffe, emptyDir: {}}]\n  \
                    containers: [{name: envoy, image: envoy}]\n";
    std::fs::write(directory.path().join("web.yaml"), manifest).unwrap();
    let mut count = 0;
    for (path, page) in pages() {
        let commands = page.commands.iter().map(|command| command.split(['|', '>']).next().unwrap().trim());
        for command in commands.filter(|command| {
            command.starts_with("attache inject ") || command.starts_with("attache bootstrap ")
        }) {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", command]).env_clear().current_dir(directory.path());
            shell.env("PATH", Path::new(env!("CARGO_BIN_EXE_attache")).parent().unwrap());
            let output = shell.kill_on_drop(true).output().await.unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {command}: {error}", path.display());
            count += 1;
        }
    }
    assert!(count >= 5, "{count}");
}

async fn newcomer(readme: &Path) -> (bool, String) {
    let mut command = Command::new(root().join("examples/newcomer"));
    command.args(["--attache", env!("CARGO_BIN_EXE_attache"), "--readme"]).arg(readme);
    let output = command.kill_on_drop(true).output().await.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    (output.status.success(), error)
}

#[tokio::test]
async fn readme_does_what_it_says() {
    let readme = read("README.md");
    let (is_good, error) = newcomer(&root().join("README.md")).await;
    assert!(is_good, "{error}");
    // The command that runs all tests is the same everywhere.
    for path in ["README.md", ".ci/run", "CONTRIBUTING.md"] {
        assert!(read(path).contains("cargo test --locked"), "{path}");
    }

    let directory = tempfile::tempdir().unwrap();
    let changes = [
        ("default: key pair, 2", "default: key pair, 3", "does not print the output in README.md"),
        ("run --ca embedded", "run --ca imbedded", "was never ready"),
        ("-- get --socket", "-- get --sockets", "exited with 2"),
        ("-- get --socket", "-- fetch --socket", "shows 0 commands `cargo run -- get`"),
        ("$ examples/mtls/run", "$ examples/mtls/walk", "is not an executable file here"),
    ];
    for (good, bad, words) in changes {
        assert!(readme.contains(good), "{good}");
        let path = directory.path().join("README.md");
        std::fs::write(&path, readme.replace(good, bad)).unwrap();
        let (is_good, error) = newcomer(&path).await;
        assert!(!is_good && error.contains(words), "{bad}: {error}");
    }
}

#[tokio::test]
async fn the_walk_meets_what_it_expects() {
    let walk = async |attache: &str, points: &[&str]| {
        let mut command = Command::new(root().join("examples/walk/run"));
        command.args(points).env("ATTACHE", attache);
        let output = command.kill_on_drop(true).output().await.unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (is_good, error) = walk(env!("CARGO_BIN_EXE_attache"), &[]).await;
    assert!(is_good, "{error}");
    // Another program meets nothing, and each expectation is named.
    let (is_good, error) = walk("/bin/true", &["bootstrap"]).await;
    assert!(
        !is_good && error.contains("does not say: --base-id 1") && error.contains("does not print: {"),
        "{error}"
    );
    let (is_good, error) = walk("/bin/true", &["nowhere"]).await;
    assert!(!is_good && error.contains("no point is called nowhere"), "{error}");
}
