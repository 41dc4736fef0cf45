use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;

use super::*;
use crate::device::shm::SharedMap;

const LONG: Duration = Duration::from_secs(30);

/// What a worker gets from a daemon that does `daemon` with its connection. Both share nothing but
/// the socket.
fn meet<F>(
    ring: Option<BorrowedFd<'_>>,
    timeout: Duration,
    daemon: F,
) -> Result<Passed, HandshakeError>
where
    F: FnOnce(UnixStream) + Send + 'static,
{
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fds");
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = thread::spawn(move || daemon(listener.accept().unwrap().0));
    let passed = connect(&path, [3; 16], [4; 32], ring, timeout);
    daemon.join().unwrap();
    passed
}

/// Runs the daemon's side as it is.
fn serve<Fut: Future<Output = ()>>(
    stream: UnixStream,
    serve: impl FnOnce(tokio::net::UnixStream) -> Fut,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        stream.set_nonblocking(true).unwrap();
        serve(tokio::net::UnixStream::from_std(stream).unwrap()).await;
    });
}

fn memory(name: &str) -> (Arc<SharedMap>, OwnedFd) {
    let (map, fd) = SharedMap::create(name, 4096).unwrap();
    (Arc::new(map), fd)
}

#[test]
fn descriptors_change_hands_both_ways() {
    for with_ring in [false, true] {
        for mode in TransferMode::ALL {
            let (ring_map, ring) = memory("ring");
            let passed = meet(with_ring.then(|| ring.as_fd()), LONG, move |stream| {
                serve(stream, |stream| async move {
                    let request = receive(&stream).await.unwrap();
                    assert_eq!((request.session, request.secret), ([3; 16], [4; 32]));
                    assert_eq!(request.window.is_some(), with_ring);
                    if let Some(ring) = request.window {
                        File::from(ring).write_all_at(b"daemon", 8).unwrap();
                    }
                    let [(_, channel), (_, doorbell)] = ["channel", "bell"].map(memory);
                    for (fd, byte) in [(&channel, 1), (&doorbell, 2)] {
                        File::from(fd.try_clone().unwrap())
                            .write_all_at(&[byte], 0)
                            .unwrap();
                    }
                    let granted = Grant {
                        channel: channel.as_fd(),
                        channel_bytes: 4096,
                        doorbell: doorbell.as_fd(),
                        mode,
                    };
                    grant(&stream, granted).await.unwrap();
                });
            })
            .unwrap();
            let first = |fd: &OwnedFd| {
                let mut byte = [0];
                File::from(fd.try_clone().unwrap())
                    .read_exact_at(&mut byte, 0)
                    .unwrap();
                byte[0]
            };
            assert_eq!(
                (
                    first(&passed.channel),
                    first(&passed.doorbell.fd().try_clone_to_owned().unwrap())
                ),
                (1, 2)
            );
            assert_eq!(passed.channel_bytes, 4096);
            assert_eq!(passed.mode, mode);
            let mut bytes = [0; 6];
            ring_map.read(8, &mut bytes).unwrap();
            assert_eq!(&bytes, if with_ring { b"daemon" } else { &[0; 6] });
            fds::wait_closed(&passed.connection).unwrap();
        }
    }
}

#[test]
fn a_refusal_carries_its_reason_and_a_text_that_is_not_too_long() {
    let error = meet(None, LONG, |stream| {
        serve(stream, |stream| async move {
            receive(&stream).await.unwrap();
            refuse(&stream, Reason::SelfTest, &"€".repeat(1000))
                .await
                .unwrap();
        });
    })
    .unwrap_err();
    let HandshakeError::Refused { reason, text } = error else {
        panic!("{error}")
    };
    assert_eq!(reason, Reason::SelfTest);
    assert_eq!(text, "€".repeat(341));
    assert_ne!(status(Reason::Unspecified), 0);
}

fn request(change: impl FnOnce(&mut HandshakeRequest), descriptors: usize) -> HandshakeError {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (worker, daemon) = tokio::net::UnixStream::pair().unwrap();
        let mut request = HandshakeRequest {
            magic: HANDSHAKE_MAGIC,
            version: VERSION,
            descriptors: descriptors as u32,
            session: [0; 16],
            secret: [0; 32],
        };
        change(&mut request);
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        assert_eq!(bytes.len(), REQUEST_BYTES);
        let null = File::open("/dev/null").unwrap();
        fds::send_with_fds_async(&worker, &bytes, &vec![null.as_fd(); descriptors])
            .await
            .unwrap();
        receive(&daemon).await.unwrap_err()
    })
}

