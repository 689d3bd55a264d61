//! The operating system: commands, rights, permissions of files, the service manager.

pub mod command;
pub mod denial;
pub mod hardening;
pub mod permissions;
pub mod stderr;
pub mod supervise;
pub mod systemd;
pub mod users;
