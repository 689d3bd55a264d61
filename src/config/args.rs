//! The options of `attache run`. Values stay text here: they are judged together, in one report.

#![allow(
    rustdoc::bare_urls,
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    reason = "these comments are the text of --help, which has brackets of its own"
)]

use crate::ca::providers::{self, AllProviderArgs};

/// Serve this workload's key pair and trust roots to Envoy over a Unix socket.
///
/// Every option also reads ATTACHE_<OPTION> from the environment, the variable of Istio's agent for the same thing, if
/// there is one (in brackets), and the options file (--config). A flag wins over ATTACHE_<OPTION>, that over Istio's
/// variable, and that over the file.
/// Durations look like 24h, 90s, 100ms, 1h30m, 1.5h.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_long_help = "\
Examples:
  A CA of its own, to try things out:
    attache run --ca embedded --ca-dir /tmp/ca --socket /tmp/sds.sock
  Certificates from istiod:
    attache run --ca-address istiod.istio-system.svc:15012
  Mounted files, also written for other programs:
    attache run --ca none --cert-dir /etc/certs --output-dir /run/certs
  Certificates from Vault:
    attache run --ca vault --ca-address vault.example:8200 \\
        --ca-root /etc/vault/ca.pem --spiffe-id spiffe://example.org/web \\
        --vault-role web --vault-auth-role web
  With Envoy in the same container, restarted when its bootstrap changes:
    attache run --restart-on /etc/envoy -- envoy -c /etc/envoy/envoy.yaml")]
pub struct RunArgs {
    /// A TOML file with options, without secrets: their names as keys, true or false for a flag without a value, a list
    /// for a repeatable option. Read at startup and on SIGHUP [default: none]
    #[arg(long, value_name = "FILE", help_heading = "Options file")]
    pub config: Option<String>,

    /// The socket that Envoy connects to; repeatable (in the environment separated by ":"): the same secrets on each. The
    /// first one is that of attache status and the admin socket [default: /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH", help_heading = "Socket")]
    pub socket: Vec<String>,
    /// The file mode of each socket, octal [default: 0660]
    #[arg(long, value_name = "MODE", help_heading = "Socket")]
    pub socket_mode: Option<String>,
    /// Let only processes of this user id connect (a number; repeatable; in the environment separated by ","), and
    /// those of the agent's own user [default: every user who may write to the socket]
    #[arg(long, value_name = "UID", help_heading = "Socket")]
    pub allow_uid: Vec<String>,
    /// Let processes of this group id connect (the group that they run as, not supplementary groups)
    #[arg(long, value_name = "GID", help_heading = "Socket")]
    pub allow_gid: Vec<String>,

    #[arg(long, value_name = "PROVIDER", help_heading = "CA", help = short_ca_help(), long_help = ca_help())]
    pub ca: Option<String>,
    /// The CA's address, like istiod.istio-system.svc:15012; http://HOST:PORT for plain text; repeatable (in the
    /// environment separated by ","): the agent fails over to the next one [CA_ADDR]
    #[arg(long, value_name = "ADDRESS", help_heading = "CA")]
    pub ca_address: Vec<String>,
    /// The root of the CA's own TLS certificate: a PEM file, or system [default: root-cert.pem of
    /// --ca-client-cert-dir, else /var/run/secrets/istio/root-cert.pem, else /etc/certs/root-cert.pem] [CA_ROOT_CA]
    #[arg(long, value_name = "FILE", help_heading = "CA")]
    pub ca_root: Option<String>,
    /// The name in the CA's TLS certificate [default: the address's host] [ISTIOD_SAN]
    #[arg(long, value_name = "NAME", help_heading = "CA")]
    pub ca_server_name: Option<String>,
    /// A header of each call to the CA; repeatable (ATTACHE_CA_HEADER holds one) [CA_HEADER_<NAME>]
    #[arg(long, value_name = "NAME=VALUE", help_heading = "CA")]
    pub ca_header: Vec<String>,
    /// How long one call to the CA may take [default: 10s]
    #[arg(long, value_name = "DURATION", help_heading = "CA")]
    pub ca_timeout: Option<String>,
    /// Drop roots at once when the CA no longer returns them, instead of after one lifetime of the last certificate that
    /// came with them: peers that still hold such certificates are rejected. For a CA whose key is compromised
    #[arg(long, help_heading = "CA")]
    pub drop_old_roots: bool,
    /// A directory, kept across restarts, for the last certificate, its key and the roots: an agent that restarts while
    /// the CA is down serves them at once. For this agent alone; must not be readable by other users [default: none]
    #[arg(long, value_name = "DIR", help_heading = "CA")]
    pub state_dir: Option<String>,
    /// A directory with cert-chain.pem and key.pem, read again for each call: while they are valid, and the CA requests
    /// a client certificate, they are presented, and the token is not sent [PROV_CERT]
    #[arg(long, value_name = "DIR", help_heading = "CA")]
    pub ca_client_cert_dir: Option<String>,
    /// The file with the workload's bearer token, read again for each call
    /// [default: /var/run/secrets/tokens/istio-token]
    #[arg(long, value_name = "FILE", help_heading = "CA")]
    pub token_file: Option<String>,
    /// Take the token that a client brings with a request (authorization: Bearer TOKEN) as the workload's, instead of --token-file.
    /// The newest valid one is kept, in memory alone. A request with the token of another identity is refused
    #[arg(long, help_heading = "CA")]
    pub token_from_request: bool,

