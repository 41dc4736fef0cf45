//! The parser of what a worker says of itself. See `util::parser`.

use prost::Message as _;

use super::geometry::tests::request;
use super::{Geometry, PoolMap, Shard, fingerprint};
use crate::proto::v1;
use crate::util::parser::{Parser, Refused, case, refused, said};

/// All of them.
pub(crate) fn parsers() -> Vec<Parser> {
    vec![Parser {
        name: "attach",
        parse: attach,
        exact: false,
        seal: None,
        factor: 64,
        valid: || {
            vec![
                case("per-layer", valid(|_| ())),
                case("page-major", valid(|r| r.layout = 2)),
            ]
        },
        hostile,
    }]
}

fn attach(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut request = v1::AttachRequest::decode(bytes).map_err(said)?;
    let map = PoolMap::try_from(&request).map_err(said)?;
    let geometry = Geometry::try_from(&request).map_err(said)?;
    assert_eq!(map.geometry(), &geometry);
    let shard = Shard::try_from(request.shard.ok_or("no shard")?).map_err(said)?;
    let model = request.model.as_ref().ok_or("no model")?;
    fingerprint(model, &geometry, shard.size).map_err(said)?;
    // What was accepted can be computed with: the ends of the pools, and a little behind them.
    for slot in [0, map.slots().saturating_sub(1), map.slots(), u32::MAX] {
        let spans = map.state_spans(slot);
        assert_eq!(spans.is_ok(), slot < map.slots());
        let bytes: u64 = spans.into_iter().flatten().map(|span| span.len).sum();
        assert!(bytes == 0 || bytes == geometry.state_bytes());
    }
    for row in [0, map.rows().saturating_sub(1), map.rows(), u32::MAX] {
        assert_eq!(map.kv_spans(&[row]).is_ok(), row < map.rows());
    }
    // A map has no order.
    request.versions.clear();
    Ok(request.encode_to_vec())
}

fn valid(change: impl FnOnce(&mut v1::AttachRequest)) -> Vec<u8> {
    let mut request = v1::AttachRequest {
        shard: Some(v1::Shard {
            attn_tp_size: 2,
            attn_tp_rank: 1,
        }),
        model: Some(v1::ModelIdentity {
            architecture: "a".into(),
            config_digest: vec![1; 32].into(),
            weights_digest: vec![2; 32].into(),
            display_name: "m".into(),
            packing: 1,
        }),
        ..request()
    };
    change(&mut request);
    request.encode_to_vec()
}

fn hostile() -> Vec<Refused> {
    type Change = fn(&mut v1::AttachRequest);
    let all: [(&str, Change, &str); 22] = [
        ("nothing", |r| *r = v1::AttachRequest::default(), ""),
        (
            "unknown-pool",
            |r| r.unknown = vec!["index_k".into()],
            "index_k",
        ),
        (
            "many-tensors",
            |r| r.state = vec![r.state[0].clone(); 65],
            "state tensors",
        ),
        ("many-layers", |r| r.kv = vec![r.kv[0]; 1025], "KV layers"),
        (
            "many-dimensions",
            |r| r.state[0].shape = vec![1; 9],
            "dimensions",
        ),
        ("overflow", |r| r.state[0].shape = vec![u32::MAX; 8], ""),
        ("huge-state", |r| r.state[0].shape = vec![u32::MAX], ""),
        ("huge-row", |r| r.kv[0].heads = u32::MAX, ""),
        (
            "name-twice",
            |r| r.state[1].name = r.state[0].name.clone(),
            "",
        ),
        ("name-of-ours", |r| r.state[0].name = "_pad.0".into(), ""),
        ("name-path", |r| r.state[0].name = "../x".into(), ""),
        ("name-long", |r| r.state[0].name = "x".repeat(65), ""),
        ("dtype", |r| r.state[0].dtype = 999, ""),
        ("layout", |r| r.layout = -1, ""),
        ("page-0", |r| r.page_size = 0, ""),
        ("no-slots", |r| r.slots = 0, ""),
        ("endless-slots", |r| r.slots = u64::MAX, ""),
        ("endless-rows", |r| r.rows = u64::MAX, ""),
        ("no-shard", |r| r.shard = None, "no shard"),
        (
            "rank-beyond",
            |r| {
                r.shard = Some(v1::Shard {
                    attn_tp_size: 2,
                    attn_tp_rank: 2,
                })
            },
            "",
        ),
        (
            "many-shards",
            |r| {
                r.shard = Some(v1::Shard {
                    attn_tp_size: u32::MAX,
                    attn_tp_rank: 0,
                })
            },
            "shards",
        ),
        (
            "short-digest",
            |r| r.model.as_mut().unwrap().weights_digest = vec![1; 31].into(),
            "31 bytes",
        ),
    ];
    let mut bad: Vec<Refused> = all
        .into_iter()
        .map(|(name, change, why)| refused(name, valid(change), why))
        .collect();
    let unknown = |r: &mut v1::AttachRequest| {
        r.model.as_mut().unwrap().weights_digest = vec![0; 32].into();
    };
    bad.push(refused("unknown-weights", valid(unknown), "not known yet"));
    bad.push(refused("cut", &valid(|_| ())[..40], ""));
    bad
}
