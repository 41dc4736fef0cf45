//! Why the service is not ready: start-up steps that are not done, and what broke later.

use parking_lot::Mutex;

/// Reasons that hold the service back.
#[derive(Debug, Default)]
pub struct Latches {
    reasons: Mutex<Vec<&'static str>>,
}

// === impl Latches ===

impl Latches {
    /// Not ready for this reason.
    pub fn hold(&self, reason: &'static str) {
        let mut reasons = self.reasons.lock();
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }

    /// The reason is gone.
    pub fn lift(&self, reason: &'static str) {
        self.reasons.lock().retain(|other| *other != reason);
    }

    /// Nothing holds it back.
    pub fn is_open(&self) -> bool {
        self.reasons.lock().is_empty()
    }

    /// This reason holds it back.
    pub fn holds(&self, reason: &'static str) -> bool {
        self.reasons.lock().contains(&reason)
    }

    /// All reasons, oldest first.
    pub fn reasons(&self) -> Vec<String> {
        self.reasons
            .lock()
            .iter()
            .map(|reason| (*reason).to_owned())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_only_without_any_reason() {
        let latches = Latches::default();
        assert!(latches.is_open());
        latches.hold("index");
        latches.hold("disk");
        latches.hold("index");
        assert_eq!(latches.reasons(), ["index", "disk"]);
        latches.lift("index");
        assert!(!latches.is_open());
        latches.lift("disk");
        assert!(latches.is_open());
    }
}
