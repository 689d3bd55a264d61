//! Files that are subscribed to by name: `file-cert:`, `file-root:`, the system's roots.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use attache::pki::key::{KeyType, SigningKey};
use attache::pki::pem;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::support::files::{Mounted, swap};
use crate::support::process::{Agent, PATIENCE, Process, attache, output, strs};
use crate::support::sds::{
    Client, DeltaStream, Stream, certificates, content, delta_secrets, fetch, on_connection, request, secrets,
};
use crate::support::wait::wait_for;

/// Longer than the debounce window.
const QUIET: Duration = Duration::from_millis(300);

/// A key pair and roots of a CA of their own, so that each generation has other roots.
fn generation(directory: &Path, number: usize) -> Mounted {
    Mounted::new(&directory.join(format!("ca-{number}")), "web")
}

fn pair_name(chain: impl AsRef<Path>, key: impl AsRef<Path>) -> String {
    format!("file-cert:{}~{}", chain.as_ref().display(), key.as_ref().display())
}

fn roots_name(path: impl AsRef<Path>) -> String {
    format!("file-root:{}", path.as_ref().display())
}

/// An agent that serves `default` from `certs` in `directory`, which is also its working directory.
async fn agent(directory: &Path, arguments: &[&str]) -> Agent {
    let certs = directory.join("certs");
    Mounted::new(&directory.join("ca"), "own").write(&certs);
    let arguments = [&["--cert-dir", certs.to_str().unwrap()], arguments].concat();
    let mut agent = Agent::start_as(directory, "agent", &arguments, |mut command| {
        command.current_dir(directory).env("SSL_CERT_FILE", directory.join("volume/system.pem"));
        command
    });
    agent.process.wait_log(" ready ").await;
    agent
}

/// The files of a volume: `mounted`, and a system bundle with entries that are not certificates.
fn with_system<'a>(mounted: &'a Mounted, system: &'a [u8]) -> impl Iterator<Item = (&'a str, &'a [u8])> {
    mounted.files().into_iter().chain([("system.pem", system)])
}

fn odd_bundle(mounted: &Mounted) -> Vec<u8> {
    let no_certificate = rustls::pki_types::CertificateDer::from(vec![0x30, 0x03, 0x02, 0x01, 0x01]);
    let damaged = b"-----BEGIN CERTIFICATE-----\nMIIB!!!!not base64\n-----END CERTIFICATE-----\n";
    let odd = pem::of_certificates([&no_certificate]);
    [b"# roots of this system\n".as_slice(), damaged, &odd, &mounted.root].concat()
}

#[tokio::test]
async fn each_kind_of_name_is_served_and_followed_in_every_protocol() {
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().join("volume");
    let first = generation(directory.path(), 0);
    swap(&volume, with_system(&first, &odd_bundle(&first)));
    let mut agent = agent(directory.path(), &[]).await;
    let pairs = [
        pair_name(volume.join("cert-chain.pem"), volume.join("key.pem")),
        pair_name("volume/cert-chain.pem", "./volume/../volume/key.pem"),
    ];
    let roots = [
        roots_name(volume.join("root-cert.pem")),
        roots_name("volume/root-cert.pem"),
        "file-root:system".to_owned(),
    ];
    let names: Vec<_> = pairs.iter().chain(&roots).map(String::as_str).collect();
    let expected = |name: &str, mounted: &Mounted| match name.starts_with("file-cert:") {
        true => (text(&mounted.chain), Some(text(&mounted.key))),
        false => (text(&mounted.root), None),
    };
    on_connection(&agent.socket.clone(), async |client| {
        let fetch_all = async |mounted: &Mounted| {
            let found = secrets(&fetch(&client, &names).await.unwrap());
            assert_eq!(found.len(), names.len());
            for secret in found {
                let name = secret.name.clone();
                assert_eq!(content(secret), expected(&name, mounted), "{name}");
            }
        };
        fetch_all(&first).await;
        let mut streams = Vec::new();
        for name in &names {
            let in_full = Stream::open(&client, &[name]).await.unwrap();
            let delta = DeltaStream::open(&client, &[name]).await.unwrap();
            streams.push((*name, in_full, delta));
        }
        let mut newest = first;
        for round in 1..=4 {
            for (name, in_full, delta) in &mut streams {
                let response = in_full.next().await.unwrap();
                let [secret] = secrets(&response).try_into().unwrap();
                assert_eq!(secret.name, *name);
                assert_eq!(content(secret), expected(name, &newest), "{name}, round {round}");
                in_full.accept(&response).await;
                let response = delta.next().await.unwrap();
                let [secret] = delta_secrets(&response).try_into().unwrap();
                assert_eq!((secret.name.as_str(), response.resources[0].name.as_str()), (*name, *name));
                assert_eq!(content(secret), expected(name, &newest), "{name}, round {round}");
                delta.accept(&response).await;
            }
            newest = generation(directory.path(), round);
            swap(&volume, with_system(&newest, &odd_bundle(&newest)));
        }
        for (_, in_full, _) in &mut streams {
            in_full.next().await.unwrap();
        }
        fetch_all(&newest).await;
        fetch(&client, &["file-root:nowhere/root.pem", "default"]).await.unwrap();
    })
    .await;
    // The log names the file by its full path, whatever the agent's working directory.
    let (_, line) = agent.process.wait_log("name=\"file-root:system\"").await;
    assert!(line.contains(&format!("from=\"{}\"", volume.join("system.pem").display())), "{line}");
    let (_, line) =
        agent.process.wait_log("requested files are not used; there is nothing else to serve yet").await;
    let missing = directory.path().join("nowhere/root.pem");
    assert!(line.contains(&format!("{} does not exist", missing.display())), "{line}");
}

