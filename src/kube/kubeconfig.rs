//! Kubeconfigs: where an API server is and who calls it, as `kubectl` and remote secrets have it.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod policy;
mod tree;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use self::tree::Node;
use super::{ClusterConfig, Credential};
use crate::auth::token_file::{Token, TokenFile};
use crate::base::limits;
use crate::base::text;
use crate::fs::disk::{Disk, Unresponsive};
use crate::fs::file;
use crate::net::address::Address;
use crate::net::endpoint::Endpoint;
use crate::net::tls::{Roots, Trusted};
use crate::pki::key::PrivateKey;
use crate::pki::pem;
use crate::secret::KeyPair;

pub use self::policy::{Policy, Risk};

/// One context of a kubeconfig, ready to use.
#[derive(Clone, Debug)]
pub struct Kubeconfig {
    /// The name of the context.
    pub context: String,
    pub config: ClusterConfig,
    /// The namespace of the context.
    pub namespace: Option<String>,
}

/// Why a kubeconfig can't be used.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    #[error("the kubeconfig {path} can't be read: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
    #[error("this is no kubeconfig: {0}")]
    NotAKubeconfig(String),
    #[error("the kubeconfig sets no current-context; name one of its contexts: {known}")]
    NoContext { known: String },
    /// A name that leads nowhere.
    #[error("the kubeconfig has no {kind} {name:?}{wanted_by}; it has: {known}")]
    Unknown { kind: Kind, name: String, wanted_by: String, known: String },
    #[error("{kind} {name:?} of the kubeconfig: {reason}")]
    Unusable { kind: Kind, name: String, reason: String },
    /// It can be used, but is not trusted that far.
    #[error("{kind} {name:?} of the kubeconfig is refused: {reason}")]
    Refused { kind: Kind, name: String, reason: String },
}

/// What has a name in a kubeconfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Context,
    Cluster,
    User,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Context => "context",
            Self::Cluster => "cluster",
            Self::User => "user",
        })
    }
}

impl Kubeconfig {
    /// Reads the user's own file, with the files that it names. Without `context` its current context.
    pub async fn read(path: &Path, context: Option<&str>, disk: &Disk) -> Result<Self, KubeconfigError> {
        let (own, context) = (path.to_owned(), context.map(str::to_owned));
        let read = move || {
            let text = file::read(&own, limits::KUBECONFIG_BYTES)
                .map_err(|source| KubeconfigError::Unreadable { path: own.clone(), source })?;
            let directory = own.parent().unwrap_or(Path::new(""));
            Self::parse(&text, context.as_deref(), &Policy::Own { directory })
        };
        disk.run(path, read).await?
    }

    /// The context `context` of a kubeconfig; without it the current one. Not for the runtime's thread: a large one takes
    /// milliseconds, and where the policy lets it name files with a client certificate, these are read.
    pub fn parse(text: &[u8], context: Option<&str>, policy: &Policy<'_>) -> Result<Self, KubeconfigError> {
        let not_one = |reason: &str| KubeconfigError::NotAKubeconfig(reason.to_owned());
        if u64::try_from(text.len()).is_ok_and(|length| length > limits::KUBECONFIG_BYTES) {
            let reason = format!("it has more than {} bytes", limits::KUBECONFIG_BYTES);
            return Err(KubeconfigError::NotAKubeconfig(reason));
        }
        let text = std::str::from_utf8(text).map_err(|_| not_one("it is not UTF-8"))?;
        let root = Node::parse(text).map_err(KubeconfigError::NotAKubeconfig)?;
        if !matches!(root, Node::Map(_)) {
            return Err(not_one("it has no clusters, users and contexts"));
        }
        let clusters = Named::of(&root, Kind::Cluster)?;
        let users = Named::of(&root, Kind::User)?;
        let contexts = Named::of(&root, Kind::Context)?;
        policy.check(&clusters, &users)?;
        let current = root.text("current-context").map_err(KubeconfigError::NotAKubeconfig)?;
        let Some(name) = context.or(current) else {
            return Err(KubeconfigError::NoContext { known: Named::list(&contexts) });
        };
        let context = Named::find(&contexts, Kind::Context, name, None)?;
        let missing = |what| context.unusable(format!("it names no {what}"));
        let cluster = context.text("cluster")?.ok_or_else(|| missing("cluster"))?;
        let cluster = Named::find(&clusters, Kind::Cluster, cluster, Some(name))?;
        cluster.check_supported()?;
        let credential = match context.text("user")? {
            Some(user) => {
                let user = Named::find(&users, Kind::User, user, Some(name))?;
                user.check_supported()?;
                user.credential(policy)?
            }
            None => Credential::None,
        };
        let (endpoint, path) = cluster.endpoint(policy)?;
        Ok(Self {
            context: name.to_owned(),
            config: ClusterConfig { endpoint, path, credential },
            namespace: context.text("namespace")?.map(str::to_owned),
        })
    }
}

