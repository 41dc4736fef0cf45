//! The channel: a lookup there and back between two threads, and a long prompt's tokens.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use engram::device::Doorbell;
use engram::device::shm::SharedMap;
use engram::proto::channel::layout::Tier;
use engram::proto::channel::msg::{Down, Lookup, LookupResult, Tokens, Up};
use engram::proto::channel::{Capacities, DaemonEnd, WorkerEnd};

const PROMPT: usize = 128 << 10;

fn ends() -> (DaemonEnd, WorkerEnd) {
    let capacities = Capacities::default();
    let map = SharedMap::anonymous(capacities.bytes()).expect("memory");
    // All pages are there before anything is timed, as in a daemon that has run for a while.
    map.fill(0, map.len(), 0).expect("in bounds");
    let map = Arc::new(map);
    let daemon = DaemonEnd::create(&map, capacities, [0; 16], [0; 16]).expect("a channel");
    let worker = WorkerEnd::open(&map).expect("a channel");
    (daemon, worker)
}

fn lookup(req: u64) -> Up {
    Lookup {
        req,
        attempt: 0,
        max_boundary: 131_072,
        device_boundary: 0,
        device_kv: 0,
    }
    .into()
}

/// What a lookup of a prompt of 128K tokens is answered with.
fn answer(daemon: &mut DaemonEnd) -> bool {
    let Some(message) = daemon.rx.pop().expect("a worker that keeps the rules") else {
        return false;
    };
    let Up::Lookup(Lookup {
        req,
        attempt,
        max_boundary,
        ..
    }) = message
    else {
        return true;
    };
    let parts = (0..128)
        .flat_map(|block| [block * 1024, (block + 1) * 1024])
        .collect();
    let result = LookupResult {
        req,
        attempt,
        lease: 1,
        boundary: max_boundary,
        kv_from: 0,
        tier: Some(Tier::Ram),
        reason: None,
        bytes: 1 << 30,
        parts,
    };
    daemon.tx.push(&result.into()).expect("room for one answer");
    true
}

fn there_and_back(worker: &mut WorkerEnd, bell: Option<&Doorbell>) -> Down {
    worker.tx.push(&lookup(1)).expect("room for one message");
    if let Some(bell) = bell {
        bell.ring().expect("an eventfd");
    }
    loop {
        if let Some(message) = worker.rx.pop().expect("a daemon that keeps the rules") {
            return message;
        }
        thread::yield_now();
    }
}

/// Both sides poll: what the channel itself costs.
fn polled(criterion: &mut Criterion) {
    let (mut daemon, mut worker) = ends();
    let stop = Arc::new(AtomicBool::new(false));
    let answering = thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            while !stop.load(Ordering::Relaxed) {
                if !answer(&mut daemon) {
                    thread::yield_now();
                }
            }
        }
    });
    criterion.bench_function("lookup, both sides poll", |bench| {
        bench.iter(|| black_box(there_and_back(&mut worker, None)));
    });
    stop.store(true, Ordering::Relaxed);
    answering.join().expect("the daemon's thread");
}

/// The daemon sleeps on its doorbell, as it does.
fn woken(criterion: &mut Criterion) {
    let (mut daemon, mut worker) = ends();
    let bell = Arc::new(Doorbell::new().expect("an eventfd"));
    let stop = Arc::new(AtomicBool::new(false));
    let answering = thread::spawn({
        let (bell, stop) = (Arc::clone(&bell), Arc::clone(&stop));
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_io()
                .build();
            runtime.expect("a runtime").block_on(async {
                let listener = bell.listen().expect("an eventfd");
                while !stop.load(Ordering::Relaxed) {
                    while answer(&mut daemon) {}
                    listener.wait().await.expect("an eventfd");
                }
            });
        }
    });
    criterion.bench_function("lookup, the daemon sleeps", |bench| {
        bench.iter(|| black_box(there_and_back(&mut worker, Some(&bell))));
    });
    stop.store(true, Ordering::Relaxed);
    bell.ring().expect("an eventfd");
    answering.join().expect("the daemon's thread");
}

/// All tokens of a prompt, as a worker writes them and as the daemon takes them.
fn tokens(criterion: &mut Criterion) {
    let (mut daemon, mut worker) = ends();
    let ids: Vec<u32> = (0..PROMPT as u32).collect();
    let mut group = criterion.benchmark_group("tokens of 128K");
    group.throughput(Throughput::Bytes(4 * PROMPT as u64));
    group.bench_function("write and read", |bench| {
        bench.iter(|| {
            let written = worker
                .tx
                .push_tokens(1, 0, &ids)
                .expect("a daemon that keeps the rules");
            let mut read = 0;
            while let Some(message) = daemon.rx.pop().expect("a worker that keeps the rules") {
                let Up::Tokens(Tokens { ids, .. }) = message else {
                    continue;
                };
                read += black_box(ids).len();
            }
            assert_eq!((written, read), (PROMPT, PROMPT));
        });
    });
    group.finish();
}

criterion_group!(benches, polled, woken, tokens);
criterion_main!(benches);
