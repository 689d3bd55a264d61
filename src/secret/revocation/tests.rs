use std::time::UNIX_EPOCH;

use rcgen::KeyUsagePurpose;

use super::*;
use crate::pki::crl;
use crate::pki::crl::testing::Authority;

const HOUR: Duration = Duration::from_secs(3600);

fn now() -> SystemTime {
    UNIX_EPOCH + 1000 * HOUR
}

fn parse(texts: &[String]) -> Vec<Arc<Crl>> {
    let crls = texts.iter().flat_map(|text| crl::from_pem(text.as_bytes()).unwrap());
    crls.map(Arc::new).collect()
}

fn revocation(crls: &[Arc<Crl>], below: Option<&Authority>) -> Revocation {
    let mut revocation = Revocation::default();
    revocation.set_crls(crls);
    if let Some(issuer) = below {
        revocation.set_chain(&issuer.key_pair());
    }
    revocation
}

fn bundle(roots: &[&Authority]) -> TrustBundle {
    TrustBundle::new(roots.iter().map(|root| root.certificate.clone()).collect()).unwrap()
}

/// The issuers of the chosen CRLs, or the gaps.
fn cover(texts: &[String], below: Option<&Authority>, roots: &[&Authority]) -> Result<Vec<String>, String> {
    let covered = revocation(&parse(texts), below).cover(&bundle(roots), now());
    let mut names = covered.map_err(|gaps| gaps.to_string())?;
    names.sort_by(|a, b| a.issuer.cmp(&b.issuer));
    Ok(names.iter().map(|crl| crl.issuer.rsplit("CN=").next().unwrap().to_owned()).collect())
}

fn good(ca: &Authority) -> String {
    ca.crl(now() - HOUR, now() + HOUR, &[])
}

fn expired(ca: &Authority) -> String {
    ca.crl(now() - 2 * HOUR, now() - HOUR, &[])
}

#[test]
fn every_issuer_in_use_needs_a_crl_that_envoy_would_use() {
    let (root, other, fake) = (Authority::root("root"), Authority::root("other"), Authority::root("root"));
    let middle = Authority::new("middle", Some(&root), |_| {});
    let elsewhere = Authority::new("elsewhere", Some(&root), |_| {});
    let mute = Authority::new("mute", Some(&root), |params| {
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    });
    let outdated = Authority::new("outdated", None, |params| params.not_after = (now() - HOUR).into());
    let later = |ca: &Authority| ca.crl(now() + HOUR, now() + 2 * HOUR, &[]);
    let forged = |ca: &Authority| ca.old_crl(now() - HOUR, now() + HOUR);
    let both = [good(&root), good(&middle)];
    let with = |more: String| [both.as_slice(), &[more]].concat();
    type Case<'a> =
        (&'a str, Vec<String>, Option<&'a Authority>, Vec<&'a Authority>, Result<&'a str, &'a str>);
    let cases: Vec<Case<'_>> = vec![
        ("no file", vec![], Some(&middle), vec![&root], Ok("")),
        ("complete", both.to_vec(), Some(&middle), vec![&root], Ok("middle root")),
        ("no intermediate", both.to_vec(), Some(&root), vec![&root], Ok("middle root")),
        ("no chain yet", both.to_vec(), None, vec![&root], Err("no key pair yet")),
        ("no file and no chain", vec![], None, vec![&root], Ok("")),
        ("only the root's CRL", vec![good(&root)], Some(&middle), vec![&root], Err("no CRL of CN=middle")),
        (
            "only the intermediate's CRL",
            vec![good(&middle)],
            Some(&middle),
            vec![&root],
            Err("no CRL of CN=root"),
        ),
        ("a root without CRL", both.to_vec(), Some(&middle), vec![&root, &other], Err("no CRL of CN=other")),
        (
            "an expired root without CRL",
            both.to_vec(),
            Some(&middle),
            vec![&root, &outdated],
            Ok("middle root"),
        ),
        (
            "one has expired",
            vec![good(&root), expired(&middle)],
            Some(&middle),
            vec![&root],
            Err("CN=middle is out of date (nextUpdate"),
        ),
        (
            "one has expired, and is replaced",
            with(expired(&middle)),
            Some(&middle),
            vec![&root],
            Ok("middle root"),
        ),
        (
            "one is not valid yet",
            vec![good(&root), later(&middle)],
            Some(&middle),
            vec![&root],
            Err("CN=middle is not valid before"),
        ),
        (
            "the next one is published early",
            with(later(&middle)),
            Some(&middle),
            vec![&root],
            Ok("middle root"),
        ),
        (
            "signed with another key",
            vec![forged(&fake), good(&middle)],
            Some(&middle),
            vec![&root],
            Err("names CN=root is not signed"),
        ),
        (
            "one more, signed with another key",
            with(forged(&fake)),
            Some(&middle),
            vec![&root],
            Err("names CN=root is not signed"),
        ),
        (
            "a CRL of another CA of the same name",
            with(good(&fake)),
            Some(&middle),
            vec![&root],
            Ok("middle root root"),
        ),
        (
            "two roots of the same name",
            with(good(&fake)),
            Some(&middle),
            vec![&root, &fake],
            Err("different keys are named CN=root"),
        ),
        (
            "a CA without cRLSign",
            both.to_vec(),
            Some(&mute),
            vec![&root],
            Err("CN=mute does not allow it to sign CRLs"),
        ),
        (
            "a CRL of a peer's CA",
            with(good(&elsewhere)),
            Some(&middle),
            vec![&root],
            Ok("elsewhere middle root"),
        ),
        (
            "a peer's CA's CRL has expired",
            with(expired(&elsewhere)),
            Some(&middle),
            vec![&root],
            Err("CN=elsewhere is out of date (nextUpdate"),
        ),
        (
            "an intermediate is trusted",
            both.to_vec(),
            Some(&root),
            vec![&middle],
            Err("CN=middle is trusted but is not a root"),
        ),
        ("version 1", vec![forged(&root), forged(&middle)], Some(&middle), vec![&root], Ok("middle root")),
    ];
    for (case, texts, below, roots, expected) in cases {
        let found = cover(&texts, below, &roots).map(|names| names.join(" "));
        match (&found, expected) {
            (Ok(names), Ok(expected)) => assert_eq!(names, expected, "{case}"),
            (Err(reason), Err(words)) => assert!(reason.contains(words), "{case}: {reason}"),
            _ => panic!("{case}: {found:?}"),
        }
    }
}

