//! Prints the identity and the number of its roots, at first and at each update, until it is killed.

use std::error::Error;

use spiffe::{BundleSource as _, X509Source};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let source = X509Source::new().await?;
    let mut updates = source.updated();
    loop {
        let svid = source.svid()?;
        let id = svid.spiffe_id();
        let bundle = source.bundle_for_trust_domain(id.trust_domain())?.ok_or("no bundle")?;
        eprintln!("update: {id} roots={}", bundle.authorities().len());
        updates.changed().await?;
    }
}
