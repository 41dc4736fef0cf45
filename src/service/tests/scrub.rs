//! What scrubbing finds, the service tells and mends.

use std::path::PathBuf;

use super::fake::*;

/// Scrubbing never rests.
fn eager() -> Settings {
    let mut settings = Settings::default();
    settings.config.scrub_every = std::time::Duration::ZERO;
    settings.config.scrub_rate = bytesize::ByteSize::gib(1);
    settings.config.preload = bytesize::ByteSize::b(0);
    settings
}

fn states(world: &World) -> Vec<PathBuf> {
    let mut files = world.files("/objects/");
    files.retain(|path| {
        std::fs::read(path)
            .unwrap()
            .windows(14)
            .any(|w| w == b"\"kind\":\"state\"")
    });
    files
}

fn flip(path: &PathBuf) {
    use std::os::unix::fs::FileExt as _;

    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 4096 + 10).unwrap();
    file.write_all_at(&[byte[0] ^ 4], 4096 + 10).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_that_nobody_asked_for_is_found() {
    let world = World::with(eager()).await;
    let mut fake = Fake::attach(&world).await;
    fake.turn("a", &prompt(1, 1100), 1024).await;
    fake.turn("b", &prompt(2, 1100), 1024).await;
    world.all_durable().await;
    drop(fake);
    let world = world.killed().await;
    eventually("a pass", || {
        world.metric("engram_scrub_passes_total") >= 2.0
    })
    .await;
    assert_eq!(world.metric("engram_scrub_errors_total"), 0.0);
    assert!(world.metric("engram_scrubbed_bytes_total") > 0.0);
    assert!(world.metric("engram_scrub_last_pass_timestamp_seconds") > 0.0);
    flip(&states(&world)[0]);
    eventually("it is found", || {
        world.metric("engram_scrub_errors_total") == 1.0
    })
    .await;
    eventually("one is forgotten", || {
        world.service.core.lock().records.len() == 1
    })
    .await;
    world.check();
    eventually("it is put aside", || world.files("quarantine/").len() == 2).await;
    // The other one is served.
    let mut fake = Fake::attach(&world).await;
    let mut boundaries = Vec::new();
    for seed in [1, 2] {
        let got = fake.restore(&prompt(seed, 1100)).await;
        boundaries.extend(got.map(|got| got.boundary));
    }
    assert_eq!(boundaries, [1024]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ram_has_is_written_anew() {
    let world = World::with(eager()).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1100);
    fake.turn("a", &tokens, 1024).await;
    world.all_durable().await;
    let [state] = &states(&world)[..] else {
        panic!("one state");
    };
    let right = std::fs::read(state).unwrap();
    flip(state);
    eventually("it is found", || {
        world.metric("engram_scrub_errors_total") >= 1.0
    })
    .await;
    eventually("it is written anew", || {
        std::fs::read(state).is_ok_and(|bytes| bytes == right)
    })
    .await;
    assert_eq!(world.service.core.lock().records.len(), 1);
    world.check();
    drop(fake);
    // It is durable again.
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1024);
    assert_eq!(world.metric("engram_scrub_errors_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_rate_nothing_is_read() {
    let mut settings = eager();
    settings.config.scrub_rate = bytesize::ByteSize::b(0);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    for seed in 0..5 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 1100), 1024)
            .await;
    }
    world.all_durable().await;
    assert_eq!(world.metric("engram_scrub_passes_total"), 0.0);
    assert_eq!(world.metric("engram_scrubbed_bytes_total"), 0.0);
}
