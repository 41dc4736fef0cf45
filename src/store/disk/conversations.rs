//! The files of all conversations.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::store::{
    counters::Reason,
    error::StoreError,
    refs::{ConversationKey, ConversationRef},
    sealed_json::Bad,
};

use super::{data_dir::DataDir, layout, quarantine::Quarantined, root::Rel};

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
        if self.scanned.load(Ordering::Acquire) {
            return Err(StoreError::invalid("second scan of the conversations"));
        }
        let mut failed = None;
        let folder = Rel::root().join(layout::REFS);
        self.dir.sweep_spread(&folder, 1, &mut |rel, _| {
            let Some(key) = layout::parse_conversation(rel.name()) else {
                return false;
            };
            match self.read(rel, key) {
                _ if failed.is_some() => {}
                Err(error) => failed = Some(error),
                Ok(Ok(conversation)) => f(Ok(conversation)),
                Ok(Err(Bad { reason, detail, .. })) => {
                    f(Err(self.dir.quarantine(rel, reason, &detail)));
                }
            }
            true
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
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
