//! Who moves the data of one shard between its file and the arena.
//!
//! The data is cut into *units*, whose moves belong together: a unit is verified when all of it is
//! read, and its checksums are taken before any of it is written. Each engine does the same to the
//! same file; they differ in who waits. *Threads* block, each in a system call of its own. *io_uring*
//! has one thread, which keeps many moves under way and verifies what is over meanwhile.

use std::{cell::Cell, fmt, fs::File, io};

use parking_lot::Mutex;

use crate::{
    device::{
        shm::SharedMap,
        uring::{Move, Uring, Way},
    },
    store::{
        config::{DiskConfig, IoEngine},
        error::StoreError,
        fault::{Faults, Op},
    },
};

use super::{
    DiskTier,
    data_dir::DataDir,
    object_file, parallel,
    root::{Rel, Root, Temp},
    transfer::{Mode, ReadError},
};

/// Moves under way at a time: with units of 4 MiB more than any disk needs.
const DEPTH: u32 = 16;

/// The moves of each unit, in order.
pub(crate) type Units<'m> = [Vec<Move<'m>>];

/// See the module.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// What it is called in configuration and metrics.
    fn kind(&self) -> IoEngine;

    /// Reads all units. `whole` is called once for each, when it is there, perhaps by several threads.
    fn read(
        &self,
        root: &Root,
        file: (&File, &Rel),
        units: &Units<'_>,
        whole: &(dyn Fn(usize) -> Result<(), ReadError> + Sync),
    ) -> Result<(), ReadError>;

    /// Writes all units. `ready` is called once for each before any of it is written.
    fn write(
        &self,
        root: &Root,
        temp: &Temp,
        units: &Units<'_>,
        ready: &(dyn Fn(usize) + Sync),
    ) -> Result<(), StoreError>;
}

/// A few threads, this one included.
#[derive(Debug)]
struct Threads(usize);

/// One thread and a ring.
#[derive(Debug)]
struct Rings {
    /// Rings that nobody uses. One is made when there is none, and none is given up.
    free: Mutex<Vec<Uring>>,
}

/// The engine that is configured; threads, and a warning, where this machine does not have it.
pub(crate) fn open(config: &DiskConfig, faults: &Faults) -> Box<dyn Engine> {
    let ring = || match faults.denies_uring() {
        true => Err(io::ErrorKind::PermissionDenied.into()),
        false => Uring::new(DEPTH),
    };
    if config.io_engine == IoEngine::Uring {
        match ring() {
            Ok(ring) => {
                let free = Mutex::new(vec![ring]);
                return Box::new(Rings { free });
            }
            Err(error) => {
                tracing::warn!(%error, "There is no io_uring here; threads read and write");
            }
        }
    }
    Box::new(Threads(config.io_threads as usize))
}

/// Whether files bypass the page cache; a warning where that is asked for and the file system cannot.
pub(crate) fn is_direct(config: &DiskConfig, dir: &DataDir) -> bool {
    let direct = config.direct_io && can_direct(dir);
    if config.direct_io && !direct {
        tracing::warn!(
            path = %config.path.display(),
            "This file system has no direct IO; files go through the page cache"
        );
    }
    direct
}

/// Whether the file system takes direct writes of the alignment used here.
fn can_direct(dir: &DataDir) -> bool {
    let Ok(map) = SharedMap::anonymous(object_file::ALIGN) else {
        return false;
    };
    let Ok(temp) = dir.root.create_temp(&Rel::root().join("probe")) else {
        return false;
    };
    let took = dir.root.set_direct(&temp.file, true);
    let works = took && map.pwrite_all(&temp.file, 0, 0, map.len()).is_ok();
    dir.root.discard(&temp.rel);
    works
}

// === impl DiskTier ===

impl DiskTier {
    /// Whether files bypass the page cache.
    #[must_use]
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Who moves the bytes of files.
    #[must_use]
    pub fn engine(&self) -> IoEngine {
        self.engine.kind()
    }

    pub(super) fn mode(&self) -> Mode<'_> {
        Mode {
            engine: &*self.engine,
            direct: self.direct,
        }
    }
}

// === impl Threads ===

impl Engine for Threads {
    fn kind(&self) -> IoEngine {
        IoEngine::Threads
    }

    fn read(
        &self,
        root: &Root,
        file: (&File, &Rel),
        units: &Units<'_>,
        whole: &(dyn Fn(usize) -> Result<(), ReadError> + Sync),
    ) -> Result<(), ReadError> {
        parallel::for_each(self.0, units.len(), |unit| {
            for one in units.get(unit).into_iter().flatten() {
                root.read_map(file, one.file_offset, one.map, one.offset, one.len)?;
            }
            whole(unit)
        })
    }

    fn write(
        &self,
        root: &Root,
        temp: &Temp,
        units: &Units<'_>,
        ready: &(dyn Fn(usize) + Sync),
    ) -> Result<(), StoreError> {
        parallel::for_each(self.0, units.len(), |unit| {
            ready(unit);
            for one in units.get(unit).into_iter().flatten() {
                root.write_map(temp, one.file_offset, one.map, one.offset, one.len)?;
            }
            Ok(())
        })
    }
}

// === impl Rings ===

impl Rings {
    fn with<T>(
        &self,
        f: impl FnOnce(&mut Uring) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let known = self.free.lock().pop();
        let mut ring = match known {
            Some(ring) => ring,
            None => Uring::new(DEPTH)
                .map_err(|error| StoreError::io(Op::Open, "io_uring".into(), error))?,
        };
        let done = f(&mut ring);
        self.free.lock().push(ring);
        done
    }
}

impl Engine for Rings {
    fn kind(&self) -> IoEngine {
        IoEngine::Uring
    }

    fn read(
        &self,
        root: &Root,
        file: (&File, &Rel),
        units: &Units<'_>,
        whole: &(dyn Fn(usize) -> Result<(), ReadError> + Sync),
    ) -> Result<(), ReadError> {
        let left: Vec<Cell<usize>> = units.iter().map(|unit| Cell::new(unit.len())).collect();
        for (unit, moves) in units.iter().enumerate() {
            if moves.is_empty() {
                whole(unit)?;
            }
        }
        // Which unit a move is of.
        let owners = || {
            let numbered = units.iter().enumerate();
            numbered.flat_map(|(unit, moves)| moves.iter().map(move |one| (unit, *one)))
        };
        let owner: Vec<usize> = owners().map(|(unit, _)| unit).collect();
        let mut bad = None;
        let read = self.with(|ring| {
            let moves = owners().map(|(_, one)| one);
            root.run(ring, Way::In, file, moves, |index| {
                let unit = owner.get(index).copied().unwrap_or_default();
                let Some(left) = left.get(unit) else {
                    return true;
                };
                left.set(left.get().saturating_sub(1));
                if left.get() == 0
                    && let Err(error) = whole(unit)
                {
                    bad = Some(error);
                }
                bad.is_none()
            })
        });
        match bad {
            Some(error) => Err(error),
            None => Ok(read?),
        }
    }

    fn write(
        &self,
        root: &Root,
        temp: &Temp,
        units: &Units<'_>,
        ready: &(dyn Fn(usize) + Sync),
    ) -> Result<(), StoreError> {
        let moves = units.iter().enumerate().flat_map(|(unit, moves)| {
            ready(unit);
            moves.iter().copied()
        });
        self.with(|ring| root.run_writes(ring, temp, moves))
    }
}
