//! What disturbs the agent, by turns of a few seconds.

mod ca;
pub mod disks;
mod files;
mod frames;
pub mod peers;

use fastrand::Rng;

use super::stage::Stage;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    UnknownNames,
    MissingFiles,
    Spellings,
    LongNames,
    Alternation,
    Deaf,
    NoNode,
    Rejections,
    Garbage,
    BrokenFrames,
    Floods,
    Churn,
    Bundles,
    SlowStatus,
    AdminCalls,
    Swaps,
    Rewrites,
    HalfWrites,
    Noise,
    CaHangs,
    CaUnreachable,
    CaRefuses,
    CaLies,
    CaBreaks,
    CaTrickles,
    DeadNames,
    DeadVolume,
    DeadToken,
    DeadOutput,
}

/// What a turn needs for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Volume,
    Ca,
    Mounts,
}

impl Turn {
    pub const ALL: [Self; 29] = [
        Self::UnknownNames,
        Self::MissingFiles,
        Self::Spellings,
        Self::LongNames,
        Self::Alternation,
        Self::Deaf,
        Self::NoNode,
        Self::Rejections,
        Self::Garbage,
        Self::BrokenFrames,
        Self::Floods,
        Self::Churn,
        Self::Bundles,
        Self::SlowStatus,
        Self::AdminCalls,
        Self::Swaps,
        Self::Rewrites,
        Self::HalfWrites,
        Self::Noise,
        Self::CaHangs,
        Self::CaUnreachable,
        Self::CaRefuses,
        Self::CaLies,
        Self::CaBreaks,
        Self::CaTrickles,
        Self::DeadNames,
        Self::DeadVolume,
        Self::DeadToken,
        Self::DeadOutput,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::UnknownNames => "unknown-names",
            Self::MissingFiles => "missing-files",
            Self::Spellings => "spellings",
            Self::LongNames => "long-names",
            Self::Alternation => "alternation",
            Self::Deaf => "deaf",
            Self::NoNode => "no-node",
            Self::Rejections => "rejections",
            Self::Garbage => "garbage",
            Self::BrokenFrames => "broken-frames",
            Self::Floods => "floods",
            Self::Churn => "churn",
            Self::Bundles => "bundles",
            Self::SlowStatus => "slow-status",
            Self::AdminCalls => "admin-calls",
            Self::Swaps => "swaps",
            Self::Rewrites => "rewrites",
            Self::HalfWrites => "half-writes",
            Self::Noise => "noise",
            Self::CaHangs => "ca-hangs",
            Self::CaUnreachable => "ca-unreachable",
            Self::CaRefuses => "ca-refuses",
            Self::CaLies => "ca-lies",
            Self::CaBreaks => "ca-breaks",
            Self::CaTrickles => "ca-trickles",
            Self::DeadNames => "dead-names",
            Self::DeadVolume => "dead-volume",
            Self::DeadToken => "dead-token",
            Self::DeadOutput => "dead-output",
        }
    }

    fn subjects(self) -> &'static [Subject] {
        match self {
            Self::Swaps | Self::Rewrites | Self::HalfWrites | Self::Noise => &[Subject::Volume],
            Self::CaHangs
            | Self::CaUnreachable
            | Self::CaRefuses
            | Self::CaLies
            | Self::CaBreaks
            | Self::CaTrickles => &[Subject::Ca],
            Self::DeadNames => &[Subject::Mounts],
            Self::DeadVolume => &[Subject::Mounts, Subject::Volume],
            Self::DeadToken | Self::DeadOutput => &[Subject::Mounts, Subject::Ca],
            _ => &[],
        }
    }

    /// Whether the two can't be played together.
    pub fn excludes(self, other: Self) -> bool {
        self.subjects().iter().any(|subject| other.subjects().contains(subject))
    }

    /// Whether it mounts a file system that does not answer.
    pub fn mounts(self) -> bool {
        self.subjects().contains(&Subject::Mounts)
    }

    /// Plays it to its end. What the agent owes to the turn itself is asserted here.
    pub async fn play(self, stage: &Stage, random: &mut Rng) {
        match self {
            Self::UnknownNames => peers::unknown_names(stage, random).await,
            Self::MissingFiles => peers::missing_files(stage, random).await,
            Self::Spellings => peers::spellings(stage, random).await,
            Self::LongNames => peers::long_names(stage, random).await,
            Self::Alternation => peers::alternation(stage, random).await,
            Self::Deaf => peers::deaf(stage, random).await,
            Self::NoNode => peers::no_node(stage).await,
            Self::Rejections => peers::rejections(stage).await,
            Self::Garbage => frames::garbage(stage, random).await,
            Self::BrokenFrames => frames::broken_frames(stage, random).await,
            Self::Floods => frames::floods(stage).await,
            Self::Churn => peers::churn(stage, random).await,
            Self::Bundles => files::bundles(stage, random).await,
            Self::SlowStatus => peers::slow_status(stage, random).await,
            Self::AdminCalls => peers::admin_calls(stage, random).await,
            Self::Swaps => files::swaps(stage, random).await,
            Self::Rewrites => files::rewrites(stage, random).await,
            Self::HalfWrites => files::half_writes(stage, random).await,
            Self::Noise => files::noise(stage, random).await,
            Self::CaHangs => ca::hangs(stage, random).await,
            Self::CaUnreachable => ca::unreachable(stage, random).await,
            Self::CaRefuses => ca::refuses(stage, random).await,
            Self::CaLies => ca::lies(stage, random).await,
            Self::CaBreaks => ca::breaks(stage, random).await,
            Self::CaTrickles => ca::trickles(stage, random).await,
            Self::DeadNames => disks::dead_names(stage, random).await,
            Self::DeadVolume => disks::dead_volume(stage, random).await,
            Self::DeadToken => disks::dead_token(stage, random).await,
            Self::DeadOutput => disks::dead_output(stage, random).await,
        }
    }
}
