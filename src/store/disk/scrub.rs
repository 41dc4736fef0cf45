//! Reading what nobody reads, so that damage is found while there may still be another copy.
//!
//! # What
//! Objects are verified in the order of their ids, chunk by chunk: a *pass*. An id is a hash, so the
//! order has nothing to do with age or use; and as every pass goes the same way, the next object is
//! always the one whose last check is the longest ago. Objects written since then were checked by
//! whoever wrote them.
//!
//! # State
//! [`Scrub`] is a place in a pass. [`ScrubMark`] is what survives a restart: the last id that was
//! checked, and when passes began and ended. It is one small file, written once a minute while a pass
//! is under way: no object is written to for having been read, and a daemon that is restarted often
//! still gets to the end. Losing the mark costs a pass that starts anew.
//!
//! # Cancellation
//! [`DiskTier::scrub`] reads one chunk and returns; whoever calls decides when it goes on.
//!
//! # Errors
//! A bad object goes to quarantine with all its shards, as when it is read.

use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    device::shm::SharedMap,
    store::{
        counters::Reason,
        error::StoreError,
        object::ObjectMeta,
        sealed_json::{Bad, Record},
    },
    types::{Millis, ObjectId},
};

use super::{
    DiskTier, layout,
    object_file::{CHUNK, Plan},
    root::Rel,
    transfer::{Audit, ReadError},
};

/// Ids that are looked up at once.
const BATCH: usize = 4096;

/// A place in a pass over all objects.
#[derive(Debug)]
pub struct Scrub {
    scratch: SharedMap,
    /// The last object that was examined.
    last: Option<ObjectId>,
    next: VecDeque<ObjectId>,
    at: Option<At>,
}

/// The object that is being read.
#[derive(Debug)]
struct At {
    meta: Arc<ObjectMeta>,
    plan: Plan,
    /// Tells the object from another of its id.
    serial: u32,
    shard: u32,
    audit: Option<Audit>,
    tokens: Option<Vec<u8>>,
}

/// What one step did.
#[derive(Debug)]
pub enum Scrubbed {
    /// Verified so many bytes.
    Bytes(u64),
    /// An object is bad or could not be read; a bad one is gone from the tier.
    Bad(ObjectId, StoreError),
    /// There is no further object: the pass is over, and the next step begins another.
    End,
}

/// How far scrubbing is, on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubMark {
    /// 1.
    pub format_version: u32,
    /// When the last pass began.
    pub began: Millis,
    /// The object up to which it is done; none: it is over.
    pub last: Option<ObjectId>,
    /// When the last whole pass ended, if there was one.
    pub ended: Option<Millis>,
}

// === impl Scrub ===

impl Scrub {
    /// Goes on after this object, or begins.
    ///
    /// # Errors
    /// The system gives no memory.
    pub fn after(last: Option<ObjectId>) -> std::io::Result<Self> {
        Ok(Self {
            scratch: SharedMap::anonymous(CHUNK)?,
            last,
            next: VecDeque::new(),
            at: None,
        })
    }

    /// The last object that was examined in this pass.
    #[must_use]
    pub fn last(&self) -> Option<ObjectId> {
        self.last
    }
}

impl Record for ScrubMark {
    const FORMAT: u32 = 1;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

impl DiskTier {
    /// Verifies the next chunk of the next object. Blocks for one read.
    pub fn scrub(&self, scrub: &mut Scrub) -> Scrubbed {
        loop {
            let Some(mut at) = scrub.at.take().or_else(|| self.next_of(scrub)) else {
                scrub.last = None;
                return Scrubbed::End;
            };
            let id = at.meta.id;
            match self.step(&mut at, &scrub.scratch) {
                Ok(Some(bytes)) => {
                    scrub.at = Some(at);
                    return Scrubbed::Bytes(bytes);
                }
                Ok(None) => scrub.last = Some(id),
                Err(error) => {
                    scrub.last = Some(id);
                    match self.failed_read(&at.meta, at.serial, at.shard, error) {
                        // It went while it was read.
                        StoreError::NotFound { .. } => {}
                        error => return Scrubbed::Bad(id, error),
                    }
                }
            }
        }
    }

    /// How far scrubbing was; none if nobody knows.
    #[must_use]
    pub fn scrub_mark(&self) -> Option<ScrubMark> {
        match self.dir.get_record(&mark()) {
            Ok(Ok(mark)) => Some(mark),
            Ok(Err(Bad { reason, detail, .. })) => {
                let reason = reason.as_str();
                tracing::warn!(
                    reason,
                    detail,
                    "The mark of scrubbing is bad: it begins anew"
                );
                None
            }
            Err(error) => {
                tracing::debug!(%error, "No mark of scrubbing");
                None
            }
        }
    }

    /// Writes down how far scrubbing is.
    ///
    /// # Errors
    /// Those of writing.
    pub fn put_scrub_mark(&self, it: &ScrubMark) -> Result<(), StoreError> {
        self.dir.put_record(&mark(), it)
    }

    /// Bytes of the chunk that follows, or the end of an object.
    fn step(&self, at: &mut At, scratch: &SharedMap) -> Result<Option<u64>, ReadError> {
        let root = &self.dir.root;
        while at.shard < at.meta.shards {
            let rel = layout::object(&at.meta.fingerprint, &at.meta.id, at.shard);
            let audit = match &mut at.audit {
                Some(audit) => audit,
                None => {
                    let what = (&*at.meta, &at.plan, at.shard);
                    let (audit, tokens) = Audit::open(root, &rel, what, self.direct)?;
                    if at.tokens.get_or_insert_with(|| tokens.clone()) != &tokens {
                        return Err(ReadError::Bad(Bad::new(
                            Reason::Mismatch,
                            "its tokens are not those of the first shard",
                        )));
                    }
                    at.audit.insert(audit)
                }
            };
            if let Some(bytes) = audit.step(root, &rel, &at.plan, scratch)? {
                return Ok(Some(bytes));
            }
            at.audit = None;
            at.shard += 1;
        }
        Ok(None)
    }

    fn next_of(&self, scrub: &mut Scrub) -> Option<At> {
        loop {
            if scrub.next.is_empty() {
                scrub.next = self.ids_after(scrub.last);
            }
            let id = scrub.next.pop_front()?;
            match self.plan(&id) {
                Ok((meta, plan, serial)) => {
                    return Some(At {
                        meta,
                        plan,
                        serial,
                        shard: 0,
                        audit: None,
                        tokens: None,
                    });
                }
                // It went since it was listed.
                Err(_) => scrub.last = Some(id),
            }
        }
    }

    /// The next ids in order.
    fn ids_after(&self, last: Option<ObjectId>) -> VecDeque<ObjectId> {
        let mut lowest = BinaryHeap::with_capacity(BATCH + 1);
        self.objects.each(|id| {
            if last.is_none_or(|last| id.0 > last.0) {
                lowest.push(id.0);
                if lowest.len() > BATCH {
                    lowest.pop();
                }
            }
        });
        lowest.into_sorted_vec().into_iter().map(ObjectId).collect()
    }
}

fn mark() -> Rel {
    Rel::root().join(layout::SCRUB)
}
