//! Faults of the CA. Each is shorter than what is left of the certificate, meets at least one call, and is followed by a
//! renewal before the next.

use std::time::Duration;

use fastrand::Rng;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::soak::stage::Stage;
use crate::support::fake_ca::{Mood, Shape};
use crate::support::proxy::Line;
use crate::support::rough_h2::{GOAWAY, Rough};

/// The longest time from the end of a fault to the renewal: one call that hangs, and one delay.
const RENEWAL: Duration = Duration::from_secs(15);

/// Waits for the renewal after a fault.
pub async fn is_renewed(renewed: &mut watch::Receiver<usize>, before: usize, what: &str) {
    let came = timeout(RENEWAL, renewed.wait_for(|count| *count > before)).await;
    assert!(came.is_ok(), "no renewal within {RENEWAL:?} after {what}");
}

/// Lets the CA fail while a renewal is requested, and for a moment longer.
async fn fault(stage: &Stage, random: &mut Rng, mood: Mood, line: Line) {
    let mut renewed = stage.renewed.subscribe();
    let fault = stage.record.fault();
    stage.ca.set(mood);
    stage.line.set(line);
    // Answered when the agent has tried.
    stage.call_admin("POST", "/v1/renew").await.unwrap();
    sleep(Duration::from_millis(random.u64(0..1500))).await;
    let before = *renewed.borrow_and_update();
    stage.ca.set(Mood::Good);
    stage.line.set(Line::Open);
    if matches!(mood, Mood::Rough(_)) {
        stage.ca.end_connections();
    }
    drop(fault);
    is_renewed(&mut renewed, before, &format!("the CA failed ({mood:?}, {line:?})")).await;
}

pub async fn hangs(stage: &Stage, random: &mut Rng) {
    fault(stage, random, Mood::Hang, Line::Open).await;
}

pub async fn unreachable(stage: &Stage, random: &mut Rng) {
    for line in [Line::Cut, Line::Down] {
        fault(stage, random, Mood::Good, line).await;
    }
}

pub async fn refuses(stage: &Stage, random: &mut Rng) {
    let codes = [Code::Unavailable, Code::Unauthenticated, Code::PermissionDenied, Code::Internal];
    let mut moods = codes.map(Mood::Refuse).to_vec();
    moods.push(Mood::Busy { seconds: 1, pushback: "500" });
    fault(stage, random, *random.clone().choice(&moods).unwrap(), Line::Open).await;
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
    fault(stage, random, mood, Line::Open).await;
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
    fault(stage, random, Mood::Rough(rough), Line::Open).await;
}

/// Answers that come byte by byte, too slowly for the deadline of a call.
pub async fn trickles(stage: &Stage, random: &mut Rng) {
    fault(stage, random, Mood::Good, Line::Trickle).await;
}
