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
- `epoch`: of the weights, counted before and after each change. `stale_tree`: the tree may hold what older weights
  computed. What is in it when a change begins is such; it is good again when it is emptied, or when the weights turn
  out to be what they were, as after an update that was rejected. As long as the weights have no digest, nothing begins.

# Order
Rows and slots are taken last, in one tick, when all bytes are in the ring; SGLang's own streams do every write
to its pools. Messages that end something wait in `outbox` when the channel is full; others are dropped.

# Cancellation
Abort, finish, retraction, flush, weight updates, a lost daemon: each ends the machines concerned here and
now, and tells the daemon afterwards. An answer to something that ended finds nothing, and changes nothing.

# Errors
No exception leaves a hook. What is unexpected ends the session and all machines, so that nothing half done
stays; after three within an hour, the shim is off for good and the server goes on as if it were not there.

# Layers
The modules know nothing of SGLang's classes: what they need of them is `seam.Tree`, which each adapter has.
`talk` is the session, `requests` what the daemon is told of requests, `saves` and `restores` what one rank does for
the machines, `lockstep` what all ranks decide together; here is what SGLang calls.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ._channel_layout import AbortReason, CloseReason, Epoch, Outcome
from .link import Weights
from .lockstep import Lockstep
from .restore import Restore, RestoreState
from .save import SaveState
from .talk import NO_DIGEST
from .timing import Times
from .seam import Ending, Names

log = logging.getLogger(__name__)

_FAULTS = 3
# When weights that came in parts are taken for whole: nothing runs for so long, or anyway after so long.
_NAMED_IDLE_S, _NAMED_S = 0.2, 10.0
_FAULTS_WITHIN_S = 3600.0

F = TypeVar("F", bound=Callable[..., Any])


