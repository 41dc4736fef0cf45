//! What a worker for tests says of itself.

use super::fake::RING;
use crate::proto::channel::layout;
use crate::proto::{PROTOCOL, v1};
use crate::service::Peer;

/// How a model differs from the usual one.
#[derive(Clone, Default)]
pub struct Variant {
    pub weights: u8,
    pub page_size: u32,
    pub kv_dtype: Option<v1::DType>,
    pub instance: Option<[u8; 16]>,
    /// Rank and size; none: the only one.
    pub rank: Option<(u32, u32)>,
}

pub fn attach_request(variant: &Variant) -> v1::AttachRequest {
    let instance = variant
        .instance
        .unwrap_or_else(|| *uuid::Uuid::new_v4().as_bytes());
    let tensor = |name: &str, dtype: v1::DType, shape: &[u32]| v1::StateTensor {
        name: name.into(),
        dtype: dtype.into(),
        layers: vec![0, 2],
        shape: shape.to_vec(),
    };
    let kv = |layer| v1::KvLayer {
        layer,
        dtype: variant.kv_dtype.unwrap_or(v1::DType::DtypeBf16).into(),
        heads: 2,
        k_head_dim: 8,
        v_head_dim: 8,
    };
    v1::AttachRequest {
        protocol: PROTOCOL,
        channel_version: layout::VERSION,
        instance: instance.to_vec().into(),
        shard: Some(v1::Shard {
            attn_tp_size: variant.rank.map_or(1, |(_, size)| size),
            attn_tp_rank: variant.rank.map_or(0, |(rank, _)| rank),
        }),
        model: Some(v1::ModelIdentity {
            architecture: "test".into(),
            config_digest: vec![1; 32].into(),
            weights_digest: vec![variant.weights + 1; 32].into(),
            display_name: "a model".into(),
            packing: 1,
        }),
        state: vec![
            tensor("conv.0", v1::DType::DtypeBf16, &[8, 3]),
            tensor("temporal", v1::DType::DtypeF32, &[4, 8]),
        ],
        kv: vec![kv(1), kv(3)],
        unknown: vec![],
        ring: Some(v1::Ring {
            bytes: RING,
            device: v1::DeviceKind::Host.into(),
            ..v1::Ring::default()
        }),
        layout: v1::PoolLayout::PerLayer.into(),
        page_size: variant.page_size.max(1),
        slots: 16,
        rows: 4096,
        boundary_grid: 256,
        modes: vec![v1::TransferMode::Ipc.into()],
        versions: [("engine".into(), "0".into())].into(),
        epoch: 1,
        token: String::new(),
        not_attaching: String::new(),
    }
}

pub fn own_peer() -> Peer {
    Peer::Unix {
        uid: nix::unistd::geteuid().as_raw(),
        pid: Some(1),
    }
}
