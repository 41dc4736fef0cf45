//! What the engine says of itself when it attaches.

use std::collections::HashMap;

use uuid::Uuid;

use super::Config;
use super::talk::EPOCH;
use crate::engine::device_memory::DeviceMemory;
use crate::engine::model::Model;
use crate::engine::pools::{Dtype, Layout};
use crate::proto::channel::layout;
use crate::proto::{PROTOCOL, v1};

/// The architecture, for the fingerprint.
const ARCHITECTURE: &str = "EngramTinyHybrid";
/// Version of how [`crate::engine::pools`] packs.
const PACKING: u32 = 1;

/// The request of every attach of this engine.
pub(super) fn attach_request(
    config: &Config,
    model: &Model,
    device: &DeviceMemory,
) -> v1::AttachRequest {
    let (recurrent, attention) = model.config().layer_ids();
    let ids = |ids: &[usize]| ids.iter().map(|id| *id as u32).collect::<Vec<u32>>();
    let state = device
        .state
        .spec()
        .tensors
        .iter()
        .map(|tensor| v1::StateTensor {
            name: tensor.name.clone(),
            dtype: dtype(tensor.dtype).into(),
            layers: ids(&recurrent),
            shape: tensor.shape.iter().map(|dim| *dim as u32).collect(),
        });
    let spec = device.kv.spec();
    let kv = ids(&attention).into_iter().map(|layer| v1::KvLayer {
        layer,
        dtype: dtype(spec.dtype).into(),
        heads: spec.kv_heads as u32,
        k_head_dim: spec.head_dim as u32,
        v_head_dim: spec.head_dim as u32,
    });
    let layout = match device.kv.layout() {
        Layout::PerLayer => v1::PoolLayout::PerLayer,
        Layout::PageMajor => v1::PoolLayout::PageMajor,
    };
    let page_size = device.kv.page_size() as u64;
    let modes = config.modes.modes().into_iter().map(v1::TransferMode::from);
    v1::AttachRequest {
        protocol: PROTOCOL,
        channel_version: layout::VERSION,
        instance: Uuid::new_v4().into_bytes().to_vec().into(),
        shard: Some(v1::Shard {
            attn_tp_size: 1,
            attn_tp_rank: 0,
        }),
        model: Some(v1::ModelIdentity {
            architecture: ARCHITECTURE.to_owned(),
            // All of the shape is in the geometry; this names the kind of model.
            config_digest: blake3::hash(ARCHITECTURE.as_bytes())
                .as_bytes()
                .to_vec()
                .into(),
            weights_digest: model.digest().to_vec().into(),
            display_name: model.config().name.clone(),
            packing: PACKING,
        }),
        state: state.collect(),
        kv: kv.collect(),
        unknown: Vec::new(),
        ring: Some(v1::Ring {
            bytes: config.ring_bytes,
            device: v1::DeviceKind::Host.into(),
            device_uuid: Vec::new().into(),
            ipc_handle: Vec::new().into(),
            ipc_offset: 0,
        }),
        layout: layout.into(),
        page_size: page_size as u32,
        slots: u64::from(device.state.slots()) + 1,
        rows: (u64::from(device.kv.pages()) + 1) * page_size,
        boundary_grid: 0,
        modes: modes.map(i32::from).collect(),
        versions: HashMap::from([("engram".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]),
        epoch: EPOCH,
        token: config.token.clone().unwrap_or_default(),
        not_attaching: String::new(),
    }
}

fn dtype(dtype: Dtype) -> v1::DType {
    match dtype {
        Dtype::Bf16 => v1::DType::DtypeBf16,
        Dtype::F32 => v1::DType::DtypeF32,
    }
}
