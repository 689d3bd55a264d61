//! The state across restarts.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use zeroize::Zeroizing;

use super::super::state::STATE_FILE;
use super::*;

fn with_state(office: &Office) -> IssuerSettings {
    IssuerSettings { state: Some(StateDir::new(office.dir.path().join("state"))), ..settings() }
}

fn file(office: &Office) -> std::path::PathBuf {
    office.dir.path().join("state").join(STATE_FILE)
}

/// An office with a certificate that is issued and saved.
async fn saved() -> Office {
    let (mut office, ca) = Office::new();
    office.run(ca, with_state(&office));
    let call = office.call().await;
    office.issue(call).await;
    wait_for(&file(&office)).await;
    office
}

async fn wait_for(file: &std::path::Path) {
    while !file.exists() {
        tokio::time::sleep(SECOND).await;
    }
}

/// The next start: a cache and an issuer of its own, with the same state directory and clock.
async fn restart(
    office: &Office,
    name: &str,
    settings: IssuerSettings,
) -> (Cache, mpsc::UnboundedReceiver<Call>) {
    let (sender, calls) = mpsc::unbounded_channel();
    let (cache, clock) = (Cache::with_workload("").0, office.clock.clone());
    let cas = Failover::new(vec![Member::new(name, ChannelCa(sender))]);
    let (metrics, queue) = (Metrics::default(), IssuanceQueue::default());
    let context = IssuerContext { clock, metrics, queue, disk: Disk::default() };
    let mut issuer = Issuer::new(cas, settings, &cache, Workload::FIRST, context);
    issuer.restore().await;
    tokio::spawn(issuer.run());
    (cache, calls)
}

fn good(cache: &Cache, key: &Key) -> Option<Arc<Good>> {
    cache.watch(key).unwrap().borrow().good.clone()
}

#[tokio::test(start_paused = true)]
async fn a_saved_certificate_is_served_at_once_and_renewed_when_it_would_have_been() {
    let office = saved().await;
    tokio::time::sleep(HOUR).await;
    let (cache, mut calls) = restart(&office, "channel", with_state(&office)).await;
    let before = office.entry().good.unwrap();
    let served = good(&cache, &KEY_PAIR).unwrap();
    assert_eq!(served.resource.version, before.resource.version);
    let rounded = before.received.duration_since(served.received).unwrap_or_default();
    assert!(rounded < Duration::from_millis(2), "{rounded:?}");
    assert_eq!(
        good(&cache, &ROOTS).unwrap().resource.version,
        office.entry_of(&ROOTS).good.unwrap().resource.version
    );
    calls.recv().await.unwrap();
    let since = office.clock.now().duration_since(before.received).unwrap();
    assert!((11 * HOUR..13 * HOUR).contains(&since), "{since:?}");
}

#[tokio::test(start_paused = true)]
async fn only_the_agents_user_can_read_the_state_and_a_crash_leaves_the_old_one() {
    let office = saved().await;
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let file = file(&office);
    assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
    // The next write removes what a crash leaves.
    let left = file.with_extension("state.new");
    fs::write(&left, "half").unwrap();
    fs::set_permissions(&left, fs::Permissions::from_mode(0o644)).unwrap();
    let dir = StateDir::new(file.parent().unwrap());
    assert!(dir.read().unwrap().is_some());
    dir.write(|| Some(Zeroizing::new(b"{\"version\":2}\n".to_vec()))).unwrap();
    assert!(!left.exists());
    assert_eq!(mode(&file), 0o600);
    assert!(dir.read().unwrap_err().to_string().contains("format 2"));
}

