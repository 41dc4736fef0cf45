use super::*;
use crate::proto::v1::refusal::Reason;

pub(in crate::pool) fn request() -> v1::AttachRequest {
    let tensor = |name: &str, dtype: v1::DType, layers: &[u32], shape: &[u32]| v1::StateTensor {
        name: name.to_owned(),
        dtype: dtype.into(),
        layers: layers.to_vec(),
        shape: shape.to_vec(),
    };
    let layer = |layer| v1::KvLayer {
        layer,
        dtype: v1::DType::DtypeBf16.into(),
        heads: 2,
        k_head_dim: 8,
        v_head_dim: 8,
    };
    v1::AttachRequest {
        state: vec![
            tensor("conv.0", v1::DType::DtypeBf16, &[0, 1, 3], &[6, 3]),
            tensor("temporal", v1::DType::DtypeF32, &[0, 1, 3], &[2, 4, 5]),
        ],
        kv: vec![layer(2), layer(4)],
        layout: v1::PoolLayout::PerLayer.into(),
        page_size: 1,
        slots: 9,
        rows: 128,
        ..v1::AttachRequest::default()
    }
}

fn refused(change: impl FnOnce(&mut v1::AttachRequest)) -> GeometryError {
    let mut request = request();
    change(&mut request);
    Geometry::try_from(&request).unwrap_err()
}

#[test]
fn sizes_and_places() {
    let geometry = Geometry::try_from(&request()).unwrap();
    let [conv, temporal] = geometry.state_tensors() else {
        panic!("two tensors")
    };
    assert_eq!((conv.slot_bytes, conv.offset, conv.bytes), (36, 0, 108));
    assert_eq!(
        (temporal.slot_bytes, temporal.offset, temporal.bytes),
        (160, 108, 480)
    );
    assert_eq!(temporal.dims(), [3, 2, 4, 5]);
    assert_eq!(geometry.state_bytes(), 588);
    assert_eq!(geometry.kv_row_bytes(), 2 * 2 * 2 * 8 * 2);
    assert_eq!(geometry.kv_bytes(TokenRange { start: 5, end: 8 }), 3 * 128);
    let uniform = KvUniform {
        dtype: DType::BF16,
        layers: 2,
        heads: 2,
        head_dim: 8,
    };
    assert_eq!(geometry.kv_uniform(), Some(uniform));
}

#[test]
fn layers_that_differ_are_not_uniform() {
    for change in [
        |layer: &mut v1::KvLayer| layer.heads = 3,
        |layer: &mut v1::KvLayer| layer.dtype = v1::DType::DtypeF16.into(),
        |layer: &mut v1::KvLayer| layer.k_head_dim = 16,
        |layer: &mut v1::KvLayer| layer.v_head_dim = 0,
    ] {
        let mut request = request();
        change(&mut request.kv[1]);
        assert_eq!(Geometry::try_from(&request).unwrap().kv_uniform(), None);
    }
}

#[test]
fn tensors_without_elements_are_legal_but_not_all_of_them() {
    let mut request = request();
    request.state[0].shape = vec![0, u32::MAX, u32::MAX, u32::MAX];
    request.state[1].shape = vec![];
    let geometry = Geometry::try_from(&request).unwrap();
    assert_eq!(geometry.state_tensors()[0].bytes, 0);
    assert_eq!(geometry.state_bytes(), 12, "a scalar a layer");
    let no_state = refused(|request| {
        for tensor in &mut request.state {
            tensor.shape = vec![7, 0];
        }
    });
    assert_eq!(no_state, GeometryError::NoState);
    assert_eq!(
        refused(|request| request.state.clear()),
        GeometryError::NoState
    );
    assert_eq!(refused(|request| request.kv.clear()), GeometryError::NoKv);
    assert_eq!(
        refused(|request| request.kv.iter_mut().for_each(|layer| layer.heads = 0)),
        GeometryError::NoKv
    );
}

#[test]
fn products_that_overflow_are_refused() {
    let big = vec![u32::MAX; 3];
    assert!(matches!(
        refused(|r| r.state[0].shape = big),
        GeometryError::Overflow(_)
    ));
    // Fits one layer but not three.
    let shape = vec![1 << 31, 1 << 31];
    assert!(matches!(
        refused(|r| r.state[1].shape = shape),
        GeometryError::Overflow(_)
    ));
    assert!(matches!(
        refused(|r| {
            r.kv[0].dtype = v1::DType::DtypeF32.into();
            r.kv[0].heads = u32::MAX;
            r.kv[0].k_head_dim = u32::MAX;
        }),
        GeometryError::Overflow(_)
    ));
    // Each layer fits, the sum does not.
    assert!(matches!(
        refused(|r| {
            for layer in &mut r.kv {
                layer.dtype = v1::DType::DtypeU8.into();
                (layer.heads, layer.k_head_dim, layer.v_head_dim) = (u32::MAX, u32::MAX, 0);
            }
        }),
        GeometryError::Overflow(_)
    ));
}

