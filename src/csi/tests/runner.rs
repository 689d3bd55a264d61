//! A runner of which the test decides when there is a certificate.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::auth::token_file::Token;
use crate::csi::{NotStarted, Runner, VolumeId, VolumeWorkload};

#[derive(Debug, Default)]
pub(super) struct FakeRunner {
    state: Mutex<State>,
    /// Whether the CA answers.
    answers: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    running: HashMap<VolumeId, (Arc<VolumeWorkload>, Vec<String>)>,
    started: usize,
    stopped: Vec<VolumeId>,
    refuses: Option<NotStarted>,
    failure: Option<String>,
}

impl FakeRunner {
    /// Whose CA does not answer yet.
    pub(super) fn silent() -> Arc<Self> {
        Arc::default()
    }

    pub(super) fn new() -> Arc<Self> {
        let runner = Self::silent();
        runner.set_answers(true);
        runner
    }

    pub(super) fn set_answers(&self, answers: bool) {
        self.answers.send_replace(answers);
    }

    pub(super) fn set_failure(&self, reason: &str) {
        self.state.lock().unwrap().failure = Some(reason.to_owned());
    }

    pub(super) fn refuse(&self, refusal: Option<NotStarted>) {
        self.state.lock().unwrap().refuses = refusal;
    }

    /// Loses all workloads, as if it had ended them.
    pub(super) fn lose(&self) {
        self.state.lock().unwrap().running.clear();
    }

    pub(super) fn workload(&self, id: &str) -> Option<Arc<VolumeWorkload>> {
        let state = self.state.lock().unwrap();
        state.running.get(&id.parse::<VolumeId>().unwrap()).map(|(workload, _)| Arc::clone(workload))
    }

    /// The tokens that it got.
    pub(super) fn tokens(&self, id: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        state
            .running
            .get(&id.parse::<VolumeId>().unwrap())
            .map(|(_, tokens)| tokens.clone())
            .unwrap_or_default()
    }

    pub(super) fn running(&self) -> usize {
        self.state.lock().unwrap().running.len()
    }

    pub(super) fn started(&self) -> usize {
        self.state.lock().unwrap().started
    }

    pub(super) fn stopped(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        state.stopped.iter().map(|id| id.as_str().to_owned()).collect()
    }
}

#[tonic::async_trait]
impl Runner for FakeRunner {
    async fn start(&self, workload: VolumeWorkload) -> Result<(), NotStarted> {
        let mut state = self.state.lock().unwrap();
        if let Some(refusal) = &state.refuses {
            return Err(refusal.clone());
        }
        state.started += 1;
        let tokens = workload.token.iter().map(|token| token.secret().to_owned()).collect();
        let before = state.running.insert(workload.id.clone(), (Arc::new(workload), tokens));
        assert!(before.is_none(), "the workload runs already");
        Ok(())
    }

    async fn renew_token(&self, id: &VolumeId, token: Token) -> bool {
        let mut state = self.state.lock().unwrap();
        let Some((_, tokens)) = state.running.get_mut(id) else { return false };
        tokens.push(token.secret().to_owned());
        true
    }

    async fn issued(&self, id: &VolumeId) {
        let runs = self.state.lock().unwrap().running.contains_key(id);
        assert!(runs, "only a workload that runs is waited for");
        self.answers.subscribe().wait_for(|answers| *answers).await.unwrap();
    }

    fn failure(&self, _: &VolumeId) -> Option<String> {
        self.state.lock().unwrap().failure.clone()
    }

    async fn stop(&self, id: &VolumeId) {
        let mut state = self.state.lock().unwrap();
        state.running.remove(id);
        state.stopped.push(id.clone());
    }
}
