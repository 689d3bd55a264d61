//! How far a kubeconfig is trusted.

use std::path::{Path, PathBuf};

use super::{Kind, KubeconfigError, Named, Node};
use crate::base::text;

/// Whose kubeconfig it is.
#[derive(Clone, Copy, Debug)]
pub enum Policy<'a> {
    /// The user's own, in this directory: it may name files. What its context does not use does not matter.
    Own { directory: &'a Path },
    /// That of a remote cluster, which others may write: each user and each cluster in it must be harmless.
    Foreign {
        allows: &'a [Risk],
        /// The option whose values are the names of what it allows.
        option: &'static str,
    },
}

/// What a foreign kubeconfig could make the agent do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Risk {
    /// Read files of the host, and send a token in one of them to the server.
    Files,
    /// Trust any server, or talk to one without TLS.
    InsecureServer,
}

impl Risk {
    pub const ALL: [Self; 2] = [Self::Files, Self::InsecureServer];

    /// The value of the option that allows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::InsecureServer => "insecure-server",
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Files => "its author would decide which files of this host are read",
            Self::InsecureServer => "any server in the middle could read the credential and forge Secrets",
        }
    }
}

/// The fields of a user, or of a cluster, that stand for a risk.
const RISKS: [(Kind, &str, Risk); 5] = [
    (Kind::Cluster, "certificate-authority", Risk::Files),
    (Kind::Cluster, "insecure-skip-tls-verify", Risk::InsecureServer),
    (Kind::User, "client-certificate", Risk::Files),
    (Kind::User, "client-key", Risk::Files),
    (Kind::User, "tokenFile", Risk::Files),
];

/// The fields that the agent does not support, and why.
const UNSUPPORTED: [(Kind, &str, &str); 8] = [
    (
        Kind::Cluster,
        "proxy-url",
        "the agent connects to API servers directly: use a server that it can reach",
    ),
    (Kind::User, "exec", "the agent runs no credential plugins: use a service account's token"),
    (Kind::User, "auth-provider", "the agent has no auth providers: use a service account's token"),
    (Kind::User, "username", "API servers no longer take passwords: use a service account's token"),
    (Kind::User, "password", "API servers no longer take passwords: use a service account's token"),
    (Kind::User, "as", "the agent does not impersonate: use a token of that account"),
    (Kind::User, "as-groups", "the agent does not impersonate: use a token of that account"),
    (Kind::User, "as-uid", "the agent does not impersonate: use a token of that account"),
];

impl Policy<'_> {
    /// Refuses a foreign kubeconfig for anything in it that is not allowed.
    pub(super) fn check(&self, clusters: &[Named<'_>], users: &[Named<'_>]) -> Result<(), KubeconfigError> {
        let Self::Foreign { allows, option } = self else { return Ok(()) };
        for one in clusters.iter().chain(users) {
            one.check_supported()?;
            let fields = RISKS.into_iter().filter(|(kind, field, _)| *kind == one.kind && one.has(field));
            let plaintext = one.is_plaintext().then_some(("a server with http://", Risk::InsecureServer));
            let found = fields.map(|(_, field, risk)| (field, risk)).chain(plaintext);
            if let Some((what, risk)) = found.into_iter().find(|(_, risk)| !allows.contains(risk)) {
                let (reason, value) = (risk.reason(), risk.name());
                let reason = format!("it has {what}: {reason}; {option} {value} allows it");
                let name = text::sanitize_for_log(one.name);
                return Err(KubeconfigError::Refused { kind: one.kind, name, reason });
            }
        }
        Ok(())
    }

    /// The path of a file that it names; none if it is relative to nothing.
    pub(super) fn resolve(&self, path: &Path) -> Option<PathBuf> {
        match self {
            Self::Own { directory } => Some(directory.join(path)),
            Self::Foreign { .. } => path.is_absolute().then(|| path.to_owned()),
        }
    }
}

impl Named<'_> {
    /// Fails where it has something that the agent does not support.
    pub(super) fn check_supported(&self) -> Result<(), KubeconfigError> {
        let found = UNSUPPORTED.into_iter().find(|(kind, field, _)| *kind == self.kind && self.has(field));
        match found {
            Some((kind, field, remedy)) => Err(KubeconfigError::Refused {
                kind,
                name: text::sanitize_for_log(self.name),
                reason: format!("it has {field}: {remedy}"),
            }),
            None => Ok(()),
        }
    }

    /// Whether it is a cluster whose server has no TLS.
    fn is_plaintext(&self) -> bool {
        let server = (self.kind == Kind::Cluster).then(|| self.node.text("server").ok().flatten()).flatten();
        server.is_some_and(|server| server.starts_with("http:"))
    }

    /// Whether a field is set to anything but nothing or `false`.
    fn has(&self, field: &str) -> bool {
        match self.node.get(field) {
            Some(Node::Text { text, is_plain }) => {
                let is_off = text.is_empty() || *is_plain && text.as_str() == "false";
                !is_off
            }
            Some(Node::List(items)) => !items.is_empty(),
            Some(_) => true,
            None => false,
        }
    }
}
