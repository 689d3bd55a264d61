#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::os::supervise::fuzz::command_output(bytes);
});
