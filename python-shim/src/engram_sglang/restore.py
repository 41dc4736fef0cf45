"""One restore: from a request that came in to a state in the tree that it can use.

```text
LOOKUP -> LEASED -> FILLING -> FILLED -> PLACED -> ENDED
```

- *LOOKUP*: the daemon is told the tokens, and asked. The request waits, and only this one.
- *LEASED*: the daemon has a snapshot and holds it. It brings it into its RAM while the request queues.
- *FILLING*: the request was considered for admission for the first time; pieces come into the ring, in one run. In mode
  engine the daemon brings them into the window, and each is carried into the ring as soon as it is there.
- *FILLED*: all bytes are in the ring. Still nothing of SGLang is held.
- *PLACED*: one tick took rows and a slot, queued the copy, made the forward wait for it, and inserted the
  node. A lock keeps its KV until the request holds its own, but not for ever, nor where what runs needs the room: it is
  a kindness, not a need. The state is not locked: it is the last that eviction would choose, and so no slot is missing to anybody.
- *ENDED*: over, however. The request is not held back any more.

A prefix that is larger than the ring *streams*: while it is FILLING it takes rows and a slot first (`Stock`), and the
KV of the device that it builds on is locked. Then it comes in parts: while one is copied on from the ring into its
rows, the daemon fills the next, and the room of each goes back as soon as its copy is over. What is in the rows is
nobody's before the last part is there; it is FILLED then, and PLACED like any other. Rows and slot go back when it ends;
and it ends where what runs needs the room.

Taking the rows, PLACED and ENDED can be felt in the tree and by the request: all ranks of a server go there in the same tick, and
only from a snapshot of the same boundary. Before that, each says by its `ballot` how far it is. What goes wrong on
one rank makes its restore *fail*: what it holds goes back at once, the request waits until all ranks know.

Every end before PLACED is a plain prefill. This module knows nothing of SGLang.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol

from ._channel_layout import Outcome
from ._channel_layout import Piece as Kind
from .copier import Event
from .pieces import Parts, Run


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


class Stock(NamedTuple):
    """What a restore that streams holds of SGLang, raw: nobody else knows of it."""

    have: int
    """The device has the KV of tokens [0, have), locked by `lock`."""
    lock: Any
    rows: Any
    """For all tokens from `have` on."""
    slot: Any


class Ports(Protocol):
    """What a restore does to the world. Nothing here waits."""

    def room(self) -> int:
        """The largest room in the ring that a part of a prefix may have now, in bytes."""

    def restore_waits(self) -> bool:
        """Whether a restore waits for room for all of it."""

    def take_room(self, size: int) -> int | None:
        """Room in the ring, or None."""

    def give_room(self, block: int) -> None:
        """Room that no copy uses."""

    def retire(self, block: int, event: Event) -> None:
        """Room that is free once `event` is done."""

    def ask_fill(self, lease: int, run: Run) -> bool:
        """Tells the daemon to fill the run's room. False: not now."""

    def carries(self) -> bool:
        """Mode engine: what the daemon brought is not in the ring yet."""

    def bring(self, places: list[tuple[int, int]]) -> Event:
        """Queues copies from the window into the ring."""

    def disown_fill(self, lease: int, run: Run) -> None:
        """The room of an unanswered run is free once the daemon answered for all of it."""

    def move_on(self, restore: Restore, runs: list[Run]) -> Event:
        """Queues the copies of KV from the ring into the restore's own rows, as one."""

    def give_stock(self, restore: Restore) -> None:
        """Gives rows and slot back, if it has any, and ends their lock."""

    def release(self, lease: int, outcome: Outcome, reused: int) -> None:
        """Tells the daemon that the lease is over."""

    def place(self, restore: Restore) -> Place:
        """Rows, slot, copy, insert and lock, or none of it. On DONE neither room nor rows are the restore's any more."""

    def unhold(self, restore: Restore) -> None:
        """Ends the lock of a placed restore, if there is one."""


