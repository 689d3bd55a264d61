//! The place of a volume: a directory beneath the kubelet's own, reached without following a link.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::base::limits::PATH_BYTES;
use crate::base::text;

/// How directories on the way are opened: for reaching what is inside alone.
pub(super) const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The path of a volume: `pods/UID/…` beneath the kubelet's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    path: PathBuf,
    kubelet_dir: PathBuf,
}

impl Target {
    pub(super) fn parse(text: &str, kubelet_dir: &Path) -> Result<Self, String> {
        let refuse = |reason: &str| {
            Err(format!("target_path {:?} is refused: {reason}", text::sanitize_for_log(text)))
        };
        let path = Path::new(text);
        if text.len() > PATH_BYTES || text.contains(char::is_control) {
            return refuse("it is no path of the kubelet");
        }
        let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_));
        let inside = path.strip_prefix(kubelet_dir).ok();
        let inside = inside.filter(|inside| {
            let parts = inside.iter().count();
            inside.components().all(is_plain) && inside.iter().next() == Some(OsStr::new("pods")) && parts > 2
        });
        if inside.is_none() {
            let expected = kubelet_dir.join("pods");
            let reason = format!(
                "it is not beneath {}; --kubelet-dir names the kubelet's directory",
                expected.display()
            );
            return refuse(&reason);
        }
        Ok(Self { path: path.to_owned(), kubelet_dir: kubelet_dir.to_owned() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn inside(&self) -> &Path {
        self.path.strip_prefix(&self.kubelet_dir).unwrap_or(Path::new(""))
    }

    /// The Pod whose directory it is in.
    pub(super) fn pod_uid(&self) -> &OsStr {
        self.inside().iter().nth(1).unwrap_or_default()
    }

    /// The last part of the path.
    pub(super) fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }

    /// The directory that the volume is in, which is the kubelet's. A link on the way is an error.
    pub(super) fn open_parent(&self) -> io::Result<OwnedFd> {
        // The kubelet's directory itself may be a link: its administrator made it.
        let mut directory =
            openat(CWD, &self.kubelet_dir, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty())?;
        for part in self.inside().parent().into_iter().flat_map(Path::iter) {
            directory = openat(&directory, part, DIRECTORY, Mode::empty())?;
        }
        Ok(directory)
    }

    /// The kubelet's own file about the volume.
    pub(super) fn kubelets_file(&self) -> PathBuf {
        self.path.with_file_name(KUBELETS_FILE)
    }
}

/// The name of the kubelet's file beside a volume.
pub(super) const KUBELETS_FILE: &str = "vol_data.json";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn targets_outside_the_kubelets_pods_are_refused() {
        let kubelet = Path::new("/var/lib/kubelet");
        let target = Target::parse("/var/lib/kubelet/pods/7f/volumes/x/mount", kubelet).unwrap();
        assert_eq!((target.pod_uid(), target.name()), (OsStr::new("7f"), OsStr::new("mount")));
        let refused = [
            "",
            "mount",
            "/etc",
            "/var/lib/kubelet",
            "/var/lib/kubelet/pods",
            "/var/lib/kubelet/pods/7f",
            "/var/lib/kubelet/plugins/7f/x",
            "/var/lib/kubelet2/pods/7f/x",
            "/var/lib/kubelet/pods/../../../../etc/x",
            "/var/lib/kubelet/pods/7f/../../x",
            "/var/lib/../lib/kubelet/pods/7f/x",
            "var/lib/kubelet/pods/7f/x",
            "/var/lib/kubelet/pods/7f/x\n",
        ];
        for text in refused {
            let error = Target::parse(text, kubelet).unwrap_err();
            assert!(error.starts_with("target_path") && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn a_link_on_the_way_is_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let kubelet = place.path().join("kubelet");
        fs::create_dir_all(kubelet.join("pods/7f/volumes/a")).unwrap();
        std::os::unix::fs::symlink("a", kubelet.join("pods/7f/volumes/b")).unwrap();
        let open = |volume: &str| {
            let path = kubelet.join("pods/7f/volumes").join(volume).join("mount");
            Target::parse(path.to_str().unwrap(), &kubelet).unwrap().open_parent()
        };
        assert!(open("a").is_ok());
        assert!(open("b").is_err());
        assert_eq!(open("c").unwrap_err().kind(), io::ErrorKind::NotFound);
        // The kubelet's directory itself may be one.
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&kubelet, &link).unwrap();
        let path = link.join("pods/7f/volumes/a/mount");
        assert!(Target::parse(path.to_str().unwrap(), &link).unwrap().open_parent().is_ok());
    }
}
