//! What one `--output` says: `DIR[,KEY=VALUE]…`.

use std::collections::BTreeMap;

use super::{CERT_MODE, KEY_MODE, absolute};
use crate::base::text;
use crate::config::parse_mode;
use crate::export::output::{DirectorySettings, Format, Keystore, KeystoreKind, Owner};
use crate::os::users::{group_id, user_id};

/// The formats, each with the keys that name its files and what is in them.
const FORMATS: [(&str, &[&str]); 4] = [
    ("pem", &["cert-file", "key-file", "root-file"]),
    ("combined", &["file", "root-file"]),
    ("pkcs12", &["file", "root-file", "alias", "password-file"]),
    ("jks", &["file", "root-file", "alias", "password-file"]),
];
/// Keys that each format has.
const COMMON: [&str; 5] = ["format", "mode", "cert-mode", "owner", "group"];
/// The mode of files with a key that a group is to read.
const GROUP_KEY_MODE: u32 = 0o640;
/// Bytes of a file's name, and characters of an alias.
const NAME_LENGTH: usize = 255;

/// The output that `text` describes.
pub(super) fn parse(text: &str) -> Result<DirectorySettings, String> {
    let mut parts = text.split(',');
    let directory = parts.next().unwrap_or_default();
    if directory.is_empty() || directory.contains('=') {
        return Err(format!("{text:?} begins with no directory; the shape is DIR,format=pkcs12,owner=USER"));
    }
    if matches!(text, "json" | "table") {
        return Err(format!(
            "{text:?} is a format of other commands: name a directory (./{text} for one of that name)"
        ));
    }
    let mut values = Values(BTreeMap::new());
    for part in parts {
        let (key, value) = part.split_once('=').ok_or_else(|| {
            format!(
                "{part:?} is not KEY=VALUE (the path of a directory has no comma here); keys are {}",
                all_keys()
            )
        })?;
        if !is_key(key) {
            return Err(format!("there is no {key:?}{}; keys are {}", suggestion(key), all_keys()));
        }
        if value.is_empty() {
            return Err(format!("{key} is empty: give it a value, or leave it out"));
        }
        if values.0.insert(key, value).is_some() {
            return Err(format!("{key} is given twice"));
        }
    }
    values.settings(directory)
}

fn is_key(key: &str) -> bool {
    COMMON.contains(&key) || FORMATS.iter().any(|(_, keys)| keys.contains(&key))
}

fn keys() -> Vec<&'static str> {
    let mut keys: Vec<_> =
        COMMON.into_iter().chain(FORMATS.iter().flat_map(|(_, keys)| *keys).copied()).collect();
    let mut seen = std::collections::BTreeSet::new();
    keys.retain(|key| seen.insert(*key));
    keys
}

fn all_keys() -> String {
    keys().join(", ")
}

/// The key that was probably meant.
fn suggestion(key: &str) -> String {
    text::closest(key, keys()).map(|known| format!(" (did you mean {known}?)")).unwrap_or_default()
}

/// The values by their keys.
struct Values<'a>(BTreeMap<&'a str, &'a str>);

