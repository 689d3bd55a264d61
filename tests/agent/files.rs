//! Mounted files, through the built agent: they take precedence over a CA, and their changes are pushed.

use crate::support::files::{Mounted, spiffe, swap};
use crate::support::process::{Agent, output};
use crate::support::sds::{Stream, certificates, on_connection, served_serial};
use crate::support::wait::wait_for;

#[tokio::test]
async fn every_kubelet_swap_is_pushed() {
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().join("certs");
    let ca = directory.path().join("ca");
    swap(&volume, Mounted::new(&ca, "web").files());
    // No provider is configured: a key pair in the directory is enough.
    let agent = Agent::ready(directory.path(), "agent", &["--cert-dir", volume.to_str().unwrap()]).await;
    on_connection(&agent.socket, async |client| {
        let mut pairs = Stream::open(&client, &["default"]).await.unwrap();
        let mut roots = Stream::open(&client, &["ROOTCA"]).await.unwrap();
        let response = roots.next().await.unwrap();
        roots.accept(&response).await;
        let first = pairs.next().await.unwrap();
        pairs.accept(&first).await;
        for generation in 1..=5 {
            let mounted = Mounted::new(&ca, "web");
            swap(&volume, mounted.files());
            let pushed = pairs.next().await.unwrap();
            assert_eq!(certificates(&pushed).as_bytes(), mounted.chain, "generation {generation}");
            pairs.accept(&pushed).await;
        }
        // The roots are the same bytes in every generation.
        assert!(roots.is_quiet(std::time::Duration::from_millis(200)).await);
    })
    .await;
}

#[tokio::test]
async fn a_mismatched_pair_is_not_published_until_it_is_repaired() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("certs");
    let ca = directory.path().join("ca");
    let good = Mounted::new(&ca, "web");
    good.write(&dir);
    let mut agent = Agent::ready(directory.path(), "agent", &["--cert-dir", dir.to_str().unwrap()]).await;
    let next = Mounted::new(&ca, "web");
    std::fs::write(dir.join("cert-chain.pem"), &next.chain).unwrap();
    let (_, line) = agent.process.wait_log("mounted files are not used").await;
    assert!(line.contains("the private key does not match the certificate of spiffe://"), "{line}");
    assert!(line.contains("the two are of different renewals; replace both files together"), "{line}");
    assert!(agent.metric("attache_source_failures_total{source=\"files\",reason=\"mismatch\"}").await >= 1.0);
    assert_eq!(agent.status("/readyz").await.0, 200, "the served certificate is still good");
    on_connection(&agent.socket, async |client| {
        let mut pairs = Stream::open(&client, &["default"]).await.unwrap();
        let held = pairs.next().await.unwrap();
        assert_eq!(certificates(&held).as_bytes(), good.chain);
        pairs.accept(&held).await;
        std::fs::write(dir.join("key.pem"), &next.key).unwrap();
        assert_eq!(certificates(&pairs.next().await.unwrap()).as_bytes(), next.chain);
    })
    .await;
}

#[tokio::test]
async fn files_that_become_what_is_served_already_are_logged_as_usable_again() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("certs");
    let good = Mounted::new(&directory.path().join("ca"), "web");
    good.write(&dir);
    let mut agent = Agent::ready(directory.path(), "agent", &["--cert-dir", dir.to_str().unwrap()]).await;
    let socket = agent.socket.to_str().unwrap().to_owned();
    std::fs::write(dir.join("cert-chain.pem"), "damaged").unwrap();
    agent.process.wait_log("mounted files are not used").await;
    good.write(&dir);
    let (_, line) = agent.process.wait_log("files usable again").await;
    assert!(line.contains(" INFO ") && line.contains("name=\"default\""), "{line}");
    let status = String::from_utf8(output(&["status", "--socket", &socket]).await.stdout).unwrap();
    assert!(status.contains("default: ok") && !status.contains("last error"), "{status}");
    // The same after they were removed.
    std::fs::remove_file(dir.join("root-cert.pem")).unwrap();
    agent.process.wait_log("the files were removed").await;
    good.write(&dir);
    let (_, line) = agent.process.wait_log_times("files usable again", 2).await;
    assert!(line.contains("name=\"ROOTCA\""), "{line}");
    assert_eq!(agent.process.count("secret served from files"), 2, "{}", agent.process.log());
}

