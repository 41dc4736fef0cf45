//! Operations on the file system, and switches by which tests make the n-th of them fail.
//!
//! A build without the feature `testing` has the operations and no switches: [`Faults`] is then an
//! empty type that lets everything pass.

use std::{io, path::Path};

#[cfg(any(test, feature = "testing"))]
use std::sync::Arc;

#[cfg(any(test, feature = "testing"))]
use parking_lot::Mutex;

use crate::device::shm::SharedMap;

#[cfg(any(test, feature = "testing"))]
use super::power::Step;

/// An operation on the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Opening or creating a file or folder, listing included.
    Open,
    /// Reading bytes.
    Read,
    /// Writing or allocating bytes.
    Write,
    /// fsync of a file or folder.
    Fsync,
    /// Giving a file another name.
    Rename,
    /// Removing a name.
    Unlink,
    /// Making a folder.
    Mkdir,
}

/// What happens at the chosen operation.
#[cfg(any(test, feature = "testing"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this errno and does nothing.
    Errno(i32),
    /// A read or write does half its bytes and then fails with this errno; anything else fails.
    Short(i32),
    /// A write does half its bytes, and then nothing at all works any more, as for a process that
    /// was killed there. Anything else dies before it does something.
    Torn,
}

/// The switches of one store. Clones throw the same switches.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    #[cfg(any(test, feature = "testing"))]
    inner: Arc<Mutex<Switches>>,
}

/// What to do with an operation.
#[derive(Debug)]
#[cfg_attr(
    not(any(test, feature = "testing")),
    expect(dead_code, reason = "only tests throw the switches")
)]
pub(crate) enum Verdict {
    Pass,
    Fail(io::Error),
    Half(io::Error),
}

#[cfg(any(test, feature = "testing"))]
#[derive(Debug, Default)]
struct Switches {
    armed: Option<Armed>,
    dead: bool,
    /// What every write fails with.
    broken: Option<i32>,
    /// What no file or folder whose path has this in it can be removed with.
    stuck: Option<(String, i32)>,
    no_openat2: bool,
    no_direct: bool,
    no_uring: bool,
    tracing: bool,
    trace: Vec<(Op, String)>,
    tape: Option<Vec<Step>>,
    thrown: u64,
    seen: u64,
}

#[cfg(any(test, feature = "testing"))]
#[derive(Debug)]
struct Armed {
    op: Option<Op>,
    left: u64,
    fault: Fault,
}

// === impl Op ===

impl Op {
    /// All operations.
    pub const ALL: [Self; 7] = [
        Self::Open,
        Self::Read,
        Self::Write,
        Self::Fsync,
        Self::Rename,
        Self::Unlink,
        Self::Mkdir,
    ];

    /// The name in messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Read => "read",
            Self::Write => "write",
            Self::Fsync => "fsync",
            Self::Rename => "rename",
            Self::Unlink => "unlink",
            Self::Mkdir => "mkdir",
        }
    }
}

// === impl Faults ===

#[cfg(not(any(test, feature = "testing")))]
impl Faults {
    pub(crate) fn ask(&self, _: Op, _: &Path) -> Verdict {
        Verdict::Pass
    }

    pub(crate) fn denies_openat2(&self) -> bool {
        false
    }

    pub(crate) fn denies_direct(&self) -> bool {
        false
    }

    pub(crate) fn denies_uring(&self) -> bool {
        false
    }

