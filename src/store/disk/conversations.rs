//! The files of all conversations.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use crate::store::{
    counters::Reason,
    error::StoreError,
    refs::{ConversationKey, ConversationRef},
    sealed_json::Bad,
};

use super::{data_dir::DataDir, layout, quarantine::Quarantined, root::Rel};

/// Conversations that were read and wait to be taken.
const AHEAD: usize = 64;

/// Conversation files: small, rewritten whole.
#[derive(Clone, Debug)]
pub struct Refs {
    dir: Arc<DataDir>,
    scanned: Arc<AtomicBool>,
}

// === impl Refs ===

impl Refs {
    pub(crate) fn new(dir: Arc<DataDir>) -> Self {
        Self {
            dir,
            scanned: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Reads all conversations, once, at the start; from then on they can be written. Any that is not
    /// whole is moved to quarantine and comes as `Err`.
    ///
    /// # Errors
    /// `Invalid` the second time; those of the system.
    pub fn scan(
        &self,
        f: &mut dyn FnMut(Result<ConversationRef, Quarantined>),
    ) -> Result<(), StoreError> {
        self.scan_by(1, &|conversation| conversation, f)
    }

    /// As [`Refs::scan`], in no order: so many threads read, and make of each what is wanted. `f` is
    /// called on this one.
    ///
    /// # Errors
    /// As [`Refs::scan`].
    pub fn scan_by<T: Send>(
        &self,
        threads: usize,
        make: &(dyn Fn(ConversationRef) -> T + Sync),
        f: &mut dyn FnMut(Result<T, Quarantined>),
    ) -> Result<(), StoreError> {
        if self.scanned.load(Ordering::Acquire) {
            return Err(StoreError::invalid("second scan of the conversations"));
        }
        let mut files = Vec::new();
        let folder = Rel::root().join(layout::REFS);
        self.dir.sweep_spread(&folder, 1, &mut |rel, _| {
            let Some(key) = layout::parse_conversation(rel.name()) else {
                return false;
            };
            files.push((rel.clone(), key));
            true
        })?;
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let read = |send: mpsc::SyncSender<_>| {
            while let Some((rel, key)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                let read = self.read(rel, *key).map(|read| read.map(make));
                if stop.load(Ordering::Relaxed) || send.send((rel, read)).is_err() {
                    return;
                }
            }
        };
        thread::scope(|scope| {
            let (send, receive) = mpsc::sync_channel(AHEAD);
            for _ in 0..threads.max(1) {
                let send = send.clone();
                scope.spawn(|| read(send));
            }
            drop(send);
            for (rel, read) in receive {
                match read {
                    Ok(Ok(made)) => f(Ok(made)),
                    Ok(Err(Bad { reason, detail, .. })) => {
                        f(Err(self.dir.quarantine(rel, reason, &detail)));
                    }
                    Err(error) => {
                        stop.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                }
            }
            Ok(())
        })?;
        self.scanned.store(true, Ordering::Release);
        Ok(())
    }

    /// Writes a conversation down, durably, in place of what was there. Two calls for the same
    /// conversation at once: one of them wins, whole.
    pub fn put(&self, conversation: &ConversationRef) -> Result<(), StoreError> {
        if !self.scanned.load(Ordering::Acquire) {
            return Err(StoreError::NotScanned);
        }
        let rel = layout::conversation(&conversation.key());
        self.dir.put_record(&rel, conversation)
    }

    /// The conversation as written down last, if there is one.
    ///
    /// # Errors
    /// `Damaged`: it was moved to quarantine.
    pub fn get(&self, key: &ConversationKey) -> Result<Option<ConversationRef>, StoreError> {
        let rel = layout::conversation(key);
        match self.read(&rel, *key) {
            Ok(Ok(conversation)) => Ok(Some(conversation)),
            Ok(Err(Bad { reason, detail, .. })) => {
                self.dir.quarantine(&rel, reason, &detail);
                Err(StoreError::Damaged {
                    path: self.dir.root.path().join(rel.as_path()),
                    reason,
                    detail,
                    hint: "",
                })
            }
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Forgets a conversation for good; says whether it was there.
    pub fn remove(&self, key: &ConversationKey) -> Result<bool, StoreError> {
        self.dir.remove_durably(&layout::conversation(key))
    }

    fn read(
        &self,
        rel: &Rel,
        key: ConversationKey,
    ) -> Result<Result<ConversationRef, Bad>, StoreError> {
        let read = self.dir.get_record::<ConversationRef>(rel)?;
        Ok(read.and_then(|conversation| {
            if conversation.key() == key && layout::conversation(&key) == *rel {
                Ok(conversation)
            } else {
                Err(Bad::new(Reason::Mismatch, "it belongs to another place"))
            }
        }))
    }
}
