use std::net::SocketAddr;
use std::path::Path;

use tonic::Code;

use super::{Behaviour, ExpectedLog, Provider};
use crate::support::fake_google_cas::{CALLER, FakeGoogleCas, Mood};

/// The access token in the file.
const TOKEN: &str = "ya29.the-token";

impl Provider for FakeGoogleCas {
    const NAME: &'static str = "google-cas";

    async fn start(directory: &Path, lifetime: u64) -> Self {
        let cas = Self::start(directory).await;
        cas.change(|rules| rules.lifetime = lifetime.try_into().unwrap());
        cas.admit(TOKEN);
        std::fs::write(directory.join("access-token"), TOKEN).unwrap();
        cas
    }

    fn address(&self) -> Option<SocketAddr> {
        Some(self.address)
    }

    fn options(&self, directory: &Path) -> Vec<String> {
        let token = directory.join("access-token").display().to_string();
        let more = ["--token-file", &token, "--spiffe-id", CALLER].map(str::to_owned);
        self.client(directory).into_iter().chain(more).collect()
    }

    fn set(&self, behaviour: Behaviour) {
        self.set(match behaviour {
            Behaviour::Refuses => Mood::Refuse(Code::PermissionDenied),
            Behaviour::Hangs => Mood::Hang,
            Behaviour::Junk => Mood::Junk,
            Behaviour::Lies(lie) => Mood::Lie(lie),
            _ => Mood::Good,
        });
    }

    fn refusal() -> Option<ExpectedLog> {
        let words = ["the CA at", "answered PermissionDenied", "privateca.workloadCertificateRequester"];
        Some(ExpectedLog::new(&words, "refused"))
    }
}
