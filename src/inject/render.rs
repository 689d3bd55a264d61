//! Renders values as YAML in block style.

use serde_json::Value;

/// `items` as a list with its dashes in `column`; nested lists are indented `step` from their keys.
pub(super) fn items(items: &[Value], column: usize, step: usize) -> String {
    let mut out = String::new();
    for item in items {
        write_item(&mut out, item, column, step);
    }
    out
}

/// An entry of a mapping with its keys in `column`.
pub(super) fn entry(key: &str, value: &Value, column: usize, step: usize) -> String {
    let mut out = String::new();
    write_block(&mut out, &Value::from_iter([(key, value.clone())]), column, step);
    out
}

fn write_item(out: &mut String, item: &Value, column: usize, step: usize) {
    let mut block = String::new();
    write_block(&mut block, item, column + 2, step);
    out.push_str(&" ".repeat(column));
    out.push_str("- ");
    out.push_str(block.trim_start_matches(' '));
}

/// Whole lines, each indented by `column` spaces.
fn write_block(out: &mut String, value: &Value, column: usize, step: usize) {
    let indent = " ".repeat(column);
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                out.push_str(&format!("{indent}{}:", scalar(&Value::from(key.as_str()))));
                match value {
                    Value::Object(fields) if !fields.is_empty() => {
                        out.push('\n');
                        write_block(out, value, column + 2, step);
                    }
                    Value::Array(list) if !list.is_empty() => {
                        out.push('\n');
                        list.iter().for_each(|item| write_item(out, item, column + step, step));
                    }
                    value => out.push_str(&format!(" {}\n", scalar(value))),
                }
            }
        }
        Value::Array(list) if !list.is_empty() => {
            list.iter().for_each(|item| write_item(out, item, column, step));
        }
        value => out.push_str(&format!("{indent}{}\n", scalar(value))),
    }
}

/// A scalar on one line: plain where that is unambiguous, else as JSON, which is YAML too.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        value => value.to_string(),
    }
}

fn is_plain(text: &str) -> bool {
    let words = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"];
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        || text.strip_prefix("--").is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()));
    begins
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=:@".contains(c))
        && !text.ends_with(':')
        && !words.contains(&text.to_ascii_lowercase().as_str())
}
