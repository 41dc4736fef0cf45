//! Both languages speak the same protocol: every message in both directions through a real memfd,
//! and the handshake with its descriptors, with Rust and Python in processes of their own.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use engram::device::shm::SharedMap;
use engram::device::{Doorbell, SELF_TEST_BYTES, pattern};
use engram::proto::channel::layout::{CloseReason, HANDSHAKE_SELF_TEST_BYTES};
use engram::proto::channel::msg::{Down, Up};
use engram::proto::channel::{
    Capacities, DaemonEnd, Link, Message, PushError, Reader, WorkerEnd, Writer,
};
use engram::proto::handshake::{self, Grant, HandshakeError};
use engram::proto::v1::refusal::Reason;
use engram::types::TransferMode;

const LONG: Duration = Duration::from_secs(60);
const ROUNDS: usize = 40;
const TOKENS: u32 = 100_000;
const BOOT: [u8; 16] = [9; 16];
const SMALL: Capacities = Capacities {
    up: 64 << 10,
    down: 16 << 10,
};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/engram/v1/golden.json")
}

fn session() -> [u8; 16] {
    std::array::from_fn(|i| i as u8)
}

fn secret() -> [u8; 32] {
    std::array::from_fn(|i| i as u8)
}

/// A Python process that does not outlive the test.
struct Peer(Child);

impl Peer {
    fn start(role: &str, socket: &Path) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let child = Command::new(python)
            .args(["-B", "-W", "error"])
            .arg(root.join("tests/channel_peer.py"))
            .arg(role)
            .arg(socket)
            .arg(golden())
            .env("PYTHONPATH", root.join("python-shim/src"))
            .spawn();
        Self(child.expect("Python 3.11 or newer"))
    }

    fn finish(mut self) {
        let started = Instant::now();
        while started.elapsed() < LONG {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            std::thread::yield_now();
        }
        panic!("the Python side did not end");
    }

    fn check_alive(&mut self) {
        assert_eq!(
            self.0.try_wait().unwrap(),
            None,
            "the Python side ended early"
        );
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The golden messages of one direction, `ROUNDS` times.
fn messages<M: Message + Clone>(direction: &str) -> VecDeque<M> {
    let text = std::fs::read(golden()).unwrap();
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap();
    let of_direction = rows.iter().filter(|row| row["direction"] == direction);
    let all: Vec<M> = of_direction
        .map(|row| {
            let hex = row["body"].as_str().unwrap().as_bytes();
            let pairs = hex.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
            let body: Vec<u8> = pairs
                .map(|pair| u8::from_str_radix(pair, 16).unwrap())
                .collect();
            M::decode(row["kind"].as_u64().unwrap() as u16, &body).unwrap()
        })
        .collect();
    std::iter::repeat_n(all, ROUNDS).flatten().collect()
}

fn exchange<O, I>(peer: &mut Peer, tx: &mut Writer<O>, rx: &mut Reader<I>, out: &str, back: &str)
where
    O: Message + Clone,
    I: Message + Clone + PartialEq + std::fmt::Debug,
{
    let (mut out, mut expected) = (messages::<O>(out), messages::<I>(back));
    let started = Instant::now();
    while !out.is_empty() || !expected.is_empty() {
        while let Some(message) = out.front() {
            match tx.push(message) {
                Ok(()) => out.pop_front(),
                Err(PushError::Full) => break,
                Err(error) => panic!("{error}"),
            };
        }
        while let Some(message) = expected.front() {
            let Some(heard) = rx.pop().unwrap() else {
                break;
            };
            assert_eq!(&heard, message);
            expected.pop_front();
        }
        peer.check_alive();
        assert!(
            started.elapsed() < LONG,
            "{} to say, {} to hear",
            out.len(),
            expected.len()
        );
        std::thread::yield_now();
    }
}

fn wait<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(started.elapsed() < LONG, "timeout");
        std::thread::yield_now();
    }
}

fn peer_beats(link: &Link) -> Option<()> {
    (link.peer_beat() > 0).then_some(())
}

