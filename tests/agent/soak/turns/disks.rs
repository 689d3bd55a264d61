//! File systems that do not answer, and answer again.

use std::time::Duration;

use fastrand::Rng;
use tokio::time::{sleep, timeout};

use super::ca::fault;
use super::frames::RawClient;
use super::peers::a_while;
use crate::soak::neighbours::ARRIVAL;
use crate::soak::stage::Stage;
use crate::support::files::{Mounted, swap};
use crate::support::sds::{Stream, on_connection, request, secrets};
use crate::support::wait::wait_for;

/// How long it may take until a file system that answers again is used again.
const REVIVAL: Duration = Duration::from_secs(30);

/// A name on the file system that is dead in some turns.
fn name(stage: &Stage, file: &str) -> String {
    format!("file-root:{}/{file}", stage.directory.join("named").display())
}

/// Names on a dead file system, many of them, while others are served; once it answers, so are they.
pub async fn dead_names(stage: &Stage, random: &mut Rng) {
    let place = stage.directory.join("named");
    // A new name each time: the agent remembers those that were served a moment ago.
    let file = format!("root-{}.pem", random.u32(..));
    let set = Mounted::new(&stage.directory.join("named-authority"), "web");
    std::fs::write(place.join(&file), &set.root).unwrap();
    let mut mounts = stage.mounts.lock().await;
    mounts.die(&[&place]).await;
    let many: Vec<_> = (0..200).map(|index| name(stage, &format!("missing-{index}"))).collect();
    on_connection(&stage.socket, async |client| {
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let _many = Stream::open(&client, &many).await.unwrap();
        let mut one = Stream::open(&client, &[&name(stage, &file), "default"]).await.unwrap();
        let push = one.next().await.unwrap();
        assert_eq!(secrets(&push).len(), 1, "only the certificate is there");
        one.accept(&push).await;
        sleep(a_while(random)).await;
        mounts.revive().await;
        let back = timeout(REVIVAL, async {
            loop {
                let push = one.pushed().await.unwrap();
                one.accept(&push).await;
                if secrets(&push).iter().any(|secret| secret.name != "default") {
                    return;
                }
            }
        });
        assert!(back.await.is_ok(), "a name is not served {REVIVAL:?} after its file system answers again");
    })
    .await;
}

/// The mounted files are on a dead file system while they change: the new ones arrive once it answers.
pub async fn dead_volume(stage: &Stage, random: &mut Rng) {
    let mut mounts = stage.mounts.lock().await;
    mounts.die(&[&stage.volume.path]).await;
    for _ in 0..2 {
        swap(&stage.volume.path, stage.volume.next().files());
        sleep(a_while(random)).await;
    }
    mounts.revive().await;
    for follower in stage.followers.get().unwrap() {
        follower.is_current(stage, REVIVAL).await;
    }
}

/// The token is on a dead file system when the certificate is to be renewed.
pub async fn dead_token(stage: &Stage, random: &mut Rng) {
    let place = stage.directory.join("credentials");
    let begin = async || stage.mounts.lock().await.die(&[&place]).await;
    let end = async || stage.mounts.lock().await.revive().await;
    fault(stage, random, begin, end).await;
}

/// State and output are on a dead file system: the certificate is renewed all the same.
pub async fn dead_output(stage: &Stage, random: &mut Rng) {
    let mut renewed = stage.renewed.subscribe();
    let mut renew = async || {
        let before = *renewed.borrow_and_update();
        assert_eq!(stage.call_admin("POST", "/v1/renew").await.unwrap(), 200);
        let pushed = timeout(ARRIVAL, renewed.wait_for(|count| *count > before)).await;
        assert!(pushed.is_ok(), "no renewal within {ARRIVAL:?}");
    };
    let [state, output] = ["state", "output"].map(|name| stage.directory.join(name));
    let is_newest = async || {
        let written = std::fs::read_to_string(output.join("cert-chain.pem")).ok()?;
        (written == stage.newest.borrow().0).then_some(())
    };
    let mut mounts = stage.mounts.lock().await;
    // An output that expires meanwhile rightly makes the agent not ready: it begins with a new one.
    renew().await;
    wait_for("the new certificate is in the output directory", is_newest).await;
    mounts.die(&[&state, &output]).await;
    for _ in 0..2 {
        renew().await;
        sleep(a_while(random)).await;
    }
    mounts.revive().await;
    wait_for("the newest certificate is in the output directory", is_newest).await;
}

/// A client that asks for names on a file system that does not answer from now on.
pub async fn ask_for_dead_names(stage: &Stage) -> RawClient {
    stage.mounts.lock().await.die(&[&stage.directory.join("named")]).await;
    let mut client = RawClient::connect(&stage.socket).await;
    client.open_stream(1, &request(&[&name(stage, "root-cert.pem"), "default"])).await;
    client
}
