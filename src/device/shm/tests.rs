use std::{
    fs::File,
    io::Write,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering},
    thread,
};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};
use proptest::prelude::*;

use super::*;

const LEN: u64 = 3 * 4096;

fn memfd(len: i64, seals: SealFlag) -> OwnedFd {
    let fd = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    fd
}

#[test]
fn two_mappings_of_one_memfd_see_each_other() {
    let (ours, fd) = SharedMap::create("test", LEN).unwrap();
    let theirs = SharedMap::open(fd, LEN).unwrap();
    ours.write(4090, b"across a page").unwrap();
    theirs
        .with_bytes(4090, 13, |bytes| assert_eq!(bytes, b"across a page"))
        .unwrap();
    theirs.fill(0, LEN, 7).unwrap();
    let mut byte = [0];
    ours.read(LEN - 1, &mut byte).unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn created_memory_can_not_change_its_size() {
    let (_map, fd) = SharedMap::create("test", LEN).unwrap();
    assert!(ftruncate(&fd, 4096).is_err());
    assert!(ftruncate(&fd, LEN as i64 + 1).is_err());
    assert!(fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).is_err());
}

#[test]
fn hostile_descriptors_are_refused() {
    let refused = |fd: OwnedFd, len| SharedMap::open(fd, len).unwrap_err();
    let shrink = SealFlag::F_SEAL_SHRINK;

    assert!(matches!(
        refused(memfd(8192, SealFlag::empty()), 8192),
        ShmError::NotSealed
    ));
    assert!(matches!(
        refused(memfd(8192, SealFlag::F_SEAL_GROW), 8192),
        ShmError::NotSealed
    ));
    let short = refused(memfd(4096, shrink), 8192);
    assert!(
        matches!(
            short,
            ShmError::Short {
                have: 4096,
                want: 8192
            }
        ),
        "{short}"
    );
    assert!(matches!(
        refused(memfd(4096, shrink), 0),
        ShmError::BadLength(0)
    ));
    assert!(matches!(
        refused(memfd(4096, shrink), u64::MAX),
        ShmError::Short { .. }
    ));
    let write_sealed = memfd(4096, shrink | SealFlag::F_SEAL_WRITE);
    assert!(matches!(
        refused(write_sealed, 4096),
        ShmError::System { call: "mmap", .. }
    ));

    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[0; 4096]).unwrap();
    assert!(matches!(
        refused(file.into(), 4096),
        ShmError::NotMemory | ShmError::NotSealed
    ));
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/zero")
        .unwrap();
    assert!(matches!(refused(device.into(), 4096), ShmError::NotMemory));
    let (reader, _writer) = std::io::pipe().unwrap();
    assert!(matches!(refused(reader.into(), 4096), ShmError::NotMemory));
    let folder = File::open("/").unwrap();
    assert!(matches!(refused(folder.into(), 4096), ShmError::NotMemory));
}

#[test]
fn a_file_in_shared_memory_that_its_owner_can_truncate_is_refused() {
    let Ok(file) = tempfile::tempfile_in("/dev/shm") else {
        return;
    };
    file.set_len(4096).unwrap();
    assert!(matches!(
        SharedMap::open(file.into(), 4096),
        Err(ShmError::NotSealed)
    ));
}

#[test]
fn bad_sizes_and_names_are_errors() {
    for len in [0, u64::MAX, i64::MAX as u64] {
        assert!(SharedMap::create("test", len).is_err(), "{len}");
    }
    assert!(SharedMap::create("a\0b", LEN).is_err());
}

#[test]
fn words_are_little_endian_and_aligned() {
    let map = SharedMap::anonymous(64).unwrap();
    map.store_u64(8, 0x0807_0605_0403_0201, Ordering::Release)
        .unwrap();
    map.with_bytes(8, 8, |bytes| assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8]))
        .unwrap();
    assert_eq!(map.load_u32(12, Ordering::Acquire).unwrap(), 0x0807_0605);
    map.store_u32(60, 9, Ordering::AcqRel).unwrap();
    assert_eq!(map.load_u32(60, Ordering::AcqRel).unwrap(), 9);
    for offset in [1, 4, 60, 64, u64::MAX - 7, u64::MAX] {
        let error = map.load_u64(offset, Ordering::Acquire).unwrap_err();
        assert_eq!(
            error,
            OutOfBounds {
                offset,
                len: 8,
                align: 8,
                size: 64
            }
        );
        assert!(map.store_u64(offset, 1, Ordering::Release).is_err());
    }
    assert!(map.load_u32(2, Ordering::Acquire).is_err());
    assert!(map.store_u32(62, 1, Ordering::Release).is_err());
}

/// The writer fills a slot, then publishes its number; the reader must never see the number without
/// the bytes.
#[test]
fn a_released_word_publishes_the_bytes_before_it() {
    const ROUNDS: u64 = 20_000;
    let (writer, fd) = SharedMap::create("test", 8192).unwrap();
    let reader = SharedMap::open(fd, 8192).unwrap();
    let thread = thread::spawn(move || {
        for round in 1..=ROUNDS {
            while writer.load_u64(64, Ordering::Acquire).unwrap() != round - 1 {
                thread::yield_now();
            }
            writer.write(4096, &[round as u8; 256]).unwrap();
            writer.store_u64(0, round, Ordering::Release).unwrap();
        }
    });
    for round in 1..=ROUNDS {
        while reader.load_u64(0, Ordering::Acquire).unwrap() != round {
            thread::yield_now();
        }
        reader
            .with_bytes(4096, 256, |got| assert_eq!(got, [round as u8; 256]))
            .unwrap();
        reader.store_u64(64, round, Ordering::Release).unwrap();
    }
    thread.join().unwrap();
}

