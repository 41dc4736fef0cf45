//! Room in RAM that restores are promised.
//!
//! # What
//! A restore keeps what it brought into RAM until it is over. If each took room object by object,
//! several could hold a part each and wait for the rest forever. So a restore is promised all the
//! room that it needs or none, in the order of asking. What was promised to nobody can leave RAM,
//! so every promise can be kept.
//!
//! # Order
//! Who cannot be promised room takes a ticket, and is first served when it is the lowest. Somebody
//! who needs nothing that is not promised already need not stand in line.

use std::collections::{BTreeSet, HashMap};

use crate::types::{Millis, ObjectId, SnapshotId};

/// A place in the line, lowest first.
pub type Ticket = u64;

/// Room for some objects. It lasts until it is given back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a promise lasts until it is given back"]
pub struct Promise {
    objects: Vec<ObjectId>,
}

/// What came of asking for room.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is promised.
    Yes(Promise),
    /// Not before others are over.
    Later,
    /// Not even then: RAM is full of what is pinned.
    Never,
    /// RAM is too small.
    TooLarge,
}

/// All promises.
#[derive(Debug, Default)]
pub struct Promises {
    objects: HashMap<ObjectId, Promised>,
    /// Room of all objects, in bytes of the arena.
    bytes: u64,
    /// Promises that end by themselves.
    restores: usize,
    /// What is kept in RAM for the next request, and until when.
    pins: HashMap<SnapshotId, (Millis, Promise)>,
    line: BTreeSet<Ticket>,
    next: Ticket,
}

#[derive(Debug)]
struct Promised {
    count: u32,
    room: u64,
}

// === impl Promises ===

impl Promises {
    /// Asks for room for all of `needs`, each object once, with the bytes of the arena that it
    /// takes. `budget`: what RAM can hold.
    pub fn ask(
        &mut self,
        needs: &[(ObjectId, u64)],
        budget: u64,
        ticket: Option<Ticket>,
        now: Millis,
    ) -> Answer {
        self.expire(now);
        let sum = |needs: &mut dyn Iterator<Item = u64>| needs.fold(0, u64::saturating_add);
        let fresh = needs
            .iter()
            .filter(|(id, _)| !self.objects.contains_key(id));
        let fresh = sum(&mut fresh.map(|(_, room)| *room));
        let all = self.bytes.saturating_add(fresh);
        if fresh > 0 {
            if sum(&mut needs.iter().map(|(_, room)| *room)) > budget {
                return Answer::TooLarge;
            }
            let first = self.line.first().copied();
            if first.is_some_and(|first| Some(first) != ticket) {
                return Answer::Later;
            }
            // Saves need some of it, too; but what fits only alone may have all of it.
            if all > budget - budget / 8 {
                if self.restores > 0 {
                    return Answer::Later;
                }
                if all > budget {
                    return Answer::Never;
                }
            }
        }
        self.restores += 1;
        Answer::Yes(self.keep(needs))
    }

    /// Restores that have room.
    #[cfg(test)]
    pub(super) fn restores(&self) -> usize {
        self.restores
    }

    /// Gives a restore's promise back. Says whether somebody waits for room.
    pub fn give_back(&mut self, promise: Promise) -> bool {
        self.restores -= 1;
        self.end(promise);
        !self.line.is_empty()
    }

    /// A restore's objects stay for the next request, until then.
    pub fn pin(&mut self, snapshot: SnapshotId, until: Millis, promise: &Promise) {
        let until = match self.pins.remove(&snapshot) {
            Some((before, old)) => {
                self.end(old);
                before.max(until)
            }
            None => until,
        };
        let known = |id: &ObjectId| Some((*id, self.objects.get(id)?.room));
        let needs: Vec<_> = promise.objects.iter().filter_map(known).collect();
        let kept = self.keep(&needs);
        self.pins.insert(snapshot, (until, kept));
    }

    /// Takes the pin of a snapshot away.
    pub fn unpin(&mut self, snapshot: &SnapshotId) {
        if let Some((_, promise)) = self.pins.remove(snapshot) {
            self.end(promise);
        }
    }

    /// A place at the end of the line.
    pub fn stand_in_line(&mut self) -> Ticket {
        self.next += 1;
        self.line.insert(self.next);
        self.next
    }

    /// Leaves the line. Says whether somebody else waits.
    pub fn leave_line(&mut self, ticket: Ticket) -> bool {
        self.line.remove(&ticket);
        !self.line.is_empty()
    }

