//! Fuzz target: foreign text, and SPIFFE IDs.

use super::fuzzing::check_line;
use super::limits;
use super::spiffe_id::{ServiceAccount, SpiffeId};
use super::text::{one_line, sanitize_for_log};

/// Any text. True if it is a SPIFFE ID.
pub fn text(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let logged = sanitize_for_log(&text);
    check_line(&logged);
    assert!(logged.chars().count() <= limits::FOREIGN_TEXT);
    assert_eq!(sanitize_for_log(&logged), logged, "safe text changes");
    let line = one_line(&text);
    check_line(&line);
    assert_eq!(one_line(&line), line, "safe text changes");
    assert_eq!(line == text, !text.contains(char::is_control) && text.chars().count() <= limits::NAME_TEXT);
    if let Some(account) = ServiceAccount::from_subject(&text) {
        assert_eq!(format!("system:serviceaccount:{}:{}", account.namespace, account.name), text);
    }
    let id = match text.parse::<SpiffeId>() {
        Ok(id) => id,
        Err(error) => {
            check_line(&error.to_string());
            return false;
        }
    };
    assert_eq!(id.as_str(), text);
    assert_eq!(one_line(id.as_str()), id.as_str(), "a SPIFFE ID is shown as it is");
    if let Some(account) = id.service_account() {
        assert_eq!(SpiffeId::for_service_account(id.trust_domain(), &account).as_ref(), Ok(&id));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_text_breaks_no_rule() {
        let samples = [
            "spiffe://cluster.local/ns/default/sa/web",
            "spiffe://td",
            "spiffe://a.b-c_1/ns/a/sa/b/c",
            "spiffe://td/ns/sa/sa/ns",
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        seeded("text", Shape::Bytes, 5_000, &samples, text);
        for other in
            ["system:serviceaccount:shop:cart", "system:serviceaccount::", "\u{1b}[31m\r\nx\u{85}\u{2028}"]
        {
            assert!(!text(other.repeat(500).as_bytes()) && !text(other.as_bytes()), "{other}");
        }
    }
}
