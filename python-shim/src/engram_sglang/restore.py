"""One restore: from a request that came in to a state in the tree that it can use.

```text
LOOKUP -> LEASED -> FILLING -> FILLED -> PLACED -> ENDED
```

- *LOOKUP*: the daemon is told the tokens, and asked. The request waits, and only this one.
- *LEASED*: the daemon has a snapshot and holds it. It brings it into its RAM while the request queues.
- *FILLING*: the request was considered for admission for the first time; pieces come into the ring as
  there is room.
- *FILLED*: all bytes are in the ring. Still nothing of SGLang is held.
- *PLACED*: one tick took rows and a slot, queued the copy, made the forward wait for it, and inserted the
  node. A lock keeps its KV until the request holds its own, but not for ever: it is a kindness, not a need. The
  state is not locked: it is the last that eviction would choose, and so no slot is missing to anybody.
- *ENDED*: over, however. The request is not held back any more.

PLACED and ENDED can be felt in the tree and by the request: all ranks of a server go there in the same tick, and
only from a snapshot of the same boundary. Before that, each says by its `ballot` how far it is. What goes wrong on
one rank makes its restore *fail*: what it holds goes back at once, the request waits until all ranks know.

Every end before PLACED is a plain prefill. This module knows nothing of SGLang.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

from ._channel_layout import Outcome
from ._channel_layout import Piece as Kind


class RestoreState(enum.Enum):
    """Where a restore stands."""

    LOOKUP = "lookup"
    LEASED = "leased"
    FILLING = "filling"
    FILLED = "filled"
    PLACED = "placed"
    ENDED = "ended"


_STEPS = {
    RestoreState.LOOKUP: (RestoreState.LEASED, RestoreState.ENDED),
    RestoreState.LEASED: (RestoreState.FILLING, RestoreState.LOOKUP, RestoreState.ENDED),
    RestoreState.FILLING: (RestoreState.FILLED, RestoreState.LOOKUP, RestoreState.ENDED),
    RestoreState.FILLED: (RestoreState.PLACED, RestoreState.LOOKUP, RestoreState.ENDED),
    RestoreState.PLACED: (RestoreState.ENDED,),
    RestoreState.ENDED: (),
}


class Place(enum.Enum):
    """What became of the try to place a filled restore."""

    DONE = "done"
    NO_ROOM = "no_room"
    AS_DEEP = "as_deep"
    """The device has a state as deep by now."""
    LESS_KV = "less_kv"
    """The device lost KV that it had at the lookup."""


class PieceOfRestore:
    """A run of bytes that comes into the ring whole."""

    __slots__ = ("asked", "block", "bytes", "end", "filled", "index", "kind", "start")

    def __init__(self, kind: Kind, index: int, start: int, end: int, size: int) -> None:
        self.kind, self.index, self.start, self.end, self.bytes = kind, index, start, end, size
        self.block = -1
        self.asked = False
        self.filled = False


class Ports(Protocol):
    """What a restore does to the world. Nothing here waits."""

    def take_room(self, size: int) -> int | None:
        """Room in the ring, or None."""

    def give_room(self, block: int) -> None:
        """Room that no copy uses."""

    def ask_fill(self, lease: int, piece: PieceOfRestore) -> bool:
        """Tells the daemon to fill `piece.block`. False: not now."""

    def disown_fill(self, lease: int, piece: PieceOfRestore) -> None:
        """The room of an unanswered piece is free once the daemon says Filled."""

    def release(self, lease: int, outcome: Outcome, reused: int) -> None:
        """Tells the daemon that the lease is over."""

    def place(self, restore: Restore) -> Place:
        """Rows, slot, copy, insert and lock, or none of it. On DONE the blocks are not the restore's any more."""

    def unhold(self, restore: Restore) -> None:
        """Ends the lock of a placed restore, if there is one."""


