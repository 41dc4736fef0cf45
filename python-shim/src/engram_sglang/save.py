"""One save: from a state that came into the tree to a snapshot of the daemon.

```text
OFFERED -> GATHERING -> DRAINING -> SETTLING -> ENDED
```

- *OFFERED*: the daemon was told, and the state is on its way into the ring. Nothing of SGLang is held: the
  state's slot may be evicted and used again, as its copy was queued before anything that could write to it.
- *GATHERING*: the daemon said which KV it lacks. Its pieces go into the ring in runs, as there is room. Here, too,
  nothing of SGLang is held: what it writes next waits for the copies that are queued, and before each of them the
  path is looked up again. If it was evicted in between, the save comes to nothing. A lock would keep room from
  SGLang that it counted on when it admitted requests, and it does not survive that.
- *DRAINING*: all copies are queued. The daemon copies out what is in the ring.
- *SETTLING*: all are out. The daemon makes the snapshot visible.
- *ENDED*: over, however.

A save begins to gather, and ends, on all ranks of a server in the same tick (`start`, `end`): so they know that
they were asked for the same, and whether all of them have it. Before that, each says by its `ballot` how far it is.
What goes wrong on one rank makes its save *fail*: its room in the ring goes back at once.

A save may end in every state. What it holds goes back then, but room in the ring that a copy of either
side may still use is only given back when that copy is over: see `Ports.retire` and `Ports.lend`.

This module knows nothing of SGLang: what it does to the world goes through `Ports`.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

from ._channel_layout import AbortReason
from ._channel_layout import Piece as Kind
from .copier import Event
from .pieces import Parts, Run


class SaveState(enum.Enum):
    """Where a save stands."""

    OFFERED = "offered"
    GATHERING = "gathering"
    DRAINING = "draining"
    SETTLING = "settling"
    ENDED = "ended"


_STEPS = {
    SaveState.OFFERED: (SaveState.GATHERING, SaveState.ENDED),
    SaveState.GATHERING: (SaveState.DRAINING, SaveState.ENDED),
    SaveState.DRAINING: (SaveState.SETTLING, SaveState.ENDED),
    SaveState.SETTLING: (SaveState.ENDED,),
    SaveState.ENDED: (),
}


class Ports(Protocol):
    """What a save does to the world. Nothing here waits."""

    def room(self) -> int:
        """The largest room in the ring that a run may have now, in bytes."""

    def take_room(self, size: int) -> int | None:
        """Room in the ring, or None."""

    def give_room(self, block: int) -> None:
        """Room that no copy uses."""

    def retire(self, block: int, event: Event) -> None:
        """Room that is free once `event` is done."""

    def lend(self, save: int, run: Run) -> bool:
        """Tells the daemon that the run is whole. False: not now. From then on the room is the daemon's."""

    def disown(self, save: int, run: Run) -> None:
        """The room of a lent run is free once the daemon answered for all of it."""

    def gather_kv(self, save: Save, runs: list[Run]) -> Event | None:
        """Queues the copies into the rooms of `runs`, as one. None: the KV is gone."""

    def abort(self, save: int, reason: AbortReason) -> None:
        """Tells the daemon that the save is given up."""