#[test]
fn checksum_is_castagnoli() {
    let map = SharedMap::anonymous(1 << 20).unwrap();
    map.write(3, b"123456789").unwrap();
    assert_eq!(map.crc32c(3, 9).unwrap(), 0xe306_9283);
    assert_eq!(map.crc32c(3, 0).unwrap(), 0);
    let bytes: Vec<u8> = (0..100_000_u32)
        .map(|i| (i.wrapping_mul(i) >> 3) as u8)
        .collect();
    map.write(17, &bytes).unwrap();
    assert_eq!(
        map.crc32c(17, 100_000).unwrap(),
        crc_fast::crc32_iscsi(&bytes)
    );
}

#[test]
fn file_io_goes_straight_and_notices_the_end() {
    let map = SharedMap::anonymous(LEN).unwrap();
    let bytes: Vec<u8> = (0..5000_u32).map(|i| (i % 251) as u8).collect();
    map.write(100, &bytes).unwrap();
    let file = tempfile::tempfile().unwrap();
    map.pwrite_all(&file, 10, 100, 5000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5010);
    map.fill(0, LEN, 0).unwrap();
    map.pread_exact(&file, 10, 7000, 5000).unwrap();
    map.with_bytes(7000, 5000, |got| assert_eq!(got, bytes))
        .unwrap();

    let kind = |result: std::io::Result<()>| result.unwrap_err().kind();
    use std::io::ErrorKind::{InvalidInput, UnexpectedEof};
    assert_eq!(kind(map.pread_exact(&file, 11, 0, 5000)), UnexpectedEof);
    assert_eq!(kind(map.pread_exact(&file, 0, LEN - 1, 2)), InvalidInput);
    assert_eq!(kind(map.pread_exact(&file, u64::MAX, 0, 2)), InvalidInput);
    assert_eq!(kind(map.pwrite_all(&file, 0, u64::MAX, 2)), InvalidInput);
    let read_only = File::open("/dev/null").unwrap();
    assert!(map.pwrite_all(&read_only, 0, 0, 2).is_err());
    let full = File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(
        kind(map.pwrite_all(&full, 0, 0, 2)),
        std::io::ErrorKind::StorageFull
    );
}

#[test]
fn many_threads_copy_at_once() {
    let map = Arc::new(SharedMap::anonymous(8 << 20).unwrap());
    let threads: Vec<_> = (0..8_u64)
        .map(|n| {
            let map = Arc::clone(&map);
            thread::spawn(move || {
                let own = SharedMap::anonymous(1 << 20).unwrap();
                for round in 0..8 {
                    own.fill(0, 1 << 20, (n * 8 + round) as u8).unwrap();
                    own.copy(0, &map, n << 20, 1 << 20).unwrap();
                    own.fill(0, 1 << 20, 0xff).unwrap();
                    map.copy(n << 20, &own, 0, 1 << 20).unwrap();
                    own.chunks(0, 1 << 20, |got| {
                        assert!(got.iter().all(|&byte| u64::from(byte) == n * 8 + round));
                    })
                    .unwrap();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

proptest! {
    /// Every access equals the same access of a plain vector, or is refused where that would panic.
    #[test]
    fn accesses_are_those_of_a_vector(
        offset in prop_oneof![0..LEN + 10, Just(u64::MAX), u64::MAX - LEN..],
        other in prop_oneof![0..LEN + 10, Just(u64::MAX)],
        len in prop_oneof![0..LEN + 10, Just(u64::MAX)],
    ) {
        let map = SharedMap::anonymous(LEN).unwrap();
        let mut model: Vec<u8> = (0..LEN).map(|i| ((i * 7) >> 2) as u8).collect();
        map.write(0, &model).unwrap();
        let fits = |at: u64| at.checked_add(len).is_some_and(|end| end <= LEN);

        let copied = map.copy(offset, &map, other, len);
        prop_assert_eq!(copied.is_ok(), fits(offset) && fits(other));
        if copied.is_ok() {
            model.copy_within(offset as usize..(offset + len) as usize, other as usize);
        }
        let filled = map.fill(other, len, 9);
        prop_assert_eq!(filled.is_ok(), fits(other));
        if filled.is_ok() {
            model[other as usize..(other + len) as usize].fill(9);
        }
        let got = map.with_bytes(offset, len, <[u8]>::to_vec);
        prop_assert_eq!(got.is_ok(), fits(offset));
        if let Ok(got) = got {
            prop_assert_eq!(&got, &model[offset as usize..(offset + len) as usize]);
        }
        let crc = map.crc32c(offset, len);
        prop_assert_eq!(crc.is_ok(), fits(offset));
        prop_assert!(map.with_bytes(0, LEN, |all| all == model).unwrap());
    }
}
