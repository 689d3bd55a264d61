//! Files: read with bounds, as generations that fit together, and watched for changes.

pub mod disk;
pub mod file;
pub mod generation;
pub mod pending;
pub mod walk;
pub mod watch;
