//! Saves and restores that go well.

use super::fake::{Snapshot, Store};
use super::rig::{LIMITS, Rig, SHAPE, Shape, cold, prompt};
use crate::engine::attach::Tamper;
use crate::engine::memory::Restored;
use crate::proto::channel::layout::{Finish, Outcome, Piece};
use crate::proto::channel::msg::Up;

#[test]
fn a_conversation_comes_back_after_the_device_forgot_it() {
    let mut rig = Rig::new(SHAPE);
    let mut history = prompt(1, 1100);
    let mut boundary = 0;
    for turn in 0..4 {
        let answer = rig.ask_and_save(&history, 48);
        assert_eq!(answer.output_ids, cold(&history, 48), "turn {turn}");
        assert_eq!(answer.cached_tokens, boundary, "turn {turn}");
        match answer.restored {
            None => assert_eq!(turn, 0),
            Some(Restored {
                restored_tokens,
                reused_tokens,
                tier,
                ..
            }) => {
                assert_eq!(
                    (restored_tokens, reused_tokens, tier),
                    (boundary, boundary, "ram")
                );
            }
        }
        boundary = (history.len() + 47) / 256 * 256;
        history.extend(answer.output_ids);
        history.extend(prompt(turn + 2, 150));
        rig.settle();
    }
    assert_eq!(rig.count("restored"), 3);
    assert_eq!(rig.count("late") + rig.count("garbled"), 0);
}

#[test]
fn what_the_daemon_hears_of_a_request_is_whole() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(1, 600);
    let answer = rig.ask_and_save(&tokens, 20);
    let heard = &rig.fake().heard;
    let said: Vec<u32> = heard
        .iter()
        .filter_map(|message| match message {
            Up::Tokens(tokens) => Some(tokens.ids.clone()),
            _ => None,
        })
        .flatten()
        .collect();
    assert_eq!(said, [tokens.clone(), answer.output_ids].concat());
    let turn = heard.iter().find_map(|message| match message {
        Up::TurnFinished(turn) => Some(turn.clone()),
        _ => None,
    });
    let turn = turn.unwrap();
    assert_eq!((turn.prompt_tokens, turn.total_tokens), (600, 620));
    assert_eq!((turn.cached_tokens, turn.prefilled_tokens), (0, 600));
    assert_eq!(turn.finish, Finish::Length);
    let names: Vec<_> = heard.iter().map(Up::name).collect();
    let at = |name| names.iter().position(|n| *n == name).unwrap();
    assert!(at("RequestOpen") < at("Lookup") && at("TurnFinished") < at("RequestClose"));
    // Again, from the device: a state that is there is offered once more, and nothing is asked for
    // that cannot be deeper.
    let lookups = rig.fake().count("Lookup");
    rig.ask(&tokens[..520], 4);
    assert_eq!(rig.fake().count("Lookup"), lookups);
}

#[test]
fn only_what_the_device_lost_moves() {
    let shape = Shape {
        slots: 3,
        max_running: 1,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    let tokens = prompt(1, 1400);
    rig.ask_and_save(&tokens, 4);
    // Three other states push this one out; its KV stays.
    for seed in 2..5 {
        rig.ask_and_save(&prompt(seed, 300), 4);
    }
    rig.fake().heard.clear();
    let answer = rig.ask(&tokens, 4);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 1280)
    );
    let filled: Vec<Piece> = rig
        .fake()
        .heard
        .iter()
        .filter_map(|message| match message {
            Up::Fill(fill) => Some(fill.piece),
            _ => None,
        })
        .collect();
    assert_eq!(filled, [Piece::State]);
    rig.settle();
}

#[test]
fn a_prefix_larger_than_the_rings_share_streams_through_it() {
    // 3000 tokens are 384000 bytes; the ring has room for two blocks and a state.
    let shape = Shape {
        ring: 320 << 10,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    let tokens = prompt(1, 3000);
    rig.ask_and_save(&tokens, 4);
    rig.settle();
    rig.fake().mute = vec!["Filled"];
    let reply = rig.submit(&tokens, 4);
    rig.until("pieces come", |rig| rig.in_state("restores/Filling") == 1);
    // Its pages are held by nobody but the restore by now.
    assert_eq!(rig.report()["slots"]["held"], 1);
    assert!(rig.report()["pages"]["held"].as_u64().unwrap() >= 40);
    rig.fake().unmute();
    let answer = rig.wait(reply);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 2816)
    );
    rig.settle();
}

