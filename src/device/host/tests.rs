use std::{
    os::fd::OwnedFd,
    sync::mpsc::{Receiver, SyncSender, channel, sync_channel},
    time::Duration,
};

use super::*;
use crate::device::{SELF_TEST_BYTES, pattern};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

fn ring(device: &HostDevice, bytes: u64) -> (Arc<dyn Ring>, SharedMap) {
    let (worker, fd) = SharedMap::create("ring", bytes).unwrap();
    (
        device.open_ring(RingExport::Host { fd, bytes }).unwrap(),
        worker,
    )
}

fn arena(bytes: u64) -> Arc<SharedMap> {
    Arc::new(SharedMap::anonymous(bytes).unwrap())
}

fn done() -> (Done, Receiver<Result<(), DeviceError>>) {
    let (sender, receiver) = channel();
    (
        Box::new(move |result| sender.send(result).unwrap()),
        receiver,
    )
}

/// Keeps the copy thread busy until the returned sender is dropped.
fn hold(ring: &dyn Ring, arena: &Arc<SharedMap>) -> SyncSender<()> {
    let (release, held) = sync_channel::<()>(0);
    let (entered, inside) = channel();
    ring.copy_out(
        0,
        arena,
        0,
        1,
        Box::new(move |result| {
            result.unwrap();
            entered.send(()).unwrap();
            let _ = held.recv();
        }),
    );
    inside.recv_timeout(LONG).unwrap();
    release
}

/// With one thread and with several.
fn devices() -> [HostDevice; 2] {
    [1, 5].map(|threads| HostDevice::with_threads(DEFAULT_QUEUE, threads).unwrap())
}

#[test]
fn bytes_go_out_and_in_at_their_offsets() {
    devices().iter().for_each(go_out_and_in);
}

fn go_out_and_in(device: &HostDevice) {
    let (ring, worker) = ring(device, 8 * MIB);
    let arena = arena(8 * MIB);
    let bytes: Vec<u8> = (0..3 * MIB + 5).map(|i| ((i * 13) >> 4) as u8).collect();
    worker.write(100, &bytes).unwrap();
    let len = bytes.len() as u64;

    let (call, out) = done();
    ring.copy_out(100, &arena, 4096, len, call);
    out.recv_timeout(LONG).unwrap().unwrap();
    arena
        .with_bytes(4096, len, |got| assert!(got == bytes))
        .unwrap();
    arena
        .with_bytes(0, 4096, |got| assert!(got.iter().all(|&byte| byte == 0)))
        .unwrap();

    let (call, back) = done();
    ring.copy_in(&arena, 4096, 5 * MIB - 9, len, call);
    back.recv_timeout(LONG).unwrap().unwrap();
    worker
        .with_bytes(5 * MIB - 9, len, |got| assert!(got == bytes))
        .unwrap();
}

#[test]
fn what_does_not_fit_is_refused_before_a_byte_moves() {
    let device = HostDevice::new(DEFAULT_QUEUE).unwrap();
    let (ring, worker) = ring(&device, MIB);
    let arena = arena(2 * MIB);
    arena.fill(0, 2 * MIB, 1).unwrap();
    for (ring_off, arena_off, len) in [
        (0, 0, MIB + 1),
        (MIB, 0, 1),
        (u64::MAX, 0, 2),
        (0, u64::MAX, 2),
        (0, 2 * MIB - 1, 2),
        (0, 0, u64::MAX),
    ] {
        for out in [true, false] {
            let (call, result) = done();
            match out {
                true => ring.copy_out(ring_off, &arena, arena_off, len, call),
                false => ring.copy_in(&arena, arena_off, ring_off, len, call),
            }
            let error = result.recv_timeout(LONG).unwrap().unwrap_err();
            assert!(matches!(error, DeviceError::OutOfBounds(_)), "{error}");
        }
    }
    worker
        .with_bytes(0, MIB, |got| assert!(got.iter().all(|&byte| byte == 0)))
        .unwrap();
}

#[test]
fn many_threads_share_the_copy_threads() {
    devices().iter().for_each(shared_by_many);
}

