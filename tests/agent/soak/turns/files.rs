//! Mounted files that change in every way. The followers get each change.

use std::path::Path;
use std::time::{Duration, Instant};

use attache::pki::key::{KeyType, SigningKey};
use fastrand::Rng;
use tokio::time::sleep;

use crate::soak::neighbours::ARRIVAL;
use crate::soak::stage::Stage;
use crate::support::files::swap;
use crate::support::sds::{DeltaStream, Stream, content, delta_secrets, on_connection, secrets};

/// The kubelet's swaps; the old directory goes at once, later, or in the middle.
pub async fn swaps(stage: &Stage, random: &mut Rng) {
    let volume = &stage.volume.path;
    for _ in 0..random.usize(1..6) {
        let old = volume.join(std::fs::read_link(volume.join("..data")).unwrap());
        swap(volume, stage.volume.next().files());
        if random.bool() {
            sleep(Duration::from_millis(random.u64(0..300))).await;
        }
        std::fs::remove_dir_all(old).unwrap();
    }
    arrives(stage).await;
}

/// Each file replaced in its own way: rename, overwriting, deletion and creation.
pub async fn rewrites(stage: &Stage, random: &mut Rng) {
    let data = stage.volume.path.join("..data");
    let ways: [fn(&Path, &str, &[u8]); 3] = [rename, overwrite, delete_and_create];
    for _ in 0..3 {
        for (name, content) in stage.volume.next().files() {
            random.choice(ways).unwrap()(&data, name, content);
            if random.bool() {
                sleep(Duration::from_millis(random.u64(0..50))).await;
            }
        }
        arrives(stage).await;
    }
    key_last(stage, random, &data).await;
}

fn rename(data: &Path, name: &str, content: &[u8]) {
    std::fs::write(data.join("staged"), content).unwrap();
    std::fs::rename(data.join("staged"), data.join(name)).unwrap();
}

fn overwrite(data: &Path, name: &str, content: &[u8]) {
    std::fs::write(data.join(name), content).unwrap();
}

fn delete_and_create(data: &Path, name: &str, content: &[u8]) {
    std::fs::remove_file(data.join(name)).unwrap();
    std::fs::write(data.join(name), content).unwrap();
}

/// A chain whose key comes later: the last change is that of the key alone.
async fn key_last(stage: &Stage, random: &mut Rng, data: &Path) {
    let set = stage.volume.next();
    overwrite(data, "cert-chain.pem", &set.chain);
    overwrite(data, "root-cert.pem", &set.root);
    // Longer or shorter than the debounce window.
    sleep(Duration::from_millis(random.u64(0..400))).await;
    overwrite(data, "key.pem", &set.key);
    arrives(stage).await;
}

/// Files that don't fit together, are cut off, or are missing for a while: the last good set stays until the repair.
pub async fn half_writes(stage: &Stage, random: &mut Rng) {
    let data = stage.volume.path.join("..data");
    for _ in 0..3 {
        let broken = ["cert-chain.pem", "key.pem", "root-cert.pem"];
        let name = *random.choice(&broken).unwrap();
        let good = std::fs::read(data.join(name)).unwrap();
        match random.u8(0..4) {
            0 => std::fs::write(data.join(name), &good[..good.len() / 2]).unwrap(),
            1 => std::fs::write(data.join(name), b"").unwrap(),
            2 => std::fs::remove_file(data.join(name)).unwrap(),
            _ => {
                let key = SigningKey::generate(KeyType::EcdsaP256).unwrap().to_private_key().to_pem();
                std::fs::write(data.join("key.pem"), &key).unwrap();
            }
        }
        // Longer or shorter than the debounce window.
        sleep(Duration::from_millis(random.u64(0..400))).await;
        stage.volume.next().write(&data);
        arrives(stage).await;
    }
}

/// A busy log beside the files and in the directory above: it costs little, and a change still arrives.
pub async fn noise(stage: &Stage, random: &mut Rng) {
    let volume = &stage.volume.path;
    let end = Instant::now() + Duration::from_secs(2);
    let mut round = 0;
    while Instant::now() < end {
        for directory in [volume, &stage.directory] {
            for _ in 0..100 {
                std::fs::write(directory.join("busy.log"), round.to_string()).unwrap();
                std::fs::write(directory.join(format!("many-{}", round % 50)), b"x").unwrap();
                let _ = std::fs::remove_file(directory.join(format!("many-{}", random.u32(0..50))));
                round += 1;
            }
        }
        sleep(Duration::from_millis(5)).await;
    }
    swap(volume, stage.volume.next().files());
    arrives(stage).await;
}

/// Every follower gets the newest files.
async fn arrives(stage: &Stage) {
    for follower in stage.followers.get().unwrap() {
        follower.is_current(stage, ARRIVAL).await;
    }
}

/// A bundle of 500 P-521 roots that changes while streams follow it.
pub async fn bundles(stage: &Stage, random: &mut Rng) {
    let file = stage.directory.join("bundle.pem");
    let write = |bundle: &[u8]| {
        std::fs::write(file.with_extension("new"), bundle).unwrap();
        std::fs::rename(file.with_extension("new"), &file).unwrap();
    };
    write(&stage.large_bundle(random));
    let name = format!("file-root:{}", file.display());
    on_connection(&stage.socket, async |client| {
        let mut in_full = Stream::open(&client, &[&name]).await.unwrap();
        let mut delta = DeltaStream::open(&client, &[&name]).await.unwrap();
        for _ in 0..5 {
            sleep(Duration::from_millis(random.u64(50..400))).await;
            write(&stage.large_bundle(random));
        }
        let newest = sorted(&std::fs::read_to_string(&file).unwrap());
        loop {
            let push = in_full.next().await.unwrap();
            in_full.accept(&push).await;
            let [secret] = secrets(&push).try_into().unwrap();
            if sorted(&content(secret).0) == newest {
                break;
            }
        }
        let push = delta.next().await.unwrap();
        delta.accept(&push).await;
        assert_eq!(delta_secrets(&push).len(), 1);
    })
    .await;
}

/// The roots of a bundle: their order makes no difference.
fn sorted(bundle: &str) -> Vec<String> {
    let mut roots: Vec<_> = bundle.split_inclusive("END CERTIFICATE-----\n").map(str::to_owned).collect();
    roots.sort();
    roots
}
