//! Thousands of random changes of files, beside a model of what each name must be served as.
//!
//! `ATTACHE_MODEL_STEPS` sets its length, `ATTACHE_MODEL_SEED` repeats a run.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write as _};

use super::*;

/// The number of generations that are written. The last ones have expired.
const GENERATIONS: usize = 12;
const EXPIRED: usize = 2;

/// How long a generation may be published after it was in the files: one that is in them again passes a check before the
/// one between them is published.
const LAG: Duration = Duration::from_secs(1);

/// Known content of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Chain(usize),
    Key(usize),
    Roots(usize),
}

/// What the files of a name hold.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Absent,
    Half,
    Bad,
    Good(Version),
}

/// Where a name's files are.
enum At {
    Pair(PathBuf, PathBuf),
    Roots(PathBuf),
}

/// One name, and what it was served as.
struct Name {
    key: Key,
    /// In the order of their rank.
    places: Vec<At>,
    /// Missing files are a failure.
    is_alone: bool,
    stream: Option<Subscription>,
    records: Vec<Arc<Mutex<Vec<Version>>>>,
    /// Every good generation that its files ever held.
    ever: HashSet<Version>,
    /// Every good generation of late, and when it was one.
    lately: HashMap<Version, Instant>,
    /// What it was served as at the last check.
    served: Option<Version>,
}

/// A part of a change, after which a reader may look.
enum Step {
    Do(Box<dyn FnOnce() -> io::Result<()> + Send>),
    /// Waits until the directory is watched: a writer that begins before that goes unnoticed.
    Settle,
}

struct Model {
    mount: Mount,
    generations: Vec<Files>,
    known: HashMap<Vec<u8>, Content>,
    versions: HashMap<(usize, Vec<u8>), Version>,
    names: Vec<Name>,
    random: fastrand::Rng,
    /// What was done, for the messages of failures.
    log: Vec<String>,
    /// Inotify reports changes, and so writers.
    is_inotify: bool,
    /// Events are lost for the time being.
    is_overflowing: bool,
}

/// The same certificates with comments and other line ends.
fn decorated(pem: &[u8]) -> Vec<u8> {
    let text = String::from_utf8(pem.to_vec()).unwrap().replace('\n', "\r\n");
    format!("# a comment\r\n{text}").into_bytes()
}

impl Model {
    fn new(mount: Mount, is_inotify: bool, seed: u64) -> Self {
        let mut generations: Vec<_> = (0..GENERATIONS - EXPIRED).map(Files::nth).collect();
        let past = Clock::starting_at(Clock::system().now() - 3 * DAY);
        generations.extend((0..EXPIRED).map(|_| Files::at(past.clone())));
        let mut known = HashMap::new();
        for (number, files) in generations.iter().enumerate() {
            for text in [files.chain.clone(), decorated(&files.chain)] {
                known.insert(text, Content::Chain(number));
            }
            known.insert(files.key.clone(), Content::Key(number));
            known.insert(files.root.clone(), Content::Roots(number));
        }
        let random = fastrand::Rng::with_seed(seed);
        let (versions, log) = (HashMap::new(), Vec::new());
        let mut model = Self {
            mount,
            generations,
            known,
            versions,
            names: Vec::new(),
            random,
            log,
            is_inotify,
            is_overflowing: false,
        };
        let (at, lower) = (model.mount.directory(), model.mount.temp.path().join("lower"));
        let around = model.mount.temp.path().join("around");
        symlink("mount", &around).unwrap();
        fs::create_dir(&lower).unwrap();
        let pair = |chain: &Path, key: &Path| At::Pair(chain.join(CHAIN_FILE), key.join(KEY_FILE));
        let roots = |directory: &Path, name: &str| At::Roots(directory.join(name));
        model.add("default", vec![pair(&at, &at), pair(&lower, &lower)]);
        model.add("ROOTCA", vec![roots(&at, ROOT_FILE), roots(&lower, ROOT_FILE)]);
        for at in [pair(&at, &at), pair(&at, &lower), pair(&around, &at)] {
            let At::Pair(chain, key) = &at else { unreachable!() };
            model.add(&format!("file-cert:{}~{}", chain.display(), key.display()), vec![at]);
        }
        for at in [
            roots(&at, ROOT_FILE),
            roots(&around, ROOT_FILE),
            roots(&lower, ROOT_FILE),
            // A chain consists of certificates, too.
            roots(&at, CHAIN_FILE),
        ] {
            let At::Roots(path) = &at else { unreachable!() };
            model.add(&format!("file-root:{}", path.display()), vec![at]);
        }
        model
    }