fn shared_by_many(device: &HostDevice) {
    let (ring, worker) = ring(device, 8 * MIB);
    let arena = arena(8 * MIB);
    thread::scope(|scope| {
        for n in 0..8_u64 {
            let (ring, worker, arena) = (&ring, &worker, &arena);
            scope.spawn(move || {
                for round in 0..16_u8 {
                    let byte = n as u8 * 16 + round;
                    worker.fill(n * MIB, MIB, byte).unwrap();
                    let (call, result) = done();
                    ring.copy_out(n * MIB, arena, n * MIB, MIB, call);
                    result.recv_timeout(LONG).unwrap().unwrap();
                    worker.fill(n * MIB, MIB, 0xff).unwrap();
                    let (call, result) = done();
                    ring.copy_in(arena, n * MIB, n * MIB, MIB, call);
                    result.recv_timeout(LONG).unwrap().unwrap();
                    worker
                        .chunks(n * MIB, MIB, |got| assert!(got.iter().all(|&b| b == byte)))
                        .unwrap();
                }
            });
        }
    });
}

#[test]
fn a_full_queue_says_busy_and_the_rest_is_made_in_order() {
    let device = HostDevice::new(2).unwrap();
    let (ring, worker) = ring(&device, MIB);
    let arena = arena(MIB);
    let held = hold(&*ring, &arena);
    worker.fill(0, MIB, 5).unwrap();
    let (first, first_result) = done();
    let (second, second_result) = done();
    let (third, third_result) = done();
    ring.copy_out(0, &arena, 0, 10, first);
    ring.copy_in(&arena, 0, 100, 10, second);
    ring.copy_out(0, &arena, 0, 10, third);
    assert!(matches!(
        third_result.try_recv().unwrap(),
        Err(DeviceError::Busy)
    ));
    drop(held);
    first_result.recv_timeout(LONG).unwrap().unwrap();
    second_result.recv_timeout(LONG).unwrap().unwrap();
    worker
        .with_bytes(100, 10, |got| assert_eq!(got, [5; 10]))
        .unwrap();
}

#[test]
fn nothing_is_written_after_the_drop_of_a_ring() {
    let device = HostDevice::new(DEFAULT_QUEUE).unwrap();
    let (first, worker) = ring(&device, MIB);
    let (second, other) = ring(&device, MIB);
    let arena = arena(MIB);
    arena.fill(0, MIB, 1).unwrap();
    let held = hold(&*second, &arena);
    let results: Vec<_> = (0..8)
        .map(|i| {
            let (call, result) = done();
            match i % 2 {
                0 => first.copy_in(&arena, 0, 0, MIB, call),
                _ => first.copy_out(0, &arena, 0, MIB, call),
            }
            result
        })
        .collect();
    let (call, survivor) = done();
    second.copy_in(&arena, 0, 0, MIB, call);

    drop(first);
    worker.fill(0, MIB, 2).unwrap();
    arena.fill(0, MIB, 3).unwrap();
    drop(held);
    for result in results {
        assert!(matches!(
            result.recv_timeout(LONG).unwrap(),
            Err(DeviceError::Closed)
        ));
    }
    survivor.recv_timeout(LONG).unwrap().unwrap();
    let all = |map: &SharedMap, byte| {
        map.chunks(0, MIB, |got| assert!(got.iter().all(|&b| b == byte)))
            .unwrap();
    };
    all(&worker, 2);
    all(&arena, 3);
    all(&other, 3);
}

/// The drop comes while a long copy runs: it is cut, and what it had not written stays unwritten.
#[test]
fn a_running_copy_ends_before_the_drop_returns() {
    devices().iter().for_each(ends_before_the_drop);
}

fn ends_before_the_drop(device: &HostDevice) {
    let source = arena(64 * MIB);
    source.fill(0, 64 * MIB, 1).unwrap();
    for _ in 0..8 {
        let (ring, worker) = ring(device, 64 * MIB);
        let (call, result) = done();
        ring.copy_in(&source, 0, 0, 64 * MIB, call);
        while worker.load_u32(0, Ordering::Acquire).unwrap() == 0 {
            thread::yield_now();
        }
        drop(ring);
        worker.fill(0, 64 * MIB, 2).unwrap();
        let ended = result.recv_timeout(LONG).unwrap();
        assert!(matches!(ended, Ok(()) | Err(DeviceError::Closed)));
        worker
            .chunks(0, 64 * MIB, |got| assert!(got.iter().all(|&b| b == 2)))
            .unwrap();
    }
}

