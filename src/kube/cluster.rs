//! The client of one API server.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::Value;
use zeroize::Zeroizing;

use super::call::{Call, Caller};
use super::object;
use super::review;
use super::watch::Events;
use super::{
    Access, Account, Api, ClusterConfig, Grant, Kind, KubeError, List, Object, ObjectId, Of, Selection,
    Version, Watch,
};
use crate::base::clock::Clock;
use crate::base::limits;
use crate::base::offload;
use crate::fs::disk::Disk;
use crate::net::error::TransportError;
use crate::net::rest::encoded;

/// A client of one API server. Clones share its connections.
#[derive(Clone)]
pub struct Cluster(Arc<Caller>);

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cluster").field(&self.0.address).finish()
    }
}

impl Cluster {
    pub fn new(config: ClusterConfig, disk: Disk, clock: Clock) -> Self {
        Self(Arc::new(Caller::new(config, &disk, clock)))
    }

    /// One whose callers have deadlines of their own: its calls take as long as they are waited for.
    pub fn without_deadline(config: ClusterConfig, disk: Disk, clock: Clock) -> Self {
        Self(Arc::new(Caller::without_deadline(config, disk, clock)))
    }

    /// The API server's address, as messages name it.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Makes any call with JSON, and returns the object in the answer; PATCH is server-side apply. The body is wiped, the
    /// answer is not: use [`Api::get`] for Secrets.
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, KubeError> {
        let is_repeatable = method != Method::POST;
        let body = body.map(|body| Bytes::from_owner(Zeroizing::new(body.to_string().into_bytes())));
        self.0.json(&Call { method, path, body, is_repeatable }, limits::ANSWER_BYTES).await
    }
}

impl Of {
    /// Whether an object with this name belongs to the selection; the API server decides about labels.
    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Self::Name(wanted) => **wanted == *name,
            Self::Label(_) => true,
            Self::Wanted(is_wanted) => is_wanted(name),
        }
    }
}

fn path_of(kind: Kind, namespace: &str) -> String {
    format!("/api/v1/namespaces/{}/{}", encoded(namespace), kind.plural())
}

/// The path of a list or a watch, to which further parameters can be appended.
fn path_of_all(selection: &Selection) -> String {
    let path = path_of(selection.kind, &selection.namespace);
    match &selection.of {
        Of::Name(name) => format!("{path}?fieldSelector=metadata.name%3D{}&", encoded(name)),
        Of::Label(label) => format!("{path}?labelSelector={}&", encoded(label)),
        Of::Wanted(_) => format!("{path}?"),
    }
}

#[tonic::async_trait]
impl Api for Cluster {
    async fn get(&self, object: &ObjectId) -> Result<Option<Object>, KubeError> {
        let ObjectId { kind, namespace, name } = object;
        let path = format!("{}/{}", path_of(*kind, namespace), encoded(name));
        let body = match self.0.body(&Call::get(&path), limits::KUBE_OBJECT_BYTES).await {
            Err(KubeError::Status { status: StatusCode::NOT_FOUND, message, .. })
                if message.ends_with(&format!("\"{name}\" not found")) =>
            {
                return Ok(None);
            }
            body => body?,
        };
        let read =
            object::object(body.as_slice(), *kind, namespace).and_then(|found| match *found.name == **name {
                true => Ok(found),
                false => Err("it is an object with another name".to_owned()),
            });
        read.map(Some).map_err(|reason| self.0.unreadable(reason))
    }

    async fn page(&self, selection: &Selection, next: &str) -> Result<List, KubeError> {
        let start = path_of_all(selection);
        let mut count = limits::KUBE_PAGE_OBJECTS;
        let body = loop {
            let mut path = format!("{start}limit={count}");
            if !next.is_empty() {
                path = format!("{path}&continue={}", encoded(next));
            }
            match self.0.body(&Call::get(&path), limits::KUBE_PAGE_BYTES).await {
                // Large objects.
                Err(KubeError::Transport(TransportError::TooLong { .. })) if count > 1 => {
                    count = count / 10 + 1
                }
                Err(KubeError::Status { status: StatusCode::GONE, .. }) => return Err(self.0.expired()),
                body => break body?,
            }
        };
        let selection = selection.clone();
        let read = offload::large(body.len(), move || {
            let mut objects = Vec::new();
            let (kind, namespace) = (selection.kind, &selection.namespace);
            let page =
                object::page(body.as_slice(), kind, namespace, |name| selection.of.has(name), &mut objects);
            page.map(|page| (page, objects))
        });
        let (page, objects) = read.await.map_err(|reason| self.0.unreadable(reason))?;
        Ok(List { objects, version: Version(page.version.into()), next: page.next })
    }

    async fn watch(&self, selection: &Selection, from: Option<&Version>) -> Result<Watch, KubeError> {
        // The API server's own choice, made here so that it holds for all of them.
        let seconds = fastrand::u32(3_000..3_600);
        let mut path = path_of_all(selection);
        path += &format!("watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}");
        if let Some(Version(from)) = from {
            path += &format!("&resourceVersion={}", encoded(from));
        }
        match self.0.open(&Call::get(&path)).await {
            Ok(answer) => Ok(Watch(Box::pin(Events::new(Arc::clone(&self.0), answer, selection.clone())))),
            Err(KubeError::Status { status: StatusCode::GONE, .. }) => Err(self.0.expired()),
            Err(error) => Err(error),
        }
    }

    async fn may(&self, account: &Account, access: &Access) -> Result<bool, KubeError> {
        let body = Some(Bytes::from(review::request(account, access).to_string()));
        let call = Call { method: Method::POST, path: review::PATH, body, is_repeatable: true };
        let answer = self.0.json(&call, limits::ANSWER_BYTES).await?;
        review::decision(&answer).map_err(|undecided| match undecided {
            review::NoDecision::Unreadable => self.0.unreadable("it is no SubjectAccessReview with a status"),
            review::NoDecision::Failed(reason) => {
                KubeError::Undecided { address: self.0.address.clone(), reason }
            }
        })
    }

    async fn grants(&self, namespace: &str) -> Result<Vec<Grant>, KubeError> {
        for version in review::GRANT_VERSIONS {
            let start = format!(
                "/apis/gateway.networking.k8s.io/{version}/namespaces/{}/referencegrants?limit={}",
                encoded(namespace),
                limits::KUBE_PAGE_OBJECTS
            );
            let (mut grants, mut path) = (Vec::new(), start.clone());
            loop {
                let page = match self.0.json(&Call::get(&path), limits::KUBE_PAGE_BYTES).await {
                    // The cluster has no such version of the API.
                    Err(KubeError::Status { status: StatusCode::NOT_FOUND, .. }) => break,
                    page => page?,
                };
                grants.extend(review::grants(&page));
                match page.pointer("/metadata/continue").and_then(Value::as_str).unwrap_or_default() {
                    "" => return Ok(grants),
                    next => path = format!("{start}&continue={}", encoded(next)),
                }
            }
        }
        Ok(Vec::new())
    }

    async fn probe(&self) -> Result<(), KubeError> {
        match self.0.body(&Call::get("/version"), limits::ANSWER_BYTES).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_forbidden() => Ok(()),
            Err(error) => Err(error),
        }
    }
}
