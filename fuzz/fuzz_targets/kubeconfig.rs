#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    attache::kube::kubeconfig::fuzz::kubeconfig(bytes);
});
