use std::net::SocketAddr;
use std::path::Path;

use super::{Behaviour, ExpectedLog, Provider};
use crate::support::cfssl::{FakeCfssl, Mood};
use crate::support::files::spiffe;
use crate::support::issuer::Issuer;
use crate::support::process::flags;

impl Provider for FakeCfssl {
    const NAME: &'static str = "cfssl";
    /// Set by its profile.
    const LIFETIME: u64 = 120;

    async fn start(directory: &Path, _: u64) -> Self {
        Self::start(Issuer::new(directory)).await
    }

    fn address(&self) -> Option<SocketAddr> {
        Some(self.address)
    }

    fn options(&self, directory: &Path) -> Vec<String> {
        let options = [
            ("--ca", "cfssl".to_owned()),
            ("--ca-address", format!("http://{}", self.address)),
            ("--cfssl-bundle", directory.join("issuer/root-cert.pem").display().to_string()),
            ("--spiffe-id", spiffe("web")),
        ];
        flags(options)
    }

    fn set(&self, behaviour: Behaviour) {
        let no_pem = r#"{"success":true,"result":{"certificate":"none"},"errors":[],"messages":[]}"#;
        self.set(match behaviour {
            Behaviour::Refuses => Mood::refuse(400, "authentication required"),
            Behaviour::Hangs => Mood::Hang,
            Behaviour::Junk => Mood::Say("200 OK\r\nContent-Type: application/json", no_pem.to_owned()),
            Behaviour::Lies(lie) => Mood::Lie(lie),
            _ => Mood::Good,
        });
    }

    fn refusal() -> Option<ExpectedLog> {
        let words = [
            "the CA at",
            "answered 400 Bad Request: authentication required (code 400)",
            "the profile has an auth_key: give it with --cfssl-auth-key-file",
        ];
        Some(ExpectedLog::new(&words, "refused"))
    }
}