/// Bytes, and their place for messages.
type Content = (Zeroizing<Vec<u8>>, String);

/// A cluster, user or context with its name.
struct Named<'a> {
    kind: Kind,
    name: &'a str,
    node: &'a Node,
}

impl<'a> Named<'a> {
    /// All of a kind.
    fn of(root: &'a Node, kind: Kind) -> Result<Vec<Self>, KubeconfigError> {
        let key = format!("{kind}s");
        let invalid = |reason: &str| KubeconfigError::NotAKubeconfig(format!("{reason} of {key}"));
        let items = match root.get(&key) {
            Some(Node::List(items)) => items.as_slice(),
            Some(_) => return Err(KubeconfigError::NotAKubeconfig(format!("{key} is not a list"))),
            None => &[],
        };
        let mut all = Vec::<Self>::new();
        for item in items {
            let name =
                item.text("name").ok().flatten().ok_or_else(|| invalid("a name is missing in an entry"))?;
            if all.iter().any(|known| known.name == name) {
                return Err(invalid(&format!(
                    "{:?} is the name of two entries",
                    text::sanitize_for_log(name)
                )));
            }
            let node = item.get(&kind.to_string()).unwrap_or(&Node::Null);
            all.push(Self { kind, name, node });
        }
        Ok(all)
    }

    fn list(all: &[Self]) -> String {
        match all {
            [] => "none".to_owned(),
            all => text::listed(all.iter().map(|one| text::sanitize_for_log(one.name)), ", "),
        }
    }

