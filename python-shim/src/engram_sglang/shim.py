"""What runs on SGLang's scheduler thread: requests, saves, restores and the session, driven by a tick.

# What
`Shim` is told what happens (a request came, a state was inserted, a request ended, the weights change)
and asked whether a request may be admitted. All work is done there and in `tick`, once in each iteration
of the scheduler. Nothing waits, calls the daemon, or hands over to a thread: the daemon is talked to
through the channel in shared memory, and device copies are queued.

# State
- `requests`: what SGLang knows, by rid. Each is opened at the daemon when there is something to say of it.
- `saves`, `restores`: one state machine each, see `save` and `restore`. Each holds little, and for a bounded time.
- `session`: the attachment that the link thread made, or None. All that is bound to the daemon (what
  it knows, leases, room that it may write to) dies with the session, and its ring with it.
- `epoch`: of the weights. `stale_tree`: the tree may hold what older weights computed.

# Order
Rows and slots are taken last, in one tick, when all bytes are in the ring; SGLang's own streams do every write
to its pools. Messages that end something wait in `outbox` when the channel is full; others are dropped.

# Cancellation
Abort, finish, retraction, flush, weight updates, a lost daemon: each ends the machines concerned here and
now, and tells the daemon afterwards. An answer to something that ended finds nothing, and changes nothing.

# Errors
No exception leaves a hook. What is unexpected ends the session and all machines, so that nothing half done
stays; after three, the shim is off for good and the server goes on as if it were not there.

The module knows nothing of SGLang's classes: what it needs of them is `Tree`, which each adapter has.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from . import channel
from ._channel_layout import (
    AbortReason,
    CloseReason,
    Decline,
    DeclineReason,
    Drain,
    Drained,
    Epoch,
    Fill,
    Filled,
    Finish,
    Lookup,
    LookupResult,
    Miss,
    Offer,
    Outcome,
    Release,
    RequestClose,
    RequestFlags,
    RequestOpen,
    Revoke,
    SaveAbort,
    Saved,
    Status,
    TurnFinished,
    Want,
)
from ._channel_layout import Piece as Kind
from .copier import Copier, Event
from .link import Beat, Link, Session, Weights
from .pools import Pools
from .restore import PieceOfRestore, Place, Restore, RestoreState
from .save import PieceOfSave, Phase, Save, SaveState
from .settings import Settings
from .timing import Times

log = logging.getLogger(__name__)

_FAULTS = 3
_OUTBOX = 1 << 16
_SAVES = 256
_KNOWN = 1 << 16
# Token ids told in one hook: a quarter of a megabyte. What is left follows with the next ticks.
_TOKENS_AT_ONCE = 32768
_NO_DIGEST = bytes(32)
_TRIES = 4

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Names:
    """What an adapter read off a request."""

    rid: str
    session_id: str | None
    extra_key: str | None
    cache_salt: str | None
    saved: bool
    """False: of a sort that is neither saved nor restored."""


@dataclass
class Ending:
    """How a request ended."""

    prompt_tokens: int
    total_tokens: int
    cached_tokens: int
    finish: Finish


@dataclass
class Room:
    """What is free on the device, beyond what running requests and this one reserved.

    Slots are not in it: a restored state can be evicted from the moment that it is in the tree, so that a
    restore never makes fewer slots for others.
    """

    tokens: int
    requests: int
    """How many more requests may run. What is placed for others is evicted before it is used."""
    idle: bool
    """Nothing runs that could free more."""


class Tree(Protocol):
    """SGLang's cache, as the shim needs it. Everything on the scheduler thread, nothing waits."""

    page_size: int

    def key(self, request: Request, upto: int) -> Any:
        """The key of the request's first `upto` tokens."""

    def full_match(self, key: Any) -> tuple[int, int]:
        """How much KV of the key is on the device, and the deepest node of it."""

    def state_match(self, key: Any) -> int:
        """The deepest boundary on the key that has a state on the device."""

    def lock_kv(self, node: int) -> Any:
        """Locks the KV of the path, no state. None: the node is gone."""

    def unlock(self, lock: Any) -> None:
        """Ends a lock."""

    def rows(self, node: int, start: int) -> tuple[int, int, Any]:
        """(first, end, rows): row numbers, on the device, of tokens [first, end) of the path, of which `end` is
        the node's own and `first` is `start` or less."""

    def slot(self, node: int) -> Any:
        """The slot of the node's state as a tensor of one number, or None."""

    def room(self, request: Request) -> Room:
        """What a restore may take."""

    def take(self, tokens: int) -> tuple[Any, Any] | None:
        """Rows for so many tokens and one slot, evicting where needed; or neither."""

    def give(self, rows: Any, slot: Any) -> None:
        """Gives back what `take` took and nobody inserted."""

    def insert(self, key: Any, have: int, rows: Any, slot: Any) -> int:
        """Inserts the restored path, of which [0, have) is there. The node."""

    def load(self) -> Beat:
        """Numbers for the daemon's status."""