fn text(pem: &[u8]) -> String {
    String::from_utf8(pem.to_vec()).unwrap()
}

#[tokio::test]
async fn names_of_one_file_do_not_depend_on_each_others_streams() {
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().join("volume");
    swap(&volume, generation(directory.path(), 0).files());
    symlink("volume", directory.path().join("link")).unwrap();
    let agent = agent(directory.path(), &[]).await;
    let names = [
        roots_name(volume.join("root-cert.pem")),
        roots_name("volume/root-cert.pem"),
        roots_name(directory.path().join("link/root-cert.pem")),
        roots_name(volume.join("..data/root-cert.pem")),
    ];
    on_connection(&agent.socket, async |client| {
        let mut streams = Vec::new();
        // The last name has two streams.
        for name in names.iter().chain(names.last()) {
            let mut stream = Stream::open(&client, &[name]).await.unwrap();
            let response = stream.next().await.unwrap();
            stream.accept(&response).await;
            streams.push(stream);
        }
        let mut number = 0;
        // From the front and from the back in turn, until one is left, which gets several changes.
        for gone in [0, 3, 0, 1, 9, 9, 9] {
            if gone < streams.len() {
                drop(streams.remove(gone));
            }
            number += 1;
            let next = generation(directory.path(), number);
            swap(&volume, next.files());
            for stream in &mut streams {
                let response = stream.next().await.unwrap();
                assert_eq!(certificates(&response).as_bytes(), next.root, "change {number}");
                stream.accept(&response).await;
            }
        }
        assert_eq!(streams.len(), 1);
    })
    .await;
}

#[tokio::test]
async fn hundreds_of_names_in_a_directory_get_each_swap_once() {
    const NAMES: usize = 400;
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().join("volume");
    let file_names: Vec<_> =
        (0..NAMES).map(|index| (format!("{index}.crt"), format!("{index}.key"))).collect();
    let swap = |mounted: &Mounted| {
        let files = file_names.iter().flat_map(|(chain, key)| {
            [(chain.as_str(), mounted.chain.as_slice()), (key.as_str(), mounted.key.as_slice())]
        });
        swap(&volume, files);
    };
    swap(&generation(directory.path(), 0));
    let mut agent = agent(directory.path(), &[]).await;
    let names: Vec<_> =
        file_names.iter().map(|(chain, key)| pair_name(volume.join(chain), volume.join(key))).collect();
    on_connection(&agent.socket.clone(), async |client| {
        let mut streams = Vec::new();
        for name in &names {
            streams.push(Stream::open(&client, &[name]).await.unwrap());
        }
        for stream in &mut streams {
            let response = stream.next().await.unwrap();
            stream.accept(&response).await;
        }
        for number in 1..=3 {
            let next = generation(directory.path(), number);
            swap(&next);
            for stream in &mut streams {
                let response = stream.next().await.unwrap();
                let [secret] = secrets(&response).try_into().unwrap();
                assert_eq!(content(secret), (text(&next.chain), Some(text(&next.key))));
                stream.accept(&response).await;
            }
        }
        assert!(streams[0].is_quiet(QUIET).await);
    })
    .await;
    let (_, metrics) = agent.status("/metrics").await;
    let pushes = metrics.lines().filter(|line| line.starts_with("attache_pushes_total{name=\"file-cert:"));
    let pushes: Vec<_> = pushes.map(|line| line.rsplit_once(' ').unwrap().1).collect();
    assert_eq!(pushes, ["4"; NAMES], "the first one, and one for each swap");
}

