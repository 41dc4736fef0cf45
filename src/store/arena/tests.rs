use proptest::prelude::*;

use super::*;
use crate::types::{Fingerprint, Generation, NamespaceId, ObjectId, ObjectKind, TokenRange};
use crate::util::parser::{Parser, case, refused};

fn header(n: u8) -> SegmentHeader {
    SegmentHeader {
        object: ObjectId([n; 32]),
        fingerprint: Fingerprint([1; 32]),
        namespace: NamespaceId([2; 32]),
        generation: Generation(u64::from(n)),
        kind: ObjectKind::Kv,
        shard: 0,
        shards: 1,
        piece: 0,
        pieces: 1,
        range: TokenRange { start: 0, end: 9 },
        object_range: TokenRange { start: 0, end: 9 },
    }
}

fn objects(arena: &Arena) -> Vec<u8> {
    arena.scan().iter().map(|f| f.header.object.0[0]).collect()
}

#[test]
fn blocks_are_aligned_apart_and_given_back() {
    let arena = Arena::new("test", 64 * PAGE).unwrap();
    let empty = arena.free_bytes();
    assert_eq!(arena.used(), 0);
    let a = arena.alloc(1).unwrap();
    let b = arena.alloc(PAGE + 1).unwrap();
    let zero = arena.alloc(0).unwrap();
    assert!(a.offset().is_multiple_of(PAGE) && b.offset().is_multiple_of(PAGE));
    assert_eq!(
        [a.footprint(), b.footprint(), zero.footprint()],
        [2, 3, 1].map(|p| p * PAGE)
    );
    a.write(0, &[7]).unwrap();
    b.write(0, &vec![9; 4097]).unwrap();
    assert_eq!(a.to_vec(), [7]);
    assert!(a.write(1, &[1]).is_err() && a.read(u64::MAX, &mut [0]).is_err());
    assert!(zero.write(0, &[1]).is_err() && zero.is_empty());
    assert_eq!(arena.used(), 6 * PAGE);
    assert!(arena.alloc(64 * PAGE).is_none() && arena.alloc(u64::MAX).is_none());
    drop((a, b, zero));
    assert_eq!(
        (arena.free_bytes(), arena.largest_free()),
        (empty, empty - PAGE)
    );
    assert!(arena.alloc(arena.largest_free()).is_some());
}

#[test]
fn rounding_behind_a_payload_is_zero() {
    let arena = Arena::new("test", 8 * PAGE).unwrap();
    let a = arena.alloc(2 * PAGE).unwrap();
    a.write(0, &vec![0xff; 2 * PAGE as usize]).unwrap();
    drop(a);
    let b = arena.alloc(PAGE + 10).unwrap();
    let mut rest = vec![1; PAGE as usize - 10];
    b.map().read(b.offset() + PAGE + 10, &mut rest).unwrap();
    assert!(rest.iter().all(|byte| *byte == 0));
}

#[test]
fn scan_finds_the_sealed_ones_and_skips_torn_headers() {
    let arena = Arena::new("test", 64 * PAGE).unwrap();
    let segments: Vec<Segment> = (0..6u8)
        .map(|n| arena.alloc(u64::from(n) * 3000).unwrap())
        .collect();
    for n in [0u8, 1, 3, 4] {
        arena.seal(&segments[usize::from(n)], &header(n));
    }
    assert_eq!(objects(&arena), [0, 1, 3, 4]);
    // A header is torn: the ones behind it are found all the same.
    let torn = segments[1].offset() - PAGE;
    arena.map().fill(torn + 100, 1, 0xee).unwrap();
    assert_eq!(objects(&arena), [0, 3, 4]);
    // A sealed header somewhere in a payload is not looked at, one copied elsewhere is none.
    let mut copy = vec![0; HEADER_BYTES];
    arena
        .map()
        .read(segments[3].offset() - PAGE, &mut copy)
        .unwrap();
    segments[5].write(PAGE, &copy).unwrap();
    assert_eq!(objects(&arena), [0, 3, 4]);
    drop(segments);
    assert_eq!(objects(&arena), [0u8; 0]);
}

#[test]
fn a_later_process_finds_exactly_the_sealed_ones() {
    let arena = Arena::new("test", 64 * PAGE).unwrap();
    let keep: Vec<Segment> = (0..5u8)
        .map(|n| {
            let segment = arena.alloc(5000).unwrap();
            segment.write(0, &[n; 5000]).unwrap();
            if n != 2 {
                arena.seal(&segment, &header(n));
            }
            segment
        })
        .collect();
    let fd = arena.fd().try_clone_to_owned().unwrap();
    // As a killed process does: nothing is dropped.
    std::mem::forget(keep);
    let len = arena.len();
    drop(arena);

    let (again, found) = Arena::reopen(fd.try_clone().unwrap(), len).unwrap();
    let kept: Vec<u8> = found.iter().map(|(header, _)| header.object.0[0]).collect();
    assert_eq!(kept, [0, 1, 3, 4]);
    for (header, segment) in &found {
        assert_eq!(segment.to_vec(), [header.object.0[0]; 5000]);
    }
    assert_eq!(again.used(), 4 * 3 * PAGE, "the open one is free");
    let free = again.alloc(again.largest_free()).unwrap();
    for (_, segment) in &found {
        let apart = segment.offset() + segment.len() <= free.offset() - PAGE
            || free.offset() + free.len() <= segment.offset() - PAGE;
        assert!(apart);
    }
    drop((found, free));
    assert_eq!(again.used(), 0);
    assert!(again.scan().is_empty());

    assert!(matches!(
        Arena::reopen(fd.try_clone().unwrap(), len - PAGE),
        Err(ArenaError::NotAnArena { .. })
    ));
    assert!(matches!(
        Arena::reopen(fd.try_clone().unwrap(), len + PAGE),
        Err(ArenaError::Shm(_))
    ));
    assert!(matches!(
        Arena::reopen(fd, 5),
        Err(ArenaError::Length { len: 5 })
    ));
    let (_, plain) = SharedMap::create("test", 8 * PAGE).unwrap();
    assert!(matches!(
        Arena::reopen(plain, 8 * PAGE),
        Err(ArenaError::NotAnArena { .. })
    ));
    assert!(matches!(
        Arena::new("test", 2 * PAGE),
        Err(ArenaError::Length { .. })
    ));
}

