//! The start of an agent: volumes that the one before has published are served again, and what is left of others is removed.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use tokio::task::JoinSet;

use super::mounts::Mount;
use super::record::{self, KubeletsRecord, Record, Records};
use super::target::Target;
use super::volumes::{NOT_RESTORED, Volumes};

/// What is there of a volume that has a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The kubelet knows it, and its directory is there.
    Continues,
    /// The kubelet no longer knows it.
    Orphaned,
    /// Its place is gone, or another volume's.
    Gone,
}

/// Serves the recorded volumes again, and removes what the kubelet no longer knows.
pub(super) async fn restore(volumes: &Volumes) {
    let settings = volumes.settings();
    let (records, kubelet_dir) = (settings.records.clone(), settings.kubelet_dir.clone());
    let read = {
        let records = records.clone();
        volumes.disk().run(&settings.records, move || record::read_all(&records, &kubelet_dir)).await
    };
    let read = read.map_err(io::Error::other).flatten();
    let Records { records: found, unreadable } = match read {
        Ok(read) => read,
        Err(error) => {
            let path = records.display();
            tracing::warn!(%path, %error, "records of volumes not read; each is served once the kubelet comes by");
            return;
        }
    };
    for (path, reason) in unreadable {
        tracing::warn!(path = %path.display(), reason, "record of a volume removed: it can't be used");
        let removed = {
            let path = path.clone();
            volumes.disk().run(&path.clone(), move || record::remove(&path)).await
        };
        if let Err(error) = removed.map_err(io::Error::other).flatten() {
            tracing::warn!(path = %path.display(), %error, "record of a volume not removed");
        }
    }
    let recorded: BTreeSet<_> = found.iter().map(|record| record.id.as_str().to_owned()).collect();
    let mut restored = JoinSet::new();
    for record in found {
        let volumes = volumes.clone();
        restored.spawn(async move { restore_one(&volumes, record).await });
    }
    restored.join_all().await;
    sweep(volumes, recorded).await;
    if volumes.count() > 0 {
        tracing::info!(volumes = volumes.count(), "volumes restored");
    }
}

async fn restore_one(volumes: &Volumes, record: Record) {
    let driver = volumes.settings().driver_name.clone();
    let looked = {
        let record = record.clone();
        let path = record.target.path().to_owned();
        volumes.disk().run(&path, move || look(&record, driver.as_str())).await
    };
    let id = record.id.clone();
    let discarded = match looked.map_err(io::Error::other).flatten() {
        Ok(Fate::Continues) => return volumes.restore(record).await,
        Ok(Fate::Orphaned) => volumes.discard(&id, Some(record.target)).await,
        Ok(Fate::Gone) => volumes.discard(&id, None).await,
        Err(error) => {
            tracing::warn!(volume = %id, %error, "{NOT_RESTORED}");
            return;
        }
    };
    match discarded {
        Ok(()) => tracing::info!(volume = %id, pod = %record.pod, "volume of a Pod that is gone removed"),
        Err(status) => {
            tracing::warn!(volume = %id, reason = status.message(), "volume of a Pod that is gone not removed")
        }
    }
}

fn look(record: &Record, driver: &str) -> io::Result<Fate> {
    // Where the kubelet's file can't be read the kubelet is busy with it: what is there stays.
    match KubeletsRecord::read(&record.target.kubelets_file()) {
        Ok(None) => return Ok(Fate::Orphaned),
        Ok(Some(known)) if !known.is_of(driver, &record.id) => return Ok(Fate::Gone),
        Ok(Some(_)) => {}
        Err(error) => {
            tracing::debug!(volume = %record.id, %error, "the kubelet's file about a volume is unreadable")
        }
    }
    match std::fs::symlink_metadata(record.target.path()) {
        Ok(found) if found.is_dir() => Ok(Fate::Continues),
        Ok(_) => Ok(Fate::Gone),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Fate::Gone),
        Err(error) => Err(error),
    }
}

/// Removes mounts of volumes that the kubelet no longer knows, and logs how many volumes it knows that have no record.
async fn sweep(volumes: &Volumes, recorded: BTreeSet<String>) {
    let settings = volumes.settings();
    let (kubelet_dir, driver) = (settings.kubelet_dir.clone(), settings.driver_name.clone());
    let swept = volumes.disk().run(&settings.kubelet_dir, move || {
        let known = record::known_to_kubelet(&kubelet_dir, driver.as_str());
        let unrecorded = known.iter().filter(|id| !recorded.contains(*id)).count();
        (unrecorded, stale_mounts(&kubelet_dir, driver.as_str()))
    });
    match swept.await {
        Ok((unrecorded, stale)) => {
            if unrecorded > 0 {
                tracing::info!(unrecorded, "volumes without a record are served once the kubelet comes by");
            }
            for target in stale.into_iter().flatten() {
                let path = target.path().display().to_string();
                let removed = {
                    let at = target.path().to_owned();
                    volumes.disk().run(&at, move || super::directory::remove(&target)).await
                };
                match removed.map_err(io::Error::other).flatten() {
                    Ok(_) => tracing::info!(path, "mount of a Pod that is gone removed"),
                    Err(error) => tracing::warn!(path, %error, "mount of a Pod that is gone not removed"),
                }
            }
        }
        Err(error) => tracing::warn!(%error, "the kubelet's directory was not looked through"),
    }
}

/// The places where the driver has mounted something for Pods that are gone.
fn stale_mounts(kubelet_dir: &Path, driver: &str) -> io::Result<Vec<Target>> {
    let mounts = Mount::all()?.into_iter().filter(|mount| mount.is_of(driver));
    let targets = mounts.filter_map(|mount| Target::parse(mount.point.to_str()?, kubelet_dir).ok());
    let is_stale = |target: &Target| matches!(KubeletsRecord::read(&target.kubelets_file()), Ok(None));
    Ok(targets.filter(is_stale).collect())
}
