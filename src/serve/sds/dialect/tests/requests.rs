//! Single requests: the first one, refusals, and bounds.

use super::*;

fn request<D: ClientDialect>(node: Option<&str>, type_url: &str, names: Vec<String>) -> D::Request {
    D::request(RequestFields {
        node: node.map(|id| Node { id: id.to_owned(), ..Node::default() }),
        type_url: type_url.to_owned(),
        subscribe: names.clone(),
        names,
        ..RequestFields::default()
    })
}

in_both_dialects! {
    only_the_first_request_must_carry_a_node_id
    only_secrets_are_served
    a_stream_has_a_bounded_number_of_names
    the_names_of_a_stream_have_a_bounded_length
}

fn only_the_first_request_must_carry_a_node_id<D: ClientDialect>() {
    let request = |node| request::<D>(node, "", strings(&["a"]));
    for missing in [None, Some("")] {
        let (mut session, mut dialect) = (Session::default(), D::default());
        let refusal = dialect.receive(&mut session, request(missing)).unwrap_err();
        assert_eq!(refusal, Refusal::NoNode);
        let status = tonic::Status::from(refusal);
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains("node id"), "{}", status.message());
        assert_eq!(session.names().count(), 0, "a refused request subscribes to nothing");
    }
    let (mut session, mut dialect) = (Session::default(), D::default());
    dialect.receive(&mut session, request(Some("envoy"))).unwrap();
    for later in [None, Some(""), Some("another")] {
        dialect.receive(&mut session, request(later)).unwrap();
        assert_eq!(&*dialect.node_id(), "envoy");
    }
}

fn only_secrets_are_served<D: ClientDialect>() {
    let url = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
    let cases = [("", None), (SECRET_TYPE_URL, None), (url, Some(Refusal::UnsupportedType(url.to_owned())))];
    for (type_url, refusal) in cases {
        let request = || request::<D>(Some("envoy"), type_url, Vec::new());
        let received = D::default().receive(&mut Session::default(), request());
        assert_eq!(received.err(), refusal, "{type_url:?} at first");
        let mut talk = Talk::<D>::default();
        talk.open(&["a"], Vec::new());
        assert_eq!(talk.dialect.receive(&mut talk.session, request()).err(), refusal, "{type_url:?} later");
    }
    let status = tonic::Status::from(Refusal::UnsupportedType(url.to_owned()));
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

fn a_stream_has_a_bounded_number_of_names<D: ClientDialect>() {
    let names = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>();
    let request = |names| request::<D>(Some("envoy"), "", names);
    let (mut session, mut dialect) = (Session::default(), D::default());
    let most = limits::NAMES_PER_STREAM;
    dialect.receive(&mut session, request(names(most))).unwrap();
    assert_eq!(session.names().count(), most);
    // Repeated names count once.
    dialect.receive(&mut session, request([names(most), names(most)].concat())).unwrap();
    assert_eq!(session.names().count(), most);
    let refusal = dialect.receive(&mut session, request(names(most + 1))).unwrap_err();
    assert_eq!(refusal, Refusal::TooManyNames(most + 1));
    assert_eq!(tonic::Status::from(refusal).code(), tonic::Code::ResourceExhausted);
}

fn the_names_of_a_stream_have_a_bounded_length<D: ClientDialect>() {
    let most = limits::NAME_BYTES_PER_STREAM;
    let (mut session, mut dialect) = (Session::default(), D::default());
    let long = vec!["x".repeat(most - 1)];
    dialect.receive(&mut session, request::<D>(Some("envoy"), "", long.clone())).unwrap();
    let more = |more: &str| request::<D>(None, "", [long.clone(), strings(&[more])].concat());
    dialect.receive(&mut session, more("y")).unwrap();
    let refusal = dialect.receive(&mut session, more("zz")).unwrap_err();
    // In delta the other name is still subscribed.
    assert_eq!(refusal, Refusal::TooLongNames(most + if D::IS_DELTA { 2 } else { 1 }));
    assert_eq!(tonic::Status::from(refusal).code(), tonic::Code::ResourceExhausted);
}

#[test]
fn an_empty_first_request_has_no_response() {
    fn has_no_response<D: ClientDialect>() {
        let mut talk = Talk::<D>::default();
        talk.publish("a", "1");
        talk.receive(RequestFields { node: RequestFields::node(), ..RequestFields::default() });
        assert_eq!(talk.received, Received::default());
        talk.expect(&[], &[]);
    }
    has_no_response::<StateOfTheWorld>();
    has_no_response::<Delta>();
}
