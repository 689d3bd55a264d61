use clap::Args as _;

use super::*;
use crate::options::LOOKED_UP;
use crate::source::files::FilePrefixes;

/// The configuration with `content` as its options file, which messages call F.
fn with_file(content: &str, line: &str, environment: &[(&str, &str)]) -> Result<Config, Vec<String>> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("attache.toml");
    std::fs::write(&file, content).unwrap();
    let line = ["attache"].into_iter().chain(line.split_whitespace());
    let mut args = Line::try_parse_from(line).unwrap().run;
    args.config = Some(file.display().to_string());
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let shorten = |text: String| text.replace(file.to_str().unwrap(), "F");
    match Config::load(&args, &environment.collect()) {
        Ok(mut config) => {
            config.notes = config.notes.into_iter().map(shorten).collect();
            Ok(config)
        }
        Err(ConfigErrors(all)) => Err(all.into_iter().map(shorten).collect()),
    }
}

#[test]
fn flags_and_all_of_the_environment_win_over_the_options_file() {
    let content = "ca = 'none'\ncert-ttl = '4h'\n";
    let ttl = |line: &str, environment: &[_]| {
        let config = with_file(content, line, environment).unwrap();
        (config.workload.ttl.as_secs() / 3600, config.notes)
    };
    let environment = [("SECRET_TTL", "1h0m0s"), ("ATTACHE_CERT_TTL", "2h")];
    assert_eq!(ttl("", &[]), (4, vec![]));
    assert_eq!(ttl("--cert-ttl 3h", &environment), (3, vec![]));
    assert_eq!(ttl("", &environment), (2, vec![]));
    // Istio's variables are often set by other people.
    let note = "cert-ttl (line 2 of F) is not used: SECRET_TTL is set, and wins over the options file";
    assert_eq!(ttl("", &environment[..1]), (1, vec![note.to_owned()]));
    assert_eq!(ttl("", &[("SECRET_TTL", "")]), (4, vec![]));

    let config = with_file("ca='none'\nspiffe-id='spiffe://td/a'", "", &[("POD_NAMESPACE", "b")]).unwrap();
    let note = "spiffe-id (line 2 of F) is not used: POD_NAMESPACE is set, and wins over the options file";
    assert_eq!(config.notes, [note]);
    let keys = |environment: &[_]| {
        let content = "ca = 'none'\nkey-type = 'ecdsa-p384'\nkey-format = 'pkcs8'";
        let config = with_file(content, "", environment).unwrap();
        (config.workload.key_type, config.workload.key_format, config.notes.len())
    };
    assert_eq!(keys(&[]), (KeyType::EcdsaP384, KeyFormat::Pkcs8, 0));
    let istios = [("WORKLOAD_RSA_KEY_SIZE", "2048"), ("PKCS8_KEY", "false")];
    assert_eq!(keys(&istios), (KeyType::Rsa2048, KeyFormat::Traditional, 2));
    let own = [("ATTACHE_KEY_TYPE", "ecdsa-p256"), ("WORKLOAD_RSA_KEY_SIZE", "2048")];
    assert_eq!(keys(&own), (KeyType::EcdsaP256, KeyFormat::Pkcs8, 0));
}

#[test]
fn a_stronger_choice_between_files_and_a_ca_silences_what_belongs_to_the_other() {
    let vault = "ca='vault'\nca-address='https://a:1'\nvault-role='r'\nvault-auth-role='r'";
    let providers = |content: &str, line: &str, environment: &[_]| {
        with_file(content, line, environment).map(|config| config.providers.len())
    };
    assert_eq!(providers(vault, "", &[]), Ok(1));
    assert_eq!(providers(vault, "--file-mounted-certs", &[]), Ok(0));
    assert_eq!(providers(vault, "", &[("FILE_MOUNTED_CERTS", "true")]), Ok(0));
    let files = "file-mounted-certs = true";
    assert_eq!(providers(files, "", &[]), Ok(0));
    assert_eq!(providers(files, "--ca-address istiod:15012", &[]), Ok(1));
    assert_eq!(providers("", "--file-mounted-certs", &[("CA_ADDR", "istiod:15012")]), Ok(0));
}

