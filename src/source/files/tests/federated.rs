//! Trust bundles of other trust domains.

use super::*;
use crate::secret::FederatedName;
use crate::store::Workload;

#[tokio::test]
async fn a_bundle_of_another_trust_domain_follows_its_file_and_keeps_its_last_good_roots() {
    let mount = Mount::new();
    let name = SecretName::Federated(FederatedName::new("two.example").unwrap());
    let key = Key { workload: Workload::EVERY, name: name.clone() };
    let (path, files) = (mount.path("two.pem"), Files::new());
    let SecretName::Federated(federated) = name.clone() else { panic!("another name") };
    let bundles = vec![FederatedBundle { name: federated, path: path.clone() }];
    let settings = FileSettings { federated: bundles, ..settings(&mount.directory()) };
    let (cache, watcher) = (&mount.cache, &mount.watcher);
    let mut all =
        FederatedFile::all(&settings, cache, Workload::EVERY, watcher, &mount.clock, &mount.metrics);
    let mut file = all.remove(0);
    file.publish_once();
    let missing = mount.entry(key.clone());
    assert!(missing.failure().is_some_and(|reason| reason.contains("two.pem")), "{missing:?}");
    tokio::spawn(file.run());
    let put = |content: &[u8]| {
        fs::write(mount.path("new"), content).unwrap();
        fs::rename(mount.path("new"), &path).unwrap();
    };
    put(&files.root);
    let served = mount.until(key.clone(), "its roots", |entry| entry.good.is_some()).await;
    assert_eq!(served.good.unwrap().resource.version, files.version(&name));
    put(b"-----BEGIN CERTIFICATE-----\nhalf");
    mount.until(key.clone(), "a failure", |entry| entry.failure().is_some()).await;
    assert_eq!(mount.version(key.clone()), Some(files.version(&name)));
    let next = Files::new();
    put(&next.root);
    let version = next.version(&name);
    let is_next = |entry: &Entry| entry.good.as_ref().is_some_and(|good| good.resource.version == version);
    assert!(mount.until(key, "the next roots", is_next).await.failure().is_none());
    assert!(mount.cache.snapshot().iter().all(|one| one.key.name == name), "there is no key pair beside it");
}
