//! What a Secret or ConfigMap holds: a key pair, trust roots, CRLs. Checked like mounted files.

use std::sync::Arc;
use std::time::SystemTime;

use crate::base::clock::rfc3339;
use crate::kube::{Object, Version};
use crate::pki::crl::{self, Crl, NotCrls};
use crate::pki::key::{NotAKey, PrivateKey};
use crate::pki::ocsp::{NotAStaple, Staple};
use crate::pki::pem::{self, NotPem};
use crate::secret::{KeyPair, NotAKeyPair, NotATrustBundle, TrustBundle, Uncovered};

/// The keys of a key pair, in the order in which they count.
const PAIRS: [(&str, &str); 2] = [("cert", "key"), ("tls.crt", "tls.key")];
/// All keys of an object that are read.
pub(super) const KEYS: [&str; 9] =
    ["cert", "key", "tls.crt", "tls.key", STAPLE, "cacert", "crl", "ca.crt", "ca.crl"];
/// The key of the OCSP response for the certificate under `tls.crt`, in DER.
const STAPLE: &str = "tls.ocsp-staple";
/// The keys of roots and of their CRLs, in the order in which they count.
const ROOTS: [(&str, &str); 2] = [("cacert", "crl"), ("ca.crt", "ca.crl")];

/// What names ask of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wants {
    pub(super) pair: bool,
    pub(super) roots: bool,
}

impl Wants {
    pub(super) fn covers(self, other: Self) -> bool {
        (self.pair || !other.pair) && (self.roots || !other.roots)
    }

    pub(super) fn or(self, other: Self) -> Self {
        Self { pair: self.pair || other.pair, roots: self.roots || other.roots }
    }
}

/// What an object holds, as far as it was wanted. Names that serve the same share it.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) version: Version,
    pub(super) wants: Wants,
    pub(super) pair: Option<Result<KeyPair, Unusable>>,
    // Boxes for what most objects don't have: there are thousands of them.
    /// Costs the OCSP staple of the key pair alone.
    staple_error: Option<Box<Unusable>>,
    pub(super) roots: Option<Box<Result<Roots, Unusable>>>,
    /// The newest key pair and roots that fit together.
    fitting: Option<Box<(KeyPair, TrustBundle)>>,
}

#[derive(Clone, Debug)]
pub(super) struct Roots {
    pub(super) bundle: TrustBundle,
    /// Their own error costs the CRLs alone.
    pub(super) crls: Result<Vec<Arc<Crl>>, Unusable>,
}

/// Why an object can't be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    #[error("it has no key pair: it needs the keys tls.crt and tls.key (or cert and key)")]
    NoPair,
    #[error("it has {present} but no {absent}: a key pair needs both")]
    Half { present: &'static str, absent: &'static str },
    #[error("it has no trust roots: it needs the key ca.crt (or cacert)")]
    NoRoots,
    #[error("{key}: {source}")]
    Certificates { key: &'static str, source: NotPem },
    #[error("{key}: {source}")]
    Key { key: &'static str, source: NotAKey },
    #[error("{chain} and {key}: {source}")]
    Pair { chain: &'static str, key: &'static str, source: NotAKeyPair },
    #[error("{key}: {source}")]
    Bundle { key: &'static str, source: NotATrustBundle },
    #[error("{key}: {source}; its roots are served without CRLs")]
    Crls { key: &'static str, source: NotCrls },
    #[error("{0}; the roots are served without CRLs")]
    Uncovered(Uncovered),
    #[error("{STAPLE}: {0}; its key pair is served without OCSP staple")]
    Staple(NotAStaple),
    #[error(
        "its key pair is unusable, and its new roots do not reach the certificate that is served: they are held back until \
         the key pair is usable"
    )]
    RootsHeldBack,
    #[error(
        "its roots are unusable, and the ones that are served do not reach its new certificate: it is held back until the \
         roots are usable"
    )]
    PairHeldBack,
    #[error("its certificate expired at {}; renew it", rfc3339(*.0))]
    Expired(SystemTime),
    #[error("its certificate is not valid before {}; it is served from then on", rfc3339(*.0))]
    NotYetValid(SystemTime),
}

