//! The options of the CSI driver of a node's agent.

use std::path::{Path, PathBuf};

use super::node::CsiArgs;
use crate::csi::{DriverName, DriverSettings, TokenSource};
use crate::options::Reader;

const DRIVER: &str = "csi.attache.dev";
const KUBELET_DIR: &str = "/var/lib/kubelet";

/// The driver that the options describe, if they name its socket.
pub(super) fn driver(
    r: &mut Reader<'_>,
    args: &CsiArgs,
    state: Option<&Path>,
    impersonates: bool,
) -> Option<DriverSettings> {
    let socket = r.text("csi-socket", &args.csi_socket, &[]);
    let name = r.parsed("csi-driver-name", &args.csi_driver_name, &[], str::parse::<DriverName>);
    let registration = r.text("csi-registration-dir", &args.csi_registration_dir, &[]);
    let endpoint = r.text("csi-endpoint", &args.csi_endpoint, &[]);
    let kubelet_dir = r.text("kubelet-dir", &args.kubelet_dir, &[]);
    let token_source = r.parsed("csi-token-source", &args.csi_token_source, &[], |text| {
        let found = TokenSource::ALL.into_iter().find(|(name, _)| *name == text);
        found.map(|(_, source)| source).ok_or_else(|| {
            let names = TokenSource::ALL.map(|(name, _)| name).join(" or ");
            format!("{text:?} is not a source of tokens; choose {names}")
        })
    });
    let audience = r.text("csi-token-audience", &args.csi_token_audience, &[]);
    let node = r.text("node-name", &args.node_name, &["NODE_NAME"]);
    let Some(path) = socket.value else {
        let set = [&registration, &endpoint, &kubelet_dir, &audience].map(|option| option.set_by());
        for (level, from) in set.into_iter().chain([name.set_by(), token_source.set_by()]) {
            if level.is_some() {
                r.mistake(format!("{from} is for a CSI driver: add --csi-socket PATH, or drop it"));
            }
        }
        return None;
    };
    let kubelet_dir = absolute(kubelet_dir.or(KUBELET_DIR));
    let Some(state) = state else {
        r.mistake(format!(
            "{} needs --state-dir DIR, where volumes are kept across restarts of the agent",
            socket.from
        ));
        return None;
    };
    let driver_name = name.or(DRIVER.parse::<DriverName>().ok()?);
    let registration = registration.value.map(absolute);
    Some(DriverSettings {
        driver_name,
        node_id: node.value.unwrap_or_else(host_name),
        csi_socket: absolute(path),
        registration_dir: registration.unwrap_or_else(|| kubelet_dir.join("plugins_registry")),
        endpoint: endpoint.value.map(PathBuf::from),
        kubelet_dir,
        records: state.join("volumes"),
        token_source: token_source.or(TokenSource::VolumeContext),
        audience: audience.value,
        impersonates,
    })
}

fn absolute(path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// By default the kubelet registers the node by its host name, too.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
