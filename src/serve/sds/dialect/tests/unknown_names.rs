//! Names that the agent can never serve.

use super::*;

#[test]
fn a_name_that_can_never_be_served_is_told_once() {
    play(&[
        (
            "alone",
            &[
                Open(&["nobody"]),
                Told(&[], &["nobody"]),
                Silence,
                InDelta(&[Ack, NoVerdict, Nack, NoVerdict]),
                Silence,
            ],
        ),
        (
            "with what is ready, in one response",
            &[
                Publish("a", "1"),
                Open(&["a", "nobody", "another"]),
                Told(&[("a", "1")], &["another", "nobody"]),
                Ack,
                Accepted(&[("a", "1")]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
        (
            "a rejection of that response is about what was sent",
            &[
                Publish("a", "1"),
                Open(&["a", "nobody"]),
                Told(&[("a", "1")], &["nobody"]),
                Nack,
                Rejected(&[("a", "1")]),
                Silence,
            ],
        ),
        (
            "never one that is known and merely not there yet",
            &[
                Open(&["a", "b", "nobody"]),
                Told(&[], &["nobody"]),
                Want(&["a", "nobody"]),
                Silence,
                InDelta(&[Change { ask: &["a"], give_up: &[] }, Silence]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "when it is asked for later",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&["a", "nobody"]),
                Accepted(&[("a", "1")]),
                Told(&[], &["nobody"]),
                Silence,
            ],
        ),
        (
            "again when it is asked for again",
            &[
                Open(&["nobody"]),
                Told(&[], &["nobody"]),
                InDelta(&[
                    Change { ask: &["nobody"], give_up: &[] },
                    Told(&[], &["nobody"]),
                    Change { ask: &["nobody"], give_up: &["nobody"] },
                    Told(&[], &["nobody"]),
                ]),
                Want(&[]),
                Silence,
                Want(&["nobody"]),
                Told(&[], &["nobody"]),
                Silence,
            ],
        ),
        (
            "not if it is given up first",
            &[Open(&["a", "nobody"]), Want(&["a"]), Silence, Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "also one that the client says it holds",
            &[Return(&["nobody"], &[("nobody", "1")]), Told(&[], &["nobody"]), Silence],
        ),
        (
            "all names at once are not meant by a star, nor by an empty name",
            &[
                Publish("a", "1"),
                Open(&["*", ""]),
                Told(&[], &["", "*"]),
                Silence,
                Want(&["*", "", "a"]),
                Sent(&[("a", "1")]),
                Publish("b", "1"),
                Silence,
                Want(&["a"]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
    ]);
}
