use std::net::SocketAddr;
use std::path::Path;

use tonic::Code;

use super::{Behaviour, ExpectedLog, Provider};
use crate::support::fake_ca::{FakeCa, Mood, Tls};
use crate::support::files::spiffe;
use crate::support::issuer::Lie;

impl Provider for FakeCa {
    const NAME: &'static str = "citadel";

    async fn start(directory: &Path, _: u64) -> Self {
        Self::start_tls(directory, &spiffe("web"), Tls::Never).await
    }

    fn address(&self) -> Option<SocketAddr> {
        Some(self.address)
    }

    fn options(&self, directory: &Path) -> Vec<String> {
        let root = directory.join("fake-ca/root-cert.pem").display().to_string();
        let mut options = self.client(directory);
        options.extend(["--ca-root".to_owned(), root]);
        options
    }

    fn set(&self, behaviour: Behaviour) {
        self.set(match behaviour {
            Behaviour::Refuses => Mood::Refuse(Code::Unauthenticated),
            Behaviour::Hangs => Mood::Hang,
            Behaviour::Junk => Mood::Junk,
            Behaviour::Lies(Lie::ForeignKey) => Mood::ForeignKey,
            Behaviour::Lies(Lie::Expired) => Mood::Expired,
            Behaviour::Lies(Lie::NotYetValid) => Mood::NotYetValid,
            Behaviour::Lies(Lie::OtherIdentity) => Mood::OtherIdentity,
            Behaviour::Lies(Lie::Unchained) => Mood::Unchained,
            // It names the caller alone, and ignores other names.
            _ => Mood::Good,
        });
    }

    fn refusal() -> Option<ExpectedLog> {
        let words = [
            "the CA at",
            "answered Unauthenticated",
            "audience [istio-ca], valid until",
            "it is read from",
            "the cluster id is",
        ];
        Some(ExpectedLog::new(&words, "refused"))
    }
}
