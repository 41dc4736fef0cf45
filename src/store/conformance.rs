//! What every tier must do. Run on each implementation.

use std::{any::Any, sync::Arc, thread};

use crate::types::ObjectKind;

use super::{
    arena::Arena,
    error::{ErrorKind, StoreError},
    object::Object,
    sample,
    tier::{Stored, Tier},
};

/// An empty tier for objects of the sample model (registered where that is needed).
pub struct Fixture {
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// An arena with room for some megabytes.
    pub arena: Arena,
    /// What must live as long as the tier.
    pub keep: Box<dyn Any>,
}

/// Runs all cases, each on a tier of its own.
///
/// # Panics
/// If the tier does not conform.
pub fn run(fresh: &dyn Fn() -> Fixture) {
    let cases: [fn(&Fixture); 9] = [
        what_was_put_is_got,
        a_second_put_writes_nothing,
        another_object_under_the_same_id_is_refused,
        what_is_not_there,
        removing_frees,
        the_budget_holds,
        invalid_objects_are_refused,
        a_full_arena_is_an_error_without_leak,
        many_threads,
    ];
    for case in cases {
        let fixture = fresh();
        let before = fixture.arena.used();
        case(&fixture);
        for meta in fixture.tier.list() {
            assert!(fixture.tier.remove(&meta.id).expect("removed"));
        }
        assert_eq!(fixture.arena.used(), before, "every block came back");
    }
}

fn samples(arena: &Arena) -> Vec<Object> {
    let geometry = sample::geometry();
    vec![
        sample::state(arena, &geometry, 2500, 1),
        sample::kv(arena, &geometry, 0, 1024, 2),
        sample::kv(arena, &geometry, 1024, 2500, 3),
        sample::kv(arena, &geometry, 1000, 1001, 4),
    ]
}

fn what_was_put_is_got(Fixture { tier, arena, .. }: &Fixture) {
    for object in samples(arena) {
        let id = object.meta.id;
        assert!(!tier.contains(&id));
        assert!(
            matches!(tier.put(&object), Ok(Stored::Written { bytes }) if bytes > object.bytes())
        );
        assert!(tier.contains(&id));
    }
    assert_eq!(tier.usage().objects, 4);
    assert_eq!(tier.list().len(), 4);
    for meta in tier.list() {
        let got = tier.get(&meta.id, arena).expect("it was put");
        assert!(sample::is_right(&got, got.meta.generation.0));
        assert_eq!(got.meta, meta);
        got.validate(Some(&sample::geometry())).expect("valid");
        let sealed = arena.scan();
        for segment in got.shards.iter().flatten() {
            let header = sealed.iter().find(|found| found.offset == segment.offset());
            assert_eq!(header.expect("sealed").header.object, meta.id);
        }
    }
}

fn a_second_put_writes_nothing(Fixture { tier, arena, .. }: &Fixture) {
    for object in samples(arena) {
        tier.put(&object).expect("room");
        let usage = tier.usage();
        assert_eq!(tier.put(&object).expect("there"), Stored::AlreadyThere);
        // From another save: the same prefix, so the same object.
        let mut again = (*object.meta).clone();
        again.generation.0 += 1;
        let again = sample::object(arena, again, 77);
        assert_eq!(tier.put(&again).expect("there"), Stored::AlreadyThere);
        assert_eq!(tier.usage(), usage);
        let got = tier.get(&object.meta.id, arena).expect("there");
        assert!(
            sample::is_right(&got, object.meta.generation.0),
            "the first stays"
        );
    }
}

fn another_object_under_the_same_id_is_refused(Fixture { tier, arena, .. }: &Fixture) {
    let geometry = sample::geometry();
    let first = sample::state(arena, &geometry, 100, 1);
    tier.put(&first).expect("room");
    let other = sample::state(arena, &geometry, 101, 1);
    assert!(matches!(tier.put(&other), Err(StoreError::Conflict { .. })));
    let got = tier.get(&first.meta.id, arena).expect("there");
    assert_eq!(got.meta, first.meta);
}

fn what_is_not_there(Fixture { tier, arena, .. }: &Fixture) {
    let id = sample::id(9);
    let missed = tier.get(&id, arena).expect_err("nothing there");
    assert_eq!(missed.kind(), ErrorKind::NotFound);
    assert!(!tier.remove(&id).expect("no error"));
    assert_eq!((tier.usage().objects, tier.list().len()), (0, 0));
}

