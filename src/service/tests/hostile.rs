use super::fake::*;
use crate::proto::channel::layout::{CloseReason, DeclineReason, Miss, Piece, Status};
use crate::proto::channel::msg::Down;
use crate::proto::channel::msg::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_in_the_tokens_poisons_one_request_only() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    let bad = fake.open("bad", &tokens[..1000]);
    fake.tokens(bad, 1001, &tokens[1001..]);
    let save = fake.offer(bad, 900);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::BadRequest));
    assert_eq!(
        fake.lookup(bad, 900, (0, 0)).await.reason,
        Some(Miss::BadRequest)
    );
    assert_eq!(world.metric("engram_errors_total{type=\"token_gap\"}"), 1.0);
    let good = fake.open("good", &tokens);
    assert!(matches!(
        fake.save_at(good, &tokens, 900).await,
        SaveEnd::Saved(..)
    ));
    // Wide ids that do not fit, and ids that do.
    let wide = fake.open("wide", &[]);
    fake.say(TokensWide {
        req: wide,
        offset: 0,
        ids: vec![1, 1 << 40],
    });
    let save = fake.offer(wide, 1);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::BadRequest));
    let wide = fake.open("wide", &[]);
    let ids = tokens.iter().map(|id| u64::from(*id)).collect();
    fake.say(TokensWide {
        req: wide,
        offset: 0,
        ids,
    });
    let save = fake.offer(wide, 900);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::AlreadyStored));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_about_nothing_are_answered_or_ignored() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.tokens(77, 0, &tokens);
    fake.finish(77, 1500);
    fake.say(RequestClose { req: 77 });
    fake.say(SaveAbort {
        save: 77,
        reason: crate::proto::channel::layout::AbortReason::Deadline,
    });
    fake.say(Release {
        lease: 77,
        outcome: crate::proto::channel::layout::Outcome::Used,
        reused: 9,
    });
    assert_eq!(
        fake.drain(77, Piece::State, 0, &[0; 8]).await,
        Status::Cancelled
    );
    assert_eq!(
        fake.fill(77, Piece::State, 0, 8).await,
        Err(Status::Cancelled)
    );
    for (req, boundary) in [(77, 5), (78, 0)] {
        let save = fake.offer(req, boundary);
        assert_eq!(fake.answer(save).await, Err(DeclineReason::BadRequest));
    }
    let req = fake.open("c", &tokens);
    for boundary in [0, 1501, u32::MAX as usize] {
        let save = fake.offer(req, boundary);
        assert_eq!(fake.answer(save).await, Err(DeclineReason::BadRequest));
    }
    assert_eq!(world.metric("engram_reused_tokens_total"), 0.0);
    assert!(matches!(
        fake.save_at(req, &tokens, 1500).await,
        SaveEnd::Saved(..)
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drains_that_do_not_fit_end_their_save() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let (state, kv) = (Piece::State, Piece::Kv);
    let all = 3000 * ROW;
    let cases: [(Piece, u32, u32, u64, u64); 18] = [
        (state, 1, 1, 0, STATE),
        (state, 0, 1, 0, STATE + 1),
        (state, 0, 1, RING - STATE + 1, STATE),
        (state, 0, 1, u64::MAX, STATE),
        (kv, 9, 1, 0, 1024 * ROW),
        (kv, u32::MAX, 1, 0, 1024 * ROW),
        (kv, 0, 1, 0, 0),
        // Runs of none, of more than there is, beyond all numbers, and beyond the ring.
        (state, 0, 0, 0, 0),
        (state, 0, 2, 0, STATE),
        (kv, 0, 0, 0, 0),
        (kv, 0, 4, 0, all),
        (kv, 1, 3, 0, all),
        (kv, 0, u32::MAX, 0, u64::MAX),
        (kv, u32::MAX, u32::MAX, 0, all),
        (kv, 0, 3, 0, all - 1),
        (kv, 0, 3, 0, all + 1),
        (kv, 0, 3, RING - all + 1, all),
        (kv, 0, 3, u64::MAX - 4096, all),
    ];
    for (piece, index, count, ring_offset, bytes) in cases {
        let req = fake.open("c", &tokens);
        let save = fake.offer(req, 3000);
        fake.answer(save).await.unwrap();
        fake.say(Drain {
            save,
            piece,
            index,
            count,
            ring_offset,
            bytes,
        });
        let status = fake
            .hear(|message| match message {
                Down::Drained(it) if it.save == save => {
                    assert_eq!((it.index, it.count), (index, count));
                    Some(it.status)
                }
                _ => None,
            })
            .await;
        assert_eq!(status, Status::BadRequest);
        assert_eq!(fake.saved(save).await, Err(Status::BadRequest));
    }
    // The same piece twice.
    let req = fake.open("c", &tokens);
    let save = fake.offer(req, 3000);
    fake.answer(save).await.unwrap();
    let state = state_bytes(0, &tokens);
    assert_eq!(fake.drain(save, Piece::State, 0, &state).await, Status::Ok);
    assert_eq!(
        fake.drain(save, Piece::State, 0, &state).await,
        Status::BadRequest
    );
    assert_eq!(fake.saved(save).await, Err(Status::BadRequest));
    eventually("the memory", || world.service.store.arena.used() == 0).await;
    assert_eq!(fake.restore(&tokens).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_record_ends_the_session_and_frees_everything() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    let id = fake.turn("c", &tokens, 1280).await;
    let req = fake.open("c", &tokens);
    fake.lookup(req, 1500, (0, 0)).await;
    let save = fake.offer(req, 1500);
    fake.answer(save).await.unwrap();
    let used = world.service.store.arena.used();
    // A kind that no version knows.
    fake.break_record().await;
    assert_eq!(fake.closed().await, CloseReason::BrokenPeer);
    eventually("the end", || world.service.workers().is_empty()).await;
    eventually("the memory of the save", || {
        world.service.store.arena.used() < used
    })
    .await;
    let leases = || {
        world
            .service
            .core
            .lock()
            .index
            .snapshot(&id)
            .unwrap()
            .leases
    };
    eventually("the lease", || leases() == 0).await;
    assert_eq!(
        world.metric("engram_errors_total{type=\"broken_peer\"}"),
        1.0
    );
    assert_eq!(world.metric("engram_sessions"), 0.0);
    // The daemon lives, and what was visible is.
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1280);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_much_of_anything_is_refused_not_kept() {
    let mut settings = Settings::default();
    settings.config.max_requests = 4;
    settings.config.max_prompt_tokens = 1000;
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1100);
    let long = fake.open("long", &tokens);
    let save = fake.offer(long, 900);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::BadRequest));
    let mut last = 0;
    for seed in 0..10 {
        last = fake.open(&format!("c{seed}"), &tokens[..500]);
    }
    let save = fake.offer(last, 300);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::BadRequest));
    assert!(world.metric("engram_errors_total{type=\"too_many_requests\"}") >= 6.0);
    assert!(world.service.core.lock().conversations.len() <= 4);
    fake.say(RequestClose { req: long });
    let fine = fake.open("fine", &tokens[..500]);
    assert!(matches!(
        fake.save_at(fine, &tokens, 300).await,
        SaveEnd::Saved(..)
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_begins_anew_forgets_its_tokens() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let (one, two) = (prompt(1, 1500), prompt(2, 1500));
    let req = fake.open("c", &one);
    let save = fake.offer(req, 1280);
    let parts = fake.answer(save).await.unwrap();
    let again = fake.open_as("c", "again", &[], |open| open.req = req);
    assert_ne!(again, req);
    fake.tokens(req, 0, &two);
    assert_eq!(fake.saved(save).await, Err(Status::Cancelled));
    let bytes = kv_bytes(0, &one, parts[0]);
    assert_eq!(
        fake.drain(save, Piece::Kv, 0, &bytes).await,
        Status::Cancelled
    );
    assert!(matches!(
        fake.save_at(req, &two, 1280).await,
        SaveEnd::Saved(..)
    ));
    assert_eq!(fake.restore(&one).await, None);
    assert_eq!(fake.restore(&two).await.unwrap().boundary, 1280);
}