#[test]
fn a_request_that_lies_is_refused() {
    assert!(matches!(request(|r| r.magic = 1, 0), HandshakeError::Magic));
    assert!(matches!(
        request(|r| r.version = VERSION + 1, 1),
        HandshakeError::Version(version) if version == VERSION + 1
    ));
    for (said, came) in [(1, 0), (0, 1), (2, 1), (u32::MAX, 0)] {
        let error = request(|r| r.descriptors = said, came);
        assert!(
            matches!(error, HandshakeError::Descriptors { .. }),
            "{error}"
        );
    }
    assert!(matches!(
        request(|_| (), 2),
        HandshakeError::Descriptors { said: 2, came: 2 }
    ));
    assert!(matches!(
        request(|_| (), 4),
        HandshakeError::Descriptors { said: 4, came: 4 }
    ));
}

fn reply(
    change: impl FnOnce(&mut HandshakeReply),
    descriptors: usize,
) -> Result<Passed, HandshakeError> {
    let mut reply = HandshakeReply {
        magic: HANDSHAKE_MAGIC,
        version: VERSION,
        status: 0,
        descriptors: descriptors as u32,
        channel_bytes: 4096,
        mode: 1,
        reason: String::new(),
    };
    change(&mut reply);
    meet(None, LONG, move |stream| {
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        let null = File::open("/dev/null").unwrap();
        // A socket that closes before it has read the request would be another error.
        (&stream).read_exact(&mut [0; REQUEST_BYTES]).unwrap();
        fds::send_with_fds(&stream, &bytes, &vec![null.as_fd(); descriptors]).unwrap();
    })
}

#[test]
fn a_reply_that_lies_is_an_error() {
    assert!(reply(|_| (), 2).is_ok());
    assert!(reply(|r| r.mode = 2, 2).is_ok());
    for unknown in [0, 3, u32::MAX] {
        let error = reply(|r| r.mode = unknown, 2).unwrap_err();
        assert!(matches!(error, HandshakeError::Mode(mode) if mode == unknown));
    }
    assert!(matches!(
        reply(|r| r.magic = 0, 2),
        Err(HandshakeError::Magic)
    ));
    assert!(matches!(
        reply(|r| r.version = 9, 2),
        Err(HandshakeError::Version(9))
    ));
    let too_long = "x".repeat(HANDSHAKE_MAX_REASON_BYTES + 1);
    assert!(matches!(
        reply(|r| r.reason = too_long, 2),
        Err(HandshakeError::Reason(1025))
    ));
    for (said, came) in [(0, 0), (1, 1), (3, 2), (2, 3), (3, 3), (4, 4)] {
        let passed = reply(|r| r.descriptors = said, came);
        assert!(
            matches!(passed, Err(HandshakeError::Descriptors { .. })),
            "{said} {came}"
        );
    }
    // An older or newer daemon still gets its refusal through, whatever the number.
    let refused = reply(
        |r| {
            (r.status, r.version) = (u32::MAX, 9);
            r.reason = "no".into();
        },
        0,
    );
    let Err(HandshakeError::Refused { reason, text }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((reason, text.as_str()), (Reason::Unspecified, "no"));
}

#[test]
fn a_daemon_that_goes_away_or_says_nothing_is_an_error() {
    let error = meet(None, LONG, drop).unwrap_err();
    assert!(matches!(error, HandshakeError::Socket(_)), "{error}");
    let silent = meet(None, Duration::from_millis(50), |stream| {
        let _ = fds::wait_closed(&stream);
        let mut rest = Vec::new();
        let _ = std::io::Read::read_to_end(&mut &stream, &mut rest);
    });
    let Err(HandshakeError::Socket(error)) = silent else {
        panic!("{silent:?}")
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let nowhere = connect(Path::new("/nonexistent/fds"), [0; 16], [0; 32], None, LONG);
    assert!(matches!(nowhere, Err(HandshakeError::Socket(_))));
}

#[test]
fn the_secret_is_not_shown() {
    let request = Request {
        session: [1; 16],
        secret: [0xAB; 32],
        window: None,
    };
    assert!(!format!("{request:?}").contains("171"));
}
