//! The sidecar: its container and its volumes.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::yaml::Node;

/// The agent's sidecar for a Pod.
#[derive(Clone, Debug)]
pub struct Sidecar {
    /// The container's name, and the prefix of its volumes' names.
    pub name: String,
    /// The agent's image.
    pub image: String,
    /// The container's arguments, from `run` on.
    pub args: Vec<String>,
    /// A native sidecar: an init container that keeps running.
    pub is_native: bool,
    /// User and group; none where the platform assigns them.
    pub run_as: Option<u32>,
    /// The directories of the sockets, each once.
    pub socket_dirs: Vec<String>,
    /// The path of the first socket.
    pub socket: String,
    /// Whether the socket's mode lets every user connect.
    pub is_open: bool,
    /// The admin socket, if there is one.
    pub admin_socket: Option<String>,
    /// The port of the probes, if there are any.
    pub status_port: Option<u16>,
    /// The containers that get the socket; if empty, the Envoys, and if there are none, all containers.
    pub containers: Vec<String>,
    /// The volumes that the agent needs besides those of the sockets.
    pub volumes: Vec<Volume>,
    /// The Pod's own volumes, each with the path where the agent mounts it.
    pub mounts: Vec<(String, String)>,
    /// Whether the agent reads what Kubernetes itself mounts for the Pod's service account.
    pub reads_service_account: bool,
    /// Instead of a container and its volumes: the volume of the node's agent.
    pub node: Option<NodeVolume>,
}

/// A volume of the node's agent, which is a CSI driver.
#[derive(Clone, Debug)]
pub struct NodeVolume {
    pub driver: String,
    /// Names and values.
    pub attributes: Vec<(String, String)>,
}

impl NodeVolume {
    /// Where containers get it: Istio's proxies look there.
    pub const DIRECTORY: &str = "/var/run/secrets/workload-spiffe-uds";

    /// The volume of this name, as in the Kubernetes API.
    pub(super) fn volume(&self, name: &str) -> Value {
        let mut csi = json!({ "driver": self.driver, "readOnly": true });
        if !self.attributes.is_empty() {
            set(&mut csi, "volumeAttributes", self.attributes.iter().cloned().collect::<Value>());
        }
        json!({ "name": name, "csi": csi })
    }

    /// Whether `volume` is one of the driver's.
    pub(super) fn is_of_driver(&self, volume: &Node) -> bool {
        volume.get("csi").and_then(|csi| csi.text_of("driver")) == Some(&self.driver)
    }
}

/// A volume that is added with the sidecar.
#[derive(Clone, Debug)]
pub struct Volume {
    pub purpose: Purpose,
    /// The volume's source, as in the Kubernetes API.
    pub source: Value,
    /// Where the agent mounts it.
    pub path: String,
}

/// The purpose of a volume, which is the suffix of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A socket's directory. They are numbered.
    Socket(usize),
    /// The token for the CA.
    Token,
    /// The root certificate of the CA's server.
    CaRoot,
    /// State that is kept across restarts of the container.
    State,
    /// The embedded CA's files.
    Ca,
    /// Files for other programs: the containers that get the socket get this volume, too. Output directories are numbered.
    Output(usize),
}

impl Purpose {
    /// All but the numbered ones.
    const SINGLE: [Self; 4] = [Self::Token, Self::CaRoot, Self::State, Self::Ca];

