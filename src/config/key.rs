//! The options for keys that the agent generates.

use super::args::RunArgs;
use crate::options::{Level, Reader, Setting, parse_switch};
use crate::pki::key::{KeyFormat, KeyType};

/// The type of the keys, and the format in which they are written.
pub(super) fn options(r: &mut Reader<'_>, args: &RunArgs) -> (KeyType, KeyFormat) {
    let mut key_type = r.parsed("key-type", &args.key_type, &[], str::parse::<KeyType>);
    let mut format = format(r, args);
    if key_type.value == Some(KeyType::Ed25519) && format.value == Some(KeyFormat::Traditional) {
        let why = "Ed25519 keys have no traditional form";
        let unused = |from: &str, stronger: &str| format!("{from} is not used: {why}, and {stronger} wins");
        if key_type.level == format.level {
            r.mistake(format!(
                "{} and {} contradict each other: {why}; choose pkcs8, or another key type",
                key_type.from, format.from
            ));
        } else if key_type.level > format.level {
            r.note(unused(&format.from, &key_type.from));
            format.value = None;
        } else {
            r.note(unused(&key_type.from, &format.from));
            key_type.value = None;
        }
    }
    let is_stronger = key_type.value.is_some() && key_type.level > Some(Level::Istio);
    let istios = if is_stronger { None } else { istio_key_type(r) };
    if let Some((_, variable)) = istios {
        r.note_overridden("key-type", variable);
    }
    let key_type = istios.map(|(key_type, _)| key_type).or(key_type.value).unwrap_or_default();
    if key_type == KeyType::Ed25519 {
        r.note(
            "an Envoy rejects peers with Ed25519 certificates, unless signature_algorithms in its tls_params names \
             ed25519 (see docs/keys.md)",
        );
    }
    (key_type, format.or(KeyFormat::default()))
}

/// Istio's variable is a switch: true is pkcs8.
fn format(r: &mut Reader<'_>, args: &RunArgs) -> Setting<KeyFormat> {
    const ISTIOS: &str = "PKCS8_KEY";
    let mut format = r.parsed("key-format", &args.key_format, &[], str::parse::<KeyFormat>);
    if format.level <= Some(Level::File)
        && let Some(text) = r.variable(ISTIOS)
    {
        r.note_overridden("key-format", ISTIOS);
        format.level = Some(Level::Istio);
        format.from = format!("{ISTIOS} {text}");
        match parse_switch(text) {
            Ok(true) => format.value = Some(KeyFormat::Pkcs8),
            Ok(false) => format.value = Some(KeyFormat::Traditional),
            Err(error) => r.mistake(format!("{ISTIOS}: {error}")),
        }
    }
    format
}

/// The key type of Istio's variables, and the variable that names it: ECC_SIGNATURE_ALGORITHM with ECC_CURVE, else
/// WORKLOAD_RSA_KEY_SIZE.
fn istio_key_type(r: &mut Reader<'_>) -> Option<(KeyType, &'static str)> {
    const ALGORITHM: &str = "ECC_SIGNATURE_ALGORITHM";
    const BITS: &str = "WORKLOAD_RSA_KEY_SIZE";
    let found = match (r.variable(ALGORITHM), r.variable("ECC_CURVE"), r.variable(BITS)) {
        (Some("ECDSA"), None | Some("P256"), _) => (KeyType::EcdsaP256, ALGORITHM),
        (Some("ECDSA"), Some("P384"), _) => (KeyType::EcdsaP384, ALGORITHM),
        (Some("ECDSA"), Some(other), _) => {
            r.mistake(format!("ECC_CURVE {other:?}: choose P256 or P384, or set --key-type"));
            (KeyType::default(), ALGORITHM)
        }
        (Some(other), _, _) => {
            r.mistake(format!("{ALGORITHM} {other:?}: only ECDSA is known; set --key-type"));
            (KeyType::default(), ALGORITHM)
        }
        (None, _, Some(bits)) => match format!("rsa-{bits}").parse() {
            Ok(key_type) => (key_type, BITS),
            Err(_) => {
                r.mistake(format!("{BITS} {bits:?}: choose 2048, 3072 or 4096, or set --key-type"));
                (KeyType::default(), BITS)
            }
        },
        (None, _, None) => return None,
    };
    Some(found)
}
