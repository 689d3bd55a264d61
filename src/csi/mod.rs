//! The driver of Kubernetes' Container Storage Interface (CSI): volumes of Pods, each a directory with the socket of a workload,
//! which the kubelet has made, renewed and removed.
//!
//! How a workload is run is the [`Runner`]'s business. A volume is an ephemeral inline one: it lives as long as its Pod. Its
//! socket is bound here, so that it is in its place before the workload starts, and passes to the next agent without a gap.

mod attributes;
mod directory;
mod driver;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod identifiers;
mod mounts;
mod publication;
mod record;
mod registration;
mod restore;
mod services;
mod socket;
mod target;
#[cfg(test)]
mod tests;
mod volumes;

use std::fmt::Debug;
use std::path::PathBuf;

use tokio::net::UnixListener;

use crate::auth::token_file::Token;

pub use self::attributes::Attributes;
pub use self::driver::{CsiSocket, Driver, NotOpened};
pub use self::identifiers::{DriverName, Pod, VolumeId};

/// How a driver is set up.
#[derive(Clone, Debug)]
pub struct DriverSettings {
    pub driver_name: DriverName,
    /// The name of the node, as Kubernetes knows it.
    pub node_id: String,
    /// Where the kubelet's calls come in.
    pub csi_socket: PathBuf,
    /// The directory in which the kubelet looks for drivers.
    pub registration_dir: PathBuf,
    /// The CSI socket's path as the kubelet sees it; none if that is the same path.
    pub endpoint: Option<PathBuf>,
    /// The kubelet's directory, at the same path as the kubelet sees it.
    pub kubelet_dir: PathBuf,
    /// A directory for a record of each volume.
    pub records: PathBuf,
    pub token_source: TokenSource,
    /// The audience of the token; none if the `CSIDriver` has only one.
    pub audience: Option<String>,
    /// True if workloads need no token of their own.
    pub impersonates: bool,
}

/// Where the kubelet puts tokens: `serviceAccountTokenInSecrets` of the `CSIDriver` decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    VolumeContext,
    Secrets,
}

impl TokenSource {
    /// Both, by the words of `--csi-token-source`.
    pub const ALL: [(&'static str, Self); 2] =
        [("volume-context", Self::VolumeContext), ("secrets", Self::Secrets)];
}

/// What a volume's workload is run with.
#[derive(Debug)]
pub struct VolumeWorkload {
    pub id: VolumeId,
    pub pod: Pod,
    pub attributes: Attributes,
    /// It listens already, and its file has its name.
    pub socket: UnixListener,
    /// The volume, in which its socket is.
    pub directory: PathBuf,
    /// None without files.
    pub files: Option<VolumeFiles>,
    /// The token that the kubelet brought. None after a restart until the kubelet comes by, and where none is needed.
    pub token: Option<Token>,
}

/// Where the files of a volume go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFiles {
    /// The volume itself, a file system in memory.
    pub directory: PathBuf,
    /// The group that may read the files: `fsGroup` of the Pod.
    pub group: Option<u32>,
}

/// Why a workload was not started. The text is for people: `kubectl describe pod` shows it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct NotStarted {
    pub reason: String,
    /// True if a later attempt may succeed as it is.
    pub is_retryable: bool,
}

/// Runs the workloads of volumes. Calls about one volume never overlap.
#[tonic::async_trait]
pub trait Runner: Debug + Send + Sync + 'static {
    /// Starts a workload, whose name is unused. Does not wait for a CA: the kubelet's call waits for this.
    async fn start(&self, workload: VolumeWorkload) -> Result<(), NotStarted>;

    /// Gives a running workload its next token. False if it does not run.
    async fn renew_token(&self, id: &VolumeId, token: Token) -> bool;

    /// Returns when the workload serves a certificate. May be dropped before.
    async fn issued(&self, id: &VolumeId);

    /// Why there is no certificate yet, for people.
    fn failure(&self, id: &VolumeId) -> Option<String>;

    /// Ends a workload, and deletes what is kept of it across restarts: the volume is gone. The workload need not run. Returns
    /// when its files are no longer written.
    async fn stop(&self, id: &VolumeId);
}