    /// The volume's directory, for error messages.
    pub fn description(self) -> &'static str {
        match self {
            Self::Socket(_) => "the directory of --socket",
            Self::Token => "the directory of the token",
            Self::CaRoot => "the directory of the CA's root",
            Self::State => "--state-dir",
            Self::Ca => "--ca-dir",
            Self::Output(_) => "an output directory",
        }
    }

    pub(super) fn suffix(self) -> Cow<'static, str> {
        match self {
            Self::Socket(0) => "socket".into(),
            Self::Socket(index) => format!("socket-{index}").into(),
            Self::Token => "token".into(),
            Self::CaRoot => "ca-root".into(),
            Self::State => "state".into(),
            Self::Ca => "ca".into(),
            Self::Output(0) => "output".into(),
            Self::Output(index) => format!("output-{index}").into(),
        }
    }

    fn from_suffix(suffix: &str) -> Option<Self> {
        let single = Self::SINGLE.into_iter().find(|purpose| purpose.suffix() == suffix);
        let number = || suffix.rsplit_once('-').map_or(Some(0), |(_, index)| index.parse().ok());
        let numbered = || {
            let index = number()?;
            [Self::Socket(index), Self::Output(index)].into_iter().find(|purpose| purpose.suffix() == suffix)
        };
        single.or_else(numbered)
    }

    /// The type of the volume's source in the Kubernetes API.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Token => "projected",
            Self::CaRoot => "configMap",
            Self::Socket(_) | Self::State | Self::Ca | Self::Output(_) => "emptyDir",
        }
    }

    /// Whether the agent writes into the volume.
    pub fn is_writable(self) -> bool {
        !matches!(self, Self::Token | Self::CaRoot)
    }
}

impl Sidecar {
    pub(super) fn volume_name(&self, purpose: Purpose) -> String {
        format!("{}-{}", self.name, purpose.suffix())
    }

    pub(super) fn is_container(&self, item: &Node) -> bool {
        item.text_of("name") == Some(&self.name)
    }

    /// The purpose of the volume of that name, if it belongs to the sidecar.
    pub fn purpose(&self, volume: &str) -> Option<Purpose> {
        Purpose::from_suffix(volume.strip_prefix(self.name.as_str())?.strip_prefix('-')?)
    }

    /// The purpose of a volume or a mount, if it belongs to the sidecar.
    pub(super) fn purpose_of(&self, item: &Node) -> Option<Purpose> {
        self.purpose(item.text_of("name")?)
    }

