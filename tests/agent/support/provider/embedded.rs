use std::net::SocketAddr;
use std::path::Path;

use super::{Behaviour, ExpectedLog, Provider};

/// The agent's own CA, which always signs.
pub struct Embedded;

impl Provider for Embedded {
    const NAME: &'static str = "embedded";

    async fn start(_: &Path, _: u64) -> Self {
        Self
    }

    fn address(&self) -> Option<SocketAddr> {
        None
    }

    fn options(&self, directory: &Path) -> Vec<String> {
        let directory = directory.join("embedded").display().to_string();
        ["--ca", "embedded", "--ca-dir", &directory].map(str::to_owned).to_vec()
    }

    fn set(&self, _: Behaviour) {}

    fn expected_log(_: Behaviour) -> Option<ExpectedLog> {
        None
    }
}