impl Unusable {
    /// A word for metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::NoPair | Self::Half { .. } | Self::NoRoots => "incomplete",
            Self::Expired(_) => "expired",
            Self::NotYetValid(_) => "not_yet_valid",
            Self::Pair { .. } => "mismatch",
            Self::RootsHeldBack | Self::PairHeldBack => "held_back",
            Self::Staple(_) => "ocsp_staple",
            Self::Crls { .. } | Self::Uncovered(_) => "crl",
            Self::Certificates { .. } | Self::Key { .. } | Self::Bundle { .. } => "not_parsed",
        }
    }
}

impl Content {
    /// Parses what is wanted of `object`. Roots that are those of `before` are not parsed again.
    pub(super) fn parse(object: &Object, wants: Wants, before: Option<&Self>, now: SystemTime) -> Self {
        let of_before = before.and_then(|before| before.roots.as_deref()?.as_ref().ok());
        let mut pair = wants.pair.then(|| pair(object));
        let staple_error = pair.as_mut().and_then(|pair| staple(object, pair.as_mut().ok()?).err());
        let mut content = Self {
            version: object.version.clone(),
            wants,
            pair,
            staple_error: staple_error.map(|error| Box::new(Unusable::Staple(error))),
            roots: wants.roots.then(|| Box::new(roots(object, of_before.map(|roots| &roots.bundle)))),
            fitting: before.and_then(|before| before.fitting.clone()),
        };
        content.hold_back(now);
        content
    }

    /// One half is not served without the other where what is served would no longer fit together.
    fn hold_back(&mut self, now: SystemTime) {
        let (Some(pair), Some(roots)) = (&mut self.pair, &mut self.roots) else { return };
        let fits = |bundle: &TrustBundle, pair: &KeyPair| bundle.verify(pair, now).is_ok();
        match (&*pair, &**roots, self.fitting.as_deref()) {
            (Ok(new), Ok(new_roots), _) => {
                self.fitting =
                    fits(&new_roots.bundle, new).then(|| Box::new((new.clone(), new_roots.bundle.clone())));
            }
            (Err(_), Ok(new_roots), Some((served, old)))
                if fits(old, served) && !fits(&new_roots.bundle, served) =>
            {
                **roots = Err(Unusable::RootsHeldBack);
            }
            (Ok(new), Err(_), Some((served, old))) if fits(old, served) && !fits(old, new) => {
                *pair = Err(Unusable::PairHeldBack);
            }
            _ => {}
        }
    }

    /// Whether it is from the state directory, and not from an API server of this run.
    pub(super) fn is_kept(&self) -> bool {
        self.version.0.is_empty()
    }

    /// Whether there is anything to serve.
    pub(super) fn is_usable(&self) -> bool {
        matches!(self.pair, Some(Ok(_))) || matches!(self.roots.as_deref(), Some(Ok(_)))
    }

    /// `pair` with its OCSP staple if that is usable at `now`, or why it is not; and when that changes.
    pub(super) fn stapled(
        &self,
        pair: KeyPair,
        now: SystemTime,
    ) -> (KeyPair, Option<Unusable>, Option<SystemTime>) {
        let Some(staple) = pair.staple() else { return (pair, self.staple_error.as_deref().cloned(), None) };
        let (begin, end) = (staple.this_update, staple.next_update);
        match staple.check_time(now) {
            Ok(()) => (pair, None, Some(end)),
            Err(error) => {
                (pair.without_staple(), Some(Unusable::Staple(error)), Some(begin).filter(|at| *at > now))
            }
        }
    }

    /// How many bytes there are to parse.
    pub(super) fn bytes(object: &Object) -> usize {
        object.data.values().map(|value| value.len()).sum()
    }
}

/// The key pair if it is valid at `now`.
pub(super) fn valid_pair(pair: &Result<KeyPair, Unusable>, now: SystemTime) -> Result<KeyPair, Unusable> {
    let pair = pair.clone()?;
    if pair.not_after() <= now {
        return Err(Unusable::Expired(pair.not_after()));
    }
    if pair.leaf().not_before > now {
        return Err(Unusable::NotYetValid(pair.leaf().not_before));
    }
    Ok(pair)
}

/// The roots, unless all have expired at `now`.
pub(super) fn valid_roots(roots: &Result<Roots, Unusable>, now: SystemTime) -> Result<Roots, Unusable> {
    let roots = roots.clone()?;
    match roots.bundle.not_after() {
        not_after if not_after <= now => Err(Unusable::Expired(not_after)),
        _ => Ok(roots),
    }
}

