//! One gRPC message whose secrets are shared bytes, of SDS or the Workload API. All streams send the same bytes of a secret: nothing copies a key on its
//! way to the socket.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::encoding::{encode_varint, encoded_len_varint};

use crate::proto::SECRET_TYPE_URL;
use crate::secret::Resource;

/// Bytes before each message of gRPC: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// The wire type of everything here: a length, and that many bytes.
const LENGTH_DELIMITED: u8 = 2;

/// A message that is being written: fields of text, and secrets.
#[derive(Debug)]
pub struct MessageWriter {
    /// What was written since the last secret.
    text: BytesMut,
    parts: VecDeque<Bytes>,
}

impl Default for MessageWriter {
    fn default() -> Self {
        Self { text: BytesMut::with_capacity(Self::USUAL), parts: VecDeque::new() }
    }
}

impl MessageWriter {
    /// Enough for all but the secret in a response with one.
    const USUAL: usize = 384;

    /// Writes a field, unless it is empty: absent is the same.
    pub fn text(&mut self, field: u8, value: &str) {
        if !value.is_empty() {
            self.item(field, value);
        }
    }

    /// Writes an item of a repeated field.
    pub fn item(&mut self, field: u8, value: &str) {
        self.head(field, value.len());
        self.text.put_slice(value.as_bytes());
    }

    /// Writes a message in which field 1 is `value`.
    pub fn wrapped_text(&mut self, field: u8, value: &str) {
        self.head(field, text_length(value));
        self.text(1, value);
    }

    /// Writes an `Any` that holds `resource` as the secret `name`.
    pub fn secret(&mut self, field: u8, name: &str, resource: &Resource) {
        let secret = secret_length(name, resource);
        self.head(field, any_length(secret));
        self.text(1, SECRET_TYPE_URL);
        self.head(2, secret);
        self.text(1, name);
        self.share(resource.payload.bytes().clone());
    }

    /// Writes a message of the delta protocol: version (1), secret (2) and name (3).
    pub fn labelled_secret(&mut self, field: u8, name: &str, version: &str, resource: &Resource) {
        let any = any_length(secret_length(name, resource));
        self.head(field, text_length(version) + text_length(name) + field_length(any));
        self.text(1, version);
        self.text(3, name);
        self.secret(2, name, resource);
    }

    /// Writes a field whose bytes all streams share.
    pub fn shared(&mut self, field: u8, value: Bytes) {
        self.head(field, value.len());
        self.share(value);
    }

    /// Writes an item of a map of bytes.
    pub fn keyed(&mut self, field: u8, key: &str, value: Bytes) {
        self.head(field, text_length(key) + field_length(value.len()));
        self.text(1, key);
        self.shared(2, value);
    }

    /// Writes a message that consists of `content` and then field `last`.
    pub fn extended(&mut self, field: u8, content: Bytes, last: u8, value: Bytes) {
        self.head(field, content.len() + field_length(value.len()));
        self.share(content);
        self.shared(last, value);
    }

    fn share(&mut self, bytes: Bytes) {
        let text = self.text.split().freeze();
        self.parts.extend([text, bytes]);
    }

    fn head(&mut self, field: u8, length: usize) {
        self.text.put_u8(field << 3 | LENGTH_DELIMITED);
        encode_varint(length as u64, &mut self.text);
    }

    pub fn finish(mut self) -> Message {
        if !self.text.is_empty() {
            self.parts.push_back(self.text.freeze());
        }
        Message::new(self.parts)
    }
}

/// The length of a field with `length` bytes.
fn field_length(length: usize) -> usize {
    1 + encoded_len_varint(length as u64) + length
}

/// The length of a field of text.
fn text_length(value: &str) -> usize {
    if value.is_empty() { 0 } else { field_length(value.len()) }
}

/// The length of a `Secret` message.
fn secret_length(name: &str, resource: &Resource) -> usize {
    text_length(name) + resource.payload.bytes().len()
}

/// The length of an `Any` with a `Secret` message of `secret` bytes.
fn any_length(secret: usize) -> usize {
    text_length(SECRET_TYPE_URL) + field_length(secret)
}

/// One message as gRPC sends it, in parts.
#[derive(Debug)]
pub struct Message {
    prefix: [u8; PREFIX],
    /// How many bytes of the prefix are left.
    prefix_left: usize,
    /// The first two parts, which are all of a response with one secret.
    first: [Bytes; 2],
    rest: VecDeque<Bytes>,
    remaining: usize,
}

impl Message {
    /// The message that was encoded as `bytes`.
    pub fn of(bytes: Bytes) -> Self {
        Self::new([bytes].into())
    }

    fn new(mut parts: VecDeque<Bytes>) -> Self {
        let length: usize = parts.iter().map(Bytes::len).sum();
        // Bounded by the number of names of a stream and the size of a file.
        let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
        let first = [(); 2].map(|()| parts.pop_front().unwrap_or_default());
        let rest = if parts.is_empty() { VecDeque::new() } else { parts };
        Self { prefix: [0, a, b, c, d], prefix_left: PREFIX, first, rest, remaining: PREFIX + length }
    }

    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let prefix = self.prefix.get(PREFIX - self.prefix_left..).unwrap_or_default();
        let parts = self.first.iter().chain(&self.rest).map(|part| &**part);
        std::iter::once(prefix).chain(parts).filter(|part| !part.is_empty())
    }
}

