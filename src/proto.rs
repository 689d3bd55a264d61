//! Protobuf messages, generated from `proto/` (see its README).

#![allow(clippy::all, clippy::pedantic, rustdoc::all, reason = "generated code")]

use std::fmt;

include!(concat!(env!("OUT_DIR"), "/proto.rs"));

/// The type URL of every SDS resource.
pub const SECRET_TYPE_URL: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

// These can hold a private key or a token, so `Debug` shows none of it.

impl fmt::Debug for google::protobuf::Any {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Any({}, {} bytes)", self.type_url, self.value.len())
    }
}

impl fmt::Debug for envoy::config::core::v3::DataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use envoy::config::core::v3::data_source::Specifier;
        match &self.specifier {
            Some(Specifier::Filename(path)) => write!(f, "DataSource(file {path})"),
            Some(Specifier::InlineBytes(bytes)) => write!(f, "DataSource({} bytes)", bytes.len()),
            Some(Specifier::InlineString(text)) => write!(f, "DataSource({} bytes)", text.len()),
            None => f.write_str("DataSource(empty)"),
        }
    }
}

impl fmt::Debug for csi::v1::NodePublishVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodePublishVolumeRequest({:?})", self.volume_id)
    }
}

impl fmt::Debug for X509svid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "X509svid({}, key hidden)", self.spiffe_id)
    }
}
