//! The source with a fake endpoint, in virtual time.

pub(super) mod fake;

use std::collections::HashMap;

use prost::Message as _;
use tonic::{Code, Status};

use self::fake::{Ca, Mood, World, answer};
use super::*;
use crate::metrics::ByOutcome;
use crate::proto::X509svidResponse;

const ID: &str = "spiffe://td/web";
const HOUR: Duration = Duration::from_secs(3600);

fn start() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

fn any() -> Wanted {
    Wanted::default()
}

#[tokio::test(start_paused = true)]
async fn what_the_endpoint_pushes_is_served_and_no_other_call_is_made() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    let call = world.call().await;
    assert_eq!(call.path, "/SpiffeWorkloadAPI/FetchX509SVID");
    assert_eq!(call.headers.get("workload.spiffe.io").unwrap(), "true");
    assert_eq!(call.headers.get("content-type").unwrap(), "application/grpc");
    let first = ca.svid(ID, start());
    call.send(&answer([first.clone()]));
    world.wait_serial(&first).await;
    let entry = world.entry(SecretName::Workload);
    let good = entry.good.unwrap();
    assert_eq!((good.origin, good.renews), (Origin::WORKLOAD_API, None));
    assert_eq!(world.roots(), [ca.root()]);
    for minutes in [20, 40] {
        let at = start() + Duration::from_secs(60 * minutes);
        world.clock.sleep_until(at).await;
        let next = ca.svid(ID, at);
        call.send(&answer([next.clone()]));
        world.wait_serial(&next).await;
    }
    assert_eq!(*world.dial.dialled.lock().unwrap(), 1);
    let label = ByOutcome { provider: PROVIDER, outcome: "ok" };
    assert_eq!(world.metrics.ca_requests.get_or_create(&label).get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_root_that_the_endpoint_no_longer_names_stays_for_one_lifetime() {
    let mut world = World::new(any(), Mood::Serves);
    let (old, new) = (Ca::new("old"), Ca::new("new"));
    let call = world.call().await;
    let mut first = old.svid(ID, start());
    call.send(&answer([first.clone()]));
    world.wait_serial(&first).await;
    // Announced.
    first.bundle = [old.root(), new.root()].concat().into();
    call.send(&answer([first]));
    world
        .wait(SecretName::Roots, |entry| entry.good.as_ref().unwrap().secret.to_string().contains("2 root"))
        .await;
    let at = start() + HOUR / 2;
    world.clock.sleep_until(at).await;
    let next = new.svid(ID, at);
    call.send(&answer([next.clone()]));
    world.wait_serial(&next).await;
    assert_eq!(world.roots().len(), 2);
    call.end(Status::unavailable("restart"));
    *world.dial.dialled.lock().unwrap() = 0;
    world.mood.send_replace(Mood::Down);
    world.clock.sleep_until(at + HOUR - Duration::from_secs(1)).await;
    assert_eq!(world.roots().len(), 2, "while the endpoint is away, too");
    world
        .wait(SecretName::Roots, |entry| entry.good.as_ref().unwrap().secret.to_string().contains("1 root"))
        .await;
    assert_eq!(world.clock.now(), at + HOUR);
    let dialled = *world.dial.dialled.lock().unwrap();
    assert!((120..=400).contains(&dialled), "{dialled} attempts in an hour");
}

#[tokio::test(start_paused = true)]
async fn a_process_without_a_registration_entry_waits_for_one() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    for _ in 0..20 {
        world.call().await.end(Status::permission_denied("no identity issued"));
        world.wait_failure("waiting for a registration entry").await;
    }
    assert!(world.clock.now() > start() + Duration::from_secs(120), "it is not asked in a tight loop");
    let call = world.call().await;
    let svid = ca.svid(ID, world.clock.now());
    call.send(&answer([svid.clone()]));
    world.wait_serial(&svid).await;
    assert_eq!(world.entry(SecretName::Workload).failure(), None);
    assert_eq!(world.entry(SecretName::Roots).failure(), None);
}

