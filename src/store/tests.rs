//! The conformance suite on every tier.

use std::sync::Arc;

use bytesize::ByteSize;

use super::{conformance::Fixture, fault::Faults, *};
use crate::{types::Millis, util::clock::ManualClock};

fn disk_fixture(direct_io: bool, io_threads: u32, io_engine: IoEngine) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let config = Config {
        ram: ByteSize::mib(8),
        ram_headroom: None,
        disk: Some(DiskConfig {
            bytes: ByteSize::mib(64),
            min_free: ByteSize::b(0),
            direct_io,
            io_threads,
            io_engine,
            ..DiskConfig::at(folder.path().join("store"))
        }),
    };
    let store = config.build(Arc::new(ManualClock::new(Millis(5)))).unwrap();
    let disk = store.disk.clone().unwrap();
    if disk.engine() != io_engine {
        eprintln!("not here: {}", io_engine.as_str());
    }
    let manifests = store.manifests.as_ref().unwrap();
    let early = sample::state(&store.arena, &sample::geometry(), 5, 1);
    assert!(matches!(disk.put(&early), Err(StoreError::NotScanned)));
    manifests.scan(&mut |_| panic!("nothing there")).unwrap();
    assert!(matches!(
        disk.put(&early),
        Err(StoreError::UnknownModel { .. })
    ));
    drop(early);
    disk.register_model(sample::MODEL, &sample::geometry(), Default::default())
        .unwrap();
    Fixture {
        tier: disk,
        arena: store.arena.clone(),
        keep: Box::new((store, folder)),
    }
}

#[test]
fn ram_conforms() {
    conformance::run(&|| Fixture {
        tier: Arc::new(RamTier::new(8 << 20)),
        arena: Arena::new("test", 8 << 20).unwrap(),
        keep: Box::new(()),
    });
}

#[test]
fn disk_conforms_buffered() {
    conformance::run(&|| disk_fixture(false, 1, IoEngine::Threads));
}

#[test]
fn disk_conforms_direct() {
    conformance::run(&|| disk_fixture(true, 3, IoEngine::Threads));
}

#[test]
fn disk_conforms_with_a_ring() {
    for direct in [false, true] {
        conformance::run(&|| disk_fixture(direct, 1, IoEngine::Uring));
    }
}

#[test]
fn no_memory_for_the_arena_names_the_knob_once() {
    let config = Config {
        ram: bytesize::ByteSize::tib(256),
        ..Config::default()
    };
    let error = config
        .build(std::sync::Arc::new(crate::util::clock::SystemClock::new()))
        .unwrap_err();
    assert!(matches!(error, StoreError::NoMemory { .. }), "{error:?}");
    let text = error.to_string();
    assert_eq!(text.matches("store.ram").count(), 1, "{text}");
    assert_eq!(
        text.matches("memory").count(),
        2,
        "its cause is said once: {text}"
    );
}

#[test]
fn what_the_machine_does_not_have_is_told() {
    let open = |faults: Faults| {
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            ram: ByteSize::mib(8),
            ram_headroom: None,
            disk: Some(DiskConfig {
                io_engine: IoEngine::Uring,
                ..DiskConfig::at(folder.path().join("store"))
            }),
        };
        let clock = Arc::new(ManualClock::new(Millis(5)));
        let disk = config.build_faulty(clock, faults).unwrap().disk.unwrap();
        (disk.direct(), disk.engine())
    };
    let faults = Faults::default();
    faults.deny_direct();
    faults.deny_uring();
    assert_eq!(open(faults), (false, IoEngine::Threads));
}