    #[arg(long, value_name = "SOURCE", help_heading = "Token exchange", help = token_source_help())]
    pub token_source: Option<String>,
    /// The token service (RFC 8693), which is sent the token in --token-file as a form
    /// [default with --ca google-cas: https://sts.googleapis.com/v1/token]
    #[arg(long, value_name = "URL", help_heading = "Token exchange")]
    pub token_exchange_url: Option<String>,
    /// Audience of the exchanged token; for Google's service, the full name of the identity provider
    #[arg(long, value_name = "AUDIENCE", help_heading = "Token exchange")]
    pub token_exchange_audience: Option<String>,
    /// Scopes of the exchanged token, separated by spaces
    /// [default with --ca google-cas: https://www.googleapis.com/auth/cloud-platform]
    #[arg(long, value_name = "SCOPE", help_heading = "Token exchange")]
    pub token_exchange_scope: Option<String>,
    /// The root of the token service's TLS certificate: a PEM file, or system [default: system]
    #[arg(long, value_name = "FILE", help_heading = "Token exchange")]
    pub token_exchange_root: Option<String>,
    /// Audience of the metadata server's identity token; google-cas gets an access token instead
    /// [default with --ca citadel: istio-ca]
    #[arg(long, value_name = "AUDIENCE", help_heading = "Token exchange")]
    pub gce_audience: Option<String>,

    #[command(flatten)]
    pub providers: AllProviderArgs,

    /// With --ca spiffe: the endpoint of the Workload API that delivers identity, key and roots, of SPIRE's agent say
    /// [SPIFFE_ENDPOINT_SOCKET]
    #[arg(long, value_name = "unix:///PATH", help_heading = "SPIFFE Workload API")]
    pub spiffe_endpoint: Option<String>,
    /// With --ca spiffe: the identity with this hint, if the endpoint has several; so does --spiffe-id [default: the first
    /// one]
    #[arg(long, value_name = "HINT", help_heading = "SPIFFE Workload API")]
    pub spiffe_hint: Option<String>,

    /// The whole identity, like spiffe://cluster.local/ns/default/sa/web, instead of the three below
    #[arg(long, value_name = "ID", help_heading = "Identity")]
    pub spiffe_id: Option<String>,
    /// A DNS name in the certificate, besides the identity, for ordinary TLS clients; repeatable (in the environment
    /// separated by ","). A certificate without it is not used. Istio's CA ignores it
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub dns_san: Vec<String>,
    /// The common name in the certificate's subject, likewise [default: none]
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub common_name: Option<String>,
    /// The identity's trust domain [default: cluster.local] [TRUST_DOMAIN]
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub trust_domain: Option<String>,
    /// The identity's namespace [default: from the token; with the embedded CA default] [POD_NAMESPACE]
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub namespace: Option<String>,
    /// The identity's service account [default: from the token; with the embedded CA default] [SERVICE_ACCOUNT]
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub service_account: Option<String>,

