//! Secrets from files: read as one generation, checked as exactly those bytes, published when they fit.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::base::clock::{Clock, rfc3339};
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::file;
use crate::fs::generation::{FileError, Found, Generation, NAMES, Place, Places};
use crate::fs::watch::{Activity, Watch, Watcher};
use crate::metrics::{BySource, Metrics};
use crate::secret::{Secret, SecretName};
use crate::store::{Cache, Key, Origin, Published, Publisher, Workload};

/// The names that GKE's workload certificates have.
const GKE_NAMES: [&str; 3] = ["certificates.pem", "private_key.pem", "ca_certificates.pem"];
/// Where Istio's agent looks for certificates that the platform has mounted.
pub const PLATFORM_FOLDER: &str = "/var/run/secrets/workload-spiffe-credentials";

/// Where Linux distributions have the roots that they trust, in one file: Debian and Alpine, Fedora and RHEL, CentOS,
/// openSUSE, OpenELEC; the last is Alpine's and macOS's.
const SYSTEM_ROOTS: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
];

/// How long a file is waited for that somebody has written to and keeps open, without doing anything more.
const OPEN_PATIENCE: Duration = Duration::from_secs(5);
/// Why there is nothing newer than what is served, once there are no files any more.
const GONE: &str = "the files are gone; what they held is served until it expires";
/// The pause after a look that brought nothing; it doubles up to a tenth of the debounce window.
const PAUSE: Duration = Duration::from_millis(1);

/// The places of `default` and `ROOTCA` in `folder`. GKE's file names are known where its certificates are mounted.
pub fn places(folder: &Path) -> Vec<Place> {
    let mut places = vec![Place::folder(folder, NAMES)];
    if folder == Path::new(PLATFORM_FOLDER) {
        places.push(Place::folder(folder, GKE_NAMES));
    }
    places
}

/// Which files are served, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where `default` and `ROOTCA` are, in the order of their rank.
    pub mounted: Vec<Place>,
    /// There is no CA: what is not there is a failure.
    pub is_alone: bool,
    /// At most one publish of a secret in each such span.
    pub debounce: Duration,
    /// Where the agent itself writes: what lies there, after all links, is not served.
    pub own: Vec<PathBuf>,
    /// Where files that are asked for by name must lie; anywhere if empty.
    pub prefixes: Vec<PathBuf>,
    /// The file of the system's roots, instead of those that distributions have (`SSL_CERT_FILE`).
    pub system_roots: Option<PathBuf>,
}

/// Serves `default` and `ROOTCA` from mounted files, and the files that streams name.
#[derive(Debug)]
pub struct FileSource {
    settings: Settings,
    mounted: Set,
    tools: Tools,
}

/// What every set needs.
#[derive(Clone, Debug)]
struct Tools {
    cache: Cache,
    watcher: Watcher,
    debounce: Duration,
    clock: Clock,
    metrics: Metrics,
}

/// Files that are read together, and the secrets that they give.
#[derive(Debug)]
struct Set {
    places: Places,
    watch: Watch,
    key_pair: Option<Feed>,
    roots: Option<Feed>,
    /// Whether the leaf reaches the roots.
    chained: FailureLog,
    tools: Tools,
}

/// One secret's way into the cache, and what was said of it last.
#[derive(Debug)]
struct Feed {
    name: SecretName,
    publisher: Publisher,
    /// Nobody else gives it: that there is no file is a failure.
    is_alone: bool,
    repeats: FailureLog,
    /// The place that it was served from last, if that is still there.
    rank: Option<usize>,
    /// When its value changed last.
    published: Option<Instant>,
}

impl FileSource {
    /// A source that publishes to `cache`.
    pub fn new(
        settings: Settings,
        cache: &Cache,
        workload: Workload,
        watcher: Watcher,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let debounce = settings.debounce;
        let tools = Tools { cache: cache.clone(), watcher, debounce, clock, metrics };
        let places = Places { own: settings.own.clone(), ..Places::new(settings.mounted.clone()) };
        let feed = |name| Some(Feed::new(cache, Key { workload, name }, settings.is_alone));
        let mounted = tools.clone().set(places, feed(SecretName::Workload), feed(SecretName::Roots));
        Self { settings, mounted, tools }
    }

