//! The sidecar: its container, and the volumes that come with it.

use serde_json::{Value, json};

use super::document::Node;

/// The agent's sidecar, as it goes into a Pod.
#[derive(Clone, Debug)]
pub struct Sidecar {
    /// The container's name, and the beginning of its volumes' names.
    pub name: String,
    /// The agent's image.
    pub image: String,
    /// Its arguments, from `run` on.
    pub args: Vec<String>,
    /// An init container that goes on running.
    pub is_native: bool,
    /// User and group; none where the platform gives them out.
    pub run_as: Option<u32>,
    /// The folder of the socket.
    pub socket_folder: String,
    /// The socket in it.
    pub socket: String,
    /// Its mode lets every user in.
    pub is_open: bool,
    /// The admin socket, if there is one.
    pub admin_socket: Option<String>,
    /// The port of the probes, if there are any.
    pub status_port: Option<u16>,
    /// Which containers get the socket; where there are none, Envoys, and where there are none of these, all.
    pub containers: Vec<String>,
    /// What the agent needs but its socket.
    pub volumes: Vec<Volume>,
    /// Volumes that the Pod has already, and where the agent finds them.
    pub mounts: Vec<(String, String)>,
}

/// A volume that comes with the sidecar.
#[derive(Clone, Debug)]
pub struct Volume {
    /// What it is for.
    pub purpose: Purpose,
    /// Kubernetes' description of what is in it.
    pub source: Value,
    /// Where the agent finds it.
    pub path: String,
}

/// What a volume is for; its name ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The folder of the socket.
    Socket,
    /// The token for the CA.
    Token,
    /// The root of the CA's own certificate.
    CaRoot,
    /// What is kept across restarts of the container.
    State,
    /// The embedded CA's files.
    Ca,
    /// Files for other programs: the containers that get the socket get these, too.
    Output,
}

impl Purpose {
    const ALL: [Self; 6] = [Self::Socket, Self::Token, Self::CaRoot, Self::State, Self::Ca, Self::Output];

    /// How its folder came about, for people.
    pub fn words(self) -> &'static str {
        match self {
            Self::Socket => "the folder of --socket",
            Self::Token => "the folder of the token",
            Self::CaRoot => "the folder of the CA's root",
            Self::State => "--state-dir",
            Self::Ca => "--ca-dir",
            Self::Output => "--output-dir",
        }
    }

    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Token => "token",
            Self::CaRoot => "ca-root",
            Self::State => "state",
            Self::Ca => "ca",
            Self::Output => "output",
        }
    }

    /// What Kubernetes calls volumes like it.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Token => "projected",
            Self::CaRoot => "configMap",
            Self::Socket | Self::State | Self::Ca | Self::Output => "emptyDir",
        }
    }

    /// Whether the agent writes there.
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

    /// What the volume of that name is for, if it is one of ours.
    pub fn purpose(&self, volume: &str) -> Option<Purpose> {
        Purpose::ALL.into_iter().find(|purpose| volume == self.volume_name(*purpose))
    }

    /// What a volume or a mount is for, if it is one of ours.
    pub(super) fn purpose_of(&self, item: &Node) -> Option<Purpose> {
        self.purpose(item.text_of("name")?)
    }

    pub(super) fn own_volumes(&self, has_shared: bool) -> Vec<Value> {
        let socket = json!({
            "name": self.volume_name(Purpose::Socket),
            "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" },
        });
        let further = self.volumes.iter().map(|volume| {
            let mut described = json!({ "name": self.volume_name(volume.purpose) });
            if let (Some(described), Some(source)) = (described.as_object_mut(), volume.source.as_object()) {
                described.extend(source.clone());
            }
            described
        });
        Some(socket).filter(|_| !has_shared).into_iter().chain(further).collect()
    }

    /// What the containers get that talk to the agent.
    pub(super) fn target_mounts(&self, has_shared: bool) -> Vec<Value> {
        let socket = (Purpose::Socket, self.socket_folder.as_str());
        let outputs = self.volumes.iter().filter(|volume| volume.purpose == Purpose::Output);
        let outputs = outputs.map(|volume| (volume.purpose, volume.path.as_str()));
        let all = Some(socket).filter(|_| !has_shared).into_iter().chain(outputs);
        all.map(|(purpose, path)| json!({ "name": self.volume_name(purpose), "mountPath": path, "readOnly": true }))
            .collect()
    }

    pub(super) fn container(&self, shared: Option<&str>, is_istio: bool) -> Value {
        let socket = shared.map_or_else(|| self.volume_name(Purpose::Socket), str::to_owned);
        let mut mounts = vec![json!({ "name": socket, "mountPath": self.socket_folder })];
        for volume in &self.volumes {
            let mut mount = json!({ "name": self.volume_name(volume.purpose), "mountPath": volume.path });
            if !volume.purpose.is_writable() {
                set(&mut mount, "readOnly", json!(true));
            }
            mounts.push(mount);
        }
        let further = self.mounts.iter();
        mounts
            .extend(further.map(|(name, path)| json!({ "name": name, "mountPath": path, "readOnly": true })));

        let mut container = json!({ "name": self.name, "image": self.image });
        if self.is_native {
            set(&mut container, "restartPolicy", json!("Always"));
        }
        set(&mut container, "args", json!(self.args));
        if let Some(port) = self.status_port {
            let port = json!([{ "name": "attache-status", "containerPort": port }]);
            set(&mut container, "ports", port);
        }
        let mut context = json!({ "runAsNonRoot": true });
        if let Some(id) = self.run_as {
            set(&mut context, "runAsUser", json!(id));
            set(&mut context, "runAsGroup", json!(id));
        }
        set(&mut context, "allowPrivilegeEscalation", json!(false));
        set(&mut context, "readOnlyRootFilesystem", json!(true));
        set(&mut context, "capabilities", json!({ "drop": ["ALL"] }));
        set(&mut context, "seccompProfile", json!({ "type": "RuntimeDefault" }));
        set(&mut container, "securityContext", context);
        // 6 MB at rest, 16 kB for each stream; a start takes 10 ms of CPU, and there are 20 in each 100.
        let (requests, limits) =
            (json!({ "cpu": "5m", "memory": "16Mi" }), json!({ "cpu": "200m", "memory": "64Mi" }));
        set(&mut container, "resources", json!({ "requests": requests, "limits": limits }));
        for (name, probe) in self.probes(is_istio) {
            set(&mut container, name, probe);
        }
        set(&mut container, "volumeMounts", Value::Array(mounts));
        container
    }

    /// For start, life and readiness.
    fn probes(&self, is_istio: bool) -> Vec<(&'static str, Value)> {
        let (mut ready, alive) = if is_istio {
            // The proxy takes what comes in by the network, and would want mutual TLS of it.
            let command = |words: &[&str]| json!({ "exec": { "command": words } });
            let socket = format!("--socket={}", self.socket);
            // Who has no admin socket is not asked: that there are no secrets is no reason to restart.
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

pub(super) fn set(object: &mut Value, key: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(key.to_owned(), value);
    }
}
