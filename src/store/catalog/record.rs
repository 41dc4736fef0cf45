//! The bytes of the catalog's records: a kind (u8), then fields; numbers as LEB128 unless said
//! otherwise. Each stands in a frame, see `frame`.

use crate::types::{
    Fingerprint, Generation, Millis, Namespace, ObjectId, SnapshotId, TokenId, TokenRange,
};

const OWNER: u8 = 1;
const ROW: u8 = 2;
const DROP: u8 = 3;
const BEGIN: u8 = 4;
const GONE: u8 = 5;
const DOUBT: u8 = 6;
const STAMP: u8 = 7;

/// When a folder of manifests was changed last, as its file system says.
pub(crate) type Stamp = (i64, u32);

/// What many snapshots have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The model.
    pub fingerprint: Fingerprint,
    /// Who may share it.
    pub namespace: Namespace,
    /// Shards of each object.
    pub shards: u32,
    /// The model's name, for people.
    pub model: String,
}

/// Tokens of a snapshot that stand side by side in the token log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenRun {
    /// Where, in tokens.
    pub offset: u64,
    /// How many.
    pub len: u32,
    /// The first of them.
    pub first: TokenId,
    /// The index's hash of their start.
    pub head: u32,
    /// CRC-32C of them all, as little endian words.
    pub crc: u32,
}

/// An object of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowObject {
    /// The object.
    pub object: ObjectId,
    /// The save that it comes from.
    pub generation: Generation,
    /// What its files take on disk.
    pub bytes: u64,
}

/// KV of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowKv {
    /// The object.
    pub object: RowObject,
    /// The part used.
    pub range: TokenRange,
    /// All that the object holds.
    pub object_range: TokenRange,
}

/// A snapshot in the catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Number of its owner.
    pub owner: u32,
    /// When it was made.
    pub created: Millis,
    /// The save that made it.
    pub generation: Generation,
    /// Token count at which its state stands.
    pub boundary: u32,
    /// What its manifest takes on disk.
    pub manifest_bytes: u64,
    /// The row whose KV and tokens come first, by number.
    pub base: Option<u32>,
    /// How many of the KV references of that row come first.
    pub shared: u32,
    /// Its state.
    pub state: RowObject,
    /// KV after the shared.
    pub kv: Vec<RowKv>,
    /// The token where the runs start: the base's boundary, or 0.
    pub from: u32,
    /// Where its tokens stand; empty if that is not known.
    pub runs: Vec<TokenRun>,
    /// Tells its KV references, all of them, from others.
    pub digest: [u8; 16],
    /// Its folder, after it came.
    pub(crate) stamp: Stamp,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record<'a> {
    Owner(Owner),
    /// A row's body, see [`decode_row`], and its snapshot.
    Row(SnapshotId, &'a [u8]),
    Drop {
        snapshot: SnapshotId,
        stamp: Stamp,
    },
    /// An object's files may come to be.
    Begin {
        fingerprint: Fingerprint,
        object: [u8; 8],
    },
    /// An object's files are gone.
    Gone {
        object: [u8; 8],
    },
    /// What is on disk of a snapshot is not known.
    Doubt {
        snapshot: SnapshotId,
    },
    /// When a folder of manifests was changed last.
    Stamp {
        fingerprint: Fingerprint,
        folder: u8,
        stamp: Stamp,
    },
}

/// Reads fields one after the other.
struct Fields<'a>(&'a [u8]);

// === impl Row ===

impl Row {
    /// A row to decode into.
    pub(crate) fn blank() -> Self {
        let nothing = RowObject {
            object: ObjectId([0; 32]),
            generation: Generation(0),
            bytes: 0,
        };
        Self {
            snapshot: SnapshotId::from_bytes([0; 16]),
            owner: 0,
            created: Millis(0),
            generation: Generation(0),
            boundary: 0,
            manifest_bytes: 0,
            base: None,
            shared: 0,
            state: nothing,
            kv: Vec::new(),
            from: 0,
            runs: Vec::new(),
            digest: [0; 16],
            stamp: (0, 0),
        }
    }
}

