#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::ca::google_cas::fuzz::answers(bytes);
});
