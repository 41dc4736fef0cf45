//! Every state of a restore: deadlines, lost sessions, late answers, aborts, no room.

use super::rig::{LIMITS, Reply, Rig, SHAPE, Shape, cold, prompt};
use crate::engine::attach::RestoreState;
use crate::proto::channel::layout::{Outcome, Piece, Status};
use crate::proto::channel::msg::{Down, Filled, Up};

fn saved() -> (Rig, Vec<u32>) {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(7, 700);
    rig.ask_and_save(&tokens, 4);
    rig.settle();
    (rig, tokens)
}

/// Brings one restore into a state and keeps it there. Exhaustive: another state needs its way here.
fn bring(rig: &mut Rig, tokens: &[u32], state: &RestoreState) -> Reply {
    let hold = |rig: &Rig| rig.control.hold("restore", state.as_str()).unwrap();
    match state {
        RestoreState::LookingUp => rig.fake().mute = vec!["LookupResult"],
        RestoreState::Filling => rig.fake().mute = vec!["Filled"],
        RestoreState::Leased
        | RestoreState::Placing
        | RestoreState::Placed
        | RestoreState::Releasing => hold(rig),
    }
    let reply = rig.submit(tokens, 300);
    let name = format!("restores/{state}");
    rig.until("the restore is there", |rig| rig.in_state(&name) == 1);
    // So that it is considered for admission.
    rig.tick();
    reply
}

fn outcomes(rig: &mut Rig) -> Vec<Outcome> {
    let heard = rig.fake().heard.iter();
    heard
        .filter_map(|message| match message {
            Up::Release(release) => Some(release.outcome),
            _ => None,
        })
        .collect()
}

#[test]
fn a_deadline_ends_a_restore_in_every_state_and_the_request_is_answered() {
    for state in RestoreState::ALL {
        let (mut rig, tokens) = saved();
        let reply = bring(&mut rig, &tokens, &state);
        let limit = match state {
            RestoreState::Placing => LIMITS.patience * 10,
            _ => LIMITS.patience,
        };
        rig.clock.advance(limit / 2);
        rig.tick();
        assert_eq!(
            rig.count(&format!("deadlines/restore:{state}")),
            0,
            "{state}"
        );
        rig.clock.advance(limit / 2 + LIMITS.patience / 2);
        rig.tick();
        assert_eq!(
            rig.count(&format!("deadlines/restore:{state}")),
            1,
            "{state}"
        );
        let mut fake_quiet = rig.fake.take();
        let answer = rig.wait(reply);
        rig.fake = fake_quiet.take();
        assert_eq!(answer.output_ids, cold(&tokens, 300), "{state}");
        // What was placed by then is the device's, like any other prefix.
        let placed = matches!(state, RestoreState::Placed | RestoreState::Releasing);
        assert_eq!(
            answer.cached_tokens,
            if placed { 512 } else { 0 },
            "{state}"
        );
        rig.control.release();
        let withheld = rig.fake().withheld.len() as u64;
        rig.fake().unmute();
        rig.settle();
        assert!(rig.count("late") >= withheld, "{state}");
        assert_eq!(rig.count("garbled"), 0, "{state}");
        let outcome = match state {
            RestoreState::Releasing => Outcome::Used,
            _ => Outcome::Deadline,
        };
        rig.tick();
        assert_eq!(outcomes(&mut rig), [outcome], "{state}");
    }
}

#[test]
fn a_lost_session_ends_a_restore_in_every_state_and_the_next_session_restores() {
    for state in RestoreState::ALL {
        let (mut rig, tokens) = saved();
        let reply = bring(&mut rig, &tokens, &state);
        let mut old = rig.lose();
        rig.tick();
        assert_eq!(rig.memory()["attached"], false);
        assert_eq!(rig.in_state(&format!("restores/{state}")), 0);
        let answer = rig.wait(reply);
        assert_eq!(answer.output_ids, cold(&tokens, 300), "{state}");
        rig.control.release();
        old.unmute();
        old.serve();
        rig.flush();
        let report = rig.report();
        assert_eq!(report["pages"]["free"], report["pages"]["total"], "{state}");
        rig.attach(old.store.clone());
        let answer = rig.ask_and_save(&tokens, 4);
        assert_eq!(
            (answer.output_ids, answer.cached_tokens),
            (cold(&tokens, 4), 512),
            "{state}"
        );
        assert_eq!(rig.count("late"), 0, "{state}");
        rig.settle();
    }
}

#[test]
fn a_client_that_goes_away_ends_a_restore_in_every_state() {
    for state in RestoreState::ALL {
        let (mut rig, tokens) = saved();
        let reply = bring(&mut rig, &tokens, &state);
        drop(reply);
        rig.tick();
        rig.control.release();
        rig.fake().unmute();
        rig.until("the lease is given back", |rig| outcomes(rig).len() == 1);
        let outcome = match state {
            RestoreState::LookingUp => Outcome::Deadline,
            RestoreState::Releasing => Outcome::Used,
            _ => Outcome::Aborted,
        };
        assert_eq!(outcomes(&mut rig), [outcome], "{state}");
        rig.settle();
        assert_eq!(rig.ask(&tokens, 4).output_ids, cold(&tokens, 4));
    }
}

#[test]
fn a_held_restore_holds_its_own_request_only() {
    let (mut rig, tokens) = saved();
    let held = bring(&mut rig, &tokens, &RestoreState::Filling);
    let other = prompt(8, 300);
    assert_eq!(rig.ask(&other, 8).output_ids, cold(&other, 8));
    assert_eq!(rig.in_state("restores/Filling"), 1);
    rig.fake().unmute();
    assert_eq!(rig.wait(held).cached_tokens, 512);
    rig.settle();
}

