//! Conversations go to disk: small files, each rewritten whole.
//!
//! # Errors
//! One that is refused is tried again; what the others would meet, too, is not tried with each of
//! them. A conversation that left no state takes no other's room: where there is none it is not
//! written.

use super::Service;
use super::conversations::{ConversationKey, IN_RAM};
use super::core::Failure;
use crate::store::{self, ErrorKind};

// === impl Service ===

impl Service {
    /// Writes conversations that changed, if something durable bears their name.
    pub(super) fn write_refs(&self) {
        let Some(refs) = &self.store.refs else {
            self.core.lock().conversations.shelve(IN_RAM, false);
            return;
        };
        let keys: Vec<ConversationKey> = {
            let mut core = self.core.lock();
            if self.clock.monotonic() < core.queue.not_before {
                return;
            }
            let keys: Vec<_> = core.conversations.take_dirty().into_iter().collect();
            core.queue.writing_refs = keys.len();
            core.conversations.trim(self.config.max_idle_conversations);
            core.conversations.shelve(IN_RAM, true);
            keys
        };
        let (mut hopeless, mut wrote) = (false, false);
        let mut failed = false;
        for key in keys {
            if hopeless {
                self.core.lock().conversations.mark_dirty(key);
                continue;
            }
            let name = store::ConversationKey::of(key.tenant.as_deref(), &key.name);
            if self.core.lock().conversations.is_shelved(&key) {
                // What is written anew must have what only the record has.
                let read = match refs.get(&name) {
                    Ok(read) => read,
                    Err(error) => {
                        self.disk_failed("read", &error);
                        if error.kind() != ErrorKind::Data {
                            self.core.lock().conversations.mark_dirty(key);
                            failed = true;
                            continue;
                        }
                        None
                    }
                };
                self.core.lock().conversations.unshelve(&key, read);
            }
            let stored = self.core.lock().stored(&key);
            let write = || match &stored {
                Some(conversation) => refs.put(conversation),
                None => refs.remove(&name).map(drop),
            };
            let bare = stored.as_ref().is_some_and(store::ConversationRef::is_bare);
            let written = write().or_else(|error| {
                if bare && error.kind() == ErrorKind::NoSpace {
                    // What was said without leaving a state takes no other's room.
                    refs.remove(&name).map(drop)
                } else if self.make_room_on_disk(&error) {
                    write()
                } else {
                    Err(error)
                }
            });
            match written {
                Ok(()) => wrote = true,
                Err(error) => {
                    // What the others would meet, too, is not tried with each of them.
                    let failure = self.write_failed(&error);
                    failed = true;
                    hopeless = matches!(failure, Failure::NoSpace | Failure::Unavailable);
                    let mut core = self.core.lock();
                    core.conversations.mark_dirty(key);
                    core.queue.names_given_up |= core.queue.is_hopeless(failure);
                }
            }
        }
        let mut core = self.core.lock();
        core.queue.writing_refs = 0;
        core.queue.refs_failed = failed;
        // A small file may find room where what waits does not.
        let all = wrote && !hopeless && core.queue.len() == 0;
        drop(core);
        if all {
            self.write_succeeded();
        }
    }
}
