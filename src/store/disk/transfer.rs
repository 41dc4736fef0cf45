//! The data of one shard on its way between its file and the arena: which bytes lie where, and the
//! checksum of each chunk. Nothing is copied on the way: the file reads and writes the arena itself.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::{
    device::{shm::SharedMap, uring::Move},
    pool::Geometry,
    store::{
        arena::Segment, counters::Reason, error::StoreError, fault::Op, object::ObjectMeta,
        sealed_json::Bad,
    },
};

use super::{
    data_dir::is_bad_medium,
    engine::Engine,
    object_file::{
        ALIGN, CHUNK, Facts, Part, Plan, What, crc32c, crc32c_joined, decode_header, encode_header,
        header_len,
    },
    root::{Rel, Root, Temp},
};

/// Bytes of one read or write.
const UNIT: u64 = 4 * CHUNK;

/// How files are read and written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode<'a> {
    pub(crate) engine: &'a dyn Engine,
    pub(crate) direct: bool,
}

/// One shard in memory.
pub(crate) struct Shard<'a> {
    pub(crate) meta: &'a ObjectMeta,
    pub(crate) plan: &'a Plan,
    /// `0..shards`.
    pub(crate) shard: u32,
    pub(crate) segments: Vec<&'a Segment>,
}

/// Why a file could not be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// It is not there.
    Missing,
    /// It is not what it should be.
    Bad(Bad),
    /// Something else, which says nothing about the file.
    Other(StoreError),
}

/// One shard of which every chunk is read only to be verified, one after the other.
#[derive(Debug)]
pub(crate) struct Audit {
    file: std::fs::File,
    data: u64,
    facts: Facts,
    next: usize,
    direct: bool,
}

/// Bytes of one part: data `[at, at + len)`.
struct Run<'a> {
    at: u64,
    len: u64,
    /// Start in the part.
    within: u64,
    part: &'a Part,
}

// === impl Plan ===

impl Plan {
    /// The plan of an object that was checked against the geometry.
    pub(crate) fn checked(meta: &ObjectMeta, geometry: &Geometry) -> Result<Self, StoreError> {
        meta.validate(Some(geometry))?;
        Ok(Self::of(meta, geometry))
    }

    fn runs(&self, start: u64, end: u64) -> impl Iterator<Item = Run<'_>> {
        let first = self
            .parts
            .partition_point(|part| part.offset + part.padded <= start);
        let parts = self.parts.iter().skip(first);
        parts
            .take_while(move |part| part.offset < end)
            .filter(|part| part.padded > 0)
            .map(move |part| {
                let at = part.offset.max(start);
                Run {
                    at,
                    len: (part.offset + part.padded).min(end) - at,
                    within: at - part.offset,
                    part,
                }
            })
    }

    fn units(&self) -> usize {
        // At most a million, by the limit of a shard's bytes.
        self.data_len.div_ceil(UNIT) as usize
    }

    fn unit(&self, index: usize) -> (u64, u64) {
        let start = index as u64 * UNIT;
        (start, (start + UNIT).min(self.data_len))
    }
}

// === impl Shard ===

