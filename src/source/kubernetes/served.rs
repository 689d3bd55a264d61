//! One name's way from its object into the cache, and what people see of it.

use std::sync::Arc;
use std::time::SystemTime;

use super::content::{Content, Unusable, Wants, valid_pair, valid_roots};
use super::follow::Place;
use crate::base::clock::rfc3339;
use crate::base::failure_log::FailureLog;
use crate::base::text;
use crate::metrics::{BySource, Metrics};
use crate::secret::Secret;
use crate::store::{Cache, Key, Origin, Published, Publisher};

/// What is known of a name's object.
#[derive(Debug)]
pub(super) enum Finding {
    /// Nothing yet.
    Open,
    /// It is looked up later, since too many names are asked for that don't exist.
    Postponed,
    /// It can't be found out now, for this reason.
    Unknown {
        reason: Arc<str>,
    },
    /// With the reason why nothing newer can be read.
    Present {
        place: Place,
        content: Arc<Content>,
        trouble: Option<Arc<str>>,
    },
    Absent {
        place: Place,
    },
    /// Not for this workload. Not sure: the agent itself may not read it; what it read before is still served.
    Refused {
        reason: String,
        is_sure: bool,
    },
}

/// Publishes one name.
pub(super) struct Served {
    publisher: Publisher,
    /// Most names never fail.
    failures: Option<Box<FailureLog>>,
    /// Why CRLs or an OCSP staple are not used.
    part_failures: Option<Box<FailureLog>>,
}

impl Served {
    pub(super) fn new(cache: &Cache, key: Key) -> Self {
        let publisher = cache.publisher(key, Origin::KUBERNETES);
        Self { publisher, failures: None, part_failures: None }
    }

    /// Publishes or reports what was found. Returns when that changes without a change of the object.
    pub(super) fn settle(
        &mut self,
        finding: Finding,
        wants: Wants,
        now: SystemTime,
        metrics: &Metrics,
    ) -> Option<SystemTime> {
        match finding {
            Finding::Open => None,
            Finding::Postponed => {
                let reason = "too many names that don't exist are asked for: this one is looked up later";
                match self.publisher.key().name.is_bare() {
                    // A client waits in its handshake.
                    true if !self.has_value() => self.withdraw(reason.to_owned(), "postponed", metrics),
                    _ => self.fail(reason, "postponed", metrics),
                }
                None
            }
            Finding::Unknown { reason } => {
                if !self.has_value() {
                    self.fail(&reason, "unreachable", metrics);
                }
                None
            }
            Finding::Present { trouble: Some(reason), .. } if self.has_value() => {
                self.fail(&reason, "refused", metrics);
                None
            }
            Finding::Present { place, content, .. } => match (&content.pair, content.roots.as_deref()) {
                (Some(pair), _) if wants.pair => match valid_pair(pair, now) {
                    Ok(pair) => {
                        let (pair, error, change) = content.stapled(pair, now);
                        let next = self.publish(&place, Ok(Secret::KeyPair(pair)), now, metrics);
                        self.report_part(&place, error.as_ref(), metrics);
                        change.into_iter().chain(next).min()
                    }
                    Err(error) => self.publish(&place, Err(error), now, metrics),
                },
                (_, Some(roots)) if wants.roots => match valid_roots(roots, now) {
                    Ok(roots) => {
                        let secret = Secret::TrustBundle(roots.bundle);
                        let next = self.publish(&place, Ok(secret), now, metrics);
                        self.cover(&place, roots.crls, now, metrics).into_iter().chain(next).min()
                    }
                    Err(error) => self.publish(&place, Err(error), now, metrics),
                },
                _ => None,
            },
            Finding::Absent { place } => {
                let reason = format!("{} does not exist in cluster {}", place.object, place.cluster);
                self.withdraw(reason, "absent", metrics);
                None
            }
            Finding::Refused { reason, is_sure } => {
                match is_sure || !self.has_value() {
                    true => self.withdraw(reason, "refused", metrics),
                    false => self.fail(&reason, "refused", metrics),
                }
                None
            }
        }
    }

