use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;

use super::fake::*;
use crate::proto::channel::layout::{CloseReason, DeclineReason};
use crate::service::{
    DeleteRequest, InfoRequest, ListRequest, SaveReply, SaveRequest, Selector, ServiceError,
};
use crate::types::SnapshotId;

/// A daemon that writes when it is asked to, with conversations `c0`, `c1`, … in RAM.
async fn world(conversations: u32) -> (Arc<World>, Fake, Vec<SnapshotId>) {
    world_with(conversations, Duration::from_secs(20)).await
}

async fn world_with(
    conversations: u32,
    drain_timeout: Duration,
) -> (Arc<World>, Fake, Vec<SnapshotId>) {
    let mut settings = Settings::default();
    settings.config.write_after = Duration::from_secs(3600);
    settings.config.drain_timeout = drain_timeout;
    let world = Arc::new(World::with(settings).await);
    let mut fake = Fake::attach(&world).await;
    let mut all = Vec::new();
    for seed in 0..conversations {
        let tokens = prompt(seed, 1500);
        all.push(fake.turn(&format!("c{seed}"), &tokens, 1280).await);
    }
    fake.heard_all().await;
    (world, fake, all)
}

fn named(conversation: &str, branch: &str) -> SaveRequest {
    SaveRequest::new(Selector {
        branch_name: Some(branch.to_owned()),
        ..Selector::conversation(conversation)
    })
}

type Saving = tokio::task::JoinHandle<Result<SaveReply, ServiceError>>;

fn saving(world: &World, request: SaveRequest) -> Saving {
    let service = Arc::clone(&world.service);
    tokio::spawn(async move { service.save(request).await })
}

/// Branches of a conversation, and whether the snapshots that they name are pinned.
fn branches(world: &World, conversation: &str) -> Vec<(String, SnapshotId, bool)> {
    let request = ListRequest {
        conversation_id: Some(conversation.to_owned()),
        ..ListRequest::default()
    };
    let rows = world.service.list(request).unwrap().snapshots;
    let rows = rows.into_iter();
    rows.filter_map(|row| Some((row.branch_name?, row.snapshot_id, row.pinned)))
        .collect()
}

fn rid_of(world: &World, conversation: &str) -> String {
    let request = InfoRequest {
        select: Selector {
            turn_number: Some(1),
            ..Selector::conversation(conversation)
        },
        with_tokens: false,
    };
    world.service.info(request).unwrap().rid.unwrap()
}

