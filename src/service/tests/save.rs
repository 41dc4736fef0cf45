use super::fake::*;
use crate::proto::channel::layout::{AbortReason, DeclineReason, Piece, Status};
use crate::proto::channel::msg::Down;
use crate::proto::channel::msg::{Epoch, RequestClose, SaveAbort, Saved};
use crate::types::TokenRange;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_saved_comes_back_byte_for_byte() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2500);
    let req = fake.open("c", &tokens);
    let SaveEnd::Saved(parts, _) = fake.save_at(req, &tokens, 2304).await else {
        panic!()
    };
    assert_eq!(parts, pieces(0, 2304));
    let got = fake.restore(&tokens).await.unwrap();
    assert_eq!((got.boundary, got.parts), (2304, pieces(0, 2304)));
    assert_eq!(got.bytes, STATE + 2304 * ROW);
    assert_eq!(world.metric("engram_saved_tokens_total"), 2304.0);
    assert_eq!(world.metric("engram_restored_tokens_total"), 2304.0);
    eventually("the release", || {
        world.metric("engram_reused_tokens_total") == 2304.0
    })
    .await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_save_moves_and_writes_nothing() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    world.all_durable().await;
    let written = world.metric("engram_written_bytes_total");
    assert_eq!(written, (STATE + 1280 * ROW) as f64);
    let req = fake.open("other", &tokens);
    let end = fake.save_at(req, &tokens, 1280).await;
    assert_eq!(end, SaveEnd::Declined(DeclineReason::AlreadyStored));
    world.all_durable().await;
    assert_eq!(world.metric("engram_written_bytes_total"), written);
    // From another process of the same model, too, whatever its page size.
    let mut other = Fake::attach_as(
        &world,
        &Variant {
            page_size: 64,
            ..Variant::default()
        },
    )
    .await;
    let req = other.open("third", &tokens);
    let end = other.save_at(req, &tokens, 1280).await;
    assert_eq!(end, SaveEnd::Declined(DeclineReason::AlreadyStored));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_turn_brings_only_what_is_new() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 5000);
    fake.turn("c", &tokens[..1600], 1500).await;
    world.all_durable().await;
    let before = world.metric("engram_written_bytes_total");
    let req = fake.open("c", &tokens);
    let SaveEnd::Saved(parts, _) = fake.save_at(req, &tokens, 4000).await else {
        panic!()
    };
    assert_eq!(parts, pieces(1500, 4000));
    world.all_durable().await;
    let after = world.metric("engram_written_bytes_total");
    assert_eq!(after - before, (STATE + 2500 * ROW) as f64);
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 4000);
    assert_eq!(fake.restore(&tokens[..3999]).await.unwrap().boundary, 1500);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_branch_inside_a_block_shares_what_lies_before() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let first = prompt(1, 2000);
    let mut second = first.clone();
    second.truncate(1800);
    second.extend(prompt(2, 1200));
    fake.turn("c", &first, 2000).await;
    let req = fake.open("d", &second);
    let SaveEnd::Saved(parts, _) = fake.save_at(req, &second, 3000).await else {
        panic!()
    };
    assert_eq!(parts, pieces(1800, 3000));
    // Every byte of both, the shared piece included, is checked here.
    assert_eq!(fake.restore(&second).await.unwrap().boundary, 3000);
    assert_eq!(fake.restore(&first).await.unwrap().boundary, 2000);
    assert_eq!(fake.restore(&second[..2999]).await, None);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_one_prefill_follow_each_other() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let req = fake.open("c", &tokens);
    // The first is being drained: the second asks only for what is beyond, and waits for it.
    let first = fake.offer(req, 1024);
    let parts = fake.answer(first).await.unwrap();
    let bytes = kv_bytes(0, &tokens, parts[0]);
    assert_eq!(fake.drain(first, Piece::Kv, 0, &bytes).await, Status::Ok);
    let second = fake.offer(req, 2048);
    let parts = fake.answer(second).await.unwrap();
    assert_eq!(
        parts,
        [TokenRange {
            start: 1024,
            end: 2048
        }]
    );
    fake.drain_all(second, &tokens[..2048], &parts).await;
    let bytes = state_bytes(0, &tokens[..1024]);
    assert_eq!(fake.drain(first, Piece::State, 0, &bytes).await, Status::Ok);
    fake.saved(first).await.unwrap();
    fake.saved(second).await.unwrap();
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2048);
    assert_eq!(fake.restore(&tokens[..2000]).await.unwrap().boundary, 1024);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_untouched_save_gives_way_to_a_deeper_one() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let req = fake.open("c", &tokens);
    let first = fake.offer(req, 1024);
    fake.answer(first).await.unwrap();
    let second = fake.offer(req, 2048);
    assert_eq!(fake.saved(first).await, Err(Status::Cancelled));
    let parts = fake.answer(second).await.unwrap();
    assert_eq!(parts, pieces(0, 2048));
    // What was gathered for the first anyway is answered, so that its room comes back.
    let bytes = kv_bytes(0, &tokens, parts[0]);
    assert_eq!(
        fake.drain(first, Piece::Kv, 0, &bytes).await,
        Status::Cancelled
    );
    fake.drain_all(second, &tokens[..2048], &parts).await;
    fake.saved(second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_hangs_on_a_save_that_failed_fails_too() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let req = fake.open("c", &tokens);
    let first = fake.offer(req, 1024);
    let parts = fake.answer(first).await.unwrap();
    let bytes = kv_bytes(0, &tokens, parts[0]);
    fake.drain(first, Piece::Kv, 0, &bytes).await;
    let second = fake.offer(req, 2048);
    let parts = fake.answer(second).await.unwrap();
    fake.drain_all(second, &tokens[..2048], &parts).await;
    fake.say(SaveAbort {
        save: first,
        reason: AbortReason::Evicted,
    });
    assert_eq!(fake.saved(first).await, Err(Status::Cancelled));
    assert_eq!(fake.saved(second).await, Err(Status::Lost));
    assert_eq!(fake.restore(&tokens).await, None);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_that_save_the_same_the_first_wins() {
    let world = World::lazy().await;
    let mut one = Fake::attach(&world).await;
    let mut two = Fake::attach(&world).await;
    let tokens = prompt(1, 2048);
    let (a, b) = (one.open("a", &tokens), two.open("b", &tokens));
    let (a, b) = (one.offer(a, 2048), two.offer(b, 2048));
    let parts = one.answer(a).await.unwrap();
    assert_eq!(two.answer(b).await.unwrap(), parts);
    one.drain_all(a, &tokens, &parts).await;
    let id = one.saved(a).await.unwrap();
    two.drain_all(b, &tokens, &parts).await;
    assert_eq!(two.saved(b).await.unwrap(), id);
    assert_eq!(world.metric("engram_saved_snapshots_total"), 1.0);
    let used = world.service.store.arena.used();
    let kept: u64 = {
        use crate::store::Tier as _;
        world.service.store.ram.usage().bytes
    };
    assert_eq!(used, kept, "what the second brought is freed");
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_prompts_with_one_beginning_keep_its_whole_blocks_once() {
    let world = World::lazy().await;
    let mut one = Fake::attach(&world).await;
    let mut two = Fake::attach(&world).await;
    let first = prompt(1, 3000);
    let mut second = first[..2500].to_vec();
    second.extend(prompt(2, 500));
    let (a, b) = (one.open("a", &first), two.open("b", &second));
    let (a, b) = (one.offer(a, 3000), two.offer(b, 3000));
    let parts = one.answer(a).await.unwrap();
    two.answer(b).await.unwrap();
    one.drain_all(a, &first, &parts).await;
    one.saved(a).await.unwrap();
    two.drain_all(b, &second, &parts).await;
    two.saved(b).await.unwrap();
    let stored = world.metric("engram_saved_bytes_total");
    assert_eq!(stored, (2 * STATE + (3000 + 3000 - 2048) * ROW) as f64);
    assert_eq!(one.restore(&second).await.unwrap().boundary, 3000);
    assert_eq!(one.restore(&first).await.unwrap().boundary, 3000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn superseded_states_of_one_request_are_never_written() {
    let mut settings = Settings::default();
    settings.config.write_after = std::time::Duration::from_secs(3600);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let req = fake.open("c", &tokens);
    for boundary in [1024, 2048, 2816] {
        let end = fake.save_at(req, &tokens, boundary).await;
        assert!(matches!(end, SaveEnd::Saved(..)), "{end:?}");
    }
    assert_eq!(world.metric("engram_superseded_snapshots_total"), 2.0);
    // All that waits is the deepest; the others can still be found.
    assert_eq!(world.service.status().pending_writes, 1);
    assert_eq!(fake.restore(&tokens[..2000]).await.unwrap().boundary, 1024);
    fake.finish(req, 3000);
    fake.say(RequestClose { req });
    fake.heard_all().await;
    world.service.shutdown().await;
    assert_eq!(
        world
            .files(".json")
            .iter()
            .filter(|p| p.to_str().unwrap().contains("manifests"))
            .count(),
        1
    );
    assert_eq!(
        world.metric("engram_written_bytes_total"),
        (STATE + 2816 * ROW) as f64
    );
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2816);
    assert_eq!(fake.restore(&tokens[..2000]).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_epoch_ends_what_is_under_way_and_never_hits() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2000);
    fake.turn("c", &tokens, 1536).await;
    let req = fake.open("c", &tokens);
    let save = fake.offer(req, 2000);
    fake.answer(save).await.unwrap();
    fake.say(Epoch {
        epoch: 2,
        weights_digest: [0; 32],
    });
    assert_eq!(fake.saved(save).await, Err(Status::StaleEpoch));
    // Weights that are not known: nothing.
    let save = fake.offer(req, 2000);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::StaleEpoch));
    fake.epoch = 2;
    assert_eq!(fake.restore(&tokens).await, None);
    // Other weights: nothing of the old ones. A request that began before is not saved.
    fake.say(Epoch {
        epoch: 3,
        weights_digest: [9; 32],
    });
    fake.epoch = 3;
    assert_eq!(fake.restore(&tokens).await, None);
    let save = fake.offer(req, 2000);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::StaleEpoch));
    let req = fake.open("c", &tokens);
    assert!(matches!(
        fake.save_at(req, &tokens, 2000).await,
        SaveEnd::Saved(..)
    ));
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2000);
    // The old weights again: their snapshot is found, the other's is not.
    fake.say(Epoch {
        epoch: 4,
        weights_digest: [1; 32],
    });
    fake.epoch = 4;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1536);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_of_the_session_leaves_nothing_of_a_save() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2000);
    let req = fake.open("c", &tokens);
    let save = fake.offer(req, 2000);
    let parts = fake.answer(save).await.unwrap();
    let bytes = kv_bytes(0, &tokens, parts[0]);
    fake.drain(save, Piece::Kv, 0, &bytes).await;
    assert!(world.service.store.arena.used() > 0);
    fake.end
        .link
        .close(crate::proto::channel::layout::CloseReason::Shutdown);
    eventually("the end", || world.service.workers().is_empty()).await;
    eventually("the memory", || world.service.store.arena.used() == 0).await;
    assert!(world.service.core.lock().conversations.is_empty());
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_that_the_worker_forgets_is_dropped() {
    let mut settings = Settings::default();
    settings.config.save_timeout = std::time::Duration::from_millis(50);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2000);
    let req = fake.open("c", &tokens);
    let save = fake.offer(req, 2000);
    fake.answer(save).await.unwrap();
    let status = fake
        .hear(|message| match message {
            Down::Saved(Saved {
                save: id, status, ..
            }) if *id == save => Some(*status),
            _ => None,
        })
        .await;
    assert_eq!(status, Status::Cancelled);
    eventually("the memory", || world.service.store.arena.used() == 0).await;
}
