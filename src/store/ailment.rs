//! What keeps a disk from taking writes.

use nix::libc;

use super::error::StoreError;

/// Why a disk refuses what any other write would be refused, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ailment {
    /// The file system or the budget has no room.
    Full,
    /// The quota of this user is used up.
    Quota,
    /// The file system is mounted read-only.
    ReadOnly,
    /// The data directory is not where it was.
    Removed,
    /// The system fails: a bad medium, a lost device, missing rights.
    Failing,
    /// An fsync failed: nothing more is written before the next start.
    Fsync,
}

// === impl Ailment ===

impl Ailment {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Full,
        Self::Quota,
        Self::ReadOnly,
        Self::Removed,
        Self::Failing,
        Self::Fsync,
    ];

    /// The name in metrics and answers.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Quota => "quota",
            Self::ReadOnly => "read_only",
            Self::Removed => "removed",
            Self::Failing => "failing",
            Self::Fsync => "fsync",
        }
    }

    /// For people, as the start of a sentence.
    #[must_use]
    pub fn tell(self) -> &'static str {
        match self {
            Self::Full => "the disk is full",
            Self::Quota => "the disk quota is used up",
            Self::ReadOnly => "the data directory is read-only",
            Self::Removed => "the data directory is gone",
            Self::Failing => "the disk fails",
            Self::Fsync => "the disk takes no more writes",
        }
    }

    /// Room would end it.
    #[must_use]
    pub fn lacks_room(self) -> bool {
        matches!(self, Self::Full | Self::Quota)
    }
}

// === impl StoreError ===

impl StoreError {
    /// What is wrong with the disk if a write ended with this; `None`: nothing that another write
    /// would meet.
    #[must_use]
    pub fn ailment(&self) -> Option<Ailment> {
        match self {
            Self::NoSpace { .. } | Self::Floor { .. } => Some(Ailment::Full),
            Self::DiskFull { source, .. } => Some(match source.raw_os_error() {
                Some(libc::EDQUOT) => Ailment::Quota,
                _ => Ailment::Full,
            }),
            Self::ReadOnly { .. } => Some(Ailment::ReadOnly),
            Self::Removed { .. } => Some(Ailment::Removed),
            Self::Poisoned { .. } => Some(Ailment::Fsync),
            Self::Io { .. } => Some(Ailment::Failing),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::store::fault::Op;

    #[test]
    fn what_the_system_says_has_a_name() {
        let of = |errno| {
            let error = io::Error::from_raw_os_error(errno);
            StoreError::io(Op::Write, "x".into(), error).ailment()
        };
        assert_eq!(of(libc::ENOSPC), Some(Ailment::Full));
        assert_eq!(of(libc::EDQUOT), Some(Ailment::Quota));
        assert_eq!(of(libc::EROFS), Some(Ailment::ReadOnly));
        assert_eq!(of(libc::EIO), Some(Ailment::Failing));
        assert_eq!(of(libc::EACCES), Some(Ailment::Failing));
        let names: std::collections::HashSet<_> = Ailment::ALL.map(Ailment::as_str).into();
        assert_eq!(names.len(), Ailment::ALL.len());
    }
}