    fn publish(
        &mut self,
        place: &Place,
        secret: Result<Secret, Unusable>,
        now: SystemTime,
        metrics: &Metrics,
    ) -> Option<SystemTime> {
        let secret = match secret {
            Ok(secret) => secret,
            Err(error) => {
                self.fail(&format!("{}: {error}", place.object), error.label(), metrics);
                return match error {
                    Unusable::NotYetValid(from) => Some(from),
                    _ => None,
                };
            }
        };
        let (what, not_after) = (secret.to_string(), rfc3339(secret.not_after()));
        let published = self.publisher.publish(secret, now, None);
        let was_failing = self.failures.take().is_some();
        let (name, cluster, from) = (self.log_name(), &*place.cluster.0, place.object.to_string());
        match published {
            Published::Changed => {
                tracing::info!(name, cluster, from, what, %not_after, "secret served from Kubernetes");
            }
            Published::Same if was_failing => {
                tracing::info!(name, cluster, from, what, %not_after, "usable again; it holds what is served already");
            }
            _ => {}
        }
        None
    }

    /// Adds the CRLs of an object to its roots. Returns when they have to be looked at again.
    fn cover(
        &mut self,
        place: &Place,
        crls: Result<Vec<Arc<crate::pki::crl::Crl>>, Unusable>,
        now: SystemTime,
        metrics: &Metrics,
    ) -> Option<SystemTime> {
        let (crls, unusable) = match crls {
            Ok(crls) => (crls, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let coverage = self.publisher.cache().set_crls(self.publisher.key(), &crls, now)?;
        let uncovered = coverage.covered.err().filter(|_| !crls.is_empty()).map(Unusable::Uncovered);
        self.report_part(place, unusable.or(uncovered).as_ref(), metrics);
        coverage.next_change.filter(|_| !crls.is_empty())
    }

    /// Reports CRLs or an OCSP staple that are not used, once for each reason.
    fn report_part(&mut self, place: &Place, error: Option<&Unusable>, metrics: &Metrics) {
        let Some(error) = error else {
            self.part_failures = None;
            return;
        };
        let reason = error.to_string();
        if !self.part_failures.get_or_insert_default().is_new(&reason) {
            return;
        }
        let what = match error {
            Unusable::Staple(_) => "OCSP staple of a Secret is not used",
            _ => "CRLs of a Secret are not used",
        };
        let label = BySource { source: "kubernetes", reason: error.label() };
        metrics.source_failures.get_or_create(&label).inc();
        let (name, from) = (self.log_name(), place.object.to_string());
        tracing::warn!(name, from, reason = text::sanitize_for_log(&reason), "{what}");
    }

    /// The last good value stays.
    fn fail(&mut self, reason: &str, label: &'static str, metrics: &Metrics) {
        if self.is_news(reason, label, metrics) {
            let what = match self.has_value() {
                true => "requested Secret is not used; the previous one is still served",
                false => "requested Secret is not used; there is nothing else to serve yet",
            };
            tracing::warn!(name = self.log_name(), reason = text::sanitize_for_log(reason), "{what}");
        }
        self.publisher.fail(reason.to_owned());
    }

    fn withdraw(&mut self, reason: String, label: &'static str, metrics: &Metrics) {
        if self.is_news(&reason, label, metrics) {
            let what = match self.has_value() {
                true => "requested Secret is no longer served",
                false => "requested Secret is not served",
            };
            tracing::warn!(name = self.log_name(), reason = text::sanitize_for_log(&reason), "{what}");
        }
        self.publisher.withdraw(reason);
    }

    fn is_news(&mut self, reason: &str, label: &'static str, metrics: &Metrics) -> bool {
        let is_news = self.failures.get_or_insert_default().is_new(reason);
        if is_news {
            metrics.source_failures.get_or_create(&BySource { source: "kubernetes", reason: label }).inc();
        }
        is_news
    }

    fn has_value(&self) -> bool {
        self.publisher.entry().good.is_some()
    }

    /// The name is a client's text: the log quotes it, so that it can't pass for more than a name.
    fn log_name(&self) -> String {
        text::sanitize_for_log(self.publisher.key().name.as_str())
    }
}
