//! What the tests talk to: real proxies and servers, not mocks of the agent's own traits.

pub mod envoy;
