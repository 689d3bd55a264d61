//! Cases from other agents' test suites.

use super::*;

/// Cases from the tests of SPIRE's agent (`sds/v3`) and Istio's (`sds` and `xds`) that the other modules don't have.
#[test]
fn the_cases_of_spire_and_istio_pass() {
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
            "SPIRE: an update of a name that is not subscribed is not sent",
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
            "SPIRE: after a NACK the client waits for the next update",
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
            "SPIRE: an ACK changes the subscribed names",
            &[
                Publish("a", "1"),
                Publish("b", "1"),
                Open(&["a"]),
                Sent(&[("a", "1")]),
                SetNames(&["b"]),
                Sent(&[("b", "1")]),
                SetNames(&["a", "b"]),
                Sent(&[("a", "1")]),
            ],
        ),
        (
            "SPIRE: an empty list of names subscribes to nothing, not to everything",
            &[Publish("a", "1"), Publish("b", "1"), Open(&[]), Silence, Publish("a", "2"), Silence],
        ),
        (
            "Istio: if one of two secrets changes, only that one is pushed",
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
            "Istio: a client that was disconnected while the secret changed gets only the newer one",
            &[
                Publish("a", "2"),
                Publish("b", "1"),
                Reconnect(&["a"], &[("a", "1")]),
                Sent(&[("a", "2")]),
                Ack,
                Silence,
            ],
        ),
        (
            "Istio: a secret that failed at first is pushed once it is available",
            &[Open(&["a"]), Silence, SetNames(&["a"]), Silence, Publish("a", "1"), Sent(&[("a", "1")])],
        ),
        (
            "Istio: no push after the client unsubscribed, although it has not answered",
            &[
                Publish("a", "1"),
                Open(&["a", "b"]),
                Sent(&[("a", "1")]),
                InDelta(&[Change { subscribe: &[], unsubscribe: &["a"] }, NoVerdict]),
                InSotw(&[SetNames(&["b"])]),
                Publish("a", "2"),
                Silence,
                InDelta(&[Ack, Accepted(&[("a", "1")]), Silence]),
            ],
        ),
    ]);
}
