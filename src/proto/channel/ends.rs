//! The two ends of a channel: header, beats, and the words that say the end.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::area::Area;
use super::layout::{self, CloseReason, header};
use super::msg::{Down, Up};
use super::reader::Reader;
use super::writer::Writer;
use crate::device::shm::{OutOfBounds, SharedMap};

/// Sizes of the two areas in bytes.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Capacities {
    /// Worker -> daemon. Default: `16 MiB`.
    pub up: u64,
    /// Daemon -> worker. Default: `1 MiB`.
    pub down: u64,
}

/// The daemon's end, which makes the channel.
#[derive(Debug)]
pub struct DaemonEnd {
    /// To the worker.
    pub tx: Writer<Down>,
    /// From the worker.
    pub rx: Reader<Up>,
    /// Beats and the end.
    pub link: Link,
}

/// The worker's end.
#[derive(Debug)]
pub struct WorkerEnd {
    /// To the daemon.
    pub tx: Writer<Up>,
    /// From the daemon.
    pub rx: Reader<Down>,
    /// Beats and the end.
    pub link: Link,
    /// The daemon's start, as the channel says.
    pub boot: [u8; 16],
    /// The session, as the channel says.
    pub session: [u8; 16],
}

/// The words of the header by which each side shows that it lives, and says that it ends.
#[derive(Debug)]
pub struct Link {
    map: Arc<SharedMap>,
    beats: u64,
    own: Side,
    peer: Side,
}

/// Offsets of one side's words.
#[derive(Copy, Clone, Debug)]
struct Side {
    beat: u64,
    closed: u64,
}

const DAEMON: Side = Side {
    beat: header::DAEMON_BEAT,
    closed: header::DAEMON_CLOSED,
};
const WORKER: Side = Side {
    beat: header::WORKER_BEAT,
    closed: header::WORKER_CLOSED,
};

/// Why memory is not a channel that this side can use.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum BadChannel {
    /// The first word is another.
    #[error("the memory is no channel")]
    Magic,
    /// Another version of the layout.
    #[error("the channel has version {0}, not {expected}", expected = layout::VERSION)]
    Version(u32),
    /// Another size of the header.
    #[error("the channel has a header of {0} bytes")]
    Header(u32),
    /// An area that is not in the memory, not aligned, or too small or large.
    #[error("the channel cannot have {capacity} bytes at {offset} of {size}")]
    Area {
        /// Its start.
        offset: u64,
        /// Its size.
        capacity: u64,
        /// Size of the memory.
        size: u64,
    },
    /// The areas overlap.
    #[error("the areas of the channel overlap")]
    Overlap,
    /// The memory is shorter than a header.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}

// === impl Capacities ===

impl Default for Capacities {
    fn default() -> Self {
        Self {
            up: layout::UP_CAPACITY,
            down: layout::DOWN_CAPACITY,
        }
    }
}

impl Capacities {
    /// Size of the memory of a channel with these areas.
    pub fn bytes(self) -> u64 {
        layout::HEADER_BYTES
            .saturating_add(self.up)
            .saturating_add(self.down)
    }
}

// === impl DaemonEnd ===

impl DaemonEnd {
    /// Makes a channel in `map`, which has [`Capacities::bytes`] bytes of zeros that no peer has
    /// seen yet.
    ///
    /// # Errors
    ///
    /// If the map is too small or the capacities are not allowed.
    pub fn create(
        map: &Arc<SharedMap>,
        capacities: Capacities,
        boot: [u8; 16],
        session: [u8; 16],
    ) -> Result<Self, BadChannel> {
        let Capacities { up, down } = capacities;
        let areas = Areas {
            up: (layout::HEADER_BYTES, up),
            down: (layout::HEADER_BYTES.saturating_add(up), down),
        };
        let (up, down) = areas.open(map)?;
        map.store_u32(header::VERSION, layout::VERSION, Ordering::Relaxed)?;
        map.store_u32(
            header::HEADER_BYTES,
            layout::HEADER_BYTES as u32,
            Ordering::Relaxed,
        )?;
        map.store_u64(header::UP_OFFSET, areas.up.0, Ordering::Relaxed)?;
        map.store_u64(header::UP_CAPACITY, areas.up.1, Ordering::Relaxed)?;
        map.store_u64(header::DOWN_OFFSET, areas.down.0, Ordering::Relaxed)?;
        map.store_u64(header::DOWN_CAPACITY, areas.down.1, Ordering::Relaxed)?;
        map.write(header::BOOT, &boot)?;
        map.write(header::SESSION, &session)?;
        map.store_u64(header::MAGIC, layout::MAGIC, Ordering::Release)?;
        Ok(Self {
            tx: Writer::new(down),
            rx: Reader::new(up),
            link: Link::new(map, DAEMON, WORKER),
        })
    }
}

