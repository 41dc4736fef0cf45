//! Refused attaches: said to the worker, counted, and kept for people who look.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde::Serialize;
use utoipa::ToSchema;

use super::workers::seconds;
use crate::device::DeviceError;
use crate::pool::Shard;
use crate::proto::v1;
use crate::proto::v1::refusal::Reason;
use crate::types::Millis;

/// The most that are kept.
const MOST: usize = 64;

/// Longest text that is kept, in bytes.
const MAX_TEXT: usize = 1024;

/// One refused attach.
#[derive(Clone, PartialEq, Debug, Serialize, ToSchema)]
pub struct RefusalRow {
    /// Why, in one word.
    pub reason: &'static str,
    /// Why, for people.
    pub message: String,
    /// Of what model, as the worker called it.
    pub model_name: String,
    /// See `attn_tp_rank`.
    pub attn_tp_size: u32,
    /// Which rank of the server.
    pub attn_tp_rank: u32,
    /// Peer process, when known.
    pub pid: Option<i32>,
    /// How often in a row.
    pub times: u64,
    /// When it was last refused, unix time in seconds.
    pub at: f64,
}

/// The last refusals, the newest last.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    last: Mutex<VecDeque<RefusalRow>>,
}

/// Who asked, as far as it said.
#[derive(Debug)]
pub(super) struct Asker {
    model_name: String,
    shard: v1::Shard,
    pid: Option<i32>,
}

// === impl Asker ===

impl Asker {
    /// What can be kept of a request that may be refused.
    pub fn of(request: &v1::AttachRequest, pid: Option<i32>) -> Self {
        let name = request.model.as_ref().map(|model| &*model.display_name);
        Self {
            model_name: short(name.unwrap_or_default()),
            shard: request.shard.unwrap_or_default(),
            pid,
        }
    }

    /// A worker that attached.
    pub fn new(model_name: &str, shard: Shard, pid: Option<i32>) -> Self {
        let model_name = short(model_name);
        let shard = v1::Shard {
            attn_tp_size: shard.size,
            attn_tp_rank: shard.rank,
        };
        Self {
            model_name,
            shard,
            pid,
        }
    }
}

// === impl Refusals ===

impl Refusals {
    /// Notes one.
    pub fn note(&self, asker: Asker, refusal: &v1::Refusal, now: Millis) {
        let Asker {
            model_name,
            shard,
            pid,
        } = asker;
        let row = RefusalRow {
            reason: reason_name(refusal.reason()),
            message: short(&refusal.message),
            model_name,
            attn_tp_size: shard.attn_tp_size,
            attn_tp_rank: shard.attn_tp_rank,
            pid,
            times: 1,
            at: seconds(now),
        };
        let mut last = self.last.lock();
        // One that tries again and again takes one place.
        let same = |other: &RefusalRow| {
            let (times, at) = (row.times, row.at);
            RefusalRow {
                times,
                at,
                ..other.clone()
            } == row
        };
        let before = last.iter().position(same);
        let times = before
            .and_then(|at| last.remove(at))
            .map_or(0, |it| it.times);
        if last.len() >= MOST {
            last.pop_front();
        }
        last.push_back(RefusalRow {
            times: times.saturating_add(1),
            ..row
        });
    }

    /// All that are kept.
    pub fn rows(&self) -> Vec<RefusalRow> {
        self.last.lock().iter().cloned().collect()
    }
}

fn short(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().to_owned()
}

pub(super) fn refuse(reason: Reason, message: impl Into<String>) -> v1::Refusal {
    v1::Refusal {
        reason: reason.into(),
        message: message.into(),
        retry_after_ms: 0,
    }
}

pub(super) fn refuse_ring(error: &DeviceError) -> v1::Refusal {
    let reason = match error {
        DeviceError::SelfTest { .. } => Reason::SelfTest,
        DeviceError::Busy => Reason::NotReady,
        DeviceError::Cuda(error) if error.passes() => Reason::NotReady,
        _ => Reason::DeviceUnavailable,
    };
    refuse(reason, error.to_string())
}

pub(super) fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::Unspecified => "unspecified",
        Reason::ProtocolVersion => "protocol_version",
        Reason::ChannelVersion => "channel_version",
        Reason::UnknownPool => "unknown_pool",
        Reason::BadGeometry => "bad_geometry",
        Reason::BadIdentity => "bad_identity",
        Reason::RingTooSmall => "ring_too_small",
        Reason::NoCommonMode => "no_common_mode",
        Reason::DeviceUnavailable => "device_unavailable",
        Reason::Unauthenticated => "unauthenticated",
        Reason::NotReady => "not_ready",
        Reason::TooManyWorkers => "too_many_workers",
        Reason::Unsupported => "unsupported",
        Reason::SelfTest => "self_test",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_kept_and_repetition_takes_one_place() {
        let refusals = Refusals::default();
        let asker = |pid| Asker {
            model_name: "m".to_owned(),
            shard: v1::Shard::default(),
            pid: Some(pid),
        };
        for time in 0..3 {
            refusals.note(asker(1), &refuse(Reason::Unsupported, "x"), Millis(time));
        }
        let rows = refusals.rows();
        assert_eq!((rows.len(), rows[0].times, rows[0].at), (1, 3, 0.002));
        for pid in 0..200 {
            refusals.note(
                asker(pid),
                &refuse(Reason::NotReady, "y".repeat(5000)),
                Millis(9),
            );
        }
        let rows = refusals.rows();
        assert_eq!(rows.len(), MOST);
        assert_eq!(rows.last().unwrap().pid, Some(199));
        assert_eq!(rows.last().unwrap().message.len(), MAX_TEXT);
    }
}
