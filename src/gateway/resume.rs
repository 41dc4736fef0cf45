//! `restore_snapshot` with `create_new_request`: an answer from a snapshot and what goes on from it.
//!
//! # Where it goes on
//! A snapshot's state stands at its boundary; its turn may have a few tokens more. Clients that know
//! the snapshot's tokens (`fill_ids`) send all that follows the boundary, others only what is new
//! after the whole turn. Both are right: a continuation that begins with the turn's tokens beyond the
//! boundary goes on at the boundary, any other goes on at the turn's end. `append_to` (`boundary` or
//! `turn`) says it instead. An empty continuation goes on at the turn's end: the answer is what the
//! model says after its last answer.

use std::sync::Arc;

use serde_json::{Value, json};

use super::base::Base;
use super::compose::Composed;
use super::generate::{Order, facts, go_on_in};
use super::{Fields, Gateway, GatewayError, Target};
use crate::service::{InfoRequest, Selector, SnapshotRow};

/// What to go on from, and with what.
#[derive(Clone, Debug, Default)]
pub struct Resume {
    /// The id of the HTTP request.
    pub request_id: String,
    /// The snapshot.
    pub select: Selector,
    /// Tokens that follow.
    pub continuation: Vec<u32>,
    /// Most tokens of the answer.
    pub max_new_tokens: u32,
    /// Further sampling parameters.
    pub sampling: Option<Fields>,
    /// `boundary` or `turn`; by the continuation if there is none.
    pub append_to: Option<String>,
    /// The id of the new request; without one it gets its own.
    pub rid: Option<String>,
    /// `cache_salt`, `extra_key` and `lora_path`, each if it is said; else those of the snapshot.
    pub namespace: Fields,
}

// === impl Gateway ===

impl Gateway {
    /// The snapshot that was gone on from, and the answer: `rid`, `output_ids`, `output_text`,
    /// `finish_reason`, `usage`, `base_tokens`.
    ///
    /// # Errors
    /// All of [`GatewayError`].
    pub async fn resume(
        self: &Arc<Self>,
        resume: Resume,
    ) -> Result<(SnapshotRow, Value), GatewayError> {
        let Resume {
            request_id,
            select,
            continuation,
            max_new_tokens,
            sampling,
            append_to,
            rid,
            namespace,
        } = resume;
        let row = self.service.info(InfoRequest {
            select: select.clone(),
            with_tokens: true,
        })?;
        let flight = self.takeoff(rid)?;
        let fill = row.fill_ids.clone().unwrap_or_default();
        let tenant = select.tenant.clone();
        let namespace_of = self.service.namespace_of(&row.snapshot_id);
        let target = Target {
            tenant,
            // A snapshot that no conversation names begins one of its own.
            conversation: row
                .conversation_id
                .clone()
                .unwrap_or_else(|| flight.rid.clone()),
            turn: row.turn_number,
            branch: row
                .branch_name
                .clone()
                .filter(|_| row.turn_number.is_none()),
        };
        let target = self.resolved(target)?;
        let named = row.turn_number.is_some() || target.branch.is_some();
        let mut body = namespace;
        go_on_in(&mut body, &namespace_of)?;
        let mut order = Order {
            facts: facts(&flight, request_id, &target),
            flight,
            body,
        };
        let base = match named {
            true => order.enter(&target).await.or_else(|error| match error {
                // Its turn is not known to its end: what the snapshot holds is.
                GatewayError::Service(_) => Ok(bare(&fill, &row)),
                error => Err(error),
            })?,
            false => bare(&fill, &row),
        };
        order.facts.from(&base);
        let tail = base.tokens.strip_prefix(fill.as_slice()).unwrap_or(&[]);
        let at_boundary = match append_to.as_deref() {
            Some("boundary") => true,
            Some("turn") => false,
            Some(_) => {
                let text = "`append_to` is neither `boundary` nor `turn`";
                return Err(GatewayError::Invalid(text.to_owned()));
            }
            None => !tail.is_empty() && continuation.starts_with(tail),
        };
        let known = if at_boundary { &fill } else { &base.tokens };
        order.compose(&Composed::append(known, &continuation))?;
        let mut sampling = sampling.unwrap_or_default();
        super::body::one_answer(&sampling, &["n"])?;
        sampling.insert("max_new_tokens".into(), max_new_tokens.into());
        order.body.insert("sampling_params".into(), sampling.into());
        let rid = order.flight.rid.clone();
        let base_tokens = known.len();
        let answer = order.whole().await?;
        let field = |name: &str| answer.get(name).cloned().unwrap_or_default();
        let reply = json!({
            "rid": rid,
            "output_ids": field("output_ids"),
            "output_text": field("text"),
            "finish_reason": answer.pointer("/meta_info/finish_reason"),
            "usage": field("usage"),
            "engram": field("engram"),
            "base_tokens": base_tokens,
        });
        Ok((row, reply))
    }
}

/// The snapshot alone.
fn bare(fill: &[u32], row: &SnapshotRow) -> Base {
    Base {
        tokens: fill.to_vec(),
        turn: row.turn_number.unwrap_or(0),
        boundary: row.boundary,
        messages: None,
        is_head: false,
        ..Base::default()
    }
}
