//! Cases from other agents' test suites.

use super::*;

/// Situations of the tests of SPIRE's agent (`sds/v3`) and of Istio's (`sds` and `xds`), which are not named above.
#[test]
fn what_other_agents_test_holds_here() {
    play(&[
        (
            "SPIRE: key pair and bundle on one stream, then both renewed",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                Publish("a", "2"),
                Publish("b", "2"),
                Sent(&[("a", "2"), ("b", "2")]),
                Ack,
                Accepted(&[("a", "2"), ("b", "2")]),
                Silence,
            ],
        ),
        (
            "SPIRE: an update that is not about what was asked for is not sent",
            &[Publish("a", "1"), Open(&["a"]), Sent(&[("a", "1")]), Ack, Publish("b", "1"), Silence],
        ),
        (
            "SPIRE: a wrong nonce is ignored, and the stream goes on",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                AckOf("FOO"),
                NoVerdict,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Accepted(&[("a", "2")]),
            ],
        ),
        (
            "SPIRE: a refused version waits for the next update",
            &[
                Publish("a", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Nack,
                Silence,
                Publish("a", "2"),
                Sent(&[("a", "2")]),
                Ack,
                Accepted(&[("a", "2")]),
            ],
        ),
        (
            "SPIRE: the names change from one to another with the answer",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                Want(&["b"]),
                Sent(&[("b", "1")]),
                Want(&["a", "b"]),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "SPIRE: no name at all subscribes to nothing, not to everything",
            &[Publish("a", "1"), Publish("b", "1"), Open(&[]), Silence, Publish("a", "2"), Silence],
        ),
        (
            "Istio: one of two secrets changes, it alone is pushed",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1"), ("b", "1")]),
                Ack,
                Publish("b", "2"),
                Sent(&[("b", "2")]),
                Ack,
                Accepted(&[("b", "2")]),
                Publish("b", "2"),
                Publish("a", "1"),
                Silence,
            ],
        ),
        (
            "Istio: a client that was away while the secret changed gets the newer one alone",
            &[
                Publish("a", "2"),
                Publish("b", "1"),
                Return(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Ack,
                Silence,
            ],
        ),
        (
            "Istio: a secret that failed at first is pushed when it can be made",
            &[Open(&["a"]), Silence, Want(&["a"]), Silence, Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "Istio: no push after the client gave the name up, though it has not answered",
            &[
                Publish("a", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1")]),
                InDelta(&[Change { ask: &[], give_up: &["a"] }, NoVerdict]),
                InSotw(&[Want(&["b"])]),
                Publish("a", "2"),
                Silence,
                InDelta(&[Ack, Accepted(&[("a", "1")]), Silence]),
            ],
        ),
    ]);
}
