"""The shared-memory channel, as proto/engram/v1/channel.toml specifies it.

What. Two rings of records in one memfd: `up` from the worker to the daemon, `down` back. Each has one
writer and one reader. Nothing here waits, calls the daemon, or starts a thread.

State. Positions and record numbers are private to each side; from the peer come only its tail, beat and
closed words and its records, none of which is believed: see `Broken`.

Order of writes. Body, head, a 0 into the seq word that follows, then the record's own seq word: one store
of 8 bytes, as `memoryview` does for an item of format "Q". x86 keeps stores in order and loads in order.
Elsewhere a lock is taken and dropped twice in between: neither side of the pair can cross both.

Errors. No room, or a record larger than a quarter of its area: `push` answers False and counts it.
A peer that breaks the rules: `Broken`; the session is to be closed. A value that does not fit its field: ValueError
or OverflowError, and nothing is written.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from . import _channel_layout as layout
from ._channel_layout import CloseReason, Down, Up
from ._codec import DecodeError

__all__ = ["BadChannel", "Broken", "DaemonEnd", "Memory", "Reader", "WorkerEnd", "Writer", "check_doorbell", "ring"]

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4

_HEAD = layout.RECORD_HEAD_BYTES
_MASK = layout.RECORD_ALIGN - 1
_TOKENS_HEAD = struct.Struct("<QII")
# A prompt is cut into records of at most this many tokens.
_TOKENS_PER_RECORD = 32768
_MOST_BYTES = layout.HEADER_BYTES + 2 * layout.MAX_CAPACITY


class Broken(Exception):
    """The peer wrote what a peer never writes; the session must be closed."""


class BadChannel(Exception):
    """The memory is not a channel that this side can use."""


class Message(Protocol):
    """One of the generated classes."""

    KIND: int

    def encode(self) -> bytes:
        """The body's bytes."""


M_in = TypeVar("M_in")
M_out = TypeVar("M_out", bound=Message)


def _no_barrier() -> None:
    """x86 needs none."""


_lock = threading.Lock()


def _lock_barrier() -> None:
    with _lock:
        pass
    with _lock:
        pass


_barrier = _no_barrier if platform.machine() in ("x86_64", "AMD64", "i686") else _lock_barrier


class Memory:
    """A mapping of a channel's memfd, as bytes and as words."""

    def __init__(self, fd: int, size: int) -> None:
        """Maps [0, size) of `fd`, which stays the caller's. Raises BadChannel or OSError."""
        if not 0 < size <= _MOST_BYTES or size % layout.AREA_ALIGN:
            # All of it is taken at once, below.
            raise BadChannel(f"a channel does not have {size} bytes")
        # Unsealed, the peer could cut it off under us, and the next access would kill this process.
        if not fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK:
            raise BadChannel("the memory is not sealed against shrinking")
        if os.fstat(fd).st_size < size:
            raise BadChannel("the memory is shorter than was said")
        self.size = size
        # All pages at once, or the first lap would pay for them on the scheduler's thread.
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.u8 = memoryview(self._map)
        self.u32 = self.u8.cast("I")
        self.u64 = self.u8.cast("Q")

    def close(self) -> None:
        """Unmaps it; whatever still uses it fails with ValueError. May be called again."""
        for view in (self.u64, self.u32, self.u8):
            view.release()
        self._map.close()