    /// Publishes what is mounted now, so that no CA is asked for what files give.
    pub fn publish_once(&mut self) {
        tell_of_own(&self.mounted.places);
        let generation = self.mounted.look();
        self.mounted.publish(generation);
    }

    /// Follows every change for ever, of what is mounted and of what streams ask for.
    pub async fn run(self) {
        let Self { settings, mounted, tools } = self;
        let mut demand = tools.cache.demand();
        let mut sets = JoinSet::new();
        // The first look: the files may have changed since `publish_once`, when nobody watched yet.
        sets.spawn(mounted.run(true));
        loop {
            tokio::select! {
                Some(key) = demand.recv() => {
                    let places = places_of(&key.name, &settings);
                    drop(sets.spawn(tools.clone().serve(key, places)));
                }
                Some(ended) = sets.join_next() => {
                    if let Err(error) = ended {
                        std::panic::resume_unwind(error.into_panic());
                    }
                }
            }
        }
    }
}

/// Else somebody would look for what is wrong with files that are there and good.
fn tell_of_own(places: &Places) {
    for path in places.paths() {
        if file::lies_in(&path, &places.own) {
            tracing::warn!(path = %path.display(), "this leads to where the agent itself writes; it is not read");
        }
    }
}

/// The files behind a name that is asked for.
fn places_of(name: &SecretName, settings: &Settings) -> Places {
    // Whoever reads of it does not know where the agent runs.
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let roots = |path: &Path| Place { roots: Some(absolute(path)), key_pair: None };
    let named = |place| {
        let (inside, own) = (settings.prefixes.clone(), settings.own.clone());
        Places { inside, own, ..Places::new(vec![place]) }
    };
    match name {
        SecretName::FileKeyPair(name) => {
            let key_pair = Some((absolute(name.chain()), absolute(name.key())));
            named(Place { key_pair, roots: None })
        }
        SecretName::FileRoots(name) => named(roots(name.path())),
        SecretName::SystemRoots => {
            let known = || SYSTEM_ROOTS.map(|path| roots(path.as_ref())).to_vec();
            let ranked = settings.system_roots.as_deref().map_or_else(known, |path| vec![roots(path)]);
            Places { is_lenient: true, ..Places::new(ranked) }
        }
        // Nobody asks for these: they are there from the start.
        SecretName::Workload | SecretName::Roots => named(Place::default()),
    }
}

impl Tools {
    fn set(self, places: Places, key_pair: Option<Feed>, roots: Option<Feed>) -> Set {
        let watch = self.watcher.watch(places.paths());
        Set { places, watch, key_pair, roots, chained: FailureLog::default(), tools: self }
    }

    /// Serves a name that somebody asked for, until nobody has been there for a while.
    async fn serve(self, key: Key, places: Places) {
        tell_of_own(&places);
        let feed = Some(Feed::new(&self.cache, key.clone(), true));
        let (cache, metrics) = (self.cache.clone(), self.metrics.clone());
        let publisher = cache.publisher(key.clone(), Origin::Files);
        let retired = async {
            loop {
                publisher.deserted().await;
                if cache.retire(&key) {
                    return;
                }
            }
        };
        let (key_pair, roots) = match &key.name {
            SecretName::FileKeyPair(_) => (feed, None),
            _ => (None, feed),
        };
        let set = self.set(places, key_pair, roots);
        tokio::select! {
            () = set.run(false) => {}
            () = retired => {}
        }
        metrics.forget(key.name.as_str());
        tracing::debug!(name = %key.name, "no longer followed: nobody asks for it any more");
    }
}

impl Set {
    fn feeds(&self) -> impl Iterator<Item = &Feed> {
        self.roots.iter().chain(&self.key_pair)
    }

    fn look(&self) -> Generation {
        self.places.look(self.tools.clock.now())
    }

