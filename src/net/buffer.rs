//! Bytes of answers, which may be keys: wiped when they are no longer needed.

use bytes::Bytes;

/// Bytes that are wiped when dropped, and also when they move to a larger place.
#[derive(Default)]
pub(crate) struct Buffer(Vec<u8>);

impl Buffer {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self(Vec::with_capacity(capacity))
    }

    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        let needed = self.0.len() + bytes.len();
        if needed > self.0.capacity() {
            // A second part mostly completes a line.
            let mut larger = Self::with_capacity(2 * needed);
            larger.0.extend_from_slice(&self.0);
            *self = larger;
        }
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        overwrite(&mut self.0);
    }
}

/// Wipes a part of an answer, unless its memory is shared with the next part, which the connection still reads.
pub(crate) fn wipe(bytes: Bytes) {
    if let Ok(mut bytes) = bytes.try_into_mut() {
        overwrite(&mut bytes);
    }
}

/// Wipes at the speed of memory: `Zeroize` writes one byte at a time, which is most of the work for an unrelated event.
fn overwrite(bytes: &mut [u8]) {
    bytes.fill(0);
    zeroize::optimization_barrier(bytes);
}
