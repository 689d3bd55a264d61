//! Injects the agent's sidecar into Kubernetes manifests.
//!
//! The text is not rewritten: additions go in at positions that the parser reports, and all other bytes stay. The result
//! is parsed again; it has to be the original plus the sidecar, and nothing else.

// Each module uses only those above it.
mod problem;
mod json;
mod yaml;
mod render;
mod edit;
mod document;
mod workload;
mod sidecar;
mod pod;
mod istio;
mod access;
mod checks;
mod outcome;
mod plan;
mod verify;
#[cfg(any(test, fuzzing))]
pub mod fuzz;

pub use self::outcome::Outcome;
use self::plan::Plan;
pub use self::problem::Problem;
pub use self::sidecar::{NodeVolume, Purpose, Sidecar, Volume};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injected {
    /// The manifests with the sidecar.
    pub text: String,
    /// What was done to each workload.
    pub workloads: Vec<Outcome>,
    /// How many other objects there are, which stay as they are.
    pub others: usize,
    pub warnings: Vec<Problem>,
}

/// Returns `manifests` with the sidecar in each of its workloads.
///
/// # Errors
///
/// When this is not YAML, or a workload is written in a way that leaves no place for the sidecar.
pub fn inject(manifests: &str, sidecar: &Sidecar) -> Result<Injected, Problem> {
    let before = yaml::read(manifests)?;
    let mut plan = Plan::new(manifests);
    for (number, root) in (1..).zip(&before) {
        plan.add(number, root.as_ref(), sidecar)?;
    }
    let Plan { edits, workloads, others, warnings } = plan;
    if edits.is_empty() {
        return Ok(Injected { text: manifests.to_owned(), workloads, others, warnings });
    }
    let text = edits.apply();
    verify::verify(&before, &text, sidecar)?;
    Ok(Injected { text, workloads, others, warnings })
}

#[cfg(test)]
mod tests;
