"""The pieces of one save or restore, and the runs in which they move through the ring.

A prefix of 128K tokens has 128 pieces of KV, and all that is done for each of them is done on the scheduler's
thread. So nothing is: what is known of pieces are arrays, and what moves are runs: pieces that follow each other, one
behind another in the ring, for which there is one room, one copy and one message.
"""

from __future__ import annotations

import bisect
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._channel_layout import RUN_ALIGN
from ._channel_layout import Piece as Kind
from .channel import Broken
from .copier import Event


class Parts:
    """Pieces of KV, by number. Each call of numpy costs as much as some ten steps of Python, so there are few."""

    __slots__ = ("_arrays", "_pairs", "count", "ends", "offsets", "row_bytes", "starts")

    def __init__(self, pairs: Sequence[int], row_bytes: int) -> None:
        """`pairs`: first and last token (half open) of each. Raises ValueError for an odd number."""
        self._pairs = array("q", pairs)
        both = np.array(self._pairs)
        if len(both) % 2:
            raise ValueError("half a piece")
        starts, ends = both[0::2], both[1::2]
        rooms = np.empty(len(starts) + 1, dtype=np.int64)
        rooms[0] = 0
        np.cumsum((ends - starts) * row_bytes + (RUN_ALIGN - 1) & -RUN_ALIGN, out=rooms[1:])
        self._arrays = both, starts, ends, rooms
        self.count, self.row_bytes = len(starts), row_bytes
        self.starts, self.ends = self._pairs[0::2], self._pairs[1::2]
        self.offsets: list[int] = rooms.tolist()
        """Where each lies in the ring, if the first one lies at 0 and all others behind it; and the end."""

    @property
    def digest(self) -> int:
        """A number that other pieces do not have, for ranks to compare."""
        return zlib.crc32(self._pairs)

    def follow(self, end: int) -> bool:
        """Whether they ascend, none is empty, none overlaps the next, and none reaches beyond token `end`."""
        if not self.count:
            return True
        both = self._arrays[0]
        steps = both[1:] - both[:-1]
        return bool(steps.min() >= 0 and steps[0::2].min() > 0) and self.ends[-1] <= end

    def cover(self, start: int, end: int) -> bool:
        """Whether they ascend and bring tokens [start, end) without a gap, each up to where the next one begins."""
        if not self.count:
            return start >= end
        _, starts, ends, _ = self._arrays
        whole = (ends - starts).min() > 0 and self.starts[0] <= start and self.ends[-1] >= end
        if self.count > 1:
            whole = whole and (starts[1:] - starts[:-1]).min() >= 0 and (ends[:-1] - starts[1:]).min() >= 0
        return bool(whole)

    def room(self, first: int, count: int) -> int:
        """Bytes from the start of piece `first` to the end of the last of `count`."""
        last = first + count - 1
        size = (self.ends[last] - self.starts[last]) * self.row_bytes
        return self.offsets[last] - self.offsets[first] + size

    def fit(self, first: int, room: int) -> int:
        """How many pieces from `first` on fit into so many bytes, whole units each."""
        return bisect.bisect_right(self.offsets, self.offsets[first] + room) - 1 - first

    def whole(self, run: Run, base: int) -> Any:
        """What to copy of the pieces of a run, none of which overlaps another: all of it, from the rows of an index whose
        first row is that of token `base`. A row for each, see `pools`."""
        _, starts, ends, offsets = self._arrays
        first, last = run.index, run.index + run.count
        out = np.zeros((run.count, 5), dtype=np.int64)
        out[:, 0] = offsets[first:last] + (run.block - self.offsets[first])
        out[:, 1::3] = (ends[first:last] - starts[first:last])[:, None]
        out[:, 3] = starts[first:last] - base
        return out

    def table(self, run: Run, start: int, end: int, base: int) -> Any:
        """The same, but of each piece only the tokens in [start, end), up to where the next one begins."""
        _, starts, ends, _ = self._arrays
        first, last = run.index, run.index + run.count
        out = self.whole(run, base)
        upto = np.minimum(ends[first:last], end)
        beyond = starts[first + 1 : last + 1]
        np.minimum(upto[: len(beyond)], beyond, out=upto[: len(beyond)])
        skip = np.maximum(start - starts[first:last], 0)
        out[:, 2] = skip
        out[:, 3] += skip
        out[:, 4] = upto - starts[first:last] - skip
        return out if out[:, 4].min() > 0 else out[out[:, 4] > 0]


class Run:
    """Pieces that move together: `count` from number `index` on, in the ring from `block` on."""

    __slots__ = ("block", "bytes", "count", "event", "index", "kind", "lent", "open")

    def __init__(self, kind: Kind, index: int, count: int, block: int, size: int) -> None:
        self.kind, self.index, self.count, self.block, self.bytes = kind, index, count, block, size
        self.event: Event | None = None
        """The copy that uses the room."""
        self.lent = False
        """The daemon uses it, or may."""
        self.open = (1 << count) - 1
        """A bit for each piece for which the daemon did not answer."""

    @property
    def is_answered(self) -> bool:
        """The daemon answered for all of it."""
        return not self.open

    def answer(self, kind: Kind, index: int, count: int) -> int:
        """The daemon answered for `count` pieces from `index` on: how many of them are this run's. Raises Broken for
        a piece that was not asked for, or was answered before."""
        first, last = max(index, self.index), min(index + count, self.index + self.count)
        if kind is not self.kind or first >= last:
            return 0
        bits = ((1 << (last - first)) - 1) << (first - self.index)
        if not self.lent or self.open & bits != bits:
            raise Broken("an answer that was given before, or too early")
        self.open ^= bits
        return last - first


def joined(tables: list[Any]) -> Any:
    """All rows of tables, in order."""
    return tables[0] if len(tables) == 1 else np.concatenate(tables)


class Loans:
    """Runs whose machines are over: their room is the daemon's until it answered."""

    def __init__(self) -> None:
        self._runs: dict[int, list[Run]] = {}

    def add(self, number: int, run: Run) -> None:
        """Of the save or the lease `number`."""
        self._runs.setdefault(number, []).append(run)

    def answer(self, number: int, kind: Kind, index: int, count: int) -> tuple[int, list[int]]:
        """As `Run.answer`; and the rooms that are free now."""
        runs = self._runs.get(number)
        if runs is None:
            return 0, []
        found = sum(run.answer(kind, index, count) for run in runs)
        free = [run.block for run in runs if run.is_answered]
        if free:
            self._runs[number] = [run for run in runs if not run.is_answered]
            if not self._runs[number]:
                del self._runs[number]
        return found, free

    def clear(self) -> None:
        """The daemon is gone, and its ring with it."""
        self._runs.clear()
