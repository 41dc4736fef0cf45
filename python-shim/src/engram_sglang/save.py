"""One save: from a state that came into the tree to a snapshot of the daemon.

```text
OFFERED -> GATHERING -> DRAINING -> SETTLING -> ENDED
```

- *OFFERED*: the daemon was told, and the state is on its way into the ring. Nothing of SGLang is held: the
  state's slot may be evicted and used again, as its copy was queued before anything that could write to it.
- *GATHERING*: the daemon said which KV it lacks. Its path in the tree is locked, without the state, and
  its pieces go into the ring as there is room. The only state that holds anything of SGLang, and the
  shortest: it ends with the last copy, or at a deadline.
- *DRAINING*: all bytes are in the ring, the lock is gone. The daemon copies them out.
- *SETTLING*: all are out. The daemon makes the snapshot visible.
- *ENDED*: over, however.

The steps OFFERED -> GATHERING and GATHERING -> DRAINING, and the end, can be felt in the tree: all ranks of a
server take them in the same tick (`start`, `let_go`, `end`). Before that, each says by its `ballot` how far it is.
What goes wrong on one rank makes its save *fail*: its room in the ring goes back at once, its lock with the end.

A save may end in every state. What it holds goes back then, but room in the ring that a copy of either
side may still use is only given back when that copy is over: see `Ports.retire` and `Ports.lend`.

This module knows nothing of SGLang: what it does to the world goes through `Ports`.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from ._channel_layout import AbortReason
from ._channel_layout import Piece as Kind
from .copier import Event


class SaveState(enum.Enum):
    """Where a save stands."""

    OFFERED = "offered"
    GATHERING = "gathering"
    DRAINING = "draining"
    SETTLING = "settling"
    ENDED = "ended"


_STEPS = {
    SaveState.OFFERED: (SaveState.GATHERING, SaveState.DRAINING, SaveState.ENDED),
    SaveState.GATHERING: (SaveState.DRAINING, SaveState.ENDED),
    SaveState.DRAINING: (SaveState.SETTLING, SaveState.ENDED),
    SaveState.SETTLING: (SaveState.ENDED,),
    SaveState.ENDED: (),
}


class Phase(enum.Enum):
    """Where one piece stands."""

    WAITING = "waiting"
    COPYING = "copying"
    LENT = "lent"
    DONE = "done"


class PieceOfSave:
    """A run of bytes that goes into the ring whole."""

    __slots__ = ("block", "bytes", "end", "event", "index", "kind", "phase", "start")

    def __init__(self, kind: Kind, index: int, start: int, end: int, size: int) -> None:
        self.kind, self.index, self.start, self.end, self.bytes = kind, index, start, end, size
        self.phase = Phase.WAITING
        self.block = -1
        self.event: Event | None = None


class Ports(Protocol):
    """What a save does to the world. Nothing here waits."""

    def take_room(self, size: int) -> int | None:
        """Room in the ring, or None."""

    def give_room(self, block: int) -> None:
        """Room that no copy uses."""

    def retire(self, block: int, event: Event) -> None:
        """Room that is free once `event` is done."""

    def lend(self, save: int, piece: PieceOfSave) -> bool:
        """Tells the daemon that the piece is whole. False: not now. From then on the room is the daemon's."""

    def disown(self, save: int, piece: PieceOfSave) -> None:
        """The room of a lent piece is free once the daemon says Drained."""

    def lock_kv(self, save: Save) -> bool:
        """Locks the KV of the path. False: it is gone."""

    def unlock_kv(self, save: Save) -> None:
        """Ends that lock."""

    def gather_kv(self, save: Save, pieces: list[PieceOfSave]) -> Event:
        """Queues the copies into the blocks of `pieces`, as one."""

    def abort(self, save: int, reason: AbortReason) -> None:
        """Tells the daemon that the save is given up."""


