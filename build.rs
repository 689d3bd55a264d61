//! Compiles `proto/` with protox, so no protoc is needed.

use std::path::Path;

use prost::Message as _;
use prost_types::{DescriptorProto, FileDescriptorSet};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new("proto");
    let services = [
        "envoy/service/secret/v3/sds.proto",
        "envoy/extensions/transport_sockets/tls/v3/secret.proto",
        "envoy/extensions/transport_sockets/tls/v3/tls_spiffe_validator_config.proto",
        "istio/v1/auth/ca.proto",
        "google/rpc/error_details.proto",
        "google/cloud/security/privateca/v1/service.proto",
        "csi/v1/csi.proto",
        "pluginregistration/api.proto",
        "spiffe/workload.proto",
        "grpc/health/v1/health.proto",
        "grpc/reflection/v1/reflection.proto",
        "grpc/reflection/v1alpha/reflection.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    shape_static_program()?;
    let files = protox::compile(services.iter().map(|file| root.join(file)), [root])?;
    write_descriptors(&files)?;

    // With `Bytes`, all streams that send a secret share its encoding.
    // The well-known types are compiled here so that `Any` uses `Bytes` too.
    let mut prost = prost_build::Config::new();
    prost.bytes(["."]);
    // These can hold private keys or tokens: `src/proto.rs` implements their `Debug`.
    prost.skip_debug([
        ".envoy.config.core.v3.DataSource",
        ".google.protobuf.Any",
        ".csi.v1.NodePublishVolumeRequest",
        ".X509SVID",
    ]);
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_well_known_types(true)
        .include_file("proto.rs")
        .compile_fds_with_config(files, prost)?;
    Ok(())
}

/// The packages of the services that an agent serves.
const SERVED: &[&str] =
    &["", "envoy.service.secret.v3", "grpc.health.v1", "grpc.reflection.v1", "grpc.reflection.v1alpha"];

/// Writes a table of the files that define what an agent serves, which its reflection service answers from.
fn write_descriptors(files: &FileDescriptorSet) -> std::io::Result<()> {
    let mut needed: Vec<&str> = Vec::new();
    let mut table = String::new();
    let mut services = String::new();
    // The files that others import come first.
    for file in files.file.iter().rev() {
        let is_served = !file.service.is_empty() && SERVED.contains(&file.package());
        // What a secret of SDS is, in an `Any`.
        let is_resource = file.name().ends_with("/secret.proto");
        if !(is_served || is_resource || needed.contains(&file.name())) {
            continue;
        }
        needed.extend(file.dependency.iter().map(String::as_str));
        let mut symbols = Vec::new();
        for service in &file.service {
            let name = qualified(file.package(), service.name());
            symbols.extend(service.method.iter().map(|method| qualified(&name, method.name())));
            services += &format!("{name:?}, ");
            symbols.push(name);
        }
        for message in &file.message_type {
            add_message(file.package(), message, &mut symbols);
        }
        let mut file = file.clone();
        file.source_code_info = None;
        table += &format!(
            "File {{ name: {:?}, symbols: &{symbols:?}, descriptor: &{:?} }},\n",
            file.name(),
            file.encode_to_vec()
        );
    }
    let code = format!("const SERVICES: &[&str] = &[{services}];\nconst FILES: &[File] = &[\n{table}];\n");
    std::fs::write(Path::new(&std::env::var("OUT_DIR").unwrap_or_default()).join("descriptors.rs"), code)
}

fn qualified(scope: &str, name: &str) -> String {
    if scope.is_empty() { name.to_owned() } else { format!("{scope}.{name}") }
}

/// Adds the names of a message, and of what is defined in it.
fn add_message(scope: &str, message: &DescriptorProto, symbols: &mut Vec<String>) {
    let name = qualified(scope, message.name());
    symbols.extend(message.enum_type.iter().map(|inner| qualified(&name, inner.name())));
    for inner in &message.nested_type {
        add_message(&name, inner, symbols);
    }
    symbols.push(name);
}

