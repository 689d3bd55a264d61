//! What is kept of a volume across restarts of the agent: all but the token and the certificate.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::attributes::Attributes;
use super::identifiers::{Pod, VolumeId};
use super::target::{KUBELETS_FILE, Target};
use crate::base::limits::{VOLUME_RECORD_BYTES, VOLUMES};
use crate::fs::file;
use crate::fs::replace::{NotReplaced, replace};

/// A volume, as the kubelet has asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) id: VolumeId,
    pub(super) target: Target,
    pub(super) pod: Pod,
    pub(super) attributes: Attributes,
    /// The group that may read its files.
    pub(super) group: Option<u32>,
}

/// What the directory of records has.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) records: Vec<Record>,
    /// Files that are no records, and why.
    pub(super) unreadable: Vec<(PathBuf, String)>,
}

/// The file of a record.
pub(super) fn path_of(directory: &Path, id: &VolumeId) -> PathBuf {
    directory.join(file_name(id))
}

fn file_name(id: &VolumeId) -> String {
    format!("{id}.json")
}

impl Record {
    /// Writes the record. Waits for the disk.
    pub(super) fn write(&self, directory: &Path) -> Result<(), NotReplaced> {
        let content = Zeroizing::new(self.to_json().to_string().into_bytes());
        replace(directory, &file_name(&self.id), || Some(content))
    }

    pub(super) fn to_json(&self) -> Value {
        let Self { id, target, pod, attributes, group } = self;
        json!({
            "volume": id.as_str(),
            "target": target.path(),
            "pod.namespace": pod.namespace,
            "pod.name": pod.name,
            "pod.uid": pod.uid,
            "serviceAccount.name": pod.service_account,
            "attributes": attributes.to_map(),
            "group": group,
        })
    }

    pub(super) fn parse(content: &[u8], kubelet_dir: &Path) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(content).map_err(|_| "it is not JSON".to_owned())?;
        let text = |name: &'static str| value.get(name).and_then(Value::as_str);
        let given = value.get("attributes").and_then(Value::as_object).into_iter().flatten();
        let given = given.map(|(name, value)| (name.as_str(), value.as_str().unwrap_or_default()));
        let group = value.get("group").filter(|group| !group.is_null());
        Ok(Self {
            id: text("volume").unwrap_or_default().parse()?,
            target: Target::parse(text("target").unwrap_or_default(), kubelet_dir)?,
            pod: Pod::new(text)?,
            attributes: Attributes::parse(given)?,
            group: group
                .map(|group| {
                    group.as_u64().and_then(|group| group.try_into().ok()).ok_or("group is no number")
                })
                .transpose()?,
        })
    }
}

/// Reads all records. Waits for the disk.
pub(super) fn read_all(directory: &Path, kubelet_dir: &Path) -> io::Result<Records> {
    let mut found = Records::default();
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries.take(2 * VOLUMES) {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let content = file::read(&path, VOLUME_RECORD_BYTES).map_err(|error| error.to_string());
        let record = content.and_then(|content| Record::parse(&content, kubelet_dir));
        match record {
            Ok(record) if path_of(directory, &record.id) == path => found.records.push(record),
            Ok(_) => found.unreadable.push((path, "it is the record of another volume".to_owned())),
            Err(reason) => found.unreadable.push((path, reason)),
        }
    }
    Ok(found)
}

/// Removes a record, which need not exist. Waits for the disk.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// What the kubelet's own file beside a volume says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KubeletsRecord {
    driver: String,
    volume: String,
}

impl KubeletsRecord {
    /// None if there is none: the kubelet knows no such volume. Waits for the disk.
    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let content = match file::read(path, VOLUME_RECORD_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            content => content?,
        };
        let value: Value = serde_json::from_slice(&content).map_err(io::Error::other)?;
        let text = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok(Some(Self { driver: text("driverName"), volume: text("volumeHandle") }))
    }

    pub(super) fn is_of(&self, driver: &str, id: &VolumeId) -> bool {
        self.driver == driver && self.volume == id.as_str()
    }
}

/// The ids of the volumes of `driver` that the kubelet knows. Waits for the disk.
pub(super) fn known_to_kubelet(kubelet_dir: &Path, driver: &str) -> Vec<String> {
    let pods = fs::read_dir(kubelet_dir.join("pods")).into_iter().flatten().flatten();
    let volumes = pods.flat_map(|pod| {
        let volumes = fs::read_dir(pod.path().join("volumes/kubernetes.io~csi"));
        volumes.into_iter().flatten().flatten()
    });
    let records =
        volumes.filter_map(|volume| KubeletsRecord::read(&volume.path().join(KUBELETS_FILE)).ok()?);
    records.filter(|record| record.driver == driver).map(|record| record.volume).take(2 * VOLUMES).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    fn record(id: &str) -> Record {
        Record {
            id: id.parse().unwrap(),
            target: Target::parse("/k/pods/7f/volumes/x/mount", Path::new("/k")).unwrap(),
            pod: Pod {
                namespace: "shop".to_owned(),
                name: "web-0".to_owned(),
                uid: "7f".to_owned(),
                service_account: "cart".to_owned(),
            },
            attributes: Attributes {
                cert_ttl: Some(Duration::from_secs(60)),
                files: true,
                ..Attributes::default()
            },
            group: Some(2000),
        }
    }

    #[test]
    fn a_record_survives_the_round_trip_and_only_the_agent_reads_it() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("volumes");
        let kubelet = Path::new("/k");
        assert!(read_all(&directory, kubelet).unwrap().records.is_empty());
        let mut records = [record("csi-1"), Record { group: None, ..record("csi-2") }];
        for record in &records {
            record.write(&directory).unwrap();
        }
        let mode = fs::metadata(directory.join("csi-1.json")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut found = read_all(&directory, kubelet).unwrap();
        found.records.sort_by_key(|record| record.id.clone());
        assert_eq!(found.records, records);
        // A record of another volume, of another kubelet, and what is none.
        fs::copy(directory.join("csi-1.json"), directory.join("csi-3.json")).unwrap();
        fs::write(directory.join("csi-4.json"), "{}").unwrap();
        fs::write(directory.join("csi-5.json.new"), "{").unwrap();
        records[1].target = Target::parse("/other/pods/7f/volumes/x/mount", Path::new("/other")).unwrap();
        records[1].write(&directory).unwrap();
        let found = read_all(&directory, kubelet).unwrap();
        assert_eq!((found.records.len(), found.unreadable.len()), (1, 3), "{found:?}");
        for _ in 0..2 {
            remove(&path_of(&directory, &records[0].id)).unwrap();
        }
    }
}
