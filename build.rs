//! Compiles `proto/` with protox, so no protoc is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new("proto");
    let services = [
        "envoy/service/secret/v3/sds.proto",
        "envoy/extensions/transport_sockets/tls/v3/secret.proto",
        "envoy/extensions/transport_sockets/tls/v3/tls_spiffe_validator_config.proto",
        "istio/v1/auth/ca.proto",
        "google/rpc/error_details.proto",
        "google/cloud/security/privateca/v1/service.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    pack_relocations();
    let files = protox::compile(services.iter().map(|file| root.join(file)), [root])?;

    // With `Bytes`, all streams that send a secret share its encoding.
    // The well-known types are compiled here so that `Any` uses `Bytes` too.
    let mut prost = prost_build::Config::new();
    prost.bytes(["."]);
    // These two can hold private keys: `src/proto.rs` implements their `Debug`.
    prost.skip_debug([".envoy.config.core.v3.DataSource", ".google.protobuf.Any"]);
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_well_known_types(true)
        .include_file("proto.rs")
        .compile_fds_with_config(files, prost)?;
    Ok(())
}

/// Has the linker pack the relocations of a static program, which it reads itself at its start: 0.2 MB less of the binary
/// and of each agent's memory. Elsewhere the loader reads them, and an old one does not know the packed form.
fn pack_relocations() {
    let target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if target("ENV") == "musl" && target("ARCH") == "x86_64" {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