/// Fetches each of `names` in a call of its own, all at once, with a deadline; returns the errors by name.
async fn refused(client: &Client, names: impl IntoIterator<Item = &str>) -> Vec<(String, Status)> {
    let mut calls = JoinSet::new();
    for name in names {
        let (mut client, name) = (client.clone(), name.to_owned());
        calls.spawn(async move {
            let mut request = tonic::Request::new(request(&[&name]));
            // Before the deadline the agent replies with the reason, instead of waiting longer.
            request.set_timeout(Duration::from_secs(2));
            let error = client.fetch_secrets(request).await.expect_err(&name);
            assert!(matches!(error.code(), Code::NotFound | Code::Unavailable), "{error:?}");
            (name, error)
        });
    }
    timeout(PATIENCE, calls.join_all()).await.expect("no answer comes")
}

#[tokio::test]
async fn only_what_parses_leaves_the_agent_and_nothing_else_shows() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mounted = Mounted::new(&path("ca"), "web");
    let mut agent = agent(directory.path(), &[]).await;
    const SECRET: &str = "hunter2+Passw0rd";
    use base64::Engine as _;
    let base64 = base64::engine::general_purpose::STANDARD.encode(SECRET.repeat(9));
    let key_text = text(&mounted.key);
    let key_line = key_text.lines().nth(1).unwrap();
    let contents = [
        ("shadow", format!("root:$6${SECRET}:19000:0:99999:7:::\n{SECRET}\n")),
        ("label", format!("-----BEGIN {SECRET}-----\n{base64}\n-----END {SECRET}-----\n")),
        ("begin", format!("-----BEGIN {SECRET}\n{SECRET}\n")),
        ("no-end", format!("-----BEGIN CERTIFICATE-----\n{base64}\n")),
        ("other-end", format!("-----BEGIN CERTIFICATE-----\n{base64}\n-----END {SECRET}-----\n")),
        ("no-base64", format!("-----BEGIN CERTIFICATE-----\n{SECRET}!\n-----END CERTIFICATE-----\n")),
        ("no-der", format!("-----BEGIN CERTIFICATE-----\n{base64}\n-----END CERTIFICATE-----\n")),
        ("base64", base64.clone()),
        ("key.pem", key_text.clone()),
        ("empty", String::new()),
    ];
    let mut names = Vec::new();
    for (file, content) in &contents {
        std::fs::write(path(file), content).unwrap();
        names.push(roots_name(path(file)));
        names.push(pair_name(path(file), path("key.pem")));
    }
    std::fs::write(path("chain.pem"), &mounted.chain).unwrap();
    for (file, _) in &contents[..8] {
        names.push(pair_name(path("chain.pem"), path(file)));
    }
    rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    symlink("loop", path("loop")).unwrap();
    std::fs::File::create(path("sparse")).unwrap().set_len(10 << 30).unwrap();
    let odd: [PathBuf; 12] = [
        path("fifo"),
        path("loop"),
        path("sparse"),
        path(""),
        path("missing"),
        path("shadow/below"),
        "/dev/zero".into(),
        "/dev/tty".into(),
        "/dev/stdin".into(),
        "/proc/self/environ".into(),
        "/proc/self/mem".into(),
        format!("/{}", "d/".repeat(5_000)).into(),
    ];
    for odd in &odd {
        names.push(roots_name(odd));
        names.push(pair_name(odd, path("key.pem")));
        names.push(pair_name(path("chain.pem"), odd));
    }
    names.push("file-root:/etc/\u{1b}[31m\nforged".to_owned());
    names.push("file-cert:/etc/a\0~/etc/b".to_owned());
    let names = strs(&names);

    on_connection(&agent.socket.clone(), async |client| {
        let mut errors = String::new();
        for (name, error) in refused(&client, names.iter().copied()).await {
            assert!(
                error.message().starts_with("no secret ") && error.message().len() > 40,
                "{name}: {error:?}"
            );
            errors = errors + error.message() + "\n";
        }
        // All at once, and one good name.
        let mut stream = Stream::open(&client, &[&names[..], &["default"]].concat()).await.unwrap();
        let response = stream.next().await.unwrap();
        let served: Vec<_> = secrets(&response).into_iter().map(|secret| secret.name).collect();
        assert_eq!(served, ["default"]);
        // The last of them has been read.
        let count = names.len() - 2;
        agent.wait_metric("attache_secret_failing{name=\"file-root:/dev/tty\"}", 1).await;
        assert!(stream.is_quiet(QUIET).await);
        let (_, metrics) = agent.status("/metrics").await;
        let failing = metrics
            .lines()
            .filter(|line| line.starts_with("attache_secret_failing{name=\"file-") && line.ends_with(" 1"));
        let too_long = 3;
        assert_eq!(failing.count(), count - too_long);
        let log = agent.process.log();
        for (where_to, text) in [("errors", &errors), ("metrics", &metrics), ("log", &log)] {
            for hidden in [SECRET, &base64[..40], key_line] {
                assert!(!text.contains(hidden), "{hidden} is in the {where_to}:\n{text}");
            }
            assert!(!text.contains('\u{1b}') && !text.contains("\nforged"), "{where_to}");
        }
        assert_eq!(agent.status("/readyz").await.0, 200);
        let longest = log.lines().map(str::len).max().unwrap();
        assert!(longest < 3_000, "a line of {longest} bytes:\n{log}");
    })
    .await;
}