class Restore:
    """One restore."""

    def __init__(self, request: Any, attempt: int, maximum: int, device_boundary: int, device_kv: int, now: float) -> None:
        self.request, self.attempt = request, attempt
        self.maximum = maximum
        self.device_boundary, self.device_kv = device_boundary, device_kv
        self.state = RestoreState.LOOKUP
        self.lease = 0
        self.boundary = 0
        self.kv_from = 0
        self.pieces: list[PieceOfRestore] = []
        self.since = now
        self.considered: float | None = None
        self.outcome: Outcome | None = None
        self.hold: Any = None
        self.tries = 0
        self.reused = 0
        self.admitted = False
        self.placed_at = 0
        self.asked = False
        """The daemon was asked."""
        self.failed: Outcome | None = None
        """Why it came to nothing on this rank; it ends when all ranks know."""

    @property
    def ballot(self) -> tuple[int, int]:
        """How far this rank is, and with which boundary, of a restore that is not placed."""
        if self.failed is not None:
            return 0, 0
        if self.state is RestoreState.LOOKUP:
            return 1, 0
        return 3 if self.state is RestoreState.FILLED else 2, self.boundary

    @property
    def gate_open(self) -> bool:
        """The request may be admitted."""
        return self.state in (RestoreState.PLACED, RestoreState.ENDED)

    def step(self, to: RestoreState, now: float) -> None:
        """The only way from state to state."""
        if to not in _STEPS[self.state]:
            raise RuntimeError(f"a restore cannot go from {self.state.value} to {to.value}")
        self.state, self.since = to, now

    # --- What the daemon said ---

    def leased(
        self, lease: int, boundary: int, kv_from: int, parts: Sequence[int], state_size: int, sizes: Sequence[int], now: float
    ) -> None:
        """The daemon's LookupResult with a lease."""
        self.lease, self.boundary, self.kv_from = lease, boundary, kv_from
        self.pieces = [PieceOfRestore(Kind.STATE, 0, boundary, boundary, state_size)]
        for index, size in enumerate(sizes):
            self.pieces.append(PieceOfRestore(Kind.KV, index, parts[2 * index], parts[2 * index + 1], size))
        self.step(RestoreState.LEASED, now)

    def filled(self, kind: Kind, index: int, ok: bool, ports: Ports, now: float) -> bool:
        """The daemon's Filled. False if it is none of this restore's."""
        for piece in self.pieces:
            if piece.kind is kind and piece.index == index and piece.asked and not piece.filled:
                piece.filled = True
                if not ok:
                    self.fail(ports, Outcome.FILL_FAILED)
                elif self.state is RestoreState.FILLING:
                    self.pump(ports, now)
                return True
        return False

    # --- Work ---

    def consider(self, ports: Ports, now: float) -> None:
        """The request is being looked at for admission."""
        if self.considered is None:
            self.considered = now
        if self.state is RestoreState.LEASED and self.failed is None:
            self.step(RestoreState.FILLING, now)
            self.pump(ports, now)

    def pump(self, ports: Ports, now: float) -> None:
        """Does what can be done now, but for placing."""
        if self.state is not RestoreState.FILLING or self.failed is not None:
            return
        if self.pieces[0].block < 0 and not self._take_room(ports):
            return
        for piece in self.pieces:
            if piece.asked:
                continue
            if not ports.ask_fill(self.lease, piece):
                break
            piece.asked = True
        if all(piece.filled for piece in self.pieces):
            self.step(RestoreState.FILLED, now)

    def _take_room(self, ports: Ports) -> bool:
        """Room for all pieces or for none: two restores with half of the ring each would wait for ever."""
        taken: list[int] = []
        for piece in self.pieces:
            block = ports.take_room(piece.bytes)
            if block is None:
                for other in taken:
                    ports.give_room(other)
                return False
            taken.append(block)
        for piece, block in zip(self.pieces, taken):
            piece.block = block
        return True

    def try_place(self, ports: Ports, now: float) -> Place:
        """For a restore that is FILLED; to be called by the tick alone."""
        place = ports.place(self)
        if place is Place.DONE:
            self.pieces = []
            self.step(RestoreState.PLACED, now)
        elif place is Place.AS_DEEP:
            self.end(ports, Outcome.DEVICE_AS_DEEP, now)
        return place

    def ask_again(self, ports: Ports, outcome: Outcome, attempt: int, now: float) -> None:
        """Gives the lease back and waits for the answer to another lookup."""
        self._let_go(ports, outcome, 0)
        self.attempt, self.asked = attempt, False
        self.tries += 1
        self.step(RestoreState.LOOKUP, now)

    def fail(self, ports: Ports, outcome: Outcome) -> None:
        """Comes to nothing on this rank: all that it holds before PLACED goes back."""
        if self.state in (RestoreState.PLACED, RestoreState.ENDED) or self.failed is not None:
            return
        self._let_go(ports, outcome, 0)
        self.failed = outcome

    def end(self, ports: Ports, outcome: Outcome, now: float, reused: int = 0) -> None:
        """Ends it on all ranks, and the daemon hears how."""
        if self.state is RestoreState.ENDED:
            return
        if self.state is RestoreState.PLACED:
            ports.unhold(self)
        self._let_go(ports, outcome, reused)
        self.outcome, self.reused = outcome, reused
        self.step(RestoreState.ENDED, now)

    def _let_go(self, ports: Ports, outcome: Outcome, reused: int) -> None:
        self._give_back(ports)
        if self.lease:
            ports.release(self.lease, outcome, reused)
        self.lease = 0

    def _give_back(self, ports: Ports) -> None:
        for piece in self.pieces:
            if piece.block < 0:
                continue
            if piece.asked and not piece.filled:
                ports.disown_fill(self.lease, piece)
            else:
                ports.give_room(piece.block)
        self.pieces = []
