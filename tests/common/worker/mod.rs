//! A worker inside a test. Its pools are functions of the tokens: every byte that comes back is checked.
//!
//! It attaches over gRPC, passes its ring and speaks over the channel, as an inference server does;
//! and as it is ours, it can also lie.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engram::device::Doorbell;
use engram::device::shm::SharedMap;
use engram::proto::channel::WorkerEnd;
use engram::proto::channel::layout::{self, CloseReason, DeclineReason, Finish, Outcome, Piece};
use engram::proto::channel::layout::{RequestFlags, Status, Tier};
use engram::proto::channel::msg::*;
use engram::proto::handshake::{self, HandshakeError, self_test_byte};
use engram::proto::{PROTOCOL, v1};
use engram::types::TransferMode;
use uuid::Uuid;

mod restore;
mod save;
mod talk;

use super::daemon::Daemon;
use super::{MODE, PATIENCE};

/// Half open, in tokens.
pub type Range = std::ops::Range<u32>;

/// Bytes of the staging ring.
pub const RING: u64 = 4 << 20;

/// How a panic begins when the daemon's process is gone.
pub const GONE: &str = "the daemon is gone";

/// Tokens of a whole block.
pub const BLOCK: u32 = 1024;

/// A model, as far as the daemon sees it.
#[derive(Clone, Debug)]
pub struct Model {
    /// Tells its weights, and the bytes of its states, from those of others.
    pub weights: u8,
    /// Shape of `temporal` in one of its two layers.
    pub temporal: [u32; 2],
    /// Element type of `temporal`.
    pub temporal_dtype: v1::DType,
    /// Heads of 8 numbers of 2 bytes, in each of the two attention layers.
    pub heads: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Layout of its pools.
    pub layout: v1::PoolLayout,
    /// Slots and rows of its pools.
    pub capacity: (u64, u64),
    /// Attention tensor-parallel size.
    pub tp: u32,
    /// How its bytes move.
    pub mode: TransferMode,
    /// The server that it belongs to.
    pub instance: [u8; 16],
}

/// An attached worker.
pub struct Worker {
    /// The channel.
    pub end: WorkerEnd,
    /// The channel's memory.
    pub channel: Arc<SharedMap>,
    /// What the daemon reaches: the staging ring, or its window. Nothing here needs another ring.
    pub ring: Arc<SharedMap>,
    /// Its session.
    pub session: [u8; 16],
    /// What its states are interchangeable with.
    pub fingerprint: [u8; 32],
    /// Weight epoch of its requests.
    pub epoch: u64,
    /// Its model.
    pub model: Model,
    bell: Doorbell,
    connection: UnixStream,
    inbox: VecDeque<Down>,
    next: u64,
    at: u64,
}

/// What became of an offer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SaveEnd {
    /// Nothing was wanted.
    Declined(DeclineReason),
    /// KV that was wanted, and the snapshot.
    Saved(Vec<Range>, Uuid),
    /// It ended otherwise.
    Failed(Status),
}

/// What a restore brought.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Got {
    /// Tokens restored.
    pub boundary: u32,
    /// Pieces of KV.
    pub parts: Vec<Range>,
    /// Lowest tier that bytes came from.
    pub tier: Tier,
    /// Bytes that moved.
    pub bytes: u64,
}

/// Who shares with whom.
#[derive(Clone, Default, Debug)]
pub struct Names<'a> {
    /// The conversation that the client names.
    pub session_id: Option<&'a str>,
    /// Part of the namespace.
    pub tenant: Option<&'a str>,
    /// Part of the namespace.
    pub extra_key: Option<&'a str>,
    /// Part of the namespace.
    pub cache_salt: Option<&'a str>,
    /// Part of the namespace.
    pub adapter: Option<[u8; 32]>,
}

// === impl Model ===

impl Default for Model {
    fn default() -> Model {
        Model {
            weights: 0,
            temporal: [4, 8],
            temporal_dtype: v1::DType::DtypeF32,
            heads: 2,
            page_size: 1,
            layout: v1::PoolLayout::PerLayer,
            capacity: (16, 1 << 20),
            tp: 1,
            mode: MODE,
            instance: *Uuid::new_v4().as_bytes(),
        }
    }
}

impl Model {
    /// A model whose states and KV are large: 64 KiB of state, 4 KiB of KV a token.
    pub fn large() -> Model {
        Model {
            temporal: [64, 128],
            heads: 64,
            ..Model::default()
        }
    }