#[tokio::test]
async fn a_python_worker_and_a_rust_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fds");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let mut peer = Peer::start("worker", &path);
    let (stream, _) = tokio::time::timeout(LONG, listener.accept())
        .await
        .unwrap()
        .unwrap();
    let request = tokio::time::timeout(LONG, handshake::receive(&stream))
        .await
        .unwrap()
        .unwrap();
    assert_eq!((request.session, request.secret), (session(), secret()));

    assert_eq!(HANDSHAKE_SELF_TEST_BYTES, SELF_TEST_BYTES);
    let ring = SharedMap::open(request.window.unwrap(), 1 << 20).unwrap();
    for i in 0..HANDSHAKE_SELF_TEST_BYTES {
        let mut byte = [0];
        ring.read(i, &mut byte).unwrap();
        assert_eq!(byte[0], handshake::self_test_byte(i));
        assert_eq!(byte[0], pattern(i));
        ring.write(i, &[!byte[0]]).unwrap();
    }

    let (map, channel) = SharedMap::create("channel", SMALL.bytes()).unwrap();
    let map = Arc::new(map);
    let mut end = DaemonEnd::create(&map, SMALL, BOOT, session()).unwrap();
    let doorbell = Doorbell::new().unwrap();
    let listener = doorbell.listen().unwrap();
    let granted = Grant {
        channel: channel.as_fd(),
        channel_bytes: SMALL.bytes(),
        doorbell: doorbell.fd(),
        mode: TransferMode::Engine,
    };
    handshake::grant(&stream, granted).await.unwrap();
    tokio::time::timeout(LONG, listener.wait())
        .await
        .unwrap()
        .unwrap();

    exchange::<Down, Up>(&mut peer, &mut end.tx, &mut end.rx, "down", "up");
    for req in 1..=3_u64 {
        let mut heard = Vec::new();
        while heard.len() < TOKENS as usize {
            let tokens = match wait(|| end.rx.pop().unwrap()) {
                Up::Tokens(tokens) if req == 2 => tokens,
                Up::TokensWide(wide) if req != 2 => wide.narrow().unwrap(),
                other => panic!("{} for request {req}", other.name()),
            };
            assert_eq!((tokens.req, tokens.offset as usize), (req, heard.len()));
            heard.extend(tokens.ids);
        }
        assert!(heard.into_iter().eq(0..TOKENS));
    }
    wait(|| peer_beats(&end.link));
    end.link.beat();
    assert_eq!(wait(|| end.link.peer_closed()), CloseReason::Detached);
    end.link.close(CloseReason::Shutdown);
    drop(stream);
    peer.finish();
}

#[test]
fn a_rust_worker_and_a_python_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fds");
    let mut peer = Peer::start("daemon", &path);
    wait(|| {
        peer.check_alive();
        path.exists().then_some(())
    });
    let refused = handshake::connect(&path, session(), secret(), None, LONG);
    let Err(HandshakeError::Refused { reason, text }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((reason, text.as_str()), (Reason::NotReady, "später"));

    let (ring_map, ring) = SharedMap::create("ring", 1 << 20).unwrap();
    for i in 0..HANDSHAKE_SELF_TEST_BYTES {
        ring_map.write(i, &[handshake::self_test_byte(i)]).unwrap();
    }
    let passed = handshake::connect(&path, session(), secret(), Some(ring.as_fd()), LONG).unwrap();
    assert_eq!(passed.mode, TransferMode::Ipc);
    assert_eq!(passed.channel_bytes, SMALL.bytes());
    let mut magic = [0; 8];
    File::from(passed.channel.try_clone().unwrap())
        .read_exact_at(&mut magic, 0)
        .unwrap();
    assert_eq!(&magic, b"ENGRMCH1");
    let map = Arc::new(SharedMap::open(passed.channel, passed.channel_bytes).unwrap());
    let mut end = WorkerEnd::open(&map).unwrap();
    assert_eq!((end.boot, end.session), (BOOT, session()));

    exchange::<Up, Down>(&mut peer, &mut end.tx, &mut end.rx, "up", "down");
    let ids: Vec<u32> = (0..TOKENS).collect();
    let (mut sent, started) = (0, Instant::now());
    while let Some(rest) = ids.get(sent..).filter(|rest| !rest.is_empty()) {
        sent += end.tx.push_tokens(1, sent as u32, rest).unwrap();
        assert!(started.elapsed() < LONG);
        peer.check_alive();
        std::thread::yield_now();
    }
    assert!(end.tx.take_written());
    passed.doorbell.ring().unwrap();
    end.link.beat();
    wait(|| peer_beats(&end.link));
    end.link.close(CloseReason::Detached);
    assert_eq!(wait(|| end.link.peer_closed()), CloseReason::Shutdown);
    // Nothing is left unread, as the daemon says by its tail.
    let tail = map.load_u64(
        engram::proto::channel::layout::header::UP_TAIL,
        Ordering::Acquire,
    );
    assert!(tail.unwrap() > SMALL.up);
    drop(passed.connection);
    peer.finish();
}