impl Values<'_> {
    fn settings(&self, directory: &str) -> Result<DirectorySettings, String> {
        let format = self.0.get("format").copied().unwrap_or("pem");
        let Some((_, own)) = FORMATS.iter().find(|(name, _)| *name == format) else {
            let names = FORMATS.map(|(name, _)| name).join(", ");
            return Err(format!("{format:?} is not a format; choose one of {names}"));
        };
        if let Some(key) = self.0.keys().find(|key| !COMMON.contains(key) && !own.contains(key)) {
            let takers: Vec<_> =
                FORMATS.iter().filter(|(_, keys)| keys.contains(key)).map(|(name, _)| *name).collect();
            return Err(format!(
                "{key} is for format={}, and this is format={format}: set that format, or drop the key",
                takers.join(" and format=")
            ));
        }
        let format = match format {
            "combined" => Format::Combined {
                file: self.file("file", "combined.pem")?,
                roots: self.root("root-cert.pem")?,
            },
            "pkcs12" => self.keystore(KeystoreKind::Pkcs12, ["keystore.p12", "truststore.p12"])?,
            "jks" => self.keystore(KeystoreKind::Jks, ["keystore.jks", "truststore.jks"])?,
            _ => Format::Pem {
                chain: self.file("cert-file", "cert-chain.pem")?,
                key: self.file("key-file", "key.pem")?,
                roots: self.root("root-cert.pem")?,
            },
        };
        let mut names = format.names();
        names.sort_unstable();
        if let Some([name, _]) = names.array_windows().find(|[one, next]| one == next) {
            return Err(format!("two files have the name {name:?}: give each its own"));
        }
        let owner = self.owner()?;
        let key_mode = if owner.group.is_some() { GROUP_KEY_MODE } else { KEY_MODE };
        Ok(DirectorySettings {
            option: "--output",
            directory: absolute(directory),
            format,
            key_mode: self.mode("mode")?.unwrap_or(key_mode),
            cert_mode: self.mode("cert-mode")?.unwrap_or(CERT_MODE),
            owner,
        })
    }

    fn keystore(&self, kind: KeystoreKind, [file, roots]: [&str; 2]) -> Result<Format, String> {
        let password_file = self.0.get("password-file").map(absolute);
        let (file, roots) = (self.file("file", file)?, self.root(roots)?);
        Ok(Format::Keystore(Keystore { kind, file, roots, alias: self.alias()?, password_file }))
    }

    /// Java compares aliases without regard to case, and looks them up in lower case.
    fn alias(&self) -> Result<String, String> {
        let alias = self.0.get("alias").copied().unwrap_or("default");
        if alias.len() > NAME_LENGTH || !alias.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("alias {alias:?} is not {NAME_LENGTH} printable ASCII characters at most"));
        }
        let alias = alias.to_ascii_lowercase();
        if alias.starts_with("root-") {
            return Err(format!(
                "alias {alias} may be that of a root (root-1, root-2, \u{2026}): choose another"
            ));
        }
        Ok(alias)
    }

    fn root(&self, default: &str) -> Result<String, String> {
        self.file("root-file", default)
    }

    /// The name of a file in the directory.
    fn file(&self, key: &str, default: &str) -> Result<String, String> {
        let name = self.0.get(key).copied().unwrap_or(default);
        if name.contains('/') || name == "." || name.len() > NAME_LENGTH {
            return Err(format!("{key} {name:?} is not the name of a file in the directory"));
        }
        if name.starts_with("..") {
            return Err(format!("{key} {name:?} begins with two dots, as the agent's own entries there do"));
        }
        Ok(name.to_owned())
    }

    fn mode(&self, key: &str) -> Result<Option<u32>, String> {
        let mode = self.0.get(key).map(|mode| parse_mode(mode)).transpose();
        mode.map_err(|error| format!("{key}: {error}"))
    }

    /// `owner=USER`, `owner=USER:GROUP` or `group=GROUP`.
    fn owner(&self) -> Result<Owner, String> {
        let owner = self.0.get("owner").copied();
        let (user, beside) = match owner.map(|owner| owner.split_once(':').ok_or(owner)) {
            Some(Ok((user, group))) => (Some(user), Some(group)),
            Some(Err(user)) => (Some(user), None),
            None => (None, None),
        };
        let group = self.0.get("group").copied();
        if beside.is_some() && group.is_some() {
            return Err("owner and group both name a group: drop one of them".to_owned());
        }
        let user = user.map(user_id).transpose().map_err(|error| format!("owner: {error}"))?;
        let group = beside.or(group).map(group_id).transpose();
        let group = group
            .map_err(|error| format!("{}: {error}", if beside.is_some() { "owner" } else { "group" }))?;
        Ok(Owner { user, group })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn keystore(format: &Format) -> &Keystore {
        match format {
            Format::Keystore(keystore) => keystore,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_output_is_a_directory_with_defaults_for_each_format() {
        let names = |text: &str| parse(text).unwrap().format.names();
        assert_eq!(names("/out"), ["cert-chain.pem", "key.pem", "root-cert.pem"]);
        assert_eq!(names("/out,format=pem"), names("/out"));
        assert_eq!(names("/out,format=combined"), ["combined.pem", "root-cert.pem"]);
        assert_eq!(names("/out,format=pkcs12"), ["keystore.p12", "truststore.p12"]);
        assert_eq!(names("/out,format=jks"), ["keystore.jks", "truststore.jks"]);
        assert_eq!(
            names("/out,key-file=server.key,cert-file=server.crt,root-file=ca.crt"),
            ["server.crt", "server.key", "ca.crt"]
        );
        let settings = parse("out").unwrap();
        assert!(settings.directory.is_absolute() && settings.directory.ends_with("out"));
        assert_eq!((settings.key_mode, settings.cert_mode, settings.owner), (0o600, 0o644, Owner::default()));
        let settings = parse(
            "/out,format=jks,file=k.jks,alias=Web,password-file=/pw,owner=root,mode=0440,cert-mode=444",
        );
        let settings = settings.unwrap();
        let found = keystore(&settings.format);
        assert_eq!(
            (found.kind, found.file.as_str(), found.alias.as_str()),
            (KeystoreKind::Jks, "k.jks", "web")
        );
        assert_eq!(found.password_file.as_deref(), Some(Path::new("/pw")));
        assert_eq!(settings.owner, Owner { user: Some(0), group: None });
        assert_eq!((settings.key_mode, settings.cert_mode), (0o440, 0o444));
        assert_eq!(keystore(&parse("/out,format=pkcs12").unwrap().format).alias, "default");
    }

    #[test]
    fn a_group_may_read_the_key_unless_a_mode_says_otherwise() {
        for (text, user, group, mode) in [
            ("/out,owner=5", Some(5), None, 0o600),
            ("/out,owner=5:6", Some(5), Some(6), 0o640),
            ("/out,group=6", None, Some(6), 0o640),
            ("/out,owner=5,group=6,mode=0600", Some(5), Some(6), 0o600),
        ] {
            let settings = parse(text).unwrap();
            assert_eq!((settings.owner, settings.key_mode), (Owner { user, group }, mode), "{text}");
        }
    }

    #[test]
    fn a_mistake_says_what_is_wrong_and_what_was_probably_meant() {
        for (text, words) in [
            ("", "begins with no directory; the shape is DIR,"),
            ("format=pem", "begins with no directory"),
            (",format=pem", "begins with no directory"),
            ("json", "is a format of other commands: name a directory (./json"),
            (
                "/out,pkcs12",
                "\"pkcs12\" is not KEY=VALUE (the path of a directory has no comma here); keys are format",
            ),
            (
                "/out,pasword-file=/p",
                "there is no \"pasword-file\" (did you mean password-file?); keys are format",
            ),
            ("/out,frmat=pem", "(did you mean format?)"),
            (
                "/out,colour=red",
                "there is no \"colour\"; keys are format, mode, cert-mode, owner, group, cert-file",
            ),
            ("/out,format=pfx", "\"pfx\" is not a format; choose one of pem, combined, pkcs12, jks"),
            ("/out,mode=", "mode is empty"),
            ("/out,mode=0600,mode=0640", "mode is given twice"),
            ("/out,mode=0888", "mode: \"0888\" is not a file mode"),
            (
                "/out,password-file=/p",
                "password-file is for format=pkcs12 and format=jks, and this is format=pem",
            ),
            ("/out,format=jks,key-file=k", "key-file is for format=pem, and this is format=jks"),
            ("/out,key-file=../k", "is not the name of a file in the directory"),
            ("/out,key-file=..data", "begins with two dots"),
            ("/out,key-file=root-cert.pem", "two files have the name \"root-cert.pem\""),
            ("/out,format=jks,alias=root-1", "may be that of a root"),
            ("/out,format=jks,alias=a b", "printable ASCII"),
            ("/out,owner=1:2,group=3", "both name a group"),
            ("/out,owner=", "owner is empty"),
            ("/out,owner=:5", "owner: the user is empty"),
            ("/out,owner=4294967295", "is not a user id"),
            (
                "/out,group=attache-has-no-such-group",
                "group: \"attache-has-no-such-group\" is not a group in /etc/group",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
