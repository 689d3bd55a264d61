use std::collections::HashMap;
use std::time::UNIX_EPOCH;

use super::super::{Cache, Key, NotServed, Origin, Published, Scope, Workload};
use crate::pki::key::{KeyType, SigningKey};
use crate::secret::TrustBundle;
use crate::secret::{NameKind, Secret, SecretName, Version};

const ROOTS: Key = Key { workload: Workload::FIRST, name: SecretName::Roots };

fn bundle() -> Secret {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let root = rcgen::CertificateParams::default().self_signed(&key).unwrap();
    Secret::TrustBundle(TrustBundle::new(vec![root.der().clone()]).unwrap())
}

fn same_bundle(secret: &Secret) -> Secret {
    let Secret::TrustBundle(bundle) = secret else { panic!("not a bundle") };
    Secret::TrustBundle(TrustBundle::new(bundle.roots().to_vec()).unwrap())
}

#[test]
fn a_failure_keeps_the_good_value() {
    let cache = Cache::with_workload("").0;
    let ca = cache.publisher(ROOTS, Origin::CA);
    assert_eq!(ca.publish(bundle(), UNIX_EPOCH, None), Published::Changed);
    ca.fail("the CA is down".to_owned());
    let entry = ca.entry();
    assert!(entry.good.is_some());
    assert_eq!(entry.failure().unwrap(), "the CA is down");
    ca.publish(bundle(), UNIX_EPOCH, None);
    assert!(ca.entry().failure().is_none());
}

#[test]
fn equal_bytes_wake_no_reader() {
    let cache = Cache::with_workload("").0;
    let ca = cache.publisher(ROOTS, Origin::CA);
    let first = bundle();
    let again = same_bundle(&first);
    ca.publish(first, UNIX_EPOCH, None);
    let mut reader = cache.watch(&ROOTS).unwrap();
    reader.mark_unchanged();
    assert_eq!(ca.publish(again, UNIX_EPOCH, None), Published::Same);
    assert!(!reader.has_changed().unwrap());
}

#[test]
fn files_outrank_the_ca_until_they_release_the_entry() {
    let cache = Cache::with_workload("").0;
    let ca = cache.publisher(ROOTS, Origin::CA);
    let files = cache.publisher(ROOTS, Origin::FILES);
    ca.publish(bundle(), UNIX_EPOCH, None);
    assert_eq!(files.publish(bundle(), UNIX_EPOCH, None), Published::Changed);
    assert_eq!(ca.publish(bundle(), UNIX_EPOCH, None), Published::Outranked);
    assert_eq!(ca.entry().good.unwrap().origin, Origin::FILES);
    files.release(None);
    assert_eq!(ca.entry().good.unwrap().origin, Origin::FILES, "the last good value stays");
    assert_eq!(ca.publish(bundle(), UNIX_EPOCH, None), Published::Changed);
}

#[test]
fn a_failure_of_the_ca_does_not_matter_while_files_hold_the_entry() {
    let cache = Cache::with_workload("").0;
    let ca = cache.publisher(ROOTS, Origin::CA);
    let files = cache.publisher(ROOTS, Origin::FILES);
    files.publish(bundle(), UNIX_EPOCH, None);
    ca.fail("the CA is down".to_owned());
    assert_eq!(ca.entry().failure(), None);
    files.fail("one file is missing".to_owned());
    assert_eq!(ca.entry().failure().unwrap(), "one file is missing");
    files.release(None);
    ca.fail("the CA is down".to_owned());
    assert_eq!(ca.entry().failure().unwrap(), "the CA is down");
}

