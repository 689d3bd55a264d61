use std::time::UNIX_EPOCH;

use super::super::publisher::LINGER;
use super::super::values::Values;
use super::super::{
    Cache, Connection, Key, NotServed, Origin, Published, Publisher, Scope, Subscriber, Subscription,
    Workload,
};
use super::*;
use crate::pki::key::{KeyType, SigningKey};
use crate::secret::{Payload, Secret, TrustBundle};

fn named(workload: Workload, index: usize) -> Key {
    Key { workload, name: format!("file-root:{index}").parse().unwrap() }
}

fn bundle() -> Secret {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let root = rcgen::CertificateParams::default().self_signed(&key).unwrap();
    Secret::TrustBundle(TrustBundle::new(vec![root.der().clone()]).unwrap())
}

/// A source of all file names in `scope`.
fn demand_in(cache: &Cache, scope: Scope) -> Result<Demand, AlreadyTaken> {
    cache.demand(NameKind::File, scope, |_: &SecretName| Ok(()))
}

#[tokio::test(start_paused = true)]
async fn a_name_on_demand_lives_as_long_as_its_streams_and_five_minutes_longer_with_a_good_value() {
    let (cache, workload) = Cache::with_workload("");
    let key = named(workload, 0);
    assert_eq!(cache.subscribe(&key).unwrap_err(), NotServed::NoSource, "no source takes demand yet");
    let mut demand = demand_in(&cache, Scope::Every).unwrap();
    let stream = cache.subscribe(&key).unwrap();
    let second = cache.subscribe(&key).unwrap();
    assert_eq!(demand.try_next(), Some(key.clone()));
    assert_eq!(demand.try_next(), None, "demand is passed on once");
    let files = cache.publisher(key.clone(), Origin::FILES);
    drop(stream);
    assert!(!cache.retire(&key), "a stream is left");
    drop(second);
    files.deserted().await;
    assert!(cache.retire(&key));
    assert!(cache.snapshot().is_empty());

    let stream = cache.subscribe(&key).unwrap();
    assert_eq!(demand.try_next(), Some(key.clone()), "a new entry is new demand");
    let files = cache.publisher(key, Origin::FILES);
    files.publish(bundle(), UNIX_EPOCH, None);
    drop(stream);
    let deserted = tokio::time::timeout(LINGER / 2, files.deserted()).await;
    assert!(deserted.is_err(), "a good value is kept for an Envoy that reconnects");
    tokio::time::timeout(2 * LINGER, files.deserted()).await.unwrap();
}

#[test]
fn the_number_of_names_on_demand_is_bounded() {
    let (cache, workload) = Cache::with_workload("");
    let _demand = demand_in(&cache, Scope::Every).unwrap();
    let max = limits::NAMES_ON_DEMAND;
    let streams: Vec<_> = (0..max).map(|index| cache.subscribe(&named(workload, index)).unwrap()).collect();
    let one_more = named(workload, max);
    assert_eq!(cache.subscribe(&one_more).unwrap_err(), NotServed::TooMany);
    assert!(cache.subscribe(&named(workload, 0)).is_ok(), "existing entries are served");
    drop(streams);
    assert!(cache.retire(&named(workload, 1)));
    assert!(cache.subscribe(&one_more).is_ok());
}

#[test]
fn a_second_source_does_not_replace_the_first() {
    let (cache, workload) = Cache::with_workload("");
    let mut first = demand_in(&cache, Scope::Every).unwrap();
    assert_eq!(demand_in(&cache, Scope::Every).unwrap_err(), AlreadyTaken(NameKind::File));
    let _stream = cache.subscribe(&named(workload, 0)).unwrap();
    assert_eq!(first.try_next(), Some(named(workload, 0)));
    drop(first);
    assert_eq!(cache.subscribe(&named(workload, 1)).unwrap_err(), NotServed::NoSource);
    let mut second = demand_in(&cache, Scope::Every).unwrap();
    let _stream = cache.subscribe(&named(workload, 1)).unwrap();
    assert_eq!(second.try_next(), Some(named(workload, 1)));
}

#[test]
fn a_workloads_own_source_comes_before_the_one_for_every_workload() {
    let (cache, one) = Cache::with_workload("one");
    let other = cache.add_workload("other");
    let mut every = demand_in(&cache, Scope::Every).unwrap();
    let mut own = demand_in(&cache, Scope::Workload(one)).unwrap();
    let _streams = [one, other].map(|workload| cache.subscribe(&named(workload, 0)).unwrap());
    assert_eq!((own.try_next(), own.try_next()), (Some(named(one, 0)), None));
    assert_eq!((every.try_next(), every.try_next()), (Some(named(other, 0)), None));
}

#[test]
fn the_workloads_own_names_are_no_demand() {
    let (cache, workload) = Cache::with_workload("");
    let _demand = demand_in(&cache, Scope::Every).unwrap();
    let key = Key { workload, name: crate::secret::SecretName::Roots };
    assert_eq!(cache.subscribe(&key).unwrap_err(), NotServed::NoSource);
}

#[test]
fn a_name_that_its_source_never_serves_gets_no_entry() {
    let (cache, workload) = Cache::with_workload("");
    let forbidden = named(workload, 1);
    let name = forbidden.name.clone();
    let admission = move |asked: &SecretName| if *asked == name { Err("outside") } else { Ok(()) };
    let mut demand = cache.demand(NameKind::File, Scope::Every, admission).unwrap();
    let refusal = cache.subscribe(&forbidden).unwrap_err();
    assert_eq!((refusal, refusal.label()), (NotServed::Forbidden("outside"), "forbidden"));
    assert_eq!((demand.try_next(), cache.snapshot().len()), (None, 0));
    let _stream = cache.subscribe(&named(workload, 2)).unwrap();
    assert_eq!(demand.try_next(), Some(named(workload, 2)));
}

