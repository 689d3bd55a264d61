//! A real file, in real time where it changes, and in virtual time where only CRLs begin and expire.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::UNIX_EPOCH;

use rustls::pki_types::CertificateDer;
use tempfile::TempDir;

use super::*;
use crate::fs::pending::PendingOperations;
use crate::pki::crl::testing::Authority;
use crate::secret::{KeyPair, Secret, TrustBundle};
use crate::store::{Entry, Origin, Published, Publisher};

/// Not the one of the sidecar: the source assumes none.
const WORKLOAD: Workload = Workload::FIRST;
const DEBOUNCE: Duration = Duration::from_millis(20);
const HOUR: Duration = Duration::from_secs(3600);
/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A root, an intermediate, a file for their CRLs, and a cache.
struct Mount {
    temp: TempDir,
    root: Authority,
    middle: Authority,
    cache: Cache,
    roots: Publisher,
    key_pair: Publisher,
    clock: Clock,
    metrics: Metrics,
}

impl Mount {
    /// With secrets in the cache, and nothing in the file.
    fn new(clock: Clock) -> Self {
        let mount = Self::empty(clock);
        mount.publish(&[&mount.root], &mount.middle);
        mount
    }

    fn empty(clock: Clock) -> Self {
        let cache = Cache::with_workload("").0;
        let publisher = |name| cache.publisher(Key { workload: WORKLOAD, name }, Origin::CA);
        let (roots, key_pair) = (publisher(SecretName::Roots), publisher(SecretName::Workload));
        let root = Authority::root("root");
        let middle = Authority::new("middle", Some(&root), |_| {});
        let (temp, metrics) = (tempfile::tempdir().unwrap(), Metrics::default());
        Self { temp, root, middle, cache, roots, key_pair, clock, metrics }
    }

    /// Publishes as sources do.
    fn publish(&self, roots: &[&Authority], issuer: &Authority) -> Published {
        let pair = issuer.key_pair();
        self.key_pair.announce(&pair, self.clock.now());
        let published = self.publish_roots(roots);
        self.publish_pair(pair);
        published
    }

    fn publish_roots(&self, roots: &[&Authority]) -> Published {
        let roots = roots.iter().map(|root| root.certificate.clone()).collect();
        let bundle = TrustBundle::new(roots).unwrap();
        self.roots.publish(Secret::TrustBundle(bundle), self.clock.now(), None)
    }

    fn publish_pair(&self, pair: KeyPair) {
        self.key_pair.publish(Secret::KeyPair(pair), self.clock.now(), None);
    }

    fn file(&self) -> PathBuf {
        self.temp.path().join("ca-crl.pem")
    }

    fn source(&self) -> CrlSource {
        let file = CrlFile { path: self.file(), is_named: true };
        let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
        CrlSource::new(
            file,
            DEBOUNCE,
            &self.cache,
            WORKLOAD,
            &Watcher::new(PendingOperations::default()),
            clock,
            metrics,
        )
    }

    /// A CRL of each CA, which began an hour ago and expires after `root_for` or `middle_for`.
    fn crls(&self, root_for: Duration, middle_for: Duration, revoked: &[u64]) -> String {
        let now = self.clock.now();
        let crl = |ca: &Authority, left, revoked: &[u64]| ca.crl(now - HOUR, now + left, revoked);
        crl(&self.root, root_for, &[]) + &crl(&self.middle, middle_for, revoked)
    }

    fn good(&self, revoked: &[u64]) -> String {
        self.crls(HOUR, HOUR, revoked)
    }

    /// The roots that are served, and the number of certificates that each of their CRLs revokes.
    fn served(&self) -> (Vec<CertificateDer<'static>>, Vec<usize>) {
        taken_apart(&self.roots.entry())
    }

    async fn until(&self, what: &str, is_reached: impl Fn(&[usize]) -> bool) {
        let mut entries = self.roots.watch();
        let found = entries.wait_for(|entry| is_reached(&taken_apart(entry).1));
        assert!(tokio::time::timeout(PATIENCE, found).await.is_ok(), "{what}: {:?}", self.served().1);
    }

    fn failures(&self, reason: &'static str) -> u64 {
        self.metrics.source_failures.get_or_create(&BySource { source: "crl", reason }).get()
    }
}

fn taken_apart(entry: &Entry) -> (Vec<CertificateDer<'static>>, Vec<usize>) {
    let Some(Secret::TrustBundle(bundle)) = entry.good.as_ref().map(|good| &good.secret) else {
        panic!("no trust bundle: {entry:?}")
    };
    let mut revoked: Vec<_> = bundle.crls().iter().map(|crl| crl.revoked).collect();
    revoked.sort_unstable();
    (bundle.roots().to_vec(), revoked)
}

