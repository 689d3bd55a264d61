//! A CA behind a user's command, as `--ca exec` runs it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use attache::pki::pem;
use rustix::fs::{CWD, FileType, mknodat};

use super::files::spiffe;
use super::issuer::{Issuer, Lie};
use super::process::flags;

/// Gets the CSR signed.
pub const GOOD: &str = "cat > csr && cat answer";

/// A CA behind two FIFOs, and a script that writes and reads them.
pub struct Pipes {
    pub directory: PathBuf,
    lie: Arc<Mutex<Lie>>,
}

impl Pipes {
    pub fn start(directory: &Path) -> Self {
        for name in ["csr", "answer"] {
            mknodat(CWD, directory.join(name), FileType::Fifo, 0o600.into(), 0).unwrap();
        }
        let ca = Self { directory: directory.to_owned(), lie: Arc::new(Mutex::new(Lie::None)) };
        let (place, lie) = (ca.directory.clone(), Arc::clone(&ca.lie));
        let issuer = Issuer::new(directory);
        // FIFOs block until both ends are open. The thread ends with the test's process.
        std::thread::spawn(move || {
            while let Ok(csr) = std::fs::read_to_string(place.join("csr")) {
                let lie = *lie.lock().unwrap();
                let leaf = issuer.issue(&csr, Duration::from_secs(120), lie);
                let [intermediate, root] = issuer.chain(lie);
                let _ =
                    std::fs::write(place.join("answer"), pem::of_certificates([&leaf, intermediate, root]));
            }
        });
        ca.set(GOOD, Lie::None);
        ca
    }

    /// Sets what the command does from now on.
    pub fn set(&self, script: &str, lie: Lie) {
        *self.lie.lock().unwrap() = lie;
        std::fs::write(self.directory.join("new"), script).unwrap();
        std::fs::rename(self.directory.join("new"), self.directory.join("script")).unwrap();
    }

    /// The agent's options for it.
    pub fn client(&self) -> Vec<String> {
        let command = format!("cd '{}' && . ./script", self.directory.display());
        let options = [("--ca", "exec"), ("--ca-exec", &command), ("--spiffe-id", &spiffe("web"))];
        flags(options)
    }
}
