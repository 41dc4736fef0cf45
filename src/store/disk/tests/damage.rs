//! Object files that are not what was written.

use super::*;
use crate::store::{ErrorKind, Reason};

/// Puts a KV object, lets `harm` at the path of its second shard, and expects that reading it fails
/// so, that all its files are in quarantine, and that nothing else is harmed.
fn harmed(start: &Start, bed: &Bed, harm: &dyn Fn(&Path)) -> StoreError {
    let seed = 7;
    let id = sample::id(seed);
    let object = sample::kv(&start.store.arena, &sample::geometry(), 0, 1500, seed);
    start.put(&object);
    drop(object);
    let used = start.store.arena.used();
    let aside = bed.quarantined(".safetensors").len();
    let notes = bed.quarantined(".reason.json").len();
    let before = start.store.counts();
    let path = bed.object(&id, 1);
    harm(&path);
    let there = (0..2).filter(|shard| fs::symlink_metadata(bed.object(&id, *shard)).is_ok());
    let there = there.count();

    let error = start.disk().get(&id, &start.store.arena).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Data, "{error}");
    assert_eq!(start.store.arena.used(), used, "no block is kept");
    assert!(!start.disk().contains(&id));
    let again = start.disk().get(&id, &start.store.arena).unwrap_err();
    assert!(matches!(again, StoreError::NotFound { .. }));
    for shard in 0..2 {
        assert!(
            fs::symlink_metadata(bed.object(&id, shard)).is_err(),
            "moved away"
        );
    }
    assert_eq!(bed.quarantined(".safetensors").len(), aside + there);
    assert_eq!(bed.quarantined(".reason.json").len(), notes + there);
    let after = start.store.counts();
    assert_eq!(
        after.quarantined_total(),
        before.quarantined_total() + there as u64
    );
    assert_eq!(after.quarantine_failed, 0);
    let read = |c: &crate::store::Counts| c.verify_failures + c.lost;
    assert_eq!(read(&after), read(&before) + 1);
    assert!(start.is_right(1), "another object");
    error
}

fn bed_with_neighbour() -> (Bed, Start) {
    let mut bed = Bed::new();
    // Much room in quarantine.
    bed.bytes = ByteSize::gib(1);
    let start = bed.start();
    start.put(&sample::kv(
        &start.store.arena,
        &sample::geometry(),
        0,
        1500,
        1,
    ));
    (bed, start)
}

fn reason(error: &StoreError) -> Reason {
    match error {
        StoreError::Corrupt { reason, shard, .. } => {
            assert_eq!(*shard, 1);
            *reason
        }
        other => panic!("{other}"),
    }
}

