#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::source::spiffe::fuzz::answer(bytes);
});
