//! Peers that write what no peer writes.

use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;

fn create(capacities: Capacities, bytes: u64) -> Result<DaemonEnd, BadChannel> {
    let map = Arc::new(SharedMap::anonymous(bytes).unwrap());
    DaemonEnd::create(&map, capacities, [0; 16], [0; 16])
}

#[test]
fn capacities_outside_the_layout_are_refused() {
    assert!(create(SMALL, SMALL.bytes()).is_ok());
    for (up, down) in [
        (0, 4096),
        (4096, 0),
        (4095, 4096),
        (4096 + 32, 4096),
        (2048, 4096),
        ((1 << 30) + 64, 4096),
        (u64::MAX - 63, u64::MAX - 63),
    ] {
        let error = create(Capacities { up, down }, 1 << 20).unwrap_err();
        assert!(
            matches!(error, BadChannel::Area { .. }),
            "{up} {down}: {error}"
        );
    }
    assert!(matches!(
        create(SMALL, SMALL.bytes() - 64),
        Err(BadChannel::Area { .. })
    ));
    assert!(matches!(create(SMALL, 64), Err(BadChannel::Area { .. })));
}

#[test]
fn a_header_that_lies_is_refused() {
    use layout::header::*;
    let size = SMALL.bytes();
    let open = |change: &dyn Fn(&SharedMap)| {
        let Pair { map, .. } = pair(SMALL);
        change(&map);
        WorkerEnd::open(&map).err()
    };
    let word = |at, value| {
        open(&move |map: &SharedMap| map.store_u64(at, value, Ordering::Relaxed).unwrap())
    };
    let half = |at, value| {
        open(&move |map: &SharedMap| map.store_u32(at, value, Ordering::Relaxed).unwrap())
    };
    assert_eq!(open(&|_| ()), None);
    assert_eq!(word(MAGIC, 0), Some(BadChannel::Magic));
    let other = layout::VERSION + 1;
    assert_eq!(half(VERSION, other), Some(BadChannel::Version(other)));
    assert_eq!(half(HEADER_BYTES, 0), Some(BadChannel::Header(0)));
    for (at, values) in [
        (UP_OFFSET, [0, 64, 4097, size, u64::MAX - 63]),
        (DOWN_OFFSET, [0, 4032, 8200, size - 4032, 1 << 63]),
        (UP_CAPACITY, [0, 64, 4100, size, u64::MAX - 63]),
        (DOWN_CAPACITY, [0, 4032, 4097, 8192, 1 << 40]),
    ] {
        for value in values {
            let error = word(at, value);
            assert!(
                matches!(error, Some(BadChannel::Area { .. })),
                "{at} {value}: {error:?}"
            );
        }
    }
    assert_eq!(word(UP_OFFSET, 8192), Some(BadChannel::Overlap));
    assert_eq!(word(DOWN_OFFSET, 4096 + 64), Some(BadChannel::Overlap));

    let short = Arc::new(SharedMap::anonymous(64).unwrap());
    short
        .store_u64(MAGIC, layout::MAGIC, Ordering::Relaxed)
        .unwrap();
    short
        .store_u32(VERSION, layout::VERSION, Ordering::Relaxed)
        .unwrap();
    short
        .store_u32(layout::header::HEADER_BYTES, 4096, Ordering::Relaxed)
        .unwrap();
    assert!(WorkerEnd::open(&short).is_err());
    assert!(WorkerEnd::open(&Arc::new(SharedMap::anonymous(4).unwrap())).is_err());
}

#[test]
fn a_header_that_changes_later_changes_nothing() {
    let Pair {
        map,
        mut daemon,
        mut worker,
    } = pair(SMALL);
    for at in (0..128).step_by(8) {
        map.store_u64(at, u64::MAX, Ordering::Relaxed).unwrap();
    }
    worker.tx.push(&close(1)).unwrap();
    assert_eq!(daemon.rx.pop(), Ok(Some(close(1))));
    map.store_u32(layout::header::WORKER_CLOSED, 4711, Ordering::Relaxed)
        .unwrap();
    assert_eq!(
        daemon.link.peer_closed(),
        Some(layout::CloseReason::BrokenPeer)
    );
}

#[test]
fn a_tail_that_cannot_be_breaks_the_writer() {
    let tail = |value: u64| {
        let Pair {
            map,
            mut daemon,
            mut worker,
        } = pair(SMALL);
        // Half of what was written is read, and the writer knows it.
        while worker.tx.push(&close(0)).is_ok() {}
        for _ in 0..64 {
            daemon.rx.pop().unwrap();
        }
        worker.tx.push(&close(0)).unwrap();
        while worker.tx.push(&close(0)).is_ok() {}
        map.store_u64(layout::header::UP_TAIL, value, Ordering::Release)
            .unwrap();
        (worker.tx.push(&close(0)), worker.tx.push_tokens(0, 0, &[1]))
    };
    assert_eq!(tail(64 * 32), (Err(PushError::Full), Ok(0)));
    assert_eq!(tail(65 * 32).0, Ok(()));
    let written = SMALL.up + 63 * 32;
    for value in [
        0,
        63 * 32,
        64 * 32 + 8,
        64 * 32 + 1,
        written + 16,
        u64::MAX - 15,
        1 << 63,
    ] {
        let broken = Broken::Tail {
            tail: value,
            before: 64 * 32,
            written,
        };
        assert_eq!(
            tail(value),
            (Err(PushError::Broken(broken.clone())), Err(broken))
        );
    }
}

