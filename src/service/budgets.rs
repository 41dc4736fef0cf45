//! Budgets of the tiers, changed while the daemon runs.
//!
//! A change is in force at once: what is too much leaves in the next round of the disk thread, which
//! is woken. It is not written down: the next start takes what the configuration says, so that the
//! file stays the one place where a machine's budgets are found.

use std::sync::atomic::Ordering;

use super::Service;
use super::api::{BudgetChange, Event, TierRow};
use super::error::ServiceError;
use crate::store::Tier;
use crate::types::TierKind;

/// The smallest budget of RAM: a few states of a small model.
const RAM_LEAST: u64 = 1 << 20;
/// The smallest budget of the disk.
const DISK_LEAST: u64 = 16 << 20;
/// The largest that a disk's numbers can be.
const DISK_MOST: u64 = 1 << 60;

impl Service {
    /// Changes budgets: all that are named, or none. The tiers as they are then.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn set_budgets(&self, change: BudgetChange) -> Result<Vec<TierRow>, ServiceError> {
        self.check_budgets(&change)?;
        let BudgetChange {
            ram_budget_bytes,
            disk_budget_bytes,
            disk_min_free_bytes,
        } = change;
        if let Some(bytes) = ram_budget_bytes {
            self.store.ram.set_budget(bytes);
        }
        if let (Some(disk), Some(bytes)) = (&self.store.disk, disk_budget_bytes) {
            disk.set_budget(bytes);
        }
        if let Some(bytes) = disk_min_free_bytes {
            self.store.set_disk_min_free(bytes);
            self.floor_changed.store(true, Ordering::Release);
        }
        tracing::info!(
            ram_budget_bytes,
            disk_budget_bytes,
            disk_min_free_bytes,
            "Budgets changed, until the next start"
        );
        let tiers = self.tiers();
        let disk = disk_budget_bytes.or(disk_min_free_bytes).is_some();
        for row in &tiers {
            let changed = match row.tier {
                TierKind::Ram => ram_budget_bytes.is_some(),
                TierKind::Disk => disk,
                TierKind::Vram | TierKind::Remote => false,
            };
            if changed {
                self.announce(Event::Budget {
                    tier: row.tier,
                    budget_bytes: row.budget_bytes,
                    min_free_bytes: row.min_free_bytes,
                });
            }
        }
        // What waits for room may have it now.
        self.core.lock().queue.not_before = std::time::Duration::ZERO;
        self.changed.notify_waiters();
        self.wake.notify_one();
        Ok(tiers)
    }

    fn check_budgets(&self, change: &BudgetChange) -> Result<(), ServiceError> {
        let BudgetChange {
            ram_budget_bytes,
            disk_budget_bytes,
            disk_min_free_bytes,
        } = change;
        let invalid = |text: String| Err(ServiceError::Invalid(text));
        if ram_budget_bytes
            .or(*disk_budget_bytes)
            .or(*disk_min_free_bytes)
            .is_none()
        {
            let names = "`ram_budget_bytes`, `disk_budget_bytes` or `disk_min_free_bytes`";
            return invalid(format!("{names} is needed"));
        }
        let most = self.store.ram_most();
        if ram_budget_bytes.is_some_and(|bytes| !(RAM_LEAST..=most).contains(&bytes)) {
            return invalid(format!(
                "`ram_budget_bytes` is not between {RAM_LEAST} and {most}: the memory was taken at the \
                 start, `store.ram` without `store.ram_headroom`"
            ));
        }
        if disk_budget_bytes.or(*disk_min_free_bytes).is_some() && self.store.disk.is_none() {
            return invalid("there is no disk tier: `store.disk.path` is empty".to_owned());
        }
        if disk_budget_bytes.is_some_and(|bytes| !(DISK_LEAST..=DISK_MOST).contains(&bytes)) {
            return invalid(format!(
                "`disk_budget_bytes` is not between {DISK_LEAST} and {DISK_MOST}"
            ));
        }
        if disk_min_free_bytes.is_some_and(|bytes| bytes > DISK_MOST) {
            return invalid(format!("`disk_min_free_bytes` is above {DISK_MOST}"));
        }
        Ok(())
    }
}
