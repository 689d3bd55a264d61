//! Files for other programs.

pub mod folder;