/// The first of the pairs of keys of which `object` has one, whole pairs first.
fn first_pair(object: &Object) -> Option<(&'static str, &'static str)> {
    let has = |key: &str| value(object, key).is_some();
    let whole = PAIRS.into_iter().find(|(chain, key)| has(chain) && has(key));
    whole.or_else(|| PAIRS.into_iter().find(|(chain, key)| has(chain) || has(key)))
}

/// What is under a key; none where that is empty.
fn value<'a>(object: &'a Object, key: &str) -> Option<&'a [u8]> {
    object.data.get(key).map(|value| value.as_slice()).filter(|value| !value.is_empty())
}

fn pair(object: &Object) -> Result<KeyPair, Unusable> {
    let (chain_key, key_key) = first_pair(object).ok_or(Unusable::NoPair)?;
    let (chain, key) = match (value(object, chain_key), value(object, key_key)) {
        (Some(chain), Some(key)) => (chain, key),
        (None, _) => return Err(Unusable::Half { present: key_key, absent: chain_key }),
        (_, None) => return Err(Unusable::Half { present: chain_key, absent: key_key }),
    };
    let chain =
        pem::certificates(chain).map_err(|source| Unusable::Certificates { key: chain_key, source })?;
    let key = PrivateKey::from_pem(key).map_err(|source| Unusable::Key { key: key_key, source })?;
    KeyPair::new(chain, key).map_err(|source| Unusable::Pair { chain: chain_key, key: key_key, source })
}

/// Adds the OCSP staple of `object` to its key pair.
fn staple(object: &Object, pair: &mut KeyPair) -> Result<(), NotAStaple> {
    let is_of_pair = first_pair(object).is_some_and(|(chain, _)| chain == "tls.crt");
    let value = object.data.get(STAPLE).filter(|value| is_of_pair && !value.is_empty());
    if let Some(der) = value {
        *pair = pair.with_staple(Staple::parse(der)?)?;
    }
    Ok(())
}