#[test]
fn each_kind_of_option_is_read_from_the_file() {
    let content = r#"
ca = "vault"
ca-address = ["https://one:8200", "https://two:8200"]
vault-role = "web"
vault-auth-role = 'mesh'
ca-header = ["x-one=1", "x-two=2"]
socket-mode = 600           # read as octal, like the flag's value
allow-uid = [101, "102"]
grace-ratio = 0.25
landlock = true
file-prefix = "/etc/one:two"
output-hook-timeout = "1m"
"#;
    let config = with_file(content, "", &[("ATTACHE_CA_HEADER", "X-Two=env")]).unwrap();
    let [Provider::Vault(one), Provider::Vault(two)] = config.providers.as_slice() else { panic!() };
    assert_eq!(
        [&one.endpoint, &two.endpoint].map(|it| it.address.to_string()),
        ["https://one:8200", "https://two:8200"]
    );
    let headers: Vec<_> =
        one.headers.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
    assert_eq!(headers, ["x-two=env", "x-one=1"]);
    assert_eq!((config.socket_mode, config.workload.grace.ratio, config.landlock), (0o600, 0.25, true));
    assert_eq!(config.allowed.uids, [101, 102]);
    assert_eq!(config.files.prefixes, FilePrefixes::Given(vec!["/etc/one:two".into()]));
    assert_eq!(config.provider_reason.split(" (line 2 of ").next(), Some("ca vault"));
    // No value is shown: a header may be a credential.
    let shown = format!("{:?}", config.options_file);
    assert!(shown.contains("ca-header") && !shown.contains("x-one"), "{shown}");
    // Contradictions are judged within one level.
    let two = with_file("ca = 'embedded'\nca-address = 'a:1'", "", &[]).unwrap_err();
    assert_eq!(
        two,
        [
            "ca embedded (line 1 of F) and ca-address a:1 (line 2 of F) contradict each other: the first has no \
                      address; drop one of them"
        ]
    );
    assert!(with_file("ca-address = 'a:1'", "--ca embedded", &[]).is_ok());
    let other = with_file("cfssl-profile = 'x'\nca-address = 'a:1'", "--ca citadel", &[]);
    assert!(other.is_ok(), "the selection comes from a higher level: {other:?}");
}

#[test]
fn every_option_is_looked_up_in_the_file() {
    with_file("ca = 'none'", "", &[]).unwrap();
    let looked_up = LOOKED_UP.take();
    let run = RunArgs::augment_args(clap::Command::new("run"));
    let names = run.get_arguments().filter_map(clap::Arg::get_long).filter(|name| *name != "config");
    let missing: Vec<_> = names.filter(|name| !looked_up.contains(*name)).collect();
    assert!(missing.is_empty() && looked_up.len() > 50, "not looked up: {missing:?} of {}", looked_up.len());
}

