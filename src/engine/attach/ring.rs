//! The staging ring, and which parts of it are in use.
//!
//! In mode ipc it is memory shared with the daemon. In mode engine it is this process's own, and
//! beside it is a window of the same size that is shared: what goes out is copied there before the
//! daemon is told, what comes in is copied from there when the daemon answered.
//!
//! Both belong to one session. A daemon that was stopped may still write into it after it was
//! given up; so the next session gets another one.

use std::collections::BTreeMap;

use crate::device::shm::{OutOfBounds, SharedMap};
use crate::types::TransferMode;

/// Rooms start at multiples of this many bytes.
const ALIGN: u64 = 64;

/// What a ring is full of that nobody uses any more.
const NOISE: u8 = 0xa5;

/// The ring.
#[derive(Debug)]
pub struct Ring {
    map: SharedMap,
    /// In mode engine.
    window: Option<SharedMap>,
    /// Free ranges, by start: neither empty nor adjacent.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
}

/// A part of the ring that is in use. It must be given back to [`Ring::free`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a room that is dropped is lost until the session ends"]
pub struct Room {
    offset: u64,
    /// Bytes in use.
    len: u64,
}

// === impl Room ===

impl Room {
    /// Where in the ring.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its size as asked for.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    fn taken(&self) -> u64 {
        self.len.next_multiple_of(ALIGN)
    }
}

// === impl Ring ===

impl Ring {
    /// A ring in memory that nobody uses. With a window, which is as large, only that is the daemon's.
    pub fn new(map: SharedMap, window: Option<SharedMap>) -> Self {
        let bytes = map.len() - map.len() % ALIGN;
        let free = (bytes > 0).then_some((0, bytes)).into_iter().collect();
        Self {
            map,
            window,
            free,
            free_bytes: bytes,
        }
    }

    /// Who copies between it and what the daemon reaches.
    pub fn mode(&self) -> TransferMode {
        match self.window {
            Some(_) => TransferMode::Engine,
            None => TransferMode::Ipc,
        }
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.map.len()
    }

    /// Bytes that nobody uses.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// The first room of `len` bytes (at least 1) that is free.
    pub fn alloc(&mut self, len: u64) -> Option<Room> {
        let taken = len.checked_next_multiple_of(ALIGN)?;
        let (start, size) = self
            .free
            .iter()
            .find(|(_, size)| **size >= taken)
            .map(|(start, size)| (*start, *size))?;
        self.free.remove(&start);
        if size > taken {
            self.free.insert(start + taken, size - taken);
        }
        self.free_bytes -= taken;
        Some(Room { offset: start, len })
    }

    /// Rooms of all these lengths, or none.
    pub fn alloc_all(&mut self, lens: impl IntoIterator<Item = u64>) -> Option<Vec<Room>> {
        let mut rooms = Vec::new();
        for len in lens {
            match self.alloc(len) {
                Some(room) => rooms.push(room),
                None => {
                    rooms.into_iter().for_each(|room| self.free(room));
                    return None;
                }
            }
        }
        Some(rooms)
    }