fn set_len(path: &Path, len: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

#[test]
fn truncated_or_grown_anywhere() {
    let (bed, start) = bed_with_neighbour();
    // Header 4096, tokens 8192, pieces 65536 and 32768.
    let whole = 110_592;
    let lengths = [
        0, 1, 7, 8, 9, 4095, 4096, 4097, 8192, 12_288, 40_960, 77_823, 77_824, 106_496, 110_591,
        110_593, 114_688,
    ];
    for len in lengths {
        let error = harmed(&start, &bed, &|path| {
            assert_eq!(fs::metadata(path).unwrap().len(), whole);
            set_len(path, len);
        });
        assert_eq!(reason(&error), Reason::Length, "{len}");
    }
}

#[test]
fn a_flipped_bit_anywhere() {
    let (bed, start) = bed_with_neighbour();
    // Length, start, checksum and middle of the header, its padding.
    for at in [0, 1, 2, 7, 8, 20, 41, 42, 49, 50, 300, 900, 4000, 4095] {
        let error = harmed(&start, &bed, &|path| flip(path, at));
        // Another length of the header is seen before its checksum, if it is a possible one.
        let found = reason(&error);
        let length = at < 8 && found == Reason::Length;
        assert!(found == Reason::Header || length, "{at}: {found:?}");
    }
    // Tokens, padding behind them, first and last byte of each piece, padding of the file.
    for at in [
        4096, 10_095, 10_096, 12_287, 12_288, 77_823, 77_824, 108_287, 108_288, 110_591,
    ] {
        let error = harmed(&start, &bed, &|path| flip(path, at));
        assert_eq!(reason(&error), Reason::Checksum, "{at}");
    }
}

#[test]
fn a_missing_file_is_lost() {
    let (bed, start) = bed_with_neighbour();
    let error = harmed(&start, &bed, &|path| fs::remove_file(path).unwrap());
    assert!(
        matches!(error, StoreError::Lost { shard: 1, .. }),
        "{error}"
    );
    assert_eq!(start.store.counts().quarantined_for(Reason::Incomplete), 1);
}

#[test]
fn another_whole_file_in_its_place_is_a_mismatch() {
    let (bed, start) = bed_with_neighbour();
    let other_shard = |path: &Path| {
        let first = path.to_str().unwrap().replace(".1.", ".0.");
        fs::copy(first, path).unwrap();
    };
    assert_eq!(
        reason(&harmed(&start, &bed, &other_shard)),
        Reason::Mismatch
    );
    let other_object = |path: &Path| {
        fs::copy(bed.object(&sample::id(1), 1), path).unwrap();
    };
    assert_eq!(
        reason(&harmed(&start, &bed, &other_object)),
        Reason::Mismatch
    );
}

#[test]
fn a_shard_of_another_save_is_a_mismatch() {
    let (bed, start) = bed_with_neighbour();
    // The same object from another save, whose first shard is then taken away.
    let other = Bed::new();
    let stranger = other.start();
    let meta = sample::meta(
        &sample::geometry(),
        crate::types::ObjectKind::Kv,
        crate::types::TokenRange {
            start: 0,
            end: 1500,
        },
        7,
    );
    let mut meta_again = meta;
    meta_again.generation.0 += 1;
    stranger.put(&sample::object(&stranger.store.arena, meta_again, 7));
    let error = harmed(&start, &bed, &|path| {
        fs::copy(other.object(&sample::id(7), 1), path).unwrap();
    });
    assert_eq!(reason(&error), Reason::Mismatch);
}

#[test]
fn tokens_alone_are_verified_too() {
    let (bed, start) = bed_with_neighbour();
    let id = sample::id(1);
    let tokens = start.disk().tokens(&id).unwrap();
    assert!(
        (0..1500)
            .map(|p| sample::token(1, p))
            .eq(tokens.iter().copied())
    );
    flip(&bed.object(&id, 0), 4096);
    let error = start.disk().tokens(&id).unwrap_err();
    assert!(matches!(
        error,
        StoreError::Corrupt {
            reason: Reason::Checksum,
            ..
        }
    ));
    assert!(!start.disk().contains(&id));
}

#[test]
fn after_quarantine_the_object_can_be_stored_again() {
    let (bed, start) = bed_with_neighbour();
    harmed(&start, &bed, &|path| flip(path, 5000));
    start.put(&sample::kv(
        &start.store.arena,
        &sample::geometry(),
        0,
        1500,
        7,
    ));
    assert!(start.is_right(7));
}

#[test]
fn large_objects_are_verified_by_several_threads() {
    let bed = Bed::new();
    let start = bed.start();
    let config = Config {
        ram: ByteSize::mib(64),
        ram_headroom: None,
        disk: Some(DiskConfig {
            min_free: ByteSize::b(0),
            io_threads: 3,
            io_engine: crate::store::IoEngine::Threads,
            ..DiskConfig::at(bed.folder.path().join("large"))
        }),
    };
    drop(start);
    let store = config.build(Arc::new(ManualClock::new(Millis(1)))).unwrap();
    let start = scan(store).unwrap();
    // Pieces that no chunk boundary meets: 3 blocks of 1024 rows of 5000 bytes.
    let geometry = sample::geometry_of(20_000_004, 5000);
    let register = |_: &()| {
        let known = start
            .disk()
            .register_model(sample::MODEL, &geometry, BTreeMap::new());
        known.unwrap();
    };
    register(&());
    for (seed, object) in [
        (1, sample::kv(&start.store.arena, &geometry, 0, 2500, 1)),
        (2, sample::state(&start.store.arena, &geometry, 2500, 2)),
    ] {
        start.put(&object);
        drop(object);
        assert!(start.is_right(seed));
        let rel = layout::object(&sample::MODEL, &sample::id(seed), 1);
        let path = bed.folder.path().join("large").join(rel.as_path());
        flip(&path, 9_000_000);
        let error = start.disk().get(&sample::id(seed), &start.store.arena);
        assert_eq!(reason(&error.unwrap_err()), Reason::Checksum);
    }
    assert_eq!(start.store.arena.used(), 0);
}

#[test]
fn quarantine_is_bounded() {
    let mut bed = Bed::new();
    bed.bytes = ByteSize::mib(16);
    let start = bed.start();
    start.put(&sample::kv(
        &start.store.arena,
        &sample::geometry(),
        0,
        1500,
        1,
    ));
    for _ in 0..10 {
        harmed_quietly(&start, &bed);
        let aside = du(&bed.dir().join(layout::QUARANTINE));
        assert!(aside <= (1 << 20) + 4096, "{aside}");
        assert_eq!(start.disk().usage().bytes, du(&bed.dir()));
    }
    assert!(bed.quarantined(".safetensors").len() > 2);
}

fn harmed_quietly(start: &Start, bed: &Bed) {
    let object = sample::kv(&start.store.arena, &sample::geometry(), 0, 1500, 7);
    start.put(&object);
    flip(&bed.object(&sample::id(7), 0), 5000);
    start
        .disk()
        .get(&sample::id(7), &start.store.arena)
        .unwrap_err();
}
