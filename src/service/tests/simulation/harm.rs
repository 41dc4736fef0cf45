//! Steps that nobody asks for: threads, pressure, time, faults, and the end of the daemon.

use std::collections::BTreeSet;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::libc::{EDQUOT, EIO, ENOSPC};

use super::daemon::Daemon;
use super::run::{Plant, Run};
use crate::service::conversations::ConversationKey;
use crate::service::promote::PromoteError;
use crate::store::fault::{Fault, Op};
use crate::types::{ObjectId, SnapshotId};
use crate::util::clock::Clock;

impl Run {
    // --- What happens by itself

    pub(super) fn threads(&mut self) {
        let rounds = 1 + self.dice.below(8);
        let which = self.dice.below(6);
        self.tell(format!("{rounds} rounds of thread {which}"));
        for _ in 0..rounds {
            match which {
                0 => drop(self.daemon().read_one()),
                1 => self.daemon().scrub_one(),
                _ => self.daemon().disk_round(),
            }
        }
    }

    pub(super) fn pressure(&mut self) {
        let bytes = self.dice.below(512 << 10) as u64;
        let disk = self.dice.one_in(2);
        self.tell(format!(
            "{bytes} bytes leave {}",
            if disk { "the disk" } else { "RAM" }
        ));
        let service = &self.daemon().service;
        if disk {
            service.evict_from_disk(bytes);
        } else {
            service.let_go(bytes);
        }
    }

    pub(super) fn time(&mut self) {
        let by = [1, 300, 11_000, 61_000, 3_600_000];
        let by = Duration::from_millis(self.dice.pick(&by).unwrap());
        self.tell(format!("{by:?} pass"));
        self.clock.advance(by);
        if self.dice.one_in(2) {
            // Somebody has seen to the disk meanwhile.
            self.daemon().faults.fill(false);
            self.daemon().faults.disarm();
            self.ended("the disk works");
        }
    }

    pub(super) fn fault(&mut self) {
        let (kind, nth) = (self.dice.below(10), self.dice.below(12) as u64);
        let harm = self.harm;
        let write = self
            .dice
            .pick(&[Op::Write, Op::Rename, Op::Unlink, Op::Mkdir, Op::Open]);
        let errno = self.dice.pick(&[ENOSPC, EDQUOT, EIO]).unwrap();
        let daemon = self.daemon.as_mut().expect("one runs");
        let faults = &daemon.faults;
        let what = match kind {
            0..3 => {
                let full = kind < 2;
                faults.fill(full);
                format!("the disk is full: {full}")
            }
            3..5 => {
                faults.arm(write, nth, Fault::Errno(errno));
                format!("{write:?} {nth} fails with {errno}")
            }
            5 => {
                faults.arm(Op::Write, nth, Fault::Short(errno));
                format!("write {nth} is short and fails with {errno}")
            }
            6 => {
                faults.arm(Op::Fsync, nth, Fault::Errno(EIO));
                format!("fsync {nth} fails")
            }
            7 => {
                faults.arm(None, nth, Fault::Torn);
                format!("the process dies at operation {nth}")
            }
            8 if harm => {
                faults.arm(Op::Read, nth, Fault::Errno(EIO));
                let all = self
                    .model
                    .known
                    .values()
                    .filter_map(|tokens| tokens.first());
                self.model.tainted.extend(all);
                format!("read {nth} fails")
            }
            9 if harm => return self.damage(),
            _ => {
                faults.disarm();
                faults.fill(false);
                "the disk works".into()
            }
        };
        self.tell(what);
    }

    /// A byte of an object's file changes.
    fn damage(&mut self) {
        let mut files = Vec::new();
        walk(
            &self.folder.path().join("data/models"),
            "safetensors",
            &mut files,
        );
        files.sort();
        let Some(path) = self.dice.pick(&files) else {
            return self.tell("no file to damage");
        };
        let name = path.file_name().unwrap().to_str().unwrap();
        let object: ObjectId = name.split('.').next().unwrap().parse().unwrap();
        let daemon = self.daemon.as_ref().expect("one runs");
        let core = daemon.service.core.lock();
        for id in core.index.iter() {
            let hit = core.index.hit(&id).unwrap();
            if hit.state == object || hit.kv.iter().any(|part| part.object == object) {
                self.model.tainted.extend(self.model.known[&id].first());
            }
        }
        drop(core);
        let at = self.dice.roll() % std::fs::metadata(&path).unwrap().len();
        let mut file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let mut byte = [0];
        file.seek(SeekFrom::Start(at)).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(&[byte[0] ^ 0x10]).unwrap();
        self.tell(format!("byte {at} of {object} changes"));
    }