#[tokio::test(start_paused = true)]
async fn an_outcome_is_reported_with_its_remedy_and_another_call_is_made() {
    let mut world = World::new(any(), Mood::Down);
    let reason = world.wait_failure("SPIFFE endpoint unix:///run/agent.sock: connecting failed").await;
    assert!(reason.contains("is --spiffe-endpoint right?"), "{reason}");
    world.mood.send_replace(Mood::Serves);
    let cases = [
        (Status::invalid_argument("header"), "it answered InvalidArgument: header"),
        (Status::unavailable("soon"), "it answered Unavailable: soon"),
        (Status::unimplemented("no"), "does this socket serve the SPIFFE Workload API?"),
        (Status::permission_denied("not you"), "may this process use the endpoint?"),
        (Status::new(Code::Ok, ""), "ended the stream without a reason"),
    ];
    for (status, words) in cases {
        world.call().await.end(status);
        world.wait_failure(words).await;
    }
    // It answers nothing.
    let _held = world.call().await;
    world.wait_failure("it gave no answer within 15s").await;
    let long = world.call().await;
    long.send_raw([&[0_u8][..], &(u32::MAX / 2).to_be_bytes()].concat());
    world.wait_failure("longer than 4194304 bytes").await;
}

#[tokio::test(start_paused = true)]
async fn a_bad_answer_takes_no_good_value_away() {
    let (mut world, ca, other) = (World::new(any(), Mood::Serves), Ca::new("ca"), Ca::new("other"));
    let call = world.call().await;
    let good = ca.svid(ID, start());
    call.send(&answer([good.clone()]));
    world.wait_serial(&good).await;
    let changed = |change: &dyn Fn(&mut crate::proto::X509svid)| {
        let mut svid = ca.svid(ID, start());
        change(&mut svid);
        answer([svid]).encode_to_vec()
    };
    let strangers = other.svid(ID, start());
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![0xff; 30], "it is not an X509SVIDResponse"),
        (Vec::new(), "it holds no SVID"),
        (changed(&|it| it.spiffe_id = "web".into()), "\"web\" is not a SPIFFE ID"),
        (
            changed(&|it| it.spiffe_id = "spiffe://td/db".into()),
            "has a certificate that names spiffe://td/web",
        ),
        (changed(&|it| it.x509_svid = vec![1, 2, 3].into()), "has a certificate that can't be read"),
        (changed(&|it| it.x509_svid = Bytes::new()), "has a certificate that can't be read: there is none"),
        (changed(&|it| it.x509_svid_key = vec![1, 2, 3].into()), "has a key that can't be used"),
        (
            changed(&|it| it.x509_svid_key = strangers.x509_svid_key.clone()),
            "does not belong to its certificate",
        ),
        (changed(&|it| it.bundle = Bytes::new()), "comes without a bundle"),
        (changed(&|it| it.bundle = vec![48].into()), "has a bundle that can't be read"),
        (changed(&|it| it.bundle = other.root().into()), "the SVID of spiffe://td/web: the certificate"),
        (answer([ca.svid(ID, start() - 2 * HOUR)]).encode_to_vec(), "expired at"),
        (answer([ca.svid(ID, start() + 20 * HOUR)]).encode_to_vec(), "valid only from"),
    ];
    let mut call = call;
    for (message, words) in cases {
        call.send_bytes(&message);
        world.wait_failure(words).await;
        world.wait_serial(&good).await;
        assert_eq!(world.roots(), [ca.root()], "{words}");
        call = world.call().await;
    }
    let next = ca.svid(ID, world.clock.now());
    call.send(&answer([next.clone()]));
    world.wait_serial(&next).await;
    assert_eq!(world.entry(SecretName::Workload).failure(), None);
}

#[tokio::test(start_paused = true)]
async fn a_root_in_the_chain_makes_nothing_trusted() {
    let (mut world, ca, other) = (World::new(any(), Mood::Serves), Ca::new("ca"), Ca::new("other"));
    let mut svid = ca.svid(ID, start());
    svid.x509_svid = [svid.x509_svid.to_vec(), other.root(), ca.root()].concat().into();
    world.call().await.send(&answer([svid]));
    world.wait(SecretName::Workload, |entry| entry.good.is_some()).await;
    assert_eq!(world.roots(), [ca.root()]);
}

