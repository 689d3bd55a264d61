#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::net::http2::fuzz::client(bytes);
});
