#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::pki::fuzz::ocsp_staple(bytes);
});
