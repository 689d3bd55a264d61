//! One round of calls: the CAs are asked one after the other, until one signs.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::queue::Permit;
use super::retry::call_timeout;
use super::{Issuer, Validity};
use crate::base::clock::{millis, rfc3339};
use crate::base::offload;
use crate::base::spiffe_id::SpiffeId;
use crate::ca::failover::Member;
use crate::ca::{CaError, CertificateAuthority, InvalidResponse, IssuedChain, Pending, SigningRequest};
use crate::pki::certificate::Certificate;
use crate::pki::csr;
use crate::pki::key::SigningKey;
use crate::secret::{KeyPair, TrustBundle};

/// How far ahead of ours the clock of a CA may be.
const SKEW: Duration = Duration::from_secs(600);

/// A request that the CA may still answer, and its key.
#[derive(Debug)]
pub(super) struct Unfinished {
    key: SigningKey,
    request: SigningRequest,
}

/// A certificate that passed every check, except perhaps that it begins only in a moment.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) ca: Member,
    pub(super) pair: KeyPair,
    pub(super) bundle: TrustBundle,
    /// How long the call took.
    pub(super) took: Duration,
}

/// A CA that did not sign, and why.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) ca: Member,
    pub(super) error: CaError,
}

impl Issuer {
    /// One round, and what follows from it. Only the calls need a permit of the queue: while a certificate waits for its
    /// begin, or for streams to accept new roots, others are issued.
    pub(super) async fn renew(&mut self) -> Result<(), Vec<Failed>> {
        let mut failed = Vec::new();
        let issued = match self.take_begun() {
            Some(issued) => issued,
            None => {
                let Some(permit) = self.permit().await else { return Ok(()) };
                let issued = self.ask_in_turn(&mut failed).await;
                drop(permit);
                match issued {
                    Some(issued) => issued,
                    None => return Err(failed),
                }
            }
        };
        if let Err(error) = self.wait_until_begun(&issued.pair).await {
            failed.push(Failed { ca: issued.ca, error: error.into() });
            return Err(failed);
        }
        let ca = issued.ca.clone();
        failed.retain(|failed| failed.ca.name != ca.name);
        self.publish(issued).await;
        self.note_success(&ca, &failed);
        self.unfinished.clear();
        self.early.clear();
        self.tidy(failed.iter().map(|failed| &failed.ca).chain([&ca])).await;
        Ok(())
    }

    /// Waits for the right to call the CAs; none if files take over meanwhile.
    async fn permit(&self) -> Option<(Option<Permit>, Permit)> {
        loop {
            let left = match self.validity() {
                Validity::Left(left) => left,
                Validity::Past(_) | Validity::Nothing => Duration::ZERO,
            };
            let acquire = async {
                let before = match &self.minted {
                    Some(minted) => Some(minted.queue.acquire(left).await),
                    None => None,
                };
                (before, self.queue.acquire(left).await)
            };
            tokio::select! {
                biased;
                permits = acquire => return Some(permits),
                () = self.files_take_over() => return None,
                // What is left is something else now.
                () = self.clock.jumped() => {}
            }
        }
    }

    /// What the first CA that signs gave. The others of this round are `failed` then.
    async fn ask_in_turn(&mut self, failed: &mut Vec<Failed>) -> Option<Issued> {
        let cas = self.cas.in_turn(Instant::now());
        for ca in &cas {
            let outcome = match self.early.get(&ca.name) {
                Some(early) => Err(not_yet_valid(&early.pair).into()),
                None => self.ask(ca, &cas).await,
            };
            let error = match outcome {
                Ok(issued) => return Some(issued),
                Err(error) => error,
            };
            // It may still sign: no other CA is to do the same.
            let is_pending = matches!(error, CaError::Pending(_));
            if !is_pending {
                self.cas.failed(&ca.name, error.retry_after(), Instant::now(), fastrand::f64());
            }
            let (reason, outcome, now) = (error.to_string(), error.label(), self.clock.now());
            self.report_renewal(|renewal| renewal.call_failed(&ca.name, reason, outcome, now));
            failed.push(Failed { ca: ca.clone(), error });
            if is_pending {
                return None;
            }
        }
        self.cas.all_failed();
        None
    }

    /// Asks one CA of the round of `cas`.
    async fn ask(&mut self, ca: &Member, cas: &[Member]) -> Result<Issued, CaError> {
        let started = Instant::now();
        let outcome = self.issue(ca).await;
        let took = started.elapsed();
        let outcome = outcome.and_then(|(pair, bundle)| {
            let issued = Issued { ca: ca.clone(), pair, bundle, took };
            self.choose(issued, cas).map_err(CaError::from)
        });
        let label = outcome.as_ref().map_or_else(CaError::label, |_| "ok");
        self.metrics.count_call(ca.client.name(), label, took, self.clock.now());
        outcome
    }

    async fn issue(&mut self, ca: &Member) -> Result<(KeyPair, TrustBundle), CaError> {
        let identity = self.settings.identity.resolve(&self.clock, &self.disk).await;
        let Unfinished { key, request } = match self.unfinished.remove(&ca.name) {
            // Another one would need another approval.
            Some(same) if identity.is_none() || same.request.identity == identity => same,
            _ => self.request(identity).await?,
        };
        let timeout = call_timeout(self.settings.timeout, self.validity());
        let answer = match sign(&*ca.client, &request, timeout).await {
            Ok(answer) => answer,
            Err(error) => {
                if ca.client.pending().is_some() {
                    self.unfinished.insert(Arc::clone(&ca.name), Unfinished { key, request });
                }
                return Err(error);
            }
        };
        let moment = self.moment_of_check(&answer);
        let key = key.to_private_key().in_format(self.settings.key_format);
        let key = key.map_err(|error| CaError::Local(error.to_string()))?;
        let (size, SigningRequest { identity, names, .. }) = (answer.bytes(), request);
        let checked = offload::large(size, move || answer.check(key, identity.as_ref(), &names, moment));
        checked.await.map_err(|response| match ca.client.remedy(&response) {
            Some(remedy) => CaError::InvalidResponseWithRemedy { response, remedy },
            None => response.into(),
        })
    }

