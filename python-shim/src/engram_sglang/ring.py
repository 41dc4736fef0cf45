"""The staging ring: memory of this process through which all bytes travel.

What. Bytes travel pool -> ring -> daemon and back. The daemon sees the ring only, or in mode engine a window that stands
for it (see `carrier`), never a pool, so no daemon, however late or broken, can touch what SGLang computes with.

A ring belongs to one session. When a session ends its ring is never used again: a stopped daemon may
wake up and still write to it. The memory lives as long as a copy of this side still uses it; memory that is gone
for the daemon too when this side frees it (`outlives_peer`) also until the daemon has hung up, see `link`.

`RingSpace` gives room out, first fit, in whole units; it is used by the scheduler thread alone.
"""

from __future__ import annotations

import bisect
import fcntl
import functools
import mmap
import os
from collections.abc import Iterator
from typing import Any

from ._channel_layout import RUN_ALIGN
from .carrier import Carrier
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


def _turned(data: bytes) -> bytes:
    return bytes(b ^ 0xFF for b in data)


def _zeros(size: int) -> bytes:
    return bytes(size)


class Window:
    """Memory of this process in a memfd, which the daemon maps: the ring itself on a host device, and in mode engine what
    stands for it. Its size is fixed at once; its pages are taken by `take`."""

    def __init__(self, size: int, name: str = "engram-window") -> None:
        """Raises OSError."""
        self.size = -(-size // UNIT) * UNIT
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._fd, self.size)
        except BaseException:
            os.close(self._fd)
            raise

    @functools.cached_property
    def bytes(self) -> Any:
        """All of it as a tensor, which keeps the mapping alive for as long as any copy uses it."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8)

    def take(self, step: int | None = None) -> Iterator[tuple[int, int]]:
        """Takes all of its memory now, so that none is missing later, in steps of so many bytes: start and size of each
        as it is there. Raises OSError or NoRing."""
        # Or the system would look for it until something is killed.
        if (there := _available()) is not None and self.size > there:
            raise NoRing(f"this host has {there >> 20} MiB left, and the staging ring needs {self.size >> 20} MiB")
        step = step or self.size
        for start in range(0, self.size, step):
            size = min(step, self.size - start)
            os.posix_fallocate(self._fd, start, size)
            yield start, size

    @property
    def fd(self) -> int | None:
        """To be passed to the daemon, as long as this is open."""
        return self._fd if self._fd >= 0 else None

    def prepare_self_test(self) -> None:
        """Leaves the pattern that the daemon answers."""
        pattern = self_test_pattern()
        self._map[: len(pattern)] = pattern

    def check_self_test(self) -> bool:
        """Whether the daemon answered with the complement; clears it."""
        pattern = self_test_pattern()
        right = self._map[: len(pattern)] == _turned(pattern)
        self._map[: len(pattern)] = _zeros(len(pattern))
        return right

    def turn_self_test(self) -> bool:
        """Plays the daemon: whether the pattern is there; leaves its complement."""
        pattern = self_test_pattern()
        right = self._map[: len(pattern)] == pattern
        self._map[: len(pattern)] = _turned(pattern)
        return right

    def close(self) -> None:
        """No more use by this side beyond copies under way. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class HostRing(Window):
    """A ring in shared memory, for pools in host memory."""

    device_kind = 1  # DEVICE_KIND_HOST
    device_uuid = b""
    ipc_handle = b""
    ipc_offset = 0
    no_ipc: str | None = None
    outlives_peer = True
    """What the peer has mapped stays what it is when this side closes the ring."""

    def __init__(self, size: int) -> None:
        """Takes `size` bytes of memory now. Raises OSError or NoRing."""
        super().__init__(size, "engram-ring")
        try:
            for _ in self.take():
                pass
        except BaseException:
            self.close()
            raise
        # A look at one page brings its neighbours into this process too: no copy meets them for the first time.
        with memoryview(self._map) as view:
            view[::65536].tobytes()
        self.space = RingSpace(self.size)
        self._window: Window | None = None

    def carry(self, window: Window) -> Carrier:
        """Mode engine: the daemon reaches `window` instead, which is this ring's from now on. Raises OSError or NoRing."""
        for _ in window.take():
            pass
        self._window = window
        return Carrier(self.bytes, window.bytes, self.size)

    def close(self) -> None:
        super().close()
        if self._window is not None:
            self._window.close()