#[tokio::test]
async fn text_around_certificates_is_not_served_with_them() {
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::new(&directory.path().join("ca"), "web");
    let all = directory.path().join("all.pem");
    let parts = [b"a password\n".as_slice(), &mounted.key, &mounted.chain, b"another password\n"];
    std::fs::write(&all, parts.concat()).unwrap();
    let agent = agent(directory.path(), &[]).await;
    on_connection(&agent.socket, async |client| {
        // The chain's certificates, sorted, and nothing else.
        let bundle = certificates(&fetch(&client, &[&roots_name(&all)]).await.unwrap());
        let mut ders = pem::certificates(&mounted.chain).unwrap();
        ders.sort_unstable_by(|one, other| one.as_ref().cmp(other.as_ref()));
        assert_eq!(bundle.as_bytes(), pem::of_certificates(&ders));
        // One file may hold both halves of a key pair.
        let [pair] = secrets(&fetch(&client, &[&pair_name(&all, &all)]).await.unwrap()).try_into().unwrap();
        assert_eq!(content(pair), (text(&mounted.chain), Some(text(&mounted.key))));
    })
    .await;
}

#[tokio::test]
async fn without_a_prefix_only_the_usual_directories_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (own, other) = (Mounted::new(&path("ca"), "web"), Mounted::new(&path("other-ca"), "web"));
    own.write(&path("certs"));
    other.write(&path("elsewhere"));
    let (certs, elsewhere) = (path("certs"), path("elsewhere"));
    let run = |socket: &Path, more: &[&str]| {
        let fixed = ["run", "--ca", "none", "--status-address", "none", "--socket", socket.to_str().unwrap()];
        let certs = ["--cert-dir", certs.to_str().unwrap()];
        Process::start(attache(&[&fixed[..], &certs, more].concat()))
    };
    let outside = roots_name(elsewhere.join("root-cert.pem"));
    let socket = path("closed.sock");
    let mut closed = run(&socket, &[]);
    closed.wait_log(" ready ").await;
    on_connection(&socket, async |client| {
        fetch(&client, &[&roots_name(certs.join("root-cert.pem"))]).await.unwrap();
        fetch(&client, &[&pair_name(certs.join("cert-chain.pem"), certs.join("key.pem"))]).await.unwrap();
        for name in [&outside, &roots_name("/etc/certs/../../etc/hosts"), &roots_name("/etc/certs-too/a")] {
            let error = fetch(&client, &[name]).await.unwrap_err();
            assert_eq!(error.code(), Code::NotFound, "{name}: {error:?}");
            assert!(error.message().contains("start the agent with --file-prefix DIR"), "{name}: {error:?}");
        }
        for usual in ["/etc/certs", "/etc/istio", "/var/run/secrets", "/run/secrets", "/etc/ssl/certs"] {
            let name = roots_name(format!("{usual}/attache-no-such-file.pem"));
            wait_for("the file is looked for", async || {
                let error = fetch(&client, &[&name]).await.unwrap_err();
                error.message().contains("does not exist").then_some(())
            })
            .await;
        }
        let _stream = Stream::open(&client, &[&outside]).await.unwrap();
        let (_, line) = closed.wait_log("resource names refused").await;
        assert!(line.contains("--file-prefix DIR"), "{line}");
    })
    .await;
    // Those that are given replace the usual ones.
    let socket = path("open.sock");
    let mut open = run(&socket, &["--file-prefix", elsewhere.to_str().unwrap()]);
    open.wait_log(" ready ").await;
    on_connection(&socket, async |client| {
        fetch(&client, &[&outside]).await.unwrap();
        let error = fetch(&client, &[&roots_name(certs.join("root-cert.pem"))]).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error:?}");
    })
    .await;
}

