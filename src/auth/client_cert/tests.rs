//! Every state of the directory.

use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, SanType};

use super::*;
use crate::base::spiffe_id::SpiffeId;
use crate::fs::disk::Disk;
use crate::pki::key::{KeyType, SigningKey};
use crate::pki::pem;

const HOUR: Duration = Duration::from_secs(3600);

fn identity() -> SpiffeId {
    "spiffe://cluster.local/ns/default/sa/web".parse().unwrap()
}

/// Chain and key, as text.
type Texts = (Vec<u8>, Vec<u8>);

/// An intermediate CA, and a directory for client certificates.
struct Desk {
    directory: tempfile::TempDir,
    ca: CertifiedIssuer<'static, SigningKey>,
    client: ClientCertDir,
}

fn key() -> SigningKey {
    SigningKey::generate(KeyType::default()).unwrap()
}

impl Desk {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let params = |name: &str| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params
        };
        let root = CertifiedIssuer::self_signed(params("root"), key()).unwrap();
        let ca = CertifiedIssuer::signed_by(params("intermediate"), key(), &root).unwrap();
        let client = ClientCertDir::new(directory.path().join("client"));
        std::fs::create_dir(client.path()).unwrap();
        Self { directory, ca, client }
    }

    fn texts(&self) -> Texts {
        let key = key();
        let now = Clock::system().now();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(identity().as_str().try_into().unwrap())];
        (params.not_before, params.not_after) = ((now - HOUR / 30).into(), (now + HOUR).into());
        let leaf = params.signed_by(&key, &self.ca).unwrap();
        (pem::of_certificates([leaf.der(), self.ca.as_ref().der()]), key.to_private_key().to_pem().to_vec())
    }

    fn put(&self, chain: &[u8], key: &[u8]) {
        std::fs::write(self.client.path().join(CHAIN_FILE), chain).unwrap();
        std::fs::write(self.client.path().join(KEY_FILE), key).unwrap();
    }

    async fn refusal(&self, clock: &Clock) -> String {
        self.client.read(clock, &Disk::default()).await.unwrap_err().to_string()
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_is_not_presented_is_named() {
    let desk = Desk::new();
    let clock = Clock::system();
    assert!(desk.refusal(&clock).await.contains("neither cert-chain.pem nor key.pem"));
    let (chain, key) = desk.texts();
    let (_, foreign) = desk.texts();
    let half = &chain[..chain.len() - 40];
    let cases: [(&[u8], &[u8], &str); 5] = [
        (b"", &key, "cert-chain.pem: it holds no PEM certificate"),
        (half, &key, "cert-chain.pem: its PEM is damaged"),
        (&chain, b"", "key.pem: it holds no PEM private key"),
        (&chain, &key[..key.len() / 2], "key.pem"),
        (&chain, &foreign, "does not match"),
    ];
    for (chain, key, words) in cases {
        desk.put(chain, key);
        let refusal = desk.refusal(&clock).await;
        assert!(refusal.contains(words), "{refusal}");
        assert!(refusal.contains(desk.client.path().to_str().unwrap()), "{refusal}");
    }
    desk.put(&chain, &key);
    assert_eq!(desk.client.read(&clock, &Disk::default()).await.unwrap().pair.chain().len(), 2);
    std::fs::remove_file(desk.client.path().join(KEY_FILE)).unwrap();
    assert!(desk.refusal(&clock).await.contains("key.pem does not"));
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_presented_only_while_it_is_valid() {
    let desk = Desk::new();
    let (chain, key) = desk.texts();
    desk.put(&chain, &key);
    let clock = Clock::starting_at(Clock::system().now());
    assert!(desk.client.read(&clock, &Disk::default()).await.is_ok());
    clock.set_by(3_601_000);
    assert!(desk.refusal(&clock).await.contains("expired at"));
    clock.set_by(-7_200_000);
    assert!(desk.refusal(&clock).await.contains("valid only from"));
}

#[tokio::test(start_paused = true)]
async fn the_read_waits_for_the_other_half_of_a_change() {
    let desk = Desk::new();
    let (old, new) = (desk.texts(), desk.texts());
    desk.put(&new.0, &old.1);
    let (clock, disk) = (Clock::system(), Disk::default());
    let (read, ()) = tokio::join!(desk.client.read(&clock, &disk), async {
        tokio::time::sleep(3 * PAUSE).await;
        desk.put(&new.0, &new.1);
    });
    read.unwrap();
}

/// One directory for each generation, and links through `..data`, which is swapped.
#[test]
fn half_of_a_swap_is_never_read() {
    let desk = Desk::new();
    let root = desk.client.path();
    let generations: Vec<_> = (0..8).map(|_| desk.texts()).collect();
    for name in [CHAIN_FILE, KEY_FILE] {
        symlink(Path::new("..data").join(name), root.join(name)).unwrap();
    }
    let swap = |index: usize| {
        let (chain, key) = &generations[index % generations.len()];
        let (name, next) = (format!("..{index}"), root.join("..next"));
        std::fs::create_dir(root.join(&name)).unwrap();
        std::fs::write(root.join(&name).join(CHAIN_FILE), chain).unwrap();
        std::fs::write(root.join(&name).join(KEY_FILE), key).unwrap();
        symlink(&name, &next).unwrap();
        std::fs::rename(&next, root.join("..data")).unwrap();
        if let Some(before) = index.checked_sub(1) {
            std::fs::remove_dir_all(root.join(format!("..{before}"))).unwrap();
        }
    };
    swap(0);
    let clock = Clock::system();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let swapper = scope.spawn(|| {
            let mut index = 1;
            while !stop.load(Ordering::Relaxed) {
                swap(index);
                index += 1;
            }
            index
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let read = || runtime.block_on(desk.client.read(&clock, &Disk::default())).map(drop);
        let reads: Vec<_> = (0..500).map(|_| read()).collect();
        stop.store(true, Ordering::Relaxed);
        let swaps = swapper.join().unwrap();
        assert!(swaps > 10, "only {swaps} swaps");
        let bad: Vec<_> = reads.into_iter().filter_map(Result::err).collect();
        assert!(bad.is_empty(), "{bad:?} in {swaps} swaps");
    });
}

#[tokio::test]
async fn messages_name_the_identity_and_hold_no_key() {
    let desk = Desk::new();
    let (chain, key) = desk.texts();
    desk.put(&chain, &key);
    let certificate = desk.client.read(&Clock::system(), &Disk::default()).await.unwrap();
    let words = format!("{certificate}; {certificate:?}");
    assert!(words.contains(identity().as_str()) && words.contains("valid until"), "{words}");
    for line in std::str::from_utf8(&key).unwrap().lines() {
        assert!(!words.contains(line), "{words}");
    }
    assert!(words.contains(desk.directory.path().to_str().unwrap()), "{words}");
}