    /// The type of the key, a new one for each certificate: ecdsa-p256, ecdsa-p384, rsa-2048, rsa-3072, rsa-4096 or ed25519
    /// (Envoys reject it in a peer, unless their tls_params allow it: see docs/keys.md) [default: ecdsa-p256]
    /// [ECC_SIGNATURE_ALGORITHM, ECC_CURVE, WORKLOAD_RSA_KEY_SIZE]
    #[arg(long, value_name = "TYPE", help_heading = "Certificate")]
    pub key_type: Option<String>,
    /// The key's format, for Envoy and in --output-dir: pkcs8 (PRIVATE KEY) or traditional (EC PRIVATE KEY, RSA PRIVATE
    /// KEY; not for ed25519). Mounted keys are served unchanged [default: pkcs8] [PKCS8_KEY]
    #[arg(long, value_name = "FORMAT", help_heading = "Certificate")]
    pub key_format: Option<String>,
    /// The lifetime to request [default: 24h] [SECRET_TTL]
    #[arg(long, value_name = "DURATION", help_heading = "Certificate")]
    pub cert_ttl: Option<String>,
    /// Renew with this share of the lifetime left [default: 0.5] [SECRET_GRACE_PERIOD_RATIO]
    #[arg(long, value_name = "0..1", help_heading = "Certificate")]
    pub grace_ratio: Option<String>,
    /// Spread the renewal over ± this share of the lifetime [default: 0.1] [SECRET_GRACE_PERIOD_RATIO_JITTER]
    #[arg(long, value_name = "0..1", help_heading = "Certificate")]
    pub grace_jitter: Option<String>,
    /// Issue a certificate for a host when Envoy asks for mint://HOST, if the host is beneath this domain (.example.com),
    /// or is or is beneath it (example.com); repeatable (in the environment separated by ","). The certificate has the
    /// workload's identity and the host's DNS name: the CA must issue both [default: none]
    #[arg(long, value_name = "DOMAIN", help_heading = "Certificate")]
    pub mint_suffix: Vec<String>,

    /// The directory of mounted cert-chain.pem, key.pem and root-cert.pem, or tls.crt, tls.key and ca.crt, which win over the
    /// CA if they exist. Missing files are looked for in /var/run/secrets/workload-spiffe-credentials. Not used if it is also
    /// --ca-client-cert-dir [default: /etc/certs]
    #[arg(long, value_name = "DIR", help_heading = "Mounted files")]
    pub cert_dir: Option<String>,
    /// The file in --cert-dir that holds the certificate chain; it may hold the key too [default: cert-chain.pem or tls.crt]
    #[arg(long, value_name = "NAME", help_heading = "Mounted files")]
    pub cert_file: Option<String>,
    /// The file in --cert-dir that holds the private key [default: key.pem or tls.key]
    #[arg(long, value_name = "NAME", help_heading = "Mounted files")]
    pub key_file: Option<String>,
    /// The file in --cert-dir that holds the trust roots [default: root-cert.pem or ca.crt]
    #[arg(long, value_name = "NAME", help_heading = "Mounted files")]
    pub root_file: Option<String>,
    /// A PEM file of CRLs, added to the trust bundle while it holds a current, correctly signed one of each CA in use
    /// [default: /var/run/secrets/istio/crl/ca-crl.pem, if it exists]
    #[arg(long, value_name = "FILE", help_heading = "Mounted files")]
    pub crl: Option<String>,
    /// The trust bundle of another trust domain, a PEM file of its roots; repeatable (in the environment separated by ","). Served
    /// as spiffe://DOMAIN, in ALL, and by the SPIFFE Workload API. Followed like mounted files
    #[arg(long, value_name = "DOMAIN=FILE", help_heading = "SPIFFE")]
    pub federated_bundle: Vec<String>,
    /// Which trust bundles Envoy gets for its SPIFFE validator, which refuses certificates of one trust domain that the roots of
    /// another one have signed: off, spiffe-names (spiffe://DOMAIN and ALL), or all (ROOTCA too, which is then the same as ALL)
    /// [default: spiffe-names]
    #[arg(long, value_name = "WHICH", help_heading = "SPIFFE")]
    pub spiffe_validator: Option<String>,
    /// Use mounted files alone, never a CA [FILE_MOUNTED_CERTS]
    #[arg(long, help_heading = "Mounted files")]
    pub file_mounted_certs: bool,
    /// A directory with which the paths that Envoy names as file-cert:CHAIN~KEY and file-root:PATH must begin, and that
    /// their links must not leave; repeatable (ATTACHE_FILE_PREFIX: separated by ":"); / allows every path [default:
    /// /etc/certs, /etc/istio, /var/run/secrets, /run/secrets, /etc/ssl/certs, /etc/pki/ca-trust/extracted, and
    /// --cert-dir]
    #[arg(long, value_name = "DIR", help_heading = "Mounted files")]
    pub file_prefix: Vec<String>,
    /// Publish changed files at most once in this time [default: 100ms] [FILE_DEBOUNCE_DURATION]
    #[arg(long, value_name = "DURATION", help_heading = "Mounted files")]
    pub file_debounce: Option<String>,