#[tokio::test(start_paused = true)]
async fn of_several_identities_the_first_or_the_configured_one_is_served() {
    let ca = Ca::new("ca");
    let mut hinted = ca.svid("spiffe://td/hinted", start());
    hinted.hint = "internal".to_owned();
    let all = [ca.svid(ID, start()), ca.svid("spiffe://td/db", start()), hinted];
    let id = |text: &str| Some(text.parse().unwrap());
    let cases = [
        (any(), Ok(0)),
        (Wanted { id: id("spiffe://td/db"), ..any() }, Ok(1)),
        (Wanted { hint: Some("internal".into()), ..any() }, Ok(2)),
        (Wanted { trust_domain: Some("td".into()), ..any() }, Ok(0)),
        (Wanted { trust_domain: Some("other".into()), ..any() }, Err("is not in the trust domain other")),
        (
            Wanted { id: id("spiffe://td/none"), ..any() },
            Err("--spiffe-id spiffe://td/none is not among its SVIDs (spiffe://td/web, spiffe://td/db, \
                 spiffe://td/hinted with hint internal)"),
        ),
        (Wanted { id: id(ID), hint: Some("internal".into()), ..any() }, Err("and --spiffe-hint internal")),
    ];
    for (wanted, expected) in cases {
        let mut world = World::new(wanted.clone(), Mood::Serves);
        world.call().await.send(&answer(all.clone()));
        match expected {
            Ok(index) => world.wait_serial(&all[index]).await,
            Err(words) => drop(world.wait_failure(words).await),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_is_followed_by_another_and_costs_nothing() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    let svid = ca.svid(ID, start());
    for status in [Status::new(Code::Ok, ""), Status::unavailable("restart"), Status::cancelled("")] {
        let call = world.call().await;
        call.send(&answer([svid.clone()]));
        world.wait_serial(&svid).await;
        call.end(status);
    }
    let _call = world.call().await;
    assert_eq!(world.entry(SecretName::Workload).failure(), None);
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_stands_still_is_noticed() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    let svid = ca.svid(ID, start());
    let call = world.call().await;
    call.send(&answer([svid.clone()]));
    world.wait_serial(&svid).await;
    world.mood.send_replace(Mood::Frozen);
    world.wait_failure("it gave no answer within 15s").await;
    assert!(world.clock.now() < start() + Duration::from_secs(400));
    world.mood.send_replace(Mood::Serves);
    world.call().await.send(&answer([svid.clone()]));
    world.wait(SecretName::Workload, |entry| entry.failure().is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_requested_renewal_makes_another_call() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    let call = world.call().await;
    let svid = ca.svid(ID, start());
    call.send(&answer([svid.clone()]));
    world.wait_serial(&svid).await;
    let renewed = {
        let (cache, key) = (world.cache.clone(), world.key(SecretName::Workload));
        tokio::spawn(async move { cache.renew(&key).await })
    };
    call.left().await;
    let next = ca.svid(ID, start());
    world.call().await.send(&answer([next.clone()]));
    assert_eq!(renewed.await.unwrap(), Ok(()));
    world.wait_serial(&next).await;
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_is_not_renewed_is_asked_for_and_reported() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    let svid = ca.svid(ID, start());
    let call = world.call().await;
    call.send(&answer([svid.clone()]));
    world.wait_serial(&svid).await;
    call.left().await;
    let due = start() + HOUR * 7 / 8;
    assert!((due..due + Duration::from_secs(2)).contains(&world.clock.now()), "{:?}", world.clock.now());
    world.call().await.send(&answer([svid.clone()]));
    let again = world.call().await;
    again.send(&answer([svid.clone()]));
    world.wait_failure("it has not renewed the certificate").await;
    // Its own health, before anything expires.
    let health = world.cache.health(world.clock.now());
    assert!(
        health.is_ready() && health.failing.iter().any(|problem| problem.name == "default"),
        "{health:?}"
    );
    let next = ca.svid(ID, world.clock.now());
    world.call().await.send(&answer([next.clone()]));
    world.wait(SecretName::Workload, |entry| entry.failure().is_none()).await;
    world.wait_serial(&next).await;
}

#[tokio::test(start_paused = true)]
async fn crls_of_an_answer_are_in_the_bundle_until_they_are_out_of_date() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    let call = world.call().await;
    let mut with_crl = answer([ca.svid(ID, start())]);
    with_crl.crl = vec![ca.crl(start() - HOUR, start() + HOUR / 4)];
    call.send(&with_crl);
    let crls = |entry: &crate::store::Entry| match entry.good.as_deref().map(|good| &good.secret) {
        Some(Secret::TrustBundle(bundle)) => bundle.crls().len(),
        _ => 0,
    };
    world.wait(SecretName::Roots, |entry| crls(entry) == 1).await;
    with_crl.crl = vec![vec![1, 2].into()];
    call.send(&with_crl);
    world.wait(SecretName::Roots, |entry| entry.good.is_some() && crls(entry) == 0).await;
    let left = (start() + HOUR / 4).duration_since(world.clock.now()).unwrap();
    assert!(
        left > Duration::ZERO && left < Duration::from_secs(3),
        "Envoy must not meet it afterwards: {left:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn bundles_of_other_trust_domains_are_served_as_long_as_the_endpoint_delivers_them() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    let [two, other] = ["two", "other"].map(Ca::new);
    let call = world.call().await;
    let mut message = answer([ca.svid(ID, start())]);
    let set = |message: &mut X509svidResponse, bundles: &[(&str, Vec<u8>)]| {
        let bundles = bundles.iter().map(|(domain, der)| ((*domain).to_owned(), der.clone().into()));
        message.federated_bundles = bundles.collect();
    };
    let served = |world: &World| {
        let all = world.cache.federated(world.workload, world.clock.now());
        let one = |one: &crate::store::Federated| {
            (one.name.as_str().to_owned(), one.bundle().unwrap().roots()[0].to_vec())
        };
        all.iter().map(one).collect::<Vec<_>>()
    };
    let of = |name: &str| SecretName::Federated(crate::secret::FederatedName::new(name).unwrap());
    // A bad name, and the own domain, cost themselves alone.
    set(
        &mut message,
        &[("spiffe://two", two.root()), ("spiffe://td", other.root()), ("https://bad", other.root())],
    );
    call.send(&message);
    world.wait(of("two"), |entry| entry.good.is_some()).await;
    world.wait(SecretName::Workload, |entry| entry.good.is_some()).await;
    assert_eq!(served(&world), [("spiffe://two".to_owned(), two.root())]);
    assert_eq!(world.roots(), [ca.root()], "what is federated is not trusted as the own domain");

    set(&mut message, &[("spiffe://two", vec![1, 2, 3]), ("spiffe://three", other.root())]);
    call.send(&message);
    world.wait(of("three"), |entry| entry.good.is_some()).await;
    let failure = world.wait(of("two"), |entry| entry.failure().is_some()).await.failure().unwrap();
    assert!(failure.contains("bundle can't be used"), "{failure}");
    assert_eq!(served(&world).len(), 2, "the last good one stays");

    set(&mut message, &[("spiffe://two", other.root())]);
    call.send(&message);
    world.wait(of("three"), |entry| entry.is_withdrawn).await;
    assert_eq!(served(&world), [("spiffe://two".to_owned(), other.root())]);
    assert_eq!(world.entry(of("two")).failure(), None);
    world.mood.send_replace(Mood::Down);
    world.wait(of("two"), |entry| entry.failure().is_some()).await;
    assert_eq!(served(&world).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_is_dated_back_is_as_old_as_its_arrival() {
    let (mut world, ca) = (World::new(any(), Mood::Serves), Ca::new("ca"));
    // Of its hour, a minute is left.
    let svid = ca.svid(ID, start() - HOUR + Duration::from_secs(60));
    let call = world.call().await;
    call.send(&answer([svid.clone()]));
    world.wait_serial(&svid).await;
    call.left().await;
    assert!(world.clock.now() >= start() + Duration::from_secs(52), "{:?}", world.clock.now());
    assert_eq!(world.entry(SecretName::Workload).failure(), None);
}
