//! What the agent writes for other programs: a directory of files with a hook, and the ready file.

pub mod output;
pub mod ready_file;