    /// Bytes of one state: two layers of a window of 8 x 3 x 2 bytes, and of `temporal`.
    pub fn state_bytes(&self) -> u64 {
        let [a, b] = self.temporal.map(u64::from);
        let element = match self.temporal_dtype {
            v1::DType::DtypeF32 => 4,
            _ => 2,
        };
        2 * 8 * 3 * 2 + 2 * a * b * element
    }

    /// Bytes of the KV of one token: K and V of two layers.
    pub fn row_bytes(&self) -> u64 {
        2 * 2 * self.half_row()
    }

    /// Bytes of K, or of V, of one token in one layer.
    fn half_row(&self) -> u64 {
        u64::from(self.heads) * 8 * 2
    }

    /// What it says of itself.
    pub fn request(&self) -> v1::AttachRequest {
        let tensor = |name: &str, dtype: v1::DType, shape: &[u32]| v1::StateTensor {
            name: name.into(),
            dtype: dtype.into(),
            layers: vec![0, 2],
            shape: shape.to_vec(),
        };
        let kv = |layer| v1::KvLayer {
            layer,
            dtype: v1::DType::DtypeBf16.into(),
            heads: self.heads,
            k_head_dim: 8,
            v_head_dim: 8,
        };
        let model = v1::ModelIdentity {
            architecture: "test".into(),
            config_digest: vec![1; 32].into(),
            weights_digest: vec![self.weights + 1; 32].into(),
            display_name: format!("model-{}", self.weights),
            packing: 1,
        };
        let ring = v1::Ring {
            bytes: RING,
            device: v1::DeviceKind::Host.into(),
            ..v1::Ring::default()
        };
        v1::AttachRequest {
            protocol: PROTOCOL,
            channel_version: layout::VERSION,
            instance: self.instance.to_vec().into(),
            shard: Some(v1::Shard {
                attn_tp_size: self.tp,
                attn_tp_rank: 0,
            }),
            model: Some(model),
            state: vec![
                tensor("conv.0", v1::DType::DtypeBf16, &[8, 3]),
                tensor("temporal", self.temporal_dtype, &self.temporal),
            ],
            kv: vec![kv(1), kv(3)],
            unknown: vec![],
            ring: Some(ring),
            layout: self.layout.into(),
            page_size: self.page_size,
            slots: self.capacity.0,
            rows: self.capacity.1,
            boundary_grid: 256,
            modes: vec![v1::TransferMode::from(self.mode).into()],
            versions: [("engine".into(), "0".into())].into(),
            epoch: 1,
            token: String::new(),
            not_attaching: String::new(),
        }
    }

    /// The packed state after all of `tokens`.
    pub fn state(&self, tokens: &[u32]) -> Vec<u8> {
        let last = *digests(self.weights, tokens).last().unwrap();
        let mut out = vec![0; self.state_bytes() as usize];
        noise(last ^ 0x57a7e, &mut out);
        out
    }

    /// The packed KV of a range.
    pub fn kv(&self, tokens: &[u32], range: &Range) -> Vec<u8> {
        let digests = digests(self.weights, &tokens[..range.end as usize]);
        let row = self.half_row() as usize;
        let mut out = vec![0; range.len() * row * 4];
        let places = out.chunks_mut(range.len() * row).zip(0..);
        for (rows, place) in places {
            let tokens = &digests[range.start as usize..];
            for (row, digest) in rows.chunks_mut(row).zip(tokens) {
                noise(digest.wrapping_add(place << 56), row);
            }
        }
        out
    }

    /// Rows `used` of the packed piece `part` must be those of the tokens.
    fn check_kv(&self, tokens: &[u32], part: &Range, used: &Range, got: &[u8]) {
        let digests = digests(self.weights, &tokens[..used.end as usize]);
        let size = self.half_row() as usize;
        let mut row = vec![0; size];
        for place in 0..4_u64 {
            for token in used.clone() {
                let index = place as usize * part.len() + (token - part.start) as usize;
                noise(digests[token as usize].wrapping_add(place << 56), &mut row);
                let got = &got[index * size..][..size];
                assert!(got == row, "foreign KV of token {token} in {part:?}");
            }
        }
    }
}

// === impl Worker: attaching ===

/// Attach over gRPC alone.
pub fn attach(socket: &Path, request: v1::AttachRequest) -> Result<v1::Attached, v1::Refusal> {
    use v1::attach_response::Result as Answer;

    let response = grpc(socket, |mut client| async move {
        client.attach(request).await.unwrap().into_inner()
    });
    match response.result.unwrap() {
        Answer::Attached(attached) => Ok(attached),
        Answer::Refusal(refusal) => Err(refusal),
    }
}

