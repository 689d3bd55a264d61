//! The operating system.

pub mod command;
pub mod hardening;
pub mod permissions;
pub mod systemd;
