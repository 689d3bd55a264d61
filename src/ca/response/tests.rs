//! The layouts in which CAs send a chain, and the result of each.

use std::time::{Duration, UNIX_EPOCH};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyUsagePurpose, SanType};

use super::*;
use crate::base::clock::Clock;
use crate::ca::embedded::DevelopmentCa;
use crate::pki::csr;
use crate::pki::key::{KeyType, SigningKey};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A set of certificates that belong together: L leaf, I intermediate, R root; and two that do not: S another
/// root, T another CA's intermediate.
struct Certificates {
    key: SigningKey,
    leaf: CertificateDer<'static>,
    ours: [CertificateDer<'static>; 2],
    others: [CertificateDer<'static>; 2],
    now: SystemTime,
}

fn web() -> SpiffeId {
    "spiffe://cluster.local/ns/default/sa/web".parse().unwrap()
}

impl Certificates {
    fn new() -> Self {
        let now = Clock::system().now();
        let [ours, others] = [(); 2].map(|()| {
            let directory = tempfile::tempdir().unwrap();
            DevelopmentCa::open(directory.path(), Clock::system()).unwrap()
        });
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let csr = csr::request(&key, Some(&web()), &csr::Names::default()).unwrap();
        let leaf = ours.issue(&csr, &web(), DAY).unwrap();
        let chain = |ca: &DevelopmentCa| ca.chain().map(Clone::clone);
        Self { leaf, ours: chain(&ours), others: chain(&others), key, now }
    }

    fn of(&self, letter: char) -> CertificateDer<'static> {
        match letter {
            'L' => self.leaf.clone(),
            'I' => self.ours[0].clone(),
            'R' => self.ours[1].clone(),
            'S' => self.others[1].clone(),
            'T' => self.others[0].clone(),
            other => panic!("no certificate {other}"),
        }
    }

    /// "L I R": three groups of one certificate each.
    fn groups(&self, layout: &str) -> Vec<Vec<CertificateDer<'static>>> {
        layout.split_whitespace().map(|group| group.chars().map(|letter| self.of(letter)).collect()).collect()
    }

    fn letters(&self, certificates: &[CertificateDer<'static>]) -> String {
        let letter = |one: &CertificateDer<'static>| {
            "LIRST".chars().find(|letter| self.of(*letter) == *one).unwrap_or('?')
        };
        let mut letters: Vec<_> = certificates.iter().map(letter).collect();
        // A bundle is sorted by its bytes.
        letters.sort_by_key(|letter| "LITRS".find(*letter));
        letters.into_iter().collect()
    }
}

#[test]
fn every_layout_of_a_good_chain_gives_the_same_key_pair_and_roots() {
    let certificates = Certificates::new();
    // The layout; the chain that is served; the roots.
    let cases = [
        // One certificate in each string.
        ("L I R", "LI", "R"),
        // As a real istiod with a plugged-in intermediate does: 1, 2 and 1, so the root comes twice.
        ("L IR R", "LI", "R"),
        // Several in the last.
        ("L IR", "LI", "R"),
        ("LI R", "LI", "R"),
        // All in one.
        ("LIR", "LI", "R"),
        ("LIRR", "LI", "R"),
        // Duplicates of the intermediate, and of the leaf.
        ("L I I R", "LI", "R"),
        ("L L I R", "LI", "R"),
        // All roots are taken, announced ones too, in any position.
        ("L I RS", "LI", "RS"),
        ("L I R S", "LI", "RS"),
        ("L I S R", "LI", "RS"),
        ("LI SR R S", "LI", "RS"),
        // The root is in the middle.
        ("L R I", "LI", "R"),
        // The last is not self-issued, but by contract it is the trust anchor.
        ("L I", "L", "I"),
        // An unneeded certificate only makes the chain longer.
        ("L I T R", "LIT", "R"),
    ];
    for (layout, chain, roots) in cases {
        let answer = IssuedChain::from_groups(certificates.groups(layout)).unwrap();
        let key = certificates.key.to_private_key();
        let (pair, bundle) = answer
            .check(key, Some(&web()), &Names::default(), certificates.now)
            .unwrap_or_else(|error| panic!("{layout}: {error}"));
        assert_eq!(certificates.letters(pair.chain()), chain, "{layout}");
        assert_eq!(certificates.letters(bundle.roots()), roots, "{layout}");
        assert_eq!(*pair.chain().first().unwrap(), certificates.leaf, "{layout}: the leaf is first");
    }
}

