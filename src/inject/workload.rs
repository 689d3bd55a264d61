//! The kinds of Kubernetes objects that have Pods.

use super::yaml::Node;

/// API group and version, kind, and the path of the Pods' spec.
const WORKLOADS: [(&str, &str, &[&str]); 7] = [
    ("v1", "Pod", &["spec"]),
    ("apps/v1", "Deployment", &["spec", "template", "spec"]),
    ("apps/v1", "StatefulSet", &["spec", "template", "spec"]),
    ("apps/v1", "DaemonSet", &["spec", "template", "spec"]),
    ("apps/v1", "ReplicaSet", &["spec", "template", "spec"]),
    ("batch/v1", "Job", &["spec", "template", "spec"]),
    ("batch/v1", "CronJob", &["spec", "jobTemplate", "spec", "template", "spec"]),
];

/// Both lists of a Pod's containers.
pub(super) const CONTAINER_LISTS: [&str; 2] = ["initContainers", "containers"];

/// The kind of `object` and the path of its Pods' spec, if it is a workload.
pub(super) fn path_of(object: &Node) -> Option<(&'static str, &'static [&'static str])> {
    let (group, kind) = (object.text_of("apiVersion")?, object.text_of("kind")?);
    let (_, kind, path) = WORKLOADS.into_iter().find(|(of, name, _)| (*of, *name) == (group, kind))?;
    Some((kind, path))
}

/// Whether `object` is a `List`, whose items are objects.
pub(super) fn is_list(object: &Node) -> bool {
    object.text_of("apiVersion") == Some("v1") && object.text_of("kind") == Some("List")
}
