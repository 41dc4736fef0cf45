use std::time::Duration;

use bytesize::ByteSize;

use super::fake::*;
use crate::proto::channel::layout::{DeclineReason, Miss};
use crate::proto::channel::msg::{Down, LookupResult, RequestClose};
use crate::service::{RestoreRequest, Selector};

/// RAM for about four prompts of 2048 tokens.
fn tight(disk: bool) -> Settings {
    let mut settings = Settings {
        ram: ByteSize::kib(1400),
        ..Settings::default()
    };
    settings.config.write_after = Duration::from_secs(3600);
    settings.config.room_wait = Duration::from_secs(30);
    if !disk {
        settings.disk = None;
    }
    settings
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_copies_go_to_disk_before_they_leave_ram() {
    let world = World::with(tight(true)).await;
    let mut fake = Fake::attach(&world).await;
    for seed in 0..20 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 2100), 2048)
            .await;
    }
    // In any order, each comes back with its own bytes.
    for seed in [13, 0, 19, 7, 3, 16, 1, 11, 5, 18] {
        let tokens = prompt(seed, 2100);
        assert_eq!(
            fake.restore(&tokens).await.unwrap().boundary,
            2048,
            "{seed}"
        );
    }
    world.check();
    let row = &world.service.tiers()[0];
    assert!(row.used_bytes <= row.budget_bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_workers_at_once_never_see_anothers_bytes() {
    let world = World::with(tight(true)).await;
    let world = std::sync::Arc::new(world);
    let mut workers = Vec::new();
    for worker in 0..3_u32 {
        let world = std::sync::Arc::clone(&world);
        let mut fake = Fake::attach(&world).await;
        workers.push(tokio::spawn(async move {
            let mut unsaved = Vec::new();
            for round in 0..12_u32 {
                let seed = worker * 100 + round;
                let tokens = prompt(seed, 1700);
                let req = fake.open(&format!("c{seed}"), &tokens);
                let end = fake.save_at(req, &tokens, 1536).await;
                if !matches!(end, SaveEnd::Saved(..)) {
                    unsaved.push((seed, end));
                }
                fake.finish(req, 1700);
                fake.say(RequestClose { req });
                let other = (seed * 7 + 3) % 12 + worker * 100;
                fake.restore(&prompt(other, 1700)).await;
            }
            unsaved
        }));
    }
    for worker in workers {
        assert_eq!(worker.await.unwrap(), []);
    }
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_disk_the_oldest_vanish() {
    let world = World::with(tight(false)).await;
    let mut fake = Fake::attach(&world).await;
    for seed in 0..10 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 2100), 2048)
            .await;
    }
    assert_eq!(fake.restore(&prompt(9, 2100)).await.unwrap().boundary, 2048);
    assert_eq!(fake.restore(&prompt(0, 2100)).await, None);
    assert!(world.metric("engram_evicted_snapshots_total") >= 5.0);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_never_fit_is_declined_at_once() {
    let world = World::with(tight(true)).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 20_000);
    let req = fake.open("c", &tokens);
    let save = fake.offer(req, 20_000);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::NoRoom));
    assert_eq!(
        world.metric("engram_saves_dropped_total{reason=\"no_room\"}"),
        1.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn superseded_states_vanish_first() {
    let world = World::with(tight(true)).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let req = fake.open("c", &tokens);
    fake.save_at(req, &tokens, 1024).await;
    fake.save_at(req, &tokens, 2816).await;
    for seed in 2..6 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 2100), 2048)
            .await;
    }
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2816);
    world.service.shutdown().await;
    // The KV and five states, but not the superseded one.
    let states = (5 * STATE) as f64;
    let kv = ((2816 + 4 * 2048) * ROW) as f64;
    assert_eq!(world.metric("engram_written_bytes_total"), states + kv);
}

/// A world with six prompts on disk, RAM for about four, and nothing to write.
async fn six_on_disk(mut settings: Settings) -> World {
    settings.config.write_after = Duration::ZERO;
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    for seed in 0..6 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 2100), 2048)
            .await;
    }
    world.all_durable().await;
    world
}

/// Asks without waiting for the answer.
fn ask(fake: &mut Fake, seed: u32) -> u64 {
    let tokens = prompt(seed, 2100);
    let req = fake.open(&format!("c{seed}"), &tokens);
    fake.ask(req, 2100, (0, 0));
    req
}

async fn answer(fake: &mut Fake, of: u64) -> LookupResult {
    let its = |message: &Down| match message {
        Down::LookupResult(result) if result.req == of => Some(result.clone()),
        _ => None,
    };
    fake.hear(its).await
}

