use std::time::Duration;

use bytesize::ByteSize;
use nix::libc;

use super::fake::*;
use crate::service::{
    DeleteRequest, ListRequest, RestoreRequest, SaveReply, SaveRequest, Selector, ServiceError,
    TierRow,
};
use crate::types::SnapshotId;

/// A daemon that writes when it is asked to, with conversations `c0`, `c1`, … in RAM.
async fn world(conversations: u32) -> (World, Fake, Vec<SnapshotId>) {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let mut all = Vec::new();
    for seed in 0..conversations {
        let tokens = prompt(seed, 1500);
        all.push(fake.turn(&format!("c{seed}"), &tokens, 1280).await);
    }
    fake.heard_all().await;
    (world, fake, all)
}

/// A durable save that would wait for ever: only the disk's trouble ends it.
async fn save(world: &World, conversation: &str) -> Result<SaveReply, ServiceError> {
    let request = SaveRequest {
        timeout: Duration::from_secs(3600),
        ..SaveRequest::new(Selector::conversation(conversation))
    };
    let answer = tokio::time::timeout(LONG, world.service.save(request)).await;
    answer.expect("an answer long before its timeout")
}

async fn delete(world: &World, conversation: &str) -> Result<(), ServiceError> {
    let request = DeleteRequest {
        select: Selector::conversation(conversation),
        whole: true,
    };
    world.service.delete(request).await.map(drop)
}

fn disk(world: &World) -> TierRow {
    world.service.tiers().remove(1)
}

fn trouble_metric(world: &World, reason: &str) -> f64 {
    world.metric(&format!("engram_disk_trouble{{reason=\"{reason}\"}}"))
}

