//! The options for the certificates that the CA issues.

use std::time::Duration;

use super::args::RunArgs;
use super::key;
use crate::options::{Reader, Setting};
use crate::pki::key::{KeyFormat, KeyType};
use crate::source::issuer::Grace;

/// Key, lifetime and renewal of the certificates.
pub(super) struct CertificateOptions {
    pub(super) key_type: KeyType,
    pub(super) key_format: KeyFormat,
    pub(super) ttl: Duration,
    /// `--cert-ttl`, if it is not Istio's variable that sets it.
    pub(super) ttl_option: Option<String>,
    /// How long one call to the CA may take.
    pub(super) timeout: Duration,
    pub(super) grace: Grace,
}

impl CertificateOptions {
    pub(super) fn new(r: &mut Reader<'_>, args: &RunArgs) -> Self {
        let (key_type, key_format) = key::options(r, args);
        let ttl = r.duration("cert-ttl", &args.cert_ttl, &["SECRET_TTL"], Duration::from_secs(1));
        let timeout = r.duration("ca-timeout", &args.ca_timeout, &[], Duration::from_millis(100));
        let ratio = r.parsed("grace-ratio", &args.grace_ratio, &["SECRET_GRACE_PERIOD_RATIO"], parse_ratio);
        let jitter =
            r.parsed("grace-jitter", &args.grace_jitter, &["SECRET_GRACE_PERIOD_RATIO_JITTER"], parse_jitter);
        Self {
            key_type,
            key_format,
            ttl_option: ttl.is_own().then(|| ttl.from.clone()),
            ttl: ttl.or(Duration::from_secs(24 * 3600)),
            timeout: timeout.or(Duration::from_secs(10)),
            grace: grace(r, ratio, jitter),
        }
    }
}

/// Istio's 0.01 has agents that started together renew together.
const JITTER: f64 = 0.1;

fn grace(r: &mut Reader<'_>, ratio: Setting<f64>, jitter: Setting<f64>) -> Grace {
    let from = jitter.from.clone();
    let ratio = ratio.or(0.5);
    match jitter.value {
        // More would renew some certificates only after they expire, or as soon as they are issued.
        Some(jitter) if jitter >= ratio.min(1.0 - ratio) => {
            r.mistake(format!(
                "{from} is too much for a grace ratio of {ratio}: it must be less than the ratio, and than what the \
                 ratio leaves"
            ));
            Grace { ratio, jitter: 0.0 }
        }
        Some(jitter) => Grace { ratio, jitter },
        None => Grace { ratio, jitter: JITTER.min(ratio / 2.0).min((1.0 - ratio) / 2.0) },
    }
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok().filter(|ratio| *ratio > 0.0 && *ratio < 1.0);
    ratio.ok_or_else(|| format!("{text:?} is not between 0 and 1; 0.2 renews with 20 % of the lifetime left"))
}

fn parse_jitter(text: &str) -> Result<f64, String> {
    let jitter = text.parse().ok().filter(|jitter| (0.0..1.0).contains(jitter));
    jitter.ok_or_else(|| {
        format!("{text:?} is not from 0 to below 1; 0.1 spreads renewals by ±10 % of the lifetime")
    })
}
