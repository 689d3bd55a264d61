//! A kubelet, by its rules: each call is a new connection, capabilities come before a volume, and its own file before a call.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::runner::FakeRunner;
use crate::csi::{Driver, DriverSettings, TokenSource};
use crate::fs::disk::Disk;
use crate::metrics::Metrics;
use crate::net::http2;
use crate::proto::csi::v1 as csi;
use crate::proto::csi::v1::node_client::NodeClient;
use crate::proto::csi::v1::node_service_capability::Type;
use crate::proto::csi::v1::volume_capability::{AccessType, MountVolume};
use crate::proto::pluginregistration as plugin;
use crate::proto::pluginregistration::registration_client::RegistrationClient;

pub(super) const DRIVER: &str = "csi.attache.dev";
pub(super) const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";
/// In the part of each token that is secret.
pub(super) const SECRET: &str = "c2lnbmF0dXJl";

/// A node: directories, and what is called.
#[derive(Debug)]
pub(super) struct Kubelet {
    pub(super) place: tempfile::TempDir,
}

/// A volume of a Pod.
#[derive(Clone, Debug)]
pub(super) struct Volume {
    pub(super) id: String,
    pub(super) uid: String,
    pub(super) target: PathBuf,
    pub(super) attributes: Vec<(&'static str, &'static str)>,
    pub(super) group: &'static str,
    pub(super) is_writable: bool,
}

impl Kubelet {
    pub(super) fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        for directory in ["kubelet/pods", "kubelet/plugins_registry", "kubelet/plugins"] {
            fs::create_dir_all(place.path().join(directory)).unwrap();
        }
        Self { place }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    pub(super) fn settings(&self) -> DriverSettings {
        DriverSettings {
            driver_name: DRIVER.parse().unwrap(),
            node_id: "node-1".to_owned(),
            csi_socket: self.path("kubelet/plugins/csi.sock"),
            registration_dir: self.path("kubelet/plugins_registry"),
            endpoint: None,
            kubelet_dir: self.path("kubelet"),
            records: self.path("state/volumes"),
            token_source: TokenSource::VolumeContext,
            audience: Some("istio-ca".to_owned()),
            impersonates: false,
        }
    }

    pub(super) fn registration_socket(&self) -> PathBuf {
        self.path("kubelet/plugins_registry").join(format!("{DRIVER}-reg.sock"))
    }

    /// Prepares volume number `number` of a Pod of its own, as before the first call.
    pub(super) fn volume(&self, number: usize, attributes: &[(&'static str, &'static str)]) -> Volume {
        let (id, uid) = (format!("csi-{number:064x}"), format!("7f-{number}"));
        let parent = self.path("kubelet/pods").join(&uid).join("volumes/kubernetes.io~csi/identity");
        fs::create_dir_all(&parent).unwrap();
        let known = json!({"driverName": DRIVER, "volumeHandle": id, "volumeLifecycleMode": "Ephemeral"});
        fs::write(parent.join("vol_data.json"), known.to_string()).unwrap();
        Volume {
            id,
            uid,
            target: parent.join("mount"),
            attributes: attributes.to_vec(),
            group: "",
            is_writable: false,
        }
    }

    /// Connects, makes one call, and closes the connection.
    pub(super) async fn call<T>(socket: &Path, call: impl AsyncFnOnce(http2::Connection) -> T) -> T {
        let io = UnixStream::connect(socket).await.unwrap();
        http2::with_connection(io, call).await.unwrap()
    }

    pub(super) async fn node<T>(&self, call: impl AsyncFnOnce(NodeClient<http2::Connection>) -> T) -> T {
        let talk = async |connection| call(NodeClient::with_origin(connection, origin())).await;
        Self::call(&self.settings().csi_socket, talk).await
    }

    pub(super) async fn registration<T>(
        &self,
        call: impl AsyncFnOnce(RegistrationClient<http2::Connection>) -> T,
    ) -> T {
        let talk = async |connection| call(RegistrationClient::with_origin(connection, origin())).await;
        Self::call(&self.registration_socket(), talk).await
    }

    pub(super) async fn notify(&self, error: &str) {
        let status =
            plugin::RegistrationStatus { plugin_registered: error.is_empty(), error: error.to_owned() };
        let notified = self.registration(async |mut client| client.notify_registration_status(status).await);
        notified.await.unwrap();
    }

    /// A publish, with what comes before.
    pub(super) async fn publish(&self, volume: &Volume) -> Result<(), Status> {
        self.request(volume.request()).await
    }