#[tokio::test]
async fn a_generation_is_taken_whole() {
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().join("certs");
    let [old_ca, new_ca] = ["old-ca", "new-ca"].map(|name| directory.path().join(name));
    let before = Mounted::new(&old_ca, "web");
    swap(&volume, before.files());
    let mut agent = Agent::ready(directory.path(), "agent", &["--cert-dir", volume.to_str().unwrap()]).await;
    on_connection(&agent.socket.clone(), async |client| {
        let mut roots = Stream::open(&client, &["ROOTCA"]).await.unwrap();
        let response = roots.next().await.unwrap();
        assert_eq!(certificates(&response).as_bytes(), before.root);
        roots.accept(&response).await;

        // The pair of the next generation is unusable, and nothing that is served chains to its roots.
        let expired = Mounted::expired(&new_ca, "web");
        swap(&volume, expired.files());
        let (_, line) = agent.process.wait_log("held back until the key pair beside it can be used").await;
        assert!(line.contains("name=\"ROOTCA\"") && line.contains("root-cert.pem"), "{line}");
        agent.wait_metric("attache_secret_failing{name=\"ROOTCA\"}", 1).await;
        agent.wait_metric("attache_source_failures_total{source=\"files\",reason=\"held_back\"}", 1).await;
        assert_eq!(agent.status("/readyz").await.0, 200, "the served secrets are still good");
        let socket = agent.socket.to_str().unwrap();
        let shown = output(&["status", "--socket", socket]).await;
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("held back until the key pair beside it can be used"), "{shown}");

        // Roots that the served certificate still reaches are published without a pair.
        let both = [before.root.as_slice(), &expired.root].concat();
        let files =
            [("cert-chain.pem", &*expired.chain), ("key.pem", &*expired.key), ("root-cert.pem", &*both)];
        swap(&volume, files);
        let pushed = roots.next().await.unwrap();
        assert_eq!(certificates(&pushed).matches("BEGIN CERTIFICATE").count(), 2);
        roots.accept(&pushed).await;

        // The repair brings the whole generation.
        let repaired = Mounted::new(&new_ca, "web");
        swap(&volume, repaired.files());
        let pushed = roots.next().await.unwrap();
        assert_eq!(certificates(&pushed).as_bytes(), repaired.root);
        roots.accept(&pushed).await;
        agent.wait_metric("attache_secret_failing{name=\"ROOTCA\"}", 0).await;

        // The other half: the pair waits for roots that can be read.
        let next = Mounted::new(&old_ca, "web");
        let files =
            [("cert-chain.pem", &*next.chain), ("key.pem", &*next.key), ("root-cert.pem", b"cut off")];
        swap(&volume, files);
        let (_, line) = agent.process.wait_log("held back until the roots beside it can be used").await;
        assert!(line.contains("name=\"default\""), "{line}");
        assert_eq!(served_serial(&agent.socket).await, repaired.serial());
        swap(&volume, next.files());
        let pushed = roots.next().await.unwrap();
        assert_eq!(certificates(&pushed).as_bytes(), next.root);
        wait_for("the pair is served", async || {
            (served_serial(&agent.socket).await == next.serial()).then_some(())
        })
        .await;
    })
    .await;
    assert_eq!(agent.process.count("held back until the key pair"), 1);
}

#[tokio::test]
async fn the_files_of_a_tls_secret_and_a_credential_bundle_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca");
    let before = Mounted::new(&ca, "web");
    let bundle = [before.key.as_slice(), &before.chain].concat();
    let tls_secret = [("tls.crt", &*before.chain), ("tls.key", &*before.key), ("ca.crt", &*before.root)];
    let bundled = [("credentials.pem", &*bundle), ("trust.pem", &*before.root)];
    let chosen = ["--cert-file", "credentials.pem", "--root-file", "trust.pem"];
    let cases = [("tls-secret", &tls_secret[..], &[][..]), ("bundle", &bundled, &chosen)];
    for (name, files, options) in cases {
        let volume = directory.path().join(name).join("certs");
        std::fs::create_dir_all(volume.parent().unwrap()).unwrap();
        swap(&volume, files.iter().copied());
        // No provider is configured: a key pair in the directory is enough.
        let options = [&["--cert-dir", volume.to_str().unwrap()], options].concat();
        let agent = Agent::ready(directory.path(), name, &options).await;
        on_connection(&agent.socket, async |client| {
            let mut pairs = Stream::open(&client, &["default"]).await.unwrap();
            let first = pairs.next().await.unwrap();
            assert_eq!(certificates(&first).as_bytes(), before.chain, "{name}");
            pairs.accept(&first).await;
            let mut roots = Stream::open(&client, &["ROOTCA"]).await.unwrap();
            assert_eq!(certificates(&roots.next().await.unwrap()).as_bytes(), before.root, "{name}");
            let next = Mounted::new(&ca, "web");
            let bundle = [next.key.as_slice(), &next.chain].concat();
            let renewed = |file: &str| match file {
                "tls.crt" => next.chain.clone(),
                "tls.key" => next.key.clone(),
                "credentials.pem" => bundle.clone(),
                _ => next.root.clone(),
            };
            let renewed: Vec<_> = files.iter().map(|(file, _)| (*file, renewed(file))).collect();
            swap(&volume, renewed.iter().map(|(file, content)| (*file, content.as_slice())));
            assert_eq!(certificates(&pairs.next().await.unwrap()).as_bytes(), next.chain, "{name}");
        })
        .await;
    }
}

#[tokio::test]
async fn files_that_appear_later_take_precedence_over_the_ca() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("made/later");
    let ca = directory.path().join("ca");
    let options = [
        ["--ca", "embedded"],
        ["--ca-dir", ca.to_str().unwrap()],
        ["--cert-dir", dir.to_str().unwrap()],
        ["--spiffe-id", "spiffe://cluster.local/ns/default/sa/from-ca"],
    ];
    let mut agent = Agent::ready(directory.path(), "agent", &options.concat()).await;
    let mounted = Mounted::new(&ca, "from-files");
    on_connection(&agent.socket.clone(), async |client| {
        let mut pairs = Stream::open(&client, &["default"]).await.unwrap();
        let response = pairs.next().await.unwrap();
        pairs.accept(&response).await;
        mounted.write(&dir);
        let response = pairs.next().await.unwrap();
        assert_eq!(certificates(&response).as_bytes(), mounted.chain);
        pairs.accept(&response).await;
        // The files are deleted: their last content is still served.
        std::fs::remove_dir_all(&dir).unwrap();
        agent.process.wait_log("the files were removed").await;
        assert!(pairs.is_quiet(std::time::Duration::from_millis(200)).await, "{}", agent.process.log());
    })
    .await;
    let socket = agent.socket.to_str().unwrap();
    let shown = output(&["get", "--socket", socket, "default"]).await;
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains(&spiffe("from-files")), "{shown}");
}
