//! The catalog: its records, and its log.

use super::id;
use crate::{
    store::catalog::{
        Owner, Row, RowKv, RowObject, TokenRun,
        frame::{self, Framed, HEADER, unframe},
        image::Image,
        record::{self, Record},
    },
    types::{Fingerprint, Generation, Millis, Namespace, ObjectId, TokenRange},
    util::parser::{Case, Refused, case, refused},
};

/// The epoch of the catalogs here.
const EPOCH: u64 = 77;
/// The number of the row of a record that stands alone.
const ORDINAL: u32 = 9;

pub(super) fn catalog_record(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    match record::decode(bytes).ok_or("no record")? {
        Record::Owner(owner) => record::encode_owner(&owner, &mut out),
        Record::Row(snapshot, body) => {
            let mut row = Row::blank();
            record::decode_row(snapshot, body, ORDINAL, &mut row).ok_or("no row")?;
            record::encode_row(&row, ORDINAL, &mut out);
        }
        Record::Drop { snapshot, stamp } => record::encode_drop(snapshot, stamp, &mut out),
        Record::Begin {
            fingerprint,
            object,
        } => record::encode_begin(&fingerprint, object, &mut out),
        Record::Gone { object } => record::encode_gone(&padded(object), &mut out),
        Record::Doubt { snapshot } => record::encode_doubt(snapshot, &mut out),
        Record::Stamp {
            fingerprint,
            folder,
            stamp,
        } => {
            record::encode_stamp(&fingerprint, folder, stamp, &mut out);
        }
    }
    Ok(out)
}

pub(super) fn padded(prefix: [u8; 8]) -> ObjectId {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&prefix);
    ObjectId(id)
}

pub(super) fn row(n: u8, base: Option<u32>) -> Row {
    let object = |n: u8| RowObject {
        object: ObjectId([n; 32]),
        generation: Generation(u64::from(n)),
        bytes: 8192,
    };
    let kv = |n, start, end, to| RowKv {
        object: object(n),
        range: TokenRange { start, end },
        object_range: TokenRange { start, end: to },
    };
    Row {
        snapshot: id(n),
        created: Millis(1 << 41),
        generation: Generation(9),
        boundary: 1500,
        manifest_bytes: 4096,
        base,
        shared: base.map_or(0, |_| 1),
        state: object(n),
        kv: vec![kv(n + 1, 0, 1024, 1024), kv(n + 2, 1024, 1500, 1600)],
        from: base.map_or(0, |_| 1500),
        runs: vec![TokenRun {
            offset: 1 << 40,
            len: 1500,
            first: 7,
            head: u32::MAX,
            crc: 5,
        }],
        digest: [8; 16],
        stamp: (-5, 999_999_999),
        ..Row::blank()
    }
}

pub(super) fn catalog_records() -> Vec<Case> {
    let record = |name, encode: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        encode(&mut out);
        case(name, out)
    };
    let owner = Owner {
        fingerprint: Fingerprint([1; 32]),
        namespace: Namespace {
            tenant: Some("t".into()),
            ..Namespace::default()
        },
        shards: 2,
        model: "m".into(),
    };
    let model = owner.fingerprint;
    vec![
        record("owner", &|out| record::encode_owner(&owner, out)),
        record("row", &|out| record::encode_row(&row(20, None), 0, out)),
        record("row-on-base", &|out| {
            record::encode_row(&row(30, Some(0)), 1, out)
        }),
        record("begin", &|out| record::encode_begin(&model, [4; 8], out)),
        record("gone", &|out| record::encode_gone(&ObjectId([4; 32]), out)),
        record("stamp", &|out| record::encode_stamp(&model, 3, (1, 2), out)),
        record("drop", &|out| {
            record::encode_drop(id(20), (i64::MIN, u32::MAX), out)
        }),
        record("doubt", &|out| record::encode_doubt(id(40), out)),
    ]
}

