use super::*;

fn sockets(line: &str, environment: &[(&str, &str)]) -> Vec<String> {
    let config = config(&format!("--ca none {line}"), environment).unwrap();
    config.sockets().map(|path| path.display().to_string()).collect()
}

#[test]
fn sockets_are_repeatable_and_the_first_is_that_of_admin_commands() {
    assert_eq!(sockets("", &[]), [DEFAULT_SOCKET]);
    assert_eq!(sockets("--socket /a --socket /b:c", &[]), ["/a", "/b:c"]);
    let environment = [("ATTACHE_SOCKET", "/a:/b")];
    assert_eq!(sockets("", &environment), ["/a", "/b"]);
    assert_eq!(sockets("--socket /c", &environment), ["/c"]);
    let admin = config("--ca none --socket /a --socket /b", &[]).unwrap().admin_socket.unwrap().path;
    assert_eq!(admin, Path::new("/a.admin"));
}

#[test]
fn a_socket_that_is_named_twice_is_a_mistake() {
    for (line, environment, words) in [
        ("--socket /tmp/a --socket /tmp/../tmp/a", "", "--socket /tmp/../tmp/a is named twice"),
        ("--socket /a --socket /a.admin", "", "/a.admin is the SDS socket, too"),
        ("--socket /a --socket /b --admin-socket /b", "", "/b is the SDS socket, too"),
        ("", "/a:", "ATTACHE_SOCKET: a socket needs a path"),
    ] {
        let all = mistakes(&format!("--ca none {line}"), &[("ATTACHE_SOCKET", environment)]);
        assert!(all.len() == 1 && all[0].contains(words), "{line}: {all:?}");
    }
    let long = "x".repeat(200);
    let all = mistakes(&format!("--ca none --socket /a --socket /{long}"), &[]);
    assert!(all.len() == 1 && all[0].contains("has 201 bytes"), "{all:?}");
}
