//! The driver as a kubelet sees it.

mod kubelet;
mod mounts;
mod publishing;
mod registering;
mod requests;
mod restarting;
mod runner;
mod unpublishing;
