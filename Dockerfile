# A static binary in an empty image. .ci/run tests the static build; this file only repeats it in a container.
#
#   docker build -t attache .
#   docker run --rm attache run --help

FROM rust:1.95-alpine AS build
# aws-lc needs a C compiler; cmake and protoc are not needed.
RUN apk add --no-cache build-base linux-headers
WORKDIR /src
COPY . .
# On Alpine the host's own target is musl, and its binaries are static.
RUN cargo build --locked --release --bin attache

FROM scratch
COPY --from=build /src/target/release/attache /attache
COPY LICENSE /LICENSE
# The user of Istio's proxies. The socket has mode 0660: agent and Envoy must share a user or group. The image has no
# user database, hence the numbers.
USER 1337:1337
# The directory of --socket (by default /var/run/secrets/workload-spiffe-uds) must be a volume that both containers mount.
ENTRYPOINT ["/attache"]
CMD ["run"]
