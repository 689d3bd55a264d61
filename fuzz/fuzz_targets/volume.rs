#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::csi::fuzz::volume(bytes);
});