pub(super) fn bad_catalog_records() -> Vec<Refused> {
    let all = catalog_records();
    let of = |name: &str| {
        all.iter()
            .find(|(known, _)| known == name)
            .unwrap()
            .1
            .clone()
    };
    let behind = |name| [of(name), vec![0]].concat();
    let row_with = |change: &dyn Fn(&mut Row)| {
        let mut row = row(20, None);
        change(&mut row);
        let mut out = Vec::new();
        record::encode_row(&row, 0, &mut out);
        out
    };
    let id_end = 17;
    let endless = |at: usize| [&of("row")[..at], &[0xff; 12]].concat();
    // The last field but the runs: their number.
    let many_runs = [
        &row_with(&|row| row.runs.clear()),
        &[0xff, 0xff, 0xff, 0xff, 0x0f][..],
    ]
    .concat();
    let mut many_runs = many_runs;
    many_runs.remove(many_runs.len() - 6);
    vec![
        refused("empty", "", "no record"),
        refused("unknown-kind", [8, 0, 0], "no record"),
        refused("cut-owner", &of("owner")[..34], "no record"),
        refused(
            "owner-long-name",
            [&of("owner")[..34], &[0xff, 0xff, 0xff, 0xff, 0x0f]].concat(),
            "no record",
        ),
        refused("drop-and-more", behind("drop"), "no record"),
        refused("gone-and-more", behind("gone"), "no record"),
        refused("row-and-more", behind("row"), "no row"),
        refused("row-endless-number", endless(id_end), "no row"),
        refused("row-many-runs", many_runs, "no row"),
        refused("row-cut", &of("row")[..of("row").len() - 1], "no row"),
        refused(
            "base-before-all",
            {
                let mut out = Vec::new();
                let mut row = row(20, Some(0));
                row.kv.clear();
                record::encode_row(&row, 100, &mut out);
                out
            },
            "no row",
        ),
        refused(
            "kv-beyond-u32",
            row_with(&|row| {
                row.kv[0].range = TokenRange {
                    start: u32::MAX - 1,
                    end: u32::MAX,
                };
                row.kv[1].range = TokenRange { start: 0, end: 5 };
            }),
            "no row",
        ),
    ]
}

pub(super) fn catalog_of(records: Vec<Case>) -> Vec<u8> {
    let mut file = frame::header(EPOCH).to_vec();
    for (_, body) in records {
        let at = file.len() as u64;
        frame::frame(EPOCH, at, &body, &mut file);
    }
    file
}

pub(super) fn catalog_log(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let image = Image::parse(bytes.to_vec(), EPOCH).map_err(|stale| stale.as_str())?;
    let mut records = Vec::new();
    for owner in image.owners() {
        let mut out = Vec::new();
        record::encode_owner(owner, &mut out);
        records.push(case("", out));
    }
    let mut row = Row::blank();
    for number in 0..image.len() {
        assert!(image.row(number, &mut row), "a row that was taken is there");
        assert!(
            image
                .kv_of(number)
                .is_some_and(|kv| Some(kv.len() as u32) == image.kv_len(number))
        );
        let _ = image.runs_of(number);
        let mut out = Vec::new();
        record::encode_row(&row, number, &mut out);
        records.push(case("", out));
    }
    Ok(catalog_of(records))
}

/// Frames what the frames say that they hold anew, as far as their lengths lead.
pub(super) fn seal_log(bytes: &mut Vec<u8>) {
    let mut records = Vec::new();
    let mut rest = bytes.get(HEADER..).unwrap_or_default();
    while let Some((head, after)) = rest.split_first_chunk::<8>() {
        let [a, b, c, d, ..] = *head;
        let len = (u32::from_le_bytes([a, b, c, d]) as usize).min(after.len());
        records.push(case("", &after[..len]));
        rest = after.get(len + 4..).unwrap_or_default();
    }
    *bytes = catalog_of(records);
}

pub(super) fn bad_logs() -> Vec<Refused> {
    let whole = catalog_of(catalog_records());
    let first = HEADER;
    let mut version = whole.clone();
    version[8] = 9;
    let mut flipped = whole.clone();
    flipped[first + 20] ^= 4;
    let mut long = whole.clone();
    long[first..first + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let [owner, row, based, ..] = &catalog_records()[..] else {
        unreachable!()
    };
    let log = |records: &[&Case]| catalog_of(records.iter().map(|it| (*it).clone()).collect());
    assert!(matches!(unframe(EPOCH, &whole, first), Framed::Body(..)));
    vec![
        refused("empty", "", "damaged"),
        refused("another-version", version, "version"),
        refused("another-epoch", frame::header(EPOCH + 1), "damaged"),
        refused("flipped", flipped, "damaged"),
        refused("endless-frame", long, "damaged"),
        refused("row-without-owner", log(&[row]), "damaged"),
        refused("base-that-is-itself", log(&[owner, based]), "damaged"),
        refused("no-record", log(&[&case("", [99])]), "damaged"),
    ]
}