impl Shard<'_> {
    /// Writes header, tokens and payload into a fresh file. Nothing is durable yet.
    pub(crate) fn write(
        &self,
        root: &Root,
        temp: &Temp,
        tokens: &[u8],
        mode: Mode<'_>,
    ) -> Result<u64, StoreError> {
        let Self {
            meta, plan, shard, ..
        } = *self;
        let mut facts = Facts {
            generation: meta.generation,
            tokens_crc: crc32c(tokens.get(..plan.token_bytes() as usize).unwrap_or(tokens)),
            checksums: vec![0; plan.chunks() as usize],
        };
        let data = encode_header(meta, plan, shard, &facts).len() as u64;
        let total = data + plan.data_len;
        root.allocate(temp, total)?;
        root.write(temp, data, tokens)?;
        root.set_direct(&temp.file, mode.direct);
        let checksums: Vec<AtomicU32> = facts.checksums.iter().map(|_| AtomicU32::new(0)).collect();
        let written = mode.engine.write(root, temp, &self.moves(data), &|unit| {
            let (start, end) = plan.unit(unit);
            for (index, chunk) in chunks(start, end) {
                if let Some(slot) = checksums.get(index) {
                    slot.store(self.crc(tokens, chunk), Relaxed);
                }
            }
        });
        root.set_direct(&temp.file, false);
        written?;
        facts.checksums = checksums.into_iter().map(AtomicU32::into_inner).collect();
        root.write(temp, 0, &encode_header(meta, plan, shard, &facts))?;
        Ok(total)
    }

    /// Reads and verifies the whole file into the segments; gives the token tensor with its padding.
    pub(crate) fn read(
        &self,
        root: &Root,
        rel: &Rel,
        mode: Mode<'_>,
    ) -> Result<Vec<u8>, ReadError> {
        let (file, data, facts) = open(root, rel, self.meta, self.plan, self.shard)?;
        let plan = self.plan;
        let tokens = read_tokens(root, (&file, rel), data, plan, &facts)?;
        root.set_direct(&file, mode.direct);
        let units = self.moves(data);
        mode.engine.read(root, (&file, rel), &units, &|unit| {
            let (start, end) = plan.unit(unit);
            for (index, chunk) in chunks(start, end) {
                if facts.checksums.get(index) != Some(&self.crc(&tokens, chunk)) {
                    let detail = format!("chunk {index} of {}", plan.chunks());
                    return Err(ReadError::Bad(Bad::new(Reason::Checksum, detail)));
                }
            }
            Ok(())
        })?;
        Ok(tokens)
    }

    /// What moves of each unit, in a file whose data starts at `data`.
    fn moves(&self, data: u64) -> Vec<Vec<Move<'_>>> {
        let unit = |index| {
            let (start, end) = self.plan.unit(index);
            let runs = self.plan.runs(start, end);
            let moves = runs.filter_map(|run| {
                let (segment, offset) = self.place(&run)?;
                Some(Move {
                    map: segment.map(),
                    offset,
                    file_offset: data + run.at,
                    len: run.len,
                })
            });
            moves.collect()
        };
        (0..self.plan.units()).map(unit).collect()
    }

    /// Where a run of a piece lies in the arena; `None` for tokens.
    fn place(&self, run: &Run<'_>) -> Option<(&Segment, u64)> {
        let What::Piece(index) = run.part.what else {
            return None;
        };
        let segment = self.segments.get(index)?;
        Some((segment, segment.offset() + run.within))
    }

    fn crc(&self, tokens: &[u8], (start, end): (u64, u64)) -> u32 {
        let runs = self.plan.runs(start, end);
        let crc = runs.fold(None, |crc, run| {
            let next = match self.place(&run) {
                Some((segment, offset)) => segment
                    .map()
                    .crc32c(offset, run.len)
                    .expect("a segment has its padding, too"),
                None => {
                    let from = run.within as usize;
                    let bytes = tokens.get(from..from + run.len as usize);
                    crc32c(bytes.unwrap_or_default())
                }
            };
            // Joining costs as much as a few hundred KiB; most chunks are one run.
            Some(crc.map_or(next, |crc| crc32c_joined(crc, next, run.len)))
        });
        crc.unwrap_or_default()
    }
}

// === impl Audit ===

impl Audit {
    /// Opens the file and verifies all but the chunks. Gives the token tensor, too.
    pub(crate) fn open(
        root: &Root,
        rel: &Rel,
        (meta, plan, shard): (&ObjectMeta, &Plan, u32),
        direct: bool,
    ) -> Result<(Self, Vec<u8>), ReadError> {
        let (file, data, facts) = open(root, rel, meta, plan, shard)?;
        let tokens = read_tokens(root, (&file, rel), data, plan, &facts)?;
        root.set_direct(&file, direct);
        let audit = Self {
            file,
            data,
            facts,
            next: 0,
            direct,
        };
        Ok((audit, tokens))
    }

