//! Why the service is not ready: start-up steps that are not done, and what broke later.

use parking_lot::Mutex;

/// Reasons that hold the service back.
#[derive(Debug, Default)]
pub struct Latches {
    reasons: Mutex<Vec<(&'static str, String)>>,
}

// === impl Latches ===

impl Latches {
    /// Not ready for this reason.
    pub fn hold(&self, reason: &'static str) {
        let mut reasons = self.reasons.lock();
        if reasons.iter().all(|(other, _)| *other != reason) {
            reasons.push((reason, String::new()));
        }
    }

    /// How far it is, for people.
    pub fn tell(&self, reason: &'static str, how_far: String) {
        let mut reasons = self.reasons.lock();
        if let Some((_, told)) = reasons.iter_mut().find(|(other, _)| *other == reason) {
            *told = how_far;
        }
    }

    /// The reason is gone.
    pub fn lift(&self, reason: &'static str) {
        self.reasons.lock().retain(|(other, _)| *other != reason);
    }

    /// Nothing holds it back.
    pub fn is_open(&self) -> bool {
        self.reasons.lock().is_empty()
    }

    /// This reason holds it back.
    pub fn holds(&self, reason: &'static str) -> bool {
        let reasons = self.reasons.lock();
        reasons.iter().any(|(other, _)| *other == reason)
    }

    /// All reasons, oldest first.
    pub fn reasons(&self) -> Vec<String> {
        self.reasons
            .lock()
            .iter()
            .map(|(reason, how_far)| match how_far.as_str() {
                "" => (*reason).to_owned(),
                how_far => format!("{reason}: {how_far}"),
            })
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
        latches.tell("disk", "3 of 4".to_owned());
        latches.lift("index");
        assert_eq!(latches.reasons(), ["disk: 3 of 4"]);
        assert!(!latches.is_open());
        latches.lift("disk");
        assert!(latches.is_open());
    }
}
