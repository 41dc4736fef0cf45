"""What all ranks of a server decide together, by one reduction in a tick.

# What
Each rank has a daemon link of its own, which may be absent, slow or new. But what the tree or the gate can
feel must happen in the same tick on all ranks: that a restore is placed, asked for again, or given up; that a save is
known to be stored. So each machine has a *ballot*: how far this
rank is. The ranks take the smallest of each (`Ranks.minimum`), and a machine moves when all ranks are as far.
What one rank gives up, all give up. Whatever the tree cannot feel (messages, copies, room in the ring) stays
with each rank.

# State
`joined`: all ranks had a session with one daemon at the last reduction; only then machines are begun. Which
machines there are is the same on all ranks: they begin and end in hooks that SGLang calls alike on all ranks,
or here. A machine that fails on one rank stays, as failed, until all have heard of it.

# Order
A reduction is due on each 16th tick, and in each tick after one of SGLang's calls that could begin a machine, as
long as there are any. All of that is the same on all ranks, whatever fails on one of them; so none waits for
a reduction that the others do not enter. Its length is fixed. A rank alone reduces in each tick, with nobody.

# Errors
A rank that faults votes against everything, and still takes part. When ranks find that their machines
differ, all end them and go on. A rank that gives up for good takes the others with it. What raises for one machine
keeps none of the others from what was agreed on.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

from . import offers
from ._channel_layout import AbortReason, CloseReason, Outcome
from .ranks import Alone, Ranks
from .requests import Request
from .restore import Place, Restore, RestoreState
from .restores import Restores
from .save import Save, SaveState

log = logging.getLogger(__name__)

EVERY = 16
_SLOTS = 48
_HEAD = 12
_FIELDS = 4
_FAR = 1 << 62


def _names(saves: list[Save], restores: list[Restore]) -> int:
    """A number that ranks with other machines do not have."""
    names = zlib.crc32(repr([s.number for s in saves]).encode())
    return zlib.crc32(repr([r.request.names.rid for r in restores]).encode(), names)


class Lockstep(Restores):
    """The layer of the decisions."""

    def __init__(self, *args: Any, ranks: Ranks | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks: Ranks = ranks or Alone()
        self.gives_up = False
        """This rank wants to be off for good."""
        self._due = False
        self._may_begin = True
        self._boot = 0
        self._turn = 0
        self._on_ballot: list[Save | Restore] = []
        self._met: list[Exception] = []
        """What went wrong in what is being done."""

    @property
    def alone(self) -> bool:
        """There is one rank only."""
        return self.ranks.size == 1

    def poke(self) -> None:
        """SGLang calls something, on all ranks, that may begin a machine."""
        if self.joined:
            self._due = True

    def _is_due(self) -> bool:
        return self._due or self._ticks % EVERY == 0 or self.alone

    def names_weights(self) -> bool:
        """This rank would take a digest of the weights now."""
        return False

    def _weights_named(self) -> None:
        """All ranks do."""

    # --- The ballot ---

    def _blank(self) -> list[int]:
        """The ballot of a rank that is against everything."""
        self._on_ballot = []
        head = [0, 0 if self.gives_up else 1, 0, 0, 0, 0, 0, 0, -_FAR, 0, 0, 0]
        return head + [0] * (0 if self.alone else 2 * _SLOTS * _FIELDS)

    def _ballot(self) -> list[int]:
        session = self.session
        boot = session.end.boot_number if session is not None else 0
        saves, restores = list(self.saves.values()), self.restores
        first, last = offers.received(session)
        names = 0 if self.alone else _names(saves, restores)
        head = [
            int(session is not None), int(not self.gives_up), boot, -boot, names, -names,
            -(len(saves) + len(restores)), -self._save_numbers, -first, last, int(self.names_weights()), 0,
        ]  # fmt: skip
        chosen = [*self._window(saves), *self._window(restores)]
        self._on_ballot = chosen
        for machine in chosen:
            far, what = machine.ballot if isinstance(machine, Save) else self._ballot_of(machine)
            head += [far, -far, what, -what]
        if not self.alone:
            head += [0] * (_HEAD + 2 * _SLOTS * _FIELDS - len(head))
        return head

    def _ballot_of(self, restore: Restore) -> tuple[int, int]:
        if restore.state is RestoreState.PLACED:
            return 7 if restore.hold is not None and self._held_too_long(restore) else 8, restore.boundary
        return restore.ballot

    def _window(self, machines: list[Any]) -> list[Any]:
        """Those that are on this ballot; where there are too many, each gets its turn."""
        if self.alone or len(machines) <= _SLOTS:
            return machines
        start = self._turn * _SLOTS % len(machines)
        return (machines[start:] + machines[:start])[:_SLOTS]

    # --- The decision ---

    def _act(self, agreed: list[int]) -> None:
        """Does what all ranks agreed on, all of it; a daemon that breaks the protocol meanwhile is left afterwards.
        `agreed`: the smallest number of all ranks at each place."""
        self._deciding = True
        try:
            self._decide(agreed)
        finally:
            self._deciding = False
            reason, self._leaving = self._leaving, None
            if reason is not None:
                self._leave(reason)

    def _decide(self, agreed: list[int]) -> None:
        sessions, going, boot, boot_, names, names_, pending, numbers, first_, last = agreed[:10]
        machines, self._on_ballot = self._on_ballot, []
        self._turn += 1
        self._due = pending < 0
        # One rank may have lost count.
        self._save_numbers = max(self._save_numbers, -numbers)
        if not going:
            self._leave(CloseReason.FAILED)
            self._end_all("off")
            self.link.stop()
            self.off = True
            log.error("engram: off on all ranks; the server goes on without it")
            return
        joined = bool(sessions) and boot == -boot_
        if agreed[10]:
            self._weights_named()
        if not joined or boot != self._boot:
            # Another daemon may know nothing.
            self._known.clear()
        self.joined, self._boot = joined, boot
        if names != -names_:
            self.counts["ranks_differ"] += 1
            log.warning("engram: the ranks of this server had begun different saves or restores; all are ended")
            self._end_all("ranks_differ")
            return
        votes = [agreed[at : at + _FIELDS] for at in range(_HEAD, _HEAD + _FIELDS * len(machines), _FIELDS)]
        # Steps that walk the tree or copy come one a tick, those of restores first, as their requests wait.
        self._may_begin = True
        for machine, (far, farthest, low, high) in zip(machines, votes):
            if isinstance(machine, Restore):
                self._each(self._act_on_restore, machine, far, -farthest, low, -high)
        for machine, (far, farthest, low, high) in zip(machines, votes):
            if isinstance(machine, Save):
                self._each(self._act_on_save, machine, far, -farthest, low, -high)
        if joined and -first_ <= last:
            for conversation in offers.take(self.session, -first_, last):
                for request in list(self.requests.values()):
                    self._each(self._offer_again, request, conversation)
        faults, self._met = self._met, []
        if faults:
            raise faults[0]

    def _each(self, act: Callable[..., None], *args: Any) -> None:
        """One of the things that were agreed on. The other ranks do all of them, and so does this one."""
        try:
            act(*args)
        except Exception as fault:
            self._met.append(fault)

    def _act_on_save(self, save: Save, far: int, farthest: int, low: int, high: int) -> None:
        if save.number not in self.saves:
            return
        if far == 0:
            if farthest == 0 and low == 1:
                # All ranks were told that it is stored.
                self._know(save.node)
            save.end(self, AbortReason.OTHER_RANK, self.now)
            self._end_save(save, save.failure or "other_rank")
            return
        if far >= 2 and low != high:
            # The ranks were asked for different pieces.
            save.end(self, AbortReason.OTHER_RANK, self.now)
            self._end_save(save, "ranks_differ")
            return
        if save.state is SaveState.OFFERED and far >= 2:
            if self._may_begin:
                self._may_begin = False
                save.start(self._save_ports, self.now)
        if far == 4:
            self._know(save.node)
            save.end(self, None, self.now)
            self._end_save(save, "ok")

    def _act_on_restore(self, restore: Restore, far: int, farthest: int, low: int, high: int) -> None:
        if restore not in self.restores:
            return
        if far == 0:
            node, request = restore.known, restore.request
            self._end(restore, restore.failed or Outcome.OTHER_RANK)
            if farthest == 0 and low == 1 and node is not None and request.req is not None:
                # All ranks heard that nothing is stored: not even what they took for known.
                self._offer_anew(request, restore.device_boundary, node)
        elif restore.state is RestoreState.PLACED:
            if restore.admitted:
                # It holds its own lock.
                self._end(restore, Outcome.USED)
            elif far == 7:
                self.unhold(restore)
        elif far >= 2 and low < high:
            # Not all ranks got the same: the smallest is what all can have.
            if restore.boundary > low:
                self._ask_again(restore, low)
        elif far in (3, 4, 6) and self._may_begin and self._may_fit(restore):
            # 3: it streams on one rank at least, and then all take rows.
            self._may_begin = False
            place = self.take_stock(restore) if far == 3 else restore.try_place(self, self.now)
            self._may_begin = place is Place.NO_ROOM
            self._came_to(restore, place)

    def _came_to(self, restore: Restore, place: Place) -> None:
        """What follows from a try to take rows, or to place."""
        if place is Place.LESS_KV:
            self._ask_anew(restore)
        elif place is Place.NO_ROOM:
            room = self.tree.room(restore.request)
            self._refused(restore, room)
            if room.idle and not self._placed():
                # Nothing runs that could make room.
                self._end(restore, Outcome.NO_DEVICE_ROOM)
        elif place is Place.AS_DEEP:
            self._end(restore, Outcome.DEVICE_AS_DEEP)

    def _yield_room(self) -> None:
        """Gives back what is held where SGLang needs it in this iteration: it admitted what runs before, and does not
        survive that there is no room. On all ranks in the same tick: what they hold and what they need are the same."""
        holding = [r for r in self.restores if r.hold is not None or r.stock is not None]
        while holding and self.tree.is_short():
            restore = holding.pop()
            if restore.stock is not None:
                self._end(restore, Outcome.NO_DEVICE_ROOM)
            else:
                self.unhold(restore)
                self.counts["holds_yielded"] += 1

    def _end_all(self, why: str) -> None:
        """Ends every machine, here and now. For what all ranks know."""
        for save in list(self.saves.values()):
            save.end(self, AbortReason.OTHER_RANK, self.now)
            self._end_save(save, why)
        for restore in list(self.restores):
            self._end(restore, Outcome.OTHER_RANK)

    def _offer_again(self, request: Request, conversation: str) -> None:
        """The daemon wants the states of a conversation, or of all: the deepest of each request that is known."""
        names, tokens = request.names, request.tokens
        if tokens is None or conversation not in ("", names.session_id or names.rid):
            return
        key = self.tree.key(request, len(tokens) // self.tree.page_size * self.tree.page_size)
        boundary, node = self.tree.state_node(key)
        if boundary > 0:
            self._offer_anew(request, boundary, node)

    def _offer_anew(self, request: Request, boundary: int, node: int) -> None:
        """A state that the daemon may have had, and lacks."""
        self._known.pop(node, None)
        self._state(request.req, request.names, request.tokens, boundary, node, True)
