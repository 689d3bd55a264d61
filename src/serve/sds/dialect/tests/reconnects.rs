//! A client reconnects and holds versions from an earlier stream.

use super::*;

#[test]
fn a_client_that_comes_back_is_sent_only_what_it_does_not_hold() {
    play(&[
        (
            "it holds the one name's newest version",
            &[
                Publish("a", "1"),
                Return(&["a"], &[("a", "1")]),
                NoVerdict,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
        (
            "it holds an older version",
            &[Publish("a", "2"), Return(&["a"], &[("a", "1")]), Sent(&[("a", "2")]), Ack, Silence],
        ),
        (
            "it holds the newest version of all names",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Return(&["a", "b"], &[("a", "1"), ("b", "1")]),
                Silence,
                Publish("b", "2"),
                Sent(&[("b", "2")]),
            ],
        ),
        (
            "it holds an older version of one of them: which, it can say in delta alone",
            &[
                Publish("a", "1"),
                Publish("b", "2"),
                Return(&["a", "b"], &[("a", "1"), ("b", "1")]),
                InSotw(&[Sent(&[("a", "1"), ("b", "2")])]),
                InDelta(&[Sent(&[("b", "2")])]),
                Silence,
            ],
        ),
        (
            "it never held one of them, because there was none",
            &[
                Publish("a", "1"),
                Return(&["a", "b"], &[("a", "1")]),
                Silence,
                Publish("b", "1"),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "what it holds comes only after it: it is judged then",
            &[Return(&["a"], &[("a", "1")]), Silence, Publish("a", "1"), Silence],
        ),
        (
            "its claim is judged only once",
            &[
                Publish("a", "2"),
                Return(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Ack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "its claim holds for what it asked for then, not for a name that it asks for anew",
            &[Return(&["a"], &[("a", "1")]), Want(&[]), Want(&["a"]), Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "a name that it adds later is answered although it comes back with the rest",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Return(&["a"], &[("a", "1")]),
                Silence,
                Want(&["a", "b"]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "the newer version of what it holds was refused: the older one replaces that when it comes back",
            &[
                Publish("a", "2"),
                Return(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Nack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "it holds versions of names that it does not want: in delta they don't matter",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Return(&["a"], &[("a", "1"), ("b", "1"), ("nobody", "1")]),
                InDelta(&[Silence, Want(&["a", "b"])]),
                InSotw(&[Sent(&[("a", "1")]), Want(&["a", "b"])]),
                Sent(&[("b", "1")]),
            ],
        ),
        (
            "it says that it holds nothing that ever was here",
            &[
                Publish("a", "1"),
                Return(&["a"], &[("a", "of another agent")]),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
            ],
        ),
        (
            "it holds what it asks for again: it is answered",
            &[
                Publish("a", "1"),
                Return(&["a"], &[("a", "1")]),
                Silence,
                InDelta(&[Change { ask: &["a"], give_up: &[] }, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
    ]);
}

#[test]
fn a_claim_that_is_no_version_is_nothing_that_is_held() {
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
            &["a", "nobody"],
            vec![("a".to_owned(), claim.clone()), ("nobody".to_owned(), claim.clone())],
        );
        talk.expect(&[], &["nobody"]);
        assert_eq!(talk.last.as_ref().unwrap().version, combined([].into_iter()), "{claim:?} comes back");
        talk.publish("a", "1");
        talk.expect(&[("a", "1")], &[]);
    }
}

#[test]
fn only_the_first_request_says_what_is_kept_from_an_earlier_stream() {
    let mut talk = Talk::<Delta>::default();
    talk.publish("a", "1");
    talk.open(&[], Vec::new());
    talk.wanted.insert("a".to_owned());
    let held = vec![("a".to_owned(), version("a", "1").to_string())];
    talk.receive(Words { subscribe: strings(&["a"]), held, ..talk.words() });
    talk.expect(&[("a", "1")], &[]);
}