// === impl WorkerEnd ===

impl WorkerEnd {
    /// Opens the channel that the daemon made in `map`. The header is read once: what the daemon
    /// writes there later changes nothing.
    ///
    /// # Errors
    ///
    /// If it is no channel of this version that lies in the map.
    pub fn open(map: &Arc<SharedMap>) -> Result<Self, BadChannel> {
        let load = |at| map.load_u64(at, Ordering::Relaxed);
        if map.load_u64(header::MAGIC, Ordering::Acquire)? != layout::MAGIC {
            return Err(BadChannel::Magic);
        }
        let version = map.load_u32(header::VERSION, Ordering::Relaxed)?;
        if version != layout::VERSION {
            return Err(BadChannel::Version(version));
        }
        let bytes = map.load_u32(header::HEADER_BYTES, Ordering::Relaxed)?;
        if u64::from(bytes) != layout::HEADER_BYTES {
            return Err(BadChannel::Header(bytes));
        }
        let areas = Areas {
            up: (load(header::UP_OFFSET)?, load(header::UP_CAPACITY)?),
            down: (load(header::DOWN_OFFSET)?, load(header::DOWN_CAPACITY)?),
        };
        let (up, down) = areas.open(map)?;
        let (mut boot, mut session) = ([0; 16], [0; 16]);
        map.read(header::BOOT, &mut boot)?;
        map.read(header::SESSION, &mut session)?;
        Ok(Self {
            tx: Writer::new(up),
            rx: Reader::new(down),
            link: Link::new(map, WORKER, DAEMON),
            boot,
            session,
        })
    }
}

// === impl Link ===

impl Link {
    fn new(map: &Arc<SharedMap>, own: Side, peer: Side) -> Self {
        Self {
            map: Arc::clone(map),
            beats: 0,
            own,
            peer,
        }
    }

    /// Shows that this side lives.
    pub fn beat(&mut self) {
        self.beats += 1;
        let stored = self
            .map
            .store_u64(self.own.beat, self.beats, Ordering::Relaxed);
        stored.expect("the header lies in the map");
    }

    /// A number that changes while the peer lives. It may be any.
    pub fn peer_beat(&self) -> u64 {
        let beats = self.map.load_u64(self.peer.beat, Ordering::Relaxed);
        beats.expect("the header lies in the map")
    }

    /// Tells the peer that this side ends the session. What was pushed before can still be read.
    pub fn close(&self, reason: CloseReason) {
        let stored = self
            .map
            .store_u32(self.own.closed, reason.as_u32(), Ordering::Release);
        stored.expect("the header lies in the map");
    }

    /// Why the peer ended the session, if it did. An unknown reason is a broken peer's.
    pub fn peer_closed(&self) -> Option<CloseReason> {
        let reason = self.map.load_u32(self.peer.closed, Ordering::Acquire);
        match reason.expect("the header lies in the map") {
            0 => None,
            reason => Some(CloseReason::from_u32(reason).unwrap_or(CloseReason::BrokenPeer)),
        }
    }
}

/// Start and size of both areas.
struct Areas {
    up: (u64, u64),
    down: (u64, u64),
}

impl Areas {
    fn open(&self, map: &Arc<SharedMap>) -> Result<(Area, Area), BadChannel> {
        let area = |(offset, capacity), tail| {
            let size = map.len();
            let area = Area::new(map, offset, capacity, tail);
            area.ok_or(BadChannel::Area {
                offset,
                capacity,
                size,
            })
        };
        let up = area(self.up, header::UP_TAIL)?;
        let down = area(self.down, header::DOWN_TAIL)?;
        let ((up_start, up_end), (down_start, down_end)) = (up.range(), down.range());
        if up_start < down_end && down_start < up_end {
            return Err(BadChannel::Overlap);
        }
        Ok((up, down))
    }
}