class Save:
    """One save."""

    def __init__(self, number: int, request: Any, boundary: int, node: int, branch: bool, now: float) -> None:
        self.number, self.request, self.boundary = number, request, boundary
        self.node = node
        self.branch = branch
        """The state lies on a path that was there before: worth as much as a deeper one."""
        self.state = SaveState.OFFERED
        self.runs: list[Run] = []
        """What is in the ring: the state first, as long as it is there."""
        self.parts: Parts | None = None
        """The KV that is wanted."""
        self.next = 0
        """The first piece of it that has no room."""
        self.touched = False
        """The daemon was given some of it."""
        self.tokens: Any = None
        """Until the daemon was told."""
        self.active = now
        self.since = now
        self.told = False
        """The daemon heard of it."""
        self.wants: int | None = None
        """What the daemon lacks, as one number for the ballot, once it said so."""
        self.need_state = True
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
        what = self.wants
        if what is None:
            return 1, 0
        if self.saved:
            return 4, what
        if self.state is SaveState.OFFERED:
            return 2, what
        return 3, what

    def step(self, to: SaveState, now: float) -> None:
        """The only way from state to state."""
        if to not in _STEPS[self.state]:
            raise RuntimeError(f"a save cannot go from {self.state.value} to {to.value}")
        self.state, self.since, self.active = to, now, now

    # --- What the daemon said ---

    def wanted(self, need_state: bool, parts: Parts, now: float) -> None:
        """The daemon's Want."""
        if self.state is SaveState.OFFERED and self.wants is None and not self.failed:
            self.need_state, self.parts, self.active = need_state, parts, now
            self.wants = parts.digest << 1 | need_state

    def drained(self, kind: Kind, index: int, count: int, ok: bool, ports: Ports, now: float) -> int:
        """The daemon's Drained: how many of the pieces are this save's. Raises Broken."""
        found = sum(run.answer(kind, index, count) for run in self.runs)
        if not found:
            return 0
        for run in [run for run in self.runs if run.is_answered]:
            self.runs.remove(run)
            ports.give_room(run.block)
        self.active = now
        if not ok and self.state is not SaveState.ENDED:
            self.fail(ports, None, "drain_failed", now)
        else:
            self.pump(ports, now)
        return found

    # --- What all ranks do in the same tick ---

    def start(self, ports: Ports, now: float) -> None:
        """Begins to gather the KV that is wanted."""
        if self.state is not SaveState.OFFERED or self.parts is None or self.failed:
            return
        if not self.need_state:
            self._give_back(self.runs.pop(), ports)
        self.step(SaveState.GATHERING, now)
        self.pump(ports, now)

    # --- Work ---

    def pump(self, ports: Ports, now: float) -> None:
        """Does what can be done now."""
        if self.failed or self.state not in (SaveState.GATHERING, SaveState.DRAINING):
            return
        if self.state is SaveState.GATHERING and not self._gather(ports, now):
            return
        for run in self.runs:
            if run.lent:
                continue
            if run.event is None or run.event.done():
                if ports.lend(self.number, run):
                    run.lent, run.event, self.touched = True, None, True
                    self.active = now
        if self.failed:
            # The session ended in between.
            return
        if self.state is SaveState.GATHERING and self.parts is not None and self.next == self.parts.count:
            self.step(SaveState.DRAINING, now)
        if self.state is SaveState.DRAINING and not self.runs:
            self.step(SaveState.SETTLING, now)

    def _gather(self, ports: Ports, now: float) -> bool:
        """Queues the copies of all pieces for which there is room. False: they are gone, and it failed."""
        parts = self.parts
        assert parts is not None, "it is known what is wanted"
        batch = []
        while self.next < parts.count:
            # A piece has to fit alone, or nothing does.
            count = max(1, parts.fit(self.next, ports.room()))
            size = parts.room(self.next, count)
            block = ports.take_room(size)
            if block is None:
                break
            batch.append(Run(Kind.KV, self.next, count, block, size))
            self.next += count
        if batch:
            event = ports.gather_kv(self, batch)
            self.runs += batch
            if event is None:
                self.fail(ports, AbortReason.EVICTED, "evicted", now)
                return False
            for run in batch:
                run.event = event
            self.active = now
        return True

    def fail(self, ports: Ports, reason: AbortReason | None, why: str, now: float) -> None:
        """Comes to nothing on this rank; with a `reason` it is this side that gives it up, and the daemon hears of
        that. All that it holds goes back."""
        if self.state is SaveState.ENDED or self.failed:
            return
        for run in self.runs:
            self._give_back(run, ports)
        self.runs = []
        if reason is not None and self.told:
            ports.abort(self.number, reason)
        self.failure = why

    def end(self, ports: Ports, reason: AbortReason | None, now: float) -> None:
        """Ends it on all ranks; as for `fail`, unless it failed before."""
        if self.state is SaveState.ENDED:
            return
        self.fail(ports, reason, "", now)
        self.step(SaveState.ENDED, now)

    def _give_back(self, run: Run, ports: Ports) -> None:
        if run.lent:
            ports.disown(self.number, run)
        elif run.event is None or run.event.done():
            ports.give_room(run.block)
        else:
            ports.retire(run.block, run.event)

    @property
    def untouched(self) -> bool:
        """Nothing of it was given to the daemon, and it goes on."""
        return not self.touched and not self.failed