#[tokio::test(start_paused = true)]
async fn a_damaged_or_foreign_state_is_not_served() {
    let office = saved().await;
    let whole = fs::read_to_string(file(&office)).unwrap();
    let other_key = SigningKey::generate(KeyType::EcdsaP256).unwrap().to_private_key();
    let other_key = String::from_utf8(other_key.to_pem().to_vec()).unwrap();
    let head = whole.lines().next().unwrap();
    let cases = [
        String::new(),
        "\n".to_owned(),
        head.to_owned(),
        format!("{head}\n"),
        whole.replace("\"version\":1", "\"version\":2"),
        whole.replace("\"received\"", "\"then\""),
        whole.replace("\"provider\":\"channel\"", "\"provider\":\"vault\""),
        whole.replace("\"lifetime_seconds\":", "\"lifetime_seconds\":99999999999999"),
        format!("{head}\n{other_key}"),
        whole[..whole.len() - 40].to_owned(),
        "x".repeat(2 << 20),
    ];
    for text in &cases {
        assert_ne!(*text, whole);
        fs::write(file(&office), text).unwrap();
        let (cache, mut calls) = restart(&office, "channel", with_state(&office)).await;
        let shown: String = text.chars().take(200).collect();
        assert!(good(&cache, &KEY_PAIR).is_none() && good(&cache, &ROOTS).is_none(), "{shown}");
        calls.recv().await.unwrap();
    }
    fs::write(file(&office), &whole).unwrap();
    let identity = IdentitySource::Fixed("spiffe://cluster.local/ns/default/sa/other".parse().unwrap());
    let other_identity = IssuerSettings { identity, ..with_state(&office) };
    for (name, settings) in [("elsewhere", with_state(&office)), ("channel", other_identity)] {
        let (cache, mut calls) = restart(&office, name, settings).await;
        assert!(good(&cache, &KEY_PAIR).is_none() && good(&cache, &ROOTS).is_none(), "{name}");
        calls.recv().await.unwrap();
    }
    // Another key type is requested at once; until it comes the old certificate is served.
    let other_kind = IssuerSettings { key_type: KeyType::EcdsaP384, ..with_state(&office) };
    let (cache, mut calls) = restart(&office, "channel", other_kind).await;
    assert!(good(&cache, &KEY_PAIR).is_some());
    let asked = Instant::now();
    calls.recv().await.unwrap();
    assert_eq!(asked.elapsed(), Duration::ZERO);
    // Expired.
    tokio::time::sleep(DAY).await;
    let (cache, _calls) = restart(&office, "channel", with_state(&office)).await;
    assert!(good(&cache, &KEY_PAIR).is_none());
}

#[tokio::test(start_paused = true)]
async fn the_time_of_old_roots_continues_across_a_restart() {
    let (mut office, ca) = Office::new();
    office.run(ca, with_state(&office));
    let call = office.call().await;
    office.issue(call).await;
    let new = office.other_ca("new");
    let call = office.call().await;
    let old = office.version();
    call.answer.send(Ok(answer_of(&new, &call.request))).unwrap();
    office.served(|entry| entry.good.as_ref().unwrap().resource.version != old).await;
    tokio::time::sleep(HOUR).await;
    let roots = |cache: &Cache| {
        let Secret::TrustBundle(bundle) = &good(cache, &ROOTS).unwrap().secret else { panic!("no bundle") };
        bundle.roots().len()
    };
    let (cache, _calls) = restart(&office, "channel", with_state(&office)).await;
    assert_eq!(roots(&cache), 2);
    let dropping = IssuerSettings { drops_old_roots: true, ..with_state(&office) };
    let (cache, mut calls) = restart(&office, "channel", dropping).await;
    assert_eq!(roots(&cache), 1);
    // The CA may have stopped naming the roots of its last answer.
    let asked = Instant::now();
    calls.recv().await.unwrap();
    assert_eq!(asked.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_state_directory_that_cannot_be_written_delays_no_certificate() {
    let (mut office, ca) = Office::new();
    let dir = office.dir.path().join("state");
    fs::write(&dir, "a file").unwrap();
    office.run(ca, with_state(&office));
    let call = office.call().await;
    office.issue(call).await;
    let call = office.call().await;
    // The obstacle is removed.
    fs::remove_file(&dir).unwrap();
    office.issue(call).await;
    wait_for(&file(&office)).await;
}

#[test]
fn a_state_directory_without_its_file_is_cleared_too() {
    let dir = tempfile::tempdir().unwrap();
    let state = StateDir::new(dir.path().join("csi-1"));
    state.create().unwrap();
    state.clear().unwrap();
    assert!(!state.path().exists());
    state.clear().unwrap();
}
