//! Answers that cannot be, and daemons that close, fall silent or break the protocol.

use super::rig::{LIMITS, Rig, SHAPE, cold, prompt};
use crate::proto::channel::layout::{CloseReason, Piece, RevokeReason, Status, Tier};
use crate::proto::channel::msg::{
    Decline, Down, Drained, Filled, LookupResult, Revoke, Saved, Up, Want,
};

fn saved() -> (Rig, Vec<u32>) {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(7, 1300);
    rig.ask_and_save(&tokens, 4);
    rig.settle();
    (rig, tokens)
}

#[test]
fn impossible_leases_are_given_back_and_the_request_is_prefilled() {
    type Spoil = fn(&mut LookupResult);
    let spoils: [Spoil; 9] = [
        |result| result.boundary = 0,
        |result| result.boundary = 1344,
        |result| result.boundary = u32::MAX,
        |result| result.kv_from = 64,
        |result| result.kv_from = u32::MAX,
        |result| result.parts.truncate(1),
        |result| result.parts.clear(),
        |result| result.parts = vec![0, u32::MAX],
        |result| result.parts = vec![0, 1024, 1088, 1280],
    ];
    for (number, spoil) in spoils.into_iter().enumerate() {
        let (mut rig, tokens) = saved();
        rig.fake().mute = vec!["LookupResult"];
        let reply = rig.submit(&tokens, 4);
        rig.until("it is asked", |rig| !rig.fake().withheld.is_empty());
        let Some(Down::LookupResult(mut result)) = rig.fake().withheld.pop() else {
            panic!("one answer is withheld");
        };
        spoil(&mut result);
        rig.fake().say(result);
        let answer = rig.wait(reply);
        assert_eq!(answer.output_ids, cold(&tokens, 4), "{number}");
        assert_eq!(answer.cached_tokens, 0, "{number}");
        assert_eq!(rig.count("garbled"), 1, "{number}");
        rig.tick();
        assert_eq!(rig.fake().count("Release"), 1, "{number}");
        rig.settle();
    }
}

#[test]
fn impossible_wants_end_the_save_only() {
    let bad: [Vec<u32>; 6] = [
        vec![0],
        vec![0, 0],
        vec![0, 320],
        vec![0, 2000],
        vec![128, 256, 0, 128],
        vec![0, 128, 64, 256],
    ];
    for parts in bad {
        let mut rig = Rig::new(SHAPE);
        rig.fake().mute = vec!["Want"];
        let tokens = prompt(7, 300);
        rig.ask(&tokens, 4);
        rig.fake().withheld.clear();
        let want = Want {
            save: 1,
            need_state: true,
            parts: parts.clone(),
        };
        rig.fake().say(want.clone());
        rig.tick();
        assert_eq!(rig.count("dropped/gather_failed"), 1, "{parts:?}");
        rig.fake().say(want);
        rig.settle();
        assert_eq!(rig.ask(&tokens, 4).output_ids, cold(&tokens, 4));
    }
}

#[test]
fn answers_to_nothing_are_counted_and_change_nothing() {
    let (mut rig, tokens) = saved();
    let nothing = Status::Ok;
    let (lease, save, req) = (99, 99, 99);
    let filled = |index, count| {
        Down::from(Filled {
            lease,
            piece: Piece::Kv,
            index,
            count,
            status: nothing,
        })
    };
    let drained = |index, count| {
        Down::from(Drained {
            save,
            piece: Piece::State,
            index,
            count,
            status: nothing,
        })
    };
    let answers: [Down; 13] = [
        Want {
            save,
            need_state: true,
            parts: vec![0, 64],
        }
        .into(),
        Decline {
            save,
            reason: crate::proto::channel::layout::DeclineReason::NoRoom,
        }
        .into(),
        drained(0, 1),
        // Runs of nothing, and of more than there can be.
        drained(0, 0),
        drained(0, u32::MAX),
        drained(u32::MAX, u32::MAX),
        Saved {
            save,
            status: nothing,
            snapshot: [1; 16],
        }
        .into(),
        filled(3, 1),
        filled(3, 0),
        filled(3, u32::MAX - 3),
        filled(u32::MAX, 2),
        Revoke {
            lease,
            reason: RevokeReason::Lost,
        }
        .into(),
        LookupResult {
            req,
            attempt: 1,
            lease,
            boundary: 512,
            kv_from: 0,
            tier: Some(Tier::Ram),
            reason: None,
            bytes: 0,
            parts: vec![0, 512],
        }
        .into(),
    ];
    for answer in answers {
        rig.fake().say(answer);
    }
    rig.tick();
    assert_eq!(rig.count("late") + rig.count("garbled"), 13);
    // A lease that nobody waits for is given back.
    let released = |message: &Up| matches!(message, Up::Release(release) if release.lease == 99);
    assert!(rig.fake().heard.iter().any(released));
    assert_eq!(rig.ask(&tokens, 4).cached_tokens, 1280);
    rig.settle();
}

