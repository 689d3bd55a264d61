//! The CA, and the credentials for it.

use tokio::time::timeout;

use super::{Findings, Severity, check_writable};
use crate::auth::token::{self, TokenSource};
use crate::auth::token_file::Token;
use crate::base::limits;
use crate::base::text;
use crate::ca::{self, ClientAuth, providers};
use crate::config::{Config, Provider};
use crate::fs::file;
use crate::metrics::Metrics;
use crate::pki::pem;
use crate::secret::{Secret, SecretName};
use crate::source::issuer::{IssuanceQueue, Issuer, IssuerContext};
use crate::source::spiffe::Received;
use crate::store::{Cache, Key};

impl Findings {
    pub(super) async fn credentials(&mut self, provider: &Provider, config: &Config) {
        let has_certificate = self.client_certificate(provider).await;
        self.provider_files(provider);
        if let Some(settings) = provider.token() {
            self.token(provider, settings, config, has_certificate).await;
        }
    }

    /// Whether there is a client certificate.
    async fn client_certificate(&mut self, provider: &Provider) -> bool {
        let Some(directory) = provider.client_cert() else { return false };
        match directory.read(&self.clock, &self.disk).await {
            Ok(certificate) => {
                self.note(Severity::Ok, "client certificate", certificate.to_string());
                true
            }
            Err(error) => {
                let text = format!("{error}; until there is one, calls to the CA carry the token");
                self.note(Severity::Warning, "client certificate", text);
                false
            }
        }
    }

    fn provider_files(&mut self, provider: &Provider) {
        for file in provider.files() {
            let (option, shown) = (file.option, file.path.display());
            let read = file::read(file.path, limits::FILE_BYTES).map_err(|error| error.to_string());
            let checked = read.and_then(|text| match file.is_pem {
                true => pem::certificates(&text).map(drop).map_err(|error| error.to_string()),
                false => Ok(()),
            });
            match checked {
                Ok(()) => self.note(Severity::Ok, "files", format!("{option} {shown}")),
                Err(reason) => {
                    let text = format!("{option} {shown} can't be used: {reason}; replace it");
                    self.note(Severity::Error, "files", text);
                }
            }
        }
    }