    /// Write key.pem, cert-chain.pem and root-cert.pem for other programs into this directory, swapped as one set
    /// [OUTPUT_CERTS]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub output_dir: Option<String>,
    /// The file mode of key.pem there, octal [default: 0600]
    #[arg(long, value_name = "MODE", help_heading = "Output")]
    pub output_key_mode: Option<String>,
    /// The file mode of the other two, octal [default: 0644]
    #[arg(long, value_name = "MODE", help_heading = "Output")]
    pub output_cert_mode: Option<String>,
    /// Write files for other programs into this directory; repeatable (ATTACHE_OUTPUT: separated by ";"). FORMAT is pem,
    /// combined (chain and key in one file, for HAProxy), pkcs12 or jks (a keystore and a truststore, for Java). Further
    /// keys: mode, cert-mode, owner=USER[:GROUP], group, the names cert-file, key-file, root-file, file, and for keystores
    /// alias, password-file
    #[arg(long, value_name = "DIR[,format=FORMAT][,KEY=VALUE]...", help_heading = "Output")]
    pub output: Vec<String>,
    /// Run this by /bin/sh after each swap, once all directories have the new files, with the first directory in
    /// ATTACHE_OUTPUT_DIR; retried if it fails
    #[arg(long, value_name = "COMMAND", help_heading = "Output")]
    pub output_hook: Option<String>,
    /// How long the hook may take before it is killed with all its processes [default: 30s]
    #[arg(long, value_name = "DURATION", help_heading = "Output")]
    pub output_hook_timeout: Option<String>,

    /// Serve Secrets and ConfigMaps of Kubernetes as kubernetes://[NAMESPACE/]NAME, sds://[NAMESPACE/]NAME,
    /// kubernetes-gateway://NAMESPACE/NAME (each with -cacert for trust roots) and configmap://NAMESPACE/NAME. The agent's
    /// service account needs get and watch on those that are asked for (see docs/gateway.md)
    #[arg(long, help_heading = "Kubernetes Secrets")]
    pub kubernetes_secrets: bool,
    /// A kubeconfig with the API server and a credential for it [default: the service account of the Pod]
    #[arg(long, value_name = "FILE", help_heading = "Kubernetes Secrets")]
    pub kubeconfig: Option<String>,
    /// The context of --kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes Secrets")]
    pub kube_context: Option<String>,
    /// A name that means nothing else is that of a Secret in the own namespace: the host that a client asks for, if Envoy
    /// fetches certificates on demand
    #[arg(long, help_heading = "Kubernetes Secrets")]
    pub kubernetes_bare_names: bool,
    /// Who may be served a Secret: own (each client that can connect; the agent's own rights decide), namespace (only of the
    /// workload's own namespace), rbac (the API server is asked whether the workload's service account may get it) or
    /// istio (istiod's rules) [default: own]
    #[arg(long, value_name = "RULE", help_heading = "Kubernetes Secrets")]
    pub authorize: Option<String>,
    /// Read remote clusters from Secrets with the label istio/multiCluster=true, whose key is the cluster's name and whose
    /// value its kubeconfig
    #[arg(long, help_heading = "Kubernetes Secrets")]
    pub remote_clusters: bool,
    /// The namespace of these Secrets [default: istio-system]
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes Secrets")]
    pub system_namespace: Option<String>,
    /// Read remote clusters from the kubeconfigs in this directory; a file's name is the cluster's
    #[arg(long, value_name = "DIR", help_heading = "Kubernetes Secrets")]
    pub clusters_dir: Option<String>,
    /// What kubeconfigs of remote clusters may do: files (name files of this host), insecure-server (skip TLS
    /// verification, or have a server without TLS); repeatable [default: neither]
    #[arg(long, value_name = "RISK", help_heading = "Kubernetes Secrets")]
    pub clusters_allow: Vec<String>,

