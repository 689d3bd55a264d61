//! The volume of the node's agent, in the place of a sidecar.

use super::InjectArgs;
use crate::config::ConfigErrors;
use crate::csi::{Attributes, DriverName};
use crate::inject::{NodeVolume, Sidecar};

/// What is added with `--node`, if no option belongs to a sidecar.
pub(super) fn sidecar(args: &InjectArgs) -> anyhow::Result<Sidecar> {
    let mut errors = Vec::new();
    let of_the_sidecar = [
        ("--image", args.image.is_some()),
        ("--native", !args.native),
        ("--run-as", args.run_as.0 != Some(1337)),
        ("--token-audience", args.token_audience.is_some()),
        ("--mount", !args.mount.is_empty()),
        ("--image-has", !args.image_has.is_empty()),
        ("--", !args.options.is_empty()),
    ];
    for (option, _) in of_the_sidecar.into_iter().filter(|(_, is_set)| *is_set) {
        let what = if option == "--" { "what stands behind --" } else { option };
        errors.push(format!(
            "{what} is for the sidecar's container, and with --node there is none: the agent of the node has options of its \
             own (attache node); drop it"
        ));
    }
    if let Err(error) = args.csi_driver_name.parse::<DriverName>() {
        errors.push(format!("--csi-driver-name {}: {error}", args.csi_driver_name));
    }
    let attributes = args.csi_attribute.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    errors.extend(Attributes::parse(attributes).err().map(|mistakes| format!("--csi-attribute: {mistakes}")));
    if !errors.is_empty() {
        return Err(ConfigErrors(errors).into());
    }
    let node = NodeVolume { driver: args.csi_driver_name.clone(), attributes: args.csi_attribute.clone() };
    Ok(Sidecar {
        name: args.name.clone(),
        image: String::new(),
        args: Vec::new(),
        is_native: true,
        run_as: None,
        socket_dirs: vec![NodeVolume::DIRECTORY.to_owned()],
        socket: format!("{}/socket", NodeVolume::DIRECTORY),
        is_open: true,
        admin_socket: None,
        status_port: None,
        containers: args.container.clone(),
        volumes: Vec::new(),
        mounts: Vec::new(),
        reads_service_account: false,
        node: Some(node),
    })
}