#[tokio::test]
async fn no_content_of_the_file_keeps_the_roots_from_being_served() {
    let mount = Mount::new(Clock::system());
    let now = mount.clock.now();
    let good = mount.good(&[1, 2, 3]).into_bytes();
    let der = crl::from_pem(&good).unwrap()[0].der().to_vec();
    let foreign = Authority::root("foreign");
    let mut contents = vec![
        Vec::new(),
        b"junk".to_vec(),
        b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n".to_vec(),
        der,
        vec![b'x'; 2 << 20],
        good.repeat(20_000_000 / good.len()),
        mount.root.certificate.to_vec(),
        foreign.crl(now - HOUR, now + HOUR, &[]).into_bytes(),
        foreign.crl(now - 2 * HOUR, now - HOUR, &[]).into_bytes(),
        mount.crls(HOUR, Duration::ZERO, &[]).into_bytes(),
    ];
    contents.extend((0..good.len()).step_by(7).map(|length| good[..length].to_vec()));
    let mut random = fastrand::Rng::with_seed(14);
    contents.extend((0..300).map(|_| {
        let mut bytes = good.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..bytes.len());
            bytes[at] = random.u8(b'+'..=b'z');
        }
        bytes
    }));
    let complete: Vec<_> = mount.served().0;
    for content in contents {
        fs::write(mount.file(), &content).unwrap();
        mount.source().amend_once();
        let shown = || String::from_utf8_lossy(&content[..content.len().min(2000)]).into_owned();
        let (roots, crls) = mount.served();
        assert_eq!(roots, complete, "{}", shown());
        assert!(crls.is_empty() || crls == [0, 3], "{}", shown());
        assert_eq!(mount.roots.entry().failure(), None);
        assert_ne!(mount.publish(&[&mount.root], &mount.middle), Published::Outranked);
        // Nothing remains for the next content.
        mount.cache.set_crls(&mount.source().roots, &[], now);
    }
    assert!(["unreadable", "not_parsed", "not_covered"].iter().all(|reason| mount.failures(reason) > 0));
}

#[tokio::test]
async fn the_last_good_crls_stay_when_the_file_turns_bad_or_is_removed() {
    let mount = Mount::new(Clock::system());
    let mut source = mount.source();
    source.amend_once();
    assert_eq!(mount.served().1, [0; 0], "the file is missing");
    fs::write(mount.file(), mount.good(&[1])).unwrap();
    source.amend_once();
    assert_eq!(mount.served().1, [0, 1]);
    fs::write(mount.file(), &mount.good(&[1, 2])[..500]).unwrap();
    source.amend_once();
    source.amend_once();
    assert_eq!((mount.served().1, mount.failures("not_parsed")), (vec![0, 1], 1));
    fs::remove_file(mount.file()).unwrap();
    source.amend_once();
    assert_eq!(mount.served().1, [0, 1]);
    fs::write(mount.file(), mount.good(&[1, 2])).unwrap();
    source.amend_once();
    assert_eq!(mount.served().1, [0, 2]);
    fs::write(mount.file(), "# none now\n").unwrap();
    source.amend_once();
    assert_eq!(mount.served().1, [0; 0], "an intentionally empty file is a good one");
}

#[tokio::test]
async fn an_overwritten_file_does_not_count_as_empty_meanwhile() {
    let mount = Mount::new(Clock::system());
    fs::write(mount.file(), mount.good(&[1])).unwrap();
    tokio::spawn(mount.source().run());
    mount.until("the CRLs are served", |crls| crls == [0, 1]).await;
    let mut entries = mount.roots.watch();
    entries.mark_unchanged();
    let mut file = fs::File::create(mount.file()).unwrap();
    // Far longer than it takes to notice that it is empty.
    let seen = tokio::time::timeout(10 * DEBOUNCE, entries.changed()).await;
    assert!(seen.is_err(), "the file is open for writing");
    std::io::Write::write_all(&mut file, mount.good(&[1, 2]).as_bytes()).unwrap();
    drop(file);
    mount.until("the CRLs are replaced", |crls| crls == [0, 2]).await;
    drop(fs::File::create(mount.file()).unwrap());
    mount.until("the CRLs are gone", <[usize]>::is_empty).await;
    fs::write(mount.file(), mount.good(&[])).unwrap();
    mount.until("the CRLs are back", |crls| crls == [0, 0]).await;
}