// === impl Fields ===

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn var(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        let mut shift = 0;
        loop {
            let [byte] = self.array::<1>()?;
            let bits = u64::from(byte & 0x7f);
            let room = shift < 63 || bits <= 1;
            value |= bits.checked_shl(shift).filter(|_| room)?;
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
        }
    }

    fn var32(&mut self) -> Option<u32> {
        u32::try_from(self.var()?).ok()
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.array()?))
    }

    fn stamp(&mut self) -> Option<Stamp> {
        Some((unzigzag(self.var()?), self.var32()?))
    }

    fn object(&mut self, generation: Generation) -> Option<RowObject> {
        let object = ObjectId(self.array()?);
        let delta = unzigzag(self.var()?);
        Some(RowObject {
            object,
            generation: Generation(generation.0.wrapping_add_signed(delta)),
            bytes: self.var()?.checked_mul(4096)?,
        })
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// The record in a body; `None` if it is none.
pub(crate) fn decode(body: &[u8]) -> Option<Record<'_>> {
    let mut fields = Fields(body);
    let [kind] = fields.array::<1>()?;
    let record = match kind {
        OWNER => {
            let fingerprint = Fingerprint(fields.array()?);
            let shards = fields.var32()?;
            let len = fields.var32()? as usize;
            let model = String::from_utf8(fields.take(len)?.to_vec()).ok()?;
            let namespace = serde_json::from_slice(fields.0).ok()?;
            return Some(Record::Owner(Owner {
                fingerprint,
                namespace,
                shards,
                model,
            }));
        }
        ROW => {
            let snapshot = SnapshotId::from_bytes(fields.array()?);
            return Some(Record::Row(snapshot, fields.0));
        }
        DROP => Record::Drop {
            snapshot: SnapshotId::from_bytes(fields.array()?),
            stamp: fields.stamp()?,
        },
        BEGIN => Record::Begin {
            fingerprint: Fingerprint(fields.array()?),
            object: fields.array()?,
        },
        GONE => Record::Gone {
            object: fields.array()?,
        },
        DOUBT => Record::Doubt {
            snapshot: SnapshotId::from_bytes(fields.array()?),
        },
        STAMP => {
            let fingerprint = Fingerprint(fields.array()?);
            let [folder] = fields.array()?;
            Record::Stamp {
                fingerprint,
                folder,
                stamp: fields.stamp()?,
            }
        }
        _ => return None,
    };
    fields.end()?;
    Some(record)
}

/// The row of number `ordinal` in the body of a [`Record::Row`].
pub(crate) fn decode_row(
    snapshot: SnapshotId,
    body: &[u8],
    ordinal: u32,
    row: &mut Row,
) -> Option<()> {
    let mut fields = Fields(body);
    row.snapshot = snapshot;
    row.owner = fields.var32()?;
    row.created = Millis(fields.var()?);
    row.generation = Generation(u64::from_le_bytes(fields.array()?));
    row.boundary = fields.var32()?;
    row.manifest_bytes = fields.var()?.checked_mul(4096)?;
    row.stamp = fields.stamp()?;
    row.digest = fields.array()?;
    let back = fields.var32()?;
    row.base = match back {
        0 => None,
        back => Some(ordinal.checked_sub(back)?),
    };
    row.shared = fields.var32()?;
    row.state = fields.object(row.generation)?;
    let count = fields.var32()?;
    row.kv.clear();
    let mut at = None;
    for _ in 0..count {
        let object = fields.object(row.generation)?;
        let start = match at {
            None => fields.var32()?,
            Some(end) => end,
        };
        let range = TokenRange {
            start,
            end: start.checked_add(fields.var32()?)?,
        };
        at = Some(range.end);
        let object_range = match fields.var32()? {
            0 => range,
            1 => TokenRange::new(fields.var32()?, fields.var32()?).ok()?,
            _ => return None,
        };
        row.kv.push(RowKv {
            object,
            range,
            object_range,
        });
    }
    row.from = fields.var32()?;
    let count = fields.var32()?;
    row.runs.clear();
    for _ in 0..count {
        row.runs.push(TokenRun {
            offset: fields.var()?,
            len: fields.var32()?,
            first: fields.word()?,
            head: fields.word()?,
            crc: fields.word()?,
        });
    }
    fields.end()
}

