# What people do here. `just` lists it.

_list:
    @just --list

# Everything that is checked before a change is accepted; it takes a while
ci:
    .ci/run

# Format, lints and documentation
check:
    cargo fmt --check
    cargo clippy --locked --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps

# Every test; installs Envoy under target/ once
test *arguments:
    cargo test --locked {{arguments}}

# The figures of docs/performance.md
bench:
    cargo bench --locked

# README's own commands in a fresh clone, with the time that they take
newcomer:
    examples/newcomer

# Two Envoys over mutual TLS while their certificates are renewed
demo *arguments:
    examples/mtls/run {{arguments}}