def hook(name: str, default: Any = None, *, begins: bool = False) -> Callable[[F], F]:
    """A method that SGLang calls: timed, and never raising. `begins`: it may begin a save or a restore."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Shim, *args: Any, **kwargs: Any) -> Any:
            if self.off:
                return default
            if begins:
                self.poke()
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


class Shim(Lockstep):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.off = False
        self.times = Times()
        self.generation = 0
        self._faults: list[float] = []
        self.model: Any = None
        """What the weights' digest is taken of."""
        self.name_weights: Callable[[], bytes | None] = lambda: None
        """Takes the digest of the weights, together with the other ranks."""
        self.named_widely = False
        """Ranks take part in it that do not share the tree."""
        self._unused = True
        """Since the tree was last emptied, nothing was computed that could be in it."""
        self._used_unnamed = False
        """Something was computed by weights that have no digest."""
        self._before: bytes | None = None
        """The digest of the weights that computed what is in a stale tree, where all of it is of the same."""
        self._unnamed_since: float | None = None

    def tick(self) -> None:
        """Once in each iteration of the scheduler, on all ranks, before it decides anything.

        Whatever fails in it, a reduction that is due is entered: the other ranks are in it, too.
        """
        if self.off:
            return
        began = time.perf_counter_ns()
        self._ticks += 1
        self._guarded(self._listen)
        if self._is_due():
            numbers = self._guarded(self._ballot) or self._blank()
            agreed = self._together(numbers)
            if agreed is None:
                return
            self._guarded(self._act, agreed)
        if self.restores:
            self._guarded(self._yield_room)
        self._guarded(self._speak)
        self.times.add("tick", time.perf_counter_ns() - began)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except Exception:
            self._fault("tick")
            return None

    def _listen(self) -> None:
        self.now = self._clock()
        if self.link.weights.digest is None and self.tree.load().running:
            self._used_unnamed = True
        self._may_tell(in_tick=True)
        if self.session is None:
            self._adopt()
        session = self.session
        if session is not None and self._is_alive(session):
            self._hear(session)
        if self.session is not None:
            self._flush()
            self._pump_saves()
        if self.restores:
            self._pump_restores()
        # Who waits for an answer comes first.
        self._pump_closing()

    def _together(self, numbers: list[int]) -> list[int] | None:
        """The smallest of all ranks at each place; None: the others cannot be reached, and SGLang will not go on."""
        began = time.perf_counter_ns()
        try:
            return self.ranks.minimum(numbers)
        except Exception:
            log.exception("engram: off: the other ranks of this server are gone")
            self.shutdown()
            return None
        finally:
            if not self.alone:
                self.times.add("reduction", time.perf_counter_ns() - began)

    def _speak(self) -> None:
        self._ring()
        self._collect()
        if self._ticks % 64 == 1:
            beat = self.tree.load()
            beat.ticks, beat.hooks = self._ticks, self.times.snapshot()
            self.link.beat = beat

    @hook("enqueue", begins=True)
    def enqueue(self, req: Any, names: Names, tokens: Any, maximum: int, device_boundary: int, device_kv: int) -> None:
        """A request is put into the waiting queue, for the first time or again.

        `tokens`: all that it has. `maximum`: the largest useful boundary.
        """
        self.now = self._clock()
        self._may_tell()
        request = self.requests.get(names.rid)
        if request is not None and request.req is not req:
            # The rid came again, with another request behind it.
            self._close(request, None)
            request = None
        if request is None:
            request = self._add(names, req)
        else:
            request.attempt += 1
            self._end_restore(request, Outcome.ABORTED)
            if request.epoch != self.epoch:
                # Its KV is computed anew, by the weights of now.
                self._reopen(request)
        request.tokens = tokens
        if not names.saved or not self.joined or not self.settings.restore or not self.is_known():
            return
        page = self.tree.page_size
        maximum = min(maximum, len(tokens)) // page * page
        if maximum - device_boundary < max(1, self.settings.minimum_tokens):
            return
        restore = Restore(request, request.attempt, maximum, device_boundary, device_kv, self.now, self._ticks)
        request.restore = restore
        self.restores.append(restore)
        self.counts["lookups"] += 1
        if self.session is None:
            restore.fail(self, Outcome.SESSION_END)
            return
        self._ask(restore)

    @hook("gate", default=True)
    def may_admit(self, rid: str) -> bool:
        """Whether a waiting request may be admitted. Asked each time it is considered."""
        self.used()
        request = self.requests.get(rid)
        if request is None or request.restore is None:
            return True
        restore = request.restore
        if not restore.gate_open:
            restore.consider(self, self.now)
            # The tick of this iteration is over, and the bytes are to be here by the next one.
            self._ring()
            return False
        return not self._waits_for_others(restore)

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

    @hook("inserted", begins=True)
    def inserted(self, req: Any, names: Names, tokens: Any, boundary: int, node: int, branch: bool) -> None:
        """A state at `boundary` of the request's tokens is in the tree, at `node`."""
        self.now = self._clock()
        self._state(req, names, tokens, boundary, node, branch)

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
        self.stale_tree, self._unused = False, True
        self._known.clear()
        for save in list(self.saves.values()):
            if save.state in (SaveState.OFFERED, SaveState.GATHERING):
                save.end(self, AbortReason.EVICTED, self.now)
                self._end_save(save, "reset")
        for restore in list(self.restores):
            restore.hold = None
            self.forget_stock(restore)
            self._end(restore, Outcome.ABORTED if restore.state is not RestoreState.PLACED else Outcome.USED)

    @hook("weights")
    def weights_change(self) -> None:
        """The weights are about to change, perhaps: from now on nothing of the old ones is saved or restored."""
        self.epoch += 1
        known = self.link.weights.digest
        if known is None and self._used_unnamed:
            # What is in the tree is of several weights.
            self._before = None
        elif known is not None and not self.stale_tree:
            self._before = known
        elif known is not None and known != self._before:
            self._before = None
        self.stale_tree = self.stale_tree or not self._unused or self.tree.load().running > 0
        self._used_unnamed, self._unnamed_since = False, None
        self.link.weights = Weights(self.epoch, None)
        for save in list(self.saves.values()):
            save.end(self, AbortReason.STALE_EPOCH, self.now)
            self._end_save(save, "stale_epoch")
        for restore in list(self.restores):
            if restore.state is not RestoreState.PLACED:
                self._end(restore, Outcome.ABORTED)
        if self.session is not None:
            self._must(Epoch(self.epoch, NO_DIGEST))
            self._ring()

    @hook("weights")
    def weights_changed(self, digest: bytes) -> None:
        """The weights are known again."""
        self.link.weights = Weights(self.epoch, digest)
        self._unnamed_since = None
        if self.stale_tree and digest == self._before:
            self.stale_tree = False
            log.info("engram: the weights are what they were; what is cached is good")
        elif self.stale_tree:
            log.warning("engram: what is cached is of other weights; nothing is saved or restored until it is flushed")
        if self.session is not None:
            self._must(Epoch(self.epoch, digest))
            self._ring()

    @hook("weights")
    def weights_came(self) -> None:
        """Some of the weights came; more may follow. They get a digest later, see `names_weights`."""
        self._unnamed_since = self._clock()

    def used(self) -> None:
        """Something is about to be computed, or to come into the tree."""
        self._unused = False
        if self.link.weights.digest is None:
            self._used_unnamed = True

    def names_weights(self) -> bool:
        """Whether now is the time to take a digest of the weights, which takes milliseconds and waits for the device."""
        since = self._unnamed_since
        if since is None:
            return False
        passed, load = self.now - since, self.tree.load()
        return passed > (_NAMED_S if load.running or load.waiting else _NAMED_IDLE_S)

    def _weights_named(self) -> None:
        """All ranks take it now: each gets to the meeting in it, whatever is wrong with it."""
        digest = self.name_weights()
        self._unnamed_since = None
        if digest is not None:
            self.weights_changed(digest)

    @hook("busy", default=False)
    def is_busy(self) -> bool:
        """Whether raw rows or slots are held across ticks. Never because of a save."""
        return any(restore.stock is not None for restore in self.restores)

    @hook("shutdown")
    def shutdown(self) -> None:
        """The server ends."""
        self._leave(CloseReason.SHUTDOWN)
        self._end_all("shutdown")
        self.link.stop()
        self.off = True

    def _fault(self, name: str) -> None:
        now = self._clock()
        self._faults = [at for at in self._faults if now - at < _FAULTS_WITHIN_S] + [now]
        self.counts["faults"] += 1
        log.exception("engram: fault %d in %s; leaving the daemon", len(self._faults), name)
        try:
            self._leave(CloseReason.FAILED)
        except Exception:
            log.exception("engram: fault while leaving the daemon")
            session, self.session = self.session, None
            if session is not None:
                session.left.set()
            self._faults = [now] * _FAULTS
            # Their room in the ring went with the session.
            for save in self.saves.values():
                save.failure = save.failure or "fault"
            for restore in self.restores:
                restore.failed = restore.failed or Outcome.SESSION_END
        if len(self._faults) < _FAULTS:
            return
        self.gives_up = True
        if self.alone:
            log.error("engram: off after %d faults; the server goes on without it", len(self._faults))
            self.off = True
            # A session that nobody would take keeps the ring, and shows a worker that is none.
            self.link.stop()
            try:
                self._end_all("off")
            except Exception:
                log.exception("engram: fault while ending")
