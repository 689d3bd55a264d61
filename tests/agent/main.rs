//! Drives the built agent over its real socket, with its real dependencies or fakes of them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that can't go on says so by panicking, in its helpers too"
)]
#![allow(
    unreachable_pub,
    reason = "a test binary has no public API; `pub` means: for the other test modules"
)]

mod admin;
mod any_client;
mod any_server;
mod bad_clients;
mod bootstrap;
mod ca;
mod ca_directories;
mod ca_vault;
mod ca_kubernetes;
mod ca_cfssl;
mod ca_exec;
mod check;
mod citadel;
mod ca_google_cas;
mod client_cert;
mod command_line;
mod conformance;
mod crl;
mod dead_disks;
mod dead_names;
mod dns_names;
mod docs;
mod east_west;
mod envoy_sds;
mod failover;
mod federation;
mod files;
mod get;
mod hardening;
mod inotify;
mod issuance;
mod istio;
mod keys;
mod mint;
mod kube_client;
mod kube_rules;
mod monitoring;
mod log;
mod mounted_files;
mod lookup;
mod kubernetes_examples;
mod kubernetes_inject;
mod kubernetes_secrets;
mod mtls;
mod multicluster;
mod named_files;
mod neighbours;
mod nginx;
mod node;
mod node_csi;
mod outages;
mod on_demand;
mod options_file;
mod output;
mod outputs;
mod page;
mod readiness;
mod rooms;
mod remote_secret;
mod root_switch;
mod scale;
mod several_sockets;
mod signals;
mod soak;
mod spiffe_source;
mod start_stop;
mod status_port;
mod state;
mod supervise;
mod supervise_envoy;
mod support;
mod systemd;
mod tokens;
mod wire;
mod workload_api;
