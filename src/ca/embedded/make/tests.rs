use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::base::clock::Clock;
use crate::ca::embedded::{DevelopmentCa, Embedded, exchange};
use crate::ca::{CertificateAuthority as _, SigningRequest};
use crate::pki::csr::{self, Names};

const HOUR: Duration = Duration::from_secs(3600);

fn wish(ttl: Duration) -> NewCa {
    NewCa { common_name: None, organization: "Test".to_owned(), ttl, key_type: KeyType::EcdsaP256 }
}

/// A directory with the root `root` and the intermediate `ca` of it.
fn made(key_type: KeyType) -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let (root, now) = (place.path().join("root"), Clock::system().now());
    let wish = NewCa { key_type, ..wish(100 * HOUR) };
    init(&root, &wish, Some(1), now).unwrap();
    intermediate(&root, "east", &place.path().join("ca"), &wish, &[], now).unwrap();
    place
}

fn certificates(path: &Path) -> Vec<CertificateDer<'static>> {
    pem::certificates(&fs::read(path).unwrap()).unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn what_an_intermediate_issues_passes_the_agents_own_checks_with_each_key_type() {
    for (name, key_type) in
        KeyType::ALL.into_iter().filter(|(name, _)| !["rsa-3072", "rsa-4096"].contains(name))
    {
        let place = made(key_type);
        let clock = Clock::system();
        let ca = DevelopmentCa::open(&place.path().join("ca"), clock.clone()).unwrap();
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let identity = "spiffe://td/a".parse().unwrap();
        let names = Names::default();
        let request = SigningRequest {
            csr: csr::request(&key, Some(&identity), &names).unwrap(),
            identity: Some(identity.clone()),
            names: names.clone(),
            ttl: HOUR,
        };
        let answer = Embedded::from(ca).sign(&request).await.unwrap();
        let checked = answer.check(key.to_private_key(), Some(&identity), &names, clock.now());
        let (pair, bundle) = checked.unwrap();
        assert_eq!((pair.chain().len(), bundle.roots().len()), (2, 1), "{name}");
    }
}

#[test]
fn the_files_have_istios_names_and_order_and_only_the_owner_reads_keys() {
    let place = made(KeyType::EcdsaP256);
    let [root, ca] = ["root", "ca"].map(|name| place.path().join(name));
    let [own, signer] = [certificates(&root.join(ROOT_FILE)), certificates(&ca.join(SIGNER_FILE))];
    assert_eq!(certificates(&ca.join(CHAIN_FILE)), [signer[0].clone(), own[0].clone()]);
    assert_eq!(certificates(&ca.join(ROOT_FILE)), own);
    for (directory, files) in
        [(&root, &[ROOT_FILE, ROOT_KEY_FILE][..]), (&ca, &[SIGNER_FILE, KEY_FILE, CHAIN_FILE, ROOT_FILE])]
    {
        assert_eq!(mode(directory), 0o700);
        assert_eq!(fs::read_dir(directory).unwrap().count(), files.len());
        for name in files {
            let expected = if name.ends_with("key.pem") { 0o600 } else { 0o644 };
            assert_eq!(mode(&directory.join(name)), expected, "{name}");
        }
    }
    let facts = Certificate::parse(&signer[0]).unwrap();
    assert!(facts.is_ca && facts.subject.contains("L=east") && facts.subject.contains("O=Test"), "{facts:?}");
}

#[test]
fn an_intermediate_signs_no_further_intermediate() {
    let place = made(KeyType::EcdsaP256);
    let ca = place.path().join("ca");
    // The intermediate in the place of a root.
    for (from, to) in [(SIGNER_FILE, ROOT_FILE), (KEY_FILE, ROOT_KEY_FILE)] {
        fs::rename(ca.join(from), ca.join(to)).unwrap();
    }
    let out = place.path().join("below");
    let error = intermediate(&ca, "b", &out, &wish(HOUR), &[], Clock::system().now()).unwrap_err();
    assert!(error.to_string().contains("can't sign this intermediate"), "{error}");
    assert!(!out.exists());
}

