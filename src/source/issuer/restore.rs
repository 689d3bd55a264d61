//! The certificate of an earlier run of the agent is served until its renewal.

use std::time::SystemTime;

use super::Issuer;
use super::state::SavedState;
use crate::base::clock::rfc3339;
use crate::base::spiffe_id::SpiffeId;
use crate::base::text;
use crate::ca::IssuedChain;
use crate::secret::Secret;

impl Issuer {
    /// Publishes what an earlier run of the agent has saved, if it is still of use.
    pub async fn restore(&mut self) {
        let Some(writer) = &self.state else { return };
        let file = writer.dir().file();
        let not_used = |reason: &dyn std::fmt::Display| {
            tracing::warn!(
                file = %file.display(),
                %reason,
                "state of an earlier run not used; the next certificate replaces it"
            );
        };
        let dir = writer.dir().clone();
        // The first certificate does not wait for a disk that does not answer.
        let disk = self.disk.at_the_edges();
        let state = match disk.run(writer.dir().path(), move || dir.read()).await {
            Ok(Ok(Some(state))) => state,
            Ok(Ok(None)) => return,
            Ok(Err(error)) => return not_used(&error),
            Err(error) => return not_used(&error),
        };
        let identity = self.settings.identity.resolve(&self.clock, &disk).await;
        match self.restored(state, identity.as_ref()) {
            Ok(moment) => tracing::info!(
                file = %file.display(),
                renews = %rfc3339(moment),
                "certificate of an earlier run restored"
            ),
            Err(reason) => tracing::warn!(
                file = %file.display(),
                reason,
                "certificate of an earlier run not used; the next one replaces it"
            ),
        }
    }

    /// Publishes `state` and returns when it is renewed, or why it can't be used.
    fn restored(&mut self, state: SavedState, identity: Option<&SpiffeId>) -> Result<SystemTime, String> {
        let SavedState { provider, ca, key_type, received, chain, key, anchors } = state;
        let names = self.cas.names();
        if provider != self.cas.provider() || !names.contains(&ca) {
            let names = text::listed(&names, ", ");
            return Err(format!(
                "it came from {provider} at {ca}, and the CA is now {} at {names}",
                self.cas.provider()
            ));
        }
        let now = self.clock.now();
        let roots = anchors.iter().map(|anchor| anchor.root.clone()).collect();
        let key = key.in_format(self.settings.key_format).map_err(|error| error.to_string())?;
        let checked = IssuedChain { chain, roots }.check(key, identity, &self.settings.names, now);
        let (pair, _) = checked.map_err(|error| error.to_string())?;
        self.trust.restore(anchors, &names, now);
        let received = received.min(now);
        let mut renews = self.renewal(&pair, received);
        // Another kind of key is configured now; or only the CA knows which roots it no longer names.
        if key_type != self.settings.key_type.name() || self.settings.drops_old_roots {
            renews = now;
        }
        self.key_pair.announce(&pair, now);
        self.publish_roots(Some(renews));
        self.key_pair.publish(Secret::KeyPair(pair), received, Some(renews));
        self.components.report_renewal(|renewal| renewal.issuer = Some(ca.into()));
        Ok(renews)
    }
}