proptest! {
    #[test]
    fn no_byte_is_in_two_segments(sizes in prop::collection::vec((0u64..20_000, any::<bool>()), 1..60)) {
        let arena = Arena::new("test", 64 * PAGE).unwrap();
        let mut live: Vec<(u8, Segment)> = Vec::new();
        for (n, (len, drop_one)) in (0u8..).zip(sizes) {
            if drop_one && !live.is_empty() {
                live.swap_remove(usize::from(n) % live.len());
            }
            if let Some(segment) = arena.alloc(len) {
                segment.write(0, &vec![n; len as usize]).unwrap();
                arena.seal(&segment, &header(n));
                live.push((n, segment));
            }
        }
        for (n, segment) in &live {
            prop_assert!(segment.to_vec().iter().all(|byte| byte == n));
        }
        let mut expected: Vec<u8> = live.iter().map(|(n, _)| *n).collect();
        let mut found = objects(&arena);
        expected.sort_unstable();
        found.sort_unstable();
        prop_assert_eq!(found, expected);
        drop(live);
        prop_assert_eq!(arena.used(), 0);
        prop_assert_eq!(arena.largest_free(), 62 * PAGE);
    }
}

/// The parsers of headers, see `util::parser`.
pub(in crate::store) fn parsers() -> Vec<Parser> {
    const ARENA: [u8; 16] = [9; 16];
    const LEN: u64 = 5 * PAGE;
    fn block(bytes: &[u8]) -> Result<Vec<u8>, String> {
        let bytes = bytes.try_into().map_err(|_| "no header")?;
        let block = header::BlockHeader::decode(bytes, ARENA, 2 * PAGE, LEN).ok_or("no header")?;
        assert!(block.offset + block.block_len <= LEN && block.payload_len < block.block_len);
        Ok(block.encode(ARENA).to_vec())
    }
    fn arena(bytes: &[u8]) -> Result<Vec<u8>, String> {
        let bytes = bytes.try_into().map_err(|_| "no arena")?;
        let id = header::decode_arena(bytes, LEN).ok_or("no arena")?;
        Ok(header::encode_arena(id, LEN).to_vec())
    }
    fn seal(bytes: &mut Vec<u8>) {
        bytes.resize(header::HEADER_BYTES, 0);
        let at = bytes.len() - 4;
        let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes[..at]) as u32;
        bytes[at..].copy_from_slice(&crc.to_le_bytes());
    }
    fn of(change: impl FnOnce(&mut header::BlockHeader)) -> Vec<u8> {
        let mut block = header::BlockHeader {
            offset: 2 * PAGE,
            block_len: 3 * PAGE,
            payload_len: PAGE + 5,
            sealed: Some(header(1)),
        };
        change(&mut block);
        block.encode(ARENA).to_vec()
    }
    fn set(at: usize, word: u32) -> Vec<u8> {
        let mut bytes = of(|_| ());
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        seal(&mut bytes);
        bytes
    }
    let both = |name, parse, valid, hostile| Parser {
        name,
        parse,
        exact: false,
        seal: Some(seal),
        factor: 16,
        valid,
        hostile,
    };
    vec![
        both(
            "arena-block",
            block,
            || {
                vec![
                    case("sealed", of(|_| ())),
                    case("open", of(|b| b.sealed = None)),
                ]
            },
            || {
                let mut flipped = of(|_| ());
                flipped[100] ^= 1;
                let bad = |name, bytes| refused(name, bytes, "no header");
                vec![
                    bad("empty", vec![]),
                    bad("zeros", vec![0; 256]),
                    bad("cut", of(|_| ())[..255].to_vec()),
                    bad("flipped", flipped),
                    bad("another-version", set(8, 2)),
                    bad("another-state", set(12, 3)),
                    bad("another-arena", set(16, 0)),
                    bad("another-place", of(|b| b.offset = PAGE)),
                    bad("no-room-for-itself", of(|b| b.block_len = 0)),
                    bad("beyond-the-arena", of(|b| b.block_len = 4 * PAGE)),
                    bad("half-a-page", of(|b| b.block_len += 1)),
                    bad(
                        "length-that-wraps",
                        of(|b| b.block_len = u64::MAX - PAGE + 1),
                    ),
                    bad("payload-beyond", of(|b| b.payload_len = 2 * PAGE + 1)),
                    bad("payload-endless", of(|b| b.payload_len = u64::MAX)),
                    bad("another-kind", set(160, 2)),
                    bad("range-backwards", set(192, 10)),
                ]
            },
        ),
        both(
            "arena-head",
            arena,
            || vec![case("head", header::encode_arena(ARENA, LEN))],
            || {
                let bad = |name, bytes: &[u8]| refused(name, bytes, "no arena");
                vec![
                    bad("empty", &[]),
                    bad("block", &of(|_| ())),
                    bad("another-length", &header::encode_arena(ARENA, LEN + PAGE)),
                ]
            },
        ),
    ]
}
