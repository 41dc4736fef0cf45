use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;

use super::fake::*;
use crate::proto::channel::layout::{DeclineReason, RequestFlags};
use crate::service::limits::NamespaceLimits;
use crate::service::{
    DeleteRequest, InfoRequest, RestoreRequest, SaveRequest, Selector, ServiceError,
};
use crate::types::{Millis, Namespace, SnapshotId};
use crate::util::clock::ManualClock;

const TOKENS: usize = 1280;
/// Payload of a conversation that shares nothing.
const SIZE: u64 = STATE + TOKENS as u64 * ROW;

/// A daemon with limits for every namespace.
async fn world(limit: impl FnOnce(&mut Settings)) -> World {
    let mut settings = Settings::default();
    settings.config.write_after = Duration::ZERO;
    limit(&mut settings);
    World::with(settings).await
}

fn quota(snapshots: u64) -> impl FnOnce(&mut Settings) {
    move |settings| settings.config.limits.quota = Some(ByteSize(snapshots * SIZE + SIZE / 2))
}

/// Saves a conversation that shares nothing with others.
async fn keep(fake: &mut Fake, seed: u32) -> SnapshotId {
    let tokens = prompt(seed, 1500);
    fake.turn(&format!("c{seed}"), &tokens, TOKENS).await
}

/// Offers such a conversation; how that ended.
async fn offer(fake: &mut Fake, seed: u32) -> SaveEnd {
    let tokens = prompt(seed, 1500);
    let req = fake.open(&format!("c{seed}"), &tokens);
    fake.save_at(req, &tokens, TOKENS).await
}

fn is_here(world: &World, id: SnapshotId) -> bool {
    let select = Selector::snapshot(id);
    let with_tokens = false;
    let info = world.service.info(InfoRequest {
        select,
        with_tokens,
    });
    info.is_ok()
}

fn used(world: &World) -> u64 {
    let (rows, total) = world.service.namespaces(10, 0);
    assert_eq!(rows.len(), total);
    rows.iter().map(|row| row.used_bytes).sum()
}

