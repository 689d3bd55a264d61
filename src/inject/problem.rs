//! Errors and warnings, each with its place in the manifests.

use crate::base::text::one_line;

/// An error that prevents the injection, or a warning about a workload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("document {document}, line {line}: {}", one_line(message))]
pub struct Problem {
    /// The document's number in its file, from 1.
    pub document: usize,
    /// The line in the file, from 1.
    pub line: usize,
    /// The problem and its remedy.
    pub message: String,
}