#[test]
fn no_key_is_overwritten_and_the_error_names_it() {
    let place = made(KeyType::EcdsaP256);
    let [root, ca] = ["root", "ca"].map(|name| place.path().join(name));
    let now = Clock::system().now();
    let keys = [root.join(ROOT_KEY_FILE), ca.join(KEY_FILE)];
    let before = keys.each_ref().map(|key| fs::read(key).unwrap());
    let error = init(&root, &wish(HOUR), None, now).unwrap_err().to_string();
    assert!(error.contains("root/root-key.pem exists, and is never overwritten"), "{error}");
    let error = intermediate(&root, "east", &ca, &wish(HOUR), &[], now).unwrap_err().to_string();
    assert!(error.contains("ca/ca-key.pem exists, and is never overwritten"), "{error}");
    assert_eq!(keys.each_ref().map(|key| fs::read(key).unwrap()), before);
    // Nor with a root's directory in the place of an intermediate's.
    let error = intermediate(&root, "east", &root, &wish(HOUR), &[], now).unwrap_err().to_string();
    assert!(error.contains("root/root-key.pem exists"), "{error}");
}

#[test]
fn an_intermediate_does_not_outlive_its_root_and_a_leaf_not_its_intermediate() {
    let place = tempfile::tempdir().unwrap();
    let (root, ca) = (place.path().join("root"), place.path().join("ca"));
    let clock = Clock::system();
    let end = init(&root, &wish(2 * HOUR), None, clock.now()).unwrap().not_after;
    let made = intermediate(&root, "east", &ca, &wish(3 * HOUR), &[], clock.now()).unwrap();
    assert!(made.is_cut);
    assert_eq!(made.intermediate.not_after, end);
    let ca = DevelopmentCa::open(&ca, clock).unwrap();
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::request(&key, None, &Names::default()).unwrap();
    let leaf = ca.issue(&csr, &"spiffe://td/a".parse().unwrap(), Duration::MAX).unwrap();
    assert_eq!(Certificate::parse(&leaf).unwrap().not_after, end);
}

#[test]
fn an_expired_root_makes_no_intermediate() {
    let place = tempfile::tempdir().unwrap();
    let (root, now) = (place.path().join("root"), Clock::system().now());
    init(&root, &wish(HOUR), None, now - 2 * HOUR).unwrap();
    let error = intermediate(&root, "a", &place.path().join("ca"), &wish(HOUR), &[], now).unwrap_err();
    assert!(error.to_string().contains("expired at"), "{error}");
}

#[test]
fn a_root_is_announced_and_the_old_one_dropped_once_another_signs() {
    let place = made(KeyType::EcdsaP256);
    let [old, new, ca, next] = ["root", "new", "ca", "next"].map(|name| place.path().join(name));
    let now = Clock::system().now();
    init(&new, &wish(HOUR), None, now).unwrap();
    let [before, added] = [&ca, &new].map(|directory| fs::read(directory.join(ROOT_FILE)).unwrap());
    assert_eq!(roots::announce(&ca, &new, now).unwrap().len(), 1);
    assert_eq!(fs::read(ca.join(ROOT_FILE)).unwrap(), [before, added].concat());
    assert!(roots::announce(&ca, &new.join(ROOT_FILE), now).unwrap().is_empty(), "it is there already");
    let error = roots::withdraw(&ca, &old, now).unwrap_err().to_string();
    assert!(error.contains("which signs now"), "{error}");

    // The next intermediate names the same roots, in the same order.
    let made = intermediate(&new, "east", &next, &wish(HOUR), &[ca.join(ROOT_FILE)], now).unwrap();
    assert_eq!(made.roots.len(), 2);
    assert_eq!(fs::read(next.join(ROOT_FILE)).unwrap(), fs::read(ca.join(ROOT_FILE)).unwrap());
    assert_eq!(roots::withdraw(&next, &old, now).unwrap().len(), 1);
    assert_eq!(fs::read(next.join(ROOT_FILE)).unwrap(), fs::read(new.join(ROOT_FILE)).unwrap());
    let ca = DevelopmentCa::open(&next, Clock::system()).unwrap();
    assert_eq!(ca.roots().len(), 1);
}

