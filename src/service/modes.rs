//! Which transfer mode a worker gets, and why.
//!
//! # What
//! The worker says what it can do, best first; the settings say what may be; the devices say what is
//! possible. The first that all three allow is taken. Whether a ring on a GPU can be opened shows
//! only when it is tried ([`Plan::or_engine`]).

use crate::device::DeviceKind;
use crate::proto::v1;
use crate::proto::v1::refusal::Reason;
use crate::types::TransferMode;

use super::refusals::refuse;

/// The mode of one worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub mode: TransferMode,
    /// Why it is this one, for people.
    pub why: String,
    /// Mode engine may take its place.
    may_engine: bool,
}

// === impl Plan ===

impl Plan {
    /// The mode of a worker with a ring on `device`, which can do `wants`, best first. `allowed`: by
    /// the settings; `has`: the devices that are here.
    ///
    /// # Errors
    /// There is none.
    pub fn new(
        wants: &[TransferMode],
        allowed: &[TransferMode],
        device: DeviceKind,
        has: impl Fn(DeviceKind) -> bool,
    ) -> Result<Self, v1::Refusal> {
        let common = |mode: &TransferMode| wants.contains(mode) && allowed.contains(mode);
        let may_engine = common(&TransferMode::Engine) && has(DeviceKind::Host);
        // What kept an earlier one of the worker's wishes from being granted.
        let mut obstacle = None;
        for mode in wants {
            let possible = match mode {
                TransferMode::Ipc => has(device),
                TransferMode::Engine => has(DeviceKind::Host),
            };
            if !allowed.contains(mode) {
                let text = format!("service.modes of this daemon does not allow {mode}");
                obstacle.get_or_insert((Reason::NoCommonMode, text));
            } else if !possible {
                let text = format!("this daemon has no {} device", device.as_str());
                obstacle.get_or_insert((Reason::DeviceUnavailable, text));
            } else {
                let why = match (obstacle, wants) {
                    (Some((_, why)), _) => why,
                    (None, [_]) => format!("the worker allows {mode} only"),
                    (None, _) => format!("this daemon has a {} device", device.as_str()),
                };
                let mode = *mode;
                return Ok(Self {
                    mode,
                    why,
                    may_engine,
                });
            }
        }
        let (reason, text) = obstacle.unwrap_or((
            Reason::NoCommonMode,
            "the worker can do no mode that is known here".to_owned(),
        ));
        let names: Vec<_> = wants.iter().map(|mode| mode.as_str()).collect();
        let text = format!("{text}, and the worker allows only: {}", names.join(", "));
        Err(refuse(reason, text))
    }

    /// Mode engine, because the ring could not be used; `None`: it may not be.
    pub fn or_engine(&self, error: &dyn std::fmt::Display) -> Option<Self> {
        let possible = self.mode == TransferMode::Ipc && self.may_engine;
        possible.then(|| Self {
            mode: TransferMode::Engine,
            why: format!("the ring cannot be used from here: {error}"),
            may_engine: true,
        })
    }
}

/// The modes that a worker says, each once; those that are not known here are left out.
pub(super) fn wanted(request: &v1::AttachRequest) -> Vec<TransferMode> {
    let mut wants = Vec::with_capacity(TransferMode::ALL.len());
    for mode in request.modes().filter_map(|mode| mode.try_into().ok()) {
        if !wants.contains(&mode) {
            wants.push(mode);
        }
    }
    wants
}

#[cfg(test)]
mod tests {
    use super::*;
    use TransferMode::{Engine, Ipc};

    fn plan(
        wants: &[TransferMode],
        allowed: &[TransferMode],
        gpu: bool,
    ) -> Result<(TransferMode, String), Reason> {
        let has = |kind| kind == DeviceKind::Host || gpu;
        Plan::new(wants, allowed, DeviceKind::Cuda, has)
            .map(|plan| (plan.mode, plan.why))
            .map_err(|refusal| refusal.reason())
    }

    #[test]
    fn the_first_wish_that_is_allowed_and_possible_is_taken() {
        let both = [Ipc, Engine];
        let said = |wants: &[_], allowed: &[_], gpu| plan(wants, allowed, gpu).unwrap();
        let (mode, why) = said(&both, &both, true);
        assert_eq!((mode, &*why), (Ipc, "this daemon has a cuda device"));
        let (mode, why) = said(&both, &both, false);
        assert_eq!((mode, &*why), (Engine, "this daemon has no cuda device"));
        let (mode, why) = said(&both, &[Engine], true);
        assert_eq!(mode, Engine);
        assert!(why.contains("service.modes"), "{why}");
        assert_eq!(said(&[Engine, Ipc], &both, true).0, Engine);
        let (mode, why) = said(&[Engine], &both, true);
        assert_eq!((mode, &*why), (Engine, "the worker allows engine only"));
        assert_eq!(said(&[Ipc], &both, true).0, Ipc);
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_is_missing() {
        let both = [Ipc, Engine];
        assert_eq!(plan(&[Ipc], &both, false), Err(Reason::DeviceUnavailable));
        assert_eq!(plan(&[Engine], &[Ipc], true), Err(Reason::NoCommonMode));
        assert_eq!(plan(&[Ipc], &[Engine], true), Err(Reason::NoCommonMode));
        assert_eq!(plan(&[], &both, true), Err(Reason::NoCommonMode));
        // The first wish's obstacle is the one that is told.
        assert_eq!(plan(&both, &[Ipc], false), Err(Reason::DeviceUnavailable));
    }

    #[test]
    fn a_ring_that_cannot_be_opened_leads_to_engine_where_that_may_be() {
        let plan = |wants: &[_], allowed: &[_]| {
            Plan::new(wants, allowed, DeviceKind::Cuda, |_| true).unwrap()
        };
        let other = plan(&[Ipc, Engine], &[Ipc, Engine]).or_engine(&"denied");
        let other = other.unwrap();
        assert_eq!(other.mode, Engine);
        assert!(other.why.contains("denied"));
        assert_eq!(other.or_engine(&"again"), None);
        assert_eq!(plan(&[Ipc], &[Ipc, Engine]).or_engine(&"denied"), None);
        assert_eq!(plan(&[Ipc, Engine], &[Ipc]).or_engine(&"denied"), None);
    }
}
