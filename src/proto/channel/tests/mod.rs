mod hostile;
mod messages;
mod rings;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::*;
use crate::device::shm::SharedMap;

/// Smallest areas: they wrap after some dozens of records.
const SMALL: Capacities = Capacities {
    up: layout::MIN_CAPACITY,
    down: layout::MIN_CAPACITY,
};

/// Where the area `up` starts.
const UP: u64 = layout::HEADER_BYTES;

struct Pair {
    map: Arc<SharedMap>,
    daemon: DaemonEnd,
    worker: WorkerEnd,
}

fn pair(capacities: Capacities) -> Pair {
    let map = Arc::new(SharedMap::anonymous(capacities.bytes()).unwrap());
    let daemon = DaemonEnd::create(&map, capacities, [1; 16], [2; 16]).unwrap();
    let worker = WorkerEnd::open(&map).unwrap();
    Pair {
        map,
        daemon,
        worker,
    }
}

impl Pair {
    /// Writes a record into `up` as a hostile worker could: any head, any body.
    fn forge(&self, position: u64, number: u64, head: (u32, u16, u16), body: &[u8]) {
        let (len, kind, flags) = head;
        let word = u64::from(len) | u64::from(kind) << 32 | u64::from(flags) << 48;
        let at = UP + position;
        self.map.write(at + 16, body).unwrap();
        self.map.store_u64(at + 8, word, Ordering::Relaxed).unwrap();
        self.map.store_u64(at, number, Ordering::Release).unwrap();
    }
}

fn close(req: u64) -> msg::Up {
    msg::RequestClose { req }.into()
}

fn tokens(req: u64, ids: Vec<u32>) -> msg::Up {
    msg::Tokens {
        req,
        offset: 0,
        ids,
    }
    .into()
}
