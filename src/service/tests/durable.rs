use std::time::Duration;

use super::fake::*;
use crate::proto::channel::layout::Tier;
use crate::service::{InfoRequest, SaveRequest, Selector, ServiceError};
use crate::store::fault::{Fault, Op};
use crate::types::TierKind;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_durable_survives_the_daemon() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let first = fake.turn("c", &tokens[..1600], 1536).await;
    let second = fake.turn("c", &tokens, 2816).await;
    world.all_durable().await;
    let world = world.killed().await;
    world.check();
    let mut fake = Fake::attach(&world).await;
    let info = |turn| {
        let select = Selector {
            turn_number: Some(turn),
            ..Selector::conversation("c")
        };
        world
            .service
            .info(InfoRequest {
                select,
                with_tokens: true,
            })
            .unwrap()
    };
    assert_eq!((info(1).snapshot_id, info(2).snapshot_id), (first, second));
    assert_eq!(info(2).fill_ids.unwrap(), &tokens[..2816]);
    assert_eq!(info(2).parent_snapshot, Some(first));
    assert!(info(2).durable);
    assert_eq!(info(2).tokens_after_boundary, 184);
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2816);
    assert_eq!(fake.restore(&tokens[..2000]).await.unwrap().boundary, 1536);
    // The next turn counts on.
    fake.turn("c", &prompt(9, 2000), 1024).await;
    fake.heard_all().await;
    assert_eq!(info(3).boundary, 1024);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_most_recent_snapshots_are_in_ram_after_a_start() {
    let mut settings = Settings::default();
    // Room for the second only.
    settings.config.preload = bytesize::ByteSize::b(STATE + 2048 * ROW + 1000);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let (old, new) = (prompt(1, 2100), prompt(2, 2100));
    fake.turn("old", &old, 2048).await;
    world.all_durable().await;
    tokio::time::sleep(Duration::from_millis(2)).await;
    let id = fake.turn("new", &new, 2048).await;
    world.all_durable().await;
    let world = world.killed().await;
    let select = Selector::snapshot(id);
    eventually("the preload", || {
        let info = InfoRequest {
            select: select.clone(),
            with_tokens: false,
        };
        world.service.info(info).unwrap().tier == TierKind::Ram
    })
    .await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&new).await.unwrap().tier, Tier::Ram);
    assert_eq!(fake.restore(&old).await.unwrap().tier, Tier::Disk);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_by_name_is_durable_when_it_returns() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    fake.heard_all().await;
    let request = SaveRequest::new(Selector::conversation("c"));
    let reply = world.service.save(request.clone()).await.unwrap();
    assert!(reply.row.durable);
    assert_eq!(
        (reply.row.boundary, reply.row.tokens_after_boundary),
        (1280, 220)
    );
    assert_eq!(reply.written_bytes, STATE + 1280 * ROW);
    assert_eq!(world.service.save(request).await.unwrap().written_bytes, 0);
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1280);
    let select = Selector::conversation("c");
    let row = world
        .service
        .info(InfoRequest {
            select,
            with_tokens: false,
        })
        .unwrap();
    assert_eq!((row.turn_number, row.boundary), (Some(1), 1280));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_write_is_tried_again() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    fake.heard_all().await;
    world.faults.arm(Op::Write, 0, Fault::Errno(nix::libc::EIO));
    let reply = world
        .service
        .save(SaveRequest::new(Selector::conversation("c")))
        .await;
    assert!(reply.unwrap().row.durable);
    assert_eq!(
        world.metric("engram_write_failures_total{reason=\"io\"}"),
        1.0
    );
    assert!(world.service.status().ready);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_said_and_nothing_is_lost() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    fake.heard_all().await;
    // What was said is written at once: the next write is that of the snapshot.
    world.all_durable_names().await;
    world
        .faults
        .arm(Op::Write, 0, Fault::Errno(nix::libc::ENOSPC));
    let error = world
        .service
        .save(SaveRequest::new(Selector::conversation("c")))
        .await;
    assert!(matches!(error, Err(ServiceError::NoSpace(_))), "{error:?}");
    // From RAM it is served on, and the disk gets it later.
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1280);
    world.all_durable().await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failed_fsync_nothing_is_called_durable() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let (one, two) = (prompt(1, 1500), prompt(2, 1500));
    fake.turn("one", &one, 1280).await;
    fake.heard_all().await;
    world
        .service
        .save(SaveRequest::new(Selector::conversation("one")))
        .await
        .unwrap();
    fake.turn("two", &two, 1280).await;
    fake.heard_all().await;
    world.faults.arm(Op::Fsync, 0, Fault::Errno(nix::libc::EIO));
    let request = SaveRequest {
        timeout: Duration::from_secs(5),
        ..SaveRequest::new(Selector::conversation("two"))
    };
    let error = world.service.save(request).await.unwrap_err();
    assert!(
        matches!(error, ServiceError::Unavailable(_) | ServiceError::Busy(_)),
        "{error:?}"
    );
    eventually("unready", || !world.service.status().ready).await;
    assert!(!world.service.tiers()[1].healthy);
    // Both are still served, from RAM and from disk.
    world.service.let_go(STATE + 1280 * ROW);
    assert_eq!(fake.restore(&one).await.unwrap().boundary, 1280);
    assert_eq!(fake.restore(&two).await.unwrap().boundary, 1280);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutting_down_writes_what_is_pending() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    fake.heard_all().await;
    assert_eq!(world.service.status().pending_writes, 1);
    world.service.shutdown().await;
    assert_eq!(world.service.status().pending_writes, 0);
    assert_eq!(
        fake.closed().await,
        crate::proto::channel::layout::CloseReason::Shutdown
    );
    let refused = world
        .service
        .attach(attach_request(&Variant::default()), &own_peer());
    assert_eq!(
        refused.unwrap_err().reason(),
        crate::proto::v1::refusal::Reason::NotReady
    );
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1280);
    let row = world.service.info(InfoRequest {
        select: Selector::rid("c-1"),
        with_tokens: false,
    });
    assert_eq!(row.unwrap().turn_number, Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_disk_budget_holds_and_the_oldest_go() {
    let disk = Some(bytesize::ByteSize::mib(4));
    let settings = Settings {
        disk,
        ..Settings::default()
    };
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let each = 2048 * ROW;
    for seed in 0..40 {
        fake.turn(&format!("c{seed}"), &prompt(seed, 2100), 2048)
            .await;
        world.all_durable().await;
        let used: u64 = world
            .files("")
            .iter()
            .map(|path| path.metadata().unwrap().len())
            .sum();
        assert!(used <= 4 << 20, "{used}");
    }
    assert!(40 * each > 4 << 20);
    // The latest is there, the first is not, and what is listed can be restored.
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(
        fake.restore(&prompt(39, 2100)).await.unwrap().boundary,
        2048
    );
    assert_eq!(fake.restore(&prompt(0, 2100)).await, None);
    let rows = world
        .service
        .list(crate::service::ListRequest::default())
        .unwrap();
    assert!(rows.total > 4, "{}", rows.total);
    for row in rows.snapshots {
        let restored = world.service.restore(crate::service::RestoreRequest {
            select: Selector::snapshot(row.snapshot_id),
            pin_for: Some(Duration::ZERO),
        });
        restored.await.unwrap();
    }
    world.check();
}