fn waited(world: &World) -> f64 {
    world.metric("engram_lookups_waited_for_room_total")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restores_wait_in_line_for_room_and_not_for_each_other() {
    let world = six_on_disk(tight(true)).await;
    let mut fakes = Vec::new();
    for _ in 0..6 {
        fakes.push(Fake::attach(&world).await);
    }
    // None fills or releases before all have asked.
    let mut asked = Vec::new();
    for (fake, seed) in fakes.iter_mut().zip(0..) {
        asked.push(ask(fake, seed));
        fake.heard_all().await;
    }
    assert!((1.0..6.0).contains(&waited(&world)), "{}", waited(&world));
    for (seed, (fake, req)) in fakes.iter_mut().zip(asked).enumerate() {
        let hit = answer(fake, req).await;
        assert_eq!((hit.boundary, hit.reason), (2048, None), "{seed}");
        let tokens = prompt(seed as u32, 2100);
        fake.fill_all(&hit, &tokens).await.unwrap();
        fake.give_back(hit.lease);
    }
    assert_eq!(
        world.metric("engram_lookup_misses_total{reason=\"no_room\"}"),
        0.0
    );
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_in_the_line_ends_with_its_request_its_worker_or_its_time() {
    let mut settings = tight(true);
    settings.config.room_wait = Duration::from_millis(300);
    let world = six_on_disk(settings).await;
    let mut holder = Fake::attach(&world).await;
    let mut held = Vec::new();
    for seed in 0..3 {
        let req = ask(&mut holder, seed);
        held.push(answer(&mut holder, req).await);
    }
    let granted = held.iter().filter(|hit| hit.lease != 0).count();
    let mut late = Fake::attach(&world).await;
    // Its time is over.
    let req = ask(&mut late, 4);
    assert_eq!(answer(&mut late, req).await.reason, Some(Miss::NoRoom));
    // Its request is closed.
    let req = ask(&mut late, 4);
    late.say(RequestClose { req });
    assert!(answer(&mut late, req).await.reason.is_some());
    // Its worker goes.
    ask(&mut late, 4);
    late.heard_all().await;
    drop(late);
    for hit in held.into_iter().filter(|hit| hit.lease != 0) {
        holder.give_back(hit.lease);
    }
    holder.heard_all().await;
    assert!(granted >= 2);
    for seed in [5, 4, 3] {
        let got = holder.restore(&prompt(seed, 2100)).await.unwrap();
        assert_eq!(got.boundary, 2048);
    }
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restores_by_name_stand_in_the_same_line() {
    let world = std::sync::Arc::new(six_on_disk(tight(true)).await);
    let mut holder = Fake::attach(&world).await;
    let mut held = Vec::new();
    for seed in 0..2 {
        let req = ask(&mut holder, seed);
        held.push(answer(&mut holder, req).await.lease);
    }
    let mut named = Vec::new();
    for seed in 2..6 {
        let service = std::sync::Arc::clone(&world.service);
        let request = RestoreRequest {
            select: Selector {
                conversation_id: Some(format!("c{seed}")),
                ..Selector::default()
            },
            // Room for the next request, but not for long.
            pin_for: Some(Duration::from_millis(1)),
        };
        named.push(tokio::spawn(async move { service.restore(request).await }));
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    for lease in held {
        holder.give_back(lease);
    }
    for restore in named {
        let reply = restore.await.unwrap().unwrap();
        assert_eq!(reply.row.boundary, 2048);
    }
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_in_pieces_that_are_too_small_grows_together() {
    let mut settings = tight(true);
    settings.config.write_after = Duration::ZERO;
    settings.config.room_wait = Duration::from_secs(5);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let large = prompt(1000, 1100);
    fake.turn("large", &large, 1024).await;
    let small = |seed| prompt(seed, 150);
    for seed in 0..40 {
        fake.turn(&format!("c{seed}"), &small(seed), 128).await;
    }
    world.all_durable().await;
    // Every other one is used again, so the oldest lie between those that stay.
    for seed in (0..40).step_by(2) {
        fake.restore(&small(seed)).await.unwrap();
    }
    let arena = &world.service.store.arena;
    let piece = 1024 * ROW;
    let mut plugs = Vec::new();
    while arena.largest_free() >= piece {
        plugs.push(arena.alloc(arena.largest_free()).unwrap());
    }
    for _ in 0..200 {
        if arena.free_bytes() > 2 * piece {
            break;
        }
        world.service.let_go(1);
    }
    assert!(arena.free_bytes() > 2 * piece && arena.largest_free() < piece);
    assert_eq!(fake.restore(&large).await.unwrap().boundary, 1024);
    drop(plugs);
    world.check();
}