impl Buf for Message {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        self.parts().next().unwrap_or_default()
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let filled = slices.iter_mut().zip(self.parts()).map(|(slice, part)| *slice = IoSlice::new(part));
        filled.count()
    }

    /// A part that was sent is dropped: with the last one of all streams, a secret is wiped.
    fn advance(&mut self, count: usize) {
        let mut left = count.min(self.remaining);
        self.remaining -= left;
        let of_prefix = left.min(self.prefix_left);
        self.prefix_left -= of_prefix;
        left -= of_prefix;
        for part in &mut self.first {
            let here = left.min(part.len());
            left -= here;
            if here == part.len() { *part = Bytes::new() } else { part.advance(here) }
        }
        while left > 0
            && let Some(part) = self.rest.front_mut()
        {
            let here = left.min(part.len());
            left -= here;
            if here == part.len() { drop(self.rest.pop_front()) } else { part.advance(here) }
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::proto::envoy::extensions::transport_sockets::tls::v3::Secret;
    use crate::proto::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};
    use crate::secret::Payload;
    use crate::serve::sds::dialect::client::{payload, value};

    fn resource(name: &str, content: &str) -> Resource {
        Resource::of(name, payload(content))
    }

    /// The bytes of `message`, read in steps of `step`, without the prefix.
    fn read(mut message: Message, step: usize) -> Vec<u8> {
        let total = message.remaining();
        let mut bytes = Vec::new();
        while message.has_remaining() {
            let chunk = message.chunk();
            let here = step.min(chunk.len());
            bytes.extend_from_slice(&chunk[..here]);
            message.advance(here);
            assert_eq!(bytes.len() + message.remaining(), total);
        }
        let length = u32::try_from(total - PREFIX).unwrap().to_be_bytes();
        assert_eq!((bytes[0], &bytes[1..PREFIX]), (0, length.as_slice()));
        bytes.split_off(PREFIX)
    }

    fn secrets(anys: impl Iterator<Item = crate::proto::google::protobuf::Any>) -> Vec<(String, String)> {
        let secret = |any: crate::proto::google::protobuf::Any| {
            assert_eq!(any.type_url, SECRET_TYPE_URL);
            let secret = Secret::decode(any.value).unwrap();
            (secret.name.clone(), value(secret))
        };
        anys.map(secret).collect()
    }

    #[test]
    fn a_message_is_what_prost_would_have_written() {
        for count in [0, 1, 2, 40] {
            for (step, length) in [(usize::MAX, 3), (1, 200), (7, 20_000)] {
                let content = |index: usize| format!("{index}{}", "x".repeat(length));
                let names: Vec<_> = (0..count).map(|index| format!("name {index}")).collect();
                let expected: Vec<_> =
                    names.iter().enumerate().map(|(index, name)| (name.clone(), content(index))).collect();

                let mut writer = MessageWriter::default();
                writer.text(1, "version");
                writer.wrapped_text(6, "agent");
                for (name, content) in &expected {
                    writer.secret(2, name, &resource(name, content));
                }
                let response = DiscoveryResponse::decode(&*read(writer.finish(), step)).unwrap();
                assert_eq!(response.version_info, "version");
                assert_eq!(response.control_plane.unwrap().identifier, "agent");
                assert_eq!(secrets(response.resources.into_iter()), expected);

                let mut writer = MessageWriter::default();
                for (name, content) in &expected {
                    writer.labelled_secret(2, name, "1", &resource(name, content));
                }
                writer.text(6, "removed");
                let response = DeltaDiscoveryResponse::decode(&*read(writer.finish(), step)).unwrap();
                assert_eq!(response.removed_resources, ["removed"]);
                let labels: Vec<_> = response.resources.iter().map(|one| one.name.clone()).collect();
                assert_eq!(labels, names);
                assert!(response.resources.iter().all(|one| one.version == "1"));
                let anys = response.resources.into_iter().map(|one| one.resource.unwrap());
                assert_eq!(secrets(anys), expected);
            }
        }
    }

    #[test]
    fn the_bytes_of_a_secret_are_shared_and_dropped_as_soon_as_they_are_sent() {
        let dropped = std::sync::Arc::new(());
        struct Owner(Vec<u8>, #[expect(dead_code, reason = "it counts")] std::sync::Arc<()>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let bytes =
            Bytes::from_owner(Owner(payload("key").bytes().to_vec(), std::sync::Arc::clone(&dropped)));
        let address = bytes.as_ptr();
        let mut writer = MessageWriter::default();
        writer.secret(2, "a", &Resource::of("a", Payload::from_bytes(bytes)));
        let mut message = writer.finish();
        let mut slices = [IoSlice::new(&[]); 4];
        assert_eq!(message.chunks_vectored(&mut slices), 3);
        assert_eq!(slices[2].as_ptr(), address, "the bytes were copied");
        message.advance(message.remaining() - 1);
        assert_eq!(std::sync::Arc::strong_count(&dropped), 2);
        message.advance(1);
        assert_eq!(std::sync::Arc::strong_count(&dropped), 1);
    }
}
