"""The staging ring: memory of this process that the daemon may read and write.

What. Bytes travel pool -> ring -> daemon and back. The daemon sees the ring only, never a pool, so no
daemon, however late or broken, can touch what SGLang computes with.

A ring belongs to one session. When a session ends its ring is never used again: a stopped daemon may
wake up and still write to it. The memory lives as long as a copy of this side still uses it; memory that is gone
for the daemon too when this side frees it (`outlives_peer`) also until the daemon has hung up, see `link`.

`RingSpace` gives room out, first fit, in whole units; it is used by the scheduler thread alone.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
from typing import Any

from ._channel_layout import RUN_ALIGN
from .handshake import self_test_pattern

UNIT = RUN_ALIGN

_F_ADD_SEALS = 1033
_SEALS = 1 | 2 | 4  # no more seals, no shrinking, no growing


class NoRing(Exception):
    """There is no memory for a ring; the text says what is missing."""


class RingSpace:
    """Which parts of the ring are free."""

    def __init__(self, size: int) -> None:
        self.size = size // UNIT * UNIT
        self._starts: list[int] = [0]
        self._lengths: dict[int, int] = {0: self.size}
        self._taken: dict[int, int] = {}
        self.free_bytes = self.size

    def take(self, length: int) -> int | None:
        """Offset of `length` bytes of room, or None. Whoever takes gives back by the same offset."""
        need = max(UNIT, -(-length // UNIT) * UNIT)
        if need > self.free_bytes:
            return None
        for i, start in enumerate(self._starts):
            have = self._lengths[start]
            if have < need:
                continue
            del self._lengths[start]
            if have == need:
                del self._starts[i]
            else:
                self._starts[i] = start + need
                self._lengths[start + need] = have - need
            self._taken[start] = need
            self.free_bytes -= need
            return start
        return None

    def give(self, start: int) -> None:
        """Gives room back. Raises KeyError for room that is not taken."""
        length = self._taken.pop(start)
        self.free_bytes += length
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + length:
            length += self._lengths.pop(self._starts[i])
            del self._starts[i]
        if i > 0 and self._starts[i - 1] + self._lengths[self._starts[i - 1]] == start:
            self._lengths[self._starts[i - 1]] += length
            return
        self._starts.insert(i, start)
        self._lengths[start] = length

    @property
    def largest(self) -> int:
        """The largest room that there is."""
        return max(self._lengths.values(), default=0)

    @property
    def taken(self) -> int:
        """How many parts are given out."""
        return len(self._taken)


def _available() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError, StopIteration):
        return None


class HostRing:
    """A ring in shared memory, for pools in host memory."""

    device_kind = 1  # DEVICE_KIND_HOST
    device_uuid = b""
    ipc_handle = b""
    ipc_offset = 0
    outlives_peer = True
    """What the peer has mapped stays what it is when this side closes the ring."""

    def __init__(self, size: int) -> None:
        """Takes `size` bytes of memory now, so that none is missing later. Raises OSError or NoRing."""
        import torch

        self.size = -(-size // UNIT) * UNIT
        # Or the system would look for it until something is killed.
        if (there := _available()) is not None and self.size > there:
            raise NoRing(f"this host has {there >> 20} MiB left, and the staging ring needs {self.size >> 20} MiB")
        self._fd = os.memfd_create("engram-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size)
            os.posix_fallocate(self._fd, 0, self.size)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._fd, self.size)
        except BaseException:
            os.close(self._fd)
            raise
        # A look at one page brings its neighbours into this process too: no copy meets them for the first time.
        with memoryview(self._map) as view:
            bytes(view[::65536])
        # The tensor keeps the mapping alive for as long as any copy uses it.
        self.bytes: Any = torch.frombuffer(self._map, dtype=torch.uint8)
        self.space = RingSpace(self.size)

    @property
    def fd(self) -> int | None:
        """To be passed to the daemon, as long as the ring is open."""
        return self._fd if self._fd >= 0 else None

    def prepare_self_test(self) -> None:
        """Leaves the pattern that the daemon answers."""
        pattern = self_test_pattern()
        self._map[: len(pattern)] = pattern

    def check_self_test(self) -> bool:
        """Whether the daemon answered with the complement; clears it."""
        pattern = self_test_pattern()
        right = self._map[: len(pattern)] == bytes(b ^ 0xFF for b in pattern)
        self._map[: len(pattern)] = bytes(len(pattern))
        return right

    def close(self) -> None:
        """No more use by this side beyond copies under way. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