fn roots(object: &Object, before: Option<&TrustBundle>) -> Result<Roots, Unusable> {
    let value =
        |key: &str| object.data.get(key).map(|value| value.as_slice()).filter(|value| !value.is_empty());
    let found = ROOTS.into_iter().find_map(|(key, crl)| Some((key, crl, value(key)?)));
    let (key, crl_key, text) = found.ok_or(Unusable::NoRoots)?;
    let roots = pem::certificates(text).map_err(|source| Unusable::Certificates { key, source })?;
    let bundle = TrustBundle::of(roots, before).map_err(|source| Unusable::Bundle { key, source })?;
    let crls = match value(crl_key) {
        Some(text) if !crl::is_blank(text) => crl::from_pem(text)
            .map(|crls| crls.into_iter().map(Arc::new).collect())
            .map_err(|source| Unusable::Crls { key: crl_key, source }),
        _ => Ok(Vec::new()),
    };
    Ok(Roots { bundle, crls })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::super::testing::{object, pair_of, root_of};
    use super::*;
    use crate::pki::ocsp;

    const BOTH: Wants = Wants { pair: true, roots: true };

    #[test]
    fn both_shapes_of_a_secret_are_read_and_the_first_whole_pair_counts() {
        let ((chain, key), (other_chain, other_key)) = (pair_of("one"), pair_of("two"));
        let root = root_of("root");
        let leaf = |data: &[(&str, &str)]| {
            let content = Content::parse(&object("web", 1, data), BOTH, None, UNIX_EPOCH);
            content.pair.unwrap().map(|pair| pair.leaf().names())
        };
        let one = leaf(&[("tls.crt", &chain), ("tls.key", &key), ("ca.crt", &root)]).unwrap();
        assert_eq!(leaf(&[("cert", &chain), ("key", &key)]).unwrap(), one);
        let both = [("cert", &*chain), ("key", &*key), ("tls.crt", &*other_chain), ("tls.key", &*other_key)];
        assert_eq!(leaf(&both).unwrap(), one);
        assert_eq!(leaf(&[("cert", &other_chain), ("tls.crt", &chain), ("tls.key", &key)]).unwrap(), one);
        assert_eq!(leaf(&[("ca.crt", &root)]).unwrap_err(), Unusable::NoPair);
        let half = Unusable::Half { present: "tls.key", absent: "tls.crt" };
        assert_eq!(leaf(&[("tls.key", &key), ("tls.crt", "")]).unwrap_err(), half);
        let mixed = leaf(&[("tls.crt", &chain), ("tls.key", &other_key)]).unwrap_err();
        assert_eq!(mixed.label(), "mismatch");
        assert!(
            mixed.to_string().starts_with("tls.crt and tls.key: the private key does not match"),
            "{mixed}"
        );
    }

    #[test]
    fn roots_come_from_either_key_and_bad_crls_cost_the_crls_alone() {
        let (one, two) = (root_of("one"), root_of("two"));
        let parse = |data: &[(&str, &str)]| {
            Content::parse(&object("ca", 1, data), BOTH, None, UNIX_EPOCH).roots.map(|roots| *roots).unwrap()
        };
        let roots = parse(&[("cacert", &one), ("ca.crt", &two)]).unwrap();
        assert_eq!(roots.bundle.roots(), parse(&[("ca.crt", &one)]).unwrap().bundle.roots());
        assert_eq!(roots.crls, Ok(Vec::new()));
        let bad = parse(&[("ca.crt", &one), ("ca.crl", "junk")]).unwrap();
        assert_eq!(bad.crls.unwrap_err().label(), "crl");
        assert_eq!(parse(&[("ca.crt", &one), ("ca.crl", "\n")]).unwrap().crls, Ok(Vec::new()));
        assert_eq!(parse(&[("tls.crt", &one)]).unwrap_err(), Unusable::NoRoots);
        assert_eq!(parse(&[("ca.crt", "junk")]).unwrap_err().label(), "not_parsed");
    }

    #[test]
    fn a_staple_is_served_for_its_time_and_a_bad_one_costs_itself_alone() {
        let (chain, key) = pair_of("web");
        let (begin, end) =
            [1_800_000_000, 1_800_003_600].map(|at| UNIX_EPOCH + Duration::from_secs(at)).into();
        let content = |keys: (&str, &str), staple: &[u8]| {
            let mut secret = object("web", 1, &[(keys.0, &chain), (keys.1, &key)]);
            secret.data.insert(STAPLE.into(), zeroize::Zeroizing::new(staple.to_vec()));
            let content = Content::parse(&secret, BOTH, None, begin);
            let pair = content.pair.clone().unwrap().unwrap();
            (content, pair)
        };
        let keys = ("tls.crt", "tls.key");
        let serial = content(keys, b"").1.leaf().serial.clone();
        let at = |now, staple: &[u8]| {
            let (content, pair) = content(keys, staple);
            let (pair, error, next) = content.stapled(pair, now);
            (pair.staple().is_some(), error.map(|error| error.to_string()), next)
        };
        let good = ocsp::testing::staple(&serial, begin, end);
        assert_eq!(at(begin, &good), (true, None, Some(end)));
        let (is_stapled, error, next) = at(end, &good);
        assert_eq!((is_stapled, next), (false, None));
        let expired =
            "tls.ocsp-staple: it expired at 2027-01-15T09:00:00Z; its key pair is served without OCSP staple";
        assert_eq!(error.unwrap(), expired);
        let (is_stapled, error, next) = at(begin - Duration::from_secs(1), &good);
        assert!(!is_stapled && error.is_some() && next == Some(begin));
        assert_eq!(at(begin, b""), (false, None, None));
        let foreign = ocsp::testing::staple("1234", begin, end);
        for (bad, reason) in [(&foreign[..], "serial 1234"), (b"junk", "not an OCSP response")] {
            let (is_stapled, error, next) = at(begin, bad);
            assert!(!is_stapled && next.is_none() && error.unwrap().contains(reason));
        }
        // Where the pair is under the other keys, the staple is not its own.
        assert!(content(("cert", "key"), &good).1.staple().is_none());
    }

    #[test]
    fn only_what_is_wanted_is_parsed() {
        let (chain, key) = pair_of("web");
        let secret = object("web", 7, &[("tls.crt", &chain), ("tls.key", &key)]);
        let content = Content::parse(&secret, Wants { pair: true, roots: false }, None, UNIX_EPOCH);
        assert!(content.roots.is_none() && content.pair.is_some());
        let pair = content.pair.unwrap();
        let leaf = pair.as_ref().unwrap().leaf().clone();
        assert_eq!(valid_pair(&pair, leaf.not_after).unwrap_err(), Unusable::Expired(leaf.not_after));
        let early = leaf.not_before - Duration::from_secs(1);
        assert_eq!(valid_pair(&pair, early).unwrap_err(), Unusable::NotYetValid(leaf.not_before));
        assert!(valid_pair(&pair, leaf.not_before).is_ok());
    }
}
