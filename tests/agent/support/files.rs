//! Files that a platform would mount: tokens, certificates.

use std::fs::Permissions;
use std::net::IpAddr;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::json;

/// A service-account token as the kubelet writes it, with a fake signature. `lifetime` in seconds, from now.
pub fn token(account: &str, audience: &str, lifetime: i64) -> String {
    #[expect(clippy::disallowed_methods, reason = "a valid token needs the current time")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let claims = json!({
        "sub": format!("system:serviceaccount:default:{account}"),
        "aud": [audience],
        "exp": i64::try_from(now).unwrap() + lifetime,
    });
    let part = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}.c2lnbmF0dXJl", part(json!({ "alg": "RS256" })), part(claims))
}

/// Writes a token that only its owner can read.
pub fn write_token(file: &Path, token: &str) {
    std::fs::write(file, token).unwrap();
    std::fs::set_permissions(file, Permissions::from_mode(0o600)).unwrap();
}

/// `spiffe://cluster.local/ns/default/sa/ACCOUNT`.
pub fn spiffe(account: &str) -> String {
    format!("spiffe://cluster.local/ns/default/sa/{account}")
}

/// The three files of a `--cert-dir`, as text.
pub struct Mounted {
    pub chain: Vec<u8>,
    pub key: Vec<u8>,
    pub root: Vec<u8>,
}

impl Mounted {
    /// A fresh key pair of `account`, from the CA in `ca_dir`.
    pub fn new(ca_dir: &Path, account: &str) -> Self {
        Self::of_key(ca_dir, account, &SigningKey::generate(KeyType::EcdsaP256).unwrap())
    }

    /// A certificate for `key`.
    pub fn of_key(ca_dir: &Path, account: &str, key: &SigningKey) -> Self {
        Self::with_clock(ca_dir, account, key, Clock::system())
    }

    /// A key pair that Envoy can't use: an Ed25519 key that includes the public key, as in PKCS#8 version 2.
    pub fn bad_for_envoy(ca_dir: &Path, account: &str) -> Self {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let key = SigningKey::from_pkcs8(&key.serialize_der().into()).unwrap();
        Self::of_key(ca_dir, account, &key)
    }

    /// A key pair from two hours ago that expired an hour ago.
    pub fn expired(ca_dir: &Path, account: &str) -> Self {
        #[expect(clippy::disallowed_methods, reason = "before the agent's own clock")]
        let past = SystemTime::now() - Duration::from_secs(2 * 3600);
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        Self::with_clock(ca_dir, account, &key, Clock::starting_at(past))
    }

    fn with_clock(ca_dir: &Path, account: &str, key: &SigningKey, clock: Clock) -> Self {
        let ca = DevelopmentCa::open(ca_dir, clock).unwrap();
        let request = csr::request(key, None, &csr::Names::default()).unwrap();
        let leaf = ca.issue(&request, &spiffe(account).parse().unwrap(), Duration::from_secs(3600)).unwrap();
        let [intermediate, root] = ca.chain();
        Self {
            chain: pem::of_certificates([&leaf, intermediate]),
            key: key.to_private_key().to_pem().to_vec(),
            root: pem::of_certificates([root]),
        }
    }

    /// The leaf's serial number.
    pub fn serial(&self) -> String {
        let ders = pem::certificates(&self.chain).unwrap();
        attache::pki::certificate::Certificate::parse(&ders[0]).unwrap().serial
    }

    /// Its files, with their names in a directory.
    pub fn files(&self) -> [(&'static str, &[u8]); 3] {
        [("cert-chain.pem", &self.chain), ("key.pem", &self.key), ("root-cert.pem", &self.root)]
    }

    /// Overwrites the files in `directory` in place, one after the other.
    pub fn write(&self, directory: &Path) {
        std::fs::create_dir_all(directory).unwrap();
        for (name, content) in self.files() {
            std::fs::write(directory.join(name), content).unwrap();
        }
    }
}

/// Swaps `volume/..data` to a new directory with `files`, like the kubelet. Returns the new directory; the previous one
/// stays.
pub fn swap<'a>(volume: &Path, files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> PathBuf {
    static GENERATION: AtomicU64 = AtomicU64::new(0);
    let name = format!("..generation-{}", GENERATION.fetch_add(1, Ordering::Relaxed));
    std::fs::create_dir_all(volume.join(&name)).unwrap();
    let mut names = Vec::new();
    for (file, content) in files {
        std::fs::write(volume.join(&name).join(file), content).unwrap();
        names.push(file);
    }
    symlink(&name, volume.join("..data_tmp")).unwrap();
    std::fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    for file in names {
        let _ = symlink(format!("..data/{file}"), volume.join(file));
    }
    volume.join(name)
}

/// A listener that accepts connections and never sends anything.
pub async fn silent_server() -> (tokio::net::TcpListener, u16) {
    let listener = tokio::net::TcpListener::bind((IpAddr::from([127, 0, 0, 1]), 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}