#[test]
fn what_is_no_root_is_not_announced() {
    let place = made(KeyType::EcdsaP256);
    let ca = place.path().join("ca");
    let now = Clock::system().now();
    let expired = place.path().join("expired");
    init(&expired, &wish(HOUR), None, now - 2 * HOUR).unwrap();
    for (path, words) in [
        (ca.join(SIGNER_FILE), "is not the certificate of a root"),
        (ca.join(KEY_FILE), "no PEM certificate"),
        (place.path().join("nowhere"), "No such file"),
        (expired, "expired at"),
    ] {
        let error = roots::announce(&ca, &path, now).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(certificates(&ca.join(ROOT_FILE)).len(), 1);
}

#[test]
fn a_directory_whose_files_do_not_fit_together_is_refused_with_the_file_that_does_not() {
    let place = made(KeyType::EcdsaP256);
    let ca = place.path().join("ca");
    let stranger = made(KeyType::EcdsaP256);
    let stranger = stranger.path().join("ca");
    for name in [SIGNER_FILE, KEY_FILE, CHAIN_FILE, ROOT_FILE] {
        let good = fs::read(ca.join(name)).unwrap();
        fs::copy(stranger.join(name), ca.join(name)).unwrap();
        let error = DevelopmentCa::open(&ca, Clock::system()).unwrap_err().to_string();
        // Another certificate of the signer is noticed by its key.
        let named = if name == SIGNER_FILE { KEY_FILE } else { name };
        assert!(error.contains(&format!("/ca/{named} can't be used")), "{name}: {error}");
        fs::write(ca.join(name), good).unwrap();
    }
    DevelopmentCa::open(&ca, Clock::system()).unwrap();
    let error = DevelopmentCa::open(&place.path().join("root"), Clock::system()).unwrap_err().to_string();
    assert!(error.contains("attache ca intermediate"), "{error}");
}

#[test]
fn a_signer_that_is_its_own_root_needs_no_chain() {
    let place = tempfile::tempdir().unwrap();
    let (root, ca) = (place.path().join("root"), place.path().join("ca"));
    init(&root, &wish(HOUR), None, Clock::system().now()).unwrap();
    fs::create_dir(&ca).unwrap();
    for (from, to) in [(ROOT_FILE, ROOT_FILE), (ROOT_FILE, SIGNER_FILE), (ROOT_KEY_FILE, KEY_FILE)] {
        fs::copy(root.join(from), ca.join(to)).unwrap();
    }
    fs::write(ca.join(CHAIN_FILE), "").unwrap();
    let ca = DevelopmentCa::open(&ca, Clock::system()).unwrap();
    assert!(ca.intermediates().is_empty());
    assert_eq!(ca.chain()[0], ca.chain()[1]);
}

#[test]
fn a_root_that_allows_no_ca_below_it_makes_no_intermediate() {
    let place = tempfile::tempdir().unwrap();
    let (root, now) = (place.path().join("root"), Clock::system().now());
    init(&root, &wish(HOUR), Some(0), now).unwrap();
    let error = intermediate(&root, "east", &place.path().join("ca"), &wish(HOUR), &[], now).unwrap_err();
    assert!(
        error.to_string().contains("allows 0 CAs below it (its path length), and here it has 1"),
        "{error}"
    );
    assert!(!place.path().join("ca").exists());
}

#[test]
fn a_signer_whose_key_usage_allows_no_certificates_is_refused() {
    let place = made(KeyType::EcdsaP256);
    let (root, ca) = (place.path().join("root"), place.path().join("ca"));
    let (signer, root_key) = root_in(&root).unwrap();
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![rcgen::KeyUsagePurpose::DigitalSignature];
    let issuer = Issuer::from_ca_cert_der(&signer, root_key).unwrap();
    let made = params.signed_by(&key, &issuer).unwrap();
    fs::write(ca.join(SIGNER_FILE), pem::of_certificates([made.der()])).unwrap();
    fs::write(ca.join(CHAIN_FILE), pem::of_certificates([made.der(), &signer])).unwrap();
    fs::write(ca.join(KEY_FILE), &*key.to_private_key().to_pem()).unwrap();
    let error = DevelopmentCa::open(&ca, Clock::system()).unwrap_err().to_string();
    assert!(error.contains("has a key usage without certificate signing"), "{error}");
}

#[test]
fn of_two_roots_with_one_key_the_one_that_lives_longer_counts_and_the_other_can_be_dropped() {
    let place = made(KeyType::EcdsaP256);
    let (root, ca) = (place.path().join("root"), place.path().join("ca"));
    let (old, key) = root_in(&root).unwrap();
    let now = Clock::system().now();
    let facts = parsed(&old).unwrap();
    let name = subject("Test", facts.common_names.first().unwrap(), None);
    let params = ca_params(name, [now - DAY, now + 1000 * HOUR], BasicConstraints::Unconstrained).unwrap();
    let renewed = params.self_signed(&key).unwrap();
    let renewed = renewed.der();
    fs::write(ca.join(ROOT_FILE), pem::of_certificates([&old, renewed])).unwrap();
    roots::withdraw(&ca, &root, now).unwrap();
    assert_eq!(certificates(&ca.join(ROOT_FILE)), *std::slice::from_ref(renewed));
    DevelopmentCa::open(&ca, Clock::system()).unwrap();
}

/// A certificate with `OU` and `O` in its subject, in which both are `O`: as `DC=corp, DC=example` it has an attribute twice.
fn with_repeated_attribute(key: &SigningKey) -> CertificateDer<'static> {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationalUnitName, "corp");
    name.push(DnType::OrganizationName, "example");
    let now = Clock::system().now();
    let params = ca_params(name, [now - DAY, now + 1000 * HOUR], BasicConstraints::Unconstrained).unwrap();
    let mut der = params.self_signed(key).unwrap().der().to_vec();
    let [unit, organization] = [[0x55, 4, 11], [0x55, 4, 10]];
    while let Some(at) = der.windows(3).position(|bytes| *bytes == unit) {
        der[at..at + 3].copy_from_slice(&organization);
    }
    der.into()
}

