//! A run: steps drawn from a seed.

use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use tempfile::TempDir;

use super::super::bytes::prompt;
use super::checks::check;
use super::daemon::{Daemon, Offer, Restore, Size};
use super::dice::Dice;
use super::model::Model;
use crate::service::lease::NoLease;
use crate::service::promote::PromoteError;
use crate::service::{DeleteRequest, RestoreRequest, SaveRequest, Selector};
use crate::types::{Millis, SnapshotId, TokenId, scripted};
use crate::util::clock::{Clock, ManualClock};

/// Conversations of a run.
const NAMES: usize = 6;

/// A prompt is not continued beyond this.
const LONGEST: usize = 3500;

/// Prompts that are remembered.
const TIPS: usize = 40;

/// A fault that is put in on purpose.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Plant {
    /// A manifest vanishes while no daemon runs.
    Manifest,
    /// A conversation's file does.
    Name,
    /// A worker that goes keeps its lease.
    Lease,
    /// A byte of an object's file changes.
    Byte,
}

impl Plant {
    pub const ALL: [Self; 4] = [Self::Manifest, Self::Name, Self::Lease, Self::Byte];
}

/// One run.
pub struct Run {
    pub(super) dice: Dice,
    pub(super) folder: TempDir,
    pub(super) size: Size,
    pub(super) clock: Arc<ManualClock>,
    pub(super) daemon: Option<Daemon>,
    pub(super) model: Model,
    pub(super) offers: Vec<Offer>,
    pub(super) restores: Vec<Restore>,
    /// Prompts, and whose they are.
    pub(super) tips: Vec<(String, Vec<TokenId>)>,
    /// Files may be damaged, and reads may fail.
    pub(super) harm: bool,
    pub(super) plant: Option<Plant>,
    pub(super) told: Vec<String>,
}

// === impl Run ===

impl Run {
    pub fn new(seed: u64, plant: Option<Plant>) -> Self {
        scripted::begin(Some(seed));
        let mut dice = Dice::new(seed);
        let mib = |sizes: &[u64], dice: &mut Dice| ByteSize::mib(dice.pick(sizes).unwrap());
        let size = Size {
            ram: mib(&[2, 3, 6], &mut dice),
            disk: mib(&[3, 6, 64], &mut dice),
            shards: 1 + dice.below(2) as u32,
            catalog_from: dice.pick(&[0, 1000]).unwrap(),
        };
        let harm = dice.one_in(4);
        let folder = TempDir::new().unwrap();
        let clock = Arc::new(ManualClock::new(Millis(1_700_000_000_000)));
        let daemon = Daemon::start(folder.path(), size, &clock);
        Self {
            dice,
            folder,
            size,
            clock,
            daemon: Some(daemon),
            model: Model::default(),
            offers: Vec::new(),
            restores: Vec::new(),
            tips: Vec::new(),
            harm,
            plant,
            told: vec![format!("{size:?}, harm: {harm}")],
        }
    }

    /// What happened so far.
    pub fn told(&mut self) -> Vec<String> {
        scripted::begin(None);
        std::mem::take(&mut self.told)
    }

    pub(super) fn tell(&mut self, text: impl Into<String>) {
        self.told.push(text.into());
    }

    /// How the last step ended.
    pub(super) fn ended(&mut self, how: impl std::fmt::Debug) {
        if let Some(last) = self.told.last_mut() {
            *last += &format!(" -> {how:?}");
        }
    }