#[test]
fn the_newest_crl_of_an_issuer_is_chosen() {
    let root = Authority::root("root");
    let old = root.crl(now() - 2 * HOUR, now() + HOUR, &[1]);
    let new = root.crl(now() - HOUR, now() + HOUR, &[1, 2]);
    for texts in [[old.clone(), new.clone()], [new, old]] {
        let revocation = revocation(&parse(&texts), Some(&root));
        let crls = revocation.cover(&bundle(&[&root]), now()).unwrap();
        assert_eq!(crls.iter().map(|crl| crl.revoked).collect::<Vec<_>>(), [2]);
    }
}

#[test]
fn every_change_of_the_chosen_crls_is_predicted() {
    let root = Authority::root("root");
    let crls = parse(&[expired(&root), good(&root), root.crl(now() + HOUR / 2, now() + 3 * HOUR, &[])]);
    let revocation = revocation(&crls, Some(&root));
    let mut moments = vec![now()];
    let expiring = Authority::new("expiring", None, |params| params.not_after = (now() + 2 * HOUR).into());
    let roots = &bundle(&[&root, &expiring]);
    assert_eq!(Revocation::default().next_change(roots, now()), None);
    // The root itself expires in the year 4096.
    let soon = |moment: &SystemTime| *moment < now() + 1000 * HOUR;
    let next = |last: &SystemTime| revocation.next_change(roots, *last).filter(soon);
    while let Some(moment) = moments.last().and_then(next) {
        moments.push(moment);
    }
    let ends = [now() + HOUR / 2, now() + HOUR - MARGIN, now() + 2 * HOUR, now() + 3 * HOUR - MARGIN];
    assert_eq!(moments[1..], ends);
    // No longer used from that moment on, not only after it.
    assert!(revocation.cover(roots, ends[3] - Duration::from_millis(1)).is_ok());
    assert!(revocation.cover(roots, ends[3]).is_err());
    // The other root needs no CRL once it has expired.
    assert!(revocation.cover(roots, ends[2] - Duration::from_millis(1)).is_err());
    assert!(revocation.cover(roots, ends[2]).is_ok());
}