#[test]
fn a_subject_with_an_attribute_twice_is_the_reason_and_its_file_is_named() {
    let place = made(KeyType::EcdsaP256);
    let (root, ca) = (place.path().join("root"), place.path().join("ca"));
    let (_, key) = root_in(&root).unwrap();
    let odd = pem::of_certificates([&with_repeated_attribute(&key)]);
    fs::write(ca.join(SIGNER_FILE), &odd).unwrap();
    let error = DevelopmentCa::open(&ca, Clock::system()).unwrap_err().to_string();
    assert!(error.contains("ca-cert.pem") && error.contains("has an attribute twice"), "{error}");
    fs::write(root.join(ROOT_FILE), &odd).unwrap();
    let out = place.path().join("other");
    let error = intermediate(&root, "east", &out, &wish(HOUR), &[], Clock::system().now()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("root-cert.pem") && error.contains("has an attribute twice"), "{error}");
}

#[test]
fn an_exchange_puts_one_directory_in_the_place_of_the_other_and_one_that_can_not_sign_is_refused() {
    let place = made(KeyType::EcdsaP256);
    let [root, ca, next] = ["root", "ca", "next"].map(|name| place.path().join(name));
    let now = Clock::system().now();
    intermediate(&root, "east", &next, &wish(HOUR), &[], now).unwrap();
    let signers = || [&ca, &next].map(|directory| certificates(&directory.join(SIGNER_FILE)).remove(0));
    let [old, new] = signers();
    assert!(exchange::exchange(&ca, &next, now).unwrap().subject.contains("L=east"));
    assert_eq!(signers(), [new.clone(), old.clone()]);
    fs::write(next.join(KEY_FILE), "damaged").unwrap();
    let error = exchange::exchange(&ca, &next, now).unwrap_err().to_string();
    assert!(error.contains("next/ca-key.pem"), "{error}");
    assert_eq!(signers(), [new, old]);
}