    fn keep(&mut self, needs: &[(ObjectId, u64)]) -> Promise {
        for (id, room) in needs {
            let promised = self.objects.entry(*id).or_insert_with(|| {
                self.bytes = self.bytes.saturating_add(*room);
                Promised {
                    count: 0,
                    room: *room,
                }
            });
            promised.count += 1;
        }
        Promise {
            objects: needs.iter().map(|(id, _)| *id).collect(),
        }
    }

    fn end(&mut self, promise: Promise) {
        for id in promise.objects {
            let Some(promised) = self.objects.get_mut(&id) else {
                continue;
            };
            promised.count -= 1;
            if promised.count == 0 {
                self.bytes = self.bytes.saturating_sub(promised.room);
                self.objects.remove(&id);
            }
        }
    }

    fn expire(&mut self, now: Millis) {
        let over = self.pins.extract_if(|_, (until, _)| *until <= now);
        let over: Vec<Promise> = over.map(|(_, (_, promise))| promise).collect();
        for promise in over {
            self.end(promise);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: u64 = 80;

    fn id(number: u8) -> ObjectId {
        ObjectId([number; 32])
    }

    fn ask(promises: &mut Promises, needs: &[(u8, u64)], ticket: Option<Ticket>) -> Answer {
        let needs: Vec<_> = needs.iter().map(|(n, room)| (id(*n), *room)).collect();
        promises.ask(&needs, BUDGET, ticket, Millis(100))
    }

    fn yes(answer: Answer) -> Promise {
        match answer {
            Answer::Yes(promise) => promise,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_or_nothing_and_some_is_left_for_saves() {
        let mut all = Promises::default();
        let first = yes(ask(&mut all, &[(1, 30), (2, 30)], None));
        assert_eq!(ask(&mut all, &[(3, 11)], None), Answer::Later);
        // What is promised already takes no more room.
        let second = yes(ask(&mut all, &[(2, 30), (3, 10)], None));
        assert_eq!(all.bytes, 70);
        assert!(!all.give_back(first));
        assert_eq!(all.bytes, 40);
        all.give_back(second);
        assert_eq!((all.bytes, all.objects.len(), all.restores), (0, 0, 0));
    }

    #[test]
    fn the_line_is_served_in_order() {
        let mut all = Promises::default();
        let running = yes(ask(&mut all, &[(1, 60)], None));
        assert_eq!(ask(&mut all, &[(2, 70)], None), Answer::Later);
        let large = all.stand_in_line();
        // It would fit now, but it came later.
        assert_eq!(ask(&mut all, &[(3, 1)], None), Answer::Later);
        let small = all.stand_in_line();
        assert_eq!(ask(&mut all, &[(3, 1)], Some(small)), Answer::Later);
        // Nothing more is needed for this one.
        let same = yes(ask(&mut all, &[(1, 60)], None));
        all.give_back(same);
        assert!(all.give_back(running));
        let large_one = yes(ask(&mut all, &[(2, 70)], Some(large)));
        assert!(all.leave_line(large));
        assert_eq!(ask(&mut all, &[(3, 1)], Some(small)), Answer::Later);
        all.give_back(large_one);
        let small_one = yes(ask(&mut all, &[(3, 1)], Some(small)));
        assert!(!all.leave_line(small));
        all.give_back(small_one);
    }

    #[test]
    fn what_can_never_be_is_said_at_once() {
        let mut all = Promises::default();
        assert_eq!(ask(&mut all, &[(1, 81)], None), Answer::TooLarge);
        let alone = yes(ask(&mut all, &[(1, 40), (2, 40)], None));
        assert_eq!(ask(&mut all, &[(3, 1)], None), Answer::Later);
        all.give_back(alone);
        let pinned = yes(ask(&mut all, &[(4, 30)], None));
        all.pin(SnapshotId::new(), Millis(200), &pinned);
        all.give_back(pinned);
        assert_eq!(ask(&mut all, &[(1, 51)], None), Answer::Never);
        let beside = yes(ask(&mut all, &[(1, 50)], None));
        all.give_back(beside);
    }

    #[test]
    fn pins_end_in_time_or_when_told() {
        let mut all = Promises::default();
        let snapshot = SnapshotId::new();
        for until in [150, 120] {
            let promise = yes(ask(&mut all, &[(1, 30)], None));
            all.pin(snapshot, Millis(until), &promise);
            all.give_back(promise);
        }
        all.expire(Millis(149));
        assert_eq!(all.bytes, 30);
        all.expire(Millis(150));
        assert_eq!(all.bytes, 0);
        let promise = yes(ask(&mut all, &[(1, 30)], None));
        all.pin(snapshot, Millis(500), &promise);
        all.give_back(promise);
        all.unpin(&snapshot);
        assert_eq!((all.bytes, all.objects.len()), (0, 0));
    }
}
