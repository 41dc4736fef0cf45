//! Records through areas, between peers that keep the rules.

use std::thread;

use proptest::prelude::*;

use super::area::record_bytes;
use super::*;
use crate::proto::channel::msg::strategy;

#[test]
fn both_ends_agree_on_the_header() {
    let Pair {
        mut daemon,
        mut worker,
        ..
    } = pair(Capacities {
        up: 8192,
        down: 4096,
    });
    assert_eq!((worker.boot, worker.session), ([1; 16], [2; 16]));
    let before = (daemon.link.peer_beat(), worker.link.peer_beat());
    worker.link.beat();
    daemon.link.beat();
    daemon.link.beat();
    assert_eq!(
        (daemon.link.peer_beat(), worker.link.peer_beat()),
        (before.0 + 1, before.1 + 2)
    );
    assert_eq!(
        (daemon.link.peer_closed(), worker.link.peer_closed()),
        (None, None)
    );
    daemon.link.close(layout::CloseReason::Shutdown);
    worker.link.close(layout::CloseReason::Detached);
    assert_eq!(
        worker.link.peer_closed(),
        Some(layout::CloseReason::Shutdown)
    );
    assert_eq!(
        daemon.link.peer_closed(),
        Some(layout::CloseReason::Detached)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is pushed comes out once, whole and in order, over many laps and in any rhythm.
    #[test]
    fn messages_come_out_as_they_went_in(
        messages in prop::collection::vec((strategy::up(), strategy::down(), 0..4_u8), 1..80),
    ) {
        let Pair { mut daemon, mut worker, .. } = pair(SMALL);
        let (mut up, mut down) = (Vec::new(), Vec::new());
        let (mut got_up, mut got_down) = (Vec::new(), Vec::new());
        for (a, b, pops) in &messages {
            match worker.tx.push(a) {
                Ok(()) => up.push(a.clone()),
                Err(error) => prop_assert!(!matches!(error, PushError::Broken(_))),
            }
            match daemon.tx.push(b) {
                Ok(()) => down.push(b.clone()),
                Err(error) => prop_assert!(!matches!(error, PushError::Broken(_))),
            }
            for _ in 0..*pops {
                got_up.extend(daemon.rx.pop().unwrap());
                got_down.extend(worker.rx.pop().unwrap());
            }
        }
        while let Some(message) = daemon.rx.pop().unwrap() {
            got_up.push(message);
        }
        while let Some(message) = worker.rx.pop().unwrap() {
            got_down.push(message);
        }
        let (up_count, down_count) = (up.len(), down.len());
        prop_assert_eq!(got_up, up);
        prop_assert_eq!(got_down, down);
        let dropped = 2 * messages.len() - up_count - down_count;
        prop_assert_eq!(worker.tx.dropped() + daemon.tx.dropped(), dropped as u64);
    }
}

#[test]
fn a_full_area_refuses_counts_and_takes_again_once_read() {
    let Pair {
        mut daemon,
        mut worker,
        ..
    } = pair(SMALL);
    let mut pushed = 0;
    while worker.tx.push(&close(pushed)).is_ok() {
        pushed += 1;
    }
    // 32 bytes each, and the seq word that follows the last one must stay free.
    assert_eq!(pushed, SMALL.up / 32 - 1);
    assert_eq!(worker.tx.push(&close(0)), Err(PushError::Full));
    assert_eq!(worker.tx.dropped(), 2);
    assert_eq!(daemon.rx.pop(), Ok(Some(close(0))));
    assert_eq!(worker.tx.push(&close(pushed)), Ok(()));
    for req in 1..=pushed {
        assert_eq!(daemon.rx.pop(), Ok(Some(close(req))));
    }
    assert_eq!(daemon.rx.pop(), Ok(None));
}

#[test]
fn a_message_above_a_quarter_of_the_area_is_refused_and_just_below_always_fits() {
    let Pair {
        mut daemon,
        mut worker,
        ..
    } = pair(SMALL);
    let ids = |bytes: u64| vec![5; ((bytes - 16 - 16) / 4) as usize];
    let largest = tokens(1, ids(SMALL.up / 4));
    let larger = tokens(1, ids(SMALL.up / 4 + 4));
    let error = worker.tx.push(&larger).unwrap_err();
    assert!(matches!(error, PushError::TooLarge(_)), "{error}");
    // From every position there is.
    for start in 0..SMALL.up / 32 {
        for message in [close(start), largest.clone()] {
            assert_eq!(worker.tx.push(&message), Ok(()));
            assert_eq!(daemon.rx.pop(), Ok(Some(message)));
        }
    }
}

#[test]
fn a_record_that_would_cross_the_end_is_preceded_by_a_pad() {
    let Pair {
        map,
        mut daemon,
        mut worker,
    } = pair(SMALL);
    for req in 0..SMALL.up / 32 - 1 {
        worker.tx.push(&close(req)).unwrap();
        daemon.rx.pop().unwrap();
    }
    let position = SMALL.up - 32;
    let message = tokens(9, vec![1, 2, 3, 4]);
    worker.tx.push(&message).unwrap();
    let head = map.load_u64(UP + position + 8, Ordering::Relaxed).unwrap();
    assert_eq!(head, 32 - 16, "kind 0 and no flags, exactly to the end");
    assert_eq!(daemon.rx.pop(), Ok(Some(message)));
    // A record that ends exactly at the end needs none.
    let Pair {
        mut daemon,
        mut worker,
        ..
    } = pair(SMALL);
    for req in 0..SMALL.up / 32 {
        worker.tx.push(&close(req)).unwrap();
        assert_eq!(daemon.rx.pop(), Ok(Some(close(req))));
    }
    worker.tx.push(&close(77)).unwrap();
    assert_eq!(daemon.rx.pop(), Ok(Some(close(77))));
}

/// Bytes of older laps that happen to be the expected number are no record.
#[test]
fn stale_words_are_never_taken_for_a_record() {
    let Pair {
        map,
        mut daemon,
        mut worker,
    } = pair(SMALL);
    let (mut number, mut written) = (1, 0);
    for round in 0..1000_u32 {
        let ids: Vec<Vec<u32>> = (0..1 + round % 3)
            .map(|n| vec![n; (round % 50) as usize])
            .collect();
        for ids in &ids {
            let (size, left) = (
                record_bytes(16 + 4 * ids.len() as u64),
                SMALL.up - written % SMALL.up,
            );
            let pad = if size > left { left } else { 0 };
            number += 1 + u64::from(pad > 0);
            written += pad + size;
        }
        // All is consumed, so the whole area is the writer's. The worst that can lie there is what
        // the reader will expect after the records that are about to come.
        for word in 0..SMALL.up / 8 {
            map.store_u64(UP + word * 8, number, Ordering::Relaxed)
                .unwrap();
        }
        for ids in ids {
            let message = tokens(1, ids);
            worker.tx.push(&message).unwrap();
            assert_eq!(daemon.rx.pop(), Ok(Some(message)), "round {round}");
        }
        assert_eq!(daemon.rx.pop(), Ok(None), "round {round}");
    }
}

#[test]
fn a_record_that_was_not_published_is_not_there() {
    let mut pair = pair(SMALL);
    for number in [0, 2, u64::MAX] {
        pair.forge(
            0,
            number,
            (8, msg::RequestClose::KIND, 0),
            &7_u64.to_le_bytes(),
        );
        assert_eq!(pair.daemon.rx.pop(), Ok(None));
    }
    pair.map.store_u64(UP, 1, Ordering::Release).unwrap();
    assert_eq!(pair.daemon.rx.pop(), Ok(Some(close(7))));
}

#[test]
fn token_ids_are_cut_into_records_and_stop_where_room_ends() {
    let Pair {
        mut daemon,
        mut worker,
        ..
    } = pair(SMALL);
    let ids: Vec<u32> = (0..5000).collect();
    let mut sent = 0;
    let mut got: Vec<u32> = Vec::new();
    while sent < ids.len() {
        let written = worker.tx.push_tokens(3, sent as u32, &ids[sent..]).unwrap();
        assert!(written > 0 && worker.tx.take_written() && !worker.tx.take_written());
        sent += written;
        while let Some(message) = daemon.rx.pop().unwrap() {
            let msg::Up::Tokens(tokens) = message else {
                panic!("{message:?}")
            };
            assert_eq!((tokens.req, tokens.offset as usize), (3, got.len()));
            got.extend(tokens.ids);
        }
    }
    assert_eq!(got, ids);
    assert_eq!(worker.tx.dropped(), 0);
    assert_eq!(worker.tx.push_tokens(3, 0, &[]), Ok(0));
}

/// A small generator, so that both threads know every message.
fn record(n: u64) -> msg::Up {
    let mixed = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    if mixed >> 58 == 0 {
        let len = (mixed >> 20) as usize % 3000;
        return tokens(n, (0..len as u32).map(|i| i ^ mixed as u32).collect());
    }
    msg::Lookup {
        req: n,
        attempt: mixed as u32,
        max_boundary: (mixed >> 32) as u32,
        device_boundary: 0,
        device_kv: 1,
    }
    .into()
}

#[test]
fn a_million_records_between_two_threads() {
    const RECORDS: u64 = 1_000_000;
    let Pair {
        mut daemon,
        mut worker,
        ..
    } = pair(Capacities {
        up: 1 << 16,
        down: 4096,
    });
    let writer = thread::spawn(move || {
        for n in 0..RECORDS {
            let message = record(n);
            loop {
                match worker.tx.push(&message) {
                    Ok(()) => break,
                    Err(PushError::Full) => thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    });
    for n in 0..RECORDS {
        let message = loop {
            match daemon.rx.pop().unwrap() {
                Some(message) => break message,
                None => thread::yield_now(),
            }
        };
        assert!(message == record(n), "record {n}");
    }
    assert_eq!(daemon.rx.pop(), Ok(None));
    writer.join().unwrap();
}
