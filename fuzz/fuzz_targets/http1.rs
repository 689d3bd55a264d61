#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::ops::fuzz::http1(bytes);
});