    /// Follows every change for ever. What the first look finds is told at once if `settled`.
    async fn run(mut self, mut settled: bool) {
        let debounce = self.tools.debounce;
        let mut doubtful_since: Option<Instant> = None;
        let mut quiet_since: Option<Instant> = None;
        let mut is_restless = false;
        let mut pause = PAUSE;
        loop {
            self.watch.arm();
            let generation = self.look();
            let looked = Instant::now();
            let is_past =
                |since: Option<Instant>, patience| since.is_some_and(|since| looked - since > patience);
            // What is read while somebody writes it may be half of what it will be.
            let activity = self.watch.activity();
            let is_enough = match activity {
                Activity::None => {
                    settled || is_past(doubtful_since, 10 * debounce) || self.is_whole(&generation)
                }
                Activity::Open => is_past(quiet_since, OPEN_PATIENCE),
                Activity::Change => false,
            };
            if is_enough {
                // Not at other times: one that has begun since the look must not be forgotten.
                if activity == Activity::Open {
                    self.watch.forget_writers();
                }
                (doubtful_since, quiet_since, is_restless) = (None, None, false);
                let starts = generation.key_pair.starts();
                if self.publish(generation) {
                    pause = PAUSE;
                }
                let next = starts.into_iter().chain(self.ends()).min();
                let its_time = async {
                    match next {
                        Some(moment) => self.tools.clock.sleep_until(moment).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = self.watch.changed() => {}
                    () = its_time => {}
                }
                // At most one publish in each window; what comes in between is folded into the next.
                let published = self.feeds().filter_map(|feed| feed.published).max();
                let window = published.map(|at| debounce.saturating_sub(at.elapsed())).unwrap_or_default();
                if !window.is_zero() {
                    tokio::time::sleep(window).await;
                }
                settled = false;
            } else {
                // Half of a change, most likely. If nothing completes it within the window, it is told; so it is if
                // it goes on changing and does not get any better.
                if is_past(doubtful_since, OPEN_PATIENCE) && !std::mem::replace(&mut is_restless, true) {
                    self.tell_restless();
                }
                doubtful_since.get_or_insert(looked);
                settled = tokio::time::timeout(debounce, self.watch.changed()).await.is_err();
                quiet_since = quiet_since.filter(|_| settled).or(settled.then(Instant::now));
            }
            // A file that changes all the time, to nothing of use, must not keep us busy.
            let rest = pause.saturating_sub(looked.elapsed());
            if !rest.is_zero() {
                tokio::time::sleep(rest).await;
            }
            pause = (2 * pause).min(debounce / 10);
        }
    }

    /// Whether this can be taken for a whole generation, and not for a half of a change.
    fn is_whole(&self, generation: &Generation) -> bool {
        let Generation { key_pair, roots } = generation;
        let is_mixed = match (key_pair.good(), roots.good()) {
            (Some(pair), Some(roots)) => roots.verify(pair, self.tools.clock.now()).is_err(),
            _ => false,
        };
        self.key_pair.as_ref().is_none_or(|feed| feed.expects(key_pair))
            && self.roots.as_ref().is_none_or(|feed| feed.expects(roots))
            && !is_mixed
    }

    /// When what is served ceases to be valid: something is to be told then, though nothing changes.
    fn ends(&self) -> impl Iterator<Item = SystemTime> {
        let now = self.tools.clock.now();
        self.feeds().filter_map(Feed::served).filter(move |moment| *moment > now)
    }

    /// Publishes what is good and tells what is not. True if something new was published.
    fn publish(&mut self, generation: Generation) -> bool {
        let now = self.tools.clock.now();
        self.tell_mixture(&generation, now);
        let Generation { key_pair, roots } = generation;
        let mut is_news = false;
        // Roots first, as with a CA's answer.
        if let (Some(feed), Some(pair)) = (&self.key_pair, key_pair.good()) {
            feed.publisher.announce(pair, now);
        }
        if let Some(feed) = &mut self.roots {
            is_news |= feed.take(roots.map(Secret::TrustBundle), now, &self.places, &self.tools.metrics);
        }
        if let Some(feed) = &mut self.key_pair {
            is_news |= feed.take(key_pair.map(Secret::KeyPair), now, &self.places, &self.tools.metrics);
        }
        is_news
    }

    /// What goes on changing may be half of something at every look.
    fn tell_restless(&mut self) {
        let error = FileError::Restless { paths: self.places.paths() };
        for feed in self.roots.iter_mut().chain(&mut self.key_pair) {
            feed.fail(&error, &self.tools.metrics);
        }
    }

    /// Files often pair one CA's certificate with the roots of the peers' CA, so this is no mistake by itself.
    fn tell_mixture(&mut self, generation: &Generation, now: SystemTime) {
        let (Some(pair), Some(roots)) = (generation.key_pair.good(), generation.roots.good()) else { return };
        match roots.verify(pair, now) {
            Ok(()) => drop(self.chained.recovered()),
            Err(unchained) => {
                if self.chained.is_new(&unchained.to_string()) {
                    tracing::warn!(
                        reason = %unchained,
                        "the mounted certificate does not reach the mounted roots; both are served as they are: peers \
                         with the same roots will refuse it"
                    );
                }
            }
        }
    }
}

impl Feed {
    fn new(cache: &Cache, key: Key, is_alone: bool) -> Self {
        let name = key.name.clone();
        let publisher = cache.publisher(key, Origin::Files);
        Self { name, publisher, is_alone, repeats: FailureLog::default(), rank: None, published: None }
    }

