//! Every touch of a network.

pub mod endpoint;
pub mod grpc;
pub mod http1;
pub mod http2;
pub mod rest;
pub mod tls;