class Request:
    """One request of SGLang, from its arrival to its end."""

    __slots__ = ("attempt", "cached_from", "epoch", "names", "number", "opened", "origin", "req", "restore", "saves", "sent", "tokens")

    def __init__(self, number: int, names: Names, req: Any, epoch: int) -> None:
        self.number, self.names, self.req, self.epoch = number, names, req, epoch
        self.attempt = 0
        self.opened: Session | None = None
        """The session in which the daemon knows it."""
        self.sent = 0
        self.tokens: Any = None
        self.origin: Any = None
        self.restore: Restore | None = None
        self.saves = 0


def hook(name: str, default: Any = None) -> Callable[[F], F]:
    """A method that SGLang calls: timed, and never raising."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Shim, *args: Any, **kwargs: Any) -> Any:
            if self.off:
                return default
            began = time.perf_counter_ns()
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._fault(name)
                return default
            finally:
                self.times.add(name, time.perf_counter_ns() - began)

        return guarded  # type: ignore[return-value]

    return wrap


class Shim:
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
        self.off = False
        self.epoch = link.weights.epoch
        self.stale_tree = False
        self.session: Session | None = None
        self.requests: dict[str, Request] = {}
        self.saves: dict[int, Save] = {}
        self.restores: list[Restore] = []
        self.outbox: deque[Callable[[], bool]] = deque()
        self.times = Times()
        self.counts: Counter[str] = Counter()
        self.generation = 0
        self._numbers = 0
        self._save_numbers = 0
        self._ticks = 0
        self._faults = 0
        self._token_budget = _TOKENS_AT_ONCE
        self._known: dict[int, None] = {}
        self._retired: list[tuple[Session, int, Event]] = []
        self._lent: dict[tuple[int, Kind, int], int] = {}
        self._unfilled: dict[tuple[int, Kind, int], int] = {}
        self._peer_beat = -1
        self._peer_since = self.now
        self._handlers: dict[type, Callable[[Any], None]] = {
            LookupResult: self._on_lookup_result,
            Filled: self._on_filled,
            Want: self._on_want,
            Decline: self._on_decline,
            Drained: self._on_drained,
            Saved: self._on_saved,
            Revoke: self._on_revoke,
        }
        self.on_saved: Callable[[Save, Status], None] | None = None
        self.model: Any = None
        """What the weights' digest is taken of."""

    # === Hooks =====================================================================================

    @hook("tick")
    def tick(self) -> None:
        """Once in each iteration of the scheduler, before it decides anything."""
        self._ticks += 1
        self.now = self._clock()
        self._token_budget = _TOKENS_AT_ONCE
        if self.session is None:
            self._adopt()
        session = self.session
        if session is not None:
            if not self._is_alive(session):
                return
            self._hear(session)
        if self.session is not None:
            self._flush()
            self._pump_saves()
            self._pump_restores()
            self._ring()
        elif self.restores:
            self._pump_restores()
        self._collect()
        if self._ticks % 64 == 1:
            self.link.beat = self.tree.load()
            self.link.beat.ticks = self._ticks

    @hook("enqueue")
    def enqueue(self, req: Any, names: Names, tokens: Any, maximum: int, device_boundary: int, device_kv: int) -> None:
        """A request is put into the waiting queue, for the first time or again.

        `tokens`: all that it has. `maximum`: the largest useful boundary.
        """
        self.now = self._clock()
        request = self.requests.get(names.rid)
        if request is not None and request.req is not req:
            # The rid came again, with another request behind it.
            self._close(request, None)
            request = None
        if request is None:
            self._numbers += 1
            request = self.requests[names.rid] = Request(self._numbers, names, req, self.epoch)
        else:
            request.attempt += 1
            self._end_restore(request, Outcome.ABORTED)
            if request.epoch != self.epoch:
                # Its KV is computed anew, by the weights of now.
                self._reopen(request)
        request.tokens = tokens
        if not names.saved or self.session is None or not self.settings.restore or self.stale_tree:
            return
        page = self.tree.page_size
        maximum = min(maximum, len(tokens)) // page * page
        if maximum - device_boundary < max(1, self.settings.minimum_tokens):
            return
        restore = Restore(request, request.attempt, maximum, device_boundary, device_kv, self.now)
        request.restore = restore
        self.restores.append(restore)
        self.counts["lookups"] += 1
        self._ask(restore)
        self._ring()

    @hook("gate", default=True)
    def may_admit(self, rid: str) -> bool:
        """Whether a waiting request may be admitted. Asked each time it is considered."""
        request = self.requests.get(rid)
        if request is None or request.restore is None:
            return True
        restore = request.restore
        if not restore.gate_open:
            restore.consider(self, self.now)
            self._ring()
        return restore.gate_open

    @hook("admitted")
    def admitted(self, rid: str, prefix: int) -> None:
        """A request was admitted with so many tokens from the cache."""
        request = self.requests.get(rid)
        if request is None:
            return
        if request.epoch != self.epoch and not self.stale_tree:
            # It waited while the weights changed, and begins with those of now.
            self._reopen(request)
        restore = request.restore
        if restore is not None and restore.state is RestoreState.PLACED:
            restore.reused = max(0, min(prefix, restore.boundary) - restore.device_boundary)
            restore.admitted = True

    @hook("inserted")
    def inserted(self, req: Any, names: Names, tokens: Any, boundary: int, node: int, branch: bool) -> None:
        """A state at `boundary` of the request's tokens is in the tree, at `node`."""
        session = self.session
        if session is None or not self.settings.save or not names.saved:
            return
        if self.stale_tree:
            self.counts["save_dropped_stale_tree"] += 1
            return
        if node in self._known:
            return
        self.now = self._clock()
        request = self.requests.get(names.rid)
        if request is None or request.req is not req:
            if request is not None:
                self._close(request, None)
            self._numbers += 1
            request = self.requests[names.rid] = Request(self._numbers, names, req, self.epoch)
        if request.epoch != self.epoch:
            self.counts["save_dropped_stale_epoch"] += 1
            return
        self._offer(session, request, tokens, boundary, node, branch)

    @hook("finished")
    def finished(self, req: Any, rid: str, tokens: Any, ending: Ending) -> None:
        """A request ended in the running batch."""
        request = self.requests.get(rid)
        if request is not None and request.req is req:
            request.tokens = tokens
            self._close(request, ending)

    @hook("dropped")
    def dropped(self, rid: str, req: Any = None) -> None:
        """A request was aborted before it ended, or rejected."""
        request = self.requests.get(rid)
        if request is not None and (req is None or request.req is req):
            self._close(request, None)

    @hook("reset")
    def reset(self) -> None:
        """The tree and the pools are about to be emptied; every lock is void."""
        self.generation += 1
        self.stale_tree = False
        self._known.clear()
        for save in list(self.saves.values()):
            if save.state in (SaveState.OFFERED, SaveState.GATHERING):
                save.lock = None
                save.end(self, AbortReason.EVICTED, self.now)
                self._end_save(save, "reset")
        for restore in list(self.restores):
            restore.hold = None
            self._end(restore, Outcome.ABORTED if restore.state is not RestoreState.PLACED else Outcome.USED)

    @hook("weights")
    def weights_change(self) -> None:
        """The weights are about to change: from now on nothing of the old ones is saved or restored."""
        self.epoch += 1
        self.stale_tree = True
        self.link.weights = Weights(self.epoch, None)
        for save in list(self.saves.values()):
            save.end(self, AbortReason.STALE_EPOCH, self.now)
            self._end_save(save, "stale_epoch")
        for restore in list(self.restores):
            if restore.state is not RestoreState.PLACED:
                self._end(restore, Outcome.ABORTED)
        if self.session is not None:
            self._must(Epoch(self.epoch, _NO_DIGEST))
            self._ring()

    @hook("weights")
    def weights_changed(self, digest: bytes) -> None:
        """The weights are known again."""
        self.link.weights = Weights(self.epoch, digest)
        if self.session is not None:
            self._must(Epoch(self.epoch, digest))
            self._ring()

    @hook("busy", default=False)
    def is_busy(self) -> bool:
        """Whether raw rows or slots are held across ticks. Never because of a save."""
        return False

    @hook("shutdown")
    def shutdown(self) -> None:
        """The server ends."""
        self._leave(CloseReason.SHUTDOWN)
        self.link.stop()
        self.off = True

    # === Session ===================================================================================

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
            self._must(Epoch(weights.epoch, weights.digest or _NO_DIGEST))

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
        session, self.session = self.session, None
        if session is None:
            return
        session.end.close(reason)
        try:
            channel.ring(session.doorbell)
        except OSError:
            pass  # the daemon's end is gone
        self.outbox.clear()
        for save in list(self.saves.values()):
            save.told = False
            save.end(self, None, self.now)
            self._end_save(save, "session_end")
        for restore in list(self.restores):
            restore.lease = 0
            if restore.state is not RestoreState.PLACED:
                self._end(restore, Outcome.SESSION_END)
        for request in self.requests.values():
            request.opened, request.sent = None, 0
        self._lent.clear()
        self._unfilled.clear()
        # The next daemon may know nothing.
        self._known.clear()
        # Memory of the ring stays while a queued copy uses it: the copy itself holds it.
        self._retired = [r for r in self._retired if r[0] is not session]
        session.left.set()

    def _hear(self, session: Session) -> None:
        try:
            for _ in range(256):
                message = session.end.rx.pop()
                if message is None:
                    break
                self._handlers[type(message)](message)
                if self.session is not session:
                    return
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
        if self.session is None:
            return
        if not self.outbox and self._push(message):
            return
        self._later(lambda: self._say(message))

    def _say(self, message: Any) -> bool:
        session = self.session
        return session is None or session.end.tx.push(message)

    def _later(self, say: Callable[[], bool]) -> None:
        if self.session is None:
            return
        if len(self.outbox) >= _OUTBOX:
            self.counts["outbox_full"] += 1
            self._leave(CloseReason.FAILED)
            return
        self.outbox.append(say)

    def _flush(self) -> None:
        try:
            while self.outbox and self.session is not None:
                if not self.outbox[0]():
                    return
                if self.outbox:
                    self.outbox.popleft()
        except channel.Broken:
            self._leave(CloseReason.BROKEN_PEER)

    def _ring(self) -> None:
        session = self.session
        if session is not None and session.end.tx.take_written():
            channel.ring(session.doorbell)

    def _fault(self, name: str) -> None:
        self._faults += 1
        self.counts["faults"] += 1
        log.exception("engram: fault %d in %s; leaving the daemon", self._faults, name)
        try:
            self._leave(CloseReason.FAILED)
        except Exception:
            log.exception("engram: fault while leaving the daemon")
            self.session = None
            self._faults = _FAULTS
        for restore in self.restores:
            if not restore.gate_open:
                restore.state = RestoreState.ENDED
        if self._faults >= _FAULTS:
            log.error("engram: off after %d faults; the server goes on without it", self._faults)
            self.off = True

    # === Requests ==================================================================================

    def _open(self, request: Request) -> bool:
        """The daemon knows the request."""
        if request.opened is self.session and self.session is not None:
            return True
        names = request.names
        flags = RequestFlags(0)
        for flag, value in (
            (RequestFlags.HAS_SESSION, names.session_id),
            (RequestFlags.HAS_EXTRA_KEY, names.extra_key),
            (RequestFlags.HAS_CACHE_SALT, names.cache_salt),
            (RequestFlags.HAS_TENANT, self.settings.tenant or None),
        ):
            if value is not None:
                flags |= flag
        if not names.saved:
            flags |= RequestFlags.NOT_SAVED
        opened = self._push(
            RequestOpen(
                req=request.number,
                attempt=request.attempt,
                flags=flags,
                epoch=request.epoch,
                rid=names.rid,
                session_id=names.session_id or "",
                tenant=self.settings.tenant,
                extra_key=names.extra_key or "",
                cache_salt=names.cache_salt or "",
                adapter=bytes(32),
            )
        )
        if opened:
            request.opened, request.sent, request.origin = self.session, 0, None
        return opened

    def _reopen(self, request: Request) -> None:
        """Begins it anew: other tokens, or other weights. The daemon drops what it had of it."""
        self._drop_saves(request, AbortReason.SUPERSEDED)
        request.opened, request.epoch = None, self.epoch

    def _tell_tokens(self, request: Request, tokens: Any, upto: int) -> bool:
        """Tells tokens up to `upto`, as far as may be told at once. True: the daemon has all of them."""
        if not self._open(request):
            return False
        session = self.session
        if session is None:
            return False
        if request.sent < upto and self._token_budget > 0:
            if self.outbox:
                return False
            end = min(upto, request.sent + self._token_budget)
            with memoryview(tokens) as view, view[request.sent : end] as rest:
                try:
                    told = session.end.tx.push_tokens(request.number, request.sent, rest)
                except channel.Broken:
                    self._leave(CloseReason.BROKEN_PEER)
                    return False
            request.sent += told
            self._token_budget -= told
        return request.sent >= upto

    def _close(self, request: Request, ending: Ending | None) -> None:
        """The request is over."""
        if self.requests.get(request.names.rid) is request:
            del self.requests[request.names.rid]
        self._end_restore(request, Outcome.ABORTED)
        request.req = None
        session = self.session
        tokens, request.tokens = request.tokens, None
        if ending is not None and session is not None and request.names.saved:
            # What is left, the daemon hears below and later.
            self._tell_tokens(request, tokens, ending.total_tokens)
        if session is None or self.session is not session or request.opened is not session:
            return
        if ending is not None and request.names.saved:
            self._later(functools.partial(self._say_turn, request, tokens, ending))
        self._later(lambda: self._say(RequestClose(request.number)))
        self._flush()
        self._ring()

    def _say_turn(self, request: Request, tokens: Any, ending: Ending) -> bool:
        session = self.session
        if session is None:
            return True
        if request.sent < ending.total_tokens:
            end = min(ending.total_tokens, request.sent + max(0, self._token_budget))
            with memoryview(tokens) as view, view[request.sent : end] as rest:
                told = session.end.tx.push_tokens(request.number, request.sent, rest)
            request.sent += told
            self._token_budget -= told
            if request.sent < ending.total_tokens:
                return False
        cached = min(ending.cached_tokens, ending.prompt_tokens)
        return session.end.tx.push(
            TurnFinished(
                req=request.number,
                attempt=request.attempt,
                prompt_tokens=ending.prompt_tokens,
                total_tokens=ending.total_tokens,
                cached_tokens=cached,
                prefilled_tokens=ending.prompt_tokens - cached,
                finish=ending.finish,
            )
        )

    # === Saves =====================================================================================

    def _offer(self, session: Session, request: Request, tokens: Any, boundary: int, node: int, branch: bool) -> None:
        slot = self.tree.slot(node)
        if slot is None:
            return
        if len(self.saves) >= _SAVES:
            self.counts["save_dropped_too_many"] += 1
            return
        for older in [s for s in self.saves.values() if s.request is request]:
            if older.boundary == boundary:
                return
            if older.boundary < boundary and older.untouched and not older.branch:
                older.end(self, AbortReason.SUPERSEDED, self.now)
                self._end_save(older, "superseded")
        block = self.take_room_for_save(self.pools.state_bytes)
        if block is None:
            self.counts["save_dropped_ring_full"] += 1
            return
        piece = PieceOfSave(Kind.STATE, 0, boundary, boundary, self.pools.state_bytes)
        out = session.ring.bytes[block : block + piece.bytes]
        piece.block, piece.phase = block, Phase.COPYING
        pools = self.pools
        piece.event = self.copier.submit(lambda: pools.gather_state(slot, out), before_next=True)
        self._save_numbers += 1
        save = Save(self._save_numbers, request, boundary, node, branch, piece, self.now)
        save.tokens = tokens
        self.saves[save.number] = save
        request.saves += 1
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
            if not save.told:
                self._tell_offer(save)
            save.pump(_SavePorts(self), self.now)
            waited = (self.now - save.active) * 1000
            limit = self.settings.save_ms
            if save.state is SaveState.GATHERING and (self.now - save.since) * 1000 > self.settings.gather_ms:
                save.end(self, AbortReason.NO_ROOM, self.now)
            elif waited > limit:
                save.end(self, AbortReason.DEADLINE, self.now)
            if save.state is SaveState.ENDED:
                self._end_save(save, "late")

    def _on_want(self, message: Want) -> None:
        save = self.saves.get(message.save)
        if save is None:
            return
        parts = message.parts
        pairs = list(zip(parts[0::2], parts[1::2]))
        if len(parts) % 2 or any(not 0 <= a < b <= save.boundary for a, b in pairs):
            raise channel.Broken("a Want beyond the state's boundary")
        sizes = [self.pools.kv_bytes(b - a) for a, b in pairs]
        save.wanted(message.need_state, parts, sizes, _SavePorts(self), self.now)
        if save.state is SaveState.ENDED:
            self._end_save(save, "evicted")

    def _on_decline(self, message: Decline) -> None:
        save = self.saves.get(message.save)
        if save is None:
            return
        if message.reason is DeclineReason.ALREADY_STORED:
            self._know(save.node)
        save.end(self, None, self.now)
        self._end_save(save, message.reason.name.lower())

    def _on_drained(self, message: Drained) -> None:
        save = self.saves.get(message.save)
        key = (message.save, message.piece, message.index)
        if save is not None and save.drained(
            message.piece, message.index, message.status == Status.OK, _SavePorts(self), self.now
        ):
            if save.state is SaveState.ENDED:
                self._end_save(save, "drain_failed")
            return
        block = self._lent.pop(key, None)
        if block is not None and self.session is not None:
            self.session.ring.space.give(block)

    def _on_saved(self, message: Saved) -> None:
        save = self.saves.get(message.save)
        if save is None:
            return
        if message.status == Status.OK:
            self._know(save.node)
        if self.on_saved is not None:
            self.on_saved(save, message.status)
        save.end(self, None, self.now)
        self._end_save(save, "ok" if message.status == Status.OK else message.status.name.lower())

    def _know(self, node: int) -> None:
        """The state of this node is at the daemon: no need to offer it again."""
        self._known[node] = None
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    # === Restores ==================================================================================

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
        state, now, settings = restore.state, self.now, self.settings
        if state is RestoreState.PLACED:
            if restore.admitted:
                # Admitted: it holds its own lock.
                self._end(restore, Outcome.USED)
            elif restore.hold is not None and self._held_too_long(restore):
                self.unhold(restore)
            return
        if state is RestoreState.LOOKUP and (now - restore.since) * 1000 > settings.lookup_ms:
            self._end(restore, Outcome.DEADLINE)
            return
        considered = restore.considered
        if considered is not None and (now - considered) * 1000 > settings.restore_ms:
            self._end(restore, Outcome.DEADLINE)
            return
        if self.session is None:
            return
        if state is RestoreState.LOOKUP:
            self._ask(restore)
            return
        restore.pump(self, now)
        if restore.state is RestoreState.FILLED:
            place = restore.try_place(self, now)
            if place is Place.LESS_KV:
                self._ask_again(restore, restore.maximum)
            elif place is Place.NO_ROOM and not self._placed() and self.tree.room(restore.request).idle:
                # Nothing runs that could make room.
                self._end(restore, Outcome.NO_DEVICE_ROOM)
            elif place is Place.AS_DEEP and restore in self.restores:
                self.restores.remove(restore)
                self.counts["restore_device_as_deep"] += 1

    def _placed(self) -> int:
        """Restores whose requests are to be admitted next."""
        return sum(r.state is RestoreState.PLACED and not r.admitted for r in self.restores)

    def _held_too_long(self, restore: Restore) -> bool:
        """Its request was not admitted: perhaps because of what is held."""
        if (self.now - restore.since) * 1000 > self.settings.hold_ms:
            return True
        return self._ticks > restore.placed_at + 1 and self.tree.room(restore.request).idle

    def _ask_again(self, restore: Restore, maximum: int) -> None:
        """The plan does not hold any more: another lookup, a few times."""
        request = restore.request
        if restore.tries >= _TRIES or maximum <= 0 or request.epoch != self.epoch:
            self._end(restore, Outcome.FILL_FAILED)
            return
        key = self.tree.key(request, maximum)
        request.attempt += 1
        outcome = Outcome.ABORTED
        restore.maximum = maximum
        restore.device_boundary = self.tree.state_match(key)
        restore.device_kv = self.tree.full_match(key)[0]
        restore.ask_again(self, outcome, request.attempt, self.now)
        if restore.device_boundary >= maximum:
            self._end(restore, outcome)
            return
        self._ask(restore)

    def _find(self, number: int, attempt: int) -> Restore | None:
        for restore in self.restores:
            if restore.request.number == number and restore.attempt == attempt:
                return restore
        return None

    def _on_lookup_result(self, message: LookupResult) -> None:
        restore = self._find(message.req, message.attempt)
        if restore is None or restore.state is not RestoreState.LOOKUP:
            if message.lease:
                self.release(message.lease, Outcome.ABORTED, 0)
            return
        if not message.lease:
            reason = message.reason or Miss.NOTHING_STORED
            self.counts["miss_" + reason.name.lower()] += 1
            self._end(restore, Outcome.ABORTED)
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
            restore.step(RestoreState.FILLING, self.now)
            restore.step(RestoreState.FILLED, self.now)
            self._ask_again(restore, (message.boundary - 1) // self.tree.page_size * self.tree.page_size)
            return
        total = self.pools.state_bytes + sum(sizes)
        session = self.session
        if session is not None and total > session.ring.space.size - (len(sizes) + 1) * 4096:
            self.counts["restore_larger_than_ring"] += 1
            self._end(restore, Outcome.NO_DEVICE_ROOM)
            return
        if restore.considered is not None:
            restore.consider(self, self.now)

    def _on_filled(self, message: Filled) -> None:
        for restore in self.restores:
            if restore.lease == message.lease and restore.filled(
                message.piece, message.index, message.status == Status.OK, self, self.now
            ):
                if restore.state is RestoreState.ENDED:
                    self.restores.remove(restore)
                    self.counts["restore_fill_failed"] += 1
                return
        block = self._unfilled.pop((message.lease, message.piece, message.index), None)
        if block is not None and self.session is not None:
            self.session.ring.space.give(block)

    def _on_revoke(self, message: Revoke) -> None:
        for restore in list(self.restores):
            if restore.lease == message.lease and restore.state is not RestoreState.PLACED:
                self._end(restore, Outcome.FILL_FAILED)

    # === Ports: what machines do to the world ======================================================

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

    def gather_kv(self, save: Save, piece: PieceOfSave) -> Event:
        """Queues the copy of a piece of KV."""
        session = self.session
        assert session is not None, "a save ends with the session"
        out = session.ring.bytes[piece.block : piece.block + piece.bytes]
        rows, pools = save.rows[piece.start - save.first : piece.end - save.first], self.pools
        return self.copier.submit(lambda: pools.gather_kv(rows, out), before_next=False)

    def abort(self, save: int, reason: AbortReason) -> None:
        """The save is given up."""
        self._must(SaveAbort(save, reason))

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
        pieces = [(p.kind, p.start, p.end, ring[p.block : p.block + p.bytes]) for p in restore.pieces]

        def copy() -> None:
            for kind, start, end, source in pieces:
                if kind is Kind.STATE:
                    pools.scatter_state(source, slot)
                    continue
                first, last = max(start, have), min(end, boundary)
                if first < last:
                    pools.scatter_kv(source, end - start, first - start, rows[first - have : last - have])

        event = self.copier.submit(copy, before_next=True)
        for piece in restore.pieces:
            self.retire(piece.block, event)
        return event

    def unhold(self, restore: Restore) -> None:
        """Ends the lock of a placed restore."""
        hold, restore.hold = restore.hold, None
        if hold is not None:
            self.tree.unlock(hold)

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


class _SavePorts:
    """The shim's ports, with the saves' share of the ring."""

    def __init__(self, shim: Shim) -> None:
        self._shim = shim
        self.take_room = shim.take_room_for_save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shim, name)


def _covers(pairs: list[tuple[int, int]], start: int, end: int) -> bool:
    """Whether the pairs, in order, cover [start, end)."""
    at = start
    for a, b in pairs:
        if a > at:
            return False
        at = max(at, b)
    return at >= end