pub(crate) fn encode_owner(owner: &Owner, out: &mut Vec<u8>) {
    out.push(OWNER);
    out.extend_from_slice(&owner.fingerprint.0);
    put(out, owner.shards.into());
    put(out, owner.model.len() as u64);
    out.extend_from_slice(owner.model.as_bytes());
    let namespace = serde_json::to_vec(&owner.namespace).expect("plain strings");
    out.extend_from_slice(&namespace);
}

pub(crate) fn encode_row(row: &Row, ordinal: u32, out: &mut Vec<u8>) {
    out.push(ROW);
    out.extend_from_slice(&row.snapshot.to_bytes());
    put(out, row.owner.into());
    put(out, row.created.0);
    out.extend_from_slice(&row.generation.0.to_le_bytes());
    put(out, row.boundary.into());
    put(out, row.manifest_bytes / 4096);
    put_stamp(out, row.stamp);
    out.extend_from_slice(&row.digest);
    put(out, row.base.map_or(0, |base| u64::from(ordinal - base)));
    put(out, row.shared.into());
    put_object(out, &row.state, row.generation);
    put(out, row.kv.len() as u64);
    for (at, kv) in row.kv.iter().enumerate() {
        put_object(out, &kv.object, row.generation);
        if at == 0 {
            put(out, kv.range.start.into());
        }
        put(out, kv.range.len().into());
        if kv.range == kv.object_range {
            put(out, 0);
        } else {
            put(out, 1);
            put(out, kv.object_range.start.into());
            put(out, kv.object_range.end.into());
        }
    }
    put(out, row.from.into());
    put(out, row.runs.len() as u64);
    for run in &row.runs {
        put(out, run.offset);
        put(out, run.len.into());
        for word in [run.first, run.head, run.crc] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
}

pub(crate) fn encode_drop(snapshot: SnapshotId, stamp: Stamp, out: &mut Vec<u8>) {
    out.push(DROP);
    out.extend_from_slice(&snapshot.to_bytes());
    put_stamp(out, stamp);
}

pub(crate) fn encode_begin(fingerprint: &Fingerprint, object: [u8; 8], out: &mut Vec<u8>) {
    out.push(BEGIN);
    out.extend_from_slice(&fingerprint.0);
    out.extend_from_slice(&object);
}

pub(crate) fn encode_stamp(fingerprint: &Fingerprint, folder: u8, stamp: Stamp, out: &mut Vec<u8>) {
    out.push(STAMP);
    out.extend_from_slice(&fingerprint.0);
    out.push(folder);
    put_stamp(out, stamp);
}

pub(crate) fn encode_gone(object: &ObjectId, out: &mut Vec<u8>) {
    out.push(GONE);
    out.extend_from_slice(&prefix(object));
}

pub(crate) fn encode_doubt(snapshot: SnapshotId, out: &mut Vec<u8>) {
    out.push(DOUBT);
    out.extend_from_slice(&snapshot.to_bytes());
}

/// What an object is called where only its folder matters.
pub(crate) fn prefix(object: &ObjectId) -> [u8; 8] {
    object.0.first_chunk().copied().unwrap_or_default()
}

fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_stamp(out: &mut Vec<u8>, (seconds, nanos): Stamp) {
    put(out, zigzag(seconds));
    put(out, nanos.into());
}

fn put_object(out: &mut Vec<u8>, object: &RowObject, generation: Generation) {
    out.extend_from_slice(&object.object.0);
    let delta = object.generation.0.wrapping_sub(generation.0);
    put(out, zigzag(delta.cast_signed()));
    put(out, object.bytes.div_ceil(4096));
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)).cast_unsigned()
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

#[cfg(test)]
mod tests;
