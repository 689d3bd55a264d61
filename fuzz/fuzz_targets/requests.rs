#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::serve::sds::fuzz::requests(bytes);
});
