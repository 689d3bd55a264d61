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

fn facts(roots: &[&Authority]) -> Vec<Certificate> {
    roots.iter().map(|root| Certificate::parse(&root.certificate).unwrap()).collect()
}

/// The issuers of what a bundle gets, or what is missing.
fn cover(texts: &[String], below: Option<&Authority>, roots: &[&Authority]) -> Result<Vec<String>, String> {
    let covered = revocation(&parse(texts), below).cover(&facts(roots), now());
    let mut names = covered.map_err(|gaps| gaps.to_string())?;
    names.sort_by(|a, b| a.issuer.cmp(&b.issuer));
    Ok(names.iter().map(|crl| crl.issuer.rsplit("CN=").next().unwrap().to_owned()).collect())
}

fn good(ca: &Authority) -> String {
    ca.crl(now() - HOUR, now() + HOUR, &[])
}

fn ended(ca: &Authority) -> String {
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
    let gone = Authority::new("gone", None, |params| params.not_after = (now() - HOUR).into());
    let later = |ca: &Authority| ca.crl(now() + HOUR, now() + 2 * HOUR, &[]);
    let forged = |ca: &Authority| ca.old_crl(now() - HOUR, now() + HOUR);
    let both = [good(&root), good(&middle)];
    let with = |more: String| [both.as_slice(), &[more]].concat();
    type Case<'a> =
        (&'a str, Vec<String>, Option<&'a Authority>, Vec<&'a Authority>, Result<&'a str, &'a str>);
    let cases: Vec<Case<'_>> = vec![
        ("no file", vec![], Some(&middle), vec![&root], Ok("")),
        ("all of it", both.to_vec(), Some(&middle), vec![&root], Ok("middle root")),
        ("there is no intermediate", both.to_vec(), Some(&root), vec![&root], Ok("middle root")),
        ("nobody knows yet", both.to_vec(), None, vec![&root], Err("there is no key pair yet")),
        ("nothing to know", vec![], None, vec![&root], Ok("")),
        ("the root's alone", vec![good(&root)], Some(&middle), vec![&root], Err("no CRL of CN=middle")),
        (
            "the intermediate's alone",
            vec![good(&middle)],
            Some(&middle),
            vec![&root],
            Err("no CRL of CN=root"),
        ),
        ("a root without", both.to_vec(), Some(&middle), vec![&root, &other], Err("no CRL of CN=other")),
        ("an expired root without", both.to_vec(), Some(&middle), vec![&root, &gone], Ok("middle root")),
        (
            "one has expired",
            vec![good(&root), ended(&middle)],
            Some(&middle),
            vec![&root],
            Err("CN=middle was to be replaced by"),
        ),
        (
            "one has expired, and is replaced",
            with(ended(&middle)),
            Some(&middle),
            vec![&root],
            Ok("middle root"),
        ),
        (
            "one is to come",
            vec![good(&root), later(&middle)],
            Some(&middle),
            vec![&root],
            Err("CN=middle begins only at"),
        ),
        ("the next one is there", with(later(&middle)), Some(&middle), vec![&root], Ok("middle root")),
        (
            "another key",
            vec![forged(&fake), good(&middle)],
            Some(&middle),
            vec![&root],
            Err("names CN=root is not signed"),
        ),
        (
            "another key too",
            with(forged(&fake)),
            Some(&middle),
            vec![&root],
            Err("names CN=root is not signed"),
        ),
        ("another CA of that name", with(good(&fake)), Some(&middle), vec![&root], Ok("middle root root")),
        (
            "two roots of one name",
            with(good(&fake)),
            Some(&middle),
            vec![&root, &fake],
            Err("different keys are named CN=root"),
        ),
        (
            "a CA that may not",
            both.to_vec(),
            Some(&mute),
            vec![&root],
            Err("CN=mute does not let it sign CRLs"),
        ),
        ("a peer's CA", with(good(&elsewhere)), Some(&middle), vec![&root], Ok("elsewhere middle root")),
        (
            "a peer's has expired",
            with(ended(&elsewhere)),
            Some(&middle),
            vec![&root],
            Err("CN=elsewhere was to be replaced by"),
        ),
        (
            "no root",
            both.to_vec(),
            Some(&root),
            vec![&middle],
            Err("CN=middle is trusted without being a root"),
        ),
        ("the old form", vec![forged(&root), forged(&middle)], Some(&middle), vec![&root], Ok("middle root")),
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
fn the_newest_of_an_issuer_is_the_one() {
    let root = Authority::root("root");
    let old = root.crl(now() - 2 * HOUR, now() + HOUR, &[1]);
    let new = root.crl(now() - HOUR, now() + HOUR, &[1, 2]);
    for texts in [[old.clone(), new.clone()], [new, old]] {
        let revocation = revocation(&parse(&texts), Some(&root));
        let crls = revocation.cover(&facts(&[&root]), now()).unwrap();
        assert_eq!(crls.iter().map(|crl| crl.revoked).collect::<Vec<_>>(), [2]);
    }
}

#[test]
fn what_is_to_be_done_again_when_is_known() {
    let root = Authority::root("root");
    let crls = parse(&[ended(&root), good(&root), root.crl(now() + HOUR / 2, now() + 3 * HOUR, &[])]);
    let revocation = revocation(&crls, Some(&root));
    let mut moments = vec![now()];
    let gone = Authority::new("gone", None, |params| params.not_after = (now() + 2 * HOUR).into());
    let roots = &facts(&[&root, &gone])[..];
    assert_eq!(Revocation::default().next_change(roots, now()), None);
    // The root itself ends in the year 4096.
    let soon = |moment: &SystemTime| *moment < now() + 1000 * HOUR;
    let next = |last: &SystemTime| revocation.next_change(roots, *last).filter(soon);
    while let Some(moment) = moments.last().and_then(next) {
        moments.push(moment);
    }
    let ends = [now() + HOUR / 2, now() + HOUR - MARGIN, now() + 2 * HOUR, now() + 3 * HOUR - MARGIN];
    assert_eq!(moments[1..], ends);
    // Out of use at that moment, not after it.
    assert!(revocation.cover(roots, ends[3] - Duration::from_millis(1)).is_ok());
    assert!(revocation.cover(roots, ends[3]).is_err());
    // Nobody comes from the other root when that has ended.
    assert!(revocation.cover(roots, ends[2] - Duration::from_millis(1)).is_err());
    assert!(revocation.cover(roots, ends[2]).is_ok());
}
