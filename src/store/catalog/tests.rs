//! The bytes of the catalog against damage, and what is replayed from them.

use super::frame::{frame, header};
use super::record::{
    encode_begin, encode_doubt, encode_drop, encode_gone, encode_owner, encode_row,
};
use super::*;
use crate::store::catalog::image::Stale;
use crate::types::{Generation, Millis, Namespace, TokenRange};

const EPOCH: u64 = 0xfeed;
const MODEL: Fingerprint = Fingerprint([3; 32]);

/// A log under construction.
struct Pen(Vec<u8>);

impl Pen {
    fn new() -> Self {
        let mut pen = Self(header(EPOCH).to_vec());
        pen.write(|body| {
            let owner = Owner {
                fingerprint: MODEL,
                namespace: Namespace::default(),
                shards: 2,
                model: "m".into(),
            };
            encode_owner(&owner, body);
        });
        pen
    }

    fn write(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let mut body = Vec::new();
        encode(&mut body);
        let at = self.0.len() as u64;
        frame(EPOCH, at, &body, &mut self.0);
    }

    fn image(&self) -> Image {
        Image::parse(self.0.clone(), EPOCH).unwrap()
    }
}

fn id(n: u8) -> SnapshotId {
    SnapshotId::from_bytes([n; 16])
}

fn object(n: u8) -> RowObject {
    RowObject {
        object: ObjectId([n; 32]),
        generation: Generation(u64::from(n)),
        bytes: 8192,
    }
}

fn kv(n: u8, start: u32, end: u32) -> RowKv {
    let range = TokenRange { start, end };
    RowKv {
        object: object(n),
        range,
        object_range: range,
    }
}

fn run(offset: u64, len: u32) -> TokenRun {
    TokenRun {
        offset,
        len,
        first: 1,
        head: 2,
        crc: 3,
    }
}

fn row(n: u8, base: Option<u32>, shared: u32, kv: Vec<RowKv>) -> Row {
    let (from, boundary) = (kv[0].range.start, kv.last().unwrap().range.end);
    Row {
        snapshot: id(n),
        created: Millis(u64::from(n)),
        generation: Generation(7),
        boundary,
        manifest_bytes: 4096,
        base,
        shared,
        state: object(n + 100),
        from: if base.is_some() { from } else { 0 },
        runs: vec![run(
            u64::from(n) * 1000,
            boundary - if base.is_some() { from } else { 0 },
        )],
        kv,
        stamp: (1_000, u32::from(n)),
        ..Row::blank()
    }
}

/// Three turns and a branch, the second turn gone, and what goes with saves and deletes.
fn story() -> Pen {
    let mut pen = Pen::new();
    pen.write(|body| encode_begin(&MODEL, [1; 8], body));
    let first = row(1, None, 0, vec![kv(1, 0, 100)]);
    let second = row(2, Some(0), 1, vec![kv(2, 100, 200), kv(3, 200, 250)]);
    let third = row(3, Some(1), 3, vec![kv(4, 250, 300)]);
    let branch = row(4, Some(1), 2, vec![kv(5, 200, 220)]);
    for (number, row) in (0..).zip([first, second, third, branch]) {
        pen.write(|body| encode_row(&row, number, body));
    }
    pen.write(|body| encode_drop(id(2), (2_000, 5), body));
    pen.write(|body| encode_gone(&ObjectId([102; 32]), body));
    pen.write(|body| encode_begin(&MODEL, [77; 8], body));
    pen
}

#[test]
fn rows_stand_on_those_that_are_gone() {
    let image = story().image();
    assert_eq!(image.snapshots(), 3);
    assert_eq!(image.numbers().collect::<Vec<_>>(), [0, 2, 3]);
    let objects = |number| -> Vec<u8> {
        let kv = image.kv_of(number).unwrap();
        kv.iter().map(|part| part.object.object.0[0]).collect()
    };
    assert_eq!(objects(0), [1]);
    assert_eq!(objects(2), [1, 2, 3, 4]);
    assert_eq!(objects(3), [1, 2, 5]);
    assert_eq!(image.kv_len(2), Some(4));
    let offsets = |number| -> Vec<u64> {
        let runs = image.runs_of(number);
        runs.iter().map(|run| run.offset).collect()
    };
    assert_eq!(offsets(2), [1000, 2000, 3000]);
    // Its tokens do not start where those of its base end: nobody knows where all of them stand.
    assert!(offsets(3).is_empty());
    let mut maybe: Vec<u8> = image.maybe.keys().map(|prefix| prefix[0]).collect();
    maybe.sort_unstable();
    // What the second turn alone had, but for its state, and what was begun.
    assert_eq!(maybe, [2, 3, 77]);
    assert_eq!(image.stamps[&(MODEL, 2)], (2_000, 5));
}

#[test]
fn a_manifest_that_vanished_or_is_in_doubt_has_no_row() {
    let mut pen = story();
    pen.write(|body| encode_doubt(id(3), body));
    let mut image = pen.image();
    assert!(image.doubts.contains(&id(3)));
    assert!(!image.is_live(2));
    image.vanished(&id(1));
    assert_eq!(image.numbers().collect::<Vec<_>>(), [3]);
    // Written again, it is as good as any.
    pen.write(|body| encode_row(&row(3, Some(0), 1, vec![kv(6, 100, 130)]), 4, body));
    let image = pen.image();
    assert!(image.doubts.is_empty() && image.is_live(4));
}

#[test]
fn any_changed_bit_is_found() {
    let Pen(bytes) = story();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            let parsed = Image::parse(bad, EPOCH);
            assert!(parsed.is_err(), "byte {at} bit {bit}");
        }
    }
    assert_eq!(Image::parse(bytes, EPOCH + 1).unwrap_err(), Stale::Damaged);
}

#[test]
fn a_torn_end_leaves_what_was_before_it() {
    let whole = story();
    let frames = {
        let (mut at, mut ends) = (frame::HEADER, vec![frame::HEADER]);
        while let frame::Framed::Body(_, next) = frame::unframe(EPOCH, &whole.0, at) {
            at = next;
            ends.push(at);
        }
        ends
    };
    for cut in frame::HEADER..whole.0.len() {
        let image = Image::parse(whole.0[..cut].to_vec(), EPOCH).unwrap();
        let end = *frames.iter().rev().find(|end| **end <= cut).unwrap();
        assert_eq!(image.end(), end as u64);
        let same = Image::parse(whole.0[..end].to_vec(), EPOCH).unwrap();
        assert_eq!(
            image.numbers().collect::<Vec<_>>(),
            same.numbers().collect::<Vec<_>>()
        );
    }
    for cut in 0..frame::HEADER {
        assert!(Image::parse(whole.0[..cut].to_vec(), EPOCH).is_err());
    }
}

#[test]
fn another_version_is_not_read() {
    let Pen(mut bytes) = story();
    bytes[8] = 2;
    assert_eq!(Image::parse(bytes, EPOCH).unwrap_err(), Stale::Version);
}

#[test]
fn rows_that_lie_about_their_base_are_refused() {
    for (base, shared) in [(Some(0), 2), (None, 1)] {
        let mut pen = Pen::new();
        pen.write(|body| encode_row(&row(1, None, 0, vec![kv(1, 0, 100)]), 0, body));
        pen.write(|body| encode_row(&row(2, base, shared, vec![kv(2, 100, 200)]), 1, body));
        assert_eq!(Image::parse(pen.0, EPOCH).unwrap_err(), Stale::Damaged);
    }
}
