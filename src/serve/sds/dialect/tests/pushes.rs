//! What is sent, and when: each version once, each name on its own.

use super::*;

#[test]
fn a_version_is_sent_once_and_the_next_one_is_pushed() {
    play(&[
        (
            "an available secret is sent at once, and not again",
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
            "of two updates before a push, the newest is sent",
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
            "an update that is reverted before it is pushed is not pushed",
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
            "a missing ACK holds nothing back",
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
            "a repeated answer is one verdict",
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
fn every_name_is_sent_on_its_own() {
    play(&[
        (
            "available names are sent at once, the others when they become available",
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
            "an unknown name is never sent and holds nothing back",
            &[
                Open(&["a", "unknown"]),
                SentAndRemoved(&[], &["unknown"]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
                Ack,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                SetNames(&["unknown"]),
                Silence,
            ],
        ),
        (
            "available names are sent in one response, sorted",
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
            "a name that is listed twice is one name",
            &[Publish("a", "1"), Open(&["a", "a"]), Sent(&[("a", "1")]), Ack, Silence],
        ),
        ("a request without names has no response", &[Publish("a", "1"), Open(&[]), Silence]),
    ]);
}
