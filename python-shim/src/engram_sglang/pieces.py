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
from itertools import accumulate
from operator import ge, le, lt, sub
from typing import Any

import numpy as np

from ._channel_layout import RUN_ALIGN
from ._channel_layout import Piece as Kind
from .carrier import Place
from .channel import Broken
from .copier import Event

_MASK = RUN_ALIGN - 1


class Parts:
    """Pieces of KV, by number. There are some hundred at most, and numpy would take longer for them than Python: between
    two forwards of SGLang nothing of it is left in the processor's caches."""

    __slots__ = ("_even", "count", "ends", "offsets", "row_bytes", "starts")

    def __init__(self, pairs: Sequence[int], row_bytes: int) -> None:
        """`pairs`: first and last token (half open) of each. Raises ValueError for an odd number."""
        if len(pairs) % 2:
            raise ValueError("half a piece")
        self.starts, self.ends = starts, ends = pairs[0::2], pairs[1::2]
        self.count, self.row_bytes = len(starts), row_bytes
        rooms = [(end - start) * row_bytes + _MASK & -RUN_ALIGN for start, end in zip(starts, ends)]
        self.offsets = list(accumulate(rooms, initial=0))
        """Where each lies in the ring, if the first one lies at 0 and all others behind it; and the end."""
        self._even = ends[:-1] == starts[1:]
        """Each begins where the one before it ends."""

    @property
    def digest(self) -> int:
        """A number that other pieces do not have, for ranks to compare."""
        return zlib.crc32(array("Q", self.ends), zlib.crc32(array("Q", self.starts)))

    def follow(self, end: int) -> bool:
        """Whether they ascend, none is empty, none overlaps the next, and none reaches beyond token `end`."""
        starts, ends = self.starts, self.ends
        if not starts:
            return True
        return all(map(lt, starts, ends)) and all(map(le, ends, starts[1:])) and ends[-1] <= end

    def cover(self, start: int, end: int) -> bool:
        """Whether they ascend and bring tokens [start, end) without a gap, each up to where the next one begins."""
        starts, ends = self.starts, self.ends
        if not starts:
            return start >= end
        after = starts[1:]
        whole = starts[0] <= start and ends[-1] >= end and all(map(lt, starts, ends))
        return whole and all(map(le, starts, after)) and all(map(ge, ends, after))

    def room(self, first: int, count: int) -> int:
        """Bytes from the start of piece `first` to the end of the last of `count`."""
        last = first + count - 1
        size = (self.ends[last] - self.starts[last]) * self.row_bytes
        return self.offsets[last] - self.offsets[first] + size

    def fit(self, first: int, room: int) -> int:
        """How many pieces from `first` on fit into so many bytes, whole units each."""
        return bisect.bisect_right(self.offsets, self.offsets[first] + room) - 1 - first

    def place(self, run: Run, first: int, count: int) -> Place:
        """Where `count` pieces of a run of KV lie in the ring, from piece `first` on."""
        return run.block + self.offsets[first] - self.offsets[run.index], self.room(first, count)

    def whole(self, run: Run, base: int) -> Any:
        """What to copy of the pieces of a run, none of which overlaps another: all of it, from the rows of an index whose
        first row is that of token `base`. A row for each, see `pools`."""
        first, last = run.index, run.index + run.count
        starts, place = self.starts[first:last], run.block - self.offsets[first]
        tokens = array("q", map(sub, self.ends[first:last], starts))
        out = array("q", bytes(40 * len(starts)))
        out[0::5] = array("q", [offset + place for offset in self.offsets[first:last]])
        out[1::5] = out[4::5] = tokens
        out[3::5] = array("q", [start - base for start in starts])
        return np.frombuffer(out, dtype=np.int64).reshape(-1, 5)

    def table(self, run: Run, start: int, end: int, base: int) -> Any:
        """The same, but of each piece only the tokens in [start, end), up to where the next one begins."""
        first, last = run.index, run.index + run.count
        if self._even and start <= self.starts[first] and self.ends[last - 1] <= end:
            return self.whole(run, base)
        place, rows = run.block - self.offsets[first], []
        nexts = [*self.starts[first + 1 : last + 1], end][: run.count]
        for begins, ends, beyond, offset in zip(
            self.starts[first:last], self.ends[first:last], nexts, self.offsets[first:last]
        ):
            skip = max(start - begins, 0)
            count = min(ends, end, beyond) - begins - skip
            if count > 0:
                rows.append((offset + place, ends - begins, skip, begins - base + skip, count))
        return np.array(rows, dtype=np.int64).reshape(-1, 5)


class Run:
    """Pieces that move together: `count` from number `index` on, in the ring from `block` on."""

    __slots__ = ("block", "bytes", "came", "count", "event", "index", "kind", "lent", "open")

    def __init__(self, kind: Kind, index: int, count: int, block: int, size: int) -> None:
        self.kind, self.index, self.count, self.block, self.bytes = kind, index, count, block, size
        self.event: Event | None = None
        """The copy that uses the room, here or in the window."""
        self.lent = False
        """The daemon uses it, or may."""
        self.open = (1 << count) - 1
        """A bit for each piece for which the daemon did not answer."""
        self.came = 0
        """A bit for each piece that is in the window and was not carried into the ring."""

    @property
    def is_answered(self) -> bool:
        """The daemon answered for all of it."""
        return not self.open

    @property
    def is_here(self) -> bool:
        """All of it is in the ring."""
        return not self.open and not self.came and (self.event is None or self.event.done())

    @property
    def is_idle(self) -> bool:
        """No copy of this side uses its room."""
        return self.event is None or self.event.done()

    def take_came(self) -> list[tuple[int, int]]:
        """Pieces that are to be carried into the ring, as ranges of numbers: the first, and how many. They count as
        carried from now on."""
        ranges, number, bits = [], self.index, self.came
        self.came = 0
        while bits:
            skip = (bits & -bits).bit_length() - 1
            bits >>= skip
            count = (~bits & bits + 1).bit_length() - 1
            ranges.append((number + skip, count))
            bits >>= count
            number += skip + count
        return ranges

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
        self.came |= bits
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

    def answer(self, number: int, kind: Kind, index: int, count: int) -> tuple[int, list[Run]]:
        """As `Run.answer`; and the runs whose rooms the daemon does not use any more."""
        runs = self._runs.get(number)
        if runs is None:
            return 0, []
        found = sum(run.answer(kind, index, count) for run in runs)
        free = [run for run in runs if run.is_answered]
        if free:
            self._runs[number] = [run for run in runs if not run.is_answered]
            if not self._runs[number]:
                del self._runs[number]
        return found, free

    def clear(self) -> None:
        """The daemon is gone, and its ring with it."""
        self._runs.clear()
