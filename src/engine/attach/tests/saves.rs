//! Every state of a save: deadlines, lost sessions, late answers, superseding, eviction.

use super::fake::Store;
use super::rig::{LIMITS, Rig, SHAPE, Shape, cold, prompt};
use crate::engine::attach::SaveState;
use crate::proto::channel::layout::{AbortReason, DeclineReason};
use crate::proto::channel::msg::{Decline, Up};

/// Brings one save into a state and keeps it there. Exhaustive: another state needs its way here.
fn bring(rig: &mut Rig, state: &SaveState) -> Vec<u32> {
    let tokens = prompt(7, 300);
    match state {
        SaveState::Offered => rig.fake().mute = vec!["Want"],
        SaveState::Gathering => {}
        SaveState::Draining => rig.fake().mute = vec!["Drained", "Saved"],
        SaveState::Finishing => rig.fake().mute = vec!["Saved"],
    }
    if *state == SaveState::Gathering {
        rig.control.hold("save", "Gathering").unwrap();
    }
    rig.ask(&tokens, 4);
    let name = format!("saves/{state}");
    rig.until("the save is there", |rig| rig.in_state(&name) == 1);
    tokens
}

fn aborts(rig: &mut Rig) -> Vec<AbortReason> {
    let heard = rig.fake().heard.iter();
    heard
        .filter_map(|message| match message {
            Up::SaveAbort(abort) => Some(abort.reason),
            _ => None,
        })
        .collect()
}

#[test]
fn a_deadline_ends_a_save_in_every_state_and_what_comes_late_changes_nothing() {
    for state in SaveState::ALL {
        let mut rig = Rig::new(SHAPE);
        let tokens = bring(&mut rig, &state);
        rig.pass(LIMITS.save_patience + LIMITS.save_patience / 2);
        assert_eq!(rig.in_state(&format!("saves/{state}")), 0);
        assert_eq!(rig.count(&format!("deadlines/save:{state}")), 1);
        let reason = match state {
            SaveState::Gathering => AbortReason::NoRoom,
            _ => AbortReason::Deadline,
        };
        rig.tick();
        assert_eq!(aborts(&mut rig), [reason], "{state}");
        // Rooms that the daemon may be reading stay taken until it answers.
        let taken = state == SaveState::Draining;
        assert_eq!(
            rig.memory()["ring_free"] != rig.shape.ring,
            taken,
            "{state}"
        );
        rig.control.release();
        let withheld = rig.fake().withheld.len() as u64;
        rig.fake().unmute();
        rig.tick();
        rig.tick();
        assert_eq!(rig.count("late"), withheld, "{state}");
        assert_eq!(
            (rig.count("saved"), rig.count("garbled")),
            (0, 0),
            "{state}"
        );
        assert_eq!(rig.ask(&tokens, 4).output_ids, cold(&tokens, 4));
        rig.settle();
    }
}

#[test]
fn a_lost_session_ends_a_save_in_every_state_and_the_next_session_saves() {
    for state in SaveState::ALL {
        let mut rig = Rig::new(SHAPE);
        let tokens = bring(&mut rig, &state);
        let mut old = rig.lose();
        rig.tick();
        assert_eq!(rig.memory()["attached"], false);
        assert_eq!(rig.count("dropped/session_end"), 1, "{state}");
        rig.control.release();
        // A daemon that was only stopped goes on with its end of the old session.
        old.unmute();
        old.serve();
        rig.flush();
        rig.attach(Store::default());
        assert_eq!(rig.ask_and_save(&tokens, 4).output_ids, cold(&tokens, 4));
        assert_eq!((rig.count("saved"), rig.count("late")), (1, 0), "{state}");
        assert!(old.end.link.peer_closed().is_some());
        rig.settle();
    }
}

#[test]
fn emptying_the_cache_ends_what_still_needs_it() {
    for state in SaveState::ALL {
        let mut rig = Rig::new(SHAPE);
        bring(&mut rig, &state);
        rig.flush();
        let early = matches!(state, SaveState::Offered | SaveState::Gathering);
        assert_eq!(rig.count("dropped/evicted"), u64::from(early), "{state}");
        rig.control.release();
        rig.fake().unmute();
        rig.settle();
        assert_eq!(rig.count("saved"), u64::from(!early), "{state}");
    }
}

