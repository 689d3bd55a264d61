//! Random events: in the end, streams have what the cluster has.

use super::*;

/// The seeds, or the one that `ATTACHE_MODEL_SEED` names.
fn seeds() -> Vec<u64> {
    match std::env::var("ATTACHE_MODEL_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..6).map(|_| fastrand::u64(..)).collect(),
    }
}

/// As many names of one namespace as make one watch for all of them worthwhile, and a few of another.
fn names() -> Vec<(String, ObjectId)> {
    let of = |namespace: &'static str, count: usize| {
        (0..count).map(move |number| {
            let name = format!("name-{number}");
            (format!("kubernetes://{namespace}/{name}"), secret(namespace, &name))
        })
    };
    of("shop", 130).chain(of("few", 10)).collect()
}

#[tokio::test(start_paused = true)]
async fn after_random_events_streams_have_what_the_cluster_has() {
    let pairs: Vec<_> = (0..4).map(|_| pair_of("ca")).collect();
    for seed in seeds() {
        let mut random = fastrand::Rng::with_seed(seed);
        let agent = Agent::start();
        let names = names();
        let mut streams: HashMap<usize, Subscription> = HashMap::new();
        for _ in 0..600 {
            let at = random.usize(..names.len());
            let (name, id) = &names[at];
            match random.u32(..100) {
                0..40 => drop(streams.insert(at, agent.open(name))),
                40..50 => drop(streams.remove(&at)),
                50..70 => {
                    let (chain, key) = &pairs[random.usize(..pairs.len())];
                    agent.api.put(id, &[("tls.crt", chain), ("tls.key", key)]);
                }
                70..80 => agent.api.delete(id),
                80..83 => agent.api.disconnect(),
                83..86 => agent.api.compact(),
                86..89 => {
                    let is_away = random.bool();
                    agent.api.lock().is_away = is_away;
                    if is_away {
                        agent.api.disconnect();
                    }
                }
                89..91 => {
                    let mut state = agent.api.lock();
                    if !state.forbidden.remove("list") {
                        state.forbidden.insert("list");
                    }
                }
                91..93 => agent.api.lie(id),
                _ => tokio::time::sleep(Duration::from_millis(random.u64(..3_000))).await,
            }
            if random.u32(..10) == 0 {
                tokio::time::sleep(Duration::from_millis(random.u64(..20))).await;
            }
        }
        agent.api.lock().is_away = false;
        rest(90).await;
        for at in streams.keys() {
            let (name, id) = &names[*at];
            let expected = agent.api.lock().objects.get(id).map(|(_, data)| data[0].1.clone());
            let entry = agent.entry(name);
            let served = entry.good.as_ref().map(|good| match &good.secret {
                Secret::KeyPair(pair) => crate::pki::pem::of_certificates(pair.chain()),
                Secret::TrustBundle(_) => panic!(),
            });
            let log = agent
                .api
                .lock()
                .calls
                .iter()
                .filter(|call| call.contains(&*id.name))
                .cloned()
                .collect::<Vec<_>>();
            // Without the root, which is not served.
            let is_same = served.is_some() == expected.is_some()
                && expected.as_ref().zip(served.as_ref()).is_none_or(|(all, leaf)| all.starts_with(leaf));
            assert!(is_same, "seed {seed}: {name}: {:?}, {log:?}", entry.failure());
            assert_eq!(entry.is_withdrawn, expected.is_none(), "seed {seed}: {name}");
        }
    }
}