#[test]
fn a_piece_that_does_not_come_is_a_miss() {
    let (mut rig, tokens) = saved();
    let reply = bring(&mut rig, &tokens, &RestoreState::Filling);
    let lease = rig.fake().heard.iter().find_map(|message| match message {
        Up::Fill(fill) => Some(fill.lease),
        _ => None,
    });
    rig.fake().withheld.clear();
    rig.fake().mute.clear();
    let filled = |piece, index, status| Filled {
        lease: lease.unwrap(),
        piece,
        index,
        count: 1,
        status,
    };
    rig.fake().say(filled(Piece::State, 0, Status::Ok));
    rig.fake().say(filled(Piece::Kv, 0, Status::Lost));
    let answer = rig.wait(reply);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 300), 0)
    );
    assert_eq!(answer.restored, None);
    rig.tick();
    assert_eq!(outcomes(&mut rig), [Outcome::FillFailed]);
    rig.settle();
}

#[test]
fn a_restore_waits_for_pages_in_its_turn_and_takes_none_that_running_requests_need() {
    let shape = Shape {
        slots: 6,
        pages: 24,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    let tokens = prompt(7, 700);
    rig.ask_and_save(&tokens, 4);
    rig.settle();
    // A running request that has reserved 16 of 24 pages.
    let big = prompt(8, 1000);
    let running = rig.submit(&big, 24);
    rig.tick();
    let waiting = rig.submit(&tokens, 4);
    rig.until("its bytes are here", |rig| {
        rig.in_state("restores/Placing") == 1
    });
    for _ in 0..5 {
        rig.tick();
    }
    assert_eq!(rig.in_state("restores/Placing"), 1);
    assert_eq!(rig.wait(running).output_ids, cold(&big, 24));
    let answer = rig.wait(waiting);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 512)
    );
    rig.settle();
}

#[test]
fn with_a_single_slot_there_is_no_room_for_a_state_beside_the_request() {
    let (mut rig, tokens) = saved();
    let store = rig.fake().store.clone();
    let mut rig = Rig::alone(Shape {
        slots: 1,
        max_running: 1,
        ..SHAPE
    });
    rig.attach(store);
    let answer = rig.ask(&tokens, 4);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 0)
    );
    rig.tick();
    assert_eq!(outcomes(&mut rig), [Outcome::NoDeviceRoom]);
    rig.settle();
}

#[test]
fn kv_that_the_device_loses_while_the_request_waits_is_asked_for_again() {
    let shape = Shape {
        slots: 3,
        pages: 30,
        max_running: 1,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    let tokens = prompt(7, 700);
    rig.ask_and_save(&tokens, 4);
    for seed in 2..5 {
        rig.ask_and_save(&prompt(seed, 256), 4);
    }
    // The device has the KV still when the request comes, and loses it to the one before it.
    let first = rig.submit(&prompt(8, 1500), 100);
    let second = rig.submit(&tokens, 4);
    rig.wait(first);
    let answer = rig.wait(second);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 512)
    );
    rig.settle();
}

#[test]
fn two_requests_for_one_prefix_restore_it_once() {
    let (mut rig, tokens) = saved();
    let longer = [tokens.clone(), prompt(9, 40)].concat();
    let (a, b) = (rig.submit(&tokens, 4), rig.submit(&longer, 4));
    let (a, b) = (rig.wait(a), rig.wait(b));
    assert_eq!((a.output_ids, a.cached_tokens), (cold(&tokens, 4), 512));
    assert_eq!((b.output_ids, b.cached_tokens), (cold(&longer, 4), 512));
    rig.tick();
    let mut outcomes = outcomes(&mut rig);
    outcomes.sort_by_key(|outcome| outcome.as_u32());
    assert_eq!(outcomes, [Outcome::Used, Outcome::DeviceAsDeep]);
    rig.settle();
}

#[test]
fn one_answer_about_several_pieces_is_as_good_as_several() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(7, 2100);
    rig.ask_and_save(&tokens, 4);
    rig.settle();
    let reply = bring(&mut rig, &tokens, &RestoreState::Filling);
    let kv = |message: &Down| match message {
        Down::Filled(filled) if filled.piece == Piece::Kv => Some(filled.clone()),
        _ => None,
    };
    let answers: Vec<Filled> = rig.fake().withheld.iter().filter_map(kv).collect();
    let count = answers.len() as u32;
    assert!(count > 1, "{answers:?}");
    rig.fake().withheld.retain(|message| kv(message).is_none());
    rig.fake().unmute();
    let first = answers[0].clone();
    rig.fake().say(Filled { count, ..first });
    let answer = rig.wait(reply);
    assert!(answer.cached_tokens >= 2048);
    rig.settle();
}

/// Every test here, for the other mode.
pub const ALL: &[fn()] = &[
    a_deadline_ends_a_restore_in_every_state_and_the_request_is_answered,
    a_lost_session_ends_a_restore_in_every_state_and_the_next_session_restores,
    a_client_that_goes_away_ends_a_restore_in_every_state,
    a_held_restore_holds_its_own_request_only,
    a_piece_that_does_not_come_is_a_miss,
    a_restore_waits_for_pages_in_its_turn_and_takes_none_that_running_requests_need,
    with_a_single_slot_there_is_no_room_for_a_state_beside_the_request,
    kv_that_the_device_loses_while_the_request_waits_is_asked_for_again,
    two_requests_for_one_prefix_restore_it_once,
    one_answer_about_several_pieces_is_as_good_as_several,
];
