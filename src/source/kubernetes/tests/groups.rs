//! Many names: one watch for a namespace, or bounded calls.

use super::*;

fn many(agent: &Agent, count: usize) -> (Vec<String>, Vec<Subscription>) {
    let names: Vec<_> = (0..count).map(|number| format!("kubernetes://host-{number}")).collect();
    let streams = names.iter().map(|name| agent.open(name)).collect();
    (names, streams)
}

fn put_many(agent: &Agent, count: usize) {
    let (chain, key) = pair_of("ca");
    for number in 0..count {
        let id = secret("shop", &format!("host-{number}"));
        agent.api.put(&id, &[("tls.crt", &chain), ("tls.key", &key)]);
    }
}

#[tokio::test(start_paused = true)]
async fn one_watch_takes_over_where_more_than_a_hundred_names_of_a_namespace_are_asked_for() {
    let agent = Agent::start();
    put_many(&agent, 150);
    let (names, streams) = many(&agent, 150);
    for name in &names {
        agent.until_served(name).await;
    }
    rest(10).await;
    assert_eq!(agent.api.watches(), ["Secret shop/*"]);
    assert!(agent.api.count("get") < 110, "{} calls", agent.api.count("get"));
    // Changes, deletions and new names are noticed.
    let leaf = agent.leaf(&names[3]).unwrap();
    put_pair(&agent.api, &secret("shop", "host-3"));
    agent.until("the change", |agent| agent.leaf(&names[3]).is_some_and(|now| now != leaf)).await;
    agent.api.delete(&secret("shop", "host-4"));
    agent.until("the deletion", |agent| agent.entry(&names[4]).is_withdrawn).await;
    put_pair(&agent.api, &secret("shop", "late"));
    let _late = agent.open("kubernetes://late");
    agent.until_served("kubernetes://late").await;
    let calls = agent.api.lock().calls.len();
    let absent: Vec<_> =
        (0..500).map(|number| agent.open(&format!("kubernetes://absent-{number}"))).collect();
    agent.until("the refusal", |agent| agent.entry("kubernetes://absent-499").is_withdrawn).await;
    assert_eq!(agent.api.lock().calls.len(), calls, "a name that does not exist costs no call");
    put_pair(&agent.api, &secret("shop", "absent-7"));
    agent.until_served("kubernetes://absent-7").await;
    drop((streams, absent));
    rest(600).await;
    assert_eq!(agent.api.watches(), ["Secret shop/*"], "one name is left");
    drop(_late);
    rest(600).await;
    assert!(agent.api.watches().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_list_does_not_wait_for_the_reads_that_it_saves() {
    let agent = Agent::start();
    put_many(&agent, 600);
    // They would take longer than the list.
    agent.api.lock().pace = Some(Duration::from_millis(150));
    let (names, _streams) = many(&agent, 600);
    for name in &names {
        agent.until_served(name).await;
    }
    assert!(agent.api.count("get") < 250, "{} reads", agent.api.count("get"));
}

#[tokio::test(start_paused = true)]
async fn without_the_right_to_list_each_name_keeps_its_own_watch() {
    let agent = Agent::start();
    agent.api.lock().forbidden.insert("list");
    put_many(&agent, 150);
    let (names, _streams) = many(&agent, 150);
    for name in &names {
        agent.until_served(name).await;
    }
    rest(30).await;
    assert_eq!((agent.api.watches().len(), agent.api.count("list")), (150, 1));
    assert_eq!(agent.api.count("watch"), 150);
    let gets = agent.api.count("get");
    assert!((150..190).contains(&gets), "{gets} calls: at most those in flight are repeated");
}

#[tokio::test(start_paused = true)]
async fn all_names_are_read_before_the_first_of_them_is_watched() {
    let agent = Agent::start();
    agent.api.lock().forbidden.insert("list");
    put_many(&agent, 90);
    let (names, _streams) = many(&agent, 90);
    agent.until_served(&names[89]).await;
    let first_watch = agent.api.lock().calls.iter().position(|call| call.starts_with("watch"));
    assert_eq!((agent.api.count("get"), first_watch.unwrap_or(90)), (90, 90));
    // Clients that ask for ever new names don't keep those that are served from being watched.
    agent
        .until("watches", |agent| {
            let _made_up = agent.open(&format!("kubernetes://made-up-{}", fastrand::u64(..)));
            agent.api.watches().len() >= 90
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn what_was_read_before_the_list_of_its_namespace_does_not_replace_what_the_list_has() {
    let agent = Agent::start();
    put_many(&agent, 101);
    // It is read first, and the answer comes between the first page and the last one.
    agent.api.lock().slow = Some(("Secret shop/host-0".to_owned(), Duration::from_millis(44)));
    let (names, _streams) = many(&agent, 100);
    tokio::time::sleep(Duration::from_millis(5)).await;
    put_pair(&agent.api, &secret("shop", "host-0"));
    let _last = agent.open("kubernetes://host-100");
    tokio::time::sleep(Duration::from_millis(25)).await;
    let newest = agent.leaf(&names[0]).expect("the first page has it");
    rest(30).await;
    assert_eq!(agent.leaf(&names[0]), Some(newest));
    assert_eq!(agent.api.watches(), ["Secret shop/*"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_breaks_off_takes_nothing_from_the_objects_own_watches() {
    let agent = Agent::start();
    agent.api.lock().breaks_lists = true;
    put_many(&agent, 150);
    let (names, _streams) = many(&agent, 150);
    for name in &names {
        agent.until_served(name).await;
    }
    rest(100).await;
    for number in [0, 1, 149] {
        let leaf = agent.leaf(&names[number]);
        put_pair(&agent.api, &secret("shop", &format!("host-{number}")));
        rest(1).await;
        assert_ne!(agent.leaf(&names[number]), leaf);
        agent.api.delete(&secret("shop", &format!("host-{number}")));
        rest(1).await;
        assert!(agent.entry(&names[number]).is_withdrawn);
    }
    agent.api.lock().breaks_lists = false;
    agent.until("one watch", |agent| agent.api.watches() == ["Secret shop/*"]).await;
}

#[tokio::test(start_paused = true)]
async fn roots_that_are_asked_for_while_the_namespace_is_listed_are_served() {
    let agent = Agent::start();
    put_many(&agent, 120);
    let ((chain, key), root) = (pair_of("ca"), root_of("ca"));
    let both = [("tls.crt", &*chain), ("tls.key", &*key), ("ca.crt", &*root)];
    agent.api.put(&secret("shop", "host-0"), &both);
    let (names, _streams) = many(&agent, 120);
    // The first page has come, and the last one has not.
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert!(agent.leaf(&names[0]).is_some());
    let _roots = agent.open("kubernetes://host-0-cacert");
    agent.until_served("kubernetes://host-0-cacert").await;
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_names_that_do_not_exist_costs_bounded_calls_and_they_are_remembered() {
    let agent = Agent::start();
    agent.api.lock().forbidden.insert("list");
    // Each is asked for again and again, as with one connection after another.
    for round in 0..20 {
        for number in 0..500 {
            let name =
                format!("flood-{}.example.com", if round < 10 { number } else { number + 500 * round });
            let stream = agent.open(&name);
            if number % 50 == 0 {
                rest(0).await;
            }
            drop(stream);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let gets = agent.api.count("get");
    assert!(gets < 700, "{gets} calls in 10 s");
    assert_eq!(agent.api.count("watch"), 0);
    put_pair(&agent.api, &secret("shop", "real.example.com"));
    rest(30).await;
    let _stream = agent.open("real.example.com");
    agent.until_served("real.example.com").await;
    rest(600).await;
    assert_eq!(agent.cache.snapshot().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_asked_for_while_the_namespace_is_listed_is_not_taken_away() {
    let agent = Agent::start();
    put_many(&agent, 300);
    let (_, _streams) = many(&agent, 101);
    agent.until("the list", |agent| agent.api.count("list") == 1).await;
    let late: Vec<_> = (200..220).map(|number| agent.open(&format!("kubernetes://host-{number}"))).collect();
    for _ in 0..400 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let withdrawn = agent.cache.snapshot().into_iter().find(|one| one.entry.is_withdrawn);
        assert!(withdrawn.is_none(), "{withdrawn:?}");
    }
    assert!((200..220).all(|number| agent.leaf(&format!("kubernetes://host-{number}")).is_some()));
    drop(late);
}

#[tokio::test(start_paused = true)]
async fn names_keep_their_own_watches_where_the_namespace_may_be_listed_and_not_watched() {
    let agent = Agent::start();
    agent.api.lock().forbidden.insert("watch all");
    put_many(&agent, 120);
    let (names, _streams) = many(&agent, 120);
    for name in &names {
        agent.until_served(name).await;
    }
    rest(30).await;
    assert_eq!(agent.api.watches().len(), 120);
    let leaf = agent.leaf(&names[3]).unwrap();
    put_pair(&agent.api, &secret("shop", "host-3"));
    let before = tokio::time::Instant::now();
    agent.until("the change", |agent| agent.leaf(&names[3]).is_some_and(|now| now != leaf)).await;
    assert!(before.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn hundreds_of_forbidden_names_cost_others_nothing() {
    let agent = Agent::start();
    agent.api.lock().forbidden.insert("get");
    let (_, _streams) = many(&agent, 90);
    let more: Vec<_> = (0..500).map(|number| agent.open(&format!("kubernetes://ns-{number}/web"))).collect();
    rest(120).await;
    agent.api.lock().forbidden.clear();
    put_pair(&agent.api, &secret("good", "web"));
    let stream = agent.open("kubernetes://good/web");
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(!agent.entry("kubernetes://good/web").is_withdrawn);
    }
    assert!(agent.leaf("kubernetes://good/web").is_some());
    drop((more, stream));
}
