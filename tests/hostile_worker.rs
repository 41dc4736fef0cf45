//! Attached workers that lie or die: the daemon lives, other workers are served, and everything that
//! the liar held comes back.

mod common;

use std::sync::atomic::Ordering;

use common::scene::{Scene, TOKENS};
use common::worker::{BLOCK, Model, RING, SaveEnd, Worker, attach, prompt, ranges, ring, shake};
use engram::proto::channel::layout::{
    AbortReason, CloseReason, DeclineReason, Miss, Outcome, Piece, Status,
};
use engram::proto::channel::msg::*;
use serde_json::json;

const KV: Piece = Piece::Kv;
const STATE: Piece = Piece::State;

#[test]
fn every_lie_of_a_save_is_answered_and_leaves_nothing() {
    let mut scene = Scene::new(&[]);
    let mut liar = scene.liar();
    let tokens = prompt(2, 1500);
    let state = liar.model.state_bytes();
    let block = u64::from(BLOCK) * liar.model.row_bytes();
    let lies: [(&str, Piece, u32, (u64, u64)); 11] = [
        ("a short piece", KV, 0, (0, block - 1)),
        ("a long piece", KV, 0, (0, block + 1)),
        ("no bytes", KV, 0, (0, 0)),
        ("all bytes", KV, 0, (0, u64::MAX)),
        ("past the ring", KV, 0, (RING - block + 1, block)),
        ("far past the ring", KV, 0, (u64::MAX - 1, block)),
        ("a piece that was not wanted", KV, 2, (0, block)),
        ("a piece without end", KV, u32::MAX, (0, block)),
        ("the state as KV", KV, 1, (0, state)),
        ("KV as the state", STATE, 0, (0, block)),
        ("a second state", STATE, 1, (0, state)),
    ];
    for (name, piece, index, place) in lies {
        let req = liar.open(name, &tokens);
        let save = liar.offer(req, 1500);
        assert_eq!(liar.answer(save).unwrap(), [0..1024, 1024..1500], "{name}");
        let status = liar.drain_at(save, piece, index, place);
        assert_eq!(status, Status::BadRequest, "{name}");
        assert_eq!(liar.saved(save), Err(Status::BadRequest), "{name}");
        // It is over: what still comes for it goes nowhere.
        let late = liar.drain_at(save, KV, 0, (0, block));
        assert_eq!(late, Status::Cancelled, "{name}");
        liar.finish(req, 1500);
    }
    // The same piece twice.
    let req = liar.open("twice", &tokens);
    let save = liar.offer(req, 1500);
    let parts = liar.answer(save).unwrap();
    let bytes = liar.model.kv(&tokens, &parts[0]);
    assert_eq!(liar.drain(save, KV, 0, &bytes), Status::Ok);
    assert_eq!(liar.drain(save, KV, 0, &bytes), Status::BadRequest);
    assert_eq!(liar.saved(save), Err(Status::BadRequest));
    assert_eq!(liar.drain_at(4711, STATE, 0, (0, state)), Status::Cancelled);
    liar.say(SaveAbort {
        save: 4711,
        reason: AbortReason::Evicted,
    });
    assert_eq!(liar.restore(&tokens), None, "a lie became visible");
    scene.honest_is_served();
    liar.die();
    scene.all_came_back();
}

#[test]
fn offers_of_what_cannot_be_are_declined() {
    let scene = Scene::new(&[]);
    let mut liar = scene.liar();
    let tokens = prompt(2, 600);
    let good = liar.open("good", &tokens);
    let gap = liar.open("gap", &tokens[..100]);
    liar.say(Tokens {
        req: gap,
        offset: 200,
        ids: tokens[200..].to_vec(),
    });
    let wide = liar.open("wide", &[]);
    liar.say(TokensWide {
        req: wide,
        offset: 0,
        ids: vec![1, 1 << 40],
    });
    let old = liar.open("old", &tokens);
    liar.say(RequestClose { req: old });
    let bad = DeclineReason::BadRequest;
    for (name, req, boundary) in [
        ("boundary 0", good, 0),
        ("more tokens than were said", good, 601),
        ("a boundary without end", good, u32::MAX),
        ("a request that is not there", 4711, 256),
        ("a closed request", old, 256),
        ("tokens with a gap", gap, 100),
        ("a token id that is none", wide, 2),
    ] {
        let save = liar.offer(req, boundary);
        assert_eq!(liar.answer(save), Err(bad), "{name}");
    }
    liar.epoch = 9;
    let save = liar.offer(good, 512);
    assert_eq!(liar.answer(save), Err(DeclineReason::StaleEpoch));
    liar.epoch = 1;
    // The session has not suffered.
    assert!(matches!(
        liar.save_at(good, &tokens, 512),
        SaveEnd::Saved(..)
    ));
    liar.finish(good, 600);
    liar.heard_all();
    liar.die();
    let whole = json!({ "conversation_id": "good", "whole": true });
    let answer = scene.daemon.post("/delete_snapshot", &whole);
    assert_eq!(answer.status, 200, "{}", answer.text());
    scene.all_came_back();
}

