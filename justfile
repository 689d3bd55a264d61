# Common tasks. `just` lists them.

_list:
    @just --list

# Every check that a change must pass; takes a while
ci:
    .ci/run

# Format, lints and documentation
check:
    cargo fmt --check
    cargo clippy --locked --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps

# Run every test; installs Envoy under target/ once
test *arguments:
    cargo test --locked {{arguments}}

# Hostile clients, CA faults and dead mounts by turns, beside Envoys that must notice nothing; an hour by default
soak seconds="3600":
    .ci/soak {{seconds}}

# Measure the figures of docs/performance.md
bench:
    cargo bench --locked

# Follow README in a fresh clone, and report how long it takes
newcomer:
    examples/newcomer

# What each command prints where setups go wrong
walk *points:
    examples/walk/run {{points}}

# Two Envoys over mutual TLS while their certificates are renewed
demo *arguments:
    examples/mtls/run {{arguments}}
