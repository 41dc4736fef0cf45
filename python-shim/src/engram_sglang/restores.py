"""Restores on the scheduler thread: lookups, fills, and the one tick that puts a snapshot into the tree.

The machine of one restore is `restore`; here is what decides when it moves, and what it does to the world.
Rows and slots are taken last, in one tick, when all bytes are in the ring; but for a prefix that is larger than the ring.
"""

from __future__ import annotations

from typing import Any

from . import channel
from ._channel_layout import Fill, Filled, Lookup, LookupResult, Miss, Outcome, Release, Revoke, Status
from .carrier import Place as Span
from .copier import Event
from .link import Session
from .pieces import Loans, Parts, Run, joined
from .requests import Request
from .restore import Place, Restore, RestoreState, Stock
from .ring import UNIT
from .saves import Saves
from .seam import Room

_TRIES = 4
# Iterations for which a miss waits for the requests that came with it: where something runs, each takes as long as a
# step of it; where nothing does, they are as short as they can be.
_TOGETHER = 2
_TOGETHER_IDLE = 16
# A restore that finds no room is tried again when there is more, or after so many ticks at most: each try walks along
# its prefix in the tree.
_LONGEST_PAUSE = 32


class Restores(Saves):
    """The layer of the restores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.restores: list[Restore] = []
        self._unfilled = Loans()
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
        if restore.asked is not None or not self._tell_tokens(request, request.tokens, len(request.tokens)):
            return
        lookup = Lookup(
            req=request.number,
            attempt=restore.attempt,
            max_boundary=restore.maximum,
            device_boundary=restore.device_boundary,
            device_kv=restore.device_kv,
        )
        if self._push(lookup):
            restore.asked = self.now

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
        considered, asked = restore.considered, restore.asked
        if restore.state is RestoreState.LOOKUP and considered is None:
            # A daemon that cannot be told its tokens is not waited for longer than one that cannot bring them.
            considered = restore.since
        if restore.state is RestoreState.LOOKUP and asked is not None and (now - asked) * 1000 > settings.lookup_ms:
            restore.fail(self, Outcome.DEADLINE)
        elif considered is not None and (now - considered) * 1000 > settings.restore_ms:
            restore.fail(self, Outcome.DEADLINE)
        elif self.session is None:
            restore.fail(self, Outcome.SESSION_END)
        elif restore.state is RestoreState.LOOKUP:
            self._ask(restore)
        else:
            restore.pump(self, now)

    def _waits_for_others(self, restore: Restore) -> bool:
        """Whether a request that nothing was found for waits for others that came with it and are not answered yet.

        They are answered one after the other, within less time than any iteration takes that runs something. Who would
        not wait would be computed alone, and the others only after that: a prefill of all takes hardly longer than one
        of the first. All that is asked here is the same on all ranks."""
        if restore.state is not RestoreState.ENDED or self._ticks - restore.begun > _TOGETHER_IDLE:
            return False
        if self._ticks - restore.begun > _TOGETHER and not self.tree.is_idle():
            return False
        return any(other.begun == restore.begun and other.state is not RestoreState.PLACED for other in self.restores)

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
            restore.nothing_stored = reason is Miss.NOTHING_STORED
            restore.fail(self, Outcome.ABORTED)
            return
        try:
            parts = Parts(message.parts, self.pools.row_bytes)
        except ValueError:
            raise channel.Broken("a lease with half a piece") from None
        sound = (
            restore.device_boundary < message.boundary <= restore.maximum
            and message.kv_from == min(restore.device_kv, message.boundary)
            and parts.cover(message.kv_from, message.boundary)
        )
        session, size = self.session, self.pools.state_bytes
        if not sound or session is None:
            raise channel.Broken("a lease that is not what was asked for")
        total = -(-size // UNIT) * UNIT + parts.offsets[-1]
        streams = total > session.ring.space.size
        restore.leased(message.lease, message.boundary, message.kv_from, size, parts, streams, self.now)
        self.counts["hits"] += 1
        self.counts["restores_larger_than_ring"] += streams
        if message.boundary % self.tree.page_size:
            # Saved by a server with other pages.
            self._ask_again(restore, (message.boundary - 1) // self.tree.page_size * self.tree.page_size)
            return
        if restore.considered is not None:
            restore.consider(self, self.now)

    def _on_filled(self, message: Filled) -> None:
        lease, kind, index, count = message.lease, message.piece, message.index, message.count
        found, free = self._unfilled.answer(lease, kind, index, count)
        restore = next((r for r in self.restores if r.lease == lease), None)
        if restore is not None:
            found += restore.filled(kind, index, count, message.status == Status.OK, self, self.now)
        self._answered(found, count, restore is not None, free)

    def _on_revoke(self, message: Revoke) -> None:
        for restore in list(self.restores):
            if restore.lease == message.lease:
                restore.fail(self, Outcome.FILL_FAILED)

    # === Ports =====================================================================================

    def room(self) -> int:
        """The largest room for a part of a prefix: several share the ring, so that the daemon fills one while another
        is copied on."""
        session = self.session
        return 0 if session is None else min(session.ring.space.largest, session.ring.space.size // 4)

    def restore_waits(self) -> bool:
        return any(restore.waits_for_room for restore in self.restores)

    def ask_fill(self, lease: int, run: Run) -> bool:
        """The daemon is to fill the run's room."""
        return self._push(Fill(lease, run.kind, run.index, run.count, run.block, run.bytes))

    def carries(self) -> bool:
        return self.session is not None and self.session.carrier is not None

    def bring(self, places: list[Span]) -> Event:
        session = self.session
        assert session is not None and session.carrier is not None, "it carries"
        carrier = session.carrier
        return self.copier.carry(lambda: carrier.into(places), None, inward=True)

    def disown_fill(self, lease: int, run: Run) -> None:
        """Its room is free once the daemon answered."""
        if self.session is not None:
            self._unfilled.add(lease, run)

    def release(self, lease: int, outcome: Outcome, reused: int) -> None:
        """The lease is over."""
        self._must(Release(lease, outcome, reused))

    def take_stock(self, restore: Restore) -> Place:
        """Rows and a slot, and a lock on what the device has of the prefix, for a restore that streams; or none."""
        tree, boundary = self.tree, restore.boundary
        why, _, have, node = self._seen(restore)
        if why is not None:
            return why
        # Before anything is evicted: what the device has of the prefix must stay.
        lock = tree.lock_kv(node)
        taken = self._take(restore, boundary - have)
        if taken is None:
            if lock is not None:
                tree.unlock(lock)
            return Place.NO_ROOM
        restore.stock = Stock(have, lock, *taken)
        return Place.DONE

    def give_stock(self, restore: Restore) -> None:
        """Rows and slot are SGLang's again; what it does with them comes after the copies into them."""
        stock, restore.stock = restore.stock, None
        if stock is None:
            return
        self.copier.submit(_nothing, before_next=True)
        self.tree.give(stock.rows, stock.slot)
        if stock.lock is not None:
            self.tree.unlock(stock.lock)

    def forget_stock(self, restore: Restore) -> None:
        """The same, where SGLang takes all rows, slots and locks away by itself."""
        if restore.stock is not None:
            restore.stock = None
            self.copier.submit(_nothing, before_next=True)

    def move_on(self, restore: Restore, runs: list[Run]) -> Event:
        """Queues copies into rows that nobody else knows of."""
        session, stock, parts, pools = self.session, restore.stock, restore.parts, self.pools
        assert session is not None and stock is not None and parts is not None, "it streams"
        ring, rows = session.ring.bytes, stock.rows
        table = joined([parts.table(run, stock.have, restore.boundary, stock.have) for run in runs])
        self.counts["parts_restored"] += len(runs)
        return self.copier.submit(lambda: pools.restore_kv(ring, table, rows), before_next=False)

    def place(self, restore: Restore) -> Place:
        """Rows, slot, copy, insert and lock in one go, or none of it."""
        session, tree = self.session, self.tree
        assert session is not None, "a restore before PLACED ends with the session"
        why, key, have, node = self._seen(restore)
        if why is not None:
            return why
        if restore.stock is not None:
            return self._place_stock(session, restore, restore.stock, key, have)
        lock = tree.lock_kv(node)
        taken = None
        try:
            taken = self._take(restore, restore.boundary - have)
            if taken is None:
                return Place.NO_ROOM
            rows, slot = taken
            self._scatter(session, restore, have, rows, slot)
            self._insert(restore, key, have, rows, slot)
            taken = None
        finally:
            if taken is not None:
                tree.give(*taken)
            if lock is not None:
                tree.unlock(lock)
        return Place.DONE

    def _place_stock(self, session: Session, restore: Restore, stock: Stock, key: Any, have: int) -> Place:
        """Into rows that it has."""
        if have < stock.have:
            return Place.LESS_KV
        if have > stock.have:
            # Meanwhile somebody else computed some of it.
            more = have - stock.have
            self.tree.give(stock.rows[:more], None)
            stock = restore.stock = stock._replace(have=have, rows=stock.rows[more:])
        self._scatter(session, restore, have, stock.rows, stock.slot)
        # From here on they are the tree's.
        restore.stock = None
        self._insert(restore, key, have, stock.rows, stock.slot)
        if stock.lock is not None:
            self.tree.unlock(stock.lock)
        return Place.DONE

    def _may_fit(self, restore: Restore) -> bool:
        """Whether to look closely for room, which takes a walk along the prefix. The same on all ranks."""
        if restore.stock is not None or self._ticks >= restore.next_try > 0:
            return True
        room, then = self.tree.room(restore.request), restore.room
        if then is not None:
            grown = room.tokens - then.tokens >= restore.lacking > 0
            return grown or room.requests > then.requests or room.idle > then.idle
        restore.lacking = restore.boundary - min(restore.device_kv, restore.boundary) - room.tokens
        if room.idle or restore.lacking <= 0:
            return True
        # As far as it is known what the device has. It may have got more: that is seen later.
        self._refused(restore, room)
        return False

    def _refused(self, restore: Restore, room: Room) -> None:
        """There was no room: it is tried again, ever more seldom."""
        restore.next_try = self._ticks + min(1 << restore.refused, _LONGEST_PAUSE)
        restore.refused, restore.room = restore.refused + 1, room

    def _seen(self, restore: Restore) -> tuple[Place | None, Any, int, int]:
        """What the device has of the prefix now: why nothing is to be placed, if so; the prefix's key; how much KV, in
        whole pages; and its node."""
        tree, boundary, why = self.tree, restore.boundary, None
        key = tree.key(restore.request, boundary)
        have, node = tree.full_match(key)
        have = min(have, boundary) // tree.page_size * tree.page_size
        if have >= boundary and tree.state_match(key) >= boundary:
            why = Place.AS_DEEP
        elif have < restore.kv_from:
            why = Place.LESS_KV
        return why, key, have, node

    def _take(self, restore: Restore, tokens: int) -> tuple[Any, Any] | None:
        """Rows and a slot, if what runs leaves so many."""
        room = self.tree.room(restore.request)
        others = sum(r.stock is not None for r in self.restores)
        restore.lacking = tokens - room.tokens
        if room.tokens < tokens or room.requests <= self._placed() + others:
            return None
        return self.tree.take(tokens)

    def _insert(self, restore: Restore, key: Any, have: int, rows: Any, slot: Any) -> None:
        placed = self.tree.insert(key, have, rows, slot)
        restore.hold = self.tree.lock_kv(placed)
        restore.placed_at = self._ticks
        self._know(placed)
        self.counts["restores_placed"] += 1
        self.counts["tokens_restored"] += restore.boundary - restore.device_boundary

    def _scatter(self, session: Session, restore: Restore, have: int, rows: Any, slot: Any) -> None:
        """Queues the copies of all that is in the ring."""
        pools, ring, parts = self.pools, session.ring.bytes, restore.parts
        assert parts is not None, "it is known what came"
        state, *kv = restore.runs
        tables = [parts.table(run, have, restore.boundary, have) for run in kv]
        block = state.block

        def copy() -> None:
            pools.restore_state(ring, block, slot)
            for table in tables:
                pools.restore_kv(ring, table, rows)

        event = self.copier.submit(copy, before_next=True)
        for run in restore.runs:
            self.retire(run.block, event)

    def unhold(self, restore: Restore) -> None:
        """Ends the lock of a placed restore."""
        hold, restore.hold = restore.hold, None
        if hold is not None:
            self.tree.unlock(hold)


def _nothing() -> None:
    """A copy of nothing: a point in the order of copies."""