#[tokio::test]
async fn a_source_learns_when_the_last_stream_of_a_name_leaves() {
    let (cache, workload) = Cache::with_workload("");
    let mut demand = demand_in(&cache, Scope::Every).unwrap();
    let key = named(workload, 0);
    let [first, second] = [(), ()].map(|()| cache.subscribe(&key).unwrap());
    drop(first);
    assert_eq!(demand.next().await, Some(Event::Wanted(key.clone())));
    drop(second);
    assert_eq!(demand.next().await, Some(Event::Deserted(key.clone())));
    drop(cache.subscribe(&key).unwrap());
    assert_eq!(demand.next().await, Some(Event::Deserted(key)));
}

/// Two names of two connections, and room for the value of one.
struct Crowded {
    cache: Cache,
    demand: Demand,
    keys: [Key; 2],
    streams: [Option<Subscription>; 2],
    publishers: [Publisher; 2],
    bundles: [Secret; 2],
    /// Of one value.
    bytes: usize,
}

impl Crowded {
    fn new() -> Self {
        let (cache, workload) = Cache::with_workload("");
        let demand = demand_in(&cache, Scope::Every).unwrap();
        let (bundles, bytes) = bundles_without_room(&cache);
        let keys = [0, 1].map(|index| named(workload, index));
        let subscribe = |key| cache.subscribe_as(key, &Subscriber::new(Connection::distinct()), 0).unwrap();
        let streams = keys.each_ref().map(|key| Some(subscribe(key)));
        let publishers = keys.each_ref().map(|key| cache.publisher(key.clone(), Origin::FILES));
        Self { cache, demand, keys, streams, publishers, bundles, bytes }
    }

    fn publish(&self, name: usize, bundle: usize) -> Published {
        self.publishers[name].publish(self.bundles[bundle].clone(), UNIX_EPOCH, None)
    }

    /// The stream of a name leaves, and its source gives it up.
    fn leave(&mut self, name: usize) {
        self.streams[name] = None;
        assert!(self.cache.retire(&self.keys[name]));
    }

    fn asked(&mut self) -> Option<Key> {
        self.demand.try_next()
    }
}

/// Two values, and room for one of them; the bytes of one.
fn bundles_without_room(cache: &Cache) -> ([Secret; 2], usize) {
    let bundles = [bundle(), bundle()];
    let bytes = Payload::of(&bundles[0]).bytes().len();
    cache.lock().values = Values::new(2 * bytes + bytes / 2);
    (bundles, bytes)
}

#[test]
fn a_value_without_room_is_not_served_unless_it_costs_nothing() {
    let mut names = Crowded::new();
    assert_eq!(names.publish(0, 0), Published::Changed);
    assert_eq!(names.publish(1, 1), Published::NoRoom);
    let second = names.streams[1].as_ref().unwrap();
    let reason = second.entry(|entry| entry.failure()).unwrap();
    assert!(reason.contains("no room for its") && reason.contains("when there is room"), "{reason}");
    assert_eq!(names.publish(1, 0), Published::Changed, "the same content costs nothing more");
    assert_eq!(names.publish(1, 1), Published::NoRoom);
    assert!(second.entry(|entry| entry.good.is_some()), "the last good value stays");
    names.leave(0);
    assert_eq!(names.cache.lock().values.taken(), names.bytes, "the shared content is still served");
    names.leave(1);
    assert_eq!(names.cache.lock().values.taken(), 0);
}

#[test]
fn the_source_of_a_value_that_waits_is_asked_when_another_is_released() {
    let mut names = Crowded::new();
    let [first, second] = names.keys.clone();
    assert_eq!([names.asked(), names.asked()], [Some(first), Some(second.clone())]);
    assert_eq!(names.publish(0, 0), Published::Changed);
    assert_eq!(names.publish(1, 1), Published::NoRoom);
    assert_eq!(names.asked(), None);
    names.leave(0);
    assert_eq!(names.asked(), Some(second), "it is asked for again");
    assert_eq!(names.publish(1, 1), Published::Changed);
}

#[test]
fn values_that_wait_cost_nothing_once_their_names_are_gone() {
    let (cache, workload) = Cache::with_workload("");
    let mut demand = demand_in(&cache, Scope::Every).unwrap();
    let (key, again) = (named(workload, 0), named(workload, 1));
    let (bundles, _) = bundles_without_room(&cache);
    let first = cache.subscribe(&key).unwrap();
    let publish = |key: &Key, bundle: &Secret| {
        cache.publisher(key.clone(), Origin::FILES).publish(bundle.clone(), UNIX_EPOCH, None)
    };
    assert_eq!(publish(&key, &bundles[0]), Published::Changed);
    let greedy = Subscriber::new(Connection::distinct());
    for _ in 0..3 * limits::NAMES_ON_DEMAND {
        let stream = cache.subscribe_as(&again, &greedy, 0).unwrap();
        assert_eq!(publish(&again, &bundles[1]), Published::NoRoom);
        assert_eq!(publish(&again, &bundles[1]), Published::NoRoom, "it waits in one place");
        drop(stream);
        assert!(cache.retire(&again));
    }
    let waiting = cache.lock().values.waiting();
    assert!(waiting <= 2 * limits::NAMES_ON_DEMAND, "{waiting}");
    let _stream = cache.subscribe_as(&again, &greedy, 0).unwrap();
    assert_eq!(publish(&again, &bundles[1]), Published::NoRoom);
    while demand.try_next().is_some() {}
    drop(first);
    assert!(cache.retire(&key));
    assert_eq!(demand.try_next(), Some(again), "it is asked for again");
}