#[tokio::test]
async fn a_prefix_exposes_nothing_outside_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let inside = Mounted::new(&path("ca-inside"), "web");
    let outside = Mounted::new(&path("ca-outside"), "web");
    swap(&path("allowed"), inside.files());
    outside.write(&path("elsewhere"));
    inside.write(&path("allowed-too"));
    symlink("allowed", path("prefix")).unwrap();
    symlink("../elsewhere/root-cert.pem", path("allowed/escape.pem")).unwrap();
    symlink("../elsewhere", path("allowed/escape")).unwrap();
    symlink("allowed", path("way-in")).unwrap();
    // The prefix is itself a link, as mounts often are.
    let mut agent = agent(directory.path(), &["--file-prefix", path("prefix").to_str().unwrap()]).await;
    on_connection(&agent.socket.clone(), async |client| {
        for name in [
            roots_name(path("allowed/root-cert.pem")),
            roots_name(path("prefix/root-cert.pem")),
            roots_name("allowed/..data/root-cert.pem"),
            roots_name("./allowed//root-cert.pem"),
        ] {
            let response = fetch(&client, &[&name]).await.unwrap();
            assert_eq!(certificates(&response).as_bytes(), inside.root, "{name}");
        }
        let (chain, key) = (path("allowed/cert-chain.pem"), path("allowed/key.pem"));
        assert!(fetch(&client, &[&pair_name(&chain, &key)]).await.is_ok());
        let forbidden = [
            roots_name(path("elsewhere/root-cert.pem")),
            roots_name(path("elsewhere/missing")),
            roots_name(path("nowhere/missing")),
            roots_name(path("allowed/escape.pem")),
            roots_name(path("allowed/escape/root-cert.pem")),
            roots_name(path("allowed/../elsewhere/root-cert.pem")),
            // They lead into it, but their text does not say so.
            roots_name(path("way-in/root-cert.pem")),
            roots_name(path("elsewhere/../allowed/root-cert.pem")),
            roots_name("elsewhere/root-cert.pem"),
            roots_name(path("allowed-too/root-cert.pem")),
            roots_name("/proc/self/environ"),
            pair_name(path("elsewhere/cert-chain.pem"), &key),
            pair_name(&chain, path("elsewhere/key.pem")),
        ];
        for (name, error) in refused(&client, forbidden.iter().map(String::as_str)).await {
            let is_told = error.message().contains("outside the directories that --file-prefix allows");
            assert!(is_told, "{name}: {error:?}");
        }
        // A link that moves between inside and outside while it is read.
        let (link, staged) = (path("allowed/restless.pem"), path("allowed/staged"));
        let turn = {
            let link = link.clone();
            move |target: &str| {
                symlink(target, &staged).unwrap();
                std::fs::rename(&staged, &link).unwrap();
            }
        };
        turn("root-cert.pem");
        let name = roots_name(&link);
        let mut stream = Stream::open(&client, &[&name]).await.unwrap();
        let response = stream.next().await.unwrap();
        assert_eq!(certificates(&response).as_bytes(), inside.root);
        stream.accept(&response).await;
        let targets = ["../elsewhere/root-cert.pem", "root-cert.pem"];
        let until = Instant::now() + Duration::from_secs(2);
        let turning = tokio::spawn({
            let turn = turn.clone();
            async move {
                let mut turns = 0;
                while Instant::now() < until {
                    turn(targets[turns % 2]);
                    turns += 1;
                    // The rate of the attack.
                    tokio::time::sleep(Duration::from_micros(300)).await;
                }
                turns
            }
        });
        let mut reads = 0;
        while Instant::now() < until {
            // A new name each time: names share what was read, and nothing may come with it.
            reads += 1;
            let name = roots_name(path(&format!("allowed{}/restless.pem", "/.".repeat(reads))));
            let mut request = tonic::Request::new(request(&[&name]));
            request.set_timeout(Duration::from_millis(120));
            match client.clone().fetch_secrets(request).await {
                Ok(response) => assert_eq!(certificates(response.get_ref()).as_bytes(), inside.root),
                Err(error) => assert!(error.message().starts_with("no secret "), "{error:?}"),
            }
        }
        let turns = turning.await.unwrap();
        assert!(turns > 100 && reads > 10, "{turns} turns, {reads} reads");
        // The content from inside is still served, and followed when it returns.
        turn(targets[1]);
        // Nothing is sent that was sent before.
        assert!(stream.is_quiet(QUIET).await);
        let next = Mounted::new(&path("ca-next"), "web");
        swap(&path("allowed"), next.files());
        assert_eq!(certificates(&stream.next().await.unwrap()).as_bytes(), next.root);
    })
    .await;
    assert!(
        agent.metric("attache_source_failures_total{source=\"files\",reason=\"unreadable\"}").await >= 2.0
    );
    assert!(agent.metric("attache_refusals_total{reason=\"forbidden\"}").await > 8.0);
}

