//! Faults of the CA. Each is shorter than what is left of the certificate, meets at least one call, and is followed by a
//! renewal before the next.

use std::time::Duration;

use fastrand::Rng;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::soak::stage::Stage;
use crate::support::fake_ca::{Mood, Shape};
use crate::support::proxy::Line;
use crate::support::rough_h2::{GOAWAY, Rough};
use crate::support::wait::wait_for;

/// The longest time from the end of a fault to the renewal: one call that hangs, and one delay.
const RENEWAL: Duration = Duration::from_secs(15);
/// One fault of so many lasts until the certificate is due and not renewed; the others meet a renewal that is requested.
const UNREQUESTED: usize = 6;

/// Disturbs renewals from `begin` to `end`.
pub async fn fault(stage: &Stage, random: &mut Rng, begin: impl AsyncFnOnce(), end: impl AsyncFnOnce()) {
    let mut renewed = stage.renewed.subscribe();
    let fault = stage.record.fault();
    begin().await;
    let is_requested = random.usize(0..UNREQUESTED) > 0;
    if is_requested {
        // Answered when the agent has tried.
        stage.call_admin("POST", "/v1/renew").await.unwrap();
    } else {
        wait_for("the renewal fails", async || stage.is_failing().await.then_some(())).await;
    }
    sleep(Duration::from_millis(random.u64(0..1500))).await;
    let before = *renewed.borrow_and_update();
    end().await;
    drop(fault);
    let recovers = async {
        // The agent does not retry a renewal that was requested before it was due.
        while is_requested && stage.call_admin("POST", "/v1/renew").await.unwrap() != 200 {
            sleep(Duration::from_millis(100)).await;
        }
        renewed.wait_for(|count| *count > before).await.unwrap();
    };
    assert!(timeout(RENEWAL, recovers).await.is_ok(), "no renewal within {RENEWAL:?} after the fault");
}

/// Disturbs the CA.
async fn ca_fault(stage: &Stage, random: &mut Rng, mood: Mood, line: Line) {
    let begin = async || {
        stage.ca.set(mood);
        stage.line.set(line);
    };
    let end = async || {
        stage.ca.set(Mood::Good);
        stage.line.set(Line::Open);
        if matches!(mood, Mood::Rough(_)) {
            stage.ca.end_connections();
        }
    };
    fault(stage, random, begin, end).await;
}

pub async fn hangs(stage: &Stage, random: &mut Rng) {
    ca_fault(stage, random, Mood::Hang, Line::Open).await;
}

pub async fn unreachable(stage: &Stage, random: &mut Rng) {
    for line in [Line::Cut, Line::Down] {
        ca_fault(stage, random, Mood::Good, line).await;
    }
}

pub async fn refuses(stage: &Stage, random: &mut Rng) {
    let codes = [Code::Unavailable, Code::Unauthenticated, Code::PermissionDenied, Code::Internal];
    let mut moods = codes.map(Mood::Refuse).to_vec();
    moods.push(Mood::Busy { seconds: 1, pushback: "500" });
    ca_fault(stage, random, *random.clone().choice(&moods).unwrap(), Line::Open).await;
}

/// Answers that are no good.
pub async fn lies(stage: &Stage, random: &mut Rng) {
    let moods = [
        Mood::Junk,
        Mood::ForeignKey,
        Mood::Expired,
        Mood::NotYetValid,
        Mood::OtherIdentity,
        Mood::Unchained,
        Mood::Huge,
        Mood::Shape(Shape::Nothing),
        Mood::Shape(Shape::CutOff),
    ];
    let mood = *random.choice(&moods).unwrap();
    ca_fault(stage, random, mood, Line::Open).await;
}

/// Answers that are not gRPC, or break off.
pub async fn breaks(stage: &Stage, random: &mut Rng) {
    let ways = [
        Rough::Silent,
        Rough::Close,
        Rough::Bytes(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"),
        Rough::Bytes(GOAWAY),
        Rough::Html(503),
        Rough::HangInAnswer,
        Rough::ResetInAnswer(h2::Reason::INTERNAL_ERROR),
        Rough::CloseInAnswer,
        Rough::ShortAnswer,
        Rough::BadPrefix,
        Rough::GiantPrefix,
        Rough::NotProtobuf,
        Rough::NoTrailers,
        Rough::WrongContentLength,
        Rough::HugeHeaders,
        Rough::NoMessage,
    ];
    let rough = *random.choice(&ways).unwrap();
    ca_fault(stage, random, Mood::Rough(rough), Line::Open).await;
}

/// Answers that come byte by byte, too slowly for the deadline of a call.
pub async fn trickles(stage: &Stage, random: &mut Rng) {
    ca_fault(stage, random, Mood::Good, Line::Trickle).await;
}
