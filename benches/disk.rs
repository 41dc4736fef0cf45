//! Sequential reads and writes of the disk tier, by either engine, beside the disk itself: plain files
//! read and written with O_DIRECT by one thread and by several.
//!
//! ```text
//! cargo bench --bench disk -- [FOLDER] [ROUNDS]
//! ```
//!
//! Disks are not equally fast all the time, so every round does everything once, in an order thrown
//! by dice, and what is compared is the ratio within a round: the tier's bytes a second to those of the
//! faster plain way. FOLDER (default: the build's temporary one) says which disk; it must not refuse
//! O_DIRECT. What the tier does beyond the plain file is in its time: checksums of all chunks, rename
//! and fsync of the folder when it writes; opening, its header and verification when it reads.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bytesize::ByteSize;
use engram::{
    device::shm::SharedMap,
    pool::{DType, Geometry, GeometrySpec, KvLayer, StateSpec},
    store::{
        Arena, Config, DiskConfig, DiskTier, Encoding, IoEngine, Object, ObjectMeta, Store, Tier,
        pieces,
    },
    types::{Fingerprint, Generation, Namespace, ObjectId, ObjectKind, TokenRange},
    util::clock::SystemClock,
};

const MODEL: Fingerprint = Fingerprint([1; 32]);
/// A state of 57 MiB, KV of 256 MiB.
const STATE_BYTES: u32 = 57 << 20;
const ROW: u32 = 16 << 10;
const TOKENS: u32 = 16 << 10;
/// Bytes of one system call of the plain ways.
const BLOCK: u64 = 4 << 20;
const THREADS: usize = 4;

/// One way to move the bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Way {
    PlainOne,
    PlainMany,
    Threads,
    Uring,
}

const WAYS: [Way; 4] = [Way::PlainOne, Way::PlainMany, Way::Threads, Way::Uring];

/// A plain file and memory as large.
struct Plain {
    path: PathBuf,
    map: SharedMap,
}

// === impl Way ===

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::PlainOne => "plain O_DIRECT, 1 thread",
            Self::PlainMany => "plain O_DIRECT, 4 threads",
            Self::Threads => "tier, `threads`",
            Self::Uring => "tier, `io_uring`",
        }
    }
}

// === impl Plain ===

impl Plain {
    fn open(&self, write: bool) -> File {
        File::options()
            .read(true)
            .write(write)
            .create(write)
            .truncate(false)
            .custom_flags(nix::libc::O_DIRECT)
            .open(&self.path)
            .expect("a file that takes O_DIRECT")
    }

    fn each_block(&self, threads: usize, moved: impl Fn(u64, u64) + Sync) {
        let (len, step) = (self.map.len(), threads as u64 * BLOCK);
        thread::scope(|scope| {
            for thread in 0..threads as u64 {
                let moved = &moved;
                scope.spawn(move || {
                    let mut at = thread * BLOCK;
                    while at < len {
                        moved(at, BLOCK.min(len - at));
                        at += step;
                    }
                });
            }
        });
    }

    fn read(&self, threads: usize) {
        let file = self.open(false);
        self.each_block(threads, |at, len| {
            self.map.pread_exact(&file, at, at, len).expect("a read");
        });
    }

    /// As durable as the tier's: the file, then its name.
    fn write(&self, threads: usize) {
        let file = self.open(true);
        self.each_block(threads, |at, len| {
            self.map.pwrite_all(&file, at, at, len).expect("a write");
        });
        file.sync_all().expect("an fsync");
        let named = self.path.with_extension("named");
        fs::rename(&self.path, &named).expect("a rename");
        let folder = self.path.parent().expect("a folder");
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .expect("an fsync");
        fs::rename(named, &self.path).expect("a rename");
    }
}

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
    .expect("a geometry")
}

fn object(arena: &Arena, kind: ObjectKind) -> Object {
    let range = match kind {
        ObjectKind::State => TokenRange::at(TOKENS),
        ObjectKind::Kv => TokenRange {
            start: 0,
            end: TOKENS,
        },
    };
    let meta = ObjectMeta {
        id: ObjectId([kind as u8 + 1; 32]),
        kind,
        range,
        fingerprint: MODEL,
        namespace: Namespace::default().id(),
        generation: Generation(1),
        shards: 1,
        pieces: pieces(&geometry(), kind, range),
        encoding: Encoding::Raw,
    };
    let segments = meta.pieces.iter().zip(1_u8..).map(|(piece, fill)| {
        let segment = arena.alloc(piece.bytes).expect("room");
        let (at, len) = (segment.offset(), piece.bytes);
        segment.map().fill(at, len, fill).expect("its bytes");
        Arc::new(segment)
    });
    let segments = segments.collect();
    Object {
        tokens: (0..meta.token_count()).collect(),
        meta: Arc::new(meta),
        shards: vec![segments],
    }
}

