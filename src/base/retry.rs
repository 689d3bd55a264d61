//! How soon a failed call is worth repeating.

/// The retry class of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A retry may succeed without a change by a person.
    Transient,
    /// A person has to change something first.
    Permanent,
}
