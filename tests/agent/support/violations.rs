//! Calls that are not part of the API that a fake serves.

use std::sync::Mutex;

/// Collects violations of a documented API; the fake's `drop` asserts that there were none.
#[derive(Default)]
pub struct Violations(Mutex<Vec<String>>);

impl Violations {
    pub fn add(&self, violation: String) {
        self.0.lock().unwrap().push(violation);
    }

    /// Those so far, which are forgotten.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// Fails the test if there was any, unless it has failed already.
    pub fn assert_none(&self, api: &str) {
        let violations = self.0.lock().unwrap();
        assert!(
            violations.is_empty() || std::thread::panicking(),
            "calls that {api} does not have: {violations:#?}"
        );
    }
}
