use std::net::SocketAddr;
use std::path::Path;

use super::{Behaviour, ExpectedLog, Provider};
use crate::support::fake_vault::{FakeVault, Mood};

impl Provider for FakeVault {
    const NAME: &'static str = "vault";

    async fn start(directory: &Path, lifetime: u64) -> Self {
        let vault = Self::start(directory).await;
        vault.change(|rules| rules.ttl = format!("{lifetime}s").leak());
        vault
    }

    fn address(&self) -> Option<SocketAddr> {
        Some(self.address)
    }

    fn options(&self, directory: &Path) -> Vec<String> {
        self.client(directory)
    }

    fn set(&self, behaviour: Behaviour) {
        let mood = match behaviour {
            Behaviour::Refuses => Mood::Refuse(403, "permission denied"),
            Behaviour::Hangs => Mood::Hang,
            Behaviour::Junk => Mood::Junk,
            Behaviour::Lies(lie) => Mood::Lie(lie),
            _ => Mood::Good,
        };
        self.change(|rules| rules.sign = mood);
    }

    fn refusal() -> Option<ExpectedLog> {
        let words = [
            "the CA at",
            "answered 403 Forbidden",
            "none of its policies allows update on mesh/pki/sign/web",
        ];
        Some(ExpectedLog::new(&words, "refused"))
    }
}