#[tokio::test]
async fn names_without_a_file_leave_nothing_behind() {
    const STREAMS: usize = 5;
    const NAMES: usize = 400;
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path(), &[]).await;
    let mut memory = Vec::new();
    for wave in 1..=20 {
        on_connection(&agent.socket.clone(), async |client| {
            let mut streams = Vec::new();
            for stream in 0..STREAMS {
                let name = |index| format!("file-root:/nowhere/{wave}/{stream}/{index}");
                let names: Vec<_> = ["default".to_owned()].into_iter().chain((0..NAMES).map(name)).collect();
                let mut stream = Stream::open(&client, &strs(&names)).await.unwrap();
                assert_eq!(secrets(&stream.next().await.unwrap()).len(), 1);
                streams.push(stream);
            }
            let missing = "attache_source_failures_total{source=\"files\",reason=\"missing\"}";
            agent.wait_metric(missing, wave * STREAMS * NAMES).await;
            assert_eq!(agent.status("/readyz").await.0, 200);
        })
        .await;
        agent.wait_metric("attache_streams{name=\"default\"}", 0).await;
        wait_for("the names are gone from the metrics", async || {
            let (_, metrics) = agent.status("/metrics").await;
            (!metrics.contains("file-root")).then_some(())
        })
        .await;
        memory.push(agent.memory());
    }
    // The allocator takes some waves to have what each needs. Of the 20,000 names since then, each takes 200 bytes at least.
    assert!(memory[19] < memory[9] + 1000, "kB after each wave: {memory:?}");
}

#[tokio::test]
async fn certificates_from_before_1970_harm_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let root = |name: &str, from: i32, until: i32| {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.not_before = rcgen::date_time_ymd(from, 1, 1);
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        let path = directory.path().join(name);
        std::fs::write(&path, pem::of_certificates([params.self_signed(&key).unwrap().der()])).unwrap();
        roots_name(path)
    };
    let (good, ended) = (root("good", 1955, 9999), root("ended", 1950, 1965));
    let agent = agent(directory.path(), &[]).await;
    let socket = agent.socket.clone();
    on_connection(&socket, async |client| {
        let mut stream = Stream::open(&client, &[&good]).await.unwrap();
        stream.next().await.unwrap();
        let error = fetch(&client, &[&ended]).await.unwrap_err();
        assert!(error.message().contains("1970-01-01"), "{error}");
        let status = output(&["status", "--output", "json", "--socket", socket.to_str().unwrap()]).await;
        let report: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        let secrets = report["secrets"].as_array().unwrap();
        let served = secrets.iter().find(|secret| secret["name"] == good.as_str()).unwrap();
        assert_eq!(served["trust_bundle"]["roots"][0]["not_before"], "1970-01-01T00:00:00.000Z");
    })
    .await;
}
