//! What a kubelet asks of a CSI driver: each call is a new connection, and its own file comes before a volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use attache::net::http2;
use attache::proto::csi::v1::node_client::NodeClient;
use attache::proto::csi::v1::volume_capability::{AccessType, MountVolume};
use attache::proto::csi::v1::{
    NodeGetCapabilitiesRequest, NodePublishVolumeRequest, NodeUnpublishVolumeRequest, VolumeCapability,
};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::json;
use tokio::net::UnixStream;
use tonic::Status;

pub const DRIVER: &str = "csi.attache.dev";

/// A kubelet with its directory.
pub struct Kubelet {
    pub directory: PathBuf,
}

/// A volume of a Pod.
pub struct Volume {
    pub id: String,
    pub uid: String,
    pub account: String,
    pub target: PathBuf,
    pub attributes: Vec<(&'static str, &'static str)>,
    /// A short path to the volume: a socket's path has 107 bytes at most.
    pub short: PathBuf,
}

impl Kubelet {
    /// A kubelet with its directory in `directory`.
    pub fn new(directory: &Path) -> Self {
        let directory = directory.join("kubelet");
        for name in ["pods", "plugins_registry", "plugins"] {
            fs::create_dir_all(directory.join(name)).unwrap();
        }
        Self { directory }
    }

    /// The agent's options for it.
    pub fn options(&self) -> [String; 4] {
        let path = |path: &Path| path.display().to_string();
        ["--kubelet-dir".to_owned(), path(&self.directory), "--csi-socket".to_owned(), path(&self.socket())]
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("plugins/csi.sock")
    }

    /// Prepares a volume of the Pod number `number`, whose service account is `account`.
    pub fn volume(
        &self,
        number: usize,
        account: &str,
        attributes: &[(&'static str, &'static str)],
    ) -> Volume {
        let (id, uid) = (format!("csi-{number:064x}"), format!("7f-{number}"));
        let parent = self.directory.join("pods").join(&uid).join("volumes/kubernetes.io~csi/identity");
        fs::create_dir_all(&parent).unwrap();
        let known = json!({ "driverName": DRIVER, "volumeHandle": id, "volumeLifecycleMode": "Ephemeral" });
        fs::write(parent.join("vol_data.json"), known.to_string()).unwrap();
        let target = parent.join("mount");
        let short = self.directory.join(format!("v{number}"));
        std::os::unix::fs::symlink(&target, &short).unwrap();
        Volume { id, uid, account: account.to_owned(), target, attributes: attributes.to_vec(), short }
    }

    async fn call<T>(&self, call: impl AsyncFnOnce(NodeClient<http2::Connection>) -> T) -> T {
        let io = UnixStream::connect(self.socket()).await.unwrap();
        let origin = http::Uri::from_static("http://kubelet");
        let talk = async |connection| call(NodeClient::with_origin(connection, origin)).await;
        http2::with_connection(io, talk).await.unwrap()
    }

    /// A publish, with a token that lives an hour.
    pub async fn publish(&self, volume: &Volume) -> Result<(), Status> {
        for _ in 0..2 {
            let capabilities = NodeGetCapabilitiesRequest {};
            self.call(async |mut node| node.node_get_capabilities(capabilities).await).await.unwrap();
        }
        let request = volume.request();
        self.call(async |mut node| node.node_publish_volume(request).await).await.map(drop)
    }

    pub async fn unpublish(&self, volume: &Volume) -> Result<(), Status> {
        let request = NodeUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            target_path: volume.target.display().to_string(),
        };
        self.call(async |mut node| node.node_unpublish_volume(request).await).await.map(drop)
    }
}

impl Volume {
    /// Its socket, by a short path.
    pub fn socket(&self) -> PathBuf {
        self.short.join("socket")
    }

    fn request(&self) -> NodePublishVolumeRequest {
        let tokens =
            json!({ "istio-ca": { "token": self.token(), "expirationTimestamp": "2036-11-23T04:00:00Z" } });
        let own = [
            ("csi.storage.k8s.io/pod.name", format!("web-{}", self.uid)),
            ("csi.storage.k8s.io/pod.namespace", "default".to_owned()),
            ("csi.storage.k8s.io/pod.uid", self.uid.clone()),
            ("csi.storage.k8s.io/serviceAccount.name", self.account.clone()),
            ("csi.storage.k8s.io/ephemeral", "true".to_owned()),
            ("csi.storage.k8s.io/serviceAccount.tokens", tokens.to_string()),
        ];
        let attributes = self.attributes.iter().map(|(name, value)| (*name, (*value).to_owned()));
        let context = attributes.chain(own).map(|(name, value)| (name.to_owned(), value));
        NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            target_path: self.target.display().to_string(),
            volume_capability: Some(VolumeCapability {
                access_type: Some(AccessType::Mount(MountVolume { volume_mount_group: String::new() })),
            }),
            readonly: true,
            secrets: std::collections::HashMap::default(),
            volume_context: context.collect(),
        }
    }

    fn token(&self) -> String {
        #[expect(clippy::disallowed_methods, reason = "a valid token needs the current time")]
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let claims = json!({
            "sub": format!("system:serviceaccount:default:{}", self.account),
            "aud": ["istio-ca"],
            "exp": now + 3600,
            "kubernetes.io": { "namespace": "default", "pod": { "name": format!("web-{}", self.uid), "uid": self.uid } },
        });
        let part = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
        format!("{}.{}.c2lnbmF0dXJl", part(json!({ "alg": "RS256" })), part(claims))
    }
}
