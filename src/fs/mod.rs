//! Files: read with bounds, as generations that fit together, and watched for changes.

pub mod create;
pub mod disk;
pub mod file;
pub mod find;
pub mod generation;
mod lookup;
pub mod new_directory;
pub mod pending;
pub mod pool;
pub mod replace;
pub mod walk;
pub mod watch;