#[test]
fn a_lease_serves_only_its_holder_and_only_what_it_is_for() {
    let mut scene = Scene::new(&[]);
    let tokens = scene.tokens.clone();
    let block = u64::from(BLOCK) * scene.honest.model.row_bytes();
    let state = scene.honest.model.state_bytes();
    let req = scene.honest.open("honest", &tokens);
    let hit = scene.honest.lookup(req, TOKENS as u32);
    let mut liar = scene.liar();
    liar.ring.fill(0, RING, 0).unwrap();
    // Somebody else's, and ones that were never given out.
    for lease in [hit.lease, 0, 4711, u64::MAX] {
        let status = liar.fill_at(lease, STATE, 0, (0, state));
        assert_eq!(status, Status::Cancelled, "lease {lease}");
        liar.say(Release {
            lease,
            outcome: Outcome::Used,
            reused: u32::MAX,
        });
    }
    let mut bytes = vec![0xff; RING as usize];
    liar.ring.read(0, &mut bytes).unwrap();
    assert!(
        bytes.iter().all(|byte| *byte == 0),
        "somebody else's bytes came"
    );
    liar.heard_all();
    scene.honest.fill_all(&hit, &tokens).unwrap();
    // Its own, wrongly.
    let req = liar.open("liar", &tokens);
    let own = liar.lookup(req, TOKENS as u32);
    assert_eq!(ranges(&own.parts), [0..1024, 1024..1500]);
    for (name, piece, index, place) in [
        ("a short piece", KV, 0, (0, block - 1)),
        ("a long piece", KV, 0, (0, block + 1)),
        ("past the ring", KV, 0, (RING - block + 1, block)),
        ("far past the ring", KV, 0, (u64::MAX, block)),
        ("a piece that there is not", KV, 2, (0, block)),
        ("a piece without end", KV, u32::MAX, (0, block)),
        ("a second state", STATE, 1, (0, state)),
    ] {
        assert_eq!(
            liar.fill_at(own.lease, piece, index, place),
            Status::BadRequest,
            "{name}"
        );
    }
    // A lookup counts once for each attempt, and only of a request that is there.
    for (req, name) in [(req, "twice"), (4711, "nobody")] {
        let result = liar.lookup(req, TOKENS as u32);
        assert_eq!(
            (result.lease, result.reason),
            (0, Some(Miss::BadRequest)),
            "{name}"
        );
    }
    liar.fill_all(&own, &tokens).unwrap();
    liar.say(Release {
        lease: own.lease,
        outcome: Outcome::Used,
        reused: u32::MAX,
    });
    assert_eq!(
        liar.fill_at(own.lease, STATE, 0, (0, state)),
        Status::Cancelled
    );
    liar.say(Release {
        lease: own.lease,
        outcome: Outcome::Used,
        reused: 1500,
    });
    liar.heard_all();
    let reused = scene.daemon.metric("engram_reused_tokens_total");
    assert_eq!(reused, 1500.0, "reuse that was not");
    let lease = hit.lease;
    scene.honest.say(Release {
        lease,
        outcome: Outcome::Aborted,
        reused: 0,
    });
    liar.die();
    scene.all_came_back();
}

#[test]
fn a_worker_that_dies_in_the_middle_takes_nothing_along() {
    let mut scene = Scene::new(&[]);
    for polite in [false, true] {
        let mut liar = scene.liar();
        // A save half drained, one wanted, leases half filled, answers unread.
        let tokens = prompt(2, 3000);
        for (half, name) in [(true, "half"), (false, "wanted")] {
            let mut tokens = tokens.clone();
            tokens[0] = u32::from(half);
            let req = liar.open(name, &tokens);
            let save = liar.offer(req, 3000);
            let parts = liar.answer(save).unwrap();
            if half {
                let bytes = liar.model.kv(&tokens, &parts[0]);
                assert_eq!(liar.drain(save, KV, 0, &bytes), Status::Ok);
            }
        }
        for _ in 0..8 {
            let req = liar.open("", &scene.tokens);
            let hit = liar.lookup(req, TOKENS as u32);
            assert_ne!(hit.lease, 0);
            let bytes = u64::from(BLOCK) * liar.model.row_bytes();
            let fill = |ring_offset| Fill {
                lease: hit.lease,
                piece: KV,
                index: 0,
                count: 1,
                ring_offset,
                bytes,
            };
            for i in 0..8 {
                liar.say(fill(i * bytes));
            }
        }
        if polite {
            liar.end.link.close(CloseReason::Failed);
            liar.ring_bell();
            scene.wait_for_level("engram_sessions", 1.0);
        }
        liar.die();
        scene.wait_for_level("engram_sessions", 1.0);
        scene.honest_is_served();
    }
    scene.all_came_back();
}