class Writer(Generic[M_out]):
    """The writing end of an area."""

    def __init__(self, memory: Memory, offset: int, capacity: int, tail: int) -> None:
        self._memory = memory
        self._offset, self._capacity, self._tail_word = offset, capacity, tail >> 3
        self._largest = capacity // layout.RECORD_SHARE
        self._written = 0
        self._tail = 0
        self._number = 0
        self._rung = 0
        self.dropped = 0
        """Messages that were dropped because there was no room, or never would be."""

    def push(self, message: M_out) -> bool:
        """Writes one message; False if it was dropped. Raises Broken, ValueError, OverflowError."""
        body = message.encode()
        at = self._reserve(len(body))
        if at is None:
            self.dropped += 1
            return False
        start = at + _HEAD
        self._memory.u8[start : start + len(body)] = body
        self._publish(at, message.KIND, len(body))
        return True

    def push_tokens(self, req: int, offset: int, ids: Any) -> int:
        """Writes token ids, the first of which is number `offset` of the request.

        `ids`: anything with a flat buffer of items of 8 bytes (copied as they are) or unsigned ones of
        4 bytes; or a sequence of ints. Answers how many were written, from the first on; the rest did
        not fit now. Raises Broken, and TypeError, ValueError or OverflowError for ids of another sort.
        """
        try:
            view = memoryview(ids)
        except TypeError:
            view = memoryview(array("q", ids))
        if view.ndim != 1 or not view.c_contiguous or view.format not in ("I", "L", "Q", "l", "q"):
            raise ValueError(f"ids of format {view.format} in {view.ndim} dimensions")
        width = view.itemsize
        kind = layout.Tokens.KIND if width == 4 else layout.TokensWide.KIND
        data, total, done = view.cast("B"), len(view), 0
        most = min(_TOKENS_PER_RECORD, (self._largest - _HEAD - _TOKENS_HEAD.size) // width)
        memory = self._memory.u8
        while done < total:
            count = min(most, total - done)
            length = _TOKENS_HEAD.size + count * width
            head = _TOKENS_HEAD.pack(req, offset + done, count)
            at = self._reserve(length)
            if at is None:
                break
            start = at + _HEAD
            memory[start : start + len(head)] = head
            memory[start + len(head) : start + length] = data[done * width : (done + count) * width]
            self._publish(at, kind, length)
            done += count
        return done

    def take_written(self) -> bool:
        """Whether anything was written since the last call: then the peer is to be woken."""
        new, self._rung = self._number != self._rung, self._number
        return new

    def _reserve(self, length: int) -> int | None:
        """Where a record with a body of `length` starts in memory, or None for no room."""
        size = length + _HEAD + _MASK & ~_MASK
        if size > self._largest:
            return None
        position = self._written % self._capacity
        left = self._capacity - position
        pad = left if size > left else 0
        need = pad + size + _HEAD
        if self._capacity - (self._written - self._tail) < need:
            tail = self._memory.u64[self._tail_word]
            _barrier()
            if tail < self._tail or tail > self._written or tail & _MASK:
                raise Broken(f"tail {tail}: it was {self._tail}, of {self._written} written")
            self._tail = tail
            if self._capacity - (self._written - tail) < need:
                return None
        if pad:
            self._publish(self._offset + position, 0, pad - _HEAD)
            return self._offset
        return self._offset + position

    def _publish(self, at: int, kind: int, length: int) -> None:
        memory = self._memory
        word = at >> 2
        memory.u32[word + 2] = length
        memory.u32[word + 3] = kind
        self._written += length + _HEAD + _MASK & ~_MASK
        memory.u64[(self._offset + self._written % self._capacity) >> 3] = 0
        self._number += 1
        _barrier()
        memory.u64[at >> 3] = self._number


class Reader(Generic[M_in]):
    """The reading end of an area."""

    def __init__(
        self, memory: Memory, offset: int, capacity: int, tail: int, kinds: Mapping[int, Any]
    ) -> None:
        self._memory, self._kinds = memory, kinds
        self._offset, self._capacity, self._tail_word = offset, capacity, tail >> 3
        self._largest = capacity // layout.RECORD_SHARE
        self._consumed = 0
        self._number = 1

    def pop(self) -> M_in | None:
        """The next message, or None if there is none yet. Raises Broken."""
        while True:
            record = self._next()
            if record is None:
                return None
            kind, length, at = record
            if kind != 0:
                break
            # A pad ends its lap, and `_next` takes none at the start of one: no second pass.
            self._consume(length)
        body = bytes(self._memory.u8[at + _HEAD : at + _HEAD + length])
        known = self._kinds.get(kind)
        if known is None:
            raise Broken(f"no message of this direction has kind {kind}")
        try:
            message = known.decode(body)
        except DecodeError as error:
            raise Broken(str(error)) from None
        self._consume(length)
        return message

    def _next(self) -> tuple[int, int, int] | None:
        """(kind, length of the body, where it starts) of the next record if it is whole."""
        memory = self._memory
        position = self._consumed % self._capacity
        at = self._offset + position
        if memory.u64[at >> 3] != self._number:
            return None
        _barrier()
        word = at >> 2
        length, kind = memory.u32[word + 2], memory.u32[word + 3]
        left = self._capacity - position
        if kind == 0:
            # A pad is smaller than the record that did not fit in its place.
            if length != left - _HEAD or left >= self._largest:
                raise Broken(f"a pad of {length} bytes, {left} before the end")
        elif kind > 0xFFFF:
            raise Broken(f"flags {kind >> 16:#x}")
        elif length + _HEAD > min(left, self._largest):
            raise Broken(f"a record of {length} bytes, {left} before the end")
        return kind, length, at

    def _consume(self, length: int) -> None:
        self._consumed += length + _HEAD + _MASK & ~_MASK
        self._number += 1
        _barrier()
        self._memory.u64[self._tail_word] = self._consumed


class _End(Generic[M_out, M_in]):
    """What both ends have: a writer `tx`, a reader `rx`, beats and the words that say the end."""

    _OWN_BEAT: int
    _PEER_BEAT: int
    _OWN_CLOSED: int
    _PEER_CLOSED: int

    def __init__(self, memory: Memory, tx: Writer[M_out], rx: Reader[M_in]) -> None:
        self.memory, self.tx, self.rx = memory, tx, rx
        self.boot, self.session = _identity(memory)
        self.boot_number = int.from_bytes(self.boot[:7], "little")
        """The same for ranks with one daemon."""
        self._beats = 0

    def beat(self) -> None:
        """Shows that this side lives."""
        self._beats += 1
        self.memory.u64[self._OWN_BEAT >> 3] = self._beats

    def peer_beat(self) -> int:
        """A number that changes while the peer lives."""
        return self.memory.u64[self._PEER_BEAT >> 3]

    def close(self, reason: CloseReason) -> None:
        """Tells the peer that the session ends. The memory stays mapped."""
        self.memory.u32[self._OWN_CLOSED >> 2] = reason

    def peer_closed(self) -> CloseReason | None:
        """Why the peer ended the session, if it did; an unknown reason is a broken peer's."""
        reason = self.memory.u32[self._PEER_CLOSED >> 2]
        if reason == 0:
            return None
        known = CloseReason._value2member_map_
        return CloseReason(reason) if reason in known else CloseReason.BROKEN_PEER


class WorkerEnd(_End[Up, Down]):
    """The worker's end."""

    _OWN_BEAT, _PEER_BEAT = layout.HEADER_WORKER_BEAT, layout.HEADER_DAEMON_BEAT
    _OWN_CLOSED, _PEER_CLOSED = layout.HEADER_WORKER_CLOSED, layout.HEADER_DAEMON_CLOSED

    def __init__(self, memory: Memory) -> None:
        """Over a channel that the daemon made. Raises BadChannel."""
        (up, up_capacity), (down, down_capacity) = _areas(memory)
        super().__init__(
            memory,
            Writer(memory, up, up_capacity, layout.HEADER_UP_TAIL),
            Reader(memory, down, down_capacity, layout.HEADER_DOWN_TAIL, layout.DOWN),
        )

    @classmethod
    def open(cls, fd: int, size: int) -> WorkerEnd:
        """Maps the channel of `size` bytes in `fd`, which stays the caller's. Raises BadChannel, OSError."""
        memory = Memory(fd, size)
        try:
            return cls(memory)
        except BadChannel:
            memory.close()
            raise


class DaemonEnd(_End[Down, Up]):
    """The daemon's end, for tests."""

    _OWN_BEAT, _PEER_BEAT = layout.HEADER_DAEMON_BEAT, layout.HEADER_WORKER_BEAT
    _OWN_CLOSED, _PEER_CLOSED = layout.HEADER_DAEMON_CLOSED, layout.HEADER_WORKER_CLOSED

    @classmethod
    def create(
        cls,
        boot: bytes,
        session: bytes,
        up_capacity: int = layout.UP_CAPACITY,
        down_capacity: int = layout.DOWN_CAPACITY,
    ) -> tuple[DaemonEnd, int]:
        """A new channel, and its memfd."""
        size = layout.HEADER_BYTES + up_capacity + down_capacity
        fd = os.memfd_create("engram-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
        memory = Memory(fd, size)
        for offset, code, value in (
            (layout.HEADER_MAGIC, "<Q", layout.MAGIC),
            (layout.HEADER_VERSION, "<I", layout.VERSION),
            (layout.HEADER_HEADER_BYTES, "<I", layout.HEADER_BYTES),
            (layout.HEADER_UP_OFFSET, "<Q", layout.HEADER_BYTES),
            (layout.HEADER_UP_CAPACITY, "<Q", up_capacity),
            (layout.HEADER_DOWN_OFFSET, "<Q", layout.HEADER_BYTES + up_capacity),
            (layout.HEADER_DOWN_CAPACITY, "<Q", down_capacity),
            (layout.HEADER_BOOT, "<16s", boot),
            (layout.HEADER_SESSION, "<16s", session),
        ):
            struct.pack_into(code, memory.u8, offset, value)
        return cls(memory), fd

    def __init__(self, memory: Memory) -> None:
        """Over a channel that `create` made, and whose header nobody else wrote yet."""
        (up, up_capacity), (down, down_capacity) = _areas(memory)
        super().__init__(
            memory,
            Writer(memory, down, down_capacity, layout.HEADER_DOWN_TAIL),
            Reader(memory, up, up_capacity, layout.HEADER_UP_TAIL, layout.UP),
        )


def ring(doorbell: int) -> None:
    """Wakes the daemon: adds 1 to its eventfd. A counter that is full wakes it too."""
    try:
        os.eventfd_write(doorbell, 1)
    except BlockingIOError:
        pass


def check_doorbell(fd: int) -> None:
    """That ringing it never waits: it is an eventfd, and does not block. Raises BadChannel or OSError."""
    # Anything else that is full, such as a pipe, would stop whoever rings.
    if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]":
        raise BadChannel("the doorbell is no eventfd")
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK:
        raise BadChannel("the doorbell blocks")


def _identity(memory: Memory) -> tuple[bytes, bytes]:
    boot, session = layout.HEADER_BOOT, layout.HEADER_SESSION
    return bytes(memory.u8[boot : boot + 16]), bytes(memory.u8[session : session + 16])


def _areas(memory: Memory) -> Sequence[tuple[int, int]]:
    """(offset, capacity) of the areas up and down, read once and checked. Raises BadChannel."""
    if memory.size < layout.HEADER_BYTES:
        raise BadChannel("the memory is shorter than a header")
    u32, u64 = memory.u32, memory.u64
    if u64[layout.HEADER_MAGIC >> 3] != layout.MAGIC:
        raise BadChannel("the memory is no channel")
    version = u32[layout.HEADER_VERSION >> 2]
    if version != layout.VERSION:
        raise BadChannel(f"channel of version {version}, not {layout.VERSION}")
    if u32[layout.HEADER_HEADER_BYTES >> 2] != layout.HEADER_BYTES:
        raise BadChannel("header of another size")
    areas = []
    for name in ("UP", "DOWN"):
        offset = u64[getattr(layout, f"HEADER_{name}_OFFSET") >> 3]
        capacity = u64[getattr(layout, f"HEADER_{name}_CAPACITY") >> 3]
        aligned = not (offset | capacity) % layout.AREA_ALIGN
        sized = layout.MIN_CAPACITY <= capacity <= layout.MAX_CAPACITY
        inside = layout.HEADER_BYTES <= offset <= memory.size - capacity
        if not (aligned and sized and inside):
            raise BadChannel(f"area of {capacity} bytes at {offset} of {memory.size}")
        areas.append((offset, capacity))
    (first, size), (second, _) = sorted(areas)
    if first + size > second:
        raise BadChannel("the areas overlap")
    return areas
