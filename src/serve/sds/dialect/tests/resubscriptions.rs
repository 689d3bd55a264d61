//! A subscribed name is requested again.

use super::*;

/// What only delta can say: there is no other way to ask twice, nor to speak of names without an answer.
#[test]
fn a_name_that_is_asked_for_again_is_answered_again() {
    const AGAIN: Step = Change { ask: &["a"], give_up: &[] };
    play(&[
        (
            "although it is unchanged and was taken",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                InDelta(&[AGAIN, NoVerdict, Sent(&[("a", "1")]), Ack, Accepted(&[("a", "1")])]),
                Silence,
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "although it was not answered yet, and each answer has its verdict",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    AGAIN,
                    Sent(&[("a", "1")]),
                    AckOf("1"),
                    Accepted(&[("a", "1")]),
                    AckOf("2"),
                    Accepted(&[("a", "1")]),
                ]),
                Silence,
            ],
        ),
        (
            "although it was rejected, and it can be rejected again",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Nack,
                InDelta(&[AGAIN, Sent(&[("a", "1")]), Nack, Rejected(&[("a", "1")])]),
                Silence,
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "although its rejection comes after the question",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, NackOf("1"), Rejected(&[("a", "1")]), Sent(&[("a", "1")])]),
            ],
        ),
        (
            "although its acceptance comes after the question",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, AckOf("1"), Accepted(&[("a", "1")]), Sent(&[("a", "1")])]),
            ],
        ),
        (
            "once, although the rejection of the first answer comes after the second",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    AGAIN,
                    Sent(&[("a", "1")]),
                    NackOf("1"),
                    Rejected(&[("a", "1")]),
                    Silence,
                    AckOf("2"),
                    Accepted(&[("a", "1")]),
                ]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
        (
            "and what it was answered with stands, although the first answer was rejected",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                InDelta(&[
                    AGAIN,
                    Sent(&[("a", "2")]),
                    NackOf("2"),
                    Rejected(&[("a", "2")]),
                    Publish("a", "1"),
                    Sent(&[("a", "1")]),
                ]),
            ],
        ),
        (
            "once, however often it is asked for in between",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, Change { ask: &["a", "a"], give_up: &[] }, AGAIN, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
        (
            "alone, without the names that are not asked for again",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                InDelta(&[AGAIN, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
        (
            "with the newest value, and once",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Silence,
            ],
        ),
        (
            "when it comes, if it is not there yet",
            &[Open(&["a"]), InDelta(&[AGAIN]), Silence, Publish("a", "1"), Sent(&[("a", "1")]), Silence],
        ),
        (
            "given up and asked for in one request",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                InDelta(&[
                    Change { ask: &["a"], give_up: &["a"] },
                    Sent(&[("a", "1")]),
                    Publish("a", "2"),
                    Sent(&[("a", "2")]),
                ]),
                Silence,
            ],
        ),
        (
            "given up and asked for in two requests",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                InDelta(&[Change { ask: &[], give_up: &["a"] }, Silence, AGAIN, Sent(&[("a", "1")])]),
                Silence,
            ],
        ),
        (
            "given up and asked for while a response is unanswered: its verdict is not about the next one",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { ask: &["a"], give_up: &["a"] },
                    Sent(&[("a", "1")]),
                    NackOf("1"),
                    Rejected(&[("a", "1")]),
                    Silence,
                    AckOf("2"),
                    Accepted(&[("a", "1")]),
                    Silence,
                    Publish("a", "2"),
                    Sent(&[("a", "2")]),
                ]),
            ],
        ),
        (
            "what was taken before it was given up is not held when it is asked for anew",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { ask: &["a"], give_up: &["a"] },
                    Publish("a", "2"),
                    Sent(&[("a", "2")]),
                    AckOf("1"),
                    Accepted(&[("a", "1")]),
                    NackOf("2"),
                    Publish("a", "1"),
                    Sent(&[("a", "1")]),
                ]),
            ],
        ),
        (
            "names that were never asked for are given up without a word",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { ask: &[], give_up: &["b", "nobody", "b", ""] },
                    Silence,
                    Change { ask: &[], give_up: &[] },
                    Silence,
                ]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
    ]);
}
