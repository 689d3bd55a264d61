//! Memory that peers make the agent use, counted in bytes: how much in all, and how much for each connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory that all peers together may take up. Clones are the same budget.
///
/// A connection may have as much as is left for others: one alone gets half, and each of several that take what they
/// can gets less. So however many take what they can, the next one still gets something.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Total>);

#[derive(Debug)]
struct Total {
    limit: usize,
    used: AtomicUsize,
}

/// The part of one connection. Clones are the same part.
#[derive(Clone, Debug)]
pub struct Share(Arc<Part>);

#[derive(Debug)]
struct Part {
    total: Budget,
    used: AtomicUsize,
}

/// Memory that is in use until this is dropped.
#[derive(Debug)]
pub struct Charge {
    share: Share,
    bytes: usize,
}

/// There is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no memory left for this connection: it takes up {own} bytes, all connections {all} of at most {limit} bytes; retry later, \
     or close other streams"
)]
pub struct Full {
    own: usize,
    all: usize,
    limit: usize,
}

impl Budget {
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Total { limit, used: AtomicUsize::new(0) }))
    }

    /// The part of a new connection.
    pub fn share(&self) -> Share {
        Share(Arc::new(Part { total: self.clone(), used: AtomicUsize::new(0) }))
    }

    /// How much is in use.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

impl Share {
    /// Takes up `bytes` more.
    pub fn charge(&self, bytes: usize) -> Result<Charge, Full> {
        let mut charge = Charge { share: self.clone(), bytes: 0 };
        charge.grow(bytes)?;
        Ok(charge)
    }
}

impl Charge {
    /// Takes up `bytes` more. On failure nothing changes.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let (part, total) = (&*self.share.0, &*self.share.0.total.0);
        let own = part.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let all = total.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.bytes += bytes;
        let limit = total.limit;
        if limit.checked_sub(all).is_none_or(|free| free < own) {
            self.shrink(bytes);
            return Err(Full { own: own - bytes, all: all - bytes, limit });
        }
        Ok(())
    }

    /// All that it has; it has nothing afterwards.
    pub fn take(&mut self) -> Self {
        Self { share: self.share.clone(), bytes: std::mem::take(&mut self.bytes) }
    }

    /// Gives `bytes` back.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.share.0.used.fetch_sub(bytes, Ordering::Relaxed);
        self.share.0.total.0.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_gets_half_and_the_next_one_still_gets_something() {
        let budget = Budget::new(1_000);
        let greedy = |share: &Share| {
            let mut charge = share.charge(0).unwrap();
            while charge.grow(1).is_ok() {}
            charge
        };
        let first = greedy(&budget.share());
        assert_eq!(first.bytes, 500);
        let others: Vec<_> = (0..5).map(|_| greedy(&budget.share())).collect();
        assert_eq!(others.iter().map(|charge| charge.bytes).collect::<Vec<_>>(), [250, 125, 62, 31, 16]);
        drop(first);
        assert_eq!(budget.used(), 484);
        assert_eq!(greedy(&budget.share()).bytes, 258);
        drop(others);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let budget = Budget::new(100);
        let share = budget.share();
        let mut charge = share.charge(10).unwrap();
        let full = charge.grow(41).unwrap_err();
        assert_eq!(full, Full { own: 10, all: 10, limit: 100 });
        assert!(share.charge(usize::MAX / 2).is_err());
        charge.grow(40).unwrap();
        charge.shrink(60);
        assert_eq!(budget.used(), 0);
    }
}
