use super::super::frame::{Framed, HEADER, frame, header, unframe};
use super::*;

fn row() -> Row {
    let object = |n: u8, generation| RowObject {
        object: ObjectId([n; 32]),
        generation: Generation(generation),
        bytes: 8192 * u64::from(n),
    };
    let kv = |n, start, end, to| RowKv {
        object: object(n, 7),
        range: TokenRange { start, end },
        object_range: TokenRange { start, end: to },
    };
    Row {
        snapshot: SnapshotId::new(),
        owner: 3,
        created: Millis(1 << 41),
        generation: Generation(9),
        boundary: 1500,
        manifest_bytes: 4096,
        base: Some(5),
        shared: 2,
        state: object(1, 9),
        kv: vec![kv(2, 1000, 1024, 1024), kv(3, 1024, 1500, 1600)],
        from: 1000,
        runs: vec![TokenRun {
            offset: 1 << 40,
            len: 500,
            first: 7,
            head: u32::MAX,
            crc: 5,
        }],
        digest: [8; 16],
        stamp: (-5, 999_999_999),
    }
}

#[test]
fn a_row_comes_back_as_it_was() {
    let row = row();
    let mut body = Vec::new();
    encode_row(&row, 7, &mut body);
    let Some(Record::Row(snapshot, bytes)) = decode(&body) else {
        panic!("a row");
    };
    let mut back = Row::blank();
    decode_row(snapshot, bytes, 7, &mut back).unwrap();
    assert_eq!(back, row);
    assert!(body.len() < 220, "{} bytes", body.len());
    // A base before the first row.
    assert_eq!(decode_row(snapshot, bytes, 1, &mut back), None);
}

#[test]
fn a_frame_belongs_to_its_place() {
    let mut file = header(77).to_vec();
    for body in [&b"one"[..], b"", b"three"] {
        let at = file.len() as u64;
        frame(77, at, body, &mut file);
    }
    let Framed::Body(b"one", next) = unframe(77, &file, HEADER) else {
        panic!("the first");
    };
    assert!(matches!(unframe(77, &file, next), Framed::Body(b"", _)));
    assert_eq!(unframe(77, &file, file.len()), Framed::End);
    assert_eq!(unframe(76, &file, HEADER), Framed::Bad);
    for at in HEADER..file.len() {
        for bit in 0..8 {
            let mut bad = file.clone();
            bad[at] ^= 1 << bit;
            let mut place = HEADER;
            let end = loop {
                match unframe(77, &bad, place) {
                    Framed::Body(_, next) => place = next,
                    end => break end,
                }
            };
            assert_eq!(end, Framed::Bad, "byte {at} bit {bit}");
        }
        let mut place = HEADER;
        while let Framed::Body(_, next) = unframe(77, &file[..at], place) {
            place = next;
        }
        assert!(place <= at);
    }
}
