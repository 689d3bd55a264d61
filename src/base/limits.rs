//! The bounds on all input, in one place.

/// Bytes of one request on the SDS socket. Envoy's first request has 61 kB.
pub const REQUEST_BYTES: usize = 1 << 20;
/// Resource names that one stream may subscribe to.
pub const NAMES_PER_STREAM: usize = 10_000;
/// Bytes of all these names together: as many as one request can hold.
pub const NAME_BYTES_PER_STREAM: usize = REQUEST_BYTES;
/// File names that all streams together may subscribe to.
pub const NAMES_ON_DEMAND: usize = 20_000;
/// Hosts that have a certificate by `mint://` at a time.
pub const HOSTS_MINTED: usize = 1000;
/// Bytes that all clients of the SDS sockets may make the agent use, as the agent counts them: connections, streams, names
/// and requests that are not handled. One connection alone may use half of it: 25,000 streams.
pub const CLIENT_MEMORY: usize = 512 << 20;
/// Bytes that a connection without streams takes: mostly buffers for writing and reading.
pub const CONNECTION_MEMORY: usize = 64 << 10;
/// Bytes that a stream without names takes, in the agent and in its HTTP/2 library: 4 kB, and what may wait to be sent.
pub const STREAM_MEMORY: usize = 10 << 10;
/// Bytes that a name of a stream takes, without its text.
pub const NAME_MEMORY: usize = 1 << 10;
/// Streams on one connection. A bound on what HTTP/2 keeps of streams before they are opened or refused, not on them.
pub const STREAMS_PER_CONNECTION: u32 = 30_000;
/// Bytes of the secrets that are served for file names, each content once. One connection may cause half of it. A secret
/// takes about three times as much: encoded, as certificates, and what is known of them.
pub const VALUE_BYTES_ON_DEMAND: usize = 64 << 20;
/// Bytes of a path in such a name: the kernel's limit (`PATH_MAX` less its final NUL).
pub const PATH_BYTES: usize = 4095;
/// Bytes of the file that keeps a Secret, which has a megabyte at most.
pub const KUBE_STATE_BYTES: u64 = 2 << 20;
/// Bytes of a cluster's name.
pub const CLUSTER_ID_BYTES: usize = 253;
/// Characters of a client's text (node ID, NACK reason) that are logged.
pub const FOREIGN_TEXT: usize = 400;
/// Characters of a name in a certificate that are shown: those of the longest SPIFFE ID.
pub const NAME_TEXT: usize = 2048;
/// Bytes of one mounted file.
pub const FILE_BYTES: u64 = 1 << 20;
/// Certificates in one file. Operating systems trust about 150 roots; each one has to be parsed and its signature checked.
pub const CERTIFICATES: usize = 500;
/// CRLs in one file.
pub const CRLS: usize = 100;
/// Bytes of an OCSP response. TLS clients take no more than 100 kB of certificates and staple.
pub const OCSP_STAPLE_BYTES: usize = 32 << 10;
/// Bytes of the options file.
pub const OPTIONS_FILE_BYTES: u64 = 256 << 10;
/// Bytes of a token file.
pub const TOKEN_BYTES: u64 = 64 << 10;
/// Bytes of a token that a client brings with a call.
pub const BROUGHT_TOKEN_BYTES: usize = 16 << 10;
/// Bytes of a file with the password of a keystore.
pub const PASSWORD_FILE_BYTES: u64 = 4 << 10;
/// Threads that may wait for file systems that do not answer.
pub const STUCK_THREADS: usize = 16;
/// Roots that CAs no longer return but that may have issued the leaves of peers.
pub const OLD_ROOTS: usize = 32;
/// Bytes of a CA's response.
pub const ANSWER_BYTES: usize = 1 << 20;
/// Bytes of a message of a SPIFFE Workload API: as many as gRPC clients take where nothing else is set.
pub const SPIFFE_ANSWER_BYTES: usize = 4 << 20;
/// Other trust domains whose bundles one endpoint delivers.
pub const FEDERATED_BUNDLES: usize = 1000;
/// Bytes of an object of Kubernetes' API, alone or in an event: etcd's limit is half of it.
pub const KUBE_OBJECT_BYTES: usize = 3 << 20;
/// Bytes of a page of a list of Kubernetes' API.
pub const KUBE_PAGE_BYTES: usize = 32 << 20;
/// Objects of such a page, unless they are so large that it gets too long.
pub const KUBE_PAGE_OBJECTS: usize = 250;
/// Connections to one API server. It allows 100 calls and watches on each, or more.
pub const KUBE_CONNECTIONS: usize = 128;
/// Bytes of a kubeconfig.
pub const KUBECONFIG_BYTES: u64 = 1 << 20;
/// Bytes that are kept of the messages of a configured command.
pub const COMMAND_MESSAGE_BYTES: usize = 4 << 10;
/// Lines at the end of a hook's output that the status shows.
pub const LAST_LINES: usize = 5;
/// Characters of such a line.
pub const LAST_LINE_TEXT: usize = 200;
/// Generations that are kept in the output directory for processes that still read them.
pub const OUTPUT_GENERATIONS: usize = 32;
/// Node IDs that are shown of the clients that hold one version of a secret.
pub const NODES_SHOWN: usize = 20;
/// Log lines about refused connections: one for each user, group and reason.
pub const REFUSED_PEERS_LOGGED: usize = 100;
/// Changes of secrets that the history keeps.
pub const EVENTS: usize = 200;
/// Service accounts, and workloads of other identities, that have metrics of their own on a node.
pub const WORKLOAD_GROUPS: usize = 200;
/// Addresses of CAs that have metrics of their own.
pub const CAS_MEASURED: usize = 32;
/// Concurrent connections to the status address, and as many to the admin socket.
pub const STATUS_CONNECTIONS: usize = 64;
/// Bytes of log lines that wait for standard error to take them.
pub const LOG_BUFFER_BYTES: usize = 1 << 20;
/// Bytes of the longest path of a Unix socket (`sun_path` less its final NUL).
pub const SOCKET_PATH_BYTES: usize = 107;

/// Volumes of Pods that one agent serves.
pub const VOLUMES: usize = 4096;
/// Concurrent connections to the CSI socket and the registration socket: a call that waits for a certificate keeps its own.
pub const CSI_CONNECTIONS: usize = VOLUMES;
/// Bytes of a request of the kubelet: it has a token for each audience.
pub const CSI_REQUEST_BYTES: usize = 256 << 10;
/// Bytes of the record of a volume, and of the kubelet's own file about one.
pub const VOLUME_RECORD_BYTES: u64 = 64 << 10;
/// Characters of the id of a volume.
pub const VOLUME_ID_TEXT: usize = 128;
/// Bytes of the file system with a volume's files: the generations that are kept in an output directory, and room to write.
pub const VOLUME_BYTES: usize = 4 << 20;
/// Files, directories and links of that file system.
pub const VOLUME_INODES: usize = 1024;

/// Bytes of the manifests that `attache inject` reads from one file.
pub const MANIFESTS: usize = 16 << 20;