#[test]
fn what_a_worker_said_before_it_died_counts() {
    let mut scene = Scene::new(&[]);
    for i in 0..20 {
        let mut worker = scene.liar();
        let tokens = prompt(i + 2, 1500);
        let name = format!("c{i}");
        let req = worker.open(&name, &tokens);
        let save = worker.offer(req, 1500);
        let parts = worker.answer(save).unwrap();
        let state = worker.model.state(&tokens);
        let kv = parts
            .iter()
            .map(|part| (KV, worker.model.kv(&tokens, part)));
        let pieces: Vec<_> = kv.chain([(STATE, state)]).collect();
        for ((piece, bytes), index) in pieces.iter().zip(0..) {
            let ring_offset = worker.place(bytes.len() as u64);
            worker.ring.write(ring_offset, bytes).unwrap();
            let (piece, bytes) = (*piece, bytes.len() as u64);
            let index = if piece == KV { index } else { 0 };
            worker
                .end
                .tx
                .push(
                    &Drain {
                        save,
                        piece,
                        index,
                        count: 1,
                        ring_offset,
                        bytes,
                    }
                    .into(),
                )
                .unwrap();
        }
        worker.finish(req, tokens.len());
        worker.die();
        scene.wait_for_level("engram_sessions", 1.0);
        let named = json!({ "conversation_id": name });
        let found = scene.daemon.post("/list_snapshots", &named).json();
        assert_eq!(found["snapshots"][0]["boundary"], 1500, "{name}: {found}");
        assert_eq!(
            scene.honest.restore(&tokens).unwrap().boundary,
            1500,
            "{name}"
        );
    }
}

#[test]
fn an_earlier_session_of_the_same_rank_is_cut_off() {
    let mut scene = Scene::new(&[]);
    let mut old = scene.liar();
    let req = old.open("", &scene.tokens);
    let hit = old.lookup(req, TOKENS as u32);
    let req = old.open("old", &prompt(2, 1500));
    let save = old.offer(req, 1500);
    old.answer(save).unwrap();
    let mut new = Worker::attach_as(&scene.daemon, &old.model.clone());
    assert_eq!(old.closed(), CloseReason::Replaced);
    // The old ring is not written any more, whatever is said on the old channel.
    old.ring.fill(0, RING, 0).unwrap();
    let bytes = old.model.state_bytes();
    let fill = Fill {
        lease: hit.lease,
        piece: STATE,
        index: 0,
        count: 1,
        ring_offset: 0,
        bytes,
    };
    old.end.tx.push(&fill.into()).unwrap();
    old.ring_bell();
    // Nor does the new one have what was the old one's.
    assert_eq!(
        new.fill_at(hit.lease, STATE, 0, (0, bytes)),
        Status::Cancelled
    );
    assert_eq!(new.drain_at(save, STATE, 0, (0, bytes)), Status::Cancelled);
    scene.wait_for_level("engram_sessions", 2.0);
    scene.honest_is_served();
    let mut there = vec![0xff; RING as usize];
    old.ring.read(0, &mut there).unwrap();
    assert!(
        there.iter().all(|byte| *byte == 0),
        "a closed ring was written"
    );
    new.die();
    old.die();
    scene.all_came_back();
}

#[test]
fn a_ring_that_changes_while_it_is_read_hurts_only_its_own_data() {
    let mut scene = Scene::new(&[]);
    let mut liar = scene.liar();
    let tokens = prompt(2, 1500);
    let req = liar.open("liar", &tokens);
    let save = liar.offer(req, 1500);
    let parts = liar.answer(save).unwrap();
    let memory = std::sync::Arc::clone(&liar.ring);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for byte in (0..=u8::MAX).cycle() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                memory.fill(0, RING, byte).unwrap();
            }
        });
        for (part, index) in parts.iter().zip(0..) {
            let bytes = part.len() as u64 * liar.model.row_bytes();
            assert_eq!(liar.drain_at(save, KV, index, (0, bytes)), Status::Ok);
        }
        let bytes = liar.model.state_bytes();
        assert_eq!(liar.drain_at(save, STATE, 0, (0, bytes)), Status::Ok);
        stop.store(true, Ordering::Relaxed);
    });
    liar.saved(save).unwrap();
    liar.finish(req, 1500);
    liar.heard_all();
    scene.honest_is_served();
    let whole = json!({ "conversation_id": "liar", "whole": true });
    assert_eq!(scene.daemon.post("/delete_snapshot", &whole).status, 200);
    liar.die();
    scene.all_came_back();
}

#[test]
fn the_secret_of_one_session_opens_no_other() {
    let scene = Scene::new(&[]);
    let request = Model::default().request();
    let mut attached = attach(&scene.daemon.grpc_socket(), request).unwrap();
    attached.session = scene.honest.session.to_vec().into();
    let ring = ring();
    assert!(shake(&attached, &attached.secret, Some(ring.fd())).is_err());
    // Nor has the session that was tried suffered.
    let mut scene = scene;
    scene.honest_is_served();
}
