"""Restores on the scheduler thread: lookups, fills, and the one tick that puts a snapshot into the tree.

The machine of one restore is `restore`; here is what decides when it moves, and what it does to the world.
Rows and slots are taken last, in one tick, when all bytes are in the ring.
"""

from __future__ import annotations

from typing import Any

from . import channel
from ._channel_layout import Fill, Filled, Lookup, LookupResult, Miss, Outcome, Release, Revoke, Status
from ._channel_layout import Piece as Kind
from .copier import Event
from .link import Session
from .pools import Run
from .requests import Request
from .restore import PieceOfRestore, Place, Restore, RestoreState
from .saves import Saves

_TRIES = 4


class Restores(Saves):
    """The layer of the restores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.restores: list[Restore] = []
        self._ticks = 0
        self._unfilled: dict[tuple[int, Kind, int], int] = {}
        self._handlers |= {
            LookupResult: self._on_lookup_result,
            Filled: self._on_filled,
            Revoke: self._on_revoke,
        }

    def _left(self, session: Session) -> None:
        super()._left(session)
        for restore in list(self.restores):
            restore.lease = 0
            restore.fail(self, Outcome.SESSION_END)
        self._unfilled.clear()

    def _over(self, request: Request) -> None:
        super()._over(request)
        self._end_restore(request, Outcome.ABORTED)

    def _ask(self, restore: Restore) -> None:
        """Asks the daemon, once it has the tokens."""
        request = restore.request
        if restore.asked or not self._tell_tokens(request, request.tokens, len(request.tokens)):
            return
        restore.asked = self._push(
            Lookup(
                req=request.number,
                attempt=restore.attempt,
                max_boundary=restore.maximum,
                device_boundary=restore.device_boundary,
                device_kv=restore.device_kv,
            )
        )

    def _end_restore(self, request: Request, outcome: Outcome) -> None:
        if request.restore is not None:
            self._end(request.restore, outcome)
            request.restore = None

    def _end(self, restore: Restore, outcome: Outcome) -> None:
        reused = 0
        if restore.state is RestoreState.PLACED and restore.admitted:
            reused = restore.reused
            outcome = Outcome.USED
        elif outcome is Outcome.USED:
            outcome = Outcome.ABORTED
        restore.end(self, outcome, self.now, reused)
        if restore in self.restores:
            self.restores.remove(restore)
            self.counts["restore_" + outcome.name.lower()] += 1
            self.counts["tokens_reused"] += reused

    def _pump_restores(self) -> None:
        for restore in list(self.restores):
            self._pump_restore(restore)

    def _pump_restore(self, restore: Restore) -> None:
        """What this rank can do by itself."""
        now, settings = self.now, self.settings
        if restore.failed is not None or restore.state is RestoreState.PLACED:
            return
        considered = restore.considered
        if restore.state is RestoreState.LOOKUP and (now - restore.since) * 1000 > settings.lookup_ms:
            restore.fail(self, Outcome.DEADLINE)
        elif considered is not None and (now - considered) * 1000 > settings.restore_ms:
            restore.fail(self, Outcome.DEADLINE)
        elif self.session is None:
            restore.fail(self, Outcome.SESSION_END)
        elif restore.state is RestoreState.LOOKUP:
            self._ask(restore)
        else:
            restore.pump(self, now)

    def _placed(self) -> int:
        """Restores whose requests are to be admitted next."""
        return sum(r.state is RestoreState.PLACED and not r.admitted for r in self.restores)

    def _held_too_long(self, restore: Restore) -> bool:
        """Its request was not admitted: perhaps because of what is held."""
        if (self.now - restore.since) * 1000 > self.settings.hold_ms:
            return True
        return self._ticks > restore.placed_at + 1 and self.tree.room(restore.request).idle

    def _ask_anew(self, restore: Restore) -> None:
        """The device lost KV meanwhile: another lookup. On all ranks in the same tick, as looking changes the tree;
        and so up to the boundary that all have, while what each may ask for at most is its own."""
        key = self.tree.key(restore.request, restore.boundary)
        restore.device_boundary = self.tree.state_match(key)
        restore.device_kv = self.tree.full_match(key)[0]
        self._ask_again(restore, restore.boundary)

    def _ask_again(self, restore: Restore, maximum: int) -> None:
        """The plan does not hold any more: another lookup, a few times."""
        request = restore.request
        if restore.tries >= _TRIES or maximum <= restore.device_boundary or request.epoch != self.epoch:
            restore.fail(self, Outcome.FILL_FAILED)
            return
        request.attempt += 1
        restore.maximum = maximum
        restore.ask_again(self, Outcome.ABORTED, request.attempt, self.now)
        self._ask(restore)

    def _find(self, number: int, attempt: int) -> Restore | None:
        for restore in self.restores:
            if restore.request.number == number and restore.attempt == attempt:
                return restore
        return None

    def _on_lookup_result(self, message: LookupResult) -> None:
        restore = self._find(message.req, message.attempt)
        if restore is None or restore.state is not RestoreState.LOOKUP or restore.failed is not None:
            if message.lease:
                self.release(message.lease, Outcome.ABORTED, 0)
            return
        if not message.lease:
            reason = message.reason or Miss.NOTHING_STORED
            self.counts["miss_" + reason.name.lower()] += 1
            restore.fail(self, Outcome.ABORTED)
            return
        parts = message.parts
        pairs = list(zip(parts[0::2], parts[1::2]))
        sound = (
            len(parts) % 2 == 0
            and restore.device_boundary < message.boundary <= restore.maximum
            and message.kv_from == min(restore.device_kv, message.boundary)
            and all(a < b for a, b in pairs)
            and _covers(pairs, message.kv_from, message.boundary)
        )
        if not sound:
            raise channel.Broken("a lease that is not what was asked for")
        sizes = [self.pools.kv_bytes(b - a) for a, b in pairs]
        restore.leased(
            message.lease, message.boundary, message.kv_from, parts, self.pools.state_bytes, sizes, self.now
        )
        self.counts["hits"] += 1
        if message.boundary % self.tree.page_size:
            # Saved by a server with other pages.
            self._ask_again(restore, (message.boundary - 1) // self.tree.page_size * self.tree.page_size)
            return
        total = self.pools.state_bytes + sum(sizes)
        session = self.session
        if session is not None and total > session.ring.space.size - (len(sizes) + 1) * 4096:
            self.counts["restore_larger_than_ring"] += 1
            restore.fail(self, Outcome.NO_DEVICE_ROOM)
            return
        if restore.considered is not None:
            restore.consider(self, self.now)

    def _on_filled(self, message: Filled) -> None:
        for restore in self.restores:
            if restore.lease == message.lease and restore.filled(
                message.piece, message.index, message.status == Status.OK, self, self.now
            ):
                return
        block = self._unfilled.pop((message.lease, message.piece, message.index), None)
        if block is not None and self.session is not None:
            self.session.ring.space.give(block)

    def _on_revoke(self, message: Revoke) -> None:
        for restore in list(self.restores):
            if restore.lease == message.lease:
                restore.fail(self, Outcome.FILL_FAILED)

    # === Ports =====================================================================================

    def ask_fill(self, lease: int, piece: PieceOfRestore) -> bool:
        """The daemon is to fill the piece's room."""
        return self._push(Fill(lease, piece.kind, piece.index, piece.block, piece.bytes))

    def disown_fill(self, lease: int, piece: PieceOfRestore) -> None:
        """Its room is free once the daemon answered."""
        if self.session is not None:
            self._unfilled[(lease, piece.kind, piece.index)] = piece.block

    def release(self, lease: int, outcome: Outcome, reused: int) -> None:
        """The lease is over."""
        self._must(Release(lease, outcome, reused))

    def place(self, restore: Restore) -> Place:
        """Rows, slot, copy, insert and lock in one go, or none of it."""
        session, tree, request = self.session, self.tree, restore.request
        assert session is not None, "a restore before PLACED ends with the session"
        boundary = restore.boundary
        key = tree.key(request, boundary)
        if tree.state_match(key) >= boundary:
            return Place.AS_DEEP
        have, node = tree.full_match(key)
        have = min(have, boundary) // tree.page_size * tree.page_size
        if have < restore.kv_from:
            return Place.LESS_KV
        need = boundary - have
        lock = tree.lock_kv(node)
        taken = None
        try:
            room = tree.room(request)
            if room.tokens < need or room.requests <= self._placed():
                return Place.NO_ROOM
            taken = tree.take(need)
            if taken is None:
                return Place.NO_ROOM
            rows, slot = taken
            blocks = self._scatter(session, restore, have, rows, slot)
            placed = tree.insert(key, have, rows, slot)
            taken = None
            restore.hold = tree.lock_kv(placed)
            restore.placed_at = self._ticks
            self._know(placed)
        finally:
            if taken is not None:
                tree.give(*taken)
            if lock is not None:
                tree.unlock(lock)
        del blocks
        self.counts["restores_placed"] += 1
        self.counts["tokens_restored"] += boundary - restore.device_boundary
        return Place.DONE

    def _scatter(self, session: Session, restore: Restore, have: int, rows: Any, slot: Any) -> Event:
        pools, ring, boundary = self.pools, session.ring.bytes, restore.boundary
        state, *kv = restore.pieces
        runs = [
            Run(piece.block, piece.end - piece.start, first - piece.start, first - have, last - first)
            for piece, first, last in _disjoint(kv, have, boundary)
        ]
        block = state.block

        def copy() -> None:
            pools.restore_state(ring, block, slot)
            if runs:
                pools.restore_kv(ring, runs, rows)

        event = self.copier.submit(copy, before_next=True)
        for piece in restore.pieces:
            self.retire(piece.block, event)
        return event

    def unhold(self, restore: Restore) -> None:
        """Ends the lock of a placed restore."""
        hold, restore.hold = restore.hold, None
        if hold is not None:
            self.tree.unlock(hold)


def _disjoint(
    pieces: list[PieceOfRestore], start: int, end: int
) -> list[tuple[PieceOfRestore, int, int]]:
    """Which tokens of [start, end) to take from which piece, so that none is taken twice: of pieces that overlap, the
    later one counts. `pieces` ascend by their starts."""
    taken: list[tuple[PieceOfRestore, int, int]] = []
    for piece in pieces:
        first, last = max(piece.start, start), min(piece.end, end)
        if first >= last:
            continue
        beyond = []
        while taken and taken[-1][2] > first:
            other, a, b = taken.pop()
            if b > last:
                beyond.append((other, max(a, last), b))
            if a < first:
                taken.append((other, a, first))
                break
        taken.append((piece, first, last))
        taken.extend(reversed(beyond))
    return taken


def _covers(pairs: list[tuple[int, int]], start: int, end: int) -> bool:
    """Whether the pairs, in order, cover [start, end)."""
    at = start
    for a, b in pairs:
        if a > at:
            return False
        at = max(at, b)
    return at >= end
