//! The agent's cost of one certificate, without the CA's share, for each key type. Runs in this program, so that the
//! steps can be timed separately; keys and signatures use the same C code in both.

use std::time::{Duration, Instant};

use attache::base::clock::Clock;
use attache::base::spiffe_id::SpiffeId;
use attache::ca::IssuedChain;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::csr;
use attache::pki::key::{KeyFormat, KeyType, SigningKey};
use attache::secret::{Resource, Secret, SecretName};
use attache::store::{Cache, Key, Origin};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// The durations of each step.
#[derive(Default)]
struct Steps {
    key: Vec<Duration>,
    csr: Vec<Duration>,
    check: Vec<Duration>,
    publish: Vec<Duration>,
    together: Vec<Duration>,
    /// A key pair on the wire, in bytes.
    size: [Option<usize>; 2],
}

/// Prints the table.
pub(crate) fn print() {
    let directory = tempfile::tempdir().unwrap();
    let ca = DevelopmentCa::open(directory.path(), Clock::system()).unwrap();
    let all = KeyType::ALL.map(|(_, key_type)| steps(&ca, key_type));
    let row = |name: &str, values: [String; 6]| {
        println!("| {name:<32} | {} |", values.map(|value| format!("{value:>10}")).join(" | "));
    };
    let times = |name: &str, time: fn(&Steps) -> Duration| {
        row(name, all.each_ref().map(|steps| microseconds(time(steps))));
    };
    println!();
    row("one certificate, without the CA", KeyType::ALL.map(|(name, _)| name.to_owned()));
    println!("|{:-<34}|{}", "", format!("{:->11}:|", "").repeat(6));
    times("the key, median", |steps| median(&steps.key));
    times("the key, slowest", |steps| steps.key.iter().copied().max().unwrap());
    times("the CSR", |steps| median(&steps.csr));
    times("checking the answer", |steps| median(&steps.check));
    times("publishing", |steps| median(&steps.publish));
    times("total, median", |steps| median(&steps.together));
    for (format, name) in ["a PKCS#8 key", "a traditional key"].into_iter().enumerate() {
        let size = |steps: &Steps| steps.size[format].map_or("-".to_owned(), |size| format!("{size} B"));
        row(&format!("`Secret` with {name}"), all.each_ref().map(size));
    }
}

fn steps(ca: &DevelopmentCa, key_type: KeyType) -> Steps {
    let rounds = if key_type.is_slow() { 15 } else { 200 };
    let identity: SpiffeId = "spiffe://cluster.local/ns/default/sa/bench".parse().unwrap();
    let (cache, workload) = Cache::with_workload("");
    let publishers = [SecretName::Workload, SecretName::Roots]
        .map(|name| cache.publisher(Key { workload, name }, Origin::CA));
    let mut steps = Steps::default();
    for _ in 0..rounds {
        let (key, took) = timed(|| SigningKey::generate(key_type).unwrap());
        steps.key.push(took);
        let (request, took) = timed(|| csr::request(&key, Some(&identity), &csr::Names::default()).unwrap());
        steps.csr.push(took);
        let leaf = ca.issue(&request, &identity, DAY).unwrap();
        let [intermediate, root] = ca.chain();
        let answer =
            || IssuedChain { chain: vec![leaf.clone(), intermediate.clone()], roots: vec![root.clone()] };
        let now = Clock::system().now();
        let check =
            |answer: IssuedChain, key| answer.check(key, Some(&identity), &csr::Names::default(), now);
        let ((pair, bundle), took) = timed(|| check(answer(), key.to_private_key()).unwrap());
        steps.check.push(took);
        steps.size = [KeyFormat::Pkcs8, KeyFormat::Traditional].map(|format| {
            let (pair, _) = check(answer(), key.to_private_key().in_format(format).ok()?).unwrap();
            Some(Resource::encode(&SecretName::Workload, &Secret::KeyPair(pair)).payload.bytes().len())
        });
        let ((), took) = timed(|| {
            publishers[1].publish(Secret::TrustBundle(bundle), now, None);
            publishers[0].publish(Secret::KeyPair(pair), now, None);
        });
        steps.publish.push(took);
        let all = [&steps.key, &steps.csr, &steps.check, &steps.publish];
        steps.together.push(all.iter().filter_map(|step| step.last()).sum());
    }
    steps
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let started = Instant::now();
    let result = work();
    (result, started.elapsed())
}

fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2]
}

fn microseconds(time: Duration) -> String {
    match time.as_secs_f64() * 1e6 {
        long if long >= 1e4 => format!("{:.0} ms", long / 1e3),
        short => format!("{short:.0} µs"),
    }
}
