//! One version for several names, kept up to date name by name.

use std::fmt;

use crate::secret::Version;

/// The version of a set of names with their versions. For one name it is its own version, for several a sum of hashes, in
/// which any one can be replaced.
#[derive(Clone, Debug, Default)]
pub struct Combined {
    count: usize,
    versions: u128,
    hashes: u128,
}

impl Combined {
    pub fn add(&mut self, name: &str, version: &Version) {
        self.count += 1;
        self.versions = self.versions.wrapping_add(version.number());
        self.hashes = self.hashes.wrapping_add(hash(name, version));
    }

    /// Takes out what was added before.
    pub fn remove(&mut self, name: &str, version: &Version) {
        self.count -= 1;
        self.versions = self.versions.wrapping_sub(version.number());
        self.hashes = self.hashes.wrapping_sub(hash(name, version));
    }
}

fn hash(name: &str, version: &Version) -> u128 {
    Version::of_parts(&[name.as_bytes(), b"\n", &version.number().to_be_bytes()]).number()
}

impl<'a> FromIterator<(&'a str, &'a Version)> for Combined {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a Version)>>(all: I) -> Self {
        let mut combined = Self::default();
        all.into_iter().for_each(|(name, version)| combined.add(name, version));
        combined
    }
}

/// Empty where there are no names.
impl fmt::Display for Combined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            0 => Ok(()),
            1 => Version::from_number(self.versions).fmt(f),
            _ => Version::from_number(self.hashes).fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_is_kept_up_to_date_is_the_same_as_one_made_anew() {
        let names: Vec<String> = (0..20).map(|index| format!("name {index}")).collect();
        let mut random = fastrand::Rng::with_seed(5);
        let mut kept = Combined::default();
        let mut all = std::collections::BTreeMap::<&str, Version>::new();
        for _ in 0..2_000 {
            let name = names[random.usize(..names.len())].as_str();
            if let Some(before) = all.remove(name) {
                kept.remove(name, &before);
            }
            if random.bool() {
                let version = Version::of(&[random.u8(0..4)]);
                kept.add(name, &version);
                all.insert(name, version);
            }
            let anew: Combined = all.iter().map(|(name, version)| (*name, version)).collect();
            assert_eq!(kept.to_string(), anew.to_string());
            match all.values().collect::<Vec<_>>().as_slice() {
                [] => assert_eq!(kept.to_string(), ""),
                [only] => assert_eq!(kept.to_string(), only.to_string()),
                _ => assert!(all.values().all(|version| version.to_string() != kept.to_string())),
            }
        }
    }
}
