//! A worker process and a daemon process exchange descriptors, memory and rings of the doorbell.
//!
//! The child is this same test binary, told by the environment to play the worker.

use std::{
    env,
    os::{fd::AsFd, unix::net::UnixListener, unix::net::UnixStream},
    process::Command,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use engram::device::{
    Device, Doorbell, Peer, PeerProcess, RingExport, SELF_TEST_BYTES,
    fds::{recv_with_fds, send_with_fds, wait_closed},
    host::HostDevice,
    pattern,
    shm::SharedMap,
};

const ROLE: &str = "ENGRAM_TEST_WORKER_SOCKET";
const TEST: &str = "descriptors_cross_processes";
const RING: u64 = 1 << 20;
const CHANNEL: u64 = 8192;
const LONG: Duration = Duration::from_secs(60);

#[test]
fn descriptors_cross_processes() {
    match env::var_os(ROLE) {
        Some(socket) => worker(UnixStream::connect(socket).unwrap()),
        None => daemon(),
    }
}

fn worker(stream: UnixStream) {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let (ring, fd) = SharedMap::create("ring", RING).unwrap();
    let said: Vec<u8> = (0..SELF_TEST_BYTES).map(pattern).collect();
    ring.write(0, &said).unwrap();
    send_with_fds(&stream, b"ring", &[fd.as_fd()]).unwrap();

    let mut reply = [0; 8];
    let fds = recv_with_fds(&stream, &mut reply).unwrap();
    assert_eq!(&reply, b"channel!");
    let [channel, doorbell] = <[_; 2]>::try_from(fds).unwrap();
    let channel = SharedMap::open(channel, CHANNEL).unwrap();
    let doorbell = Doorbell::from_fd(doorbell);
    let mut answer = vec![0; SELF_TEST_BYTES as usize];
    ring.read(0, &mut answer).unwrap();
    let right = answer
        .iter()
        .zip(&said)
        .all(|(answer, said)| *answer == !said);
    channel
        .write(4096, if right { b"complement" } else { b"wrong byte" })
        .unwrap();
    channel.store_u64(0, 1, Ordering::Release).unwrap();
    doorbell.ring().unwrap();
    // Lives until the daemon hangs up.
    wait_closed(&stream).unwrap();
}

fn daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fds.sock");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut child = Command::new(env::current_exe().unwrap())
        .args([TEST, "--exact", "--nocapture"])
        .env(ROLE, &path)
        .spawn()
        .unwrap();
    let stream = accept(&listener);
    stream.set_read_timeout(Some(LONG)).unwrap();
    let peer = Peer::of(&stream).unwrap();
    assert_eq!(peer.pid, i32::try_from(child.id()).unwrap());
    let process = PeerProcess::of(&stream).unwrap().unwrap();

    let mut hello = [0; 4];
    let fds = recv_with_fds(&stream, &mut hello).unwrap();
    assert_eq!(&hello, b"ring");
    let [fd] = <[_; 1]>::try_from(fds).unwrap();
    let device = HostDevice::new(16).unwrap();
    let ring = device
        .open_ring(RingExport::Host { fd, bytes: RING })
        .unwrap();
    ring.self_test().unwrap();

    let (channel, channel_fd) = SharedMap::create("channel", CHANNEL).unwrap();
    let doorbell = Doorbell::new().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let bell = doorbell.listen().unwrap();
        send_with_fds(&stream, b"channel!", &[channel_fd.as_fd(), doorbell.fd()]).unwrap();
        tokio::time::timeout(LONG, bell.wait())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(channel.load_u64(0, Ordering::Acquire).unwrap(), 1);
        channel
            .with_bytes(4096, 10, |got| assert_eq!(got, b"complement"))
            .unwrap();
        assert!(process.alive().unwrap());
        drop(stream);
        tokio::time::timeout(LONG, process.ended())
            .await
            .unwrap()
            .unwrap();
    });
    assert!(child.wait().unwrap().success());
}

fn accept(listener: &UnixListener) -> UnixStream {
    let deadline = Instant::now() + LONG;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                return stream;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                assert!(Instant::now() < deadline, "the worker never came");
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
}