async fn branch(world: &World, seed: u32, name: &str) {
    let select = Selector {
        branch_name: Some(name.to_owned()),
        ..Selector::conversation(format!("c{seed}"))
    };
    world.service.save(SaveRequest::new(select)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_at_its_quota_gives_up_its_own_oldest() {
    let world = world(quota(3)).await;
    let mut fake = Fake::attach(&world).await;
    let mut all = Vec::new();
    for seed in 0..8 {
        all.push(keep(&mut fake, seed).await);
        world.all_durable().await;
        assert!(used(&world) <= 3 * SIZE, "{} bytes", used(&world));
    }
    let here: Vec<bool> = all.iter().map(|id| is_here(&world, *id)).collect();
    assert_eq!(here, [false, false, false, false, false, true, true, true]);
    assert_eq!(used(&world), 3 * SIZE);
    assert_eq!(world.metric("engram_quota_evicted_snapshots_total"), 5.0);
    assert_eq!(world.metric("engram_quota_declined_total"), 0.0);
    assert_eq!(fake.restore(&prompt(0, 1500)).await, None);
    assert!(fake.restore(&prompt(7, 1500)).await.is_some());
    // The disk, too.
    assert_eq!(
        world
            .files(".json")
            .iter()
            .filter(|path| path.to_str().unwrap().contains("manifests"))
            .count(),
        3
    );
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_named_pinned_or_not_on_disk_is_never_given_up() {
    let world = world(quota(3)).await;
    let mut fake = Fake::attach(&world).await;
    let named = keep(&mut fake, 0).await;
    branch(&world, 0, "kept").await;
    let pinned = keep(&mut fake, 1).await;
    world.all_durable().await;
    let select = Selector::snapshot(pinned);
    let pin_for = Some(Duration::from_secs(3600));
    let request = RestoreRequest { select, pin_for };
    world.service.restore(request).await.unwrap();
    // The disk takes nothing: this one stays in RAM alone.
    world.faults.fill(true);
    let unwritten = keep(&mut fake, 2).await;
    assert_eq!(used(&world), 3 * SIZE);
    let declined = SaveEnd::Declined(DeclineReason::NoRoom);
    assert_eq!(offer(&mut fake, 3).await, declined);
    for id in [named, pinned, unwritten] {
        assert!(is_here(&world, id));
    }
    assert_eq!(world.metric("engram_quota_declined_total"), 1.0);
    // By name it is refused, with the numbers.
    let request = SaveRequest {
        timeout: Duration::from_millis(1500),
        ..SaveRequest::new(Selector::conversation("c3"))
    };
    match world.service.save(request).await {
        Err(ServiceError::Quota {
            used, quota, need, ..
        }) => {
            let expected = (3 * SIZE, 3 * SIZE + SIZE / 2, SIZE);
            assert_eq!((used, quota, need), expected);
        }
        other => panic!("{other:?}"),
    }
    world.faults.fill(false);
    world.all_durable().await;
    // Now the third is the one that goes.
    assert!(matches!(offer(&mut fake, 3).await, SaveEnd::Saved(..)));
    assert!(!is_here(&world, unwritten) && is_here(&world, named) && is_here(&world, pinned));
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_larger_than_the_quota_costs_nobody_anything() {
    let world = world(|settings| settings.config.limits.quota = Some(ByteSize(SIZE + 10))).await;
    let mut fake = Fake::attach(&world).await;
    let small = keep(&mut fake, 0).await;
    world.all_durable().await;
    let tokens = prompt(1, 3000);
    let req = fake.open("c1", &tokens);
    let end = fake.save_at(req, &tokens, 2304).await;
    assert_eq!(end, SaveEnd::Declined(DeclineReason::NoRoom));
    assert!(is_here(&world, small));
    assert_eq!(world.metric("engram_quota_evicted_snapshots_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_next_turn_counts_what_it_adds_and_keeps_what_it_stands_on() {
    // Room for the first turn, and for what the second adds.
    let world = world(|settings| {
        settings.config.limits.quota = Some(ByteSize(2 * SIZE + STATE + 1024 * ROW));
    })
    .await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2400);
    let first = fake.turn("chat", &tokens[..1500], TOKENS).await;
    world.all_durable().await;
    let other = keep(&mut fake, 2).await;
    world.all_durable().await;
    assert_eq!(used(&world), 2 * SIZE);
    // The first turn is the least recently used, but the second is made of it.
    let second = fake.turn("chat", &tokens, 2304).await;
    assert!(is_here(&world, first) && is_here(&world, second) && is_here(&world, other));
    assert_eq!(used(&world), 2 * SIZE + STATE + 1024 * ROW);
    world.all_durable().await;
    let _ = keep(&mut fake, 3).await;
    assert!(
        !is_here(&world, other),
        "the oldest that nothing stands on goes first"
    );
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespaces_pay_for_themselves_alone() {
    let world = world(|settings| {
        let acme = Namespace {
            tenant: Some("acme".into()),
            ..Namespace::default()
        };
        settings.config.limits.namespaces = vec![NamespaceLimits {
            name: "acme".into(),
            id: Some(acme.id()),
            quota: Some(ByteSize(SIZE + SIZE / 2)),
            ..NamespaceLimits::default()
        }];
    })
    .await;
    let mut fake = Fake::attach(&world).await;
    let theirs = keep(&mut fake, 0).await;
    world.all_durable().await;
    let mut ours = Vec::new();
    for seed in 1..4 {
        let tokens = prompt(seed, 1500);
        let (name, rid) = (format!("c{seed}"), format!("r{seed}"));
        let req = fake.open_as(&name, &rid, &tokens, |open| {
            open.flags = open.flags.with(RequestFlags::HAS_TENANT, true);
            open.tenant = "acme".to_owned();
        });
        let SaveEnd::Saved(_, id) = fake.save_at(req, &tokens, TOKENS).await else {
            panic!("not saved");
        };
        ours.push(id);
        world.all_durable().await;
    }
    let here: Vec<bool> = ours.iter().map(|id| is_here(&world, *id)).collect();
    assert_eq!(here, [false, false, true]);
    assert!(is_here(&world, theirs), "another namespace paid");
    let (rows, _) = world.service.namespaces(10, 0);
    let acme = rows
        .iter()
        .find(|row| row.name.as_deref() == Some("acme"))
        .unwrap();
    let numbers = (
        acme.used_bytes,
        acme.quota_bytes,
        acme.snapshots,
        acme.objects,
    );
    assert_eq!(numbers, (SIZE, Some(SIZE + SIZE / 2), 1, 2));
    assert_eq!(acme.tenant.as_deref(), Some("acme"));
    eventually("the metrics", || {
        world.metric("engram_namespace_used_bytes{namespace=\"acme\"}") == SIZE as f64
            && world.metric("engram_namespace_used_bytes{namespace=\"other\"}") == SIZE as f64
            && world.metric("engram_namespaces") == 2.0
    })
    .await;
}

/// A daemon whose clock moves when told, and retention that looks once a minute.
async fn aging(limit: impl FnOnce(&mut Settings)) -> (World, Fake, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(Millis(1_800_000_000_000)));
    let time = Arc::clone(&clock);
    let world = world(move |settings| {
        settings.clock = time;
        limit(settings);
    })
    .await;
    let fake = Fake::attach(&world).await;
    (world, fake, clock)
}

async fn pass(world: &World, clock: &ManualClock, time: Duration) {
    clock.advance(time);
    eventually("a look", || {
        *world.service.retain_at.lock() > clock_time(world)
    })
    .await;
    world.all_durable().await;
}

fn clock_time(world: &World) -> Duration {
    world.service.clock.monotonic()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_not_used_for_long_goes_and_branches_stay() {
    let (world, mut fake, clock) = aging(|settings| {
        settings.config.limits.keep_for = Some(Duration::from_secs(3600));
    })
    .await;
    let named = keep(&mut fake, 0).await;
    branch(&world, 0, "kept").await;
    let used = keep(&mut fake, 1).await;
    let unused = keep(&mut fake, 2).await;
    world.all_durable().await;
    pass(&world, &clock, Duration::from_secs(1800)).await;
    assert!([named, used, unused].iter().all(|id| is_here(&world, *id)));
    assert!(fake.restore(&prompt(1, 1500)).await.is_some());
    pass(&world, &clock, Duration::from_secs(1801)).await;
    assert!(is_here(&world, named) && is_here(&world, used) && !is_here(&world, unused));
    assert_eq!(world.metric("engram_expired_snapshots_total"), 1.0);
    // A branch that goes is no reason to stay any more.
    let select = Selector {
        branch_name: Some("kept".into()),
        ..Selector::conversation("c0")
    };
    let whole = false;
    world
        .service
        .delete(DeleteRequest { select, whole })
        .await
        .unwrap();
    pass(&world, &clock, Duration::from_secs(3601)).await;
    assert!(!is_here(&world, named) && !is_here(&world, used));
    assert_eq!(world.files(".safetensors").len(), 0);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_than_so_many_and_so_much_is_kept() {
    for bytes in [false, true] {
        let (world, mut fake, clock) = aging(|settings| {
            let limits = &mut settings.config.limits;
            match bytes {
                true => limits.keep_bytes = Some(ByteSize(3 * SIZE)),
                false => limits.keep_snapshots = Some(3),
            }
        })
        .await;
        let mut all = Vec::new();
        for seed in 0..6 {
            all.push(keep(&mut fake, seed).await);
            clock.advance(Duration::from_millis(5));
        }
        world.all_durable().await;
        pass(&world, &clock, Duration::from_secs(61)).await;
        let here: Vec<bool> = all.iter().map(|id| is_here(&world, *id)).collect();
        assert_eq!(
            here,
            [false, false, false, true, true, true],
            "bytes: {bytes}"
        );
        world.check();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_takes_no_last_copy_that_is_not_on_disk() {
    let (world, mut fake, clock) = aging(|settings| {
        settings.config.limits.keep_for = Some(Duration::from_secs(60));
        settings.config.limits.keep_snapshots = Some(0);
    })
    .await;
    world.faults.fill(true);
    let unwritten = keep(&mut fake, 0).await;
    clock.advance(Duration::from_secs(600));
    eventually("a look", || {
        *world.service.retain_at.lock() > clock_time(&world)
    })
    .await;
    clock.advance(Duration::from_secs(600));
    eventually("a look", || {
        *world.service.retain_at.lock() > clock_time(&world)
    })
    .await;
    assert!(is_here(&world, unwritten));
    world.faults.fill(false);
    eventually("its end", || {
        clock.advance(Duration::from_secs(61));
        !is_here(&world, unwritten)
    })
    .await;
    let written = world.metric("engram_durable_snapshots_total");
    assert_eq!(written, 1.0, "it went before it was on disk");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_newer_one_goes_in_place_of_one_that_is_kept_for_a_time() {
    for bytes in [false, true] {
        let (world, mut fake, clock) = aging(|settings| {
            let limits = &mut settings.config.limits;
            match bytes {
                true => limits.keep_bytes = Some(ByteSize(2 * SIZE)),
                false => limits.keep_snapshots = Some(2),
            }
        })
        .await;
        let mut all = Vec::new();
        for seed in 0..4 {
            all.push(keep(&mut fake, seed).await);
            clock.advance(Duration::from_millis(5));
            if seed == 1 {
                // As a request that goes on from there does.
                for id in &all {
                    let request = RestoreRequest {
                        select: Selector::snapshot(*id),
                        pin_for: Some(Duration::from_secs(90)),
                    };
                    world.service.restore(request).await.unwrap();
                }
                clock.advance(Duration::from_millis(5));
            }
        }
        world.all_durable().await;
        pass(&world, &clock, Duration::from_secs(61)).await;
        assert!(all.iter().all(|id| is_here(&world, *id)), "bytes: {bytes}");
        // Once that time is over the oldest go.
        pass(&world, &clock, Duration::from_secs(61)).await;
        let here: Vec<bool> = all.iter().map(|id| is_here(&world, *id)).collect();
        assert_eq!(here, [false, false, true, true], "bytes: {bytes}");
        world.check();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_said_outlives_retention() {
    let (world, mut fake, clock) = aging(|settings| {
        settings.config.limits.keep_for = Some(Duration::from_secs(60));
    })
    .await;
    let id = keep(&mut fake, 0).await;
    world.all_durable().await;
    pass(&world, &clock, Duration::from_secs(61)).await;
    assert!(!is_here(&world, id));
    let known = async |world: &World| {
        let select = Selector::conversation("c0");
        let stream = world.service.token_stream(&select).await.unwrap();
        assert_eq!((stream.tokens, stream.snapshot), (prompt(0, 1500), None));
    };
    known(&world).await;
    let world = world.killed().await;
    known(&world).await;
}