fn open(path: PathBuf, io_engine: IoEngine) -> Store {
    let config = Config {
        ram: ByteSize::mib(1024),
        ram_headroom: None,
        disk: Some(DiskConfig {
            min_free: ByteSize::b(0),
            io_engine,
            ..DiskConfig::at(path)
        }),
    };
    let store = config.build(Arc::new(SystemClock::new())).expect("a store");
    let manifests = store.manifests.as_ref().expect("a disk");
    manifests.scan(&mut |_| {}).expect("an empty folder");
    let disk = store.disk.as_ref().expect("a disk");
    disk.register_model(MODEL, &geometry(), BTreeMap::new())
        .expect("a model");
    assert_eq!(disk.engine(), io_engine, "the host refuses it");
    store
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Times of a write and of a read of the same bytes.
fn both(way: Way, plain: &Plain, stores: [&Store; 2], object: &Object) -> [Duration; 2] {
    let id = &object.meta.id;
    let tier = |store: &Store| -> [Duration; 2] {
        let disk: &DiskTier = store.disk.as_ref().expect("a disk");
        let write = timed(|| {
            disk.put(object).expect("a write");
        });
        let mut got = None;
        let read = timed(|| got = disk.get(id, &store.arena).ok());
        assert!(got.is_some());
        disk.remove(id).expect("it is there");
        [write, read]
    };
    let file = |threads: usize| -> [Duration; 2] {
        let write = timed(|| plain.write(threads));
        let read = timed(|| plain.read(threads));
        fs::remove_file(&plain.path).expect("it is there");
        [write, read]
    };
    match (way, stores) {
        (Way::PlainOne, _) => file(1),
        (Way::PlainMany, _) => file(THREADS),
        (Way::Threads, [threads, _]) => tier(threads),
        (Way::Uring, [_, uring]) => tier(uring),
    }
}

/// Least, median and most.
fn spread(mut all: Vec<f64>) -> [f64; 3] {
    all.sort_by(f64::total_cmp);
    let at = |part: usize| all.get((all.len() - 1) * part / 2).copied();
    [0, 1, 2].map(|part| at(part).unwrap_or_default())
}

fn measure(folder: &Path, kind: ObjectKind, rounds: usize) {
    let stores = [IoEngine::Threads, IoEngine::Uring]
        .map(|engine| open(folder.join(engine.as_str()), engine));
    let objects = stores.each_ref().map(|store| object(&store.arena, kind));
    let [threads, uring] = &stores;
    let bytes = objects[0].bytes();
    let plain = Plain {
        path: folder.join("plain"),
        map: SharedMap::anonymous(bytes.next_multiple_of(4096)).expect("memory"),
    };
    plain.map.fill(0, plain.map.len(), 7).expect("its bytes");
    let mut all: BTreeMap<Way, Vec<[Duration; 2]>> = BTreeMap::new();
    let mut dice = 1_u64;
    for round in 0..=rounds {
        let mut order = WAYS;
        order.sort_by_cached_key(|_| {
            dice = dice.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            dice >> 32
        });
        for way in order {
            let of = usize::from(way == Way::Uring);
            let times = both(way, &plain, [threads, uring], &objects[of]);
            // The first round warms up.
            if round > 0 {
                all.entry(way).or_default().push(times);
            }
        }
    }
    for (what, which) in [("write", 0), ("read", 1)] {
        let seconds = |way: Way, round: usize| all[&way][round][which].as_secs_f64();
        println!("\n{kind}, {bytes} bytes, {what}, {rounds} rounds\n");
        println!(
            "| | MiB/s, median | of the faster plain way, median (least – most) |\n|---|---|---|"
        );
        for way in WAYS {
            let speed = |round| bytes as f64 / f64::from(1 << 20) / seconds(way, round);
            let share = |round| {
                seconds(Way::PlainOne, round).min(seconds(Way::PlainMany, round))
                    / seconds(way, round)
            };
            let [_, speed, _] = spread((0..rounds).map(speed).collect());
            let [least, median, most] = spread((0..rounds).map(share).collect());
            println!(
                "| {} | {speed:.0} | {median:.2} ({least:.2} – {most:.2}) |",
                way.name()
            );
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    let folder = args.first().map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let rounds = args.get(1).and_then(|arg| arg.parse().ok()).unwrap_or(20);
    for kind in ObjectKind::ALL {
        let folder = tempfile::tempdir_in(&folder).expect("a folder");
        measure(folder.path(), kind, rounds);
    }
}