    async fn token(
        &mut self,
        provider: &Provider,
        settings: token::TokenSettings,
        config: &Config,
        has_certificate: bool,
    ) {
        if config.token_from_request.is_some() {
            let text = "clients bring it with their requests (--token-from-request)";
            return self.note(Severity::Ok, "token", text);
        }
        let about = if matches!(settings, token::TokenSettings::File(_)) { "token" } else { "token service" };
        let source =
            TokenSource::new(settings, self.clock.clone(), self.disk.within(config.workload.timeout));
        let reason = match timeout(config.workload.timeout, source.token()).await {
            Ok(Ok(token)) => {
                let (state, hint) = self.judge_token(&token, provider);
                return self.note(state, about, format!("{}{hint}", source.describe(&token)));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no token within {:?} (--ca-timeout)", config.workload.timeout),
        };
        // With a client certificate, calls need no token.
        let state = if has_certificate { Severity::Warning } else { Severity::Error };
        self.note(state, "token", reason);
    }

    fn judge_token(&self, token: &Token, provider: &Provider) -> (Severity, &'static str) {
        let now = self.clock.now();
        let Some(claims) = token.claims() else { return (Severity::Ok, "") };
        if claims.expires.is_some_and(|at| at <= now) {
            return (Severity::Error, ": the CA will refuse it; check what should rotate it");
        }
        if claims.not_before.is_some_and(|at| at > now) {
            return (Severity::Error, ": the CA will refuse it; is this machine's clock right?");
        }
        match provider.token_hint(token) {
            "" => (Severity::Ok, ""),
            hint => (Severity::Warning, hint),
        }
    }

    /// Whether the CA is reachable, as far as can be seen without requesting a certificate.
    pub(super) async fn provider(&mut self, provider: &Provider, config: &Config) {
        match provider.check(&self.clock, check_writable) {
            Some(Ok(text)) => self.note(Severity::Ok, "CA", text),
            Some(Err(text)) => self.note(Severity::Error, "CA", text),
            None => {}
        }
        let Some((endpoint, protocol)) = provider.endpoint() else { return };
        let certificate = match provider.client_cert() {
            Some(directory) => directory.read(&self.clock, &self.disk).await.ok(),
            None => None,
        };
        let address = endpoint.address.to_string();
        let client = if provider.kind().takes_client_cert {
            ClientAuth::Certificate(certificate.as_ref())
        } else {
            ClientAuth::Unsupported
        };
        let connect = ca::connect(endpoint, client, protocol, &self.disk);
        match timeout(config.workload.timeout, connect).await {
            Ok(Ok(_)) if endpoint.address.plaintext => {
                self.note(Severity::Ok, "CA", format!("{address} accepts connections, in plain text"));
            }
            Ok(Ok(_)) => {
                self.note(Severity::Ok, "CA", format!("{address} is reachable, and its certificate is valid"));
            }
            Ok(Err(error)) => {
                let at = if error.names_its_ca() { String::new() } else { format!("{address}: ") };
                self.note(Severity::Error, "CA", format!("{at}{error}"));
            }
            Err(_) => self.note(
                Severity::Error,
                "CA",
                format!(
                    "{address} has not answered within {:?} (--ca-timeout): does a firewall drop the packets?",
                    config.workload.timeout
                ),
            ),
        }
    }

    pub(super) async fn identity(&mut self, config: &Config) {
        match config.workload.identity.resolve(&self.clock, &self.disk).await {
            Some(identity) => self.note(Severity::Ok, "identity", identity.to_string()),
            None => self.note(
                Severity::Warning,
                "identity",
                "neither the options nor a credential name it: the CA decides. --spiffe-id sets it",
            ),
        }
    }

    /// Whether the Workload API has an identity for this process. The agent may be another one to it: the user counts.
    pub(super) async fn spiffe(&mut self, config: &Config) {
        let Some(settings) = &config.spiffe else { return };
        match settings.ask(&self.clock, &self.disk).await {
            Ok(Received { pair, bundle, others }) => {
                let until = self.until(pair.not_after());
                let text = format!(
                    "{}: {}, {}, {until}",
                    settings.name(),
                    pair.leaf().names(),
                    Secret::TrustBundle(bundle)
                );
                self.note(Severity::Ok, "SPIFFE endpoint", text);
                if !others.is_empty() {
                    let others = text::listed(&others, ", ");
                    let text = format!("it has further identities, which are not served: {others}");
                    self.note(Severity::Ok, "SPIFFE endpoint", text);
                }
            }
            Err(error) => self.note(Severity::Error, "SPIFFE endpoint", error.to_string()),
        }
    }

    pub(super) async fn issuance(&mut self, config: Config) {
        if config.providers.is_empty() {
            return self.note(Severity::Ok, "issuance", "no CA is used");
        }
        let (clock, disk) = (self.clock.clone(), self.disk.within(config.workload.timeout));
        let cas = match providers::clients(&config.providers, &clock, &disk) {
            Ok(cas) => cas,
            Err(error) => return self.note(Severity::Error, "issuance", error.to_string()),
        };
        let (cache, workload) = Cache::with_workload("");
        let mut settings = config.workload;
        // The state belongs to the agent.
        settings.state = None;
        let mut entry = cache.follow(Key { workload, name: SecretName::Workload });
        let (metrics, queue) = (Metrics::default(), IssuanceQueue::default());
        let context = IssuerContext { clock, metrics, queue, disk };
        let issuer = Issuer::new(cas, settings, &cache, workload, context);
        let settled = async {
            let has_settled = entry.wait_for(|entry| entry.good.is_some() || entry.failure().is_some());
            has_settled.await.map(|entry| entry.clone())
        };
        let entry = tokio::select! {
            entry = settled => entry,
            // The issuer never returns.
            () = issuer.run() => return,
        };
        let Ok(entry) = entry else { return };
        match (&entry.good, entry.failure()) {
            (Some(good), _) => {
                let text = format!("{}, {}", good.secret, self.until(good.secret.not_after()));
                self.note(Severity::Ok, "issuance", text);
            }
            (None, reason) => self.note(Severity::Error, "issuance", reason.unwrap_or_default()),
        }
    }
}
