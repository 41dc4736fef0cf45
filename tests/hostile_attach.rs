//! Peers that lie while they attach: each is refused with a typed reason, nothing of it stays, and
//! others attach as before.

mod common;

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use common::daemon::Daemon;
use common::wait_for;
use common::worker::{Model, RING, Worker, attach, grpc, prompt, ring, shake};
use engram::device::fds::send_with_fds;
use engram::device::shm::SharedMap;
use engram::proto::handshake::HandshakeError;
use engram::proto::v1;
use engram::proto::v1::refusal::Reason;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// A lie in a description, and why it is refused.
type Lie = (&'static str, Reason, fn(&mut v1::AttachRequest));

const LIES: &[Lie] = &[
    ("protocol", Reason::ProtocolVersion, |it| it.protocol = 2000),
    ("no protocol", Reason::ProtocolVersion, |it| it.protocol = 0),
    ("channel", Reason::ChannelVersion, |it| {
        it.channel_version += 1
    }),
    ("instance", Reason::BadIdentity, |it| {
        it.instance = vec![1; 15].into()
    }),
    ("no model", Reason::BadIdentity, |it| it.model = None),
    ("digest", Reason::BadIdentity, |it| {
        it.model.as_mut().unwrap().weights_digest = vec![0; 33].into();
    }),
    ("name", Reason::BadIdentity, |it| {
        it.model.as_mut().unwrap().display_name = "x".repeat(4096);
    }),
    ("unknown pool", Reason::UnknownPool, |it| {
        it.unknown = vec!["ple.window".into()];
    }),
    ("no state", Reason::BadGeometry, |it| it.state.clear()),
    ("no KV", Reason::BadGeometry, |it| it.kv.clear()),
    ("overflow", Reason::BadGeometry, |it| {
        it.state[1].shape = vec![u32::MAX; 8]
    }),
    ("too deep", Reason::BadGeometry, |it| {
        it.state[1].shape = vec![1; 9]
    }),
    ("a path", Reason::BadGeometry, |it| {
        it.state[0].name = "../../x".into()
    }),
    ("twice", Reason::BadGeometry, |it| {
        it.state[0].name = "temporal".into()
    }),
    ("no dtype", Reason::BadGeometry, |it| it.state[0].dtype = 99),
    ("layers", Reason::BadGeometry, |it| {
        it.state[0].layers = vec![2, 0]
    }),
    ("many layers", Reason::BadGeometry, |it| {
        it.kv = vec![it.kv[0]; 2000]
    }),
    ("wide rows", Reason::BadGeometry, |it| {
        it.kv[0].heads = u32::MAX
    }),
    ("layout", Reason::BadGeometry, |it| it.layout = 0),
    ("page 0", Reason::BadGeometry, |it| it.page_size = 0),
    ("half a page", Reason::BadGeometry, |it| {
        it.page_size = 64;
        it.rows = 100;
    }),
    ("no rows", Reason::BadGeometry, |it| it.rows = 0),
    ("rows", Reason::BadGeometry, |it| it.rows = u64::MAX),
    ("no shard", Reason::BadGeometry, |it| it.shard = None),
    ("rank", Reason::BadGeometry, |it| {
        it.shard.as_mut().unwrap().attn_tp_rank = 1
    }),
    ("no ring", Reason::RingTooSmall, |it| it.ring = None),
    ("small ring", Reason::RingTooSmall, |it| {
        it.ring.as_mut().unwrap().bytes = 4096
    }),
    ("vast ring", Reason::RingTooSmall, |it| {
        it.ring.as_mut().unwrap().bytes = u64::MAX
    }),
    ("device", Reason::DeviceUnavailable, |it| {
        it.ring.as_mut().unwrap().device = 7
    }),
    ("no GPU here", Reason::DeviceUnavailable, |it| {
        it.ring.as_mut().unwrap().device = v1::DeviceKind::Cuda.into();
    }),
    ("modes", Reason::NoCommonMode, |it| it.modes.clear()),
];

#[test]
fn every_lie_of_a_description_is_refused_by_its_reason() {
    let daemon = Daemon::start(&[]);
    for (name, reason, lie) in LIES {
        let mut request = Model::default().request();
        lie(&mut request);
        let refusal = attach(&daemon.grpc_socket(), request).expect_err(name);
        assert_eq!(refusal.reason(), *reason, "{name}: {}", refusal.message);
        assert!(!refusal.message.is_empty(), "{name}");
    }
    let refused = daemon.get("/metrics").text().to_owned();
    let refused = refused.lines().filter_map(|line| {
        let (_, count) = line
            .strip_prefix("engram_attach_refused_total{")?
            .split_once(' ')?;
        count.parse::<usize>().ok()
    });
    assert_eq!(refused.sum::<usize>(), LIES.len());
    assert_eq!(
        daemon.get("/v1/workers").json()["workers"],
        serde_json::json!([])
    );
    works(&daemon);
}

#[test]
fn a_description_without_end_is_not_even_read() {
    let daemon = Daemon::start(&[]);
    let mut request = Model::default().request();
    request.unknown = vec!["x".repeat(1 << 20); 16];
    let answer = grpc(&daemon.grpc_socket(), |mut client| async move {
        client.attach(request).await.map(drop)
    });
    assert_eq!(answer.unwrap_err().code(), tonic::Code::OutOfRange);
    works(&daemon);
}

#[test]
fn no_more_workers_attach_than_are_allowed() {
    let daemon = Daemon::start(&[("service.max_workers", 2.into())]);
    let one = Worker::attach(&daemon);
    let two = Worker::attach(&daemon);
    let refusal = attach(&daemon.grpc_socket(), Model::default().request()).unwrap_err();
    assert_eq!(refusal.reason(), Reason::TooManyWorkers);
    assert!(refusal.retry_after_ms > 0);
    // The same rank again takes its own place.
    let again = Worker::attach_as(&daemon, &one.model.clone());
    drop(again);
    two.die();
    wait_for("a free place", || {
        attach(&daemon.grpc_socket(), Model::default().request()).ok()
    });
}

#[test]
fn a_ring_that_is_not_what_it_should_be_is_refused() {
    let daemon = Daemon::start(&[]);
    let unsealed = || -> OwnedFd {
        let fd = memfd_create(c"ring", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING);
        let fd = fd.unwrap();
        nix::unistd::ftruncate(&fd, RING as i64).unwrap();
        fd
    };
    let file = || -> OwnedFd {
        let file = tempfile::tempfile().unwrap();
        file.set_len(RING).unwrap();
        file.into()
    };
    let made = |len| SharedMap::create("ring", len).unwrap().1;
    let rings: [(&str, Reason, Option<OwnedFd>); 7] = [
        ("none", Reason::DeviceUnavailable, None),
        ("unsealed", Reason::DeviceUnavailable, Some(unsealed())),
        ("a file", Reason::DeviceUnavailable, Some(file())),
        ("short", Reason::DeviceUnavailable, Some(made(RING / 2))),
        (
            "a pipe",
            Reason::DeviceUnavailable,
            Some(nix::unistd::pipe().unwrap().0),
        ),
        (
            "a socket",
            Reason::DeviceUnavailable,
            Some(UnixStream::pair().unwrap().0.into()),
        ),
        ("no pattern", Reason::SelfTest, Some(made(RING))),
    ];
    for (name, expected, fd) in rings {
        let attached = attach(&daemon.grpc_socket(), Model::default().request()).unwrap();
        let fd = fd.as_ref().map(|fd| fd.as_fd());
        match shake(&attached, &attached.secret, fd).expect_err(name) {
            HandshakeError::Refused { reason, .. } => assert_eq!(reason, expected, "{name}"),
            other => panic!("{name}: {other}"),
        }
        // The session is over: its secret opens nothing any more.
        let ring = ring();
        let again = shake(&attached, &attached.secret, Some(ring.fd()));
        assert!(again.is_err(), "{name}");
    }
    assert_eq!(daemon.metric("engram_sessions"), 0.0);
    works(&daemon);
}

#[test]
fn only_who_attached_gets_the_channel_and_only_once() {
    let daemon = Daemon::start(&[]);
    let attached = attach(&daemon.grpc_socket(), Model::default().request()).unwrap();
    let ring = ring();
    let mut secret = attached.secret.to_vec();
    secret[31] ^= 1;
    assert!(is_unauthenticated(shake(
        &attached,
        &secret,
        Some(ring.fd())
    )));
    assert!(is_unauthenticated(shake(
        &attached,
        &[0; 32],
        Some(ring.fd())
    )));
    let mut other = attached.clone();
    other.session = vec![7; 16].into();
    assert!(is_unauthenticated(shake(
        &other,
        &attached.secret,
        Some(ring.fd())
    )));
    // Guessing has not ended the session of the true one.
    let passed = shake(&attached, &attached.secret, Some(ring.fd())).unwrap();
    assert!(is_unauthenticated(shake(
        &attached,
        &attached.secret,
        Some(ring.fd())
    )));
    let mut worker = Worker::from_parts(&attached, passed, ring, &Model::default());
    worker.heard_all();
}

#[test]
fn garbage_and_silence_on_the_socket_for_descriptors_hold_up_nobody() {
    let daemon = Daemon::start(&[]);
    let attached = attach(&daemon.grpc_socket(), Model::default().request()).unwrap();
    let connect = || UnixStream::connect(Path::new(&attached.fd_socket)).unwrap();
    let silent: Vec<_> = (0..64).map(|_| connect()).collect();
    for bytes in [
        &[0; 64][..],
        &[0xff; 64],
        b"GET / HTTP/1.1\r\n\r\n",
        &[7; 100_000],
    ] {
        let mut stream = connect();
        // It may hang up before it has read everything.
        stream.write_all(bytes).ok();
        stream.shutdown(std::net::Shutdown::Write).ok();
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok();
    }
    // More descriptors than belong there.
    let ring = ring();
    let stream = connect();
    send_with_fds(&stream, &[0; 64], &[ring.fd(); 4]).unwrap();
    works(&daemon);
    drop(silent);
}

#[test]
fn a_stream_without_a_right_hello_is_refused_and_the_end_of_one_ends_the_session() {
    use v1::worker_event::Event;
    let daemon = Daemon::start(&[]);
    let mut worker = Worker::attach(&daemon);
    let hello = |session: &[u8], secret: &[u8]| {
        Event::Hello(v1::Hello {
            session: session.to_vec().into(),
            secret: secret.to_vec().into(),
        })
    };
    let attached = attach(&daemon.grpc_socket(), Model::default().request()).unwrap();
    let firsts = [
        hello(&attached.session, &[0; 32]),
        hello(&worker.session, &attached.secret),
        hello(b"", b""),
        Event::Beat(v1::WorkerBeat::default()),
    ];
    for first in firsts {
        let status = stream(&daemon, vec![first]).unwrap_err();
        let code = status.code();
        let typed = matches!(
            code,
            tonic::Code::Unauthenticated | tonic::Code::InvalidArgument
        );
        assert!(typed, "{status}");
    }
    assert!(stream(&daemon, vec![]).is_err());
    worker.heard_all();
    assert_eq!(daemon.metric("engram_sessions"), 2.0);
    // A right one that ends takes its session along, and no other.
    stream(&daemon, vec![hello(&attached.session, &attached.secret)]).unwrap();
    wait_for("the end of one session", || {
        (daemon.metric("engram_sessions") == 1.0).then_some(())
    });
    worker.heard_all();
}

/// Says these events on a stream of their own and ends it.
fn stream(daemon: &Daemon, events: Vec<v1::worker_event::Event>) -> Result<(), tonic::Status> {
    grpc(&daemon.grpc_socket(), |mut client| async move {
        let events = events
            .into_iter()
            .map(|event| v1::WorkerEvent { event: Some(event) });
        let mut said = client
            .session(tokio_stream::iter(events))
            .await?
            .into_inner();
        while said.message().await?.is_some() {}
        Ok(())
    })
}

fn is_unauthenticated<T>(result: Result<T, HandshakeError>) -> bool {
    matches!(
        result,
        Err(HandshakeError::Refused {
            reason: Reason::Unauthenticated,
            ..
        })
    )
}

/// An honest worker attaches, saves and restores.
fn works(daemon: &Daemon) {
    let mut worker = Worker::attach(daemon);
    let tokens = prompt(1, 300);
    worker.turn("honest", &tokens, 256);
    assert_eq!(worker.restore(&tokens).unwrap().boundary, 256);
}
