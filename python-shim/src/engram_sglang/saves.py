"""Saves on the scheduler thread: states are offered, and what the daemon lacks goes into the ring.

The machine of one save is `save`; here is what decides when it moves, and what it does to the world.
"""

from __future__ import annotations

from typing import Any

from . import channel
from ._channel_layout import AbortReason, Decline, DeclineReason, Drain, Drained, Offer, SaveAbort, Saved, Status, Want
from ._channel_layout import Piece as Kind
from .copier import Event
from .link import Session
from .pieces import Loans, Parts, Run, joined
from .requests import Request, Requests
from .save import Save, SaveState
from .seam import Names

_SAVES = 256
_KNOWN = 1 << 16
_KNOWN_TICKS = 1 << 15


class Saves(Requests):
    """The layer of the saves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saves: dict[int, Save] = {}
        self.stale_tree = False
        """The tree may hold what older weights computed."""
        self._save_ports = _SavePorts(self)
        self._save_numbers = 0
        self._known: dict[int, int] = {}
        """Nodes whose states are at the daemon, and the tick in which that was heard. The oldest first."""
        self._ticks = 0
        self._lent = Loans()
        self._handlers |= {
            Want: self._on_want,
            Decline: self._on_decline,
            Drained: self._on_drained,
            Saved: self._on_saved,
        }

    def _left(self, session: Session) -> None:
        super()._left(session)
        for save in list(self.saves.values()):
            save.told = False
            save.fail(self, None, "session_end", self.now)
        self._lent.clear()

    def is_known(self) -> bool:
        """Whether it is known which weights computed what is in the tree. The same on all ranks."""
        return not self.stale_tree and self.link.weights.digest is not None

    def _reopen(self, request: Request) -> None:
        """Begins it anew: other tokens, or other weights. The daemon drops what it had of it."""
        self._drop_saves(request, AbortReason.SUPERSEDED)
        request.opened, request.epoch = None, self.epoch

    def _state(self, req: Any, names: Names, tokens: Any, boundary: int, node: int, branch: bool) -> None:
        """A state is in the tree. All that decides whether a save begins is the same on all ranks."""
        if not self.joined or not self.settings.save or not names.saved:
            return
        if not self.is_known():
            self.counts["save_dropped_stale_tree"] += 1
            return
        request = self.requests.get(names.rid)
        if self._is_known(node):
            if request is not None and request.req is req and request.restore is not None:
                restore = request.restore
                restore.known = node if restore.device_boundary == boundary else restore.known
            return
        if request is None or request.req is not req:
            if request is not None:
                self._close(request, None)
            request = self._add(names, req)
        if request.epoch != self.epoch:
            self.counts["save_dropped_stale_epoch"] += 1
            return
        slot = self.tree.slot(node)
        if slot is None:
            return
        if len(self.saves) >= _SAVES:
            self.counts["save_dropped_too_many"] += 1
            return
        for older in [s for s in self.saves.values() if s.request is request]:
            if older.boundary == boundary:
                return
            if older.boundary < boundary and older.state is SaveState.OFFERED and not older.branch:
                older.end(self, AbortReason.SUPERSEDED, self.now)
                self._end_save(older, "superseded")
        self._save_numbers += 1
        save = Save(self._save_numbers, request, boundary, node, branch, self.now)
        save.tokens = tokens
        self.saves[save.number] = save
        request.saves += 1
        self._offer(save, slot)

    def _offer(self, save: Save, slot: Any) -> None:
        """Copies the state into the ring and tells the daemon, as far as this rank can."""
        session, size = self.session, self.pools.state_bytes
        block = self.take_room_for_save(size)
        if session is None or block is None:
            if session is not None:
                self.counts["save_dropped_ring_full"] += 1
            save.fail(self, None, "session_end" if session is None else "ring_full", self.now)
            return
        pools, ring = self.pools, session.ring.bytes
        run = Run(Kind.STATE, 0, 1, block, size)
        save.runs.append(run)
        event = self.copier.submit(lambda: pools.save_state(slot, ring, block), before_next=True)
        run.event = self.carry_out([run], event)
        self.counts["offers"] += 1
        self._tell_offer(save)

    def _tell_offer(self, save: Save) -> None:
        """Tells the daemon, unless a branch of the same request waits to be drained: it would be dropped."""
        request = save.request
        for other in self.saves.values():
            if other.request is request and other.branch and other.number < save.number and other.untouched:
                return
        if not self._tell_tokens(request, save.tokens, save.boundary):
            return
        if save.failed:
            return
        save.told = self._push(Offer(save.number, request.number, request.attempt, save.boundary, request.epoch))
        if save.told:
            save.tokens = None

    def room_for_save(self) -> int:
        """The largest room for a save: saves leave a quarter of the ring to restores, and share the rest, so that the
        daemon drains one run while the next one is gathered."""
        session = self.session
        if session is None or self.restore_waits():
            return 0
        space = session.ring.space
        return min(space.largest, space.free_bytes - space.size // 4, space.size // 4)

    def restore_waits(self) -> bool:
        """Whether a restore waits for room in the ring."""
        return False

    def take_room_for_save(self, size: int) -> int | None:
        """Room for a save, as far as saves may take it."""
        session = self.session
        if session is None or self.restore_waits():
            return None
        space = session.ring.space
        return None if space.free_bytes - size < space.size // 4 else space.take(size)

    def _drop_saves(self, request: Request, reason: AbortReason) -> None:
        for save in [s for s in self.saves.values() if s.request is request]:
            save.end(self, reason, self.now)
            self._end_save(save, reason.name.lower())

    def _end_save(self, save: Save, why: str) -> None:
        if self.saves.pop(save.number, None) is not None:
            save.request.saves -= 1
            self.counts["save_" + ("ok" if why == "ok" else "ended_" + why)] += 1
            save.request = save.tokens = save.parts = None

    def _has_more_to_say(self, request: Request) -> bool:
        return request.saves > 0 and any(s.request is request and not s.told and not s.failed for s in self.saves.values())

    def _pump_saves(self) -> None:
        for save in list(self.saves.values()):
            if save.failed:
                continue
            if not save.told:
                self._tell_offer(save)
            save.pump(self._save_ports, self.now)
            if (self.now - save.active) * 1000 > self.settings.save_ms:
                save.fail(self, AbortReason.DEADLINE, "late", self.now)

    def _on_want(self, message: Want) -> None:
        save = self.saves.get(message.save)
        if save is None:
            return
        try:
            parts = Parts(message.parts, self.pools.row_bytes)
        except ValueError:
            raise channel.Broken("a Want with half a piece") from None
        if not parts.follow(save.boundary):
            raise channel.Broken("a Want of pieces that cannot be")
        save.wanted(message.need_state, parts, self.now)

    def _on_decline(self, message: Decline) -> None:
        save = self.saves.get(message.save)
        if save is not None:
            save.stored = message.reason is DeclineReason.ALREADY_STORED
            save.fail(self, None, message.reason.name.lower(), self.now)

    def _on_drained(self, message: Drained) -> None:
        number, kind, index, count = message.save, message.piece, message.index, message.count
        save = self.saves.get(number)
        found, free = self._lent.answer(number, kind, index, count)
        if save is not None:
            found += save.drained(kind, index, count, message.status == Status.OK, self._save_ports, self.now)
        self._answered(found, count, save is not None, free)

    def _answered(self, found: int, count: int, known: bool, free: list[Run]) -> None:
        """The daemon answered for `count` pieces, of which `found` were asked for; `free` are those that nobody waits for
        any more."""
        for run in free:
            if run.is_idle:
                self.give_room(run.block)
            else:
                assert run.event is not None, "or it would be idle"
                self.retire(run.block, run.event)
        if not count or known and found != count:
            raise channel.Broken(f"an answer about {count} pieces, of which {found} were asked for")

    def _on_saved(self, message: Saved) -> None:
        save = self.saves.get(message.save)
        if save is None:
            return
        if message.status == Status.OK:
            save.saved, save.active = True, self.now
        else:
            save.fail(self, None, message.status.name.lower(), self.now)

    def _know(self, node: int) -> None:
        """The state of this node is at the daemon: no need to offer it again."""
        self._known.pop(node, None)
        self._known[node] = self._ticks
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    def _is_known(self, node: int) -> bool:
        """Whether it was there not long ago. The daemon does not say what it evicts or what is deleted; so what was not
        heard of for long is offered once more. By ticks: the same on all ranks."""
        since = self._known.get(node)
        if since is not None and self._ticks - since > _KNOWN_TICKS:
            del self._known[node]
            since = None
        return since is not None

    # === Ports =====================================================================================

    def lend(self, save: int, run: Run) -> bool:
        """The run lies whole in the ring."""
        return self._push(Drain(save, run.kind, run.index, run.count, run.block, run.bytes))

    def disown(self, save: int, run: Run) -> None:
        """Its room is free once the daemon is done with it."""
        if self.session is not None:
            self._lent.add(save, run)

    def gather_kv(self, save: Save, runs: list[Run]) -> Event | None:
        """Queues the copies of runs of KV. Nobody locks it: who gets its rows next writes after the copies."""
        session, parts = self.session, save.parts
        assert session is not None and parts is not None, "a save ends with the session"
        start = parts.starts[runs[0].index]
        found = self.tree.rows(save.node, start)
        if found is None:
            return None
        first, end, rows = found
        if end != save.boundary or first > start or rows.shape[0] != end - first:
            return None
        pools, ring = self.pools, session.ring.bytes
        table = joined([parts.whole(run, first) for run in runs])
        event = self.copier.submit(lambda: pools.save_kv(rows, ring, table), before_next=True)
        return self.carry_out(runs, event)

    def abort(self, save: int, reason: AbortReason) -> None:
        """The save is given up."""
        self._must(SaveAbort(save, reason))


class _SavePorts:
    """The shim's ports, with the saves' share of the ring."""

    def __init__(self, shim: Saves) -> None:
        self._shim = shim
        self.take_room, self.room = shim.take_room_for_save, shim.room_for_save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shim, name)