#[test]
fn each_source_has_its_own_failure() {
    let cache = Cache::with_workload("").0;
    let ca = cache.publisher(ROOTS, Origin::CA);
    let files = cache.publisher(ROOTS, Origin::FILES);
    files.fail("the file is bad".to_owned());
    ca.fail("the CA is down".to_owned());
    assert_eq!(ca.entry().failure().unwrap(), "the file is bad; the CA is down");
    ca.publish(bundle(), UNIX_EPOCH, None);
    assert_eq!(ca.entry().failure().unwrap(), "the file is bad", "a CA that recovers mends no file");
    // An absence is over once another source has a value.
    files.publish(bundle(), UNIX_EPOCH, None);
    files.release(Some("the files are gone".to_owned()));
    assert_eq!(ca.entry().failure().unwrap(), "the files are gone");
    ca.publish(bundle(), UNIX_EPOCH, None);
    assert_eq!(ca.entry().failure(), None);
}

#[test]
fn verdicts_count_streams_by_the_version_they_acknowledged() {
    let cache = Cache::with_workload("").0;
    let _ca = cache.publisher(ROOTS, Origin::CA);
    let (one, two) = (Version::of(b"1"), Version::of(b"2"));
    let mut a = cache.subscribe(&ROOTS).unwrap();
    let mut b = cache.subscribe(&ROOTS).unwrap();
    a.accepted(one.clone());
    b.accepted(one.clone());
    b.accepted(two.clone());
    assert!(a.rejected(two.clone(), "bad root"));
    assert!(!b.rejected(two.clone(), "bad root"), "the second stream adds nothing new");
    let observed = &cache.snapshot()[0].observed;
    assert_eq!(observed.verdicts().acknowledged(), HashMap::from([(one.clone(), 1), (two, 1)]));
    assert_eq!(observed.verdicts().rejection.as_ref().unwrap().reason, "bad root");
    drop(b);
    let observed = &cache.snapshot()[0].observed;
    assert_eq!((observed.streams, observed.verdicts().acknowledged()), (1, HashMap::from([(one, 1)])));
}

#[test]
fn a_name_without_a_source_has_no_entry() {
    assert_eq!(Cache::with_workload("").0.subscribe(&ROOTS).unwrap_err(), NotServed::NoSource);
}

#[tokio::test]
async fn a_removed_workload_takes_its_secrets_along_and_no_other_ones() {
    let (cache, gone) = Cache::with_workload("gone");
    let stays = cache.add_workload("stays");
    let roots = |workload| Key { workload, name: SecretName::Roots };
    let publishers = [gone, stays].map(|workload| cache.publisher(roots(workload), Origin::CA));
    for publisher in &publishers {
        assert_eq!(publisher.publish(bundle(), UNIX_EPOCH, None), Published::Changed);
    }
    let subscription = cache.subscribe(&roots(gone)).unwrap();
    let mut reader = cache.watch(&roots(gone)).unwrap();
    let value = std::sync::Arc::downgrade(reader.borrow_and_update().good.as_ref().unwrap());
    let _demand = cache.demand(NameKind::File, Scope::Every, |_: &SecretName| Ok(())).unwrap();
    let on_demand = Key { workload: gone, name: "file-root:/x".parse().unwrap() };
    let _stream = cache.subscribe(&on_demand).unwrap();

    cache.remove_workload(gone);
    reader.changed().await.unwrap();
    assert!(reader.borrow_and_update().good.is_none());
    assert!(value.upgrade().is_none(), "the value is dropped, though a stream and a source still exist");
    assert_eq!(publishers[0].publish(bundle(), UNIX_EPOCH, None), Published::Outranked);
    assert!(!reader.has_changed().unwrap());
    assert_eq!(cache.subscribe(&roots(gone)).unwrap_err(), NotServed::NoSource);
    assert_eq!(cache.subscribe(&on_demand).unwrap_err(), NotServed::NoSource);
    assert!(cache.retire(&on_demand), "its source may let go later");
    drop(subscription);
    let left: Vec<_> = cache.snapshot().into_iter().map(|one| (one.key, one.workload)).collect();
    assert_eq!(left, [(roots(stays), "stays".into())]);
    assert_eq!(cache.workloads(), [(stays, "stays".into())]);
    let again = cache.add_workload("gone");
    assert!(again != gone, "a handle is never given out twice");
    assert!(cache.publisher(roots(gone), Origin::CA).entry().good.is_none());
    assert_eq!(cache.snapshot_of(gone).len(), 0);
}
