//! The staging ring: memory shared with the daemon, and which parts of it are in use.
//!
//! A ring belongs to one session. A daemon that was stopped may still write into it after it was
//! given up; so the next session gets another one.

use std::collections::BTreeMap;

use crate::device::shm::{OutOfBounds, SharedMap};

/// Rooms start at multiples of this many bytes.
const ALIGN: u64 = 64;

/// What a ring is full of that nobody uses any more.
const NOISE: u8 = 0xa5;

/// The ring.
#[derive(Debug)]
pub struct Ring {
    map: SharedMap,
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
    /// A ring in memory that nobody uses.
    pub fn new(map: SharedMap) -> Self {
        let bytes = map.len() - map.len() % ALIGN;
        let free = (bytes > 0).then_some((0, bytes)).into_iter().collect();
        Self {
            map,
            free,
            free_bytes: bytes,
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
        let mut ring = Ring::new(SharedMap::anonymous(64 << 10).unwrap());
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
        let mut ring = Ring::new(SharedMap::anonymous(4096).unwrap());
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
}