    /// Gives a room back.
    pub fn free(&mut self, room: Room) {
        let (mut start, mut size) = (room.offset, room.taken());
        self.free_bytes += size;
        if let Some((before, len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            (start, size) = (*before, size + len);
            self.free.remove(&start);
        }
        if let Some(len) = self.free.remove(&(start + size)) {
            size += len;
        }
        self.free.insert(start, size);
    }

    /// Fills all of it with noise.
    pub fn spoil(&self) {
        let filled = self.map.fill(0, self.map.len(), NOISE);
        debug_assert!(filled.is_ok(), "the ring lies inside its map");
        if let Some(window) = &self.window {
            let filled = window.fill(0, window.len(), NOISE);
            debug_assert!(filled.is_ok(), "the window lies inside its map");
        }
    }

    /// Brings a room to where the daemon reads it.
    ///
    /// # Errors
    ///
    /// The window is smaller than the ring.
    pub fn send(&self, room: &Room) -> Result<(), OutOfBounds> {
        match &self.window {
            Some(window) => self.map.copy(room.offset, window, room.offset, room.len),
            None => Ok(()),
        }
    }

    /// Brings a room here from where the daemon wrote it.
    ///
    /// # Errors
    ///
    /// The window is smaller than the ring.
    pub fn fetch(&self, room: &Room) -> Result<(), OutOfBounds> {
        match &self.window {
            Some(window) => window.copy(room.offset, &self.map, room.offset, room.len),
            None => Ok(()),
        }
    }

    /// Writes to the start of a room.
    ///
    /// # Errors
    ///
    /// More bytes than the room has.
    pub fn write(&self, room: &Room, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.check(room, 0, bytes.len() as u64)?;
        self.map.write(room.offset, bytes)
    }

    /// Reads from a room, `at` bytes from its start.
    ///
    /// # Errors
    ///
    /// More bytes than the room has.
    pub fn read(&self, room: &Room, at: u64, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check(room, at, out.len() as u64)?;
        self.map.read(room.offset + at, out)
    }

    fn check(&self, room: &Room, offset: u64, len: u64) -> Result<(), OutOfBounds> {
        match offset.checked_add(len) {
            Some(end) if end <= room.len => Ok(()),
            _ => Err(OutOfBounds {
                offset,
                len,
                align: 1,
                size: room.len,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::rng::SplitMix64;

    #[test]
    fn rooms_never_overlap_and_all_room_comes_back() {
        let mut ring = Ring::new(SharedMap::anonymous(64 << 10).unwrap(), None);
        let mut rng = SplitMix64::new(5);
        let mut rooms: Vec<Room> = Vec::new();
        for _ in 0..5000 {
            if rng.below(2) == 0 {
                let Some(room) = ring.alloc(1 + rng.below(9000)) else {
                    continue;
                };
                let end = room.offset + room.len;
                assert!(end <= 64 << 10 && room.offset.is_multiple_of(ALIGN));
                let apart = |r: &Room| r.offset >= end || r.offset + r.len <= room.offset;
                assert!(rooms.iter().all(apart));
                rooms.push(room);
            } else if !rooms.is_empty() {
                let room = rooms.swap_remove(rng.below(rooms.len() as u64) as usize);
                ring.free(room);
            }
        }
        rooms.into_iter().for_each(|room| ring.free(room));
        assert_eq!(ring.free_bytes(), 64 << 10);
        let whole = ring.alloc(64 << 10).unwrap();
        assert_eq!(ring.alloc(1), None);
        ring.free(whole);
        assert_eq!(ring.alloc(u64::MAX), None);
    }

    #[test]
    fn all_rooms_or_none_and_bytes_stay_in_their_room() {
        let mut ring = Ring::new(SharedMap::anonymous(4096).unwrap(), None);
        assert!(ring.alloc_all([4000, 100]).is_none());
        assert_eq!(ring.free_bytes(), 4096);
        let rooms = ring.alloc_all([100, 200]).unwrap();
        ring.write(&rooms[0], &[7; 100]).unwrap();
        ring.write(&rooms[1], &[8; 200]).unwrap();
        assert!(ring.write(&rooms[0], &[7; 101]).is_err());
        let mut out = [0; 60];
        ring.read(&rooms[0], 40, &mut out).unwrap();
        assert_eq!(out, [7; 60]);
        assert!(ring.read(&rooms[0], 41, &mut out).is_err());
        assert!(ring.read(&rooms[0], u64::MAX, &mut out).is_err());
        rooms.into_iter().for_each(|room| ring.free(room));
    }

    #[test]
    fn only_what_is_sent_is_in_the_window_and_only_what_is_fetched_comes_out_of_it() {
        let (window, fd) = SharedMap::create("window", 8192).unwrap();
        let peer = SharedMap::open(fd, 8192).unwrap();
        let mut ring = Ring::new(SharedMap::anonymous(8192).unwrap(), Some(window));
        let rooms = ring.alloc_all([100, 200]).unwrap();
        let [first, second] = &rooms[..] else {
            unreachable!("two were asked for")
        };
        ring.write(first, &[7; 100]).unwrap();
        ring.write(second, &[8; 200]).unwrap();
        ring.send(second).unwrap();
        let mut out = [0; 100];
        peer.read(first.offset(), &mut out).unwrap();
        assert_eq!(out, [0; 100]);
        peer.read(second.offset(), &mut out).unwrap();
        assert_eq!(out, [8; 100]);
        peer.fill(0, 8192, 9).unwrap();
        ring.read(second, 0, &mut out).unwrap();
        assert_eq!(out, [8; 100], "the daemon does not reach the ring");
        ring.fetch(first).unwrap();
        ring.read(first, 0, &mut out).unwrap();
        assert_eq!(out, [9; 100]);
        ring.read(second, 0, &mut out).unwrap();
        assert_eq!(out, [8; 100]);
        ring.spoil();
        peer.read(0, &mut out).unwrap();
        assert_eq!(out, [NOISE; 100]);
        rooms.into_iter().for_each(|room| ring.free(room));
    }
}