#[test]
fn a_layout_that_no_peer_could_verify_is_refused() {
    let certificates = Certificates::new();
    let cases = [
        ("", "no_root"),
        ("L", "no_root"),
        ("LI", "no_root"),
        // The only root is another CA's.
        ("L I S", "unchained"),
        ("LI S", "unchained"),
        // The intermediate is missing, or another CA's.
        ("L R", "unchained"),
        ("L T R", "unchained"),
        // The leaf is not first.
        ("I L R", "junk"),
        ("R L I", "junk"),
    ];
    for (layout, label) in cases {
        let answer = IssuedChain::from_groups(certificates.groups(layout)).unwrap();
        let key = certificates.key.to_private_key();
        let error = answer.check(key, Some(&web()), &Names::default(), certificates.now).unwrap_err();
        assert_eq!(error.label(), label, "{layout}: {error}");
    }
}

#[test]
fn the_size_of_a_response_is_bounded() {
    let certificates = Certificates::new();
    let many = |count: usize| vec![vec![certificates.of('L')], vec![certificates.of('R'); count - 1]];
    assert_eq!(IssuedChain::from_groups(many(64)).unwrap().roots.len(), 63);
    assert_eq!(IssuedChain::from_groups(many(65)), Err(InvalidResponse::TooLong(65)));
    // However they are grouped.
    let single = many(65).concat().into_iter().map(|one| vec![one]).collect();
    assert_eq!(IssuedChain::from_groups(single), Err(InvalidResponse::TooLong(65)));
}

#[test]
fn junk_is_refused_in_any_position() {
    let certificates = Certificates::new();
    let junk = || CertificateDer::from(b"junk".to_vec());
    let cut = || {
        let whole = certificates.of('I');
        CertificateDer::from(whole[..whole.len() - 1].to_vec())
    };
    let longer = || CertificateDer::from([&certificates.of('I')[..], b"!"].concat());
    for bad in [junk(), cut(), longer()] {
        for place in 0..3 {
            let mut groups = certificates.groups("L I R");
            groups[place] = vec![bad.clone()];
            let error = IssuedChain::from_groups(groups).unwrap_err();
            assert_eq!(error.label(), "junk", "{place}: {error}");
        }
    }
    // Where a provider sorts the response itself, the check finds it.
    let good = IssuedChain::from_groups(certificates.groups("L I R")).unwrap();
    for answer in [
        IssuedChain { chain: vec![junk()], ..good.clone() },
        IssuedChain { chain: vec![certificates.of('L'), junk()], ..good.clone() },
        IssuedChain { roots: vec![junk()], ..good.clone() },
    ] {
        let key = certificates.key.to_private_key();
        let error = answer.check(key, Some(&web()), &Names::default(), certificates.now).unwrap_err();
        assert_eq!(error.label(), "junk", "{error}");
    }
}

/// A CA whose leaves have the names and dates that a test sets.
struct OddCa {
    root: CertificateDer<'static>,
    issuer: Issuer<'static, SigningKey>,
    now: SystemTime,
}

impl OddCa {
    fn new(now: SystemTime) -> Self {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "odd");
        (params.not_before, params.not_after) = ((now - DAY).into(), (now + 100 * DAY).into());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let root = params.self_signed(&key).unwrap().der().clone();
        Self { root, issuer: Issuer::new(params, key), now }
    }

    fn check(
        &self,
        names: &[&str],
        valid: (SystemTime, SystemTime),
        asked: Option<&SpiffeId>,
        asked_names: &Names,
    ) -> Result<(KeyPair, TrustBundle), InvalidResponse> {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = CertificateParams::default();
        let name = |name: &&str| match name.contains("://") {
            true => SanType::URI((*name).try_into().unwrap()),
            false => SanType::DnsName((*name).try_into().unwrap()),
        };
        params.subject_alt_names = names.iter().map(name).collect();
        (params.not_before, params.not_after) = (valid.0.into(), valid.1.into());
        let leaf = params.signed_by(&key, &self.issuer).unwrap().der().clone();
        let answer = IssuedChain { chain: vec![leaf], roots: vec![self.root.clone()] };
        answer.check(key.to_private_key(), asked, asked_names, self.now)
    }
}

