//! Pairs that are right, and many that are not.

use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors};

use super::*;
use crate::pool::{DType, Geometry, GeometrySpec, KvLayer, StateSpec, cut};
use crate::store::disk::object_file::crc32c;
use crate::store::sample;
use crate::types::{Millis, Namespace, SnapshotId, TokenRange};

const BOUNDARY: u32 = 1500;

fn bundle(geometry: Geometry, shards: u32) -> Bundle {
    let mut bundle = Bundle::of(
        (SnapshotId::new(), sample::MODEL),
        (geometry, shards),
        (Namespace::default(), BOUNDARY),
        [Millis(5), Millis(6)],
    );
    bundle.names.conversation = Some("c".into());
    bundle
}

/// Every byte of a part follows from the part.
fn fill(part: &Part) -> Vec<u8> {
    let seed = match part.what {
        What::Tokens => 1,
        What::State { shard } => 100 + u64::from(shard),
        What::Kv { shard, block } => 1000 + u64::from(shard) * 7919 + u64::from(block.start),
    };
    let byte = |at: u64| (at.wrapping_mul(31).wrapping_add(seed) >> 3) as u8;
    (0..part.len).map(byte).collect()
}

fn file(bundle: &mut Bundle) -> Vec<u8> {
    let layout = Layout::of(bundle).unwrap();
    let mut bytes = Vec::new();
    let mut out = Outgoing::new(|chunk: Vec<u8>| {
        bytes.extend_from_slice(&chunk);
        Ok::<(), ()>(())
    });
    out.write(&layout.header(bundle)).unwrap();
    for part in &layout.parts {
        out.part(part, &fill(part)).unwrap();
    }
    (bundle.file_bytes, bundle.checksums) = out.finish().unwrap();
    assert_eq!(bundle.file_bytes, layout.file_bytes(bundle));
    bytes
}

/// Gives a file the checksums of its bytes.
fn seal(bundle: &mut Bundle, bytes: &[u8]) {
    bundle.file_bytes = bytes.len() as u64;
    let chunks = bytes.chunks(CHUNK as usize);
    bundle.checksums = chunks
        .map(|chunk| format!("{:08x}", crc32c(chunk)))
        .collect();
}

fn verified(bundle: &Bundle, bytes: &[u8]) -> Result<(), BundleError> {
    verify(bundle, bytes, &mut |_| {})
}

/// Two layers that are not alike, one without V.
fn uneven() -> Geometry {
    let layer = |layer, dtype, k_head_dim, v_head_dim| KvLayer {
        layer,
        dtype,
        heads: 1,
        k_head_dim,
        v_head_dim,
    };
    Geometry::new(GeometrySpec {
        state: vec![StateSpec {
            name: "temporal".into(),
            dtype: DType::F32,
            layers: vec![0, 2],
            shape: vec![3, 5],
        }],
        kv: vec![layer(1, DType::BF16, 12, 0), layer(3, DType::U8, 6, 10)],
    })
    .unwrap()
}

#[test]
fn any_library_reads_the_tensors() {
    let mut bundle = bundle(sample::geometry(), 2);
    let bytes = file(&mut bundle);
    let found = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| {
        let tensor = found.tensor(name).unwrap();
        (tensor.dtype(), tensor.shape().to_vec())
    };
    assert_eq!(tensor("tokens"), (Dtype::U32, vec![1500]));
    for rank in 0..2 {
        let of = |name: &str| tensor(&format!("rank.{rank}.{name}"));
        assert_eq!(of("state.conv.0"), (Dtype::BF16, vec![2, 3, 7]));
        assert_eq!(of("state.temporal"), (Dtype::F32, vec![2, 4, 5, 6]));
        assert_eq!(of("kv.0-1024"), (Dtype::F16, vec![2, 2, 1024, 2, 4]));
        assert_eq!(of("kv.1024-1500"), (Dtype::F16, vec![2, 2, 476, 2, 4]));
    }
    let names = found.names();
    let real = names.iter().filter(|name| !name.starts_with("_pad."));
    assert_eq!(real.count(), 1 + 2 * 4);
    for (name, tensor) in found.iter().filter(|(name, _)| name.starts_with("_pad.")) {
        assert!(tensor.data().iter().all(|byte| *byte == 0), "{name}");
    }
    let parts: Vec<Part> = Layout::of(&bundle).unwrap().parts;
    let block = parts
        .iter()
        .find(|part| matches!(part.what, What::Kv { shard: 1, block } if block.start == 1024));
    let there = found.tensor("rank.1.kv.1024-1500").unwrap();
    assert_eq!(there.data(), fill(block.unwrap()));
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let said = header.metadata().clone().unwrap();
    assert_eq!(said["format"], "engram.snapshot");
    assert_eq!(said["boundary"], "1500");
}