/// Calls the daemon's `Worker` service.
pub fn grpc<F: Future>(
    socket: &Path,
    call: impl FnOnce(v1::worker_client::WorkerClient<tonic::transport::Channel>) -> F,
) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let place = format!("unix:{}", socket.display());
        let endpoint = tonic::transport::Endpoint::from_shared(place).unwrap();
        let channel = endpoint.timeout(PATIENCE).connect().await.unwrap();
        call(v1::worker_client::WorkerClient::new(channel)).await
    })
}

/// A ring with the pattern of the self-test in it.
pub fn ring() -> SharedMap {
    let (ring, _) = SharedMap::create("ring", RING).unwrap();
    let pattern: Vec<u8> = (0..layout::HANDSHAKE_SELF_TEST_BYTES)
        .map(self_test_byte)
        .collect();
    ring.write(0, &pattern).unwrap();
    ring
}

/// The handshake alone.
pub fn shake(
    attached: &v1::Attached,
    secret: &[u8],
    ring: Option<BorrowedFd>,
) -> Result<handshake::Passed, HandshakeError> {
    let session = attached.session.as_ref().try_into().unwrap();
    let secret = secret.try_into().unwrap();
    let path = Path::new(&attached.fd_socket);
    handshake::connect(path, session, secret, ring, PATIENCE)
}

impl Worker {
    /// A worker of the usual model.
    pub fn attach(daemon: &Daemon) -> Worker {
        Worker::attach_as(daemon, &Model::default())
    }

    /// A worker of this model.
    pub fn attach_as(daemon: &Daemon, model: &Model) -> Worker {
        let attached = attach(&daemon.grpc_socket(), model.request()).unwrap();
        let ring = ring();
        let passed = shake(&attached, &attached.secret, Some(ring.fd().as_fd())).unwrap();
        Worker::from_parts(&attached, passed, ring, model)
    }

    /// A worker of what attach and handshake gave.
    pub fn from_parts(
        attached: &v1::Attached,
        passed: handshake::Passed,
        ring: SharedMap,
        model: &Model,
    ) -> Worker {
        let mut answer = vec![0; layout::HANDSHAKE_SELF_TEST_BYTES as usize];
        ring.read(0, &mut answer).unwrap();
        let turned = answer
            .iter()
            .zip(0..)
            .all(|(byte, i)| !byte == self_test_byte(i));
        assert!(
            turned,
            "the daemon did not prove that it can write the ring"
        );
        assert_eq!(passed.mode, model.mode);
        let channel = SharedMap::open(passed.channel, passed.channel_bytes).unwrap();
        let channel = Arc::new(channel);
        Worker {
            end: WorkerEnd::open(&channel).unwrap(),
            channel,
            ring: Arc::new(ring),
            session: attached.session.as_ref().try_into().unwrap(),
            fingerprint: attached.fingerprint.as_ref().try_into().unwrap(),
            epoch: 1,
            model: model.clone(),
            bell: passed.doorbell,
            connection: passed.connection,
            inbox: VecDeque::new(),
            next: 1,
            at: 0,
        }
    }

    /// Dies: its connection closes, and nothing more is said.
    pub fn die(self) {
        drop(self.connection);
    }
}

/// Ranges from pairs.
pub fn ranges(pairs: &[u32]) -> Vec<Range> {
    pairs.chunks(2).map(|pair| pair[0]..pair[1]).collect()
}

/// A range cut at multiples of the block size.
pub fn blocks(range: Range) -> Vec<Range> {
    let first = range.start / BLOCK;
    let cuts = (first..).map(|i| (i * BLOCK).max(range.start)..((i + 1) * BLOCK).min(range.end));
    cuts.take_while(|cut| cut.start < range.end).collect()
}

/// Tokens of a made-up conversation. Other seeds give other tokens.
pub fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (i ^ seed.wrapping_mul(2_654_435_761)).wrapping_mul(747_796_405))
        .collect()
}

/// A number for each token that depends on all tokens up to it.
fn digests(seed: u8, tokens: &[u32]) -> Vec<u64> {
    let mut digest = 0xcbf2_9ce4_8422_2325 ^ u64::from(seed);
    let next = |token: &u32| {
        digest = (digest ^ u64::from(*token))
            .wrapping_mul(0x0100_0000_01b3)
            .rotate_left(23);
        digest
    };
    tokens.iter().map(next).collect()
}

/// Fills `out` with bytes that follow from the seed.
fn noise(seed: u64, out: &mut [u8]) {
    for (word, i) in out.chunks_mut(8).zip(1_u64..) {
        let mut x = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
    }
}