    /// Verifies the next chunk, in `scratch` of [`CHUNK`] bytes, and says how long it is; `None` after
    /// the last.
    pub(crate) fn step(
        &mut self,
        root: &Root,
        rel: &Rel,
        plan: &Plan,
        scratch: &SharedMap,
    ) -> Result<Option<u64>, ReadError> {
        let Some(expected) = self.facts.checksums.get(self.next) else {
            return Ok(None);
        };
        let at = self.next as u64 * CHUNK;
        let len = CHUNK.min(plan.data_len.saturating_sub(at));
        let read = || root.read_map((&self.file, rel), self.data + at, scratch, 0, len);
        match read() {
            // It takes the flag and not the reads.
            Err(StoreError::Io { source, .. })
                if self.direct && source.raw_os_error() == Some(nix::libc::EINVAL) =>
            {
                self.direct = false;
                root.set_direct(&self.file, false);
                read()?;
            }
            done => done?,
        }
        let found = scratch.crc32c(0, len).expect("a chunk fits");
        if found != *expected {
            let detail = format!("chunk {} of {}", self.next, plan.chunks());
            return Err(ReadError::Bad(Bad::new(Reason::Checksum, detail)));
        }
        self.next += 1;
        Ok(Some(len))
    }
}

/// The token tensor of one shard alone, verified.
pub(crate) fn tokens_of(
    root: &Root,
    rel: &Rel,
    meta: &ObjectMeta,
    plan: &Plan,
    shard: u32,
) -> Result<Vec<u8>, ReadError> {
    let (file, data, facts) = open(root, rel, meta, plan, shard)?;
    read_tokens(root, (&file, rel), data, plan, &facts)
}

/// Opens a file and verifies its length and header; says where its data starts.
pub(super) fn open(
    root: &Root,
    rel: &Rel,
    meta: &ObjectMeta,
    plan: &Plan,
    shard: u32,
) -> Result<(std::fs::File, u64, Facts), ReadError> {
    let (file, len) = root.open_file(rel)?;
    let length = |detail: String| ReadError::Bad(Bad::new(Reason::Length, detail));
    if len < ALIGN {
        return Err(length(format!("{len} bytes")));
    }
    let mut first = [0; 8];
    root.read(&file, rel, 0, &mut first)?;
    let data = header_len(first).map_err(ReadError::Bad)?;
    let expected = data + plan.data_len;
    if len != expected {
        return Err(length(format!("{len} bytes, expected {expected}")));
    }
    let mut header = vec![0; data as usize];
    root.read(&file, rel, 0, &mut header)?;
    let facts = decode_header(&header, meta, plan, shard).map_err(ReadError::Bad)?;
    Ok((file, data, facts))
}

fn read_tokens(
    root: &Root,
    (file, rel): (&std::fs::File, &Rel),
    data: u64,
    plan: &Plan,
    facts: &Facts,
) -> Result<Vec<u8>, ReadError> {
    let len = plan.token_bytes() as usize;
    let mut tokens = vec![0; len.next_multiple_of(ALIGN as usize)];
    root.read(file, rel, data, &mut tokens)?;
    if crc32c(tokens.get(..len).unwrap_or_default()) != facts.tokens_crc {
        return Err(ReadError::Bad(Bad::new(Reason::Checksum, "the tokens")));
    }
    Ok(tokens)
}

/// The chunks of a unit: number and range.
fn chunks(start: u64, end: u64) -> impl Iterator<Item = (usize, (u64, u64))> {
    let first = start / CHUNK;
    let last = end.div_ceil(CHUNK);
    (first..last).map(move |index| {
        let from = index * CHUNK;
        (index as usize, (from, (from + CHUNK).min(end)))
    })
}

// === impl ReadError ===

impl From<StoreError> for ReadError {
    fn from(error: StoreError) -> Self {
        match &error {
            _ if error.is_missing() => Self::Missing,
            StoreError::UnsafePath { .. } => {
                Self::Bad(Bad::new(Reason::NotAFile, error.to_string()))
            }
            StoreError::Io {
                op: Op::Read,
                source,
                ..
            } if source.kind() == std::io::ErrorKind::UnexpectedEof => {
                Self::Bad(Bad::new(Reason::Length, "it ends early"))
            }
            _ if is_bad_medium(&error) => {
                Self::Bad(Bad::new(Reason::Unreadable, error.to_string()))
            }
            _ => Self::Other(error),
        }
    }
}
