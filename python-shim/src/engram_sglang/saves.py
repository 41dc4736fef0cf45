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
from .pools import Run
from .requests import Request, Requests
from .save import PieceOfSave, Phase, Save, SaveState
from .seam import Names

_SAVES = 256
_KNOWN = 1 << 16


class Saves(Requests):
    """The layer of the saves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saves: dict[int, Save] = {}
        self.stale_tree = False
        """The tree may hold what older weights computed."""
        self._save_ports = _SavePorts(self)
        self._save_numbers = 0
        self._known: dict[int, None] = {}
        self._lent: dict[tuple[int, Kind, int], int] = {}
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

    def _reopen(self, request: Request) -> None:
        """Begins it anew: other tokens, or other weights. The daemon drops what it had of it."""
        self._drop_saves(request, AbortReason.SUPERSEDED)
        request.opened, request.epoch = None, self.epoch

    def _state(self, req: Any, names: Names, tokens: Any, boundary: int, node: int, branch: bool) -> None:
        """A state is in the tree. All that decides whether a save begins is the same on all ranks."""
        if not self.joined or not self.settings.save or not names.saved:
            return
        if self.stale_tree:
            self.counts["save_dropped_stale_tree"] += 1
            return
        if node in self._known:
            return
        request = self.requests.get(names.rid)
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
        piece = PieceOfSave(Kind.STATE, 0, boundary, boundary, self.pools.state_bytes)
        save = Save(self._save_numbers, request, boundary, node, branch, piece, self.now)
        save.tokens = tokens
        self.saves[save.number] = save
        request.saves += 1
        self._offer(save, piece, slot)

    def _offer(self, save: Save, piece: PieceOfSave, slot: Any) -> None:
        """Copies the state into the ring and tells the daemon, as far as this rank can."""
        session = self.session
        block = self.take_room_for_save(piece.bytes)
        if session is None or block is None:
            if session is not None:
                self.counts["save_dropped_ring_full"] += 1
            save.fail(self, None, "session_end" if session is None else "ring_full", self.now)
            return
        piece.block, piece.phase = block, Phase.COPYING
        pools, ring = self.pools, session.ring.bytes
        piece.event = self.copier.submit(lambda: pools.save_state(slot, ring, block), before_next=True)
        self.counts["offers"] += 1
        self._tell_offer(save)
        self._ring()

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

    def take_room_for_save(self, size: int) -> int | None:
        """Saves leave a quarter of the ring to restores."""
        session = self.session
        if session is None or session.ring.space.free_bytes - size < session.ring.space.size // 4:
            return None
        return session.ring.space.take(size)

    def _drop_saves(self, request: Request, reason: AbortReason) -> None:
        for save in [s for s in self.saves.values() if s.request is request]:
            save.end(self, reason, self.now)
            self._end_save(save, reason.name.lower())

    def _end_save(self, save: Save, why: str) -> None:
        if self.saves.pop(save.number, None) is not None:
            save.request.saves -= 1
            self.counts["save_" + ("ok" if why == "ok" else "ended_" + why)] += 1
            save.rows = save.request = save.tokens = None

    def _pump_saves(self) -> None:
        for save in list(self.saves.values()):
            if save.failed:
                continue
            if not save.told:
                self._tell_offer(save)
            save.pump(self._save_ports, self.now)
            waited, gathering = self.now - save.active, self.now - save.since
            late = save.state is SaveState.GATHERING and not save.gathered and gathering * 1000 > self.settings.gather_ms
            if late:
                save.fail(self, AbortReason.NO_ROOM, "late", self.now)
            elif waited * 1000 > self.settings.save_ms:
                save.fail(self, AbortReason.DEADLINE, "late", self.now)

    def _on_want(self, message: Want) -> None:
        save = self.saves.get(message.save)
        if save is None:
            return
        parts = message.parts
        pairs = list(zip(parts[0::2], parts[1::2]))
        if len(parts) % 2 or any(not 0 <= a < b <= save.boundary for a, b in pairs):
            raise channel.Broken("a Want beyond the state's boundary")
        sizes = [self.pools.kv_bytes(b - a) for a, b in pairs]
        save.wanted(message.need_state, parts, sizes, self.now)

    def _on_decline(self, message: Decline) -> None:
        save = self.saves.get(message.save)
        if save is not None:
            save.stored = message.reason is DeclineReason.ALREADY_STORED
            save.fail(self, None, message.reason.name.lower(), self.now)

    def _on_drained(self, message: Drained) -> None:
        save = self.saves.get(message.save)
        if save is not None and save.drained(
            message.piece, message.index, message.status == Status.OK, self._save_ports, self.now
        ):
            return
        block = self._lent.pop((message.save, message.piece, message.index), None)
        if block is not None and self.session is not None:
            self.session.ring.space.give(block)

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
        self._known[node] = None
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    # === Ports =====================================================================================

    def lend(self, save: int, piece: PieceOfSave) -> bool:
        """The piece lies whole in the ring."""
        return self._push(Drain(save, piece.kind, piece.index, piece.block, piece.bytes))

    def disown(self, save: int, piece: PieceOfSave) -> None:
        """Its room is free once the daemon is done with it."""
        if self.session is not None:
            self._lent[(save, piece.kind, piece.index)] = piece.block

    def lock_kv(self, save: Save) -> bool:
        """Locks the KV of the save's path."""
        lock = self.tree.lock_kv(save.node)
        if lock is None:
            return False
        start = min(piece.start for piece in save.pieces if piece.kind is Kind.KV)
        first, end, rows = self.tree.rows(save.node, start)
        if end != save.boundary or first > start or rows.shape[0] != end - first:
            self.tree.unlock(lock)
            return False
        save.lock, save.rows, save.first = lock, rows, first
        return True

    def unlock_kv(self, save: Save) -> None:
        """Ends that lock."""
        lock, save.lock, save.rows = save.lock, None, None
        if lock is not None:
            self.tree.unlock(lock)

    def gather_kv(self, save: Save, pieces: list[PieceOfSave]) -> Event:
        """Queues the copies of pieces of KV."""
        session = self.session
        assert session is not None, "a save ends with the session"
        rows, pools, ring, first = save.rows, self.pools, session.ring.bytes, save.first
        runs = [Run(p.block, p.end - p.start, 0, p.start - first, p.end - p.start) for p in pieces]
        return self.copier.submit(lambda: pools.save_kv(rows, ring, runs), before_next=False)

    def abort(self, save: int, reason: AbortReason) -> None:
        """The save is given up."""
        self._must(SaveAbort(save, reason))


class _SavePorts:
    """The shim's ports, with the saves' share of the ring."""

    def __init__(self, shim: Saves) -> None:
        self._shim = shim
        self.take_room = shim.take_room_for_save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shim, name)