#[test]
fn the_certificate_must_name_the_requested_identity() {
    let now = UNIX_EPOCH + Duration::from_secs(1_782_000_000);
    let ca = OddCa::new(now);
    let (ours, other) =
        ("spiffe://cluster.local/ns/default/sa/web", "spiffe://cluster.local/ns/default/sa/x");
    // The names in it; whether an identity was requested; the label of the outcome.
    let cases: [(&[&str], bool, &str); 9] = [
        (&[ours], true, "ok"),
        (&[ours, "web.example"], true, "ok"),
        (&[other], true, "wrong_identity"),
        (&[other], false, "ok"),
        // An X.509-SVID has exactly one URI name, and it is a SPIFFE ID.
        (&[ours, other], true, "wrong_identity"),
        (&["https://web.example/"], true, "wrong_identity"),
        (&["web.example"], true, "wrong_identity"),
        (&["web.example"], false, "wrong_identity"),
        (&[], true, "wrong_identity"),
    ];
    for (names, is_asked, label) in cases {
        let web = web();
        let outcome = ca.check(names, (now - HOUR, now + DAY), is_asked.then_some(&web), &Names::default());
        let got = outcome.as_ref().map_or_else(InvalidResponse::label, |_| "ok");
        assert_eq!(got, label, "{names:?}: {outcome:?}");
    }
}

#[test]
fn the_certificate_must_have_the_requested_names() {
    let now = UNIX_EPOCH + Duration::from_secs(1_782_000_000);
    let ca = OddCa::new(now);
    let ours = "spiffe://cluster.local/ns/default/sa/web";
    let asked = |dns: &[&str], common_name: Option<&str>| Names {
        dns: dns.iter().map(|name| name.parse().unwrap()).collect(),
        common_name: common_name.map(|name| name.parse().unwrap()),
    };
    let both: &[&str] = &["web.example", "*.web.example"];
    // The names in it, the requested ones, and what is missing.
    for (names, asked, missing) in [
        (vec![ours, "web.example", "*.web.example", "other"], asked(both, None), ""),
        (vec![ours, "WEB.example"], asked(&["web.example"], None), ""),
        (vec![ours], asked(&["web.example"], None), "web.example"),
        (vec![ours, "a.web.example"], asked(both, None), "web.example, *.web.example"),
        (vec![ours, "web"], asked(&["web"], Some("web")), "the common name web"),
    ] {
        let outcome = ca.check(&names, (now - HOUR, now + DAY), Some(&web()), &asked);
        match outcome {
            Ok(_) => assert_eq!(missing, "", "{names:?}"),
            Err(error) => {
                assert_eq!(error.label(), "missing_names", "{error}");
                let start = format!("the certificate lacks {missing} (it names {ours}");
                assert!(!missing.is_empty() && error.to_string().starts_with(&start), "{error}");
            }
        }
    }
}

#[test]
fn the_certificate_must_be_valid_now() {
    let now = UNIX_EPOCH + Duration::from_secs(1_782_000_000);
    let ca = OddCa::new(now);
    let second = Duration::from_secs(1);
    let cases = [
        (now - HOUR, now + HOUR, "ok"),
        (now, now + second, "ok"),
        (now + second, now + HOUR, "not_yet_valid"),
        (now - HOUR, now, "expired"),
        (now - HOUR, now - second, "expired"),
    ];
    for (from, until, label) in cases {
        let outcome = ca.check(&["spiffe://td/web"], (from, until), None, &Names::default());
        let got = outcome.as_ref().map_or_else(InvalidResponse::label, |_| "ok");
        assert_eq!(got, label, "{outcome:?}");
    }
}