    pub(super) async fn request(&self, request: csi::NodePublishVolumeRequest) -> Result<(), Status> {
        for _ in 0..2 {
            let capabilities = self
                .node(async |mut node| node.node_get_capabilities(csi::NodeGetCapabilitiesRequest {}).await)
                .await
                .unwrap()
                .into_inner()
                .capabilities;
            let kinds: Vec<_> = capabilities
                .iter()
                .map(|capability| match capability.r#type {
                    Some(Type::Rpc(rpc)) => rpc.r#type,
                    None => 0,
                })
                .collect();
            assert_eq!(kinds, [6], "VOLUME_MOUNT_GROUP");
        }
        self.node(async |mut node| node.node_publish_volume(request).await).await.map(drop)
    }

    pub(super) async fn unpublish(&self, volume: &Volume) -> Result<(), Status> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            target_path: volume.target.to_str().unwrap().to_owned(),
        };
        self.node(async |mut node| node.node_unpublish_volume(request).await).await.map(drop)
    }
}

pub(super) fn origin() -> http::Uri {
    http::Uri::from_static("http://kubelet")
}

impl Volume {
    pub(super) fn request(&self) -> csi::NodePublishVolumeRequest {
        self.request_with(&token(&self.uid, "1"))
    }

    pub(super) fn request_with(&self, token: &str) -> csi::NodePublishVolumeRequest {
        let tokens = json!({"istio-ca": {"token": token, "expirationTimestamp": "2026-11-23T04:00:00Z"}});
        let own = [
            ("csi.storage.k8s.io/pod.name", "web-0"),
            ("csi.storage.k8s.io/pod.namespace", "shop"),
            ("csi.storage.k8s.io/pod.uid", &self.uid),
            ("csi.storage.k8s.io/serviceAccount.name", "cart"),
            ("csi.storage.k8s.io/ephemeral", "true"),
            (TOKENS, &tokens.to_string()),
        ];
        let context = self.attributes.iter().copied().chain(own);
        csi::NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            target_path: self.target.to_str().unwrap().to_owned(),
            volume_capability: Some(csi::VolumeCapability {
                access_type: Some(AccessType::Mount(MountVolume {
                    volume_mount_group: self.group.to_owned(),
                })),
            }),
            readonly: !self.is_writable,
            secrets: Default::default(),
            volume_context: context.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.target.join("socket")
    }

    /// Connects as a Pod does. The path may be longer than a socket's name.
    pub(super) fn connect(&self) -> std::io::Result<std::os::unix::net::UnixStream> {
        use std::os::fd::AsRawFd as _;
        let directory = fs::File::open(&self.target)?;
        std::os::unix::net::UnixStream::connect(format!("/proc/self/fd/{}/socket", directory.as_raw_fd()))
    }
}

/// A token of the Pod `uid`, of which `number` makes another one.
pub(super) fn token(uid: &str, number: &str) -> String {
    token_of(&json!({
        "sub": "system:serviceaccount:shop:cart",
        "aud": ["istio-ca"],
        "jti": number,
        "kubernetes.io": {"namespace": "shop", "pod": {"name": "web-0", "uid": uid}},
    }))
}

pub(super) fn token_of(claims: &serde_json::Value) -> String {
    format!("{}.{}.{SECRET}", URL_SAFE_NO_PAD.encode("{}"), URL_SAFE_NO_PAD.encode(claims.to_string()))
}

/// A driver that runs.
pub(super) struct Running {
    pub(super) driver: Arc<Driver>,
    stop: CancellationToken,
    served: JoinHandle<()>,
}

impl Running {
    /// Restores what is there, and serves once its socket is open.
    pub(super) async fn start(settings: DriverSettings, runner: &Arc<FakeRunner>) -> Self {
        Self::start_with(settings, runner, Disk::default()).await
    }

    pub(super) async fn start_with(settings: DriverSettings, runner: &Arc<FakeRunner>, disk: Disk) -> Self {
        let driver = Arc::new(Driver::new(settings, Arc::clone(runner) as _, disk, &Metrics::default()));
        driver.restore().await;
        let sockets = driver.open().await.unwrap();
        let stop = CancellationToken::new();
        let served = tokio::spawn({
            let (driver, stop) = (Arc::clone(&driver), stop.clone());
            async move { driver.serve(sockets, stop).await }
        });
        Self { driver, stop, served }
    }

    pub(super) async fn stop(self) {
        self.stop.cancel();
        self.served.await.unwrap();
    }

    /// Ends it as a crash does.
    pub(super) async fn kill(self) {
        self.served.abort();
        let _ = self.served.await;
    }
}

/// A node with a driver that runs.
pub(super) async fn node(runner: &Arc<FakeRunner>) -> (Kubelet, Running) {
    let kubelet = Kubelet::new();
    let running = Running::start(kubelet.settings(), runner).await;
    (kubelet, running)
}

/// Returns once `is_so`.
pub(super) async fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

/// The names in a directory, in order.
pub(super) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
