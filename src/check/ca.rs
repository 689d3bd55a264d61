//! The CA, and what it is called with.

use std::path::Path;

use tokio::time::timeout;

use super::{Findings, State, WORKLOAD, writable_folder};
use crate::agent;
use crate::auth::token::{self, TokenSource};
use crate::auth::token_file::Token;
use crate::base::clock::Clock;
use crate::base::limits;
use crate::ca::citadel;
use crate::ca::embedded::{self, DevelopmentCa};
use crate::ca::failover::Failover;
use crate::config::{Config, Provider, ProviderFile};
use crate::fs::file;
use crate::metrics::Metrics;
use crate::pki::pem;
use crate::secret::SecretName;
use crate::source::issuer::{IssuanceQueue, Issuer};
use crate::store::{Cache, Key};

impl Findings {
    pub(super) async fn credentials(&mut self, provider: &Provider, config: &Config) {
        let mut has_certificate = false;
        if let Some(folder) = provider.client_cert() {
            match folder.read(&self.clock).await {
                Ok(certificate) => {
                    has_certificate = true;
                    self.note(State::Ok, "client certificate", certificate.to_string());
                }
                Err(why) => self.note(
                    State::Warning,
                    "client certificate",
                    format!("{why}; until there is one the CA is called with the token"),
                ),
            }
        }
        for ProviderFile { option, path, is_pem } in provider.files() {
            let read = file::read(path, limits::FILE_BYTES).map_err(|error| error.to_string());
            let good = read.and_then(|text| match is_pem {
                true => pem::certificates(&text).map(drop).map_err(|error| error.to_string()),
                false => Ok(()),
            });
            let shown = path.display();
            match good {
                Ok(()) => self.note(State::Ok, "files", format!("{option} {shown}")),
                Err(reason) => {
                    self.note(
                        State::Error,
                        "files",
                        format!("{option} {shown} can't be used: {reason}; replace it"),
                    );
                }
            }
        }
        let Some(settings) = provider.token() else { return };
        let source = TokenSource::new(settings.clone(), self.clock.clone());
        let token = match timeout(config.workload.timeout, source.token()).await {
            Ok(Ok(token)) => token,
            outcome => {
                let words = outcome.map_or_else(
                    |_| format!("no token within {:?} (--ca-timeout)", config.workload.timeout),
                    |none| none.err().map(|error| error.to_string()).unwrap_or_default(),
                );
                // With a certificate the CA can do without.
                let state = if has_certificate { State::Warning } else { State::Error };
                self.note(state, "token", words);
                return;
            }
        };
        let described = source.describe(&token);
        let (state, words) = self.judge(&token, matches!(provider, Provider::Citadel { .. }));
        let about = if matches!(settings, token::Settings::File(_)) { "token" } else { "token service" };
        self.note(state, about, format!("{described}{words}"));
    }

    fn judge(&self, token: &Token, is_for_istio: bool) -> (State, &'static str) {
        let now = self.clock.now();
        let Some(claims) = token.claims() else { return (State::Ok, "") };
        if claims.expires.is_some_and(|at| at <= now) {
            return (State::Error, ": the CA will refuse it; who is to rotate it?");
        }
        if claims.not_before.is_some_and(|at| at > now) {
            return (State::Error, ": the CA will refuse it; is this machine's clock right?");
        }
        match citadel::audience_hint(token) {
            hint if is_for_istio && !hint.is_empty() => (State::Warning, hint),
            _ => (State::Ok, ""),
        }
    }

    /// Whether the CA is there, as far as that can be seen without a certificate being spent.
    pub(super) async fn provider(&mut self, provider: &Provider, config: &Config) {
        let Some((endpoint, protocol)) = provider.endpoint() else {
            let text = match provider {
                Provider::Embedded { folder } => match development_ca(folder, &self.clock) {
                    Ok(text) => text,
                    Err(words) => return self.note(State::Error, "CA", words),
                },
                _ => "a command signs; --issue runs it".to_owned(),
            };
            return self.note(State::Ok, "CA", text);
        };
        let certificate = match provider.client_cert() {
            Some(folder) => folder.read(&self.clock).await.ok(),
            None => None,
        };
        let address = endpoint.address.to_string();
        let connect = endpoint.connect(certificate.as_ref(), protocol);
        match timeout(config.workload.timeout, connect).await {
            Ok(Ok(_)) if endpoint.address.plaintext => {
                self.note(State::Ok, "CA", format!("{address} takes connections, in plain text"));
            }
            Ok(Ok(_)) => self.note(State::Ok, "CA", format!("{address} is there, and its certificate is good")),
            Ok(Err(error)) => {
                let at = if error.names_its_ca() { String::new() } else { format!("{address}: ") };
                self.note(State::Error, "CA", format!("{at}{error}"));
            }
            Err(_) => self.note(
                State::Error,
                "CA",
                format!(
                    "{address} has not answered within {:?} (--ca-timeout): does a firewall drop what is sent?",
                    config.workload.timeout
                ),
            ),
        }
    }

    pub(super) async fn identity(&mut self, config: &Config) {
        match config.workload.identity.resolve(&self.clock).await {
            Some(identity) => self.note(State::Ok, "identity", identity.to_string()),
            None => self.note(
                State::Warning,
                "identity",
                "neither the options nor a credential tell it: what the CA says is taken. --spiffe-id sets it",
            ),
        }
    }

    pub(super) async fn issuance(&mut self, config: Config) {
        if config.providers.is_empty() {
            return self.note(State::Ok, "issuance", "there is no CA to ask");
        }
        let clock = self.clock.clone();
        let cas = config.providers.into_iter().map(|provider| agent::certificate_authority(provider, &clock));
        let cas = match cas.collect::<Result<Vec<_>, _>>() {
            Ok(cas) => Failover::new(cas),
            Err(error) => return self.note(State::Error, "issuance", error.to_string()),
        };
        let cache = Cache::default();
        let mut settings = config.workload;
        // It belongs to the agent.
        settings.state = None;
        let mut entry = cache.follow(Key { workload: WORKLOAD, name: SecretName::Workload });
        let (metrics, queue) = (Metrics::default(), IssuanceQueue::default());
        let issuer = Issuer::new(cas, settings, &cache, WORKLOAD, clock, metrics, queue);
        let settled = async {
            let has_settled = entry.wait_for(|entry| entry.good.is_some() || entry.failure().is_some());
            has_settled.await.map(|entry| entry.clone())
        };
        let entry = tokio::select! {
            entry = settled => entry,
            // It never ends.
            () = issuer.run() => return,
        };
        let Ok(entry) = entry else { return };
        match (&entry.good, entry.failure()) {
            (Some(good), _) => {
                let text = format!("{}, {}", good.secret, self.until(good.secret.not_after()));
                self.note(State::Ok, "issuance", text);
            }
            (None, reason) => self.note(State::Error, "issuance", reason.unwrap_or_default()),
        }
    }
}

/// The development CA in `folder`, or that one can be made there.
fn development_ca(folder: &Path, clock: &Clock) -> Result<String, String> {
    let shown = folder.display();
    if folder.join(embedded::KEY_FILE).exists() {
        let opened = DevelopmentCa::open(folder, clock.clone());
        return opened.map(|_| format!("the development CA in {shown}")).map_err(|error| error.to_string());
    }
    let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    writable_folder(there).map_err(|words| format!("--ca-dir {shown}: {words}; choose another one"))?;
    Ok(format!("a new development CA in {shown}"))
}
