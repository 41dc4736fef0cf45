//! Attached workers that fill the channel with garbage, flood it, or stand still: the daemon lives,
//! other workers are served, and everything comes back.

mod common;

use std::sync::atomic::Ordering;

use common::scene::{Scene, TOKENS};
use common::worker::{Model, Names, Worker, prompt};
use engram::proto::channel::PushError;
use engram::proto::channel::layout::header::{DOWN_TAIL, UP_OFFSET, WORKER_CLOSED};
use engram::proto::channel::layout::{
    CloseReason, DeclineReason, Miss, Piece, RevokeReason, Status,
};
use engram::proto::channel::msg::*;

const STATE: Piece = Piece::State;

#[test]
fn garbage_in_the_channel_ends_only_its_own_session() {
    type Garbage = fn(&mut Worker);
    let mut scene = Scene::new(&[]);
    let word = |liar: &Worker, at, value| {
        liar.channel
            .store_u64(at, value, Ordering::Release)
            .unwrap();
    };
    let record = |liar: &mut Worker, head: u64| {
        // The first record of the session, as nothing was said yet.
        let mut start = [0; 8];
        liar.channel.read(UP_OFFSET, &mut start).unwrap();
        let start = u64::from_le_bytes(start);
        liar.channel
            .store_u64(start + 8, head, Ordering::Relaxed)
            .unwrap();
        liar.channel.store_u64(start, 1, Ordering::Release).unwrap();
    };
    // A head is {len: u32, kind: u16, flags: u16}.
    let heads: [(&str, u64); 6] = [
        ("a kind that there is not", 99 << 32),
        ("a kind of the daemon", 101 << 32),
        ("a record without end", 0xffff_ffff | 1 << 32),
        ("a pad without end", 0xffff_ff00),
        ("flags", 8 | 10 << 32 | 1 << 48),
        ("too short for its kind", 3 | 10 << 32),
    ];
    let words: [(&str, Garbage); 3] = [
        ("a tail ahead", |liar| {
            liar.channel
                .store_u64(DOWN_TAIL, 1 << 40, Ordering::Release)
                .unwrap()
        }),
        ("a tail between", |liar| {
            liar.channel
                .store_u64(DOWN_TAIL, 8, Ordering::Release)
                .unwrap()
        }),
        ("a reason that there is not", |liar| {
            liar.channel
                .store_u32(WORKER_CLOSED, 4711, Ordering::Release)
                .unwrap();
        }),
    ];
    for (name, head) in heads {
        let mut liar = scene.liar();
        record(&mut liar, head);
        liar.ring_bell();
        assert_eq!(liar.closed(), CloseReason::BrokenPeer, "{name}");
    }
    for (name, garbage) in words {
        let mut liar = scene.liar();
        liar.heard_all();
        garbage(&mut liar);
        // The daemon looks at the tail when its area is full.
        while liar.end.link.peer_closed().is_none() {
            let req = liar.fresh();
            let lookup = Lookup {
                req,
                attempt: 0,
                max_boundary: 1,
                device_boundary: 0,
                device_kv: 0,
            };
            match liar.end.tx.push(&lookup.into()) {
                Ok(()) | Err(PushError::Full) => liar.ring_bell(),
                Err(PushError::Broken(_)) => break,
                Err(error) => panic!("{name}: {error}"),
            }
        }
        assert_eq!(liar.closed(), CloseReason::BrokenPeer, "{name}");
    }
    // All of it at once, header included.
    for seed in 0..4_u64 {
        let mut liar = scene.liar();
        let noise: Vec<u8> = prompt(seed as u32 + 7, 1 << 18)
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        liar.channel.write(0, &noise).unwrap();
        word(&liar, DOWN_TAIL, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        liar.ring_bell();
        assert_eq!(liar.closed(), CloseReason::BrokenPeer);
        scene.honest_is_served();
    }
    let broken = scene
        .daemon
        .metric(r#"engram_errors_total{type="broken_peer"}"#);
    assert!(broken >= 8.0, "{broken}");
    scene.all_came_back();
}

#[test]
fn a_worker_that_never_reads_is_sent_away_and_the_others_are_served_meanwhile() {
    let mut scene = Scene::new(&[("service.down_capacity", "64 KiB".into())]);
    let mut liar = scene.liar();
    let mut said = 0_u64;
    while liar.end.link.peer_closed().is_none() {
        let fill = Fill {
            lease: said,
            piece: STATE,
            index: 0,
            count: 1,
            ring_offset: 0,
            bytes: 8,
        };
        match liar.end.tx.push(&fill.into()) {
            Ok(()) => said += 1,
            Err(PushError::Full) => scene.honest_is_served(),
            Err(error) => panic!("{error}"),
        }
        if said.is_multiple_of(1000) {
            liar.ring_bell();
        }
        assert!(said < 1 << 22, "nothing bounds what waits for a worker");
    }
    assert_eq!(liar.closed(), CloseReason::SilentPeer);
    liar.die();
    scene.all_came_back();
}

#[test]
fn floods_are_bounded() {
    let mut scene = Scene::new(&[
        ("service.max_requests", 32.into()),
        ("service.max_prompt_tokens", 4096.into()),
        ("service.max_session_tokens", 16384.into()),
    ]);
    let mut liar = scene.liar();
    // Requests: those beyond the bound do not exist.
    let tokens = prompt(2, 256);
    let requests: Vec<u64> = (0..64)
        .map(|i| liar.open(&format!("r{i}"), &tokens))
        .collect();
    for (req, i) in requests.iter().zip(0..) {
        let save = liar.offer(*req, 256);
        let answer = liar.answer(save);
        assert_eq!(answer.is_ok(), i < 32, "request {i}: {answer:?}");
    }
    let over = scene
        .daemon
        .metric(r#"engram_errors_total{type="too_many_requests"}"#);
    assert_eq!(over, 32.0);
    for req in requests {
        liar.say(RequestClose { req });
    }
    liar.die();
    scene.wait_for_level("engram_sessions", 1.0);
    // Tokens: of one request, and of all.
    let mut liar = scene.liar();
    let long = liar.open("long", &prompt(3, 4097));
    let save = liar.offer(long, 4096);
    assert_eq!(liar.answer(save), Err(DeclineReason::BadRequest));
    let all: Vec<u64> = (0..5)
        .map(|i| liar.open(&format!("t{i}"), &prompt(4 + i, 4096)))
        .collect();
    let kept = all.iter().filter(|req| {
        let save = liar.offer(**req, 4096);
        liar.answer(save).is_ok()
    });
    assert!(kept.count() < 5);
    liar.die();
    scene.wait_for_level("engram_sessions", 1.0);
    // Leases.
    let mut liar = scene.liar();
    let mut misses = 0;
    for _ in 0..1100 {
        let req = liar.open("", &scene.tokens);
        let result = liar.lookup(req, TOKENS as u32);
        if result.lease == 0 {
            assert_eq!(result.reason, Some(Miss::Busy));
            misses += 1;
        }
        liar.say(RequestClose { req });
    }
    assert_eq!(misses, 1100 - 1024);
    scene.honest_is_served();
    liar.die();
    scene.all_came_back();
}

#[test]
fn what_is_never_drained_or_released_is_taken_back() {
    let scene = Scene::new(&[
        ("store.ram", "16 MiB".into()),
        ("service.save_timeout", "1s".into()),
        ("service.lease_timeout", "1s".into()),
        ("service.room_wait", "30s".into()),
    ]);
    let mut liar = Worker::attach_as(&scene.daemon, &Model::large());
    // Saves that take all of RAM, of which nothing is drained.
    let taken: Vec<u64> = (0..14)
        .map(|i| {
            let req = liar.open(&format!("s{i}"), &prompt(i + 2, 200));
            let save = liar.offer(req, 200);
            liar.answer(save).unwrap();
            save
        })
        .collect();
    // An honest one waits for room, and gets it when theirs is over.
    let mut other = Worker::attach_as(&scene.daemon, &Model::large());
    let tokens = prompt(1, 400);
    other.turn("waits", &tokens, 400);
    assert_eq!(other.restore(&tokens).unwrap().boundary, 400);
    for save in taken {
        assert_eq!(liar.saved(save), Err(Status::Cancelled));
    }
    // A lease that is kept without being used.
    let req = liar.open_as(&Names::default(), &tokens);
    let hit = liar.lookup(req, 400);
    assert_eq!(hit.boundary, 400);
    let revoked = liar.hear(|message| match message {
        Down::Revoke(revoke) if revoke.lease == hit.lease => Some(revoke.reason),
        _ => None,
    });
    assert_eq!(revoked, RevokeReason::Deadline);
    let state = liar.model.state_bytes();
    assert_eq!(
        liar.fill_at(hit.lease, STATE, 0, (0, state)),
        Status::Cancelled
    );
    let unused = r#"engram_restores_unused_total{reason="deadline"}"#;
    assert_eq!(scene.daemon.metric(unused), 1.0);
    liar.die();
    other.die();
    let whole = serde_json::json!({ "conversation_id": "waits", "whole": true });
    assert_eq!(scene.daemon.post("/delete_snapshot", &whole).status, 200);
    scene.all_came_back();
}