#[test]
fn many_restores_at_once_share_a_small_ring() {
    let shape = Shape {
        ring: 320 << 10,
        slots: 24,
        pages: 256,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    let prompts: Vec<_> = (1..9)
        .map(|seed| prompt(seed, 500 + 300 * seed as usize))
        .collect();
    for tokens in &prompts {
        rig.ask_and_save(tokens, 4);
        rig.settle();
    }
    let replies: Vec<_> = prompts.iter().map(|tokens| rig.submit(tokens, 8)).collect();
    for (tokens, reply) in prompts.iter().zip(replies) {
        let answer = rig.wait(reply);
        assert_eq!(answer.output_ids, cold(tokens, 8));
        assert_eq!(answer.cached_tokens, (tokens.len() - 1) / 256 * 256);
    }
    rig.settle();
}

#[test]
fn another_page_size_restores_and_asks_past_boundaries_inside_a_page() {
    let exact = Shape {
        page_size: 1,
        pages: 8192,
        exact_end: true,
        ..SHAPE
    };
    let mut rig = Rig::new(exact);
    let tokens = prompt(1, 700);
    rig.ask_and_save(&tokens, 30);
    let store: Store = rig.fake().store.clone();
    assert!(
        store
            .snapshots
            .iter()
            .any(|snapshot| snapshot.tokens.len() == 700)
    );
    let mut rig = Rig::alone(SHAPE);
    rig.attach(store);
    let longer = [tokens, prompt(2, 50)].concat();
    let answer = rig.ask(&longer, 8);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&longer, 8), 512)
    );
    let attempts: Vec<u32> = rig
        .fake()
        .heard
        .iter()
        .filter_map(|message| match message {
            Up::Lookup(lookup) => Some(lookup.attempt),
            Up::Offer(offer) => Some(offer.attempt),
            _ => None,
        })
        .collect();
    assert!(
        attempts.starts_with(&[1, 2]) && attempts.is_sorted(),
        "{attempts:?}"
    );
    rig.settle();
}

#[test]
fn zeroing_the_restored_state_or_kv_changes_the_answer() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(1, 1100);
    rig.ask_and_save(&tokens, 24);
    rig.settle();
    for (tamper, same) in [
        (Some(Tamper::State), false),
        (Some(Tamper::Kv), false),
        (None, true),
    ] {
        rig.control.set_tamper(tamper);
        let answer = rig.ask(&tokens, 24);
        assert_eq!(answer.cached_tokens, 1024);
        assert_eq!(answer.output_ids == cold(&tokens, 24), same, "{tamper:?}");
        rig.settle();
    }
}

#[test]
fn without_a_daemon_the_engine_serves_and_it_saves_as_soon_as_one_comes() {
    let mut rig = Rig::alone(SHAPE);
    let tokens = prompt(1, 900);
    let reply = rig.submit(&tokens, 300);
    for _ in 0..20 {
        rig.tick();
    }
    // In the middle of an answer.
    rig.attach(Store::default());
    let answer = rig.wait(reply);
    rig.until("it is saved", |rig| rig.count("saved") == 1);
    let Snapshot { tokens: saved, .. } = rig.fake().store.snapshots[0].clone();
    assert_eq!(saved.len(), 1024);
    assert_eq!(saved[..], [tokens, answer.output_ids].concat()[..1024]);
    assert_eq!(rig.fake().count("TurnFinished"), 1);
    rig.settle();
}

#[test]
fn namespaces_are_told_apart() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(1, 600);
    let reply = rig.submit_as(&tokens, 4, Some("k"));
    rig.wait(reply);
    let open = rig.fake().heard.iter().find_map(|message| match message {
        Up::RequestOpen(open) => Some(open.clone()),
        _ => None,
    });
    assert_eq!(open.unwrap().extra_key, "k");
}

#[test]
fn a_lease_that_the_daemon_takes_back_from_a_waiting_request_is_asked_for_again() {
    let shape = Shape {
        max_running: 1,
        ..SHAPE
    };
    let mut rig = Rig::new(shape);
    let tokens = prompt(1, 600);
    rig.ask_and_save(&tokens, 4);
    rig.settle();
    let first = rig.submit(&prompt(2, 100), 200);
    rig.tick();
    let second = rig.submit(&tokens, 4);
    rig.until("it is leased", |rig| rig.in_state("restores/Leased") == 1);
    // However long it waits in line, our own deadlines do not count yet.
    rig.pass(LIMITS.patience * 3);
    assert_eq!(rig.in_state("restores/Leased"), 1);
    let lease = crate::proto::channel::msg::Revoke {
        lease: (1 << 32) + 1,
        reason: crate::proto::channel::layout::RevokeReason::Deadline,
    };
    rig.fake().say(lease);
    rig.until("it is given back", |rig| {
        rig.in_state("restores/Leased") == 0
    });
    rig.wait(first);
    let answer = rig.wait(second);
    assert_eq!(
        (answer.output_ids, answer.cached_tokens),
        (cold(&tokens, 4), 512)
    );
    let released: Vec<Outcome> = rig
        .fake()
        .heard
        .iter()
        .filter_map(|message| match message {
            Up::Release(release) => Some(release.outcome),
            _ => None,
        })
        .collect();
    assert_eq!(released, [Outcome::Deadline, Outcome::Used]);
    rig.settle();
}

/// Every test here, for the other mode.
pub const ALL: &[fn()] = &[
    a_conversation_comes_back_after_the_device_forgot_it,
    what_the_daemon_hears_of_a_request_is_whole,
    only_what_the_device_lost_moves,
    a_prefix_larger_than_the_rings_share_streams_through_it,
    many_restores_at_once_share_a_small_ring,
    another_page_size_restores_and_asks_past_boundaries_inside_a_page,
    zeroing_the_restored_state_or_kv_changes_the_answer,
    without_a_daemon_the_engine_serves_and_it_saves_as_soon_as_one_comes,
    namespaces_are_told_apart,
    a_lease_that_the_daemon_takes_back_from_a_waiting_request_is_asked_for_again,
];
