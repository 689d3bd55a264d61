//! What can be typed after `attache run`. Values stay text here: they are judged together, in one report.

#![allow(
    rustdoc::bare_urls,
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    reason = "these comments are the text of --help, which has brackets of its own"
)]

/// Serve this workload's key pair and trust roots to Envoy over a Unix socket.
///
/// Every option also reads ATTACHE_<OPTION> from the environment, and where Istio's agent has a variable
/// for the same thing, that one too (in brackets). A flag wins over ATTACHE_<OPTION>, that over Istio's.
/// Durations read like 24h, 90s, 100ms, 1h30m, 1.5h.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct RunArgs {
    /// The socket that Envoy connects to [default: /var/run/secrets/workload-spiffe-uds/socket]
    #[arg(long, value_name = "PATH", help_heading = "Socket")]
    pub socket: Option<String>,
    /// The socket's file mode, octal [default: 0660]
    #[arg(long, value_name = "MODE", help_heading = "Socket")]
    pub socket_mode: Option<String>,
    /// Let only processes of this user id connect (a number; repeatable; in the environment with "," between them), and
    /// those of the agent's own user [default: whoever may write to the socket]
    #[arg(long, value_name = "UID", help_heading = "Socket")]
    pub allow_uid: Vec<String>,
    /// Let processes of this group id connect (of the group that they run as, not of further ones)
    #[arg(long, value_name = "GID", help_heading = "Socket")]
    pub allow_gid: Vec<String>,

    /// Who signs: citadel (Istio's CA protocol), vault (HashiCorp Vault, OpenBao), kubernetes (CertificateSigningRequests,
    /// see docs/ca-kubernetes.md), cfssl, google-cas (Google's Certificate Authority Service), exec (a command), embedded (a
    /// CA of its own, for development), none (mounted files alone) [default: citadel where there is an address; none with
    /// --file-mounted-certs, or where --cert-dir holds a key pair] [CA_PROVIDER]
    #[arg(long, value_name = "PROVIDER", help_heading = "CA")]
    pub ca: Option<String>,
    /// The CA's address, like istiod.istio-system.svc:15012; http://HOST:PORT for plain text; repeatable (in the
    /// environment with "," between them): the next one is asked when one gives no certificate [CA_ADDR]
    #[arg(long, value_name = "ADDRESS", help_heading = "CA")]
    pub ca_address: Vec<String>,
    /// The root of the CA's own TLS certificate: a PEM file, or system [default: root-cert.pem of
    /// --ca-client-cert-dir, else /var/run/secrets/istio/root-cert.pem, else /etc/certs/root-cert.pem] [CA_ROOT_CA]
    #[arg(long, value_name = "FILE", help_heading = "CA")]
    pub ca_root: Option<String>,
    /// The name in the CA's TLS certificate [default: the address's host] [ISTIOD_SAN]
    #[arg(long, value_name = "NAME", help_heading = "CA")]
    pub ca_server_name: Option<String>,
    /// A header for each call to the CA; repeatable (ATTACHE_CA_HEADER holds one) [CA_HEADER_<NAME>]
    #[arg(long, value_name = "NAME=VALUE", help_heading = "CA")]
    pub ca_header: Vec<String>,
    /// How long one call to the CA may take [default: 10s]
    #[arg(long, value_name = "DURATION", help_heading = "CA")]
    pub ca_timeout: Option<String>,
    /// The embedded CA's folder; agents that share it share a root [default: ./attache-ca]
    #[arg(long, value_name = "DIR", help_heading = "CA")]
    pub ca_dir: Option<String>,
    /// Drop roots that the CA does not name any more at once, instead of after one lifetime of the last certificate
    /// that came with them: peers that still hold such certificates are refused. For a CA whose key is lost
    #[arg(long, help_heading = "CA")]
    pub drop_old_roots: bool,
    /// A folder, kept across restarts, for the last certificate, its key and the roots: an agent that restarts while
    /// the CA is down serves them at once. For this agent alone; not in plain sight of others [default: none]
    #[arg(long, value_name = "DIR", help_heading = "CA")]
    pub state_dir: Option<String>,
    /// A folder with cert-chain.pem and key.pem, read anew for each call: as long as they are good, and the CA asks
    /// for a client certificate, they are presented, and the token is not sent [PROV_CERT]
    #[arg(long, value_name = "DIR", help_heading = "CA")]
    pub ca_client_cert_dir: Option<String>,
    /// The file with the workload's bearer token, read anew for each call
    /// [default: /var/run/secrets/tokens/istio-token]
    #[arg(long, value_name = "FILE", help_heading = "CA")]
    pub token_file: Option<String>,
    /// The cluster id that the CA is told [default: Kubernetes] [ISTIO_META_CLUSTER_ID]
    #[arg(long, value_name = "ID", help_heading = "CA")]
    pub cluster_id: Option<String>,
    /// Which of its signers istiod is to use, where it has Kubernetes sign: the name without istiod's
    /// CERT_SIGNER_DOMAIN [default: istiod's own choice] [ISTIO_META_CERT_SIGNER]
    #[arg(long, value_name = "NAME", help_heading = "CA")]
    pub cert_signer: Option<String>,

    /// Where the token for citadel, vault and google-cas comes from: file (--token-file), exchange (a token service gives
    /// one for that file's), gce (the metadata server of Google Cloud's machines; GCE_METADATA_HOST names another)
    /// [default: exchange with --token-exchange-url; gce with --ca google-cas and no --token-file; else file]
    #[arg(long, value_name = "SOURCE", help_heading = "Token exchange")]
    pub token_source: Option<String>,
    /// The token service (RFC 8693), which gets the token in --token-file as a form
    /// [default with --ca google-cas: https://sts.googleapis.com/v1/token]
    #[arg(long, value_name = "URL", help_heading = "Token exchange")]
    pub token_exchange_url: Option<String>,
    /// Whom the token service is to give a token for; for Google's, the full name of the identity provider
    #[arg(long, value_name = "AUDIENCE", help_heading = "Token exchange")]
    pub token_exchange_audience: Option<String>,
    /// What the token is to be good for, with spaces between several
    /// [default with --ca google-cas: https://www.googleapis.com/auth/cloud-platform]
    #[arg(long, value_name = "SCOPE", help_heading = "Token exchange")]
    pub token_exchange_scope: Option<String>,
    /// The root of the token service's TLS certificate: a PEM file, or system [default: system]
    #[arg(long, value_name = "FILE", help_heading = "Token exchange")]
    pub token_exchange_root: Option<String>,
    /// Whom the metadata server's identity token is for; google-cas gets an access token instead
    /// [default with --ca citadel: istio-ca]
    #[arg(long, value_name = "AUDIENCE", help_heading = "Token exchange")]
    pub gce_audience: Option<String>,

    /// Where the PKI secrets engine is mounted [default: pki]
    #[arg(long, value_name = "PATH", help_heading = "Vault")]
    pub vault_pki_mount: Option<String>,
    /// The PKI engine's role that signs: its allowed_uri_sans must allow the workload's SPIFFE ID
    #[arg(long, value_name = "ROLE", help_heading = "Vault")]
    pub vault_role: Option<String>,
    /// The namespace that both mounts are in [default: none]
    #[arg(long, value_name = "NAMESPACE", help_heading = "Vault")]
    pub vault_namespace: Option<String>,
    /// Log in by this role of the auth method, with the token in --token-file
    #[arg(long, value_name = "ROLE", help_heading = "Vault")]
    pub vault_auth_role: Option<String>,
    /// Where the auth method is mounted: a kubernetes or jwt method [default: kubernetes]
    #[arg(long, value_name = "PATH", help_heading = "Vault")]
    pub vault_auth_mount: Option<String>,
    /// Don't log in: use the token of Vault's in this file, read anew for each call
    #[arg(long, value_name = "FILE", help_heading = "Vault")]
    pub vault_token_file: Option<String>,
    /// A PEM file of the roots, read anew for each call [default: the roots that come with each certificate]
    #[arg(long, value_name = "FILE", help_heading = "Vault")]
    pub vault_root: Option<String>,

    /// The signer, like example.com/spiffe; needed with --ca kubernetes
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes")]
    pub kubernetes_signer: Option<String>,
    /// The signer's roots, which become ROOTCA: a PEM file, read anew for each certificate, or cluster (the
    /// ClusterTrustBundles that name the signer); needed with --ca kubernetes
    #[arg(long, value_name = "FILE", help_heading = "Kubernetes")]
    pub kubernetes_root: Option<String>,

    /// The profile that decides what is in the certificate, its lifetime included [default: cfssl's default]
    #[arg(long, value_name = "NAME", help_heading = "cfssl")]
    pub cfssl_profile: Option<String>,
    /// Which of several signers is to sign (multirootca)
    #[arg(long, value_name = "NAME", help_heading = "cfssl")]
    pub cfssl_label: Option<String>,
    /// A file with the profile's auth_key, hexadecimal, read anew for each call; requests go to authsign then
    #[arg(long, value_name = "FILE", help_heading = "cfssl")]
    pub cfssl_auth_key_file: Option<String>,
    /// A PEM file with the roots, and with intermediates between them and the signer, read anew for each call
    /// [default: cfssl's own certificate is the root]
    #[arg(long, value_name = "FILE", help_heading = "cfssl")]
    pub cfssl_bundle: Option<String>,

    /// The CA pool, like projects/PROJECT/locations/LOCATION/caPools/POOL; needed with --ca google-cas
    /// [CA_ADDR, with CA_PROVIDER=GoogleCAS]
    #[arg(long, value_name = "NAME", help_heading = "Google CAS")]
    pub google_cas_pool: Option<String>,
    /// The id of the pool's CA that is to sign [default: any of them]
    #[arg(long, value_name = "ID", help_heading = "Google CAS")]
    pub google_cas_ca: Option<String>,

    /// The command that signs, run by /bin/sh: a PEM CSR on its standard input, the PEM chain on its standard output,
    /// leaf first. ATTACHE_SPIFFE_ID and ATTACHE_TTL_SECONDS say what to ask for. After --ca-timeout it is ended
    #[arg(long, value_name = "COMMAND", help_heading = "exec")]
    pub ca_exec: Option<String>,
    /// A command that prints the roots, run after the other [default: the self-signed certificates of the chain]
    #[arg(long, value_name = "COMMAND", help_heading = "exec")]
    pub ca_exec_roots: Option<String>,

    /// The whole identity, like spiffe://cluster.local/ns/default/sa/web, instead of the three below
    #[arg(long, value_name = "ID", help_heading = "Identity")]
    pub spiffe_id: Option<String>,
    /// [default: cluster.local] [TRUST_DOMAIN]
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub trust_domain: Option<String>,
    /// [default: from the token; with the embedded CA default] [POD_NAMESPACE]
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub namespace: Option<String>,
    /// [default: from the token; with the embedded CA default] [SERVICE_ACCOUNT]
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub service_account: Option<String>,

    /// The kind of key that is made for each certificate: ecdsa-p256, ecdsa-p384, rsa-2048, rsa-3072, rsa-4096 or ed25519
    /// (Envoys refuse peers that have one, unless their tls_params say otherwise: see docs/keys.md) [default: ecdsa-p256]
    /// [ECC_SIGNATURE_ALGORITHM, ECC_CURVE, WORKLOAD_RSA_KEY_SIZE]
    #[arg(long, value_name = "TYPE", help_heading = "Certificate")]
    pub key_type: Option<String>,
    /// How it is written, for Envoy and into --output-dir: pkcs8 (PRIVATE KEY) or traditional (EC PRIVATE KEY, RSA PRIVATE
    /// KEY; not for ed25519). Mounted keys are served as they are [default: pkcs8] [PKCS8_KEY]
    #[arg(long, value_name = "FORMAT", help_heading = "Certificate")]
    pub key_format: Option<String>,
    /// The lifetime to ask for [default: 24h] [SECRET_TTL]
    #[arg(long, value_name = "DURATION", help_heading = "Certificate")]
    pub cert_ttl: Option<String>,
    /// Renew with this share of the lifetime left [default: 0.5] [SECRET_GRACE_PERIOD_RATIO]
    #[arg(long, value_name = "0..1", help_heading = "Certificate")]
    pub grace_ratio: Option<String>,
    /// Spread the renewal over ± this share of the lifetime [default: 0.01] [SECRET_GRACE_PERIOD_RATIO_JITTER]
    #[arg(long, value_name = "0..1", help_heading = "Certificate")]
    pub grace_jitter: Option<String>,

    /// The folder of mounted cert-chain.pem, key.pem and root-cert.pem, which win over the CA where they exist. What is
    /// not in it is looked for in /var/run/secrets/workload-spiffe-credentials. Not used where it is the folder of
    /// --ca-client-cert-dir [default: /etc/certs]
    #[arg(long, value_name = "DIR", help_heading = "Mounted files")]
    pub cert_dir: Option<String>,
    /// A PEM file of CRLs, which go into the trust bundle while each CA in use has one in it that is signed and in time
    /// [default: /var/run/secrets/istio/crl/ca-crl.pem, where it is there]
    #[arg(long, value_name = "FILE", help_heading = "Mounted files")]
    pub crl: Option<String>,
    /// Use mounted files alone, never a CA [FILE_MOUNTED_CERTS]
    #[arg(long, help_heading = "Mounted files")]
    pub file_mounted_certs: bool,
    /// A folder in which the files must lie, links resolved, that Envoy names as file-cert:CHAIN~KEY and file-root:PATH;
    /// repeatable (ATTACHE_FILE_PREFIX: with ":" between them) [default: anywhere]
    #[arg(long, value_name = "DIR", help_heading = "Mounted files")]
    pub file_prefix: Vec<String>,
    /// Publish changed files at most once in this span [default: 100ms] [FILE_DEBOUNCE_DURATION]
    #[arg(long, value_name = "DURATION", help_heading = "Mounted files")]
    pub file_debounce: Option<String>,

    /// Write key.pem, cert-chain.pem and root-cert.pem for other programs into this folder, swapped as one set
    /// [OUTPUT_CERTS]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub output_dir: Option<String>,
    /// The file mode of key.pem there, octal [default: 0600]
    #[arg(long, value_name = "MODE", help_heading = "Output")]
    pub output_key_mode: Option<String>,
    /// The file mode of the other two, octal [default: 0644]
    #[arg(long, value_name = "MODE", help_heading = "Output")]
    pub output_cert_mode: Option<String>,
    /// Run this by /bin/sh after each swap, with the folder in ATTACHE_OUTPUT_DIR; again if it fails
    #[arg(long, value_name = "COMMAND", help_heading = "Output")]
    pub output_hook: Option<String>,
    /// How long the hook may take before it is killed with all its processes [default: 30s]
    #[arg(long, value_name = "DURATION", help_heading = "Output")]
    pub output_hook_timeout: Option<String>,

    /// The socket of attache status, renew and log, for this user alone; none to have none
    /// [default: admin.sock beside --socket]
    #[arg(long, value_name = "PATH", help_heading = "Operation")]
    pub admin_socket: Option<String>,
    /// The address of the status page, for browsers; a port alone is one of 127.0.0.1. Everybody who can reach it can read
    /// it [default: none]
    #[arg(long, value_name = "ADDRESS", help_heading = "Operation")]
    pub admin_address: Option<String>,
    /// The address of /livez, /readyz and /metrics; none to have none [default: 127.0.0.1:15055]
    #[arg(long, value_name = "ADDRESS", help_heading = "Operation")]
    pub status_address: Option<String>,
    /// A file that is there while the agent is ready, for whoever waits for that: made when every secret is there and
    /// valid, removed when one is not any more, and at the end [default: none]
    #[arg(long, value_name = "PATH", help_heading = "Operation")]
    pub ready_file: Option<String>,
    /// How long open calls may take to end after SIGTERM [default: 5s]
    #[arg(long, value_name = "DURATION", help_heading = "Operation")]
    pub drain_timeout: Option<String>,
    /// From the start on, write only in the folders of the sockets, of --output-dir, --state-dir, --ca-dir and
    /// --ready-file, and execute nothing (so not with commands): the kernel sees to it (Linux 5.13, the better the newer)
    #[arg(long, help_heading = "Operation")]
    pub landlock: bool,
    /// error, warn, info, debug or trace; TARGET=LEVEL,… for parts [default: info] [ATTACHE_LOG]
    #[arg(long, value_name = "LEVEL", help_heading = "Operation")]
    pub log_level: Option<String>,
    /// text or json [default: text]
    #[arg(long, value_name = "FORMAT", help_heading = "Operation")]
    pub log_format: Option<String>,
}