#[tokio::test]
async fn new_roots_are_never_served_with_crls_that_do_not_cover_them() {
    let mount = Mount::new(Clock::system());
    fs::write(mount.file(), mount.good(&[1])).unwrap();
    mount.source().amend_once();
    let another = Authority::root("another");
    // The source does not run here.
    assert_eq!(mount.publish(&[&mount.root, &another], &mount.middle), Published::Changed);
    assert_eq!((mount.served().0.len(), mount.served().1.len()), (2, 0));
    assert_eq!(mount.publish(&[&mount.root], &mount.middle), Published::Changed);
    assert_eq!(mount.served().1, [0, 1]);
    assert_eq!(mount.publish(&[&mount.root], &mount.middle), Published::Same);
}

#[tokio::test]
async fn crls_are_checked_against_the_announced_chain_before_its_roots_are_served() {
    let mount = Mount::empty(Clock::system());
    let now = mount.clock.now();
    let next = Authority::new("next", Some(&mount.root), |_| {});
    fs::write(mount.file(), mount.good(&[1])).unwrap();
    mount.source().amend_once();
    // From here on only the publishers act.
    mount.publish_roots(&[&mount.root]);
    assert_eq!(mount.served().1, [0; 0], "there is no key pair yet");
    let pair = mount.middle.key_pair();
    mount.key_pair.announce(&pair, now);
    assert_eq!(mount.served().1, [0, 1], "it is announced");
    mount.publish_pair(pair);
    assert_eq!(mount.served().1, [0, 1]);

    // A renewal by an intermediate that has no CRL: the roots come first, and are the same or new ones.
    let another = Authority::new("another", None, |params| params.not_after = (now - HOUR).into());
    for roots in [&[&mount.root][..], &[&mount.root, &another]] {
        mount.publish(&[&mount.root], &mount.middle);
        assert_eq!(mount.served().1, [0, 1]);
        let pair = next.key_pair();
        mount.key_pair.announce(&pair, now);
        mount.publish_roots(roots);
        assert_eq!(mount.served().1, [0; 0], "{} roots", roots.len());
        mount.publish_pair(pair);
        assert_eq!(mount.served().1, [0; 0], "{} roots", roots.len());
    }
    mount.publish(&[&mount.root], &mount.middle);
    mount.publish_pair(next.key_pair());
    assert_eq!(mount.served().1, [0; 0], "a pair without new roots counts too");
}

#[tokio::test]
async fn an_outranked_pair_has_no_effect() {
    let mount = Mount::new(Clock::system());
    let now = mount.clock.now();
    fs::write(mount.file(), mount.good(&[1])).unwrap();
    mount.source().amend_once();
    let key = Key { workload: WORKLOAD, name: SecretName::Workload };
    let files = mount.cache.publisher(key, Origin::FILES);
    files.publish(Secret::KeyPair(mount.middle.key_pair()), now, None);
    let next = Authority::new("next", Some(&mount.root), |_| {});
    mount.publish(&[&mount.root], &next);
    assert_eq!(mount.served().1, [0, 1]);
    files.publish(Secret::KeyPair(next.key_pair()), now, None);
    assert_eq!(mount.served().1, [0; 0]);
}

#[tokio::test]
async fn the_same_crls_in_another_order_are_not_published_again() {
    let mount = Mount::new(Clock::system());
    fs::write(mount.file(), mount.good(&[1])).unwrap();
    mount.source().amend_once();
    let mut reader = mount.roots.watch();
    reader.mark_unchanged();
    let reversed: Vec<_> =
        crl::from_pem(&fs::read(mount.file()).unwrap()).unwrap().into_iter().rev().collect();
    fs::write(mount.file(), crl::to_pem(&reversed)).unwrap();
    mount.source().amend_once();
    assert!(!reader.has_changed().unwrap());
}

#[tokio::test]
async fn a_long_file_is_read_at_the_start_and_later() {
    let mount = Mount::new(Clock::system());
    let serials = |count| (0..count).map(|serial| 1 << 40 | serial).collect::<Vec<u64>>();
    fs::write(mount.file(), mount.good(&serials(5000))).unwrap();
    let mut source = mount.source();
    source.amend_once();
    assert_eq!(mount.served().1, [0, 5000]);
    tokio::spawn(source.run());
    fs::write(mount.file(), mount.good(&serials(5001))).unwrap();
    mount.until("the file is followed", |crls| crls == [0, 5001]).await;
}

