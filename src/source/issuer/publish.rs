//! What is served: the roots first, then the certificate; old roots go when their time is over.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;

use super::state;
use super::trust::Trust;
use super::{Issued, Issuer, Validity};
use crate::base::clock::{millis, rfc3339};
use crate::base::text;
use crate::pki::certificate::Certificate;
use crate::secret::{Secret, TrustBundle};
use crate::store::{Published, Publisher};

impl Issuer {
    pub(super) async fn publish(&mut self, issued: Issued) {
        let Issued { ca, pair, bundle, took } = issued;
        let now = self.clock.now();
        let (not_before, not_after) = (pair.leaf().not_before, pair.not_after());
        // However odd the answer, the CA is not asked in a tight loop.
        let renews = self.renewal(&pair, now).max(now + Duration::from_millis(200));
        tracing::info!(
            name = self.logged_name(),
            identity = pair.leaf().names(),
            serial = pair.leaf().serial,
            not_after = %rfc3339(not_after),
            renews = %rfc3339(renews),
            provider = ca.client.name(),
            ca = self.cas.has_several().then_some(&*ca.name),
            took_ms = millis(took),
            "certificate issued"
        );
        let lifetime = not_after.duration_since(not_before.max(now)).unwrap_or_default();
        if self.roots.is_some() {
            self.trust.answered(&ca.name, bundle.roots(), lifetime, now);
        }
        // Roots first: an Envoy must know a new root before it meets a peer that has a leaf of it. But the bundle's CRLs
        // must cover the new chain already.
        self.key_pair.announce(&pair, now);
        if self.publish_roots(Some(renews)) {
            self.wait_for_verdicts().await;
        }
        let key_type = self.settings.key_type;
        let anchors = self.trust.anchors();
        let encode = || state::encode(ca.client.name(), &ca.name, key_type, now, &pair, anchors);
        let content = self.state.is_some().then(encode);
        self.publish_key_pair(Secret::KeyPair(pair), now, renews).await;
        if let (Some(writer), Some(content)) = (&mut self.state, content) {
            writer.write(content).await;
        }
    }

    /// Publishes the key pair; that of a host as soon as there is room for it.
    async fn publish_key_pair(&self, pair: Secret, received: SystemTime, renews: SystemTime) {
        loop {
            let published = self.key_pair.publish(pair.clone(), received, Some(renews));
            match &self.minted {
                Some(minted) if published == Published::NoRoom => minted.room.notified().await,
                _ => return,
            }
        }
    }

    /// Publishes the known roots. True if there are new ones among them.
    pub(super) fn publish_roots(&self, renews: Option<SystemTime>) -> bool {
        let publisher = self.roots.as_ref();
        publisher.is_some_and(|publisher| publish_roots(publisher, &self.trust, self.clock.now(), renews))
    }

    /// Lets the streams accept new roots before they are sent a leaf that chains to one of them.
    async fn wait_for_verdicts(&self) {
        let (Validity::Left(left), Some(roots)) = (self.validity(), &self.roots) else { return };
        wait_for_verdicts(roots, left).await;
    }

    /// Drops the roots whose time is over.
    pub(super) fn drop_old_roots(&mut self) {
        let now = self.clock.now();
        if self.trust.next_end().is_none_or(|end| end > now) {
            return;
        }
        self.trust.settle(now);
        let renews = self.key_pair.entry().good.and_then(|good| good.renews);
        self.publish_roots(renews);
    }
}

/// Publishes the roots of `trust`. True if there are new ones among them.
pub(in crate::source) fn publish_roots(
    publisher: &Publisher,
    trust: &Trust,
    now: SystemTime,
    renews: Option<SystemTime>,
) -> bool {
    let Ok(bundle) = TrustBundle::new(trust.roots()) else { return false };
    let before = publisher.entry().good;
    let before = match before.as_deref().map(|good| &good.secret) {
        Some(Secret::TrustBundle(before)) => before.roots(),
        _ => bundle.roots(),
    };
    let (added, removed) = (subjects(bundle.roots(), before), subjects(before, bundle.roots()));
    let published = publisher.publish(Secret::TrustBundle(bundle), now, renews);
    if published != Published::Changed || (added.is_empty() && removed.is_empty()) {
        return false;
    }
    let old_until = trust.next_end().map(rfc3339);
    tracing::info!(
        added = (!added.is_empty()).then(|| text::listed(&added, "; ")),
        removed = (!removed.is_empty()).then(|| text::listed(&removed, "; ")),
        old_until = old_until.map(tracing::field::display),
        "trust roots changed"
    );
    !added.is_empty()
}

/// Lets the streams accept new roots. The served certificate, which is valid for `left`, can wait no longer than half of
/// that.
pub(in crate::source) async fn wait_for_verdicts(roots: &Publisher, left: Duration) {
    const LONGEST: Duration = Duration::from_secs(5);
    let longest = LONGEST.min(left / 2);
    if tokio::time::timeout(longest, roots.settled()).await.is_err() {
        let streams = roots.observed().streams;
        tracing::warn!(
            streams,
            waited_ms = millis(longest),
            "new trust roots not accepted by every stream in time; the new certificate is served nevertheless"
        );
    }
}

/// Those of `roots` that are not among `others`, for people. A new root often has the old one's name.
fn subjects(roots: &[CertificateDer<'static>], others: &[CertificateDer<'static>]) -> Vec<String> {
    let only_here = roots.iter().filter(|root| !others.contains(root));
    let name = |root: Certificate| format!("{} (serial {})", root.subject, root.serial);
    only_here.filter_map(|root| Certificate::parse(root).ok().map(name)).collect()
}
