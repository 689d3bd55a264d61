//! The options of `--ca exec`.

use super::args::RunArgs;
use super::choice::{Chosen, ProviderName};
use super::provider::Provider;
use super::reader::Reader;
use crate::os::command::ShellCommand;

/// The commands, if that is the provider.
pub(super) fn options(r: &mut Reader<'_>, args: &RunArgs, chosen: Chosen) -> Option<Provider> {
    let sign = r.text("ca-exec", &args.ca_exec, &[]);
    let roots = r.text("ca-exec-roots", &args.ca_exec_roots, &[]);
    if !chosen.is(r, (ProviderName::Exec, "exec"), &[sign.set(), roots.set()]) {
        return None;
    }
    if sign.value.is_none() && !sign.was_wrong {
        r.mistake("--ca exec needs a command that signs: --ca-exec COMMAND".to_owned());
    }
    Some(Provider::Exec { sign: sign.value?.into(), roots: roots.value.map(ShellCommand::from) })
}
