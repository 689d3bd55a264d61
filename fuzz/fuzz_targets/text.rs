#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::base::fuzz::text(bytes);
});
