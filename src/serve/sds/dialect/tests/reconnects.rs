//! A client reconnects and holds versions from an earlier stream.

use super::*;

#[test]
fn a_reconnecting_client_is_sent_only_what_it_does_not_hold() {
    play(&[
        (
            "the client holds the newest version of its only name",
            &[
                Publish("a", "1"),
                Reconnect(&["a"], &[("a", "1")]),
                NoVerdict,
                Silence,
                Held(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Held(&[]),
            ],
        ),
        (
            "the client holds an older version",
            &[
                Publish("a", "2"),
                Reconnect(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Ack,
                Silence,
                Held(&[]),
            ],
        ),
        (
            "the client holds the newest version of all names",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Reconnect(&["a", "b"], &[("a", "1"), ("b", "1")]),
                Silence,
                Held(&[("a", "1"), ("b", "1")]),
                Publish("b", "2"),
                Sent(&[("b", "2")]),
            ],
        ),
        (
            "the client holds an older version of one name: only delta can say of which",
            &[
                Publish("a", "1"),
                Publish("b", "2"),
                Reconnect(&["a", "b"], &[("a", "1"), ("b", "1")]),
                InSotw(&[Sent(&[("a", "1"), ("b", "2")])]),
                InDelta(&[Sent(&[("b", "2")])]),
                Silence,
                InSotw(&[Held(&[])]),
                InDelta(&[Held(&[("a", "1")])]),
            ],
        ),
        (
            "the client holds no version of a name that was not available",
            &[
                Publish("a", "1"),
                Reconnect(&["a", "b"], &[("a", "1")]),
                Silence,
                Publish("b", "1"),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "the held version is published only later: it is not sent then",
            &[
                Reconnect(&["a"], &[("a", "1")]),
                Silence,
                Held(&[]),
                Publish("a", "1"),
                Silence,
                Held(&[("a", "1")]),
            ],
        ),
        (
            "the claim counts only once",
            &[
                Publish("a", "2"),
                Reconnect(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Ack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "the claim does not count for a name that is subscribed again",
            &[
                Reconnect(&["a"], &[("a", "1")]),
                SetNames(&[]),
                SetNames(&["a"]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "a name that is added later is sent, although the others are held",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Reconnect(&["a"], &[("a", "1")]),
                Silence,
                SetNames(&["a", "b"]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "the newer version was rejected: the held older one replaces it when it returns",
            &[
                Publish("a", "2"),
                Reconnect(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Nack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "the client holds versions of other names: delta ignores them",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Reconnect(&["a"], &[("a", "1"), ("b", "1"), ("unknown", "1")]),
                InDelta(&[Silence, SetNames(&["a", "b"])]),
                InSotw(&[Sent(&[("a", "1")]), SetNames(&["a", "b"])]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "the client holds a version that never existed here",
            &[
                Publish("a", "1"),
                Reconnect(&["a"], &[("a", "of another agent")]),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
            ],
        ),
        (
            "the client holds a version and requests the name again: it is sent",
            &[
                Publish("a", "1"),
                Reconnect(&["a"], &[("a", "1")]),
                Silence,
                InDelta(&[Change { subscribe: &["a"], unsubscribe: &[] }, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
    ]);
}

#[test]
fn a_held_version_that_is_malformed_is_ignored() {
    let junk = [
        "",
        "1",
        "\0\n",
        "0123456789ABCDEF0123456789ABCDEF",
        "é".repeat(16).as_str(),
        "f".repeat(100_000).as_str(),
    ]
    .map(str::to_owned);
    for claim in junk {
        let mut talk = Talk::<Delta>::default();
        talk.open(
            &["a", "unknown"],
            vec![("a".to_owned(), claim.clone()), ("unknown".to_owned(), claim.clone())],
        );
        talk.expect(&[], &["unknown"]);
        assert_eq!(talk.last.as_ref().unwrap().version, combined([].into_iter()), "{claim:?} was echoed");
        talk.publish("a", "1");
        talk.expect(&[("a", "1")], &[]);
    }
}

#[test]
fn only_the_first_request_can_name_held_versions() {
    let mut talk = Talk::<Delta>::default();
    talk.publish("a", "1");
    talk.open(&[], Vec::new());
    talk.subscribed.insert("a".to_owned());
    let held = vec![("a".to_owned(), version("a", "1").to_string())];
    talk.receive(RequestFields { subscribe: strings(&["a"]), held, ..talk.fields() });
    talk.expect(&[("a", "1")], &[]);
}