#[test]
fn a_record_that_cannot_be_breaks_the_reader() {
    let pop = |head, body: &[u8]| {
        let mut pair = pair(SMALL);
        pair.forge(0, 1, head, body);
        let popped = pair.daemon.rx.pop();
        if popped.is_err() {
            assert_eq!(pair.daemon.rx.pop(), popped, "an error stays");
        }
        popped
    };
    let kind = msg::RequestClose::KIND;
    assert_eq!(pop((8, kind, 0), &[0; 8]), Ok(Some(close(0))));
    assert_eq!(pop((8, kind, 1), &[]), Err(Broken::Flags(1)));
    for len in [1024 - 15, 4080, 4096, u32::MAX - 15, u32::MAX] {
        assert_eq!(
            pop((len, kind, 0), &[]),
            Err(Broken::Length { len, left: 4096 })
        );
    }
    for len in [0, 16, 4079, 4081, u32::MAX] {
        assert_eq!(pop((len, 0, 0), &[]), Err(Broken::Pad { len, left: 4096 }));
    }
    for other in [13, 101, 107, u16::MAX] {
        let error = pop((8, other, 0), &[]).unwrap_err();
        assert_eq!(error, Broken::Message(DecodeError::Kind(other)));
    }
    for len in [0, 7, 9, 1008] {
        assert!(
            matches!(pop((len, kind, 0), &[]), Err(Broken::Message(_))),
            "{len}"
        );
    }
}

/// Moves both ends of `up` to `position` and says which record comes next.
fn advance(pair: &mut Pair, position: u64) -> u64 {
    let odd = position % 32 == 16;
    let short = (position - if odd { 48 } else { 0 }) / 32;
    let records = (0..short).map(close).chain(odd.then(|| tokens(0, vec![1])));
    for message in records {
        pair.worker.tx.push(&message).unwrap();
        assert_eq!(pair.daemon.rx.pop(), Ok(Some(message)));
    }
    short + u64::from(odd) + 1
}

#[test]
fn a_pad_must_be_smaller_than_the_largest_record() {
    for left in [16, 992, 1008, 1024, 1040, 4032, 4096] {
        let mut pair = pair(SMALL);
        let position = SMALL.up - left;
        let number = advance(&mut pair, position);
        let len = (left - 16) as u32;
        pair.forge(0, 0, (8, msg::RequestClose::KIND, 0), &[0; 8]);
        pair.forge(position, number, (len, 0, 0), &[]);
        if left < 1024 {
            assert_eq!(pair.daemon.rx.pop(), Ok(None));
            pair.forge(0, number + 1, (8, msg::RequestClose::KIND, 0), &[0; 8]);
            assert_eq!(pair.daemon.rx.pop(), Ok(Some(close(0))));
        } else {
            assert_eq!(pair.daemon.rx.pop(), Err(Broken::Pad { len, left }));
        }
    }
}

/// Stores a word somewhere.
fn scribble(map: &SharedMap, state: &mut u64) {
    *state = state
        .wrapping_mul(6364136223846793005)
        .wrapping_add(1442695040888963407);
    let at = (*state >> 33) % (map.len() / 8) * 8;
    // Small numbers are what passes the first checks.
    let value = if *state >> 63 == 0 {
        *state
    } else {
        *state >> 58
    };
    map.store_u64(at, value, Ordering::Relaxed).unwrap();
}

/// Whatever lies in the memory, and whenever it changes: results or errors, no panic, no hang.
#[test]
fn a_peer_that_scribbles_over_everything_only_breaks_itself() {
    let mut broken = 0;
    for seed in 1..=100_u64 {
        let Pair {
            map,
            mut daemon,
            mut worker,
        } = pair(SMALL);
        let stop = Arc::new(AtomicBool::new(false));
        let scribbler = thread::spawn({
            let (map, stop) = (Arc::clone(&map), Arc::clone(&stop));
            move || {
                let mut state = !seed;
                while !stop.load(Ordering::Relaxed) {
                    scribble(&map, &mut state);
                }
            }
        });
        let mut state = seed;
        for round in 0..1000_u32 {
            scribble(&map, &mut state);
            let _ = daemon.rx.pop().inspect_err(|_| broken += 1);
            let _ = worker.rx.pop().inspect_err(|_| broken += 1);
            let _ = worker.tx.push(&close(1)).inspect_err(|_| broken += 1);
            let _ = worker.tx.push_tokens(1, round, &[round; 40]);
            let revoke = msg::Revoke {
                lease: 1,
                reason: layout::RevokeReason::Lost,
            };
            let _ = daemon.tx.push(&revoke.into());
            let _ = (daemon.link.peer_closed(), worker.link.peer_beat());
        }
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
    }
    assert!(broken > 0);
}
