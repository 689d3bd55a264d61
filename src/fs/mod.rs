//! Every touch of a disk.

pub mod file;
pub mod generation;
pub mod watch;