#[test]
fn limits_hold_exactly() {
    let at_limit = |change: &dyn Fn(&mut v1::AttachRequest)| {
        let mut request = request();
        change(&mut request);
        Geometry::try_from(&request).map(|_| ())
    };
    let too_many = |result: Result<(), GeometryError>| matches!(result, Err(GeometryError::TooMany { have, most, .. }) if have > most);
    type Change = fn(&mut v1::AttachRequest, u32);
    let cases: [(&str, Change, u32); 6] = [
        ("tensors", tensors, 64),
        ("layers", |r, n| r.state[0].layers = (0..n).collect(), 1024),
        ("kv layers", kv_layers, 1024),
        ("rank", |r, n| r.state[0].shape = vec![1; n as usize], 8),
        ("state bytes", |r, n| state_bytes(r, n), 4 << 10),
        ("row bytes", |r, n| r.kv = vec![kv_bytes(n)], 1 << 10),
    ];
    for (what, change, limit) in cases {
        assert_eq!(at_limit(&|r| change(r, limit)), Ok(()), "{what}");
        assert!(too_many(at_limit(&|r| change(r, limit + 1))), "{what}");
    }

    fn tensors(request: &mut v1::AttachRequest, n: u32) {
        let one = request.state[0].clone();
        let named = |i| v1::StateTensor {
            name: format!("conv.{i}"),
            ..one.clone()
        };
        request.state = (0..n).map(named).collect();
    }

    fn kv_layers(request: &mut v1::AttachRequest, n: u32) {
        let numbered = |layer| v1::KvLayer {
            layer,
            ..request.kv[0]
        };
        request.kv = (0..n).map(numbered).collect();
    }

    /// `n` MiB.
    fn state_bytes(request: &mut v1::AttachRequest, n: u32) {
        request.state.truncate(1);
        request.state[0].layers = vec![5];
        request.state[0].shape = vec![n, 1 << 19];
    }

    /// `n` KiB a token.
    fn kv_bytes(n: u32) -> v1::KvLayer {
        let dtype = v1::DType::DtypeU8.into();
        v1::KvLayer {
            layer: 0,
            dtype,
            heads: n,
            k_head_dim: 1 << 10,
            v_head_dim: 0,
        }
    }
}

#[test]
fn names_are_short_plain_and_unique() {
    for name in [
        "",
        "Conv",
        "_pad.0",
        "a/b",
        "../x",
        "a\0b",
        "é",
        " a",
        "0a",
        &"a".repeat(65),
    ] {
        let error = refused(|request| request.state[0].name = name.to_owned());
        assert!(matches!(&error, GeometryError::Name(_)), "{name}");
        assert!(error.to_string().len() < 200);
    }
    let twice = refused(|request| request.state[0].name = "temporal".to_owned());
    assert_eq!(twice, GeometryError::Duplicate("temporal".to_owned()));
}

#[test]
fn layers_are_ascending_and_not_twice() {
    for layers in [vec![1, 1], vec![2, 1]] {
        let error = refused(|request| request.state[1].layers = layers);
        assert_eq!(error, GeometryError::LayerOrder("temporal".to_owned()));
    }
    assert!(matches!(
        refused(|request| request.kv[1].layer = 2),
        GeometryError::LayerOrder(_)
    ));
    assert!(matches!(
        refused(|request| request.kv.reverse()),
        GeometryError::LayerOrder(_)
    ));
    assert!(matches!(
        refused(|request| request.state[0].layers.clear()),
        GeometryError::NoLayers(_)
    ));
}

#[test]
fn unknown_things_have_their_own_refusal() {
    let error = refused(|request| request.unknown = vec!["window".repeat(100); 1000]);
    assert_eq!(error.reason(), Reason::UnknownPool);
    assert!(error.to_string().len() < 1000);
    let error = refused(|request| request.kv[0].dtype = 77);
    assert_eq!(error, GeometryError::DType(77));
    assert_eq!(error.reason(), Reason::BadGeometry);
}

#[test]
fn shards() {
    let shard = |attn_tp_size, attn_tp_rank| {
        Shard::try_from(v1::Shard {
            attn_tp_size,
            attn_tp_rank,
        })
    };
    assert_eq!(shard(2, 1), Ok(Shard { size: 2, rank: 1 }));
    for (size, rank) in [(0, 0), (1, 1), (2, u32::MAX)] {
        assert_eq!(shard(size, rank), Err(GeometryError::Shard { rank, size }));
    }
    assert!(matches!(
        shard(u32::MAX, 0),
        Err(GeometryError::TooMany { .. })
    ));
}

#[test]
fn json_round_trips_and_is_checked() {
    let geometry = Geometry::try_from(&request()).unwrap();
    let json = serde_json::to_value(&geometry).unwrap();
    assert_eq!(json["state"][1]["name"], "temporal");
    assert_eq!(
        serde_json::from_value::<Geometry>(json.clone()).unwrap(),
        geometry
    );
    let mut huge = json.clone();
    huge["state"][0]["shape"] = serde_json::json!([u32::MAX, u32::MAX, u32::MAX]);
    assert!(serde_json::from_value::<Geometry>(huge).is_err());
    let mut unknown = json;
    unknown["kv"][0]["scale"] = 1.into();
    assert!(serde_json::from_value::<Geometry>(unknown).is_err());
}