async fn is_told_and_ends(errno: i32, name: &str, told: &str) {
    let (world, mut fake, _) = world(3).await;
    world.faults.break_writes(Some(errno));
    let full = name == "quota";
    for seed in 0..2 {
        let error = save(&world, &format!("c{seed}")).await.unwrap_err();
        match full {
            true => assert!(matches!(error, ServiceError::NoSpace(_)), "{error:?}"),
            false => assert!(matches!(error, ServiceError::Unavailable(_)), "{error:?}"),
        }
        assert!(error.to_string().contains(told), "{error}");
    }
    let row = disk(&world);
    assert_eq!(
        (row.trouble, row.full, row.healthy),
        (Some(name), full, full)
    );
    assert!(row.trouble_since.unwrap() <= row.last_failure_at.unwrap());
    let status = world.service.status();
    assert!(status.ready, "it serves on");
    assert!(
        status.warnings[0].starts_with(&format!("{told} since 20")),
        "{status:?}"
    );
    eventually("the metric", || trouble_metric(&world, name) == 1.0).await;
    // Meanwhile RAM takes and gives.
    fake.turn("more", &prompt(9, 1500), 1280).await;
    assert_eq!(fake.restore(&prompt(9, 1500)).await.unwrap().boundary, 1280);
    world.faults.break_writes(None);
    eventually("the end of it", || disk(&world).trouble.is_none()).await;
    assert!(world.service.status().warnings.is_empty());
    eventually("the metric", || trouble_metric(&world, name) == 0.0).await;
    // What was refused is written by itself, and anything else when it is asked for.
    save(&world, "c2").await.unwrap();
    world.service.shutdown().await;
    assert_eq!(world.service.core.lock().not_durable(), (0, 0));
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_turns_read_only_is_told_and_ends() {
    is_told_and_ends(libc::EROFS, "read_only", "the data directory is read-only").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fails_is_told_and_ends() {
    is_told_and_ends(libc::EIO, "failing", "the disk fails").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_that_is_used_up_is_told_and_ends() {
    is_told_and_ends(libc::EDQUOT, "quota", "the disk quota is used up").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_directory_that_is_taken_away_is_told_before_anybody_writes() {
    let (world, mut fake, ids) = world(2).await;
    save(&world, "c0").await.unwrap();
    let (data, away) = (
        world.folder.path().join("data"),
        world.folder.path().join("away"),
    );
    std::fs::rename(&data, &away).unwrap();
    eventually("it is told", || disk(&world).trouble == Some("removed")).await;
    assert!(!disk(&world).healthy);
    let told = world.service.status().warnings;
    assert!(
        told[0].starts_with("the data directory is gone"),
        "{told:?}"
    );
    let error = save(&world, "c1").await.unwrap_err();
    assert!(matches!(error, ServiceError::Unavailable(_)), "{error:?}");
    // An empty folder in its place, as under a mount that went, is none of ours.
    std::fs::create_dir(&data).unwrap();
    let error = save(&world, "c1").await.unwrap_err();
    assert!(matches!(error, ServiceError::Unavailable(_)), "{error:?}");
    assert_eq!(std::fs::read_dir(&data).unwrap().count(), 0);
    assert_eq!(fake.restore(&prompt(1, 1500)).await.unwrap().boundary, 1280);
    std::fs::remove_dir(&data).unwrap();
    std::fs::rename(&away, &data).unwrap();
    eventually("the end of it", || disk(&world).trouble.is_none()).await;
    save(&world, "c1").await.unwrap();
    let world = world.killed().await;
    for id in ids {
        let restored = RestoreRequest {
            select: Selector::snapshot(id),
            pin_for: None,
        };
        world.service.restore(restored).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_failed_write_is_nobodys_trouble() {
    let (world, _fake, _) = world(1).await;
    let once = crate::store::fault::Fault::Errno(libc::EIO);
    world.faults.arm(crate::store::fault::Op::Write, 0, once);
    assert!(save(&world, "c0").await.unwrap().row.durable);
    assert_eq!(disk(&world).trouble, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ram_goes_on_when_it_is_full_of_what_a_sick_disk_does_not_take() {
    let mut settings = Settings {
        ram: ByteSize::kib(1400),
        ..Settings::default()
    };
    settings.config.room_wait = Duration::from_secs(30);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    world.faults.break_writes(Some(libc::EROFS));
    // Five times what RAM holds.
    for seed in 0..20 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 2100), 2048)
            .await;
    }
    assert_eq!(
        fake.restore(&prompt(19, 2100)).await.unwrap().boundary,
        2048
    );
    world.faults.break_writes(None);
    eventually("the end of it", || disk(&world).trouble.is_none()).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_cannot_be_removed_are_told_counted_and_tried_again() {
    let (world, _fake, _) = world(2).await;
    save(&world, "c0").await.unwrap();
    save(&world, "c1").await.unwrap();
    let before = disk(&world).used_bytes;
    world.faults.keep(Some(".safetensors"));
    let error = delete(&world, "c0").await.unwrap_err();
    assert!(matches!(error, ServiceError::Unavailable(_)), "{error:?}");
    assert!(error.to_string().contains("cannot be removed"), "{error}");
    let told = world.service.status().warnings;
    assert!(
        told[0].starts_with("files cannot be removed since"),
        "{told:?}"
    );
    // They take their room, and all else goes on.
    assert!(before - disk(&world).used_bytes < 20_000);
    save(&world, "c1").await.unwrap();
    world.faults.keep(None);
    world.service.core.lock().queue.remove_after = Duration::ZERO;
    eventually("the end of it", || {
        world.service.status().warnings.is_empty()
    })
    .await;
    assert!(before - disk(&world).used_bytes > 100_000);
    delete(&world, "c1").await.unwrap();
    assert_eq!(
        world.files(".safetensors"),
        Vec::<std::path::PathBuf>::new()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_that_cannot_be_removed_keeps_its_objects() {
    let (world, mut fake, ids) = world(1).await;
    save(&world, "c0").await.unwrap();
    world.faults.keep(Some("manifests"));
    let error = delete(&world, "c0").await.unwrap_err();
    assert!(matches!(error, ServiceError::Unavailable(_)), "{error:?}");
    assert_eq!(fake.restore(&prompt(0, 1500)).await, None);
    // It was not removed, so it is whole at the next start.
    let world = world.killed().await;
    let rows = world.service.list(ListRequest::default()).unwrap();
    assert_eq!(rows.snapshots[0].snapshot_id, ids[0]);
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&prompt(0, 1500)).await.unwrap().boundary, 1280);
    delete_all(&world, ids[0]).await;
    // What the restore still leases goes with its lease.
    eventually("no files", || world.files(".safetensors").is_empty()).await;
    world.check();
}

async fn delete_all(world: &World, id: SnapshotId) {
    let request = DeleteRequest {
        select: Selector::snapshot(id),
        whole: false,
    };
    world.service.delete(request).await.unwrap();
}