    /// The sockets' directories, each with the Pod's own volume for it, if there is one.
    fn sockets<'a>(
        &'a self,
        shared: &'a [Option<&'a str>],
    ) -> impl Iterator<Item = (Purpose, &'a str, Option<&'a str>)> {
        let shared = shared.iter().copied().chain(std::iter::repeat(None));
        let dirs = self.socket_dirs.iter().zip(shared).enumerate();
        dirs.map(|(index, (dir, shared))| (Purpose::Socket(index), dir.as_str(), shared))
    }

    /// The volumes for all but the directories that have a volume in `shared`.
    pub(super) fn own_volumes(&self, shared: &[Option<&str>]) -> Vec<Value> {
        let own = self.sockets(shared).filter(|(_, _, shared)| shared.is_none());
        let sockets = own.map(|(purpose, ..)| match &self.node {
            Some(node) => node.volume(&self.volume_name(purpose)),
            None => json!({
                "name": self.volume_name(purpose),
                "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" },
            }),
        });
        let others = self.volumes.iter().map(|volume| {
            let mut described = json!({ "name": self.volume_name(volume.purpose) });
            if let (Some(described), Some(source)) = (described.as_object_mut(), volume.source.as_object()) {
                described.extend(source.clone());
            }
            described
        });
        sockets.chain(others).collect()
    }

    /// The mounts of the containers that use the agent.
    pub(super) fn target_mounts(&self, shared: &[Option<&str>]) -> Vec<Value> {
        let own = self.sockets(shared).filter(|(_, _, shared)| shared.is_none());
        let sockets = own.map(|(purpose, path, _)| (purpose, path));
        let outputs = self.volumes.iter().filter(|volume| matches!(volume.purpose, Purpose::Output(_)));
        let outputs = outputs.map(|volume| (volume.purpose, volume.path.as_str()));
        let all = sockets.chain(outputs);
        all.map(|(purpose, path)| json!({ "name": self.volume_name(purpose), "mountPath": path, "readOnly": true }))
            .collect()
    }

    pub(super) fn container(&self, shared: &[Option<&str>], is_istio: bool) -> Value {
        let mut container = json!({ "name": self.name, "image": self.image });
        if self.is_native {
            set(&mut container, "restartPolicy", json!("Always"));
        }
        set(&mut container, "args", json!(self.args));
        if let Some(port) = self.status_port {
            let port = json!([{ "name": "attache-status", "containerPort": port }]);
            set(&mut container, "ports", port);
        }
        set(&mut container, "securityContext", self.security_context());
        // The agent uses 6 MB when idle and 16 kB for each stream. Its start takes 10 ms of CPU; the limit allows 20 ms
        // of each 100.
        let requests = json!({ "cpu": "5m", "memory": "16Mi" });
        let limits = json!({ "cpu": "200m", "memory": "64Mi" });
        set(&mut container, "resources", json!({ "requests": requests, "limits": limits }));
        for (name, probe) in self.probes(is_istio) {
            set(&mut container, name, probe);
        }
        set(&mut container, "volumeMounts", Value::Array(self.own_mounts(shared)));
        container
    }

    fn own_mounts(&self, shared: &[Option<&str>]) -> Vec<Value> {
        let sockets = self.sockets(shared).map(|(purpose, path, shared)| {
            let name = shared.map_or_else(|| self.volume_name(purpose), str::to_owned);
            json!({ "name": name, "mountPath": path })
        });
        let mut mounts: Vec<_> = sockets.collect();
        for volume in &self.volumes {
            let mut mount = json!({ "name": self.volume_name(volume.purpose), "mountPath": volume.path });
            if !volume.purpose.is_writable() {
                set(&mut mount, "readOnly", json!(true));
            }
            mounts.push(mount);
        }
        let pods_own = self.mounts.iter();
        mounts.extend(
            pods_own.map(|(name, path)| json!({ "name": name, "mountPath": path, "readOnly": true })),
        );
        mounts
    }

    fn security_context(&self) -> Value {
        let mut context = json!({ "runAsNonRoot": true });
        if let Some(id) = self.run_as {
            set(&mut context, "runAsUser", json!(id));
            set(&mut context, "runAsGroup", json!(id));
        }
        set(&mut context, "allowPrivilegeEscalation", json!(false));
        set(&mut context, "readOnlyRootFilesystem", json!(true));
        set(&mut context, "capabilities", json!({ "drop": ["ALL"] }));
        set(&mut context, "seccompProfile", json!({ "type": "RuntimeDefault" }));
        context
    }

    /// The startup, liveness and readiness probes.
    fn probes(&self, is_istio: bool) -> Vec<(&'static str, Value)> {
        let (mut ready, alive) = if is_istio {
            // The proxy intercepts connections from the network, and would require mutual TLS of the kubelet.
            let command = |words: &[&str]| json!({ "exec": { "command": words } });
            let socket = format!("--socket={}", self.socket);
            // Without an admin socket there is no liveness probe: missing secrets are no reason to restart.
            let admin = self.admin_socket.as_ref().map(|path| format!("--admin-socket={path}"));
            let alive = admin.map(|admin| command(&["/attache", "log", &admin]));
            (command(&["/attache", "get", "--timeout=500ms", &socket]), alive)
        } else if let Some(port) = self.status_port {
            let get = |path| json!({ "httpGet": { "path": path, "port": port } });
            (get("/readyz"), Some(get("/livez")))
        } else {
            return Vec::new();
        };
        let readiness = ready.clone();
        set(&mut ready, "periodSeconds", json!(1));
        set(&mut ready, "failureThreshold", json!(300));
        let startup = self.is_native.then_some(("startupProbe", ready));
        let liveness = alive.map(|alive| ("livenessProbe", alive));
        startup.into_iter().chain(liveness).chain([("readinessProbe", readiness)]).collect()
    }
}

fn set(object: &mut Value, key: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(key.to_owned(), value);
    }
}