    pub(super) fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("one runs")
    }

    /// Does something, and looks at everything.
    pub fn step(&mut self) {
        match self.dice.below(100) {
            0..18 => self.offer(),
            18..34 => self.commit(),
            34..42 => self.look_up(),
            42..50 => self.fill(),
            50..57 => self.let_go(),
            57..64 => self.save(),
            64..67 => self.restore(),
            67..70 => self.delete(),
            70..82 => self.threads(),
            82..85 => self.pressure(),
            85..92 => self.time(),
            92..96 => self.fault(),
            _ if self.dice.one_in(2) => self.restart(),
            _ => self.threads(),
        }
        self.look();
    }

    pub(super) fn look(&mut self) {
        let now = self.clock.now();
        let daemon = self.daemon.as_mut().expect("one runs");
        while let Ok(event) = daemon.events.try_recv() {
            self.model.heard(&event, now);
        }
        check(daemon, &self.model, &self.offers, &self.restores);
    }

    // --- Conversations

    /// A prompt: a new one, the next turn of one, or a branch inside of one.
    fn prompt(&mut self) -> (String, Vec<TokenId>) {
        let len = 20 + self.dice.below(900);
        let chance = self.dice.roll() as u32;
        let more = prompt(chance, len);
        let tip = self.dice.pick(&self.tips).filter(|_| !self.dice.one_in(6));
        match tip {
            Some((name, tokens)) if tokens.len() < LONGEST => {
                let whole = self.dice.below(3) > 0;
                let keep = if whole {
                    tokens.len()
                } else {
                    1 + self.dice.below(tokens.len())
                };
                (name, [&tokens[..keep], &more].concat())
            }
            _ => (format!("c{}", self.dice.below(NAMES)), more),
        }
    }

    fn offer(&mut self) {
        let (name, tokens) = self.prompt();
        let short = self.dice.below(40);
        let boundary = tokens.len().saturating_sub(short).max(1);
        self.tell(format!(
            "{name} offers {boundary} of {} tokens",
            tokens.len()
        ));
        let offer = self.daemon().offer(&name, &tokens, boundary);
        self.ended(offer.is_some());
        self.offers.extend(offer);
        self.tips.push((name, tokens));
        if self.tips.len() > TIPS {
            let at = self.dice.below(TIPS);
            self.tips.remove(at);
        }
    }

    fn commit(&mut self) {
        if self.offers.is_empty() {
            return self.tell("nothing to commit");
        }
        let at = self.dice.below(self.offers.len());
        let offer = self.offers.swap_remove(at);
        let (name, boundary) = (offer.conversation.name.to_string(), offer.boundary);
        let tokens = offer.tokens[..boundary].to_vec();
        if self.dice.one_in(8) {
            self.tell(format!("{name} lets go of its offer of {boundary}"));
            return self.daemon().abort(offer);
        }
        self.tell(format!("{name} commits {boundary}"));
        let committed = self.daemon().commit(offer);
        if let Ok(id) = &committed {
            self.model.committed(*id, &tokens);
        }
        self.ended(committed.map_err(|error| error.to_string()));
    }

    fn look_up(&mut self) {
        let (name, mut tokens) = self.prompt();
        if let Some((_, known)) = self.dice.pick(&self.tips).filter(|_| self.dice.one_in(2)) {
            tokens = known;
        }
        self.tell(format!("{name} looks {} tokens up", tokens.len()));
        let found = self.daemon().look_up(&tokens);
        let expected = self.model.deepest(&tokens);
        match found {
            Ok(restore) => {
                assert_eq!(Some(restore.snapshot), expected, "the deepest prefix");
                self.ended(restore.snapshot);
                self.restores.push(restore);
            }
            Err(why) => {
                self.ended(why);
                let nothing = why == NoLease::Nothing;
                assert_eq!(nothing, expected.is_none(), "{expected:?} fits");
            }
        }
    }

    fn fill(&mut self) {
        if self.restores.is_empty() {
            return self.tell("nothing to fill");
        }
        let at = self.dice.below(self.restores.len());
        let mut restore = self.restores.swap_remove(at);
        self.tell(format!("{} is filled", restore.snapshot));
        let filled = self.daemon().fill(&mut restore);
        self.ended(filled);
        let gone = !self.model.live.contains(&restore.snapshot);
        if filled == Err(PromoteError::Lost) {
            let tainted = self.model.is_tainted(&restore.snapshot);
            assert!(gone || tainted, "a leased object is lost");
        }
        self.restores.push(restore);
    }

    fn let_go(&mut self) {
        if self.restores.is_empty() {
            return self.tell("nothing to let go of");
        }
        let at = self.dice.below(self.restores.len());
        let restore = self.restores.swap_remove(at);
        self.tell(format!("{} is let go", restore.snapshot));
        if self.plant == Some(Plant::Lease) {
            return std::mem::forget(restore);
        }
        self.daemon().let_go(restore);
    }

    // --- By name

    fn select(&mut self) -> Selector {
        let live: Vec<SnapshotId> = self.model.live.iter().copied().collect();
        if let Some(id) = self.dice.pick(&live).filter(|_| self.dice.one_in(2)) {
            return Selector::snapshot(id);
        }
        Selector {
            conversation_id: Some(format!("c{}", self.dice.below(NAMES))),
            ..Selector::default()
        }
    }

    fn save(&mut self) {
        let mut select = self.select();
        let by_id = select.snapshot_id.is_some();
        select.branch_name = self
            .dice
            .one_in(3)
            .then(|| format!("b{}", self.dice.below(3)));
        let durable = !self.dice.one_in(4);
        self.tell(format!("save {select:?}, durable: {durable}"));
        let branch = select.branch_name.clone();
        let request = SaveRequest {
            durable,
            ..SaveRequest::new(select.clone())
        };
        let daemon = self.daemon.as_ref().expect("one runs");
        let service = Arc::clone(&daemon.service);
        let saved = daemon.drive(&mut self.dice, service.save(request));
        let acked = saved.as_ref().and_then(|saved| saved.as_ref().ok());
        self.hear();
        // Whatever bore the name before: if this save was not acknowledged, either may bear it now.
        let names: Vec<String> = match (by_id, &select.conversation_id) {
            (false, Some(name)) => vec![name.clone()],
            _ => (0..NAMES).map(|n| format!("c{n}")).collect(),
        };
        if let Some(branch) = &branch {
            for name in names {
                self.model.branches.remove(&(name, branch.clone()));
            }
        }
        if let Some(reply) = acked {
            let (id, row) = (reply.row.snapshot_id, &reply.row);
            if durable {
                assert!(
                    row.durable && self.model.durable.contains(&id),
                    "{id} was acknowledged"
                );
            }
            let key = row.conversation_id.clone().zip(branch.clone());
            if let Some(key) = key.filter(|_| durable && row.branch_name == branch) {
                self.model.branches.insert(key, id);
            }
        }
        let told = saved.map(|saved| {
            saved
                .map(|reply| reply.row.snapshot_id)
                .map_err(|error| error.to_string())
        });
        self.ended(told);
    }

    /// What the service says while something is driven.
    fn hear(&mut self) {
        let now = self.clock.now();
        let daemon = self.daemon.as_mut().expect("one runs");
        while let Ok(event) = daemon.events.try_recv() {
            self.model.heard(&event, now);
        }
    }

    fn restore(&mut self) {
        let select = self.select();
        let pin_for = Duration::from_secs(self.dice.below(400) as u64);
        self.tell(format!("restore {select:?} for {pin_for:?}"));
        let request = RestoreRequest {
            select,
            pin_for: Some(pin_for),
        };
        let daemon = self.daemon.as_ref().expect("one runs");
        let service = Arc::clone(&daemon.service);
        let restored = daemon.drive(&mut self.dice, service.restore(request));
        self.hear();
        if let Some(Ok(reply)) = &restored {
            let until = Millis((reply.pinned_until * 1000.0).round() as u64);
            let pinned = self
                .model
                .pinned
                .entry(reply.row.snapshot_id)
                .or_insert(until);
            *pinned = until.max(*pinned);
        }
        let told = restored.map(|it| {
            it.map(|reply| reply.row.snapshot_id)
                .map_err(|error| error.to_string())
        });
        self.ended(told);
    }

    fn delete(&mut self) {
        let mut select = self.select();
        if select.snapshot_id.is_none() && !self.dice.one_in(4) {
            select.turn_number = Some(1 + self.dice.below(4) as u32);
        }
        let whole = select.snapshot_id.is_none() && select.turn_number.is_none();
        self.tell(format!("delete {select:?}"));
        let request = DeleteRequest {
            select: select.clone(),
            whole,
        };
        let daemon = self.daemon.as_ref().expect("one runs");
        let service = Arc::clone(&daemon.service);
        let before = daemon.faults.thrown();
        // Names go at once, whatever becomes of the files.
        if let Some(name) = select.conversation_id.filter(|_| whole) {
            self.model
                .branches
                .retain(|(conversation, _), _| *conversation != name);
        }
        let deleted = daemon.drive(&mut self.dice, service.delete(request));
        let calm = daemon.faults.thrown() == before;
        self.hear();
        if let Some(Ok(reply)) = &deleted {
            for id in &reply.snapshots {
                assert!(!self.model.live.contains(id), "{id} was deleted");
                if calm {
                    self.model.deleted.insert(*id);
                }
            }
        }
        let told = deleted.map(|it| {
            it.map(|reply| reply.snapshots.len())
                .map_err(|error| error.to_string())
        });
        self.ended(told);
    }
}