#[test]
fn a_deeper_state_takes_the_place_of_one_that_was_not_gathered() {
    let mut rig = Rig::new(SHAPE);
    rig.fake().mute = vec!["Want"];
    rig.ask(&prompt(1, 1500), 4);
    // Boundaries 512 and 1024 were offered, then 1280.
    assert_eq!(rig.count("offered"), 3);
    assert_eq!(rig.count("dropped/superseded"), 2);
    assert_eq!(aborts(&mut rig), [AbortReason::Superseded; 2]);
    assert_eq!(rig.in_state("saves/Offered"), 1);
    rig.fake().unmute();
    rig.until("it is saved", |rig| rig.count("saved") == 1);
    assert_eq!(rig.count("late"), 2);
    rig.settle();
    // What was gathered in time is saved at each boundary.
    let mut rig = Rig::new(SHAPE);
    rig.ask_and_save(&prompt(1, 1500), 4);
    let saved: Vec<usize> = rig
        .fake()
        .store
        .snapshots
        .iter()
        .map(|snapshot| snapshot.tokens.len())
        .collect();
    assert_eq!(saved, [512, 1024, 1280]);
}

#[test]
fn a_state_that_was_evicted_before_it_was_gathered_is_given_up() {
    let shape = Shape {
        slots: 2,
        max_running: 1,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    rig.fake().mute = vec!["Want"];
    rig.ask(&prompt(1, 300), 4);
    // The one slot beside the running one takes this request's state.
    rig.ask(&prompt(2, 300), 4);
    rig.fake().unmute();
    rig.until("the first is given up", |rig| {
        rig.count("dropped/evicted") == 1
    });
    rig.until("the second is saved", |rig| rig.count("saved") == 1);
    assert_eq!(aborts(&mut rig), [AbortReason::Evicted]);
    rig.settle();
}

#[test]
fn pieces_wait_for_room_in_a_small_ring_and_keep_their_kv_meanwhile() {
    let shape = Shape {
        ring: 200 << 10,
        pages: 80,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    rig.fake().mute = vec!["Drained"];
    let tokens = prompt(1, 3000);
    rig.ask(&tokens, 4);
    assert!(rig.in_state("saves/Gathering") > 0);
    // The KV cannot be evicted while it waits.
    rig.ask(&prompt(2, 1500), 4);
    rig.until("all is drained", |rig| {
        rig.fake().unmute();
        rig.memory()["saves"]
            .as_object()
            .unwrap()
            .values()
            .all(|count| count == 0)
    });
    rig.settle();
    let answer = rig.ask(&tokens, 4);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens > 0),
        (cold(&tokens, 4), true)
    );
    rig.settle();
}

#[test]
fn a_declined_offer_is_over() {
    let mut rig = Rig::new(SHAPE);
    rig.fake().mute = vec!["Want"];
    rig.ask(&prompt(1, 300), 4);
    let save = rig.fake().heard.iter().find_map(|message| match message {
        Up::Offer(offer) => Some(offer.save),
        _ => None,
    });
    let decline = Decline {
        save: save.unwrap(),
        reason: DeclineReason::AlreadyStored,
    };
    rig.fake().say(decline);
    rig.tick();
    assert_eq!(rig.count("declined/already_stored"), 1);
    rig.settle();
}

/// Every test here, for the other mode.
pub const ALL: &[fn()] = &[
    a_deadline_ends_a_save_in_every_state_and_what_comes_late_changes_nothing,
    a_lost_session_ends_a_save_in_every_state_and_the_next_session_saves,
    emptying_the_cache_ends_what_still_needs_it,
    a_deeper_state_takes_the_place_of_one_that_was_not_gathered,
    a_state_that_was_evicted_before_it_was_gathered_is_given_up,
    pieces_wait_for_room_in_a_small_ring_and_keep_their_kv_meanwhile,
    a_declined_offer_is_over,
];