    fn add(&mut self, name: &str, places: Vec<At>) {
        self.names.push(Name {
            key: key_of(name),
            places,
            is_alone: name.starts_with("file"),
            stream: None,
            records: Vec::new(),
            ever: HashSet::new(),
            lately: HashMap::new(),
            served: None,
        });
    }

    /// What the files of a name hold now.
    fn see(&mut self, number: usize) -> Seen {
        let mut half = Seen::Absent;
        for place in 0..self.names[number].places.len() {
            let seen = self.see_at(number, place);
            match seen {
                Seen::Absent => {}
                Seen::Half => half = Seen::Half,
                seen => return seen,
            }
        }
        half
    }

    fn see_at(&mut self, number: usize, place: usize) -> Seen {
        let read = |path: &PathBuf| match fs::read(path) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let is_valid = |number: usize| number < GENERATIONS - EXPIRED;
        let name = &self.names[number];
        match &name.places[place] {
            At::Pair(chain, key) => {
                let (chain, key) = match (read(chain), read(key)) {
                    (Ok(Some(chain)), Ok(Some(key))) => (chain, key),
                    (Ok(None), Ok(None)) => return Seen::Absent,
                    (Ok(_), Ok(_)) => return Seen::Half,
                    _ => return Seen::Bad,
                };
                match (self.known.get(&chain), self.known.get(&key)) {
                    (Some(Content::Chain(one)), Some(Content::Key(other)))
                        if one == other && is_valid(*one) =>
                    {
                        let version = || pair_version(&name.key.name, &chain, &key);
                        Seen::Good(
                            self.versions.entry((number, chain.clone())).or_insert_with(version).clone(),
                        )
                    }
                    _ => Seen::Bad,
                }
            }
            At::Roots(path) => {
                let roots = match read(path) {
                    Ok(Some(roots)) => roots,
                    Ok(None) => return Seen::Absent,
                    Err(_) => return Seen::Bad,
                };
                let is_roots = match self.known.get(&roots) {
                    // The CA's certificate in an expired chain is still good.
                    Some(Content::Chain(_)) => true,
                    Some(Content::Roots(_)) => true,
                    _ => false,
                };
                if !is_roots {
                    return Seen::Bad;
                }
                let version = || roots_version(&name.key.name, &roots);
                Seen::Good(self.versions.entry((number, roots.clone())).or_insert_with(version).clone())
            }
        }
    }

    /// Records what the files hold now.
    fn note(&mut self) {
        for number in 0..self.names.len() {
            if let Seen::Good(version) = self.see(number) {
                self.names[number].ever.insert(version.clone());
                self.names[number].lately.insert(version, Instant::now());
            }
        }
    }

    /// A random content for the file `name`: good, mostly.
    fn content(&mut self, name: &str) -> Vec<u8> {
        let random = &mut self.random;
        let files = &self.generations[random.usize(0..GENERATIONS)];
        let good = match name {
            CHAIN_FILE => &files.chain,
            KEY_FILE => &files.key,
            _ => &files.root,
        };
        match random.u8(0..12) {
            0 => Vec::new(),
            1 => b"root:x:0:0".to_vec(),
            2 => good[..good.len() / 2].to_vec(),
            3 => der(good),
            4 if name == KEY_FILE => ENCRYPTED.to_vec(),
            4 if name == CHAIN_FILE => decorated(good),
            5 => files.chain.clone(),
            _ => good.clone(),
        }
    }