fn removing_frees(Fixture { tier, arena, .. }: &Fixture) {
    let mut kept = Vec::new();
    for object in samples(arena) {
        let id = object.meta.id;
        let before = tier.usage();
        tier.put(&object).expect("room");
        drop(object);
        let got = tier.get(&id, arena).expect("there");
        let full = tier.usage();
        assert!(full.bytes >= before.bytes + got.bytes());
        assert!(tier.remove(&id).expect("no error"));
        assert!(!tier.remove(&id).expect("no error"));
        // Folders may stay.
        assert!(tier.usage().bytes <= full.bytes - got.bytes());
        assert_eq!(tier.usage().objects, before.objects);
        assert!(matches!(
            tier.get(&id, arena),
            Err(StoreError::NotFound { .. })
        ));
        kept.push(got);
    }
    // Whoever has an object keeps its bytes.
    for got in kept {
        assert!(sample::is_right(&got, got.meta.generation.0));
    }
}

fn the_budget_holds(Fixture { tier, arena, .. }: &Fixture) {
    let geometry = sample::geometry();
    let room = 64 << 10;
    let budget = tier.usage().bytes + room;
    tier.set_budget(budget);
    let mut put = 0;
    let refused = (0..100).find_map(|seed| {
        let object = sample::kv(arena, &geometry, 0, 100, seed);
        match tier.put(&object) {
            Ok(_) => {
                put += 1;
                assert!(tier.usage().bytes <= budget);
                None
            }
            Err(error) => Some((object, error)),
        }
    });
    let (object, error) = refused.expect("the budget is small");
    assert!(matches!(error, StoreError::NoSpace { .. }));
    assert!(put > 0);
    assert_eq!(tier.usage().objects, put);
    assert!(!tier.contains(&object.meta.id));
    tier.set_budget(budget + (1 << 20));
    tier.put(&object).expect("room now");
    // A budget below what is there takes nothing away.
    tier.set_budget(0);
    assert_eq!(tier.usage().objects, put + 1);
    assert!(tier.contains(&object.meta.id));
}

fn invalid_objects_are_refused(Fixture { tier, arena, .. }: &Fixture) {
    let geometry = sample::geometry();
    let good = sample::kv(arena, &geometry, 0, 1500, 1);
    let refused = |change: &dyn Fn(&mut Object)| {
        let mut bad = good.clone();
        change(&mut bad);
        let error = tier.put(&bad).expect_err("invalid");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert_eq!(tier.usage().objects, 0);
    };
    let change_meta = |bad: &mut Object, change: &dyn Fn(&mut super::ObjectMeta)| {
        let mut meta = (*bad.meta).clone();
        change(&mut meta);
        bad.meta = Arc::new(meta);
    };
    refused(&|bad| bad.tokens = Arc::from([1]));
    refused(&|bad| {
        bad.shards.pop();
    });
    refused(&|bad| {
        bad.shards.last_mut().map(Vec::pop);
    });
    refused(&|bad| bad.shards.iter_mut().for_each(|pieces| pieces.swap(0, 1)));
    refused(&|bad| change_meta(bad, &|meta| meta.shards = 0));
    refused(&|bad| change_meta(bad, &|meta| meta.shards = u32::MAX));
    refused(&|bad| change_meta(bad, &|meta| meta.kind = ObjectKind::State));
    refused(&|bad| change_meta(bad, &|meta| meta.range.end = 0));
    refused(&|bad| {
        change_meta(bad, &|meta| {
            meta.pieces.iter_mut().for_each(|p| p.bytes = u64::MAX)
        })
    });
}

fn a_full_arena_is_an_error_without_leak(Fixture { tier, arena, .. }: &Fixture) {
    let object = sample::kv(arena, &sample::geometry(), 0, 2048, 5);
    let id = object.meta.id;
    tier.put(&object).expect("room");
    drop(object);
    let mut hog = Vec::new();
    while let Some(segment) = arena.alloc(100_000) {
        hog.push(segment);
    }
    let used = arena.used();
    match tier.get(&id, arena) {
        Ok(got) => assert!(sample::is_right(&got, 5)),
        Err(error) => assert!(matches!(error, StoreError::ArenaFull { .. }), "{error}"),
    }
    assert_eq!(arena.used(), used);
    drop(hog);
    let got = tier.get(&id, arena).expect("room again");
    assert!(sample::is_right(&got, 5));
}

fn many_threads(Fixture { tier, arena, .. }: &Fixture) {
    let geometry = sample::geometry();
    thread::scope(|scope| {
        for worker in 0..4u64 {
            let geometry = &geometry;
            scope.spawn(move || {
                for round in 0..12u64 {
                    let seed = (worker + round) % 3;
                    let object = sample::kv(arena, geometry, 0, 1100, seed);
                    let id = object.meta.id;
                    tier.put(&object).expect("room");
                    match tier.get(&id, arena) {
                        Ok(got) => assert!(sample::is_right(&got, seed)),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
                    }
                    if round % 3 == 0 {
                        tier.remove(&id).expect("no error");
                    }
                }
            });
        }
    });
    for meta in tier.list() {
        let got = tier.get(&meta.id, arena).expect("still there");
        assert!(sample::is_right(&got, meta.generation.0));
    }
}
