use std::net::SocketAddr;
use std::path::Path;

use super::{Behaviour, ExpectedLog, Provider};
use crate::support::kube_api::{KubeApi, Mood};
use crate::support::kube_cluster::Fault;

impl Provider for KubeApi {
    const NAME: &'static str = "kubernetes";
    /// The shortest that the API accepts.
    const LIFETIME: u64 = 600;

    async fn start(directory: &Path, _: u64) -> Self {
        Self::start(directory).await
    }

    fn address(&self) -> Option<SocketAddr> {
        Some(self.address)
    }

    fn options(&self, _: &Path) -> Vec<String> {
        self.client()
    }

    fn set(&self, behaviour: Behaviour) {
        self.set(match behaviour {
            Behaviour::Refuses => Mood::Denied,
            Behaviour::Hangs => Mood::Fault(Fault::Silent),
            Behaviour::Junk => Mood::JunkCertificate,
            Behaviour::Lies(lie) => Mood::Lie(lie),
            _ => Mood::Good,
        });
    }

    fn refusal() -> Option<ExpectedLog> {
        Some(ExpectedLog::new(&["the CA at", "rejected the request: it was denied (KubectlDeny"], "refused"))
    }
}
