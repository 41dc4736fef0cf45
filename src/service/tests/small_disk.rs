use std::time::Duration;

use bytesize::ByteSize;

use super::fake::*;
use crate::service::{DeleteRequest, SaveRequest, Selector};
use crate::types::TierKind;

/// RAM for about four prompts of 2048 tokens.
fn small(disk: ByteSize, write_after: Duration) -> Settings {
    let mut settings = Settings {
        ram: ByteSize::kib(1400),
        disk: Some(disk),
        ..Settings::default()
    };
    settings.config.write_after = write_after;
    settings.config.room_wait = Duration::from_secs(30);
    settings
}

fn on_disk(world: &World) -> crate::service::TierRow {
    let mut tiers = world.service.tiers().into_iter();
    tiers.find(|row| row.tier == TierKind::Disk).unwrap()
}

fn conversation(name: &str) -> Selector {
    Selector {
        conversation_id: Some(name.to_owned()),
        ..Selector::default()
    }
}

async fn goes_on_for_ever(write_after: Duration) {
    let world = World::with(small(ByteSize::mib(3), write_after)).await;
    let mut fake = Fake::attach(&world).await;
    // Twenty times what the disk can hold; tokens and folders alone would be more than that.
    for seed in 0..400 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 1100), 1024)
            .await;
        // A folder that an object needs may come on top.
        let used = on_disk(&world).used_bytes;
        assert!(used <= (3 << 20) + (64 << 10), "{seed}: {used}");
    }
    assert_eq!(
        fake.restore(&prompt(399, 1100)).await.unwrap().boundary,
        1024
    );
    let save = SaveRequest {
        select: conversation("c399"),
        durable: true,
        timeout: Duration::from_secs(30),
    };
    world.service.save(save).await.unwrap();
    let row = on_disk(&world);
    assert!(row.objects > 10, "{} objects", row.objects);
    for seed in 0..400 {
        let delete = DeleteRequest {
            select: conversation(&format!("c{seed}")),
            whole: true,
        };
        // Most were evicted.
        let _ = world.service.delete(delete).await;
    }
    eventually("an empty disk", || {
        let row = on_disk(&world);
        row.objects == 0 && row.used_bytes < 200 << 10
    })
    .await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_disk_goes_on_for_ever() {
    goes_on_for_ever(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_without_its_states_does_not_hold_the_disk() {
    goes_on_for_ever(Duration::from_secs(3600)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_named_may_fill_the_disk_and_ram_goes_on() {
    let mut settings = small(ByteSize::mib(1), Duration::ZERO);
    settings.ram = ByteSize::mib(16);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let mut full = false;
    for seed in 0..20 {
        let name = format!("c{seed}");
        fake.turn(&name, &prompt(seed, 1100), 1024).await;
        let save = SaveRequest {
            select: Selector {
                branch_name: Some("kept".to_owned()),
                ..conversation(&name)
            },
            durable: true,
            timeout: Duration::from_secs(30),
        };
        if world.service.save(save).await.is_err() {
            full = true;
            break;
        }
    }
    assert!(full);
    for seed in 100..130 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 1100), 1024)
            .await;
        let got = fake.restore(&prompt(seed, 1100)).await.unwrap();
        assert_eq!(got.boundary, 1024);
    }
    world.check();
}
