//! Users and groups by name, as `/etc/passwd` and `/etc/group` have them.

use std::path::Path;

use crate::fs::file;

const LIMIT: u64 = 1 << 20;

/// The id of the user that `text` names: a number, or a name.
pub fn user_id(text: &str) -> Result<u32, String> {
    id(text, "user", "/etc/passwd")
}

/// The id of the group that `text` names: a number, or a name.
pub fn group_id(text: &str) -> Result<u32, String> {
    id(text, "group", "/etc/group")
}

fn id(text: &str, what: &str, file: &str) -> Result<u32, String> {
    if text.is_empty() {
        return Err(format!("the {what} is empty: give a name or a number"));
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        // The highest number means "unchanged" to the kernel.
        let number = text.parse().ok().filter(|number| *number != u32::MAX);
        return number.ok_or_else(|| format!("{text} is not a {what} id: the highest is {}", u32::MAX - 1));
    }
    let content = file::read(Path::new(file), LIMIT).map_err(|error| {
        format!("looking up the {what} {text:?} failed: {file}: {error}; give its number")
    })?;
    listed(&content, text).ok_or_else(|| {
        format!("{text:?} is not a {what} in {file}: correct the name, or give its number (id {text})")
    })
}

/// The id in the line of `name`.
fn listed(content: &[u8], name: &str) -> Option<u32> {
    content.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let is_named = fields.next()? == name.as_bytes();
        let id = std::str::from_utf8(fields.nth(1)?).ok()?;
        if is_named { id.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_or_a_number_is_an_id_and_everything_else_a_mistake() {
        assert_eq!((user_id("0"), group_id("4711")), (Ok(0), Ok(4711)));
        assert_eq!((user_id("root"), group_id("root")), (Ok(0), Ok(0)));
        let error = user_id("attache-has-no-such-user").unwrap_err();
        assert!(
            error.contains("is not a user in /etc/passwd: correct the name, or give its number"),
            "{error}"
        );
        for text in ["", "4294967295", "99999999999"] {
            assert!(group_id(text).is_err(), "{text:?}");
        }
        let passwd = b"broken\n:\nweb:x\nweb:x:many\xff:1\nweb:x:33:34:::/bin/sh\nweb:x:35:";
        assert_eq!((listed(passwd, "web"), listed(passwd, "x"), listed(passwd, "")), (Some(33), None, None));
    }
}
