"""Gather and scatter as one kernel each: all layers, all rows and all pieces of a save or a restore at once.

A piece of KV is two tensors of each attention layer, and a prefix is many pieces: as calls of torch they keep
the scheduler thread for milliseconds. Here it queues a table of a few numbers for each piece, and one kernel.

The pools are described by a table on the device, made once: for each *side* (K or V of a layer, or a state
tensor of a layer) its address, the distance of two rows, the bytes of one, the distance of two pages, and the bytes of a
packed row that lie before it. A state is a piece of one row, whose index is its slot. Where pages are not apart, the kernel
is compiled without them.

All memory is taken when the mover is made: a copy that finds a full GPU halfway could not be taken back. Where no table
is free, because the device is far behind, the pieces go one by one.

What Triton compiled is launched as it is. To find it again by the arguments of a call, each time, takes longer than all
else here, and there is one for each sort of copy: no argument is specialized.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .ring import UNIT

_FIELDS = 5
_PIECES = 512
# More than there are copies of several pieces in the time of one forward, but for the longest ones.
_TABLES = 32


@triton.jit(do_not_specialize=["ring", "rows", "table", "sides", "columns", "unit", "tokens", "skip", "first", "count"])
def _move(
    ring, rows, table, sides, columns, unit, tokens, skip, first, count,
    ONE: tl.constexpr, OUT: tl.constexpr, PAGE: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    if ONE:
        block = unit.to(tl.int64) * 4096
    else:
        entry = table + tl.program_id(2) * 5
        block, tokens, skip = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        first, count = tl.load(entry + 3), tl.load(entry + 4)
    side = sides + tl.program_id(1) * 5
    base, stride, width, before = tl.load(side), tl.load(side + 1), tl.load(side + 2), tl.load(side + 4)
    row = (at // columns) * ROWS + tl.arange(0, ROWS)
    column = (at % columns) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.load(rows + first + row, mask=row < count, other=0).to(tl.int64)
    mask = (row < count)[:, None] & (column < width // BYTES)[None, :]
    if PAGE:
        place = index // PAGE * (tl.load(side + 3) // BYTES) + index % PAGE * (stride // BYTES)
    else:
        place = index * (stride // BYTES)
    pool = base.to(tl.pointer_type(WORD)) + place[:, None] + column[None, :]
    start = ring + block + before * tokens
    packed = start.to(tl.pointer_type(WORD)) + (skip + row)[:, None] * (width // BYTES) + column[None, :]
    if OUT:
        tl.store(packed, tl.load(pool, mask=mask), mask=mask)
    else:
        tl.store(pool, tl.load(packed, mask=mask), mask=mask)


_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Sides:
    """Some tensors of the pools, in the order in which they are packed."""

    def __init__(self, described: Sequence[tuple[int, int, int, int]], device: Any, one_row: bool, page: int = 0) -> None:
        """`described`: address, distance of two rows, bytes of one and distance of two pages, of each side.
        `page`: rows of a page, or 0 where pages are not apart."""
        table, before = [], 0
        for address, stride, width, apart in described:
            table.append((address, stride, width, apart, before))
            before += width
        self.count, self.page = len(table), page
        self.table = torch.tensor(table, dtype=torch.int64).to(device) if table else None
        numbers = [number for side in table for number in side]
        self.word = next(word for word in _WORDS if all(number % word == 0 for number in numbers))
        widest = max((width for _, _, width, _, _ in table), default=0) // self.word
        # 16 KiB or so for each program, and rows of KV whole where that is possible.
        self.rows, self.columns = (1, 2048) if one_row else (16, min(1024, max(32, triton.next_power_of_2(widest))))
        self.grid_columns = max(1, -(-widest // self.columns))


class _Table:
    __slots__ = ("device", "event", "host", "numbers")

    def __init__(self, device: Any) -> None:
        self.host = torch.empty((_PIECES, _FIELDS), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.numbers = self.host.numpy()
        self.device = torch.empty((_PIECES, _FIELDS), dtype=torch.int64, device=device)
        self.event = torch.cuda.Event() if device.type == "cuda" else None


class Mover:
    """Moves pieces between the pools and a ring. Everything is queued on the current stream."""

    def __init__(self, pools: Any, device: Any) -> None:
        self._device = device
        sides = [(s.data_ptr(), s.stride(-2), int(s.shape[-1]), s.stride(0) if pools.page else 0) for s in pools.sides()]
        self._kv = Sides(sides, device, one_row=False, page=pools.page)
        layers = []
        for tensor in pools.state:
            data = tensor.bytes
            for layer in range(len(tensor.layers) if tensor.slot_bytes else 0):
                layers.append((data.data_ptr() + layer * data.stride(0), data.stride(1), tensor.slot_bytes, 0))
        self._state = Sides(layers, device, one_row=True)
        self._tables = deque(_Table(device) for _ in range(_TABLES))
        self._slots = torch.zeros(1, dtype=torch.int64, device=device)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        """By sides and the two that decide: `ONE`, `OUT`."""

    def warm(self) -> None:
        """Compiles the kernels, and launches them as they are, with nothing to move."""
        nothing = np.zeros((2, _FIELDS), dtype=np.int64)
        for out in (True, False, True, False):
            self._launch(self._kv, 0, self._slots, nothing[:1], out)
            self._launch(self._kv, 0, self._slots, nothing, out)
            self._launch(self._state, 0, self._slots, nothing[:1], out)

    def kv(self, ring: Any, rows: Any, pieces: Any, out: bool) -> None:
        """KV of `rows`, out of the pools or into them. `pieces`: a table, see `pools`."""
        for at in range(0, len(pieces), _PIECES):
            self._launch(self._kv, ring.data_ptr(), rows, pieces[at : at + _PIECES], out)

    def state(self, ring: Any, slot: Any, block: int, out: bool) -> None:
        """The state in `slot`, likewise."""
        self._launch(self._state, ring.data_ptr(), slot, np.array([[block, 1, 0, 0, 1]]), out)

    def _launch(self, sides: Sides, ring: int, rows: Any, pieces: Any, out: bool) -> None:
        if sides.table is None:
            return
        if rows.dtype != torch.int64 or not rows.is_contiguous():
            rows = rows.to(torch.int64).contiguous()
        number = len(pieces)
        free = self._table() if number > 1 else None
        if number > 1 and free is None:
            for at in range(number):
                self._launch(sides, ring, rows, pieces[at : at + 1], out)
            return
        if free is None:
            # The usual save: what a table would say goes along with the launch.
            table, one = self._tables[0], pieces[0].tolist()
            most = one[4]
        else:
            table, one = free, [0] * _FIELDS
            table.numbers[:number] = pieces
            table.device[:number].copy_(table.host[:number], non_blocking=True)
            most = int(pieces[:, 4].max())
        block, tokens, skip, first, count = one
        grid = (max(1, -(-most // sides.rows)) * sides.grid_columns, sides.count, number)
        arguments = (
            # No address of a device fits 32 bits, and so its type is always the same; but for warming.
            ring or UNIT << 32, rows, table.device, sides.table, sides.grid_columns,
            block // UNIT, tokens, skip, first, count,
            number == 1, out, sides.page, _WORDS[sides.word], sides.word, sides.rows, sides.columns,
        )  # fmt: skip
        stream = torch.cuda.current_stream(self._device) if table.event is not None else None
        kernel = self._compiled.get((sides, number == 1, out))
        if kernel is None:
            kernel = _move[grid](*arguments, num_warps=4)
            if stream is not None:
                self._compiled[sides, number == 1, out] = kernel
        else:
            assert stream is not None, "nothing is compiled where there is no device"
            kernel[grid](*arguments, stream=stream.cuda_stream)
        if stream is not None:
            if number > 1:
                table.event.record(stream)
            # The index was made on another stream, whose allocator must not give it out again before this.
            rows.record_stream(stream)

    def _table(self) -> _Table | None:
        """A table that no queued copy reads, if there is one."""
        oldest = self._tables[0]
        if oldest.event is not None and not oldest.event.query():
            return None
        self._tables.rotate(-1)
        return oldest