class Restore:
    """One restore."""

    def __init__(
        self, request: Any, attempt: int, maximum: int, device_boundary: int, device_kv: int, now: float, begun: int = 0
    ) -> None:
        self.request, self.attempt = request, attempt
        self.maximum = maximum
        self.device_boundary, self.device_kv = device_boundary, device_kv
        self.state = RestoreState.LOOKUP
        self.lease = 0
        self.boundary = 0
        self.kv_from = 0
        self.runs: list[Run] = []
        """What has room in the ring: the state first."""
        self.parts: Parts | None = None
        """The KV that comes."""
        self.state_bytes = 0
        self.next = 0
        """The first piece of it that was not asked for."""
        self.streams = False
        """It does not fit into the ring."""
        self.stock: Stock | None = None
        self.since = now
        self.considered: float | None = None
        self.outcome: Outcome | None = None
        self.hold: Any = None
        self.tries = 0
        self.refused = 0
        """How often there was no room to place it, or for its rows, where that was looked at closely."""
        self.next_try = 0
        """The tick in which that is looked at again at the latest."""
        self.room: Any = None
        """What there was; and it is looked at again when there is `lacking` more."""
        self.lacking = 0
        self.reused = 0
        self.admitted = False
        self.placed_at = 0
        self.begun = begun
        """The tick in which it was asked for."""
        self.asked: float | None = None
        """When the daemon was asked: it is told the tokens before."""
        self.known: int | None = None
        """The node of `device_boundary`, if the daemon has had its state."""
        self.nothing_stored = False
        """The daemon has nothing of the path."""
        self.failed: Outcome | None = None
        """Why it came to nothing on this rank; it ends when all ranks know."""

    @property
    def ballot(self) -> tuple[int, int]:
        """How far this rank is, and with which boundary, of a restore that is not placed."""
        if self.failed is not None:
            return 0, int(self.nothing_stored)
        if self.state is RestoreState.LOOKUP:
            return 1, 0
        filled = self.state is RestoreState.FILLED
        if self.stock is not None:
            return 6 if filled else 5, self.boundary
        if self.streams and self.state is RestoreState.FILLING:
            return 3, self.boundary
        return 4 if filled else 2, self.boundary

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
        self, lease: int, boundary: int, kv_from: int, state_bytes: int, parts: Parts, streams: bool, now: float
    ) -> None:
        """The daemon's LookupResult with a lease."""
        self.lease, self.boundary, self.kv_from = lease, boundary, kv_from
        self.state_bytes, self.parts, self.next, self.streams = state_bytes, parts, 0, streams
        self.step(RestoreState.LEASED, now)

    def filled(self, kind: Kind, index: int, count: int, ok: bool, ports: Ports, now: float) -> int:
        """The daemon's Filled: how many of the pieces are this restore's. Raises Broken."""
        found = sum(run.answer(kind, index, count) for run in self.runs)
        if found and not ok:
            self.fail(ports, Outcome.FILL_FAILED)
        elif found and not ports.carries():
            # Else the tick carries on all that came, in one go.
            self.pump(ports, now)
        return found

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
        parts = self.parts
        assert parts is not None, "it is known what comes"
        self._bring(parts, ports)
        if self.streams:
            self._stream(parts, ports)
        elif not self.runs:
            self._take_all(parts, ports)
        for run in self.runs:
            if not run.lent:
                run.lent = ports.ask_fill(self.lease, run)
        if self.failed is None and self.runs and self.next == parts.count and all(run.is_here for run in self.runs):
            self.step(RestoreState.FILLED, now)

    def _bring(self, parts: Parts, ports: Ports) -> None:
        """Carries what came into the window on into the ring."""
        came = [run for run in self.runs if run.came]
        if not came:
            return
        if not ports.carries():
            for run in came:
                run.came = 0
            return
        places = []
        for run in came:
            if run.kind is Kind.STATE:
                run.came = 0
                places.append((run.block, run.bytes))
            else:
                places += [parts.place(run, first, count) for first, count in run.take_came()]
        event = ports.bring(places)
        for run in came:
            run.event = event

    @property
    def waits_for_room(self) -> bool:
        """It could go on if the ring had room."""
        return self.state is RestoreState.FILLING and self.failed is None and not self.runs and not self.streams

    def _take_all(self, parts: Parts, ports: Ports) -> None:
        """Room for everything or for nothing: two restores with half of the ring each would wait for ever."""
        block = ports.take_room(self.state_bytes)
        if block is None:
            return
        runs = [Run(Kind.STATE, 0, 1, block, self.state_bytes)]
        if parts.count:
            size = parts.room(0, parts.count)
            room = ports.take_room(size)
            if room is None:
                ports.give_room(block)
                return
            runs.append(Run(Kind.KV, 0, parts.count, room, size))
        self.runs, self.next = runs, parts.count

    def _stream(self, parts: Parts, ports: Ports) -> None:
        """Moves on what came, and takes room for what comes next: the state, and then KV part by part."""
        if self.stock is None:
            return
        here = [run for run in self.runs if run.kind is Kind.KV and run.is_here]
        if here:
            self.runs = [run for run in self.runs if run not in here]
            event = ports.move_on(self, here)
            for run in here:
                ports.retire(run.block, event)
        if not self.runs and not self.next:
            block = ports.take_room(self.state_bytes)
            if block is None:
                return
            self.runs.append(Run(Kind.STATE, 0, 1, block, self.state_bytes))
        while self.next < parts.count:
            if len(self.runs) > 1 and ports.restore_waits():
                # It goes on with the part that it has; the room of the others is for who needs more at once.
                return
            # A piece has to fit alone, or nothing does.
            count = max(1, parts.fit(self.next, ports.room()))
            size = parts.room(self.next, count)
            room = ports.take_room(size)
            if room is None:
                return
            self.runs.append(Run(Kind.KV, self.next, count, room, size))
            self.next += count

    def try_place(self, ports: Ports, now: float) -> Place:
        """For a restore that is FILLED; to be called by the tick alone."""
        place = ports.place(self)
        if place is Place.DONE:
            self.runs, self.parts = [], None
            self.step(RestoreState.PLACED, now)
        return place

    def ask_again(self, ports: Ports, outcome: Outcome, attempt: int, now: float) -> None:
        """Gives the lease back and waits for the answer to another lookup."""
        self._let_go(ports, outcome, 0)
        ports.give_stock(self)
        self.attempt, self.asked = attempt, None
        self.tries += 1
        self.step(RestoreState.LOOKUP, now)

    def fail(self, ports: Ports, outcome: Outcome) -> None:
        """Comes to nothing on this rank: all that it holds before PLACED goes back, but for its rows, which go back on
        all ranks together."""
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
        ports.give_stock(self)
        self.outcome, self.reused = outcome, reused
        self.step(RestoreState.ENDED, now)

    def _let_go(self, ports: Ports, outcome: Outcome, reused: int) -> None:
        self._give_back(ports)
        if self.lease:
            ports.release(self.lease, outcome, reused)
        self.lease = 0

    def _give_back(self, ports: Ports) -> None:
        for run in self.runs:
            if run.lent and run.open:
                ports.disown_fill(self.lease, run)
            elif run.is_idle:
                ports.give_room(run.block)
            else:
                assert run.event is not None, "or it would be idle"
                ports.retire(run.block, run.event)
        self.runs, self.parts = [], None