#[test]
fn every_mistake_in_the_file_has_its_line_and_a_remedy() {
    let content = "\
ca-adress = 'a:1'
ca_address = ['a:1']
socket = true
landlock = 'yes'
cert-ttl = 'soon'
socket-mode = 0o660
ca = ['none']
allow-uid = []
namespace = ''
config = '/etc/other.toml'
help = true
crl = 2026-01-01
trust-domain = \"a\\u0000b\"
ca-header = 'authorization: Bearer s3cret'
[run]
ca = 'none'
";
    let all = with_file(content, "", &[]).unwrap_err();
    let expected = [
        "ca-adress (line 1 of F) is not an option; did you mean ca-address?",
        "ca_address (line 2 of F) is not an option; did you mean ca-address?",
        "socket (line 3 of F) takes a text in quotes, written like the flag's value",
        "landlock (line 4 of F) takes true or false, without quotes",
        "socket-mode (line 6 of F) takes a text in quotes, written like the flag's value",
        "ca (line 7 of F) takes one value, not a list",
        "allow-uid (line 8 of F) is empty: give it a value, or leave it out",
        "namespace (line 9 of F) is empty: give it a value, or leave it out",
        "config (line 10 of F) is not an option",
        "help (line 11 of F) is not an option",
        "crl (line 12 of F) takes a text in quotes, written like the flag's value",
        "trust-domain (line 13 of F) contains a NUL character",
        "run (line 15 of F) is a section: the file has none, and each option stands at its start",
        "cert-ttl (line 5 of F): \"soon\" is not a duration",
        "ca-header authorization (line 14 of F): the shape is NAME=VALUE",
    ];
    for words in expected {
        assert_eq!(all.iter().filter(|mistake| mistake.starts_with(words)).count(), 1, "{words}: {all:#?}");
    }
    // The only other one: nothing selects a CA.
    assert_eq!(all.len(), expected.len() + 1, "{all:#?}");
    assert!(!format!("{all:?}").contains("s3cret"), "{all:#?}");

    // What is no TOML is reported alone: what follows from it is not known.
    let syntax = |content: &str| with_file(content, "--ca none", &[]).unwrap_err().join("\n");
    let unquoted = syntax("ca = 'none'\nsocket = /run/sds.sock\n");
    assert!(unquoted.starts_with("line 2 of F: ") && unquoted.contains("quoted"), "{unquoted}");
    assert!(!unquoted.contains('\n'), "{unquoted}");
    let twice = syntax("crl = 'a'\n\ncrl = 'b'\n");
    assert!(twice.contains("line 3 of F: duplicate key"), "{twice}");
    let open = syntax("crl = 'a\n");
    assert!(open.contains("line 1 of F: "), "{open}");
}

#[test]
fn a_file_that_cannot_be_read_is_named_with_what_names_it() {
    let load = |line: &str, environment: &[(&str, &str)]| {
        let line = ["attache"].into_iter().chain(line.split_whitespace());
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Config::load(&Line::try_parse_from(line).unwrap().run, &environment.collect())
    };
    let failure = |line: &str, environment: &[_]| load(line, environment).unwrap_err().to_string();
    let missing = failure("--ca none --config /nowhere/a.toml", &[("ATTACHE_CONFIG", "/other")]);
    assert!(
        missing.starts_with("reading the options file /nowhere/a.toml failed: No such file"),
        "{missing}"
    );
    assert!(missing.ends_with("or change --config"), "{missing}");
    assert!(failure("--ca none", &[("ATTACHE_CONFIG", "/nowhere")]).ends_with("or change ATTACHE_CONFIG"));
    assert!(load("--ca none", &[("ATTACHE_CONFIG", "")]).is_ok());
    let directory = failure("--ca none --config /", &[]);
    assert!(directory.contains("not a regular file"), "{directory}");

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.toml");
    std::fs::write(&file, b"ca = 'none'\n\xff").unwrap();
    let binary = failure("", &[("ATTACHE_CONFIG", file.to_str().unwrap())]);
    assert!(binary.contains(&format!("line 2 of {} is not UTF-8", file.display())), "{binary}");
    std::fs::write(&file, "#".repeat(300 << 10)).unwrap();
    assert!(failure("", &[("ATTACHE_CONFIG", file.to_str().unwrap())]).contains("larger than 256 KiB"));
}

#[test]
fn what_differs_between_two_files_is_known_by_name_if_it_is_in_force() {
    let file = |content: &str, line: &str, environment: &[_]| {
        with_file(content, line, environment).unwrap().options_file.unwrap()
    };
    let before = "ca = 'none'\ncert-ttl = '1h'\ncrl = 'a'\nsocket = 'x'";
    let after = "log-level = 'debug'\ncert-ttl = '2h'\n\nsocket = 'y'\nca = 'none'\nallow-uid = [1]";
    let differences = |line: &str, environment: &[_]| {
        let (before, after) = (file(before, line, environment), file(after, line, environment));
        assert_eq!(before.differences(&before).len(), 0);
        before.differences(&after).into_iter().collect::<Vec<_>>()
    };
    assert_eq!(differences("", &[]), ["allow-uid", "cert-ttl", "crl", "log-level", "socket"]);
    let environment = [("ATTACHE_ALLOW_UID", "2"), ("SECRET_TTL", "1h")];
    assert_eq!(differences("--log-level info --socket z", &environment), ["crl"]);
}
