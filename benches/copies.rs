//! Bytes between a worker's ring and the arena on a host device, beside `memcpy` of the same bytes
//! between two buffers of the same process.

use std::hint::black_box;
use std::sync::{Arc, mpsc};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use engram::device::host::HostDevice;
use engram::device::shm::SharedMap;
use engram::device::{Device, Ring, RingExport};

/// A state of a real model, a block of its KV (1024 tokens), and KV of 8192 tokens.
const SIZES: [(&str, u64); 3] = [
    ("state, 57 MiB", 57 << 20),
    ("block, 8 MiB", 8 << 20),
    ("KV, 64 MiB", 64 << 20),
];
const RING: u64 = 64 << 20;

/// Copies once and waits for the end, as a save (`out`) or as a restore.
fn copy(ring: &Arc<dyn Ring>, arena: &Arc<SharedMap>, len: u64, out: bool) {
    let (sender, receiver) = mpsc::channel();
    let done = Box::new(move |result| sender.send(result).expect("the receiver waits"));
    if out {
        ring.copy_out(0, arena, 0, len, done);
    } else {
        ring.copy_in(arena, 0, 0, len, done);
    }
    receiver
        .recv()
        .expect("every copy ends")
        .expect("in bounds");
}

fn copies(criterion: &mut Criterion) {
    let device = HostDevice::new(16).expect("a copy thread");
    let (map, fd) = SharedMap::create("ring", RING).expect("a ring");
    map.fill(0, RING, 7).expect("in bounds");
    let export = RingExport::Host { fd, bytes: RING };
    let ring = device.open_ring(export).expect("a host ring");
    let arena = Arc::new(SharedMap::create("arena", RING).expect("an arena").0);
    arena.fill(0, RING, 9).expect("in bounds");
    let source = vec![1_u8; RING as usize];
    let mut target = vec![2_u8; RING as usize];
    for (name, len) in SIZES {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(30).throughput(Throughput::Bytes(len));
        group.bench_function(BenchmarkId::from_parameter("memcpy"), |bencher| {
            let len = len as usize;
            bencher.iter(|| target[..len].copy_from_slice(black_box(&source[..len])));
        });
        for (way, out) in [
            ("save: ring to arena", true),
            ("restore: arena to ring", false),
        ] {
            group.bench_function(BenchmarkId::from_parameter(way), |bencher| {
                bencher.iter(|| copy(&ring, &arena, len, out));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, copies);
criterion_main!(benches);
