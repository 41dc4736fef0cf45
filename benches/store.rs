//! Bytes a second through the tiers, beside what the machine itself does with the same bytes: a copy in
//! memory, a plain file written and fsynced, a plain file read.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    hint::black_box,
    io::{Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use bytesize::ByteSize;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use engram::{
    device::shm::SharedMap,
    pool::{DType, Geometry, GeometrySpec, KvLayer, StateSpec},
    store::{
        Arena, Config, DiskConfig, Encoding, Object, ObjectMeta, RamTier, Store, Tier, pieces,
    },
    types::{Fingerprint, Generation, Namespace, ObjectId, ObjectKind, TokenRange},
    util::clock::SystemClock,
};

const MODEL: Fingerprint = Fingerprint([1; 32]);
/// A state as large as that of a real model, and KV of 4096 tokens.
const STATE_BYTES: u32 = 57 << 20;
const ROW: u32 = 16 << 10;
const TOKENS: u32 = 4096;

fn geometry() -> Geometry {
    Geometry::new(GeometrySpec {
        state: vec![StateSpec {
            name: "temporal".into(),
            dtype: DType::F32,
            layers: vec![0],
            shape: vec![STATE_BYTES / 4],
        }],
        kv: vec![KvLayer {
            layer: 1,
            dtype: DType::BF16,
            heads: 8,
            k_head_dim: ROW / 32,
            v_head_dim: ROW / 32,
        }],
    })
    .unwrap()
}

fn object(arena: &Arena, geometry: &Geometry, kind: ObjectKind, number: u64) -> Object {
    let range = match kind {
        ObjectKind::State => TokenRange::at(TOKENS),
        ObjectKind::Kv => TokenRange {
            start: 0,
            end: TOKENS,
        },
    };
    let meta = ObjectMeta {
        id: ObjectId(*blake3::hash(&number.to_le_bytes()).as_bytes()),
        kind,
        range,
        fingerprint: MODEL,
        namespace: Namespace::default().id(),
        generation: Generation(1),
        shards: 1,
        pieces: pieces(geometry, kind, range),
        encoding: Encoding::Raw,
    };
    let segments = meta.pieces.iter().map(|piece| {
        let segment = arena.alloc(piece.bytes).unwrap();
        segment
            .map()
            .fill(segment.offset(), piece.bytes, number as u8)
            .unwrap();
        Arc::new(segment)
    });
    let segments = segments.collect();
    Object {
        tokens: (0..meta.token_count()).collect(),
        meta: Arc::new(meta),
        shards: vec![segments],
    }
}

fn open(path: &Path) -> Store {
    let config = Config {
        ram: ByteSize::mib(512),
        ram_headroom: None,
        disk: Some(DiskConfig {
            min_free: ByteSize::b(0),
            ..DiskConfig::at(path.join("store"))
        }),
    };
    let store = config.build(Arc::new(SystemClock::new())).unwrap();
    let manifests = store.manifests.as_ref().unwrap();
    manifests.scan(&mut |_| {}).unwrap();
    let disk = store.disk.as_ref().unwrap();
    disk.register_model(MODEL, &geometry(), BTreeMap::new())
        .unwrap();
    store
}

/// Time of `timed` alone, with `before` and `after` around each run.
fn time<T>(
    runs: u64,
    mut before: impl FnMut(u64) -> T,
    mut timed: impl FnMut(&T),
    mut after: impl FnMut(T),
) -> Duration {
    let mut total = Duration::ZERO;
    for run in 0..runs {
        let input = before(run);
        let start = Instant::now();
        timed(&input);
        total += start.elapsed();
        after(input);
    }
    total
}

fn tiers(c: &mut Criterion) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = open(folder.path());
    let disk = store.disk.as_ref().unwrap();
    let geometry = geometry();
    for kind in ObjectKind::ALL {
        let sample = object(&store.arena, &geometry, kind, 0);
        let mut group = c.benchmark_group(format!("store/{kind}"));
        group
            .sample_size(10)
            .throughput(Throughput::Bytes(sample.bytes()));

        let to = object(&store.arena, &geometry, kind, 1);
        group.bench_function("memcpy", |b| {
            b.iter(|| {
                let pairs = sample
                    .shards
                    .iter()
                    .flatten()
                    .zip(to.shards.iter().flatten());
                for (from, to) in pairs {
                    from.map()
                        .copy(from.offset(), to.map(), to.offset(), from.len())
                        .unwrap();
                }
            });
        });
        drop(to);

        group.bench_function(BenchmarkId::new("put", "ram"), |b| {
            b.iter_custom(|runs| {
                time(
                    runs,
                    |_| RamTier::new(1 << 30),
                    |tier| {
                        tier.put(&sample).unwrap();
                    },
                    drop,
                )
            });
        });
        let ram = RamTier::new(1 << 30);
        ram.put(&sample).unwrap();
        group.bench_function(BenchmarkId::new("get", "ram"), |b| {
            b.iter(|| black_box(ram.get(&sample.meta.id, &store.arena).unwrap()));
        });

        group.bench_function(BenchmarkId::new("put", "disk"), |b| {
            b.iter_custom(|runs| {
                time(
                    runs,
                    |_| (),
                    |()| {
                        disk.put(&sample).unwrap();
                    },
                    |()| {
                        disk.remove(&sample.meta.id).unwrap();
                    },
                )
            });
        });
        disk.put(&sample).unwrap();
        group.bench_function(BenchmarkId::new("get", "disk"), |b| {
            b.iter(|| black_box(disk.get(&sample.meta.id, &store.arena).unwrap()));
        });
        disk.remove(&sample.meta.id).unwrap();

        let bytes = vec![7; sample.bytes() as usize];
        let path = folder.path().join("plain");
        group.bench_function("plain file, write and fsync", |b| {
            b.iter_custom(|runs| {
                time(
                    runs,
                    |_| (),
                    |()| {
                        let mut file = File::create(&path).unwrap();
                        file.write_all(&bytes).unwrap();
                        file.sync_all().unwrap();
                    },
                    |()| fs::remove_file(&path).unwrap(),
                )
            });
        });
        fs::write(&path, &bytes).unwrap();
        let map = SharedMap::anonymous(sample.bytes()).unwrap();
        let direct = File::options()
            .read(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(&path);
        if let Ok(file) = direct {
            group.bench_function("plain file, direct read", |b| {
                b.iter(|| map.pread_exact(&file, 0, 0, map.len()).unwrap());
            });
        }
        let mut read = Vec::with_capacity(bytes.len());
        group.bench_function("plain file, read from page cache", |b| {
            b.iter(|| {
                read.clear();
                File::open(&path).unwrap().read_to_end(&mut read).unwrap();
            });
        });
        group.finish();
    }
}

criterion_group!(benches, tiers);
criterion_main!(benches);
