use safetensors::{Dtype, SafeTensors};

use super::*;
use crate::{
    pool::{Geometry, GeometrySpec, StateSpec},
    store::sample,
};

fn file(geometry: &Geometry, kind: ObjectKind, range: TokenRange, shard: u32) -> Vec<u8> {
    let meta = sample::meta(geometry, kind, range, 3);
    meta.validate(Some(geometry)).unwrap();
    let plan = Plan::of(&meta, geometry);
    assert_eq!(plan.data_len, data_len(&meta));
    let tokens: Vec<u32> = (0..meta.token_count()).collect();
    let mut data = Vec::new();
    for part in &plan.parts {
        assert_eq!(part.offset, data.len() as u64);
        match part.what {
            What::Tokens => data.extend(token_bytes(&tokens)),
            What::Piece(index) => data.extend(sample::payload(3, shard, index, part.len)),
        }
        data.resize((part.offset + part.padded) as usize, 0);
    }
    let facts = facts(&plan, &data);
    let mut bytes = encode_header(&meta, &plan, shard, &facts);
    assert_eq!(decode_header(&bytes, &meta, &plan, shard).unwrap(), facts);
    assert_eq!(bytes.len() as u64 % ALIGN, 0);
    bytes.extend(data);
    bytes
}

fn facts(plan: &Plan, data: &[u8]) -> Facts {
    Facts {
        generation: Generation(3),
        tokens_crc: crc32c(&data[..plan.token_bytes() as usize]),
        checksums: data.chunks(CHUNK as usize).map(crc32c).collect(),
    }
}

const KV: TokenRange = TokenRange {
    start: 1000,
    end: 2100,
};

#[test]
fn a_state_is_a_safetensors_file() {
    let bytes = file(&sample::geometry(), ObjectKind::State, TokenRange::at(7), 1);
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let packed = sample::payload(3, 1, 0, sample::geometry().state_bytes());
    let conv = tensors.tensor("conv.0").unwrap();
    assert_eq!((conv.dtype(), conv.shape()), (Dtype::BF16, &[2, 3, 7][..]));
    assert_eq!(conv.data(), &packed[..84]);
    let temporal = tensors.tensor("temporal").unwrap();
    assert_eq!(temporal.shape(), [2, 4, 5, 6]);
    assert_eq!(temporal.data(), &packed[84..]);
}

#[test]
fn kv_is_a_safetensors_file() {
    let bytes = file(&sample::geometry(), ObjectKind::Kv, KV, 0);
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = tensors.tensor("tokens").unwrap();
    assert_eq!((tokens.dtype(), tokens.shape()), (Dtype::U32, &[1100][..]));
    assert_eq!(tokens.data()[4 * 1099..], 1099u32.to_le_bytes());
    for (index, (name, rows)) in [
        ("kv.1000-1024", 24),
        ("kv.1024-2048", 1024),
        ("kv.2048-2100", 52),
    ]
    .into_iter()
    .enumerate()
    {
        let piece = tensors.tensor(name).unwrap();
        assert_eq!(
            (piece.dtype(), piece.shape()),
            (Dtype::F16, &[2, 2, rows, 2, 4][..])
        );
        assert_eq!(piece.data(), sample::payload(3, 0, index, rows as u64 * 64));
        let offset = piece.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(offset % 4096, 0);
    }
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!(metadata["kind"], "kv");
    assert_eq!(metadata["range"], "1000-2100");
    let checksums: Vec<String> = serde_json::from_str(&metadata["checksums"]).unwrap();
    assert_eq!(checksums.len(), 1);

    let geometry = sample::geometry_of(8, 24);
    let bytes = file(&geometry, ObjectKind::Kv, KV, 0);
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let piece = tensors.tensor("kv.1024-2048").unwrap();
    assert_eq!(
        (piece.dtype(), piece.shape()),
        (Dtype::U8, &[24 * 1024][..])
    );
}

#[test]
fn tensors_without_elements_and_odd_lengths() {
    let mut spec = GeometrySpec::from(sample::geometry_of(12, 3));
    spec.state.push(StateSpec {
        name: "conv.0".into(),
        dtype: crate::pool::DType::U8,
        layers: vec![0, 1],
        shape: vec![5, 0],
    });
    let geometry = Geometry::new(spec).unwrap();
    for (kind, range) in [(ObjectKind::Kv, KV), (ObjectKind::State, TokenRange::at(5))] {
        let bytes = file(&geometry, kind, range, 0);
        SafeTensors::deserialize(&bytes).unwrap();
    }
}

#[test]
fn every_flipped_bit_of_a_header_is_found() {
    let geometry = sample::geometry();
    let meta = sample::meta(&geometry, ObjectKind::Kv, KV, 3);
    let plan = Plan::of(&meta, &geometry);
    let facts = facts(&plan, &vec![0; plan.data_len as usize]);
    let header = encode_header(&meta, &plan, 0, &facts);
    for bit in 0..header.len() * 8 {
        let mut bad = header.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let found = decode_header(&bad, &meta, &plan, 0).unwrap_err();
        assert_eq!(found.reason, Reason::Header, "bit {bit}");
    }
    for cut in 0..header.len() {
        assert!(decode_header(&header[..cut], &meta, &plan, 0).is_err());
    }
}

#[test]
fn a_whole_header_of_something_else_is_a_mismatch() {
    let geometry = sample::geometry();
    let meta = sample::meta(&geometry, ObjectKind::Kv, KV, 3);
    let plan = Plan::of(&meta, &geometry);
    let facts = facts(&plan, &vec![0; plan.data_len as usize]);
    let header = encode_header(&meta, &plan, 0, &facts);
    let reason = |change: &dyn Fn(&mut ObjectMeta)| {
        let mut other = meta.clone();
        change(&mut other);
        decode_header(&header, &other, &plan, 0).unwrap_err().reason
    };
    assert_eq!(reason(&|m| m.id.0[5] ^= 1), Reason::Mismatch);
    assert_eq!(reason(&|m| m.generation.0 += 1), Reason::Mismatch);
    assert_eq!(reason(&|m| m.fingerprint.0[0] ^= 1), Reason::Mismatch);
    assert_eq!(reason(&|m| m.namespace.0[0] ^= 1), Reason::Mismatch);
    assert_eq!(reason(&|m| m.shards += 1), Reason::Mismatch);
    assert_eq!(reason(&|m| m.range.end += 1), Reason::Mismatch);
    assert_eq!(reason(&|m| m.kind = ObjectKind::State), Reason::Mismatch);
    let other_shard = decode_header(&header, &meta, &plan, 1).unwrap_err();
    assert_eq!(other_shard.reason, Reason::Mismatch);
    let longer = Plan::of(&meta, &sample::geometry_of(4, 64));
    let other_plan = decode_header(&header, &meta, &longer, 0).unwrap_err();
    assert_eq!(other_plan.reason, Reason::Mismatch);
}

#[test]
fn checksums_of_parts_join() {
    let bytes = sample::payload(1, 0, 0, 10_000);
    for cut in [0, 1, 4096, 9_999, 10_000] {
        let (a, b) = bytes.split_at(cut);
        assert_eq!(
            crc32c_joined(crc32c(a), crc32c(b), b.len() as u64),
            crc32c(&bytes)
        );
    }
}
