//! Clients of Kubernetes' API servers.
//!
//! [`Api`] is what the rest of the agent sees of a cluster; `Cluster` speaks it over HTTP/2.

mod call;
pub mod cluster;
pub mod config;
mod connection;
pub mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod json;
pub mod kubeconfig;
mod object;
mod pool;
mod review;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use tokio_stream::{Stream, StreamExt as _};
use zeroize::Zeroizing;

pub use self::cluster::Cluster;
pub use self::config::{ClusterConfig, Credential};
pub use self::error::KubeError;

/// The name of a cluster, like `Kubernetes` or `east`. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClusterId(pub Arc<str>);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A kind of object that holds bytes under keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Secret,
    ConfigMap,
}

impl Kind {
    /// The name in paths and in RBAC's rules.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Secret => "secrets",
            Self::ConfigMap => "configmaps",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Secret => "Secret",
            Self::ConfigMap => "ConfigMap",
        })
    }
}

/// An object's place in a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    pub kind: Kind,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
    }
}

/// A `resourceVersion`: opaque, and compared for equality only.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub Box<str>);

/// An object as the API server has it.
pub struct Object {
    pub name: Box<str>,
    pub version: Version,
    pub labels: BTreeMap<Box<str>, Box<str>>,
    pub annotations: BTreeMap<Box<str>, Box<str>>,
    /// `data`, decoded; of a ConfigMap also `binaryData`. Wiped when dropped.
    pub data: BTreeMap<Box<str>, Zeroizing<Vec<u8>>>,
}

/// Without the data, which may be keys.
impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Object");
        shown.field("name", &self.name).field("version", &self.version);
        shown.field("keys", &self.data.keys().collect::<Vec<_>>()).finish_non_exhaustive()
    }
}

/// Which objects of one kind in one namespace to list or watch.
#[derive(Clone)]
pub struct Selection {
    pub kind: Kind,
    pub namespace: Arc<str>,
    pub of: Of,
}

/// See [`Selection`].
#[derive(Clone)]
pub enum Of {
    /// The object with this name (`fieldSelector=metadata.name=…`): RBAC allows it for rules with `resourceNames`.
    Name(Arc<str>),
    /// Those with a label, like `istio/multiCluster=true`.
    Label(Arc<str>),
    /// Those whose name passes. The API server sends the others too; their data is neither decoded nor kept.
    Wanted(Arc<dyn Fn(&str) -> bool + Send + Sync>),
}

/// The objects of a selection at one moment, or a part of them.
#[derive(Debug)]
pub struct List {
    pub objects: Vec<Object>,
    /// A watch from here on misses nothing.
    pub version: Version,
    /// Where the next part begins; empty if this is the last one.
    pub next: String,
}

/// What happens to the objects that are watched.
#[derive(Debug)]
pub enum Event {
    /// It is new, has changed, or is as it was when the watch began.
    Object(Object),
    Deleted {
        name: Box<str>,
        version: Version,
    },
    /// Nothing that matters has happened up to this version: a bookmark, or an object that is not wanted.
    Version(Version),
}

/// The events of a watch. It ends when the API server ends it, mostly after its own time-out. An error is the last item.
pub struct Watch(pub Pin<Box<dyn Stream<Item = Result<Event, KubeError>> + Send>>);

impl Watch {
    pub async fn next(&mut self) -> Option<Result<Event, KubeError>> {
        self.0.next().await
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// Whose right is reviewed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Account {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

/// The right that is reviewed: `verb` on a kind in a namespace, or on one object there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// RBAC's, like `get`.
    pub verb: &'static str,
    pub kind: Kind,
    pub namespace: Arc<str>,
    /// None for all objects in the namespace.
    pub name: Option<Arc<str>>,
}

/// A rule of a `ReferenceGrant`: Gateways of `from` may refer to `to` in the namespace of the grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The namespace of the Gateways.
    pub from: Box<str>,
    pub to: Kind,
    /// None for all objects of the kind.
    pub name: Option<Box<str>>,
}

/// How often a list may begin because the API server no longer knows where it was.
const LISTINGS: u32 = 3;

/// One cluster's API server.
#[tonic::async_trait]
pub trait Api: fmt::Debug + Send + Sync + 'static {
    /// Reads an object; none if it does not exist. Never from a cache that may lag behind.
    async fn get(&self, object: &ObjectId) -> Result<Option<Object>, KubeError>;

    /// The page of a list that begins at `next`; the first one if that is empty. [`KubeError::Expired`] if the API server no
    /// longer knows where that was: the list has to begin again.
    async fn page(&self, selection: &Selection, next: &str) -> Result<List, KubeError>;

    /// Lists the objects of a selection, however many pages they take.
    async fn list(&self, selection: &Selection) -> Result<List, KubeError> {
        let mut listings = 0;
        let mut list = self.page(selection, "").await?;
        while !list.next.is_empty() {
            match self.page(selection, &list.next).await {
                Ok(List { objects, version, next }) => {
                    list.objects.extend(objects);
                    (list.version, list.next) = (version, next);
                }
                Err(KubeError::Expired { .. }) if listings + 1 < LISTINGS => {
                    listings += 1;
                    list = self.page(selection, "").await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(list)
    }

    /// Watches a selection from `from` on: [`KubeError::Expired`] if that is too long ago. Without `from` the watch begins
    /// with the objects that there are.
    async fn watch(&self, selection: &Selection, from: Option<&Version>) -> Result<Watch, KubeError>;

    /// Whether `account` has a right (`SubjectAccessReview`). [`KubeError::Undecided`] where the API server could not find out.
    async fn may(&self, account: &Account, access: &Access) -> Result<bool, KubeError>;

    /// The rules of the `ReferenceGrant`s in a namespace; none where the cluster doesn't have the Gateway API.
    async fn grants(&self, namespace: &str) -> Result<Vec<Grant>, KubeError>;

    /// Whether the API server answers and knows who the agent is. Needs no right.
    async fn probe(&self) -> Result<(), KubeError>;
}
