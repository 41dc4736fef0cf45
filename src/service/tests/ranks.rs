//! Two ranks of one server: their shards are one snapshot, or nothing.

use std::time::Duration;

use super::fake::*;
use crate::proto::channel::layout::{AbortReason, DeclineReason, Piece, Status};
use crate::proto::channel::msg::{Down, Release};
use crate::proto::channel::msg::{Lookup, RequestClose, SaveAbort};
use crate::proto::v1;
use crate::service::{InfoRequest, SaveRequest, Selector, ServiceError};
use crate::store::Tier as _;
use crate::types::{SnapshotId, TokenId};

const SERVER: [u8; 16] = [7; 16];

fn variant(rank: u32, size: u32) -> Variant {
    Variant {
        instance: Some(SERVER),
        rank: Some((rank, size)),
        ..Variant::default()
    }
}

async fn pair(world: &World) -> [Fake; 2] {
    let first = Fake::attach_as(world, &variant(0, 2)).await;
    [first, Fake::attach_as(world, &variant(1, 2)).await]
}

/// Both ranks offer the same and bring all of it.
async fn save_both(ranks: &mut [Fake; 2], tokens: &[TokenId], boundary: usize) -> SnapshotId {
    let mut saves = Vec::new();
    for rank in ranks.iter_mut() {
        let req = rank.open("c", tokens);
        let save = rank.offer(req, boundary);
        let parts = rank.answer(save).await.unwrap();
        rank.drain_all(save, &tokens[..boundary], &parts).await;
        saves.push((req, save));
    }
    let mut ids = Vec::new();
    for (rank, (req, save)) in ranks.iter_mut().zip(saves) {
        ids.push(rank.saved(save).await.unwrap());
        rank.finish(req, tokens.len());
        rank.say(RequestClose { req });
        rank.heard_all().await;
    }
    assert_eq!(ids[0], ids[1]);
    ids[0]
}

