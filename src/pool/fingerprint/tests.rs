use std::collections::HashSet;

use super::*;
use crate::pool::{PoolMap, geometry::tests::request};

fn attach() -> v1::AttachRequest {
    let model = v1::ModelIdentity {
        architecture: "hybrid".to_owned(),
        config_digest: vec![1; 32].into(),
        weights_digest: vec![2; 32].into(),
        display_name: "a model".to_owned(),
        packing: PACKING,
    };
    let shard = v1::Shard {
        attn_tp_size: 2,
        attn_tp_rank: 0,
    };
    v1::AttachRequest {
        model: Some(model),
        shard: Some(shard),
        ..request()
    }
}

fn fingerprint_of(request: &v1::AttachRequest) -> Result<Fingerprint, IdentityError> {
    let map = PoolMap::try_from(request).unwrap();
    let size = request.shard.unwrap().attn_tp_size;
    fingerprint(request.model.as_ref().unwrap(), map.geometry(), size)
}

fn model(request: &mut v1::AttachRequest) -> &mut v1::ModelIdentity {
    request.model.as_mut().unwrap()
}

type Change = fn(&mut v1::AttachRequest);

#[test]
fn every_part_of_the_identity_changes_it() {
    let changes: &[(&str, Change)] = &[
        ("architecture", |r| model(r).architecture.push('x')),
        ("configuration", |r| {
            model(r).config_digest = vec![9; 32].into()
        }),
        ("weights", |r| model(r).weights_digest = vec![9; 32].into()),
        ("shards", |r| r.shard.as_mut().unwrap().attn_tp_size = 4),
        ("state role", |r| r.state[0].name = "conv.1".to_owned()),
        ("state type", |r| {
            r.state[0].dtype = v1::DType::DtypeF16.into()
        }),
        ("state layer", |r| r.state[0].layers[2] = 5),
        ("state layers", |r| r.state[0].layers.truncate(2)),
        ("state shape", |r| r.state[0].shape[0] = 7),
        ("state shape, same bytes", |r| r.state[0].shape = vec![3, 6]),
        ("state rank, same bytes", |r| r.state[0].shape = vec![18]),
        ("state order", |r| r.state.reverse()),
        ("state tensors", |r| r.state.truncate(1)),
        ("KV type", |r| r.kv[0].dtype = v1::DType::DtypeF16.into()),
        ("KV layer", |r| r.kv[0].layer = 1),
        ("KV layers", |r| r.kv.truncate(1)),
        ("KV heads", |r| r.kv[1].heads = 4),
        ("KV heads, same bytes", |r| {
            for layer in &mut r.kv {
                (layer.heads, layer.k_head_dim, layer.v_head_dim) = (4, 4, 4);
            }
        }),
        ("K", |r| r.kv[1].k_head_dim = 4),
        ("V", |r| r.kv[1].v_head_dim = 4),
        ("K and V, same bytes", |r| {
            (r.kv[1].k_head_dim, r.kv[1].v_head_dim) = (12, 4);
        }),
    ];
    let mut seen = HashSet::from([fingerprint_of(&attach()).unwrap()]);
    for (what, change) in changes {
        let mut request = attach();
        change(&mut request);
        assert!(seen.insert(fingerprint_of(&request).unwrap()), "{what}");
    }
}

#[test]
fn nothing_else_changes_it() {
    let changes: &[(&str, Change)] = &[
        ("display name", |r| {
            model(r).display_name = "another".to_owned()
        }),
        ("rank", |r| r.shard.as_mut().unwrap().attn_tp_rank = 1),
        ("layout", |r| r.layout = v1::PoolLayout::PageMajor.into()),
        ("page size", |r| r.page_size = 64),
        ("slots", |r| r.slots = 1000),
        ("rows", |r| r.rows = 1 << 20),
        ("grid", |r| r.boundary_grid = 256),
        ("ring", |r| {
            r.ring = Some(v1::Ring {
                bytes: 1,
                ..v1::Ring::default()
            })
        }),
        ("instance", |r| r.instance = vec![3; 16].into()),
        ("versions", |r| {
            r.versions.insert("sglang".to_owned(), "0.5.23".to_owned());
        }),
        ("epoch", |r| r.epoch = 9),
        ("modes", |r| r.modes = vec![1, 2]),
        ("token", |r| r.token = "secret".to_owned()),
        ("protocol", |r| r.protocol = 1001),
    ];
    let base = fingerprint_of(&attach()).unwrap();
    for (what, change) in changes {
        let mut request = attach();
        change(&mut request);
        assert_ne!(request, attach(), "{what}");
        assert_eq!(fingerprint_of(&request).unwrap(), base, "{what}");
    }
}

#[test]
fn an_identity_that_says_too_little_is_refused() {
    let refused = |change: Change| {
        let mut request = attach();
        change(&mut request);
        fingerprint_of(&request).unwrap_err()
    };
    assert_eq!(
        refused(|r| model(r).architecture.clear()),
        IdentityError::Architecture(0)
    );
    assert_eq!(
        refused(|r| model(r).architecture = "x".repeat(2000)),
        IdentityError::Architecture(2000)
    );
    assert_eq!(
        refused(|r| model(r).config_digest.clear()),
        IdentityError::Digest {
            what: "configuration",
            len: 0
        }
    );
    assert_eq!(
        refused(|r| model(r).weights_digest = vec![2; 33].into()),
        IdentityError::Digest {
            what: "weights",
            len: 33
        }
    );
    assert_eq!(
        refused(|r| model(r).weights_digest = vec![0; 32].into()),
        IdentityError::UnknownWeights
    );
    assert_eq!(refused(|r| model(r).packing = 0), IdentityError::Packing(0));
    assert_eq!(refused(|r| model(r).packing = 2), IdentityError::Packing(2));
}

/// Fingerprints are on disk: they may only change with the tag.
#[test]
fn fingerprints_are_fixed() {
    let mut bytes = Vec::new();
    let text = |bytes: &mut Vec<u8>, text: &[u8]| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text);
    };
    let numbers = |bytes: &mut Vec<u8>, numbers: &[u32]| {
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    };
    text(&mut bytes, b"engram.fingerprint.1");
    text(&mut bytes, b"hybrid");
    text(&mut bytes, &[1; 32]);
    text(&mut bytes, &[2; 32]);
    numbers(&mut bytes, &[1, 2]);
    numbers(&mut bytes, &[2]);
    text(&mut bytes, b"conv.0");
    text(&mut bytes, b"BF16");
    numbers(&mut bytes, &[3, 0, 1, 3, 2, 6, 3]);
    text(&mut bytes, b"temporal");
    text(&mut bytes, b"F32");
    numbers(&mut bytes, &[3, 0, 1, 3, 3, 2, 4, 5]);
    numbers(&mut bytes, &[2]);
    for layer in [2, 4] {
        text(&mut bytes, b"BF16");
        numbers(&mut bytes, &[4, layer, 2, 8, 8]);
    }
    assert_eq!(
        fingerprint_of(&attach()).unwrap().0,
        *blake3::hash(&bytes).as_bytes()
    );
}
