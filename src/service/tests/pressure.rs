use std::time::Duration;

use bytesize::ByteSize;

use super::fake::*;
use crate::proto::channel::layout::DeclineReason;
use crate::proto::channel::msg::RequestClose;

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
            let mut saved = 0;
            for round in 0..12_u32 {
                let seed = worker * 100 + round;
                let tokens = prompt(seed, 1700);
                let req = fake.open(&format!("c{seed}"), &tokens);
                let end = fake.save_at(req, &tokens, 1536).await;
                saved += u32::from(matches!(end, SaveEnd::Saved(..)));
                fake.finish(req, 1700);
                fake.say(RequestClose { req });
                let other = (seed * 7 + 3) % 12 + worker * 100;
                fake.restore(&prompt(other, 1700)).await;
            }
            saved
        }));
    }
    let mut saved = 0;
    for worker in workers {
        saved += worker.await.unwrap();
    }
    assert_eq!(saved, 36);
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
