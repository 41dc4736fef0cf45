//! What people and programs ask for by name: keep a state, bring it into RAM, delete it.
//!
//! # Errors
//! Never a success that did nothing: a save that cannot become durable in time says so, a restore
//! answers only when all is in RAM, a deletion when nothing is left.

mod delete;
mod naming;
mod restore;
mod save;

use super::api::Selector;
use super::core::Core;
use super::error::ServiceError;
use crate::types::SnapshotId;

/// Longest name in bytes.
const MAX_NAME: usize = 4096;

pub(super) fn check_names(select: &Selector) -> Result<(), ServiceError> {
    let Selector {
        tenant,
        rid,
        conversation_id,
        turn_number,
        branch_name,
        snapshot_id: _,
    } = select;
    let names = [
        ("tenant", tenant),
        ("rid", rid),
        ("conversation_id", conversation_id),
        ("branch_name", branch_name),
    ];
    for (field, name) in names {
        let Some(name) = name else { continue };
        if name.is_empty() || name.len() > MAX_NAME {
            let text = format!("`{field}` is not a name of 1 to {MAX_NAME} bytes");
            return Err(ServiceError::Invalid(text));
        }
    }
    if *turn_number == Some(0) {
        return Err(ServiceError::Invalid("turns count from 1".to_owned()));
    }
    Ok(())
}

/// Why a snapshot that was there when the request came is not there any more.
fn gone(core: &Core, id: SnapshotId) -> ServiceError {
    match core.was_deleted(&id) {
        true => ServiceError::Deleted { snapshot: id },
        false => ServiceError::Data(format!("snapshot {id} went meanwhile")),
    }
}
