//! Names that the agent can never serve.

use super::*;

#[test]
fn a_name_that_can_never_be_served_is_removed_once() {
    play(&[
        (
            "alone",
            &[
                Open(&["unknown"]),
                SentAndRemoved(&[], &["unknown"]),
                Silence,
                InDelta(&[Ack, NoVerdict, Nack, NoVerdict]),
                Silence,
            ],
        ),
        (
            "with available names, in one response",
            &[
                Publish("a", "1"),
                Open(&["a", "unknown", "another"]),
                SentAndRemoved(&[("a", "1")], &["another", "unknown"]),
                Ack,
                Accepted(&[("a", "1")]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
        (
            "a NACK of that response covers only the sent names",
            &[
                Publish("a", "1"),
                Open(&["a", "unknown"]),
                SentAndRemoved(&[("a", "1")], &["unknown"]),
                Nack,
                Rejected(&[("a", "1")]),
                Silence,
            ],
        ),
        (
            "never a known name that is only not available yet",
            &[
                Open(&["a", "b", "unknown"]),
                SentAndRemoved(&[], &["unknown"]),
                SetNames(&["a", "unknown"]),
                Silence,
                InDelta(&[Change { subscribe: &["a"], unsubscribe: &[] }, Silence]),
                Publish("a", "1"),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "when it is requested later",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                SetNames(&["a", "unknown"]),
                Accepted(&[("a", "1")]),
                SentAndRemoved(&[], &["unknown"]),
                Silence,
            ],
        ),
        (
            "again when it is requested again",
            &[
                Open(&["unknown"]),
                SentAndRemoved(&[], &["unknown"]),
                InDelta(&[
                    Change { subscribe: &["unknown"], unsubscribe: &[] },
                    SentAndRemoved(&[], &["unknown"]),
                    Change { subscribe: &["unknown"], unsubscribe: &["unknown"] },
                    SentAndRemoved(&[], &["unknown"]),
                ]),
                SetNames(&[]),
                Silence,
                SetNames(&["unknown"]),
                SentAndRemoved(&[], &["unknown"]),
                Silence,
            ],
        ),
        (
            "not if it is unsubscribed first",
            &[Open(&["a", "unknown"]), SetNames(&["a"]), Silence, Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "even if the client says it holds it",
            &[Reconnect(&["unknown"], &[("unknown", "1")]), SentAndRemoved(&[], &["unknown"]), Silence],
        ),
        (
            "neither a star nor an empty name is a wildcard",
            &[
                Publish("a", "1"),
                Open(&["*", ""]),
                SentAndRemoved(&[], &["", "*"]),
                Silence,
                SetNames(&["*", "", "a"]),
                Sent(&[("a", "1")]),
                Publish("b", "1"),
                Silence,
                SetNames(&["a"]),
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
    ]);
}