#[tokio::test]
async fn a_file_that_appears_and_is_swapped_is_followed() {
    let mount = Mount::new(Clock::system());
    tokio::spawn(mount.source().run());
    tokio::task::yield_now().await;
    for generation in 1..=3 {
        let (name, link) = (format!("..{generation}"), mount.temp.path().join("..data_tmp"));
        fs::create_dir(mount.temp.path().join(&name)).unwrap();
        let revoked: Vec<_> = (0..generation).collect();
        fs::write(mount.temp.path().join(&name).join("ca-crl.pem"), mount.good(&revoked)).unwrap();
        symlink(&name, &link).unwrap();
        fs::rename(&link, mount.temp.path().join("..data")).unwrap();
        let _ = symlink("..data/ca-crl.pem", mount.file());
        let expected = usize::try_from(generation).unwrap();
        mount.until("the swap is noticed", |crls| crls == [0, expected]).await;
    }
}

#[tokio::test]
async fn an_intermediate_without_a_crl_removes_all_until_it_has_one() {
    let mount = Mount::new(Clock::system());
    fs::write(mount.file(), mount.good(&[1])).unwrap();
    tokio::spawn(mount.source().run());
    mount.until("the CRLs are served", |crls| crls == [0, 1]).await;
    let next = Authority::new("next", Some(&mount.root), |_| {});
    mount.publish(&[&mount.root], &next);
    mount.until("the CRLs are left out", <[usize]>::is_empty).await;
    let now = mount.clock.now();
    fs::write(mount.file(), mount.good(&[1]) + &next.crl(now - HOUR, now + HOUR, &[7, 8])).unwrap();
    mount.until("the CRLs are back", |crls| crls == [0, 1, 2]).await;
    assert_eq!(mount.failures("not_covered"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_crl_is_removed_before_it_expires_and_its_successor_added_when_it_begins() {
    let mount = Mount::new(Clock::starting_at(UNIX_EPOCH + 1000 * HOUR));
    let now = mount.clock.now();
    let successor = mount.middle.crl(now + 2 * HOUR, now + 5 * HOUR, &[1, 2]);
    fs::write(mount.file(), mount.crls(10 * HOUR, HOUR, &[1]) + &successor).unwrap();
    let mut source = mount.source();
    source.amend_once();
    assert_eq!(mount.served().1, [0, 1]);
    tokio::spawn(source.run());
    let mut entries = mount.roots.watch();
    let (end, begin, last) = (now + HOUR, now + 2 * HOUR, now + 5 * HOUR);
    for (at, expected, is_expiry) in [(end, vec![], true), (begin, vec![0, 2], false), (last, vec![], true)] {
        entries.wait_for(|entry| taken_apart(entry).1 == expected).await.unwrap();
        let seen = mount.clock.now();
        let from = if is_expiry { at - Duration::from_secs(3) } else { at };
        assert!(seen >= from && seen < from + Duration::from_secs(2), "{expected:?} at {seen:?}, not {at:?}");
        assert_eq!(mount.served().0.len(), 1);
    }
    assert_eq!(mount.failures("not_covered"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_root_without_a_crl_keeps_all_out_until_it_expires() {
    let mount = Mount::new(Clock::starting_at(UNIX_EPOCH + 1000 * HOUR));
    let end = mount.clock.now() + HOUR;
    let another = Authority::new("another", None, |params| params.not_after = end.into());
    mount.publish(&[&mount.root, &another], &mount.middle);
    fs::write(mount.file(), mount.crls(10 * HOUR, 10 * HOUR, &[1])).unwrap();
    tokio::spawn(mount.source().run());
    let mut entries = mount.roots.watch();
    entries.wait_for(|entry| taken_apart(entry).1 == [0, 1]).await.unwrap();
    let seen = mount.clock.now();
    assert!(seen >= end && seen < end + Duration::from_secs(2), "at {seen:?}, not {end:?}");
    assert_eq!(mount.failures("not_covered"), 1);
}

#[tokio::test]
async fn crls_that_come_before_the_first_roots_are_in_the_first_bundle() {
    // As at the agent's start: the entries don't exist yet.
    let mount = Mount { cache: Cache::with_workload("").0, ..Mount::empty(Clock::system()) };
    fs::write(mount.file(), mount.good(&[7])).unwrap();
    mount.source().amend_once();
    let publisher = |name| mount.cache.publisher(Key { workload: WORKLOAD, name }, Origin::FILES);
    let mount =
        Mount { roots: publisher(SecretName::Roots), key_pair: publisher(SecretName::Workload), ..mount };
    let mut entries = mount.roots.watch();
    entries.mark_unchanged();
    mount.key_pair.announce(&mount.middle.key_pair(), mount.clock.now());
    assert_eq!(mount.publish_roots(&[&mount.root]), Published::Changed);
    assert_eq!(mount.served().1, [0, 1], "in the first bundle");
}
