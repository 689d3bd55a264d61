//! The program that the agent keeps running.

mod epochs;
mod restarts;
