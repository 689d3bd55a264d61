#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::config::fuzz::options_file(bytes);
});