    /// A random change, in steps.
    fn change(&mut self) -> Vec<Step> {
        fn step(step: impl FnOnce() -> io::Result<()> + Send + 'static) -> Step {
            Step::Do(Box::new(step))
        }
        let upper = self.mount.directory();
        let at = match self.random.u8(0..4) {
            0 => self.mount.temp.path().join("lower"),
            _ => upper.clone(),
        };
        let name = NAMES[self.random.usize(0..3)];
        let path = at.join(name);
        let files = self.generations[self.random.usize(0..GENERATIONS)].clone();
        let beside = at.with_file_name(format!("beside-{}", count()));
        let kind = self.random.u8(0..18);
        self.log.push(format!("{kind} {}", path.strip_prefix(self.mount.temp.path()).unwrap().display()));
        let content = self.content(name);
        match kind {
            0 | 1 => vec![step(move || fs::write(path, content))],
            2 | 3 => vec![
                step({
                    let beside = beside.clone();
                    move || fs::write(beside, content)
                }),
                step(move || fs::rename(beside, path)),
            ],
            // All files, in any order, in place or renamed over.
            4..=7 => {
                let mut each = files.each().map(|(name, content)| (at.join(name), content.to_vec()));
                self.random.shuffle(&mut each);
                let is_renamed = self.random.bool();
                let write = |(number, (path, content)): (usize, (PathBuf, Vec<u8>))| {
                    let beside = beside.with_extension(number.to_string());
                    step(move || match is_renamed {
                        true => fs::write(&beside, content).and_then(|()| fs::rename(beside, path)),
                        false => fs::write(path, content),
                    })
                };
                each.into_iter().enumerate().map(write).collect()
            }
            // As the kubelet does.
            8 | 9 => {
                let name = format!("..{}", count());
                let (directory, at) = (at.join(&name), at);
                vec![
                    step({
                        let directory = directory.clone();
                        move || {
                            fs::create_dir(&directory)?;
                            files
                                .each()
                                .iter()
                                .try_for_each(|(name, text)| fs::write(directory.join(name), text))
                        }
                    }),
                    step({
                        let at = at.clone();
                        move || {
                            let old = fs::read_link(at.join("..data"));
                            symlink(&name, at.join("..new"))?;
                            fs::rename(at.join("..new"), at.join("..data"))?;
                            old.and_then(|old| fs::remove_dir_all(at.join(old)))
                        }
                    }),
                    step(move || {
                        NAMES.iter().try_for_each(|name| {
                            symlink(Path::new("..data").join(name), at.join("..new"))?;
                            fs::rename(at.join("..new"), at.join(name))
                        })
                    }),
                ]
            }
            10 => vec![step(move || fs::remove_file(path))],
            11 => NAMES.map(|name| at.join(name)).map(|path| step(move || fs::remove_file(path))).into(),
            // A link to a file elsewhere, a broken one, or a hard link.
            12 => {
                let how = self.random.u8(0..4);
                vec![
                    step({
                        let beside = beside.clone();
                        move || if how == 0 { Ok(()) } else { fs::write(beside, content) }
                    }),
                    step(move || {
                        let link = path.with_extension("link");
                        match how {
                            1 => fs::hard_link(&beside, &link)?,
                            2 => symlink(Path::new("..").join(beside.file_name().unwrap()), &link)?,
                            _ => symlink(&beside, &link)?,
                        }
                        fs::rename(link, path)
                    }),
                ]
            }
            // The directory is removed, or replaced by another, or by a link to another.
            13 => vec![step(move || fs::remove_file(&upper).or_else(|_| fs::remove_dir_all(&upper)))],
            14 => vec![step(move || fs::create_dir(upper))],
            15 => vec![
                step({
                    let beside = beside.clone();
                    move || {
                        fs::create_dir(&beside)?;
                        files.each().iter().try_for_each(|(name, text)| fs::write(beside.join(name), text))
                    }
                }),
                step({
                    let (upper, is_link, old) = (upper, self.random.bool(), beside.with_extension("old"));
                    move || {
                        // It may not exist.
                        let _ = fs::rename(&upper, old);
                        if is_link { symlink(beside, upper) } else { fs::rename(beside, upper) }
                    }
                }),
            ],
            // Slowly, without closing it. Where it is not noticed that the file is open, no part must be good: with
            // polling, and in a directory that is not watched for writes.
            16 => {
                let good = match name {
                    CHAIN_FILE => files.chain,
                    KEY_FILE => files.key,
                    _ => files.root,
                };
                let end = b"-----END CERTIFICATE-----\n";
                let block = good.windows(end.len()).position(|window| window == end).unwrap_or(good.len());
                // A broken link leads to what is created now.
                let target = fs::read_link(&path).map_or(path.clone(), |target| at.join(target));
                let directory = fs::canonicalize(target.parent().unwrap());
                let is_noticed = self.is_inotify
                    && !self.is_overflowing
                    && directory.is_ok_and(|directory| !self.mount.kernel.is_noisy(&directory));
                let cut = if is_noticed && block < good.len() { block + end.len() } else { block / 2 };
                let rest = Duration::from_millis(self.random.u64(0..30));
                let is_inotify = self.is_inotify;
                let write = step(move || {
                    let mut file = fs::File::create(path)?;
                    file.write_all(&good[..cut])?;
                    if is_inotify {
                        pause(rest);
                    }
                    file.write_all(&good[cut..])
                });
                vec![Step::Settle, write]
            }
            _ => vec![step(move || {
                fs::File::options().write(true).open(path)?.set_modified(SystemTime::UNIX_EPOCH)
            })],
        }
    }

    /// A stream opens or closes, or inotify loses events.
    async fn disturb(&mut self) {
        let number = self.random.usize(2..self.names.len());
        if self.random.u8(0..4) == 0 {
            self.log.push("overflow".to_owned());
            self.mount.kernel.lose_events();
            self.is_overflowing = true;
            return;
        }
        let name = &mut self.names[number];
        self.log.push(format!("stream of {}", name.key.name));
        if name.stream.take().is_none() {
            let stream = self.mount.subscribe(&name.key).await;
            let entry = self.mount.entry(name.key.clone());
            name.served = entry.good.map(|good| good.resource.version.clone());
            name.records.push(record(self.mount.watch(name.key.clone())));
            name.stream = Some(stream);
            if let Seen::Good(version) = self.see(number) {
                self.names[number].lately.insert(version, Instant::now());
            }
        }
    }