    /// Whether `found` may be all there is to come: it is good, and no less than before.
    fn expects<T>(&self, found: &Found<T>) -> bool {
        match &found.secret {
            Ok(Some(_)) => self.rank.is_none_or(|before| found.rank <= before),
            Ok(None) => self.rank.is_none(),
            Err(_) => false,
        }
    }

    fn has_value(&self) -> bool {
        self.publisher.entry().good.is_some()
    }

    /// True if it published something new.
    fn take(&mut self, found: Found<Secret>, now: SystemTime, places: &Places, metrics: &Metrics) -> bool {
        let is_pair = matches!(self.name, SecretName::Workload | SecretName::FileKeyPair(_));
        // A client's text, perhaps: the log quotes it, so that it can't pass for more than a name.
        let name = limits::sanitize_for_log(self.name.as_str());
        match found.secret {
            Ok(Some(secret)) => {
                let what = secret.to_string();
                let not_after = rfc3339(secret.not_after());
                let before = self.publisher.entry().good.map(|good| good.origin);
                self.repeats.recovered();
                self.rank = Some(found.rank);
                let is_news = self.publisher.publish(secret, now, None) == Published::Changed;
                if is_news {
                    self.published = Some(Instant::now());
                    let from = places.shown(found.rank);
                    let instead_of = before.filter(|before| *before != Origin::Files);
                    let instead_of = instead_of.map(tracing::field::display);
                    tracing::info!(name, from, instead_of, what, %not_after, "served from files");
                }
                is_news
            }
            Ok(None) => {
                if self.rank.take().is_some() {
                    tracing::warn!(name, "{GONE}");
                    self.repeats.recovered();
                    self.publisher.release(Some(GONE.to_owned()));
                } else if self.is_alone && !self.has_value() {
                    self.fail(&places.missing(is_pair), metrics);
                } else if self.repeats.recovered() {
                    tracing::info!(name, "the files that could not be used are gone");
                    // What is served may be of files that were gone before.
                    let good = self.publisher.entry().good;
                    let is_left = good.is_some_and(|good| good.origin == Origin::Files);
                    self.publisher.release(is_left.then(|| GONE.to_owned()));
                }
                false
            }
            Err(error) => {
                self.fail(&error, metrics);
                if !self.is_alone
                    && self.served().is_some_and(|ends| ends <= now)
                    && self.rank.take().is_some()
                {
                    tracing::warn!(
                        name,
                        "what the files gave has expired, and nobody has renewed it: the CA takes over"
                    );
                    self.publisher.release(Some(error.to_string()));
                }
                false
            }
        }
    }

    /// When the value ends that files gave and that is served.
    fn served(&self) -> Option<SystemTime> {
        let good = self.publisher.entry().good.filter(|good| good.origin == Origin::Files)?;
        Some(good.secret.not_after())
    }

    fn fail(&mut self, error: &FileError, metrics: &Metrics) {
        let reason = error.to_string();
        let label = BySource { source: "files", reason: error.label() };
        metrics.source_failures.get_or_create(&label).inc();
        if self.repeats.is_new(&reason) {
            let (name, is_asked_for) =
                (limits::sanitize_for_log(self.name.as_str()), self.name.is_on_demand());
            let what = match (is_asked_for, self.has_value()) {
                (false, true) => "mounted files are not used; what was served before stays",
                (false, false) => "mounted files are not used, and there is nothing else to serve yet",
                (true, true) => "files that were asked for are not used; what was served before stays",
                (true, false) => "files that were asked for can't be served yet",
            };
            tracing::warn!(name, reason = limits::sanitize_for_log(&reason), "{what}");
        }
        self.publisher.fail(reason);
    }
}

#[cfg(test)]
mod tests;