/// Code that an agent seldom runs, by a part of its path: other commands than `run`, what reads options files and YAML, the
/// rarer CAs, backtraces.
const SELDOM: &[&str] = &[
    "addr2line",
    "attache::agent::command",
    "attache::agent::kubernetes",
    "attache::agent::node",
    "attache::auth::exchange",
    "attache::auth::metadata_server",
    "attache::ca::cfssl",
    "attache::ca::embedded::exchange",
    "attache::ca::embedded::follow",
    "attache::ca::embedded::make",
    "attache::ca::embedded::roots",
    "attache::ca::exec",
    "attache::ca::google_cas",
    "attache::ca::kubernetes",
    "attache::ca::vault",
    "attache::check",
    "attache::cli",
    "attache::config::csi",
    "attache::config::node",
    "attache::csi",
    "attache::envoy",
    "attache::export::output",
    "attache::fs::watch::directory",
    "attache::inject",
    "attache::kube",
    "attache::metrics::node",
    "attache::ops::page",
    "attache::ops::report",
    "attache::options::file",
    "attache::os::command::orphans",
    "attache::os::supervise",
    "attache::pki::keystore",
    "attache::proto::csi",
    "attache::proto::pluginregistration",
    "attache::serve::health",
    "attache::serve::reflection",
    "attache::serve::sds::bearer",
    "attache::serve::sds::followed",
    "attache::serve::workload_api",
    "attache::source::files::federated",
    "attache::source::kubernetes",
    "attache::source::mint",
    "attache::source::spiffe",
    "attache::store::federation",
    "clap_builder::output",
    "clap_complete",
    "clap_mangen",
    "gimli",
    "landlock",
    "libunwind",
    "miniz_oxide",
    "roff",
    "rustc_demangle",
    "rustls::server",
    "saphyr_parser",
    "serde_json",
    "toml",
];

/// Code that only calls to a CA on the network run, and all of them: an agent without such a CA needs none of it, and one with
/// it has it in few places.
const CALLS: &[&str] = &[
    "attache::auth::token",
    "attache::ca::citadel",
    "attache::net::endpoint",
    "attache::net::error",
    "attache::net::grpc",
    "attache::net::rest",
    "attache::proto::istio",
    "h2::client",
    "rustls::client",
    "rustls::enums",
    "rustls::error",
    "rustls::msgs",
    "rustls::tls12",
    "rustls::tls13",
    "tokio_rustls",
];

/// The same of aws-lc, by a part of the object file's name.
const CALLS_OBJECTS: &[&str] = &["chacha", "mlkem"];

/// Code of aws-lc that seldom runs, by a part of the object file's name: Curve25519, for TLS to a CA and rare keys, and what
/// nothing here uses.
const SELDOM_OBJECTS: &[&str] = &["25519", "md5", "mldsa", "ripemd"];

/// What of it runs at each start nevertheless, or stands for the same code elsewhere.
const OFTEN: &[&str] = &[
    "3fmtReNtB*5Debug3fmt",
    "3fmtReNtB*7Display3fmt",
    "Cow?LT?saphyr_parser",
    "Option?LT?attache::options::file::OptionsFile",
    "Option?LT?attache::source::mint::MintSettings",
    "VechE7reserve",
    "attache::ca::exec::Exec?u20?as?u20?attache::ca::CertificateAuthority",
    "attache::ca::exec::options",
    "attache::ca::provider::ConfiguredProvider",
    "attache::cli::Cli",
    "attache::cli::RunLine",
    "attache::cli::admin::AdminArgs",
    "attache::cli::block_on",
    "attache::cli::help",
    "attache::cli::last_note",
    "attache::cli::parse",
    "attache::cli::run",
    "attache::cli::runtime",
    "attache::cli::variables",
    "attache::ops::report::Reporter?u20?as?u20?core::clone",
    "attache::os::supervise::lock",
    "augment_args",
    "augment_subcommands",
    "copy_from_slice_impl",
    "drop_in_place",
    "ends_with",
    "from_arg_matches",
    "humantime",
    "raw_vec",
    "starts_with",
];

/// Has a static program linked so that an agent needs less memory.
fn shape_static_program() -> std::io::Result<()> {
    let target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if target("ENV") != "musl" {
        return Ok(());
    }
    // The kernel maps the program's text in pieces of 64 kB. What seldom runs lies together, so that most of it is not mapped.
    let of_path = |path: &&str| {
        let mangled: String = path.split("::").map(|name| format!("{}{name}", name.len())).collect();
        format!("*(.text.*{mangled}*) *(.text.*{}*)\n", path.replace("::", ".."))
    };
    let of_object = |name: &&str| format!("*{name}*.o(.text .text.*)\n");
    let often: String = OFTEN.iter().map(of_path).collect();
    let seldom: String = SELDOM.iter().map(of_path).chain(SELDOM_OBJECTS.iter().map(of_object)).collect();
    let calls: String = CALLS.iter().map(of_path).chain(CALLS_OBJECTS.iter().map(of_object)).collect();
    let sections =
        format!(".text.often : {{\n{often}}}\n.text.calls : {{\n{calls}}}\n.text.seldom : {{\n{seldom}}}\n");
    let layout = format!("SECTIONS {{\n{sections}}} INSERT AFTER .text;\n");
    let script = Path::new(&std::env::var("OUT_DIR").unwrap_or_default()).join("layout.ld");
    std::fs::write(&script, layout)?;
    println!("cargo:rustc-link-arg-bins=-Wl,-T,{}", script.display());
    // The program reads its relocations itself. A loader would, elsewhere, and an old one does not know the packed form.
    if target("ARCH") == "x86_64" {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
    Ok(())
}