#[test]
fn layers_that_are_not_alike_have_tensors_of_their_own() {
    let mut bundle = bundle(uneven(), 1);
    let bytes = file(&mut bundle);
    verified(&bundle, &bytes).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| {
        let tensor = found.tensor(name).unwrap();
        (tensor.dtype(), tensor.shape().to_vec())
    };
    assert_eq!(
        tensor("rank.0.kv.1024-1500.1.k"),
        (Dtype::BF16, vec![476, 1, 12])
    );
    assert_eq!(
        tensor("rank.0.kv.1024-1500.3.k"),
        (Dtype::U8, vec![476, 1, 6])
    );
    assert_eq!(
        tensor("rank.0.kv.1024-1500.3.v"),
        (Dtype::U8, vec![476, 1, 10])
    );
    assert!(found.tensor("rank.0.kv.1024-1500.1.v").is_err());
}

#[test]
fn what_goes_out_comes_in() {
    let mut bundle = bundle(sample::geometry(), 3);
    let bytes = file(&mut bundle);
    let read = Bundle::decode(&bundle.encode().unwrap()).unwrap();
    assert_eq!(read, bundle);
    let layout = Layout::of(&read).unwrap();
    let mut incoming = Incoming::open(&read, &layout, &bytes[..]).unwrap();
    for part in &layout.parts {
        let mut there = Vec::new();
        let mut take = |at: u64, bytes: &[u8]| {
            assert_eq!(at, there.len() as u64);
            there.extend_from_slice(bytes);
        };
        incoming.part(part, &mut take).unwrap();
        assert!(there == fill(part), "{part:?}");
    }
    incoming.finish().unwrap();
}

/// Finds text in the header and replaces it by as many bytes.
fn edit(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let len = from.len();
    let at = bytes.windows(len).position(|text| text == from.as_bytes());
    let at = at.unwrap_or_else(|| panic!("{from} is not in the header"));
    bytes[at..at + len].copy_from_slice(to.as_bytes());
}

/// What is done to a pair; whether its checksums are those of the changed bytes; what is said then.
type Case = (
    &'static str,
    fn(&mut Bundle, &mut Vec<u8>),
    bool,
    &'static str,
);

#[rustfmt::skip] // One case a line.
const CASES: &[Case] = &[
    ("flipped bit of a state", |_, b| b[9000] ^= 1, false, "chunk 0 of 1"),
    ("flipped bit of the header", |_, b| b[100] ^= 1, false, "chunk 0 of 1"),
    ("flipped bit of the length", |_, b| b[0] ^= 1, false, "chunk 0 of 1"),
    ("cut in the data", |_, b| b.truncate(b.len() - 1), false, "end after"),
    ("cut in the header", |_, b| b.truncate(50), false, "end after 50"),
    ("empty", |_, b| b.clear(), false, "end after 0"),
    ("one byte more", |_, b| b.push(0), false, "more behind"),
    ("another chunk more", |_, b| b.extend(vec![0; CHUNK as usize]), false, "more behind"),
    ("shorter, and said so", |_, b| b.truncate(b.len() - 4096), true, "are not the"),
    ("longer, and said so", |_, b| b.extend([0; 4096]), true, "are not the"),
    ("a header of 2^64 - 1 bytes", |_, b| b[..8].fill(0xff), true, "claims"),
    ("a header of 2^63 bytes", |_, b| b[7] = 0x80, true, "claims"),
    ("a header of no bytes", |_, b| b[..8].fill(0), true, "are not the"),
    ("a header that is no JSON", |_, b| b[8] = b'[', true, "header"),
    ("a header that is no UTF-8", |_, b| b[20] = 0xff, true, "header"),
    ("another dtype of the same size", |_, b| edit(b, "\"BF16\"", "\"I16\" "), true, "dtype I16"),
    ("an unknown dtype", |_, b| edit(b, "\"BF16\"", "\"BF17\""), true, "header"),
    ("another shape of the same size", |_, b| edit(b, "[2, 3, 7]", "[3, 2, 7]"), true, "shape"),
    ("a shape that overflows", |_, b| edit(b, "[2, 4, 5, 6]", "[9999999999]"), true, "header"),
    ("overlapping offsets", |_, b| edit(b, "[8192,8276]", "[8191,8275]"), true, "header"),
    ("offsets beyond the end", |_, b| edit(b, "[8192,8276]", "[8192,9999]"), true, "header"),
    ("backward offsets", |_, b| edit(b, "[8192,8276]", "[8276,8192]"), true, "header"),
    ("another name", |_, b| edit(b, "state.conv.0", "state.conv.1"), true, "missing"),
    ("a name twice", |_, b| edit(b, "_pad.1", "_pad.0"), true, "header"),
    ("another boundary", |_, b| edit(b, "\"boundary\":\"1500\"", "\"boundary\":\"1501\""), true, "boundary"),
    ("another encoding", |_, b| edit(b, "\"encoding\":\"raw\"", "\"encoding\":\"zip\""), true, "encoding"),
    ("padding that is not zero", |_, b| { let at = b.len() - 1; b[at] = 1; }, true, "padding"),
    ("a boundary beyond the file", |d, _| d.boundary = u32::MAX, false, "header"),
    ("too many shards for a file", |d, _| d.shards = 1000, false, "are not the"),
    ("more tensors than may be", |d, _| (d.shards, d.boundary) = (1024, u32::MAX), false, "too many"),
];