    /// A new request, with a key of its own.
    async fn request(&self, identity: Option<SpiffeId>) -> Result<Unfinished, CaError> {
        let (key_type, ttl, names) = (self.settings.key_type, self.settings.ttl, self.settings.names.clone());
        let make = move || {
            let key = SigningKey::generate(key_type)?;
            let csr = csr::request(&key, identity.as_ref(), &names)?;
            Ok(Unfinished { key, request: SigningRequest { csr, identity, names, ttl } })
        };
        let made: Result<_, rcgen::Error> = if key_type.is_slow() {
            let made = tokio::task::spawn_blocking(make).await;
            made.map_err(|error| CaError::Local(error.to_string()))?
        } else {
            make()
        };
        made.map_err(|error| CaError::Local(error.to_string()))
    }

    /// The moment at which an answer must be valid: now, or its begin if that is soon. Then the CA's clock is ahead of
    /// ours, and peers' clocks may be like ours.
    fn moment_of_check(&self, answer: &IssuedChain) -> SystemTime {
        let now = self.clock.now();
        let leaf = answer.chain.first().and_then(|leaf| Certificate::parse(leaf).ok());
        match leaf.map(|leaf| leaf.not_before) {
            Some(begins) if (now..=now + SKEW).contains(&begins) => begins,
            _ => now,
        }
    }

    /// The certificate to serve next. An error if another CA of the round of `cas` is to be asked first: that is so where
    /// the served certificate expires before `issued` begins. `issued` is kept for the case that no CA signs one that is
    /// valid now.
    fn choose(&mut self, issued: Issued, cas: &[Member]) -> Result<Issued, InvalidResponse> {
        let begins = issued.begins();
        let served_until = self.key_pair.entry().good.map(|good| good.secret.not_after());
        if begins <= self.clock.now() || served_until.is_some_and(|until| until >= begins) {
            return Ok(issued);
        }
        let error = not_yet_valid(&issued.pair);
        self.early.insert(Arc::clone(&issued.ca.name), issued);
        if cas.iter().any(|ca| !self.early.contains_key(&ca.name)) {
            return Err(error);
        }
        self.first_early().and_then(|ca| self.early.remove(&ca)).ok_or(error)
    }

    /// The CA whose certificate begins first, of those that begin only in a moment.
    fn first_early(&self) -> Option<Arc<str>> {
        let first = self.early.iter().min_by_key(|(_, issued)| issued.begins());
        first.map(|(ca, _)| Arc::clone(ca))
    }

    /// A certificate that has begun since the last round. Forgets those that the clock has made useless.
    fn take_begun(&mut self) -> Option<Issued> {
        let now = self.clock.now();
        self.early.retain(|_, issued| issued.begins() <= now + SKEW && issued.pair.not_after() > now);
        let ca = self.first_early()?;
        if self.early.get(&ca)?.begins() > now {
            return None;
        }
        self.early.remove(&ca)
    }

    /// A certificate that begins in a moment is good then. The served one stays meanwhile. An error if the clock is set
    /// so that it is no longer good.
    async fn wait_until_begun(&self, pair: &KeyPair) -> Result<(), InvalidResponse> {
        let begins = pair.leaf().not_before;
        if begins <= self.clock.now() {
            return Ok(());
        }
        let reason = format!(
            "the new certificate is valid only from {}: it is served then; the CA's clock or this machine's clock \
             is wrong",
            rfc3339(begins)
        );
        tracing::warn!(provider = self.cas.provider(), "{reason}");
        self.key_pair.fail(reason);
        while let Ok(early) = begins.duration_since(self.clock.now())
            && !early.is_zero()
        {
            if early > SKEW {
                return Err(not_yet_valid(pair));
            }
            tokio::select! {
                () = self.clock.sleep_until(begins) => {}
                () = self.clock.jumped() => {}
            }
        }
        if pair.not_after() <= self.clock.now() {
            return Err(InvalidResponse::Expired { at: rfc3339(pair.not_after()).to_string() });
        }
        Ok(())
    }

    /// Has clients remove what they left at `cas`. A CA that hangs here delays the next round by no more than the time of
    /// a call.
    pub(super) async fn tidy(&self, cas: impl Iterator<Item = &Member>) {
        let timeout = call_timeout(self.settings.timeout, self.validity());
        for ca in cas {
            if tokio::time::timeout(timeout, ca.client.tidy()).await.is_err() {
                tracing::debug!(ca = &*ca.name, timeout_ms = millis(timeout), "cleanup at the CA timed out");
            }
        }
    }
}

impl Issued {
    pub(super) fn begins(&self) -> SystemTime {
        self.pair.leaf().not_before
    }
}

fn not_yet_valid(pair: &KeyPair) -> InvalidResponse {
    InvalidResponse::NotYetValid { from: rfc3339(pair.leaf().not_before).to_string() }
}

async fn sign(
    ca: &dyn CertificateAuthority,
    request: &SigningRequest,
    timeout: Duration,
) -> Result<IssuedChain, CaError> {
    let answer = tokio::time::timeout(timeout, ca.sign(request)).await;
    answer.unwrap_or_else(|_| match ca.pending() {
        Some(Pending { waits_for: Some(words) }) => Err(CaError::Pending(words)),
        _ => Err(CaError::Timeout(timeout)),
    })
}
