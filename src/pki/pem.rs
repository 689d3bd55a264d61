//! PEM: a lenient reader, and a writer.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject};
use zeroize::Zeroizing;

use crate::base::limits;

/// Why a text has no usable certificates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPem {
    #[error("it holds no PEM certificate (a \"-----BEGIN CERTIFICATE-----\" block)")]
    NoCertificate,
    #[error("it is DER, not PEM: convert it with `openssl x509 -inform der -outform pem`")]
    Der,
    #[error("its PEM is damaged: {0}")]
    Damaged(&'static str),
    #[error(
        "it holds more than {max} certificates: remove those that are not needed",
        max = limits::CERTIFICATES
    )]
    TooMany,
}

/// Describes a PEM error without quoting the text, which may be any file.
pub fn damage(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::MissingSectionEnd { .. } => "a BEGIN line without its END line; is it cut off?",
        pem::Error::IllegalSectionStart { .. } => "a malformed BEGIN line",
        pem::Error::Base64Decode(_) => "the text between BEGIN and END is not base64",
        pem::Error::SectionTooLarge => "a block is too large",
        pem::Error::NoItemsFound => "it has no block",
        _ => "it can't be read",
    }
}

/// Every certificate of `text`, in order; other blocks and text between blocks are ignored.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, NotPem> {
    let found = CertificateDer::pem_slice_iter(text)
        .take(limits::CERTIFICATES + 1)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| NotPem::Damaged(damage(&error)))?;
    match found.is_empty() {
        false => bounded(found),
        true if looks_like_der(text) => Err(NotPem::Der),
        true => Err(NotPem::NoCertificate),
    }
}

/// The readable certificates of `text`: damaged blocks are ignored too, unless there is nothing else.
pub fn readable_certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, NotPem> {
    let readable = CertificateDer::pem_slice_iter(text).filter_map(Result::ok);
    let found: Vec<_> = readable.take(limits::CERTIFICATES + 1).collect();
    if found.is_empty() { certificates(text) } else { bounded(found) }
}

fn bounded(found: Vec<CertificateDer<'static>>) -> Result<Vec<CertificateDer<'static>>, NotPem> {
    if found.len() > limits::CERTIFICATES { Err(NotPem::TooMany) } else { Ok(found) }
}

/// Whether `bytes` start like a DER certificate or key: a SEQUENCE of more than 127 bytes.
pub fn looks_like_der(bytes: &[u8]) -> bool {
    matches!(bytes, [0x30, 0x81..=0x83, ..])
}

/// Whether `text` has a PEM private key of any kind.
pub fn has_private_key(text: &[u8]) -> bool {
    const MARK: &[u8] = b"PRIVATE KEY-----";
    text.windows(MARK.len()).any(|window| window == MARK)
}

/// `certificates` as one PEM text.
pub fn of_certificates<'a>(certificates: impl IntoIterator<Item = &'a CertificateDer<'static>>) -> Vec<u8> {
    certificates.into_iter().flat_map(|certificate| encode("CERTIFICATE", certificate).to_vec()).collect()
}

/// `der` as one PEM block, in memory that is wiped when dropped.
pub fn encode(label: &str, der: &[u8]) -> Zeroizing<Vec<u8>> {
    const LINE: usize = 64;
    let base64 = Zeroizing::new(STANDARD.encode(der));
    // Sized in advance: a buffer that grows leaves copies of a key in memory.
    let size = base64.len() + base64.len() / LINE + 2 * label.len() + 64;
    let mut out = Zeroizing::new(Vec::with_capacity(size));
    out.extend_from_slice(format!("-----BEGIN {label}-----\n").as_bytes());
    for line in base64.as_bytes().chunks(LINE) {
        out.extend_from_slice(line);
        out.push(b'\n');
    }
    out.extend_from_slice(format!("-----END {label}-----\n").as_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_certificates_are_read_back() {
        for length in [1, 47, 48, 49, 1000] {
            let der = CertificateDer::from(vec![7; length]);
            let text = of_certificates([&der, &der]);
            assert_eq!(certificates(&text).unwrap(), [der.clone(), der], "{length} bytes");
        }
    }

    #[test]
    fn comments_and_crlf_are_accepted() {
        let der = CertificateDer::from(vec![1, 2, 3]);
        let text = String::from_utf8(of_certificates([&der])).unwrap().replace('\n', "\r\n");
        let text = format!("# the root\r\nsubject=x\r\n{text}\r\ntrailing words\r\n");
        assert_eq!(certificates(text.as_bytes()).unwrap(), [der]);
    }

    #[test]
    fn damaged_blocks_can_be_ignored() {
        let [one, other] = [1, 2].map(|byte| CertificateDer::from(vec![byte; 9]));
        let damaged = b"-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n".to_vec();
        let cut_off = b"-----BEGIN CERTIFICATE-----\nAAAA".to_vec();
        let texts = [&of_certificates([&one])[..], &damaged, &of_certificates([&other]), &cut_off];
        assert!(certificates(&texts.concat()).is_err());
        assert_eq!(readable_certificates(&texts.concat()).unwrap(), [one, other]);
        assert!(matches!(readable_certificates(&damaged), Err(NotPem::Damaged(_))));
        assert_eq!(readable_certificates(b"words"), Err(NotPem::NoCertificate));
    }

    #[test]
    fn the_number_of_certificates_is_bounded() {
        let one = of_certificates([&CertificateDer::from(vec![1, 2, 3])]);
        let (enough, too_many) = (one.repeat(limits::CERTIFICATES), one.repeat(limits::CERTIFICATES + 1));
        for read in [certificates, readable_certificates] {
            assert_eq!(read(&enough).map(|found| found.len()), Ok(limits::CERTIFICATES));
            assert_eq!(read(&too_many), Err(NotPem::TooMany));
        }
    }

    #[test]
    fn the_error_says_why_a_text_is_not_pem() {
        assert_eq!(certificates(b""), Err(NotPem::NoCertificate));
        assert_eq!(certificates(b"root:x:0:0"), Err(NotPem::NoCertificate));
        assert_eq!(certificates(&[0x30, 0x82, 1, 1]), Err(NotPem::Der));
        assert!(matches!(
            certificates(b"-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n"),
            Err(NotPem::Damaged(_))
        ));
    }
}