#[test]
fn every_bad_file_is_refused() {
    for (what, change, sealed, said) in CASES {
        let mut bundle = bundle(sample::geometry(), 1);
        let mut bytes = file(&mut bundle);
        verified(&bundle, &bytes).unwrap();
        change(&mut bundle, &mut bytes);
        if *sealed {
            seal(&mut bundle, &bytes);
        }
        let error = verified(&bundle, &bytes).expect_err(what).to_string();
        assert!(error.contains(said), "{what}: {error}");
    }
}

#[test]
fn every_bad_description_is_refused() {
    type Change = fn(&mut Bundle);
    let cases: &[(&str, Change)] = &[
        ("format", |d| d.format = "x".into()),
        ("tokens", |d| d.boundary = 0),
        ("shards", |d| d.shards = 0),
        ("shards", |d| d.shards = 1025),
        ("chunks of", |d| d.chunk_bytes = 0),
        ("bytes of tensors", |d| d.file_bytes = u64::MAX),
        ("checksums", |d| d.file_bytes += CHUNK),
        ("checksums", |d| d.checksums.clear()),
        ("checksum", |d| d.checksums[0] = "0".into()),
        ("checksum", |d| d.checksums[0] = "zzzzzzzz".into()),
        ("turns", |d| d.names.turn = Some(0)),
        ("ends before", |d| d.names.total_tokens = Some(1499)),
        ("name", |d| d.names.conversation = Some(String::new())),
        ("name", |d| d.names.branches = vec![String::new()]),
        ("name", |d| d.names.branches = vec!["x".into(); 5000]),
        ("words", |d| {
            d.model.insert("x".repeat(20_000), String::new());
        }),
    ];
    for (said, change) in cases {
        let mut bundle = bundle(sample::geometry(), 1);
        file(&mut bundle);
        change(&mut bundle);
        let error = bundle.encode().expect_err(said).to_string();
        assert!(error.contains(said), "{said}: {error}");
    }
    let mut whole = bundle(sample::geometry(), 1);
    file(&mut whole);
    let bytes = whole.encode().unwrap();
    for at in (0..bytes.len()).step_by(7) {
        let mut bad = bytes.clone();
        bad[at] ^= 4;
        assert!(Bundle::decode(&bad).is_err(), "byte {at}");
        assert!(Bundle::decode(&bytes[..at]).is_err(), "cut at {at}");
    }
    whole.encoding = "zip".into();
    let error = Bundle::decode(&whole.encode().unwrap()).unwrap_err();
    assert!(matches!(error, BundleError::Encoding { .. }), "{error}");
    let text = String::from_utf8(bytes).unwrap();
    let newer = text.replace("\"format_version\":1", "\"format_version\":2");
    let error = Bundle::decode(newer.as_bytes()).unwrap_err();
    let version = matches!(error, BundleError::Version { found: 2, known: 1 });
    assert!(version, "{error}");
}

/// KV of tokens, each row of which follows from its token.
fn kv(geometry: &Geometry, range: TokenRange) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (layer, it) in (0_u64..).zip(geometry.kv_layers()) {
        for (half, row) in [it.k_row(), it.v_row()].into_iter().enumerate() {
            for token in range.start..range.end {
                let seed = layer * 77 + half as u64 * 13 + u64::from(token) * 5;
                bytes.extend((0..row).map(|at| (seed + at * 3) as u8));
            }
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn kv_cut_anywhere_gives_the_same_blocks(
        cuts in prop::collection::btree_set(1..2600_u32, 0..6),
        alike in any::<bool>(),
    ) {
        let geometry = if alike { sample::geometry() } else { uneven() };
        let mut cuts: Vec<u32> = cuts.into_iter().collect();
        cuts.push(2600);
        let mut start = 0;
        let mut pieces = Vec::new();
        for end in cuts {
            pieces.extend(cut(TokenRange { start, end }));
            start = end;
        }
        for block in cut(TokenRange { start: 0, end: 2600 }) {
            let mut bytes = vec![0; geometry.kv_bytes(block) as usize];
            for piece in &pieces {
                let from = kv(&geometry, *piece);
                copy_rows(&geometry, block, (&from, *piece), (&mut bytes, block));
            }
            prop_assert!(bytes == kv(&geometry, block), "{block}");
        }
    }

    #[test]
    fn any_bytes_in_a_header_are_refused_or_harmless(
        at in 0..4096_usize,
        with in prop::collection::vec(any::<u8>(), 1..40),
    ) {
        let mut bundle = bundle(sample::geometry(), 1);
        let whole = file(&mut bundle);
        let mut bytes = whole.clone();
        let end = (at + with.len()).min(4096);
        bytes[at..end].copy_from_slice(&with[..end - at]);
        seal(&mut bundle, &bytes);
        if verified(&bundle, &bytes).is_ok() {
            // Spaces may be other spaces.
            prop_assert_eq!(&bytes[4096..], &whole[4096..]);
        }
    }
}