#[test]
fn the_last_ring_may_go_inside_its_own_completion_after_its_device() {
    let device = HostDevice::new(DEFAULT_QUEUE).unwrap();
    let (ring, _worker) = ring(&device, MIB);
    drop(device);
    let arena = arena(MIB);
    let (sender, receiver) = channel();
    let own = Arc::clone(&ring);
    let held = hold(&*ring, &arena);
    ring.copy_out(
        0,
        &arena,
        0,
        10,
        Box::new(move |result| {
            drop(own);
            sender.send(result).unwrap();
        }),
    );
    drop(ring);
    drop(held);
    receiver.recv_timeout(LONG).unwrap().unwrap();
}

#[test]
fn a_panic_in_a_completion_does_not_stop_the_copies() {
    let device = HostDevice::new(DEFAULT_QUEUE).unwrap();
    let (ring, _worker) = ring(&device, MIB);
    let arena = arena(MIB);
    ring.copy_out(0, &arena, 0, 1, Box::new(|_| panic!("meant by the test")));
    let (call, result) = done();
    ring.copy_out(0, &arena, 0, 1, call);
    result.recv_timeout(LONG).unwrap().unwrap();
}

#[test]
fn self_test_answers_with_the_complement_and_finds_a_wrong_byte() {
    let device = HostDevice::new(DEFAULT_QUEUE).unwrap();
    let (ring, worker) = ring(&device, SELF_TEST_BYTES);
    let said: Vec<u8> = (0..SELF_TEST_BYTES).map(pattern).collect();
    worker.write(0, &said).unwrap();
    ring.self_test().unwrap();
    worker
        .with_bytes(0, SELF_TEST_BYTES, |got| {
            assert!(got.iter().zip(&said).all(|(got, said)| *got == !said));
        })
        .unwrap();

    worker.write(0, &said).unwrap();
    worker.write(1234, &[!pattern(1234)]).unwrap();
    let error = ring.self_test().unwrap_err();
    assert!(
        matches!(error, DeviceError::SelfTest { at: 1234 }),
        "{error}"
    );

    let (small, _worker) = self::ring(&device, SELF_TEST_BYTES - 1);
    assert!(matches!(
        small.self_test().unwrap_err(),
        DeviceError::OutOfBounds(_)
    ));
}

#[test]
fn a_hostile_export_is_refused() {
    let device = HostDevice::new(DEFAULT_QUEUE).unwrap();
    let (_map, fd) = SharedMap::create("ring", MIB).unwrap();
    let open = |fd: OwnedFd, bytes| {
        device
            .open_ring(RingExport::Host { fd, bytes })
            .unwrap_err()
    };
    assert!(matches!(open(fd, MIB + 1), DeviceError::Export(_)));
    let file = tempfile::tempfile().unwrap();
    file.set_len(MIB).unwrap();
    assert!(matches!(open(file.into(), MIB), DeviceError::Export(_)));
}

#[test]
fn a_large_copy_is_over_once_and_whole_whoever_made_its_slices() {
    let device = HostDevice::with_threads(DEFAULT_QUEUE, 4).unwrap();
    let (ring, worker) = ring(&device, 64 * MIB);
    let arena = arena(64 * MIB);
    for round in 1..=16_u8 {
        let len = 33 * MIB + u64::from(round) * 4097;
        worker.fill(0, len, round).unwrap();
        let (call, out) = done();
        ring.copy_out(0, &arena, 4096, len, call);
        out.recv_timeout(LONG).unwrap().unwrap();
        arena
            .chunks(4096, len, |got| assert!(got.iter().all(|&b| b == round)))
            .unwrap();
        assert!(out.recv().is_err(), "its completion is called once");
    }
}