    pub(crate) fn did(&self, _: &Done<'_>) {}
}

/// Something that was done, for the tape of a test.
#[cfg_attr(
    not(any(test, feature = "testing")),
    expect(dead_code, reason = "only tests keep a tape")
)]
pub(crate) enum Done<'a> {
    Create(&'a Path),
    Write(&'a Path, u64, Bytes<'a>),
    Len(&'a Path, u64),
    SyncFile(&'a Path),
    SyncFolder(&'a Path),
    Rename(&'a Path, &'a Path),
    Unlink(&'a Path),
    Mkdir(&'a Path),
}

/// Bytes that were written.
#[cfg_attr(
    not(any(test, feature = "testing")),
    expect(dead_code, reason = "only tests keep a tape")
)]
pub(crate) enum Bytes<'a> {
    Own(&'a [u8]),
    /// Of a map: offset and length.
    Map(&'a SharedMap, u64, u64),
}

#[cfg(any(test, feature = "testing"))]
impl Done<'_> {
    fn step(&self) -> Step {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        match self {
            Self::Create(at) => Step::Create(path(at)),
            Self::Write(to, at, bytes) => Step::Write {
                path: path(to),
                at: *at,
                bytes: match bytes {
                    Bytes::Own(bytes) => bytes.to_vec(),
                    Bytes::Map(map, offset, len) => {
                        let mut bytes = vec![0; *len as usize];
                        map.read(*offset, &mut bytes).expect("what was written");
                        bytes
                    }
                },
            },
            Self::Len(at, len) => Step::Len(path(at), *len),
            Self::SyncFile(at) => Step::SyncFile(path(at)),
            Self::SyncFolder(at) => Step::SyncFolder(path(at)),
            Self::Rename(from, to) => Step::Rename(path(from), path(to)),
            Self::Unlink(at) => Step::Unlink(path(at)),
            Self::Mkdir(at) => Step::Mkdir(path(at)),
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl Faults {
    pub(crate) fn denies_openat2(&self) -> bool {
        self.inner.lock().no_openat2
    }

    pub(crate) fn denies_direct(&self) -> bool {
        self.inner.lock().no_direct
    }

    pub(crate) fn denies_uring(&self) -> bool {
        self.inner.lock().no_uring
    }

    pub(crate) fn did(&self, done: &Done<'_>) {
        if let Some(tape) = &mut self.inner.lock().tape {
            tape.push(done.step());
        }
    }

    /// Starts a tape of everything that is done from now on.
    pub fn start_tape(&self) {
        self.inner.lock().tape = Some(Vec::new());
    }

    /// Puts a mark on the tape.
    pub fn mark(&self, mark: u64) {
        if let Some(tape) = &mut self.inner.lock().tape {
            tape.push(Step::Mark(mark));
        }
    }

    /// The tape so far.
    #[must_use]
    pub fn tape(&self) -> Vec<Step> {
        self.inner.lock().tape.clone().unwrap_or_default()
    }

    /// Makes a store opened from now on do without openat2, as where a sandbox denies it.
    pub fn deny_openat2(&self) {
        self.inner.lock().no_openat2 = true;
    }

    /// As on a file system without direct IO.
    pub fn deny_direct(&self) {
        self.inner.lock().no_direct = true;
    }

    /// As in a container whose filter of system calls has no io_uring.
    pub fn deny_uring(&self) {
        self.inner.lock().no_uring = true;
    }

    pub(crate) fn ask(&self, op: Op, path: &Path) -> Verdict {
        let killed = || io::Error::other("killed by a test");
        let mut inner = self.inner.lock();
        if inner.dead {
            return Verdict::Fail(killed());
        }
        inner.seen += 1;
        if inner.tracing {
            let path = path.to_string_lossy().into_owned();
            inner.trace.push((op, path));
        }
        if let Some(errno) = inner.broken
            && matches!(op, Op::Write | Op::Mkdir)
        {
            inner.thrown += 1;
            return Verdict::Fail(io::Error::from_raw_os_error(errno));
        }
        if let Some((part, errno)) = &inner.stuck
            && op == Op::Unlink
            && path.to_string_lossy().contains(part)
        {
            let errno = *errno;
            inner.thrown += 1;
            return Verdict::Fail(io::Error::from_raw_os_error(errno));
        }
        let Some(armed) = &mut inner.armed else {
            return Verdict::Pass;
        };
        if armed.op.is_some_and(|only| only != op) {
            return Verdict::Pass;
        }
        if armed.left > 0 {
            armed.left -= 1;
            return Verdict::Pass;
        }
        let fault = armed.fault;
        inner.armed = None;
        inner.thrown += 1;
        let half = matches!(op, Op::Read | Op::Write);
        match fault {
            Fault::Short(errno) if half => Verdict::Half(io::Error::from_raw_os_error(errno)),
            Fault::Errno(errno) | Fault::Short(errno) => {
                Verdict::Fail(io::Error::from_raw_os_error(errno))
            }
            Fault::Torn => {
                inner.dead = true;
                if half {
                    Verdict::Half(killed())
                } else {
                    Verdict::Fail(killed())
                }
            }
        }
    }

    /// Makes the n-th (0 is the next) operation of this kind, or of any kind, fail once.
    pub fn arm(&self, op: impl Into<Option<Op>>, nth: u64, fault: Fault) {
        self.inner.lock().armed = Some(Armed {
            op: op.into(),
            left: nth,
            fault,
        });
    }

    /// From now on the disk is full, or has room again.
    pub fn fill(&self, full: bool) {
        self.break_writes(full.then_some(nix::libc::ENOSPC));
    }

    /// From now on every write fails with this errno, or works again.
    pub fn break_writes(&self, errno: Option<i32>) {
        self.inner.lock().broken = errno;
    }

    /// From now on nothing whose path has `part` in it can be removed; `None`: all can.
    pub fn keep(&self, part: Option<&str>) {
        self.inner.lock().stuck = part.map(|part| (part.to_owned(), nix::libc::EPERM));
    }

    /// Takes an armed fault back.
    pub fn disarm(&self) {
        self.inner.lock().armed = None;
    }

    /// How many faults happened so far.
    #[must_use]
    pub fn thrown(&self) -> u64 {
        self.inner.lock().thrown
    }

    /// How many operations happened so far.
    #[must_use]
    pub fn seen(&self) -> u64 {
        self.inner.lock().seen
    }

    /// Starts to note every operation.
    pub fn start_trace(&self) {
        let mut inner = self.inner.lock();
        inner.tracing = true;
        inner.trace.clear();
    }

    /// The operations since [`Faults::start_trace`], each with its path below the data directory.
    #[must_use]
    pub fn trace(&self) -> Vec<(Op, String)> {
        self.inner.lock().trace.clone()
    }
}
