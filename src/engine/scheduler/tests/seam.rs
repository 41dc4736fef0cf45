//! The points where the scheduler calls a memory.

use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::engine::cache::Match;
use crate::engine::memory::{Boundary, Gate, Restored};

/// Notes every call; holds requests whose `rid` starts with "held" for some ticks.
#[derive(Default)]
struct Recorder {
    calls: Arc<Mutex<Vec<String>>>,
    ticks: usize,
}

impl Recorder {
    fn note(&self, what: String) {
        self.calls.lock().push(what);
    }
}

impl Memory for Recorder {
    fn enqueued(&mut self, request: &RequestInfo, _: &mut DeviceMemory) {
        self.note(format!("enqueued {} {}", request.rid, request.prompt.len()));
    }

    fn gate(&mut self, request: &RequestInfo, _: &mut DeviceMemory) -> Gate {
        if request.rid.starts_with("held") && self.ticks < 20 {
            Gate::Hold
        } else {
            Gate::Open
        }
    }

    fn admitted(&mut self, request: &RequestInfo, found: &Match, _: &mut DeviceMemory) {
        self.note(format!("admitted {} {}", request.rid, found.boundary));
    }

    fn inserted(&mut self, request: &RequestInfo, at: Boundary<'_>, device: &mut DeviceMemory) {
        let node = at.node;
        assert_eq!(device.cache().end_of(node), Some(at.tokens.len()));
        assert!(device.cache().state_of(node).is_some());
        assert!(at.tokens.starts_with(&request.prompt) || request.prompt.starts_with(at.tokens));
        self.note(format!("inserted {} {}", request.rid, at.tokens.len()));
    }

    fn finished(
        &mut self,
        request: &RequestInfo,
        tokens: &[u32],
        reason: FinishReason,
        _: &mut DeviceMemory,
    ) -> Option<Restored> {
        self.note(format!(
            "finished {} {} {reason:?}",
            request.rid,
            tokens.len()
        ));
        None
    }

    fn aborted(&mut self, request: &RequestInfo, _: &mut DeviceMemory) -> Option<Restored> {
        self.note(format!("aborted {}", request.rid));
        None
    }

    fn flush(&mut self, _: &mut DeviceMemory) {
        self.note("flush".to_owned());
    }

    fn stopping(&mut self, _: &mut DeviceMemory) {
        self.note("stopping".to_owned());
    }

    fn tick(&mut self, _: &mut DeviceMemory) {
        self.ticks += 1;
    }

    fn poll_interval(&self) -> Duration {
        Duration::from_millis(1)
    }

    fn holdings(&self) -> Holdings {
        Holdings::default()
    }

    fn report(&self) -> serde_json::Value {
        serde_json::json!("recorder")
    }
}

#[test]
fn a_memory_is_called_at_each_point_and_holds_one_request_only() {
    let recorder = Recorder::default();
    let calls = Arc::clone(&recorder.calls);
    let mut rig = Rig::with_memory(SHAPE, Box::new(recorder));
    let held = rig.submit_as("held", None, &prompt(1, 520), 4, &[]);
    let free = rig.submit_as("free", None, &prompt(2, 250), 10, &[]);
    let gone = rig.submit_as("held-gone", None, &prompt(3, 10), 10, &[]);
    drop(gone);
    rig.wait(free).unwrap();
    rig.wait(held).unwrap();
    rig.scheduler.flush().unwrap();
    let want = [
        "enqueued held 520",
        "enqueued free 250",
        "enqueued held-gone 10",
        "aborted held-gone",
        "admitted free 0",
        "inserted free 256",
        "finished free 260 Length",
        "admitted held 0",
        "inserted held 512",
        "finished held 524 Length",
        "flush",
    ];
    assert_eq!(*calls.lock(), want);
    assert_eq!(rig.scheduler.report()["memory"], "recorder");
    assert_eq!(rig.scheduler.report()["sanity_check"], "ok");
}
