use std::time::Duration;

use super::fake::*;
use crate::proto::channel::layout::{Miss, Outcome, Piece, RevokeReason, Status, Tier};
use crate::proto::channel::msg::{Down, Fill, Release, RequestClose};
use crate::types::TokenRange;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_the_device_lacks_moves() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens, 2560).await;
    // All KV is there: the state alone moves.
    let req = fake.open("c", &tokens);
    let hit = fake.lookup(req, 3000, (0, 2900)).await;
    assert_eq!(
        (hit.boundary, hit.kv_from, hit.parts.len(), hit.bytes),
        (2560, 2560, 0, STATE)
    );
    fake.fill_all(&hit, &tokens).await.unwrap();
    // Some KV is there, up to the middle of a piece.
    let req = fake.open("c", &tokens);
    let hit = fake.lookup(req, 3000, (1024, 1500)).await;
    assert_eq!((hit.boundary, hit.kv_from), (2560, 1500));
    assert_eq!(ranges(&hit.parts), pieces(1024, 2560));
    fake.fill_all(&hit, &tokens).await.unwrap();
    // Not below the largest useful boundary, and not what the device has anyway.
    let req = fake.open("c", &tokens);
    let miss = fake.lookup(req, 2559, (0, 0)).await;
    assert_eq!((miss.lease, miss.reason), (0, Some(Miss::NothingStored)));
    let req = fake.open("c", &tokens);
    let miss = fake.lookup(req, 3000, (2560, 2560)).await;
    assert_eq!((miss.lease, miss.reason), (0, Some(Miss::DeviceAsDeep)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespaces_and_models_never_meet() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    let flags = crate::proto::channel::layout::RequestFlags::HAS_CACHE_SALT;
    let salted = fake.open_as("", "r", &tokens, |open| {
        open.flags = flags;
        open.cache_salt = "x".into();
    });
    let miss = fake.lookup(salted, 1500, (0, 0)).await;
    assert_eq!(miss.reason, Some(Miss::NothingStored));
    let SaveEnd::Saved(parts, _) = fake.save_at(salted, &tokens, 1280).await else {
        panic!()
    };
    assert_eq!(parts, pieces(0, 1280), "nothing is shared");
    for variant in [
        Variant {
            weights: 1,
            ..Variant::default()
        },
        Variant {
            kv_dtype: Some(crate::proto::v1::DType::DtypeF16),
            ..Variant::default()
        },
    ] {
        let mut other = Fake::attach_as(&world, &variant).await;
        assert_eq!(other.restore(&tokens).await, None);
    }
    // The same model with another page size is the same.
    let mut same = Fake::attach_as(
        &world,
        &Variant {
            page_size: 64,
            ..Variant::default()
        },
    )
    .await;
    assert_eq!(same.restore(&tokens).await.unwrap().boundary, 1280);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_is_answered_once_for_each_attempt() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    let req = fake.open("c", &tokens);
    assert_ne!(fake.lookup(req, 1500, (0, 0)).await.lease, 0);
    assert_eq!(
        fake.lookup(req, 1500, (0, 0)).await.reason,
        Some(Miss::BadRequest)
    );
    assert_eq!(
        fake.lookup(999, 1500, (0, 0)).await.reason,
        Some(Miss::BadRequest)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fills_are_checked_and_answered() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    let req = fake.open("c", &tokens);
    let hit = fake.lookup(req, 1500, (0, 0)).await;
    let bad = Err(Status::BadRequest);
    assert_eq!(fake.fill(hit.lease, Piece::State, 1, STATE).await, bad);
    assert_eq!(fake.fill(hit.lease, Piece::Kv, 2, 1024 * ROW).await, bad);
    assert_eq!(
        fake.fill(hit.lease, Piece::Kv, 0, 1024 * ROW - 1).await,
        bad
    );
    let all = 1280 * ROW;
    for (piece, index, count, ring_offset, bytes) in [
        (Piece::State, 0, 1, RING, STATE),
        (Piece::State, 0, 1, RING - STATE + 1, STATE),
        (Piece::State, 0, 1, u64::MAX, STATE),
        (Piece::State, 0, 0, 0, 0),
        (Piece::State, 0, 2, 0, STATE),
        (Piece::Kv, 0, 0, 0, 0),
        (Piece::Kv, 0, 3, 0, all),
        (Piece::Kv, 1, u32::MAX, 0, all),
        (Piece::Kv, 0, 2, 0, all - 1),
        (Piece::Kv, 0, 2, RING - all + 1, all),
        (Piece::Kv, 0, 2, u64::MAX - 4096, all),
    ] {
        fake.say(Fill {
            lease: hit.lease,
            piece,
            index,
            count,
            ring_offset,
            bytes,
        });
        let status = fake
            .hear(|message| match message {
                Down::Filled(it) => {
                    assert_eq!((it.index, it.count), (index, count));
                    Some(it.status)
                }
                _ => None,
            })
            .await;
        assert_eq!(status, Status::BadRequest);
    }
    assert_eq!(
        fake.fill(hit.lease + 1, Piece::State, 0, STATE).await,
        Err(Status::Cancelled)
    );
    // The lease is as good as before.
    fake.fill_all(&hit, &tokens).await.unwrap();
    fake.say(Release {
        lease: hit.lease,
        outcome: Outcome::Aborted,
        reused: 1280,
    });
    assert_eq!(
        fake.fill(hit.lease, Piece::State, 0, STATE).await,
        Err(Status::Cancelled)
    );
    let unused = "engram_restores_unused_total{reason=\"aborted\"}";
    assert_eq!(world.metric(unused), 1.0);
    assert_eq!(world.metric("engram_reused_tokens_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgotten_lease_is_taken_back() {
    let mut settings = Settings::default();
    settings.config.lease_timeout = Duration::from_millis(50);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    let id = fake.turn("c", &tokens, 1280).await;
    world.all_durable().await;
    let req = fake.open("c", &tokens);
    let hit = fake.lookup(req, 1500, (0, 0)).await;
    let reason = fake
        .hear(|message| match message {
            Down::Revoke(revoke) if revoke.lease == hit.lease => Some(revoke.reason),
            _ => None,
        })
        .await;
    assert_eq!(reason, RevokeReason::Deadline);
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
    eventually("the lease ends", || leases() == 0).await;
    // The worker's own release comes late, and is nothing new.
    fake.say(Release {
        lease: hit.lease,
        outcome: Outcome::Deadline,
        reused: 0,
    });
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1280);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_end_with_their_session() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    let id = fake.turn("c", &tokens, 1280).await;
    let req = fake.open("c", &tokens);
    fake.lookup(req, 1500, (0, 0)).await;
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
    assert_eq!(leases(), 1);
    assert!(world.service.detach(fake.session, "a test"));
    assert_eq!(
        fake.closed().await,
        crate::proto::channel::layout::CloseReason::Detached
    );
    eventually("the lease ends", || leases() == 0).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_worth_it_is_skipped() {
    let mut settings = Settings::default();
    settings.config.min_restore_tokens = 300;
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    let req = fake.open("c", &tokens);
    let miss = fake.lookup(req, 1500, (1000, 1000)).await;
    assert_eq!(miss.reason, Some(Miss::BelowMinimum));
    assert_eq!(
        world.metric("engram_restores_skipped_total{reason=\"below_minimum\"}"),
        1.0
    );
    let req = fake.open("c", &tokens);
    assert_ne!(fake.lookup(req, 1500, (900, 900)).await.lease, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn from_disk_into_ram_and_on() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens, 2560).await;
    world.all_durable().await;
    world.service.let_go(u64::MAX);
    assert_eq!(world.service.store.arena.used(), 0);
    // Only the objects that are needed come: here the state and one piece's object.
    let got = fake.restore(&tokens).await.unwrap();
    assert_eq!((got.boundary, got.tier), (2560, Tier::Disk));
    assert_eq!(fake.restore(&tokens).await.unwrap().tier, Tier::Ram);
    assert_eq!(
        world.metric("engram_promoted_bytes_total"),
        (STATE + 2560 * ROW) as f64
    );
    assert_eq!(world.metric("engram_lookup_hits_total{tier=\"disk\"}"), 1.0);
    assert_eq!(world.metric("engram_lookup_hits_total{tier=\"ram\"}"), 1.0);
    // RAM missed what came from disk; what nobody has, each tier missed.
    let missed = |tier| {
        world.metric(&format!(
            "engram_lookup_tier_misses_total{{tier=\"{tier}\"}}"
        ))
    };
    assert_eq!(missed("ram"), 1.0);
    assert_eq!(fake.restore(&prompt(9, 3000)).await, None);
    assert_eq!((missed("ram"), missed("disk")), (2.0, 1.0));
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_that_the_device_has_stay_on_disk() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 4000);
    fake.turn("c", &tokens[..2100], 2048).await;
    fake.turn("c", &tokens, 3584).await;
    world.all_durable().await;
    world.service.let_go(u64::MAX);
    let req = fake.open("c", &tokens);
    let hit = fake.lookup(req, 4000, (2048, 2048)).await;
    assert_eq!(ranges(&hit.parts), pieces(2048, 3584));
    fake.fill_all(&hit, &tokens).await.unwrap();
    let moved = (STATE + (3584 - 2048) * ROW) as f64;
    assert_eq!(world.metric("engram_promoted_bytes_total"), moved);
    fake.say(RequestClose { req });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_byte_is_never_restored() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let (bad, good) = (prompt(1, 3000), prompt(2, 3000));
    fake.turn("bad", &bad, 2560).await;
    fake.turn("good", &good, 2560).await;
    world.all_durable().await;
    world.service.let_go(u64::MAX);
    // Flip one byte of the KV of one of the two.
    let kv = world.files("objects").into_iter().find(|path| {
        let bytes = std::fs::read(path).unwrap();
        let piece = kv_bytes(
            0,
            &bad,
            TokenRange {
                start: 0,
                end: 1024,
            },
        );
        bytes.windows(64).any(|window| window == &piece[..64])
    });
    let path = kv.unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let req = fake.open("bad", &bad);
    let hit = fake.lookup(req, 3000, (0, 0)).await;
    assert_ne!(hit.lease, 0);
    assert_eq!(fake.fill_all(&hit, &bad).await, Err(Status::Lost));
    let revoked = fake
        .hear(|message| match message {
            Down::Revoke(revoke) if revoke.lease == hit.lease => Some(revoke.reason),
            _ => None,
        })
        .await;
    assert_eq!(revoked, RevokeReason::Lost);
    assert_eq!(fake.restore(&bad).await, None);
    assert_eq!(fake.restore(&good).await.unwrap().boundary, 2560);
    eventually("quarantine is told", || {
        world.metric("engram_quarantined_files{reason=\"checksum\"}") == 1.0
    })
    .await;
    assert_eq!(world.files("quarantine").len(), 2, "the file and its note");
    world.all_durable().await;
    // It can be saved again, and found again.
    fake.turn("bad", &bad, 2560).await;
    assert_eq!(fake.restore(&bad).await.unwrap().boundary, 2560);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_move_in_runs_of_any_length() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 4000);
    // Four pieces, the last one shorter.
    let req = fake.open("c", &tokens);
    let save = fake.offer(req, 3900);
    let parts = fake.answer(save).await.unwrap();
    assert_eq!(parts.len(), 4);
    for run in [0..3, 3..4] {
        fake.drain_run(save, &tokens, &parts, run).await;
    }
    let state = state_bytes(0, &tokens[..3900]);
    assert_eq!(fake.drain(save, Piece::State, 0, &state).await, Status::Ok);
    fake.saved(save).await.unwrap();
    for cut in [0, 1, 2] {
        let req = fake.open("c", &tokens);
        let hit = fake.lookup(req, 4000, (0, 0)).await;
        for run in [cut..4, 0..cut] {
            if !run.is_empty() {
                fake.fill_run(hit.lease, &tokens, &parts, run).await;
            }
        }
        fake.give_back(hit.lease);
    }
}
