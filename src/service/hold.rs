//! Holds: a test keeps a save or a restore in one of its states, to kill or stop the daemon there.
//!
//! `ENGRAM_HOLD=save:Writing` holds every save that comes into that state until the hold is
//! lifted; `ENGRAM_HOLD=save:Writing:3` only from the third on. `ENGRAM_HOLD_UNTIL=PATH` lifts it
//! when there is such a file. A build without the feature `testing` ignores it. What is held now is
//! told by `held`, shown on the status and logged as `Held in save:Writing`.

use std::time::Duration;

use super::restore_state::RestoreState;
use super::save_state::SaveState;

/// How often a held machine looks whether the hold was lifted.
pub const LOOK: Duration = Duration::from_millis(2);

/// Which state a machine came into.
#[derive(Copy, Clone, Debug)]
pub enum Point<'a> {
    /// Of a save.
    Save(&'a SaveState),
    /// Of a restore.
    Restore(&'a RestoreState),
}

/// Keeps machines in a state. Does nothing in a build without the feature `testing`.
#[derive(Debug, Default)]
pub struct Hold {
    #[cfg(any(test, feature = "testing"))]
    inner: parking_lot::Mutex<inner::Inner>,
}

#[cfg(any(test, feature = "testing"))]
mod inner {
    use std::collections::BTreeMap;

    #[derive(Debug, Default)]
    pub(super) struct Inner {
        pub target: Option<String>,
        /// A file whose appearance lifts the hold.
        pub until: Option<std::path::PathBuf>,
        /// Machines to let pass before the first is held.
        pub skip: u32,
        pub held: BTreeMap<String, u32>,
    }

    impl Inner {
        /// Lifts the hold if its file is there.
        pub fn look(&mut self) {
            if self.until.as_deref().is_some_and(std::path::Path::exists) {
                self.target = None;
            }
        }
    }
}

// === impl Point ===

impl Point<'_> {
    /// `save:Writing`.
    pub fn name(self) -> String {
        match self {
            Self::Save(state) => format!("save:{state}"),
            Self::Restore(state) => format!("restore:{state}"),
        }
    }
}

// === impl Hold ===

impl Hold {
    /// What the environment asks for.
    pub fn from_env() -> Self {
        let hold = Self::default();
        #[cfg(any(test, feature = "testing"))]
        if let Ok(text) = std::env::var("ENGRAM_HOLD") {
            hold.set(Some(&text));
            hold.inner.lock().until = std::env::var_os("ENGRAM_HOLD_UNTIL").map(Into::into);
        }
        hold
    }

    /// Lets a machine that came into a state wait while this state is held, without blocking the
    /// thread; `meanwhile` is called now and then.
    pub async fn pause(&self, point: Point<'_>, mut meanwhile: impl FnMut()) {
        if !self.enter(point) {
            return;
        }
        while self.is_target(point) {
            meanwhile();
            tokio::time::sleep(LOOK).await;
        }
        self.leave(point);
    }

    /// The same for a thread.
    pub fn block(&self, point: Point<'_>) {
        if !self.enter(point) {
            return;
        }
        while self.is_target(point) {
            std::thread::sleep(LOOK);
        }
        self.leave(point);
    }
}

#[cfg(not(any(test, feature = "testing")))]
impl Hold {
    /// What is held now.
    pub fn held(&self) -> Vec<String> {
        Vec::new()
    }

    fn enter(&self, _: Point<'_>) -> bool {
        false
    }

    fn is_target(&self, _: Point<'_>) -> bool {
        false
    }

    fn leave(&self, _: Point<'_>) {}
}

#[cfg(any(test, feature = "testing"))]
impl Hold {
    /// Holds at `save:State`, `restore:State` or `save:State:n`; `None` lifts the hold.
    pub fn set(&self, target: Option<&str>) {
        let mut inner = self.inner.lock();
        let target = target.filter(|text| !text.is_empty());
        let (name, count) = match target.map(|text| (text, text.rsplit_once(':'))) {
            None => (None, 1),
            Some((text, Some((name, count)))) => match count.parse::<u32>() {
                Ok(count) => (Some(name), count),
                Err(_) => (Some(text), 1),
            },
            Some((text, None)) => (Some(text), 1),
        };
        inner.target = name.map(str::to_owned);
        inner.skip = count.saturating_sub(1);
    }

    /// What is held now.
    pub fn held(&self) -> Vec<String> {
        self.inner.lock().held.keys().cloned().collect()
    }

    fn enter(&self, point: Point<'_>) -> bool {
        let mut inner = self.inner.lock();
        inner.look();
        if inner.target.is_none() {
            return false;
        }
        let name = point.name();
        if inner.target.as_deref() != Some(name.as_str()) {
            return false;
        }
        if inner.skip > 0 {
            inner.skip -= 1;
            return false;
        }
        tracing::warn!("Held in {name}");
        *inner.held.entry(name).or_default() += 1;
        true
    }

    fn is_target(&self, point: Point<'_>) -> bool {
        let mut inner = self.inner.lock();
        inner.look();
        inner.target.as_deref() == Some(point.name().as_str())
    }

    fn leave(&self, point: Point<'_>) {
        let mut inner = self.inner.lock();
        let name = point.name();
        if let Some(count) = inner.held.get_mut(&name) {
            *count -= 1;
            if *count == 0 {
                inner.held.remove(&name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn the_third_is_held_until_the_hold_is_lifted() {
        let hold = Arc::new(Hold::default());
        hold.set(Some("save:Writing:3"));
        let point = Point::Save(&SaveState::Writing);
        hold.pause(point, || ()).await;
        hold.pause(Point::Save(&SaveState::Sealing), || ()).await;
        hold.pause(point, || ()).await;
        assert!(hold.held().is_empty());
        let other = Arc::clone(&hold);
        let third = tokio::spawn(async move {
            other.pause(Point::Save(&SaveState::Writing), || ()).await;
        });
        while hold.held().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(hold.held(), ["save:Writing"]);
        assert!(!third.is_finished());
        hold.set(None);
        third.await.unwrap();
        assert!(hold.held().is_empty());
    }
}
