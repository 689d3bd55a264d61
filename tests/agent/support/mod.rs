//! The tests' counterparts: real proxies and servers, not mocks of the agent's own traits.

pub mod cfssl;
pub mod chromium;
pub mod dead_fs;
pub mod envoy;
pub mod fake_ca;
pub mod fake_google_cas;
pub mod fake_sds;
pub mod fake_vault;
pub mod files;
pub mod frames;
pub mod installed;
pub mod kube_api;
pub mod kubernetes;
pub mod issuer;
pub mod mesh;
pub mod nginx;
pub mod pipes;
pub mod process;
pub mod rough_h2;
pub mod provider;
pub mod proxy;
pub mod sds;
pub mod tls;
pub mod token_service;
pub mod violations;
pub mod wait;