fn pinned(world: &World, id: SnapshotId) -> bool {
    let request = InfoRequest {
        select: Selector::snapshot(id),
        with_tokens: false,
    };
    world.service.info(request).unwrap().pinned
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_of_many_saves_hear_that_the_disk_is_full() {
    let (world, mut fake, _) = world(12).await;
    world.faults.fill(true);
    let saves: Vec<Saving> = (0..12)
        .map(|seed| saving(&world, named(&format!("c{seed}"), "kept")))
        .collect();
    for save in saves {
        let answer = save.await.unwrap();
        assert!(
            matches!(answer, Err(ServiceError::NoSpace(_))),
            "{answer:?}"
        );
    }
    for seed in 0..12 {
        assert_eq!(branches(&world, &format!("c{seed}")), []);
    }
    let restored = fake.restore(&prompt(3, 1500)).await;
    assert_eq!(restored.unwrap().boundary, 1280);
    world.faults.fill(false);
    world.service.save(named("c3", "kept")).await.unwrap();
    assert_eq!(branches(&world, "c3").len(), 1);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_save_leaves_neither_name_nor_pin() {
    let (world, _fake, ids) = world(2).await;
    let later = SaveRequest {
        durable: false,
        ..named("c0", "earlier")
    };
    world.service.save(later).await.unwrap();
    world.faults.fill(true);
    // Another name of the same snapshot, the same name again, and a name in another conversation.
    let elsewhere = SaveRequest::new(Selector {
        rid: Some(rid_of(&world, "c1")),
        branch_name: Some("mine".to_owned()),
        ..Selector::conversation("elsewhere")
    });
    for request in [
        named("c0", "later"),
        named("c0", "earlier"),
        named("c1", "x"),
        elsewhere,
    ] {
        let answer = world.service.save(request).await;
        assert!(
            matches!(answer, Err(ServiceError::NoSpace(_))),
            "{answer:?}"
        );
    }
    assert_eq!(
        branches(&world, "c0"),
        [("earlier".to_owned(), ids[0], true)]
    );
    assert_eq!(branches(&world, "c1"), []);
    assert!(!pinned(&world, ids[1]));
    let list = world.service.list(ListRequest {
        conversation_id: Some("elsewhere".to_owned()),
        ..ListRequest::default()
    });
    assert!(
        matches!(list, Err(ServiceError::NotFound { .. })),
        "{list:?}"
    );
    // What was refused is not named later, when there is room.
    world.faults.fill(false);
    world
        .service
        .save(SaveRequest::new(Selector::conversation("c1")))
        .await
        .unwrap();
    world.service.shutdown().await;
    let world = Arc::into_inner(world).unwrap().killed().await;
    assert_eq!(
        branches(&world, "c0"),
        [("earlier".to_owned(), ids[0], true)]
    );
    assert_eq!(branches(&world, "c1"), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_the_disk_refuses_goes_back_to_what_had_it() {
    let (world, _fake, ids) = world(2).await;
    world.service.save(named("c0", "b")).await.unwrap();
    let durable = SaveRequest::new(Selector::conversation("c1"));
    world.service.save(durable).await.unwrap();
    world.all_durable().await;
    // The snapshot is on disk, the name does not get there.
    world.faults.fill(true);
    for _ in 0..2 {
        let request = SaveRequest::new(Selector {
            rid: Some(rid_of(&world, "c1")),
            branch_name: Some("b".to_owned()),
            ..Selector::conversation("c0")
        });
        let answer = world.service.save(request).await;
        assert!(
            matches!(answer, Err(ServiceError::NoSpace(_))),
            "{answer:?}"
        );
        assert_eq!(branches(&world, "c0"), [("b".to_owned(), ids[0], true)]);
        assert!(!pinned(&world, ids[1]));
    }
    let conversation = |name: &str| ListRequest {
        conversation_id: Some(name.to_owned()),
        ..ListRequest::default()
    };
    assert_eq!(world.service.list(conversation("c0")).unwrap().total, 2);
    world.faults.fill(false);
    let request = SaveRequest::new(Selector {
        snapshot_id: Some(ids[1]),
        branch_name: Some("b".to_owned()),
        ..Selector::conversation("c0")
    });
    world.service.save(request).await.unwrap();
    assert_eq!(branches(&world, "c0"), [("b".to_owned(), ids[1], true)]);
    assert!(!pinned(&world, ids[0]), "the old holder keeps a pin");
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_leaves_no_name() {
    let (world, _fake, ids) = world(1).await;
    world.service.hold.set(Some("save:Writing"));
    let save = saving(&world, named("c0", "b"));
    eventually("the write", || !world.service.hold.held().is_empty()).await;
    assert!(pinned(&world, ids[0]), "it may go while it is waited for");
    save.abort();
    assert!(save.await.unwrap_err().is_cancelled());
    assert!(!pinned(&world, ids[0]));
    world.service.hold.set(None);
    world.all_durable().await;
    assert_eq!(branches(&world, "c0"), []);
    world.service.save(named("c0", "b")).await.unwrap();
    assert_eq!(branches(&world, "c0"), [("b".to_owned(), ids[0], true)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_told_until_there_is_room() {
    let (world, _fake, _) = world(1).await;
    let full = || world.service.tiers()[1].full;
    let metric = || world.metric("engram_disk_full");
    assert!(!full() && world.service.status().warnings.is_empty());
    assert_eq!(metric(), 0.0);
    world.faults.fill(true);
    world.service.save(named("c0", "b")).await.unwrap_err();
    assert!(full());
    let disk = &world.service.tiers()[1];
    assert!(disk.full_since.unwrap() <= disk.last_failure_at.unwrap());
    assert!(disk.last_failure.as_ref().unwrap().contains("no space"));
    assert!(disk.healthy);
    let status = world.service.status();
    assert!(status.ready);
    assert!(
        status.warnings[0].starts_with("the disk is full since 20"),
        "{status:?}"
    );
    eventually("the metric", || metric() == 1.0).await;
    world.faults.fill(false);
    // It is tried again by itself.
    eventually("the end of it", || !full()).await;
    assert!(world.service.status().warnings.is_empty());
    eventually("the metric", || metric() == 0.0).await;
    world.all_durable().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_that_nobody_wants_anything_of_is_not_full_for_good() {
    let (world, _fake, _) = world(1).await;
    world.faults.fill(true);
    world.service.save(named("c0", "b")).await.unwrap_err();
    assert!(world.service.tiers()[1].full);
    let whole = DeleteRequest {
        select: Selector::conversation("c0"),
        whole: true,
    };
    world.service.delete(whole).await.unwrap();
    eventually("the end of it", || !world.service.tiers()[1].full).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_on_a_full_disk_waits_for_nothing() {
    let (world, mut fake, _) = world_with(6, Duration::from_secs(3600)).await;
    world.service.hold.set(Some("save:Writing"));
    let saves: Vec<Saving> = (0..3)
        .map(|seed| saving(&world, named(&format!("c{seed}"), "b")))
        .collect();
    eventually("the write", || !world.service.hold.held().is_empty()).await;
    let service = Arc::clone(&world.service);
    let stopping = tokio::spawn(async move { service.shutdown().await });
    assert_eq!(fake.closed().await, CloseReason::Shutdown);
    world.faults.fill(true);
    world.service.hold.set(None);
    tokio::time::timeout(LONG, stopping).await.unwrap().unwrap();
    for save in saves {
        let answer = tokio::time::timeout(LONG, save).await.unwrap().unwrap();
        let refused = matches!(
            answer,
            Err(ServiceError::NoSpace(_) | ServiceError::Unavailable(_))
        );
        assert!(refused, "{answer:?}");
    }
    assert_eq!(world.service.core.lock().not_durable(), (6, 0));
    // Who asks now hears at once.
    let answer = world.service.save(named("c4", "b")).await;
    assert!(
        matches!(answer, Err(ServiceError::Unavailable(_))),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_hangs_up_when_it_hears_of_the_end_is_not_silent() {
    let (world, mut fake, _) = world(1).await;
    let unbound = attach_request(&Variant {
        instance: Some([7; 16]),
        ..Variant::default()
    });
    world.service.attach(unbound, &own_peer()).unwrap();
    world.service.begin_shutdown();
    for worker in world.service.workers.all() {
        world.service.send_away(&worker, CloseReason::SilentPeer);
    }
    world.service.shutdown().await;
    assert_eq!(fake.closed().await, CloseReason::Shutdown);
    let ended = |reason: &str| {
        let name = format!("engram_sessions_ended_total{{reason=\"{reason}\"}}");
        world.metric(&name)
    };
    assert_eq!((ended("shutdown"), ended("silent_peer")), (2.0, 0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_never_fits_on_disk_is_said_to_be_too_large_and_evicts_nothing() {
    let mut settings = Settings {
        disk: Some(ByteSize::mib(1)),
        ..Settings::default()
    };
    settings.config.write_after = Duration::from_secs(3600);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    fake.turn("small", &prompt(1, 1500), 1280).await;
    fake.turn("large", &prompt(2, 12_000), 12_000).await;
    fake.heard_all().await;
    world.service.save(named("small", "b")).await.unwrap();
    let error = world.service.save(named("large", "b")).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooLarge(_)), "{error:?}");
    assert!(error.to_string().contains("store.disk.budget"), "{error}");
    assert!(!world.service.tiers()[1].full);
    assert_eq!(branches(&world, "large"), []);
    assert_eq!(
        world.metric("engram_evicted_objects_total{tier=\"disk\"}"),
        0.0
    );
    world.service.save(named("small", "c")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_that_ram_had_no_room_for_names_the_knob() {
    let mut settings = Settings {
        ram: ByteSize::kib(1400),
        disk: None,
        ..Settings::default()
    };
    settings.config.room_wait = Duration::ZERO;
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 20_000);
    let req = fake.open("huge", &tokens);
    let save = fake.offer(req, 20_000);
    assert_eq!(fake.answer(save).await, Err(DeclineReason::NoRoom));
    let request = |name: &str| SaveRequest {
        durable: false,
        ..SaveRequest::new(Selector::conversation(name))
    };
    let error = world.service.save(request("huge")).await.unwrap_err();
    assert!(matches!(error, ServiceError::TooLarge(_)), "{error:?}");
    assert!(error.to_string().contains("store.ram"), "{error}");
    // Pinned by name, the others cannot go.
    let mut refused = None;
    for seed in 0..20 {
        let (name, tokens) = (format!("c{seed}"), prompt(seed + 2, 2100));
        let req = fake.open(&name, &tokens);
        let save = fake.offer(req, 2048);
        let Ok(parts) = fake.answer(save).await else {
            refused = Some(name);
            break;
        };
        fake.drain_all(save, &tokens, &parts).await;
        fake.saved(save).await.unwrap();
        fake.heard_all().await;
        let kept = SaveRequest {
            durable: false,
            ..named(&name, "b")
        };
        world.service.save(kept).await.unwrap();
    }
    let name = refused.expect("RAM is full before that");
    let error = world.service.save(request(&name)).await.unwrap_err();
    assert!(matches!(error, ServiceError::NoSpace(_)), "{error:?}");
    assert!(error.to_string().contains("store.ram"), "{error}");
}
