//! Every secret that is served: one entry for each (workload, name), one watch channel for each entry.
//!
//! A source writes through its [`Publisher`]; streams read through a [`Subscription`], all others through
//! [`Cache::watch`], [`Cache::follow`] or a snapshot. Two messages flow back, and only the cache receives them: demand
//! for a name that no source publishes yet, and Envoy's verdicts on what it was sent.

mod bundle;
mod cache;
mod demand;
mod entry;
mod federation;
pub mod health;
pub mod history;
mod publisher;
mod renewal;
mod room;
mod subscription;
mod values;
mod workload;

pub use self::bundle::CrlCoverage;
pub use self::cache::Cache;
pub use self::demand::{Admission, AlreadyTaken, Demand, Event, NotServed, Scope};
pub use self::entry::{Entry, Good, Key, Origin, Snapshot};
pub use self::federation::Federated;
pub use self::publisher::{LINGER, Published, Publisher};
pub use self::renewal::{NotRenewed, Renewals};
pub use self::room::{Connection, Unserved, Waiting};
pub use self::subscription::{Observed, Rejection, Subscriber, Subscription, Verdicts};
pub use self::workload::{Counts, Totals, Workload};