    // --- The end, and a new start

    pub(super) fn restart(&mut self) {
        let orderly = self.dice.one_in(2);
        self.tell(if orderly {
            "the daemon ends"
        } else {
            "the daemon is killed"
        });
        self.offers.clear();
        let daemon = self.daemon.take().expect("one runs");
        if orderly {
            for restore in self.restores.drain(..) {
                daemon.let_go(restore);
            }
            let service = Arc::downgrade(&daemon.service);
            let mut events = daemon.service.events();
            // What it wrote until then, and what it said.
            let mut before = daemon.events.resubscribe();
            assert!(before.try_recv().is_err());
            daemon.shut_down(&mut self.dice);
            let now = self.clock.now();
            while let Ok(event) = events.try_recv() {
                self.model.heard(&event, now);
            }
            assert!(
                service.upgrade().is_none(),
                "somebody still holds the service"
            );
        } else {
            self.restores.clear();
            drop(daemon);
        }
        self.clock.advance(Duration::from_secs(2));
        self.planted();
        let daemon = Daemon::start(self.folder.path(), self.size, &self.clock);
        let found: BTreeSet<SnapshotId> = daemon.service.core.lock().index.iter().collect();
        self.model.restarted(&found);
        {
            let core = daemon.service.core.lock();
            for ((name, branch), id) in &self.model.branches {
                let key = ConversationKey::new(None, name);
                let named = core
                    .conversations
                    .get(&key)
                    .and_then(|it| it.branches.get(branch));
                assert_eq!(named, Some(id), "branch {branch} of {name}");
            }
        }
        self.ended(found.len());
        self.daemon = Some(daemon);
        self.look();
        let all: Vec<SnapshotId> = found.into_iter().collect();
        for _ in 0..3 {
            if let Some(id) = self.dice.pick(&all) {
                self.comes_back(id);
            }
        }
    }

    /// Does between two daemons what was planted.
    fn planted(&mut self) {
        let (below, end) = match self.plant {
            Some(Plant::Manifest) => ("data/models", "json"),
            Some(Plant::Name) => ("data/refs", "json"),
            Some(Plant::Byte) => ("data/models", "safetensors"),
            Some(Plant::Lease) | None => return,
        };
        let mut files = Vec::new();
        walk(&self.folder.path().join(below), end, &mut files);
        files.retain(|path| !path.ends_with("model.json"));
        files.sort();
        let Some(path) = self.dice.pick(&files) else {
            return;
        };
        if self.plant == Some(Plant::Byte) {
            let mut bytes = std::fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(&path, bytes).unwrap();
        } else {
            std::fs::remove_file(&path).unwrap();
        }
    }

    /// A durable snapshot is found by its tokens, and has its bytes.
    fn comes_back(&mut self, id: SnapshotId) {
        if !self.model.live.contains(&id) {
            return;
        }
        let tokens = self.model.known[&id].clone();
        for _ in 0..8 {
            let daemon = self.daemon.as_mut().expect("one runs");
            let mut restore = match daemon.look_up(&tokens) {
                Ok(restore) => restore,
                Err(why) => panic!("{id} does not come back: {why:?}"),
            };
            assert_eq!(restore.snapshot, id);
            let filled = daemon.fill(&mut restore);
            daemon.let_go(restore);
            let tainted = self.model.is_tainted(&id);
            self.look();
            match filled {
                Ok(()) => return,
                Err(PromoteError::NoRoom) => self.daemon().disk_round(),
                Err(error) => {
                    assert!(tainted, "{id} does not come back: {error}");
                    return;
                }
            }
        }
        panic!("{id} finds no room");
    }

    /// Everything ends, and all that was durable comes back.
    pub fn end(&mut self) {
        self.restart();
        let all: Vec<SnapshotId> = self.model.durable.iter().copied().collect();
        self.tell(format!("all {} come back", all.len()));
        for id in all {
            self.comes_back(id);
        }
    }
}

/// All files below a folder whose names end so.
fn walk(folder: &Path, end: &str, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            walk(&path, end, found);
        } else if path.extension().is_some_and(|it| it == end) {
            found.push(path);
        }
    }
}