#[test]
fn answers_said_twice_or_too_early_do_no_harm() {
    let mut rig = Rig::new(SHAPE);
    rig.fake().mute = vec!["Drained", "Saved"];
    let tokens = prompt(7, 300);
    rig.ask(&tokens, 4);
    rig.until("it drains", |rig| rig.in_state("saves/Draining") == 1);
    // "Saved" before everything is drained is no save.
    rig.fake().say(Saved {
        save: 1,
        status: Status::Ok,
        snapshot: [1; 16],
    });
    rig.tick();
    assert_eq!((rig.count("saved"), rig.count("dropped/garbled")), (0, 1));
    let withheld = rig.fake().withheld.clone();
    rig.fake().unmute();
    for message in withheld {
        rig.fake().say(message);
    }
    rig.settle();
    // Pieces filled twice: the second finds no room to be in.
    rig.fake().mute = vec!["Filled"];
    let reply = rig.submit(&tokens, 4);
    rig.until("it fills", |rig| rig.fake().withheld.len() == 2);
    for message in rig.fake().withheld.clone() {
        rig.fake().say(message);
    }
    rig.fake().unmute();
    let answer = rig.wait(reply);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 256)
    );
    rig.settle();
}

#[test]
fn a_daemon_that_closes_or_falls_silent_is_parted_from() {
    for how in ["detached", "silent"] {
        let (mut rig, tokens) = saved();
        rig.fake().mute = vec!["Filled"];
        let reply = rig.submit(&tokens, 4);
        rig.until("it fills", |rig| rig.in_state("restores/Filling") == 1);
        if how == "detached" {
            rig.fake().end.link.close(CloseReason::Detached);
        } else {
            let stopped = rig.fake.take();
            rig.tick();
            rig.pass(LIMITS.silence + LIMITS.patience);
            rig.fake = stopped;
        }
        let answer = rig.wait(reply);
        assert_eq!(
            (answer.output_ids, answer.cached_tokens),
            (cold(&tokens, 4), 0)
        );
        assert_eq!(rig.count(&format!("sessions_ended/{how}")), 1);
        assert_eq!(rig.memory()["attached"], false);
        rig.settle();
    }
}

#[test]
fn a_session_that_is_replaced_gives_everything_back() {
    let (mut rig, tokens) = saved();
    rig.fake().mute = vec!["Filled"];
    let reply = rig.submit(&tokens, 4);
    rig.until("it fills", |rig| rig.in_state("restores/Filling") == 1);
    let store = rig.fake().store.clone();
    let old = rig.fake.take().unwrap();
    rig.attach(store);
    assert_eq!(old.end.link.peer_closed(), Some(CloseReason::Replaced));
    let answer = rig.wait(reply);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 0)
    );
    rig.settle();
}

/// Every test here, for the other mode.
pub const ALL: &[fn()] = &[
    impossible_leases_are_given_back_and_the_request_is_prefilled,
    impossible_wants_end_the_save_only,
    answers_to_nothing_are_counted_and_change_nothing,
    answers_said_twice_or_too_early_do_no_harm,
    a_daemon_that_closes_or_falls_silent_is_parted_from,
    a_session_that_is_replaced_gives_everything_back,
];
