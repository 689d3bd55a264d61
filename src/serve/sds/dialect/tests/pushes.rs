//! What is sent when: each version once, each name by itself.

use super::*;

#[test]
fn a_version_is_sent_once_and_the_next_one_is_pushed() {
    play(&[
        (
            "what is there is sent at once, and not again",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                NoVerdict,
                Sent(&[("a", "1")]),
                Silence,
                Ack,
                Accepted(&[("a", "1")]),
                Silence,
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "a renewal is pushed once",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Accepted(&[("a", "2")]),
                Silence,
            ],
        ),
        (
            "of two updates before a push the newest is sent",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Publish("a", "3"),
                Sent(&[("a", "3")]),
                Ack,
                Accepted(&[("a", "3")]),
                Silence,
            ],
        ),
        (
            "an update that is taken back before it is pushed is no update",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "an answer that never comes holds nothing back",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Publish("a", "3"),
                Sent(&[("a", "3")]),
                Ack,
                Accepted(&[("a", "3")]),
                Silence,
            ],
        ),
        (
            "an answer twice is one verdict",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Accepted(&[("a", "1")]),
                Ack,
                NoVerdict,
                Nack,
                NoVerdict,
                Silence,
            ],
        ),
    ]);
}

#[test]
fn every_name_has_its_own_fate() {
    play(&[
        (
            "what is ready is sent at once, the rest when it comes",
            &[
                Publish("b", "1"),
                Open(&["a", "b", "c"]),
                Sent(&[("b", "1")]),
                Ack,
                Publish("c", "1"),
                Sent(&[("c", "1")]),
                Ack,
                Publish("a", "1"),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
            ],
        ),
        (
            "a name that nobody gives is never sent and holds nothing back",
            &[
                Open(&["a", "nobody"]),
                Told(&[], &["nobody"]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Want(&["nobody"]),
                Silence,
            ],
        ),
        (
            "several names that are ready go in one response, sorted",
            &[
                Publish("b", "1"),
                Publish("a", "1"),
                Open(&["b", "a"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                Accepted(&[("a", "1"), ("b", "1")]),
            ],
        ),
        (
            "a name that is asked for twice is one name",
            &[Publish("a", "1"), Open(&["a", "a"]), Sent(&[("a", "1")]), Ack, Silence],
        ),
        ("no name at all is no answer", &[Publish("a", "1"), Open(&[]), Silence]),
    ]);
}