    /// The socket of attache status, renew and log, for this user alone; none to disable it
    /// [default: the first --socket with .admin at its end]
    #[arg(long, value_name = "PATH", help_heading = "Operation")]
    pub admin_socket: Option<String>,
    /// The address of the status page, for browsers; a port alone is one of 127.0.0.1. Every client that can reach it can
    /// read it [default: none]
    #[arg(long, value_name = "ADDRESS", help_heading = "Operation")]
    pub admin_address: Option<String>,
    /// The address of /livez, /readyz and /metrics; none to disable it [default: 127.0.0.1:15055]
    #[arg(long, value_name = "ADDRESS", help_heading = "Operation")]
    pub status_address: Option<String>,
    /// A file that exists while the agent is ready, for programs that wait for it: created when every secret is present
    /// and valid, removed when one no longer is, and at exit [default: none]
    #[arg(long, value_name = "PATH", help_heading = "Operation")]
    pub ready_file: Option<String>,
    /// How long open calls may take to finish after SIGTERM; before that, as long again, the connections of a COMMAND that is
    /// Envoy [default: 5s]
    #[arg(long, value_name = "DURATION", help_heading = "Operation")]
    pub drain_timeout: Option<String>,
    /// From startup on, write only in the directories of the sockets, of --output-dir, --state-dir, --ca-dir and
    /// --ready-file, and execute nothing (so not with commands): enforced by the kernel (Linux 5.13; newer kernels restrict more)
    #[arg(long, help_heading = "Operation")]
    pub landlock: bool,
    /// error, warn, info, debug or trace; TARGET=LEVEL,… for parts [default: info] [ATTACHE_LOG]
    #[arg(long, value_name = "LEVEL", help_heading = "Operation")]
    pub log_level: Option<String>,
    /// text or json [default: text]
    #[arg(long, value_name = "FORMAT", help_heading = "Operation")]
    pub log_format: Option<String>,

    /// Start COMMAND again when the content of this file changes, or of a file in this directory; repeatable (in the
    /// environment separated by ":"). For what Envoy reads once: its bootstrap, and files that it does not watch. Envoy checks
    /// its configuration first, and a hot restart loses no request [default: none]
    #[arg(long, value_name = "PATH", help_heading = "Command")]
    pub restart_on: Vec<String>,
    /// Restart once these files have stood still for this time, or after ten times as long if they never do [default: 500ms]
    #[arg(long, value_name = "DURATION", help_heading = "Command")]
    pub restart_debounce: Option<String>,
    /// How long an old Envoy drains after a hot restart, in whole seconds (its --drain-time-s); it exits after a third more
    /// (its --parent-shutdown-time-s). The next restart waits for that [default: 45s]
    #[arg(long, value_name = "DURATION", help_heading = "Command")]
    pub drain_time: Option<String>,
    /// Stop COMMAND before it is started again. For programs other than Envoy; like --disable-hot-restart among the arguments
    /// of Envoy
    #[arg(long, help_heading = "Command")]
    pub no_hot_restart: bool,
    /// How often COMMAND is started again after a crash, unless it was live for ten minutes in between; then the agent exits
    /// with its status (128 and the signal's number) [default: 10]
    #[arg(long, value_name = "NUMBER", help_heading = "Command")]
    pub restart_budget: Option<String>,
    /// Start COMMAND after this time although secrets are missing [default: 30s]
    #[arg(long, value_name = "DURATION", help_heading = "Command")]
    pub wait_timeout: Option<String>,
    /// The program that the agent starts once its secrets are ready, keeps running, and stops before itself, with its
    /// arguments: Envoy, or any other one with --no-hot-restart. The agent exits with its status
    #[arg(last = true, value_name = "COMMAND", help_heading = "Command")]
    pub command: Vec<String>,
}

fn short_ca_help() -> String {
    format!("The CA: {}, spiffe or none", providers::names(|_| true))
}

fn ca_help() -> String {
    format!(
        "The CA: {} [default: citadel if there is an address; none with --file-mounted-certs, or if --cert-dir holds a key \
         pair] [CA_PROVIDER]",
        providers::choices()
    )
}

fn token_source_help() -> String {
    format!(
        "The source of the token for {}: file (--token-file), exchange (a token service exchanges the token of that \
         file), gce (the metadata server of Google Cloud's machines; GCE_METADATA_HOST names another) [default: exchange \
         with --token-exchange-url; gce with --ca google-cas and no --token-file; else file]",
        providers::names_of_token_takers()
    )
}