    fn find<'b>(
        all: &'b [Self],
        kind: Kind,
        name: &str,
        context: Option<&str>,
    ) -> Result<&'b Self, KubeconfigError> {
        all.iter().find(|one| one.name == name).ok_or_else(|| KubeconfigError::Unknown {
            kind,
            name: text::sanitize_for_log(name),
            wanted_by: context.map_or_else(String::new, |context| {
                format!(", which its context {:?} names", text::sanitize_for_log(context))
            }),
            known: Self::list(all),
        })
    }

    fn unusable(&self, reason: impl Into<String>) -> KubeconfigError {
        let (kind, name) = (self.kind, text::sanitize_for_log(self.name));
        KubeconfigError::Unusable { kind, name, reason: reason.into() }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, KubeconfigError> {
        self.node.text(key).map_err(|reason| self.unusable(reason))
    }

    /// The bytes in `KEY-data`, or in the file that `KEY` names.
    fn bytes(&self, key: &str, policy: &Policy<'_>) -> Result<Option<Content>, KubeconfigError> {
        let data = format!("{key}-data");
        if let Some(encoded) = self.text(&data)? {
            // It may be folded into lines.
            let mut one_line = Zeroizing::new(String::with_capacity(encoded.len()));
            one_line.extend(encoded.chars().filter(|c| !c.is_ascii_whitespace()));
            let mut bytes = Zeroizing::new(Vec::with_capacity(one_line.len() / 4 * 3 + 3));
            let decoded = STANDARD.decode_vec(one_line.as_bytes(), &mut bytes);
            decoded.map_err(|_| self.unusable(format!("its {data} is not base64")))?;
            return Ok(Some((bytes, data)));
        }
        let Some(path) = self.path(key, policy)? else { return Ok(None) };
        let shown = text::sanitize_for_log(&path.display().to_string());
        let read = file::read(&path, limits::FILE_BYTES);
        let bytes =
            read.map_err(|error| self.unusable(format!("its {key} {shown} can't be read: {error}")))?;
        Ok(Some((bytes, shown)))
    }

    fn path(&self, key: &str, policy: &Policy<'_>) -> Result<Option<PathBuf>, KubeconfigError> {
        let Some(path) = self.text(key)? else { return Ok(None) };
        policy.resolve(Path::new(path)).map(Some).ok_or_else(|| {
            self.unusable(format!("its {key} {:?} is not an absolute path", text::sanitize_for_log(path)))
        })
    }

    /// The server of a cluster, and the path below which it serves the API.
    fn endpoint(&self, policy: &Policy<'_>) -> Result<(Endpoint, String), KubeconfigError> {
        let server = self.text("server")?.ok_or_else(|| self.unusable("it has no server"))?;
        let (authority, path) = split(server);
        let address = Address::with_ports(authority, 443, 80);
        let address = address.map_err(|_| {
            self.unusable(format!("its server {:?} is no URL", text::sanitize_for_log(server)))
        })?;
        let is_path = |c: char| c.is_ascii_alphanumeric() || "/-._~%:".contains(c);
        if !path.chars().all(is_path) {
            let reason = format!("the path of its server {:?} is no URL's", text::sanitize_for_log(server));
            return Err(self.unusable(reason));
        }
        let is_unverified =
            self.node.is_set("insecure-skip-tls-verify").map_err(|reason| self.unusable(reason))?;
        let own_roots = ["certificate-authority-data", "certificate-authority"];
        let has_roots = own_roots.into_iter().any(|key| self.node.get(key).is_some());
        let roots = if is_unverified {
            if has_roots {
                return Err(
                    self.unusable("it has a certificate-authority and insecure-skip-tls-verify: remove one")
                );
            }
            Roots::Unverified
        } else if self.text("certificate-authority-data")?.is_some() {
            let (text, place) = self.bytes("certificate-authority", policy)?.unwrap_or_default();
            let roots = pem::certificates(&text);
            let roots = roots.map_err(|error| self.unusable(format!("its {place}: {error}")))?;
            Roots::Given(Arc::new(Trusted::new(roots, format!("the {place} of its kubeconfig"))))
        } else {
            self.path("certificate-authority", policy)?.map_or(Roots::System, Roots::File)
        };
        let server_name = self.text("tls-server-name")?.map(str::to_owned);
        Ok((Endpoint { address, roots, server_name }, path.to_owned()))
    }

    /// The credential of a user.
    fn credential(&self, policy: &Policy<'_>) -> Result<Credential, KubeconfigError> {
        let chain = self.bytes("client-certificate", policy)?;
        let key = self.bytes("client-key", policy)?;
        match (chain, key) {
            // The API server looks at the certificate first where there is a token, too.
            (Some((chain, chain_place)), Some((key, key_place))) => {
                let invalid = |place: &str, error: String| self.unusable(format!("its {place}: {error}"));
                let chain =
                    pem::certificates(&chain).map_err(|error| invalid(&chain_place, error.to_string()))?;
                let key =
                    PrivateKey::from_pem(&key).map_err(|error| invalid(&key_place, error.to_string()))?;
                let pair =
                    KeyPair::new(chain, key).map_err(|error| invalid(&chain_place, error.to_string()))?;
                return Ok(Credential::Certificate(pair));
            }
            (Some(_), None) => return Err(self.unusable("it has a client-certificate without a client-key")),
            (None, Some(_)) => return Err(self.unusable("it has a client-key without a client-certificate")),
            (None, None) => {}
        }
        if let Some(path) = self.path("tokenFile", policy)? {
            return Ok(Credential::TokenFile(TokenFile::named_by("tokenFile in the kubeconfig", path)));
        }
        match self.text("token")? {
            Some(token) => match Token::parse(token.trim().as_bytes()) {
                Ok(token) => Ok(Credential::Token(Arc::new(token))),
                Err(reason) => Err(self.unusable(format!("its token is none: {reason}"))),
            },
            None => Ok(Credential::None),
        }
    }
}

/// The server of a URL, and its path without the last slash.
fn split(url: &str) -> (&str, &str) {
    let begin = url.find("://").map_or(0, |at| at + 3);
    let end = url.get(begin..).and_then(|rest| rest.find('/')).map_or(url.len(), |at| begin + at);
    let (authority, path) = url.split_at(end);
    (authority, path.trim_end_matches('/'))
}

#[cfg(test)]
mod tests;