class Save:
    """One save."""

    def __init__(
        self, number: int, request: Any, boundary: int, node: int, branch: bool, state: PieceOfSave, now: float
    ) -> None:
        """`state` is being gathered into its block already."""
        self.number, self.request, self.boundary = number, request, boundary
        self.node = node
        self.branch = branch
        """The state lies on a path that was there before: worth as much as a deeper one."""
        self.state = SaveState.OFFERED
        self.pieces = [state]
        self.lock: Any = None
        self.rows: Any = None
        self.first = 0
        """The token of the first of `rows`."""
        self.tokens: Any = None
        """Until the daemon was told."""
        self.active = now
        self.since = now
        self.told = False
        """The daemon heard of it."""
        self.want: tuple[bool, Sequence[int], Sequence[int]] | None = None
        """What the daemon lacks, once it said so."""
        self.gathered = False
        """All its KV is in the ring."""
        self.saved = False
        """The daemon has it."""
        self.stored = False
        """The daemon had it before."""
        self.failure: str | None = None
        """Why it came to nothing on this rank."""

    @property
    def failed(self) -> bool:
        """It came to nothing on this rank, and ends when all ranks know."""
        return self.failure is not None

    @property
    def ballot(self) -> tuple[int, int]:
        """How far this rank is, and what it was asked for: the numbers of all ranks must be equal."""
        if self.failed:
            return 0, int(self.stored)
        if self.want is None:
            return 1, 0
        what = zlib.crc32(repr((self.want[0], list(self.want[1]))).encode())
        if self.saved:
            return 6, what
        if self.state is SaveState.OFFERED:
            return 2, what
        if self.state is SaveState.GATHERING:
            return 4 if self.gathered else 3, what
        return 5, what

    def step(self, to: SaveState, now: float) -> None:
        """The only way from state to state."""
        if to not in _STEPS[self.state]:
            raise RuntimeError(f"a save cannot go from {self.state.value} to {to.value}")
        self.state, self.since, self.active = to, now, now

    # --- What the daemon said ---

    def wanted(self, need_state: bool, parts: Sequence[int], sizes: Sequence[int], now: float) -> None:
        """The daemon's Want: `parts` are pairs of tokens, `sizes` the bytes of each."""
        if self.state is SaveState.OFFERED and self.want is None and not self.failed:
            self.want, self.active = (need_state, parts, sizes), now

    def drained(self, kind: Kind, index: int, ok: bool, ports: Ports, now: float) -> bool:
        """The daemon's Drained. False if it is none of this save's."""
        for piece in self.pieces:
            if piece.kind is kind and piece.index == index and piece.phase is Phase.LENT:
                piece.phase = Phase.DONE
                ports.give_room(piece.block)
                self.active = now
                if not ok and self.state is not SaveState.ENDED:
                    self.fail(ports, None, "drain_failed", now)
                else:
                    self.pump(ports, now)
                return True
        return False

    # --- What all ranks do in the same tick ---

    def start(self, ports: Ports, now: float) -> None:
        """Locks the KV that is wanted, and begins to gather it."""
        if self.state is not SaveState.OFFERED or self.want is None or self.failed:
            return
        need_state, parts, sizes = self.want
        if not need_state:
            self._give_back(self.pieces.pop(), ports)
        for index, size in enumerate(sizes):
            self.pieces.append(PieceOfSave(Kind.KV, index, parts[2 * index], parts[2 * index + 1], size))
        if sizes and not ports.lock_kv(self):
            self.fail(ports, AbortReason.EVICTED, "evicted", now)
            return
        self.step(SaveState.GATHERING if sizes else SaveState.DRAINING, now)
        self.pump(ports, now)

    def let_go(self, ports: Ports, now: float) -> None:
        """Ends the lock: all is gathered."""
        if self.state is SaveState.GATHERING:
            ports.unlock_kv(self)
            self.step(SaveState.DRAINING, now)
            self.pump(ports, now)

    # --- Work ---

    def pump(self, ports: Ports, now: float) -> None:
        """Does what can be done now."""
        if self.failed or self.state not in (SaveState.GATHERING, SaveState.DRAINING):
            return
        self._gather(ports, now)
        held = False
        for piece in self.pieces:
            if piece.phase is Phase.WAITING:
                held = True
            elif piece.phase is Phase.COPYING:
                if piece.event is None or piece.event.done():
                    if not ports.lend(self.number, piece):
                        continue
                    piece.phase, piece.event = Phase.LENT, None
                    self.active = now
                elif piece.kind is Kind.KV:
                    held = True
        self.gathered = not held
        if self.state is SaveState.DRAINING and all(piece.phase is Phase.DONE for piece in self.pieces):
            self.step(SaveState.SETTLING, now)

    def _gather(self, ports: Ports, now: float) -> None:
        """Queues the copies of all pieces for which there is room."""
        batch = []
        for piece in self.pieces:
            if piece.phase is not Phase.WAITING:
                continue
            block = ports.take_room(piece.bytes)
            if block is None:
                # In order: the next one is not smaller in general, and order keeps the room whole.
                break
            piece.block = block
            batch.append(piece)
        if batch:
            event = ports.gather_kv(self, batch)
            for piece in batch:
                piece.phase, piece.event = Phase.COPYING, event
            self.active = now

    def fail(self, ports: Ports, reason: AbortReason | None, why: str, now: float) -> None:
        """Comes to nothing on this rank; with a `reason` it is this side that gives it up, and the daemon hears of
        that. All but its lock goes back."""
        if self.state is SaveState.ENDED or self.failed:
            return
        for piece in self.pieces:
            self._give_back(piece, ports)
        if reason is not None and self.told:
            ports.abort(self.number, reason)
        self.failure = why

    def end(self, ports: Ports, reason: AbortReason | None, now: float) -> None:
        """Ends it on all ranks; as for `fail`, unless it failed before."""
        if self.state is SaveState.ENDED:
            return
        self.fail(ports, reason, "", now)
        if self.state is SaveState.GATHERING:
            ports.unlock_kv(self)
        self.step(SaveState.ENDED, now)

    def _give_back(self, piece: PieceOfSave, ports: Ports) -> None:
        if piece.phase is Phase.LENT:
            ports.disown(self.number, piece)
        elif piece.phase is Phase.COPYING:
            if piece.event is None or piece.event.done():
                ports.give_room(piece.block)
            else:
                ports.retire(piece.block, piece.event)
        piece.phase = Phase.DONE

    @property
    def untouched(self) -> bool:
        """Nothing of it was given to the daemon."""
        return all(piece.phase in (Phase.WAITING, Phase.COPYING) for piece in self.pieces)