    /// Waits until every name is served as its files say, and checks everything that was served meanwhile.
    async fn rest(&mut self, seed: u64) {
        if std::mem::take(&mut self.is_overflowing) {
            self.mount.kernel.report_overflow();
        }
        for number in 0..self.names.len() {
            let seen = self.see(number);
            // A secret may be held back where the other half of its generation is unusable.
            let other = [1, 0].get(number).map(|other| self.see(*other));
            let may_be_held_back = matches!(other, Some(Seen::Bad | Seen::Half));
            let name = &self.names[number];
            if name.stream.is_none() && name.is_alone {
                continue;
            }
            let fits = |entry: &Entry| {
                let version = entry.good.as_ref().map(|good| &good.resource.version);
                let reason = entry.failure();
                let says = |words: &str| reason.as_ref().is_some_and(|reason| reason.contains(words));
                match &seen {
                    Seen::Good(_) if may_be_held_back && says("held back until") => true,
                    Seen::Good(expected) => version == Some(expected) && reason.is_none(),
                    Seen::Absent if version.is_some() => says(REMOVED),
                    Seen::Absent if name.is_alone => says("does not exist") || says("none of"),
                    Seen::Absent => reason.is_none(),
                    Seen::Half => says(", but "),
                    Seen::Bad => reason.is_some() && !says(REMOVED) && !says(", but "),
                }
            };
            let tail = self.log.len().saturating_sub(30);
            let what = || format!("seed {seed}, {} after {:?}: {seen:?}", name.key.name, &self.log[tail..]);
            let entry = self.mount.until(name.key.clone(), &what(), fits).await;
            let version = entry.good.map(|good| good.resource.version.clone());
            let is_newest = match &version {
                Some(version) if name.lately.contains_key(version) => true,
                version => *version == name.served,
            };
            assert!(is_newest, "{}: served is {version:?}, was {:?}", what(), name.served);
            for record in &name.records {
                for version in record.lock().unwrap().drain(..) {
                    assert!(
                        name.ever.contains(&version),
                        "{}: the served version was never in the files",
                        what()
                    );
                }
            }
            let name = &mut self.names[number];
            name.served = version;
            name.lately.retain(|_, good| good.elapsed() < LAG);
            if let Seen::Good(version) = seen {
                name.lately.insert(version, Instant::now());
            }
        }
    }

    async fn run(mut self, steps: usize, debounce: Duration, seed: u64) {
        let lower = Place::in_directory(&self.mount.temp.path().join("lower"), NAMES);
        let mut settings = settings(&self.mount.directory());
        settings.mounted.push(lower);
        settings.debounce = debounce;
        self.mount.follow_with(settings);
        for number in 0..self.names.len() {
            let key = self.names[number].key.clone();
            if key.name.is_on_demand() {
                self.names[number].stream = Some(self.mount.subscribe(&key).await);
            }
            self.names[number].records.push(record(self.mount.watch(key)));
        }
        for _ in 0..steps {
            if self.random.u8(0..8) == 0 {
                self.disturb().await;
            }
            for step in self.change() {
                match step {
                    Step::Settle => {
                        self.mount.kernel.catch_up();
                        tokio::time::sleep(5 * debounce).await;
                    }
                    // A step that fails changes nothing: the model reads the files.
                    Step::Do(step) if self.is_inotify => change(|| drop(step())).await,
                    Step::Do(step) => drop(step()),
                }
                self.note();
                if self.random.u8(0..4) == 0 {
                    tokio::time::sleep(debounce.mul_f64(self.random.f64() * 2.0)).await;
                }
            }
            if self.random.u8(0..3) == 0 {
                self.rest(seed).await;
            }
        }
        self.rest(seed).await;
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

fn seed() -> u64 {
    setting("ATTACHE_MODEL_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000))
}

fn steps(usual: u64) -> usize {
    setting("ATTACHE_MODEL_STEPS").unwrap_or(usual).try_into().unwrap()
}

#[tokio::test]
async fn after_random_changes_the_newest_good_generation_is_served() {
    let seed = seed();
    Model::new(Mount::new(), true, seed).run(steps(600), Duration::from_millis(5), seed).await;
}

#[tokio::test(start_paused = true)]
async fn after_random_changes_without_inotify_the_newest_good_generation_is_served() {
    let seed = seed();
    let mount = Mount::polled();
    Model::new(mount, false, seed).run(steps(1200), DEBOUNCE, seed).await;
}
