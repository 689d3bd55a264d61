//! Starts and ends workloads, wherever they are described.

use std::sync::Arc;

use tokio::net::UnixListener;

use crate::agent::bearer;
use crate::agent::sockets::Server;
use crate::agent::workloads::{Plan, Running, Shared, Workloads};
use crate::ca::failover::Failover;
use crate::ca::provider::ClientError;
use crate::ca::providers;
use crate::config::{Config, ConfigErrors, Description, WorkloadTemplate};
use crate::serve::peer::Peers;
use crate::serve::sds::Naming;
use crate::source::issuer::IdentitySource;

/// Starts workloads. Clones start them alike.
#[derive(Clone, Debug)]
pub(super) struct Starter {
    pub(super) shared: Shared,
    pub(super) template: WorkloadTemplate,
    /// The CAs of workloads without a credential of their own.
    pub(super) cas: Arc<Failover>,
}

impl Starter {
    /// What `description` says, with the options of all workloads. What is kept of it across restarts has the name `key`.
    pub(super) fn config(&self, key: &str, description: &Description) -> Result<Config, ConfigErrors> {
        self.template.workload(key, description)
    }

    /// Starts the workload `name`, which is served on the socket that `listener` returns.
    pub(super) fn start(
        &self,
        name: &Arc<str>,
        description: &Description,
        config: Config,
        listener: impl Future<Output = Arc<UnixListener>> + Send + 'static,
        workloads: &mut Workloads,
    ) -> Result<Running, ClientError> {
        for note in &config.notes {
            tracing::warn!(workload = &**name, "{note}");
        }
        let cas = self.cas(description, &config)?;
        let running = workloads.add(name);
        let Shared { cache, metrics, calls, .. } = &self.shared;
        if let IdentitySource::Fixed(identity) = &config.workload.identity {
            cache.set_identity(running.workload, identity.clone());
        }
        let bearer = bearer(&config);
        let peers = Peers::new(config.allowed, metrics.clone(), cache.components(running.workload));
        let server = Server { calls: calls.clone(), stop: running.ended.clone() };
        let service = workloads.service(&running);
        service.set_naming(Naming { validator: config.spiffe_validator, ..Naming::default() });
        if let Some(bearer) = bearer {
            service.set_bearer(bearer);
        }
        // Freed once the socket is bound.
        let listener = Box::pin(listener);
        let serving = async move {
            let socket = listener.await;
            server.sds(&socket, &peers, &service).await;
        };
        let plan = Plan {
            spiffe: None,
            kubernetes: None,
            files: config.files,
            crl: config.crl,
            cas,
            issuer: config.workload,
            mint: None,
            output: config.output,
        };
        workloads.launch(&running, plan, serving);
        Ok(running)
    }

    /// The CAs for a workload: with its own credential, or those of all.
    fn cas(&self, description: &Description, config: &Config) -> Result<Failover, ClientError> {
        let has_credential = description.token.is_some()
            || config.token_from_request.is_some()
            || description.options.get("token-file").is_some();
        if !has_credential {
            return Ok(self.cas.apart());
        }
        let disk = self.shared.disk.within(config.workload.timeout);
        providers::clients(&config.providers, &self.shared.clock, &disk)
    }
}