/// Nothing of a save is left.
async fn nothing_left(world: &World, ranks: &mut [Fake]) {
    for rank in ranks {
        rank.heard_all().await;
    }
    eventually("nothing waits", || {
        world.service.shards.len() == 0 && *world.service.reserved.lock() == 0
    })
    .await;
    assert_eq!(world.service.store.ram.usage().bytes, 0);
    assert_eq!(world.metric("engram_saved_snapshots_total"), 0.0);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_shards_are_one_snapshot_and_each_rank_gets_its_own() {
    let world = World::lazy().await;
    let mut ranks = pair(&world).await;
    let tokens = prompt(1, 2500);
    // The first rank is through before the second begins: nothing can be found.
    let req = ranks[0].open("c", &tokens);
    let first = ranks[0].offer(req, 2304);
    let parts = ranks[0].answer(first).await.unwrap();
    assert_eq!(parts, pieces(0, 2304));
    ranks[0].drain_all(first, &tokens[..2304], &parts).await;
    ranks[0].heard_all().await;
    assert_eq!(world.service.shards.len(), 1);
    let probe = ranks[1].open("", &tokens);
    assert_eq!(ranks[1].lookup(probe, 2500, (0, 0)).await.lease, 0);
    // The numbers of a save are the same on all ranks, those of requests need not be.
    let req = ranks[1].open("c", &tokens);
    let second = first;
    ranks[1].say(crate::proto::channel::msg::Offer {
        save: second,
        req,
        attempt: 0,
        boundary: 2304,
        epoch: 1,
    });
    assert_eq!(ranks[1].answer(second).await.unwrap(), parts);
    ranks[1].drain_all(second, &tokens[..2304], &parts).await;
    let id = ranks[1].saved(second).await.unwrap();
    assert_eq!(ranks[0].saved(first).await.unwrap(), id);
    for rank in &mut ranks {
        assert_eq!(rank.restore(&tokens).await.unwrap().boundary, 2304);
    }
    assert_eq!(world.metric("engram_saved_snapshots_total"), 1.0);
    assert_eq!(world.metric("engram_saved_tokens_total"), 2304.0);
    let bytes = 2.0 * (STATE + 2304 * ROW) as f64;
    assert_eq!(world.metric("engram_saved_bytes_total"), bytes);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_does_not_come_takes_the_save_from_all() {
    let mut settings = Settings::default();
    settings.config.save_timeout = Duration::from_millis(200);
    let world = World::with(settings).await;
    let mut ranks = pair(&world).await;
    let tokens = prompt(1, 1500);
    let req = ranks[0].open("c", &tokens);
    let save = ranks[0].offer(req, 1024);
    let parts = ranks[0].answer(save).await.unwrap();
    ranks[0].drain_all(save, &tokens[..1024], &parts).await;
    assert_eq!(ranks[0].saved(save).await, Err(Status::OtherRank));
    // The other one comes too late, and by itself.
    let req = ranks[1].open("c", &tokens);
    let late = ranks[1].offer(req, 1024);
    assert_eq!(late, save);
    let parts = ranks[1].answer(late).await.unwrap();
    ranks[1].drain_all(late, &tokens[..1024], &parts).await;
    assert_eq!(ranks[1].saved(late).await, Err(Status::OtherRank));
    nothing_left(&world, &mut ranks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_of_one_rank_is_the_end_on_all() {
    let world = World::lazy().await;
    let mut ranks = pair(&world).await;
    let tokens = prompt(1, 1500);
    let mut saves = Vec::new();
    for rank in &mut ranks {
        let req = rank.open("c", &tokens);
        let save = rank.offer(req, 1024);
        saves.push((save, rank.answer(save).await.unwrap()));
    }
    let (save, parts) = &saves[0];
    ranks[0].drain_all(*save, &tokens[..1024], parts).await;
    let reason = AbortReason::Deadline;
    ranks[1].say(SaveAbort {
        save: *save,
        reason,
    });
    assert_eq!(ranks[1].saved(*save).await, Err(Status::Cancelled));
    assert_eq!(ranks[0].saved(*save).await, Err(Status::OtherRank));
    nothing_left(&world, &mut ranks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_dies_takes_its_saves_along() {
    let world = World::lazy().await;
    let [mut first, second] = pair(&world).await;
    let mut second = second;
    let tokens = prompt(1, 1500);
    let req = first.open("c", &tokens);
    let save = first.offer(req, 1024);
    let parts = first.answer(save).await.unwrap();
    first.drain_all(save, &tokens[..1024], &parts).await;
    let req = second.open("c", &tokens);
    second.offer(req, 1024);
    second.answer(save).await.unwrap();
    world.service.detach(second.session, "it died");
    assert_eq!(first.saved(save).await, Err(Status::OtherRank));
    nothing_left(&world, &mut [first]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_offer_different_things_save_nothing() {
    let world = World::lazy().await;
    let mut ranks = pair(&world).await;
    let (tokens, others) = (prompt(1, 1500), prompt(2, 1500));
    let req = ranks[0].open("c", &tokens);
    let save = ranks[0].offer(req, 1024);
    ranks[0].answer(save).await.unwrap();
    let req = ranks[1].open("c", &others);
    assert_eq!(ranks[1].offer(req, 1024), save);
    assert_eq!(ranks[1].answer(save).await, Err(DeclineReason::OtherRank));
    // What the first brings finds nobody who brings the rest.
    let (reason, bytes) = (AbortReason::OtherRank, state_bytes(0, &tokens[..1024]));
    let state = ranks[0].drain(save, Piece::State, 0, &bytes).await;
    assert_eq!(state, Status::Ok);
    ranks[0].say(SaveAbort { save, reason });
    assert_eq!(ranks[0].saved(save).await, Err(Status::Cancelled));
    nothing_left(&world, &mut ranks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_of_chunks_follow_each_other() {
    let world = World::lazy().await;
    let mut ranks = pair(&world).await;
    let tokens = prompt(1, 3000);
    let mut saves = Vec::new();
    for (at, rank) in ranks.iter_mut().enumerate() {
        let req = rank.open("c", &tokens);
        let first = rank.offer(req, 1024);
        let parts = rank.answer(first).await.unwrap();
        let bytes = kv_bytes(100 * at as u8, &tokens, parts[0]);
        assert_eq!(rank.drain(first, Piece::Kv, 0, &bytes).await, Status::Ok);
        saves.push((req, first));
    }
    for rank in &mut ranks {
        let (req, _) = saves[0];
        let second = rank.offer(req, 2048);
        let parts = rank.answer(second).await.unwrap();
        assert_eq!(parts, pieces(1024, 2048));
        rank.drain_all(second, &tokens[..2048], &parts).await;
    }
    for (at, rank) in ranks.iter_mut().enumerate() {
        let bytes = state_bytes(100 * at as u8, &tokens[..1024]);
        let (_, first) = saves[0];
        assert_eq!(rank.drain(first, Piece::State, 0, &bytes).await, Status::Ok);
    }
    for rank in &mut ranks {
        let (_, first) = saves[0];
        rank.saved(first).await.unwrap();
        assert_eq!(rank.restore(&tokens).await.unwrap().boundary, 2048);
        assert_eq!(rank.restore(&tokens[..2000]).await.unwrap().boundary, 1024);
    }
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_smaller_boundary_is_granted_at_the_second_try() {
    let world = World::lazy().await;
    let mut ranks = pair(&world).await;
    let tokens = prompt(1, 3000);
    save_both(&mut ranks, &tokens, 1024).await;
    save_both(&mut ranks, &tokens, 2048).await;
    let rank = &mut ranks[1];
    let req = rank.open("", &tokens);
    let deep = rank.lookup(req, 3000, (0, 0)).await;
    assert_eq!(deep.boundary, 2048);
    rank.say(Release {
        lease: deep.lease,
        outcome: crate::proto::channel::layout::Outcome::Aborted,
        reused: 0,
    });
    rank.say(Lookup {
        req,
        attempt: 1,
        max_boundary: 1024,
        device_boundary: 0,
        device_kv: 0,
    });
    let again = rank
        .hear(|message| match message {
            Down::LookupResult(result) if result.attempt == 1 => Some(result.clone()),
            _ => None,
        })
        .await;
    assert_eq!(again.boundary, 1024);
    rank.fill_all(&again, &tokens).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_shards_survive_the_daemon_and_no_other_size_finds_them() {
    let world = World::new().await;
    let mut ranks = pair(&world).await;
    let tokens = prompt(1, 3000);
    let id = save_both(&mut ranks, &tokens, 2816).await;
    world.all_durable().await;
    // A state and an extent, each in a file for each shard.
    assert_eq!(world.files(".safetensors").len(), 4);
    let world = world.killed().await;
    world.check();
    let mut ranks = pair(&world).await;
    for rank in &mut ranks {
        assert_eq!(rank.restore(&tokens).await.unwrap().boundary, 2816);
    }
    let info = InfoRequest {
        select: Selector::conversation("c"),
        with_tokens: false,
    };
    assert_eq!(world.service.info(info).unwrap().snapshot_id, id);
    let mut alone = Fake::attach(&world).await;
    assert_eq!(alone.restore(&tokens).await, None);
    let four = Variant {
        instance: Some([9; 16]),
        ..variant(1, 4)
    };
    let mut four = Fake::attach_as(&world, &four).await;
    assert_eq!(four.restore(&tokens).await, None);
    // One shard alone is nothing: the object goes with all its shards.
    let lost = world.files(".safetensors").pop().unwrap();
    std::fs::remove_file(lost).unwrap();
    let world = world.killed().await;
    let mut ranks = pair(&world).await;
    for rank in &mut ranks {
        assert_eq!(rank.restore(&tokens).await, None);
    }
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_of_two_ranks_counts_once() {
    let world = World::lazy().await;
    let mut ranks = pair(&world).await;
    let tokens = prompt(1, 1500);
    let id = save_both(&mut ranks, &tokens, 1024).await;
    assert_eq!(world.metric("engram_turns_total"), 1.0);
    let (conversations, _) = world
        .service
        .conversations(&crate::service::ConversationsRequest::default());
    assert_eq!(conversations.len(), 1);
    assert_eq!(conversations[0].turns, 1);
    let select = Selector::conversation("c");
    let with_tokens = false;
    let info = world
        .service
        .info(InfoRequest {
            select,
            with_tokens,
        })
        .unwrap();
    assert_eq!((info.snapshot_id, info.turn_number), (id, Some(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_goes_to_all_ranks_or_none() {
    let world = World::lazy().await;
    let [mut first, mut second] = pair(&world).await;
    let tokens = prompt(1, 1500);
    first.open("c", &tokens);
    second.open("c", &tokens);
    first.heard_all().await;
    let save = || {
        world.service.save(SaveRequest {
            select: Selector::conversation("c"),
            durable: false,
            timeout: LONG,
        })
    };
    // Nobody answers the order in time.
    let none = save().await.unwrap_err();
    assert!(matches!(none, ServiceError::NoState { .. }), "{none}");
    for rank in [&first, &second] {
        let worker = world.service.workers.get(rank.session).unwrap();
        let order = worker.order().await;
        assert_eq!(order.number, 1);
        let asked = v1::OfferAgain {
            conversation: "c".to_owned(),
        };
        assert_eq!(order.work, Some(v1::work::Work::OfferAgain(asked)));
    }
    // Without all of them there is no order.
    world.service.detach(second.session, "gone");
    second.closed().await;
    eventually("one rank", || world.service.workers().len() == 1).await;
    let none = save().await.unwrap_err();
    assert!(matches!(none, ServiceError::NoState { .. }), "{none}");
    let worker = world.service.workers.get(first.session).unwrap();
    let order = tokio::time::timeout(Duration::ZERO, worker.order()).await;
    assert!(order.is_err(), "an order for one rank of two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_of_one_server_are_of_one_sort() {
    let world = World::lazy().await;
    let _first = Fake::attach_as(&world, &variant(0, 2)).await;
    let refused = |variant: &Variant| {
        let request = attach_request(variant);
        let refusal = world.service.attach(request, &own_peer()).unwrap_err();
        assert_eq!(refusal.reason(), v1::refusal::Reason::BadGeometry);
    };
    refused(&variant(1, 4));
    refused(&Variant {
        page_size: 64,
        ..variant(1, 2)
    });
    refused(&Variant {
        kv_dtype: Some(v1::DType::DtypeF16),
        ..variant(1, 2)
    });
    Fake::attach_as(&world, &variant(1, 2)).await;
    let rows = world.service.workers();
    let shards: Vec<_> = rows
        .iter()
        .map(|row| (row.attn_tp_rank, row.attn_tp_size))
        .collect();
    assert_eq!(shards, [(0, 2), (1, 2)]);
    // Two of the three are the same to whoever looks.
    let times: Vec<_> = world
        .service
        .refusals()
        .iter()
        .map(|row| row.times)
        .collect();
    assert_eq!(times, [1, 2]);
}
