"""The session, as the scheduler thread has it: adopting, hearing, saying, leaving.

Messages that end something wait in `outbox` when the channel is full; others are dropped. All that is bound
to the daemon (what it knows, leases, room that it may write to) dies with the session, and its ring with it.

This is the lowest layer of the shim (`shim`); the layers above add what they keep to `_left`, and what
they understand to `_handlers`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from . import channel
from ._channel_layout import CloseReason, Epoch
from .copier import Copier, Event
from .link import Link, Session
from .pieces import Run
from .pools import Pools
from .settings import Settings
from .seam import Tree

log = logging.getLogger(__name__)

NO_DIGEST = bytes(32)
_OUTBOX = 1 << 16
# Time in one tick to hear the daemon.
_HEAR_NS, _HEAR_MOST_NS = 40_000, 10_000_000


class Talk:
    """See the module."""

    def __init__(
        self,
        settings: Settings,
        tree: Tree,
        pools: Pools,
        copier: Copier,
        link: Link,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.tree, self.pools, self.copier, self.link = settings, tree, pools, copier, link
        self._clock = clock
        self.now = clock()
        self.epoch = link.weights.epoch
        self.session: Session | None = None
        self.joined = False
        """All ranks of the server have a session: machines may begin. See `lockstep`."""
        self.outbox: deque[Any] = deque()
        """What must be said and found no room."""
        self.counts: Counter[str] = Counter()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._retired: list[tuple[Session, int, Event]] = []
        self._deciding = False
        """What all ranks agreed on is being done: nothing of this rank alone may change it."""
        self._leaving: CloseReason | None = None
        self._peer_beat = -1
        self._peer_since = self.now
        self._patience = _HEAR_NS

    def _adopt(self) -> None:
        session = self.link.take()
        if session is None:
            return
        if session.lost:
            session.left.set()
            return
        self.session = session
        self._peer_beat, self._peer_since = -1, self.now
        self.counts["sessions"] += 1
        weights = self.link.weights
        if weights.epoch != session.weights.epoch:
            # They changed while the thread attached.
            self._must(Epoch(weights.epoch, weights.digest or NO_DIGEST))

    def _is_alive(self, session: Session) -> bool:
        end = session.end
        if session.lost or end.peer_closed() is not None:
            self._leave(CloseReason.SHUTDOWN)
            return False
        end.beat()
        beat = end.peer_beat()
        if beat != self._peer_beat:
            self._peer_beat, self._peer_since = beat, self.now
        elif (self.now - self._peer_since) * 1000 > self.settings.silence_ms:
            self.counts["silent_daemon"] += 1
            log.warning("engram: the daemon is silent; going on without it")
            self._leave(CloseReason.SILENT_PEER)
            return False
        return True

    def _leave(self, reason: CloseReason) -> None:
        """Ends the session and all that is bound to it. The ring is never used again."""
        if self._deciding:
            self._leaving = self._leaving or reason
            return
        session, self.session = self.session, None
        if session is None:
            return
        session.end.close(reason)
        try:
            channel.ring(session.doorbell)
        except OSError:
            pass  # the daemon's end is gone
        self.outbox.clear()
        self._left(session)
        session.left.set()

    def _hear(self, session: Session) -> None:
        """Hears what the daemon says, for so long at once. What is left is heard in the next tick, for twice as long: so
        nothing piles up."""
        until, patience = time.perf_counter_ns() + self._patience, self._patience
        self._patience = _HEAR_NS
        try:
            while True:
                message = session.end.rx.pop()
                if message is None:
                    break
                self._handlers[type(message)](message)
                if self.session is not session:
                    return
                if time.perf_counter_ns() > until:
                    self._patience = min(2 * patience, _HEAR_MOST_NS)
                    break
        except channel.Broken as broken:
            self.counts["broken_daemon"] += 1
            log.warning("engram: the daemon broke the protocol (%s); leaving it", broken)
            self._leave(CloseReason.BROKEN_PEER)

    def _push(self, message: Any) -> bool:
        session = self.session
        if session is None or self.outbox:
            # What must be said comes first: order matters to the daemon.
            return False
        try:
            return session.end.tx.push(message)
        except channel.Broken:
            self._leave(CloseReason.BROKEN_PEER)
            return False

    def _must(self, message: Any) -> None:
        """Says it now or as soon as there is room."""
        if self.session is None or not self.outbox and self._push(message) or self.session is None:
            return
        if len(self.outbox) >= _OUTBOX:
            self.counts["outbox_full"] += 1
            self._leave(CloseReason.FAILED)
            return
        self.outbox.append(message)

    def _flush(self) -> None:
        try:
            while self.outbox and self.session is not None:
                if not self.session.end.tx.push(self.outbox[0]):
                    return
                self.outbox.popleft()
        except channel.Broken:
            self._leave(CloseReason.BROKEN_PEER)

    def _ring(self) -> None:
        """Wakes the daemon if there is something to read. A system call, and so mostly the tick's: it comes in each
        iteration, and the daemon looks by itself each few milliseconds."""
        session = self.session
        if session is not None and session.end.tx.take_written():
            channel.ring(session.doorbell)

    def _left(self, session: Session) -> None:
        """The session is over: nothing of it is used again."""
        # Memory of the ring stays while a queued copy uses it: the copy itself holds it.
        self._retired = [r for r in self._retired if r[0] is not session]

    # === Room in the ring ==========================================================================

    def take_room(self, size: int) -> int | None:
        """Room in the ring, for a restore."""
        return None if self.session is None else self.session.ring.space.take(size)

    def give_room(self, block: int) -> None:
        """Room that no copy uses."""
        if self.session is not None:
            self.session.ring.space.give(block)

    def retire(self, block: int, event: Event) -> None:
        """Room that is free once `event` is done."""
        if self.session is not None:
            self._retired.append((self.session, block, event))

    def carry_out(self, runs: list[Run], event: Event) -> Event:
        """Where the daemon reaches only the window: queues copies of runs there, behind `event`. What says that the daemon
        may have them."""
        carrier = None if self.session is None else self.session.carrier
        if carrier is None:
            return event
        places = [(run.block, run.bytes) for run in runs]
        return self.copier.carry(lambda: carrier.out(places), event, inward=False)

    def _collect(self) -> None:
        """Room whose copies are over."""
        if not self._retired:
            return
        waiting = []
        for session, block, event in self._retired:
            if not event.done():
                waiting.append((session, block, event))
            elif session is self.session:
                session.ring.space.give(block)
        self._retired = waiting
