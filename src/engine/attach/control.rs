//! What tests throw: a hold of the save or the restore machine in a state, and damage to what is
//! restored. Without the feature `testing` nothing of it can be set.

use super::restore_state::RestoreState;
use super::save_state::SaveState;

/// What is damaged on its way into the pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tamper {
    /// The state is zeroed.
    State,
    /// The KV is zeroed.
    Kv,
}

/// The switches.
#[derive(Debug, Default)]
pub struct Control {
    #[cfg(any(test, feature = "testing"))]
    switches: parking_lot::Mutex<Switches>,
}

/// A machine and one of its states.
#[cfg(any(test, feature = "testing"))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// Of saves.
    Save(&'static str),
    /// Of restores.
    Restore(&'static str),
}

#[cfg(any(test, feature = "testing"))]
#[derive(Debug, Default)]
struct Switches {
    held: Option<Held>,
    tamper: Option<Tamper>,
}

// === impl Control ===

#[cfg(any(test, feature = "testing"))]
impl Control {
    /// Holds every save (`machine` is `save`) or restore (`restore`) that comes into this state.
    ///
    /// # Errors
    ///
    /// There is no such machine or state, in words.
    pub fn hold(&self, machine: &str, state: &str) -> Result<(), String> {
        let held = match machine {
            "save" => {
                let names = SaveState::ALL.map(|state| state.as_str());
                names
                    .into_iter()
                    .find(|name| *name == state)
                    .map(Held::Save)
            }
            "restore" => {
                let names = RestoreState::ALL.map(|state| state.as_str());
                names
                    .into_iter()
                    .find(|name| *name == state)
                    .map(Held::Restore)
            }
            _ => None,
        };
        let held = held.ok_or_else(|| format!("{machine} has no state {state}"))?;
        self.switches.lock().held = Some(held);
        Ok(())
    }

    /// Lifts the hold.
    pub fn release(&self) {
        self.switches.lock().held = None;
    }

    /// Sets what is damaged from now on.
    pub fn set_tamper(&self, tamper: Option<Tamper>) {
        self.switches.lock().tamper = tamper;
    }

    /// Whether a save stays in this state.
    pub fn holds_save(&self, state: &SaveState) -> bool {
        matches!(&self.switches.lock().held, Some(Held::Save(name)) if *name == state.as_str())
    }

    /// Whether a restore stays in this state.
    pub fn holds_restore(&self, state: &RestoreState) -> bool {
        matches!(&self.switches.lock().held, Some(Held::Restore(name)) if *name == state.as_str())
    }

    /// What is to be damaged.
    pub fn tamper(&self) -> Option<Tamper> {
        self.switches.lock().tamper
    }
}

#[cfg(not(any(test, feature = "testing")))]
impl Control {
    /// Whether a save stays in this state.
    pub fn holds_save(&self, _: &SaveState) -> bool {
        false
    }

    /// Whether a restore stays in this state.
    pub fn holds_restore(&self, _: &RestoreState) -> bool {
        false
    }

    /// What is to be damaged.
    pub fn tamper(&self) -> Option<Tamper> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_can_be_held_and_nothing_else() {
        let control = Control::default();
        for state in SaveState::ALL {
            control.hold("save", state.as_str()).unwrap();
            assert!(control.holds_save(&state));
        }
        for state in RestoreState::ALL {
            control.hold("restore", state.as_str()).unwrap();
            assert!(control.holds_restore(&state));
            assert!(!control.holds_save(&SaveState::Offered));
        }
        for (machine, state) in [("save", "Placed"), ("restore", "Offered"), ("x", "Offered")] {
            assert!(control.hold(machine, state).is_err());
        }
        control.release();
        assert!(!control.holds_restore(&RestoreState::Releasing));
    }
}
