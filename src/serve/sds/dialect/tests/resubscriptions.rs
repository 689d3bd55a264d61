//! A subscribed name is requested again.

use super::*;

/// Only delta can request a name twice, or change names without a nonce.
#[test]
fn a_name_that_is_requested_again_is_sent_again() {
    const AGAIN: Step = Change { subscribe: &["a"], unsubscribe: &[] };
    play(&[
        (
            "although it is unchanged and was accepted",
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
            "although the first response waits for its verdict, and each response has its own verdict",
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
            "although its NACK arrives after the second request",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, NackOf("1"), Rejected(&[("a", "1")]), Sent(&[("a", "1")])]),
            ],
        ),
        (
            "although its ACK arrives after the second request",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[AGAIN, AckOf("1"), Accepted(&[("a", "1")]), Sent(&[("a", "1")])]),
            ],
        ),
        (
            "once, although the NACK of the first response arrives after the second response",
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
            "and the second response counts as sent, although the first one was rejected",
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
            "once, however often it is requested before the response",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    AGAIN,
                    Change { subscribe: &["a", "a"], unsubscribe: &[] },
                    AGAIN,
                    Sent(&[("a", "1")]),
                ]),
                Silence,
            ],
        ),
        (
            "alone, without the names that are not requested again",
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
            "when it becomes available",
            &[Open(&["a"]), InDelta(&[AGAIN]), Silence, Publish("a", "1"), Sent(&[("a", "1")]), Silence],
        ),
        (
            "unsubscribed and subscribed in one request",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                InDelta(&[
                    Change { subscribe: &["a"], unsubscribe: &["a"] },
                    Sent(&[("a", "1")]),
                    Publish("a", "2"),
                    Sent(&[("a", "2")]),
                ]),
                Silence,
            ],
        ),
        (
            "unsubscribed and subscribed in two requests",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Ack,
                InDelta(&[
                    Change { subscribe: &[], unsubscribe: &["a"] },
                    Silence,
                    AGAIN,
                    Sent(&[("a", "1")]),
                ]),
                Silence,
            ],
        ),
        (
            "unsubscribed and subscribed while a response waits: its verdict does not count for the next response",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { subscribe: &["a"], unsubscribe: &["a"] },
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
            "a version that was accepted before unsubscribing is not held after subscribing again",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { subscribe: &["a"], unsubscribe: &["a"] },
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
            "unsubscribing from names that were never subscribed has no response",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                InDelta(&[
                    Change { subscribe: &[], unsubscribe: &["b", "unknown", "b", ""] },
                    Silence,
                    Change { subscribe: &[], unsubscribe: &[] },
                    Silence,
                ]),
                Publish("a", "2"),
                Sent(&[("a", "2")]),
            ],
        ),
    ]);
}
