"""Requests of SGLang, and what the daemon is told of them: that they are there, their tokens, their end."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from . import channel
from ._channel_layout import RequestClose, RequestFlags, RequestOpen, TurnFinished
from .link import Session
from .restore import Restore
from .talk import Talk
from .seam import Ending, Names

_SESSION, _EXTRA_KEY = int(RequestFlags.HAS_SESSION), int(RequestFlags.HAS_EXTRA_KEY)
_CACHE_SALT, _TENANT = int(RequestFlags.HAS_CACHE_SALT), int(RequestFlags.HAS_TENANT)
_NOT_SAVED = int(RequestFlags.NOT_SAVED)

# Time in which token ids are told in one hook, and in one tick, looked at after each so many of them. What is left
# follows with the next ones.
_TELL_NS, _TELL_IN_TICK_NS, _TELL_AT_ONCE = 20_000, 40_000, 8192
# Turns that wait to be told; more than a daemon that lives lets wait.
_TURNS = 1 << 12


class Request:
    """One request of SGLang, from its arrival to its end."""

    __slots__ = ("attempt", "epoch", "heard", "names", "number", "opened", "req", "restore", "saves", "sent", "tokens")

    def __init__(self, number: int, names: Names, req: Any, epoch: int) -> None:
        self.number, self.names, self.req, self.epoch = number, names, req, epoch
        self.attempt = 0
        self.opened: Session | None = None
        """The session in which the daemon knows it as it is now."""
        self.heard: Session | None = None
        """The last one in which the daemon heard of it, and is to hear that it is over."""
        self.sent = 0
        self.tokens: Any = None
        self.restore: Restore | None = None
        self.saves = 0


class Requests(Talk):
    """The layer above the session: the daemon knows requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.requests: dict[str, Request] = {}
        """What SGLang knows, by rid. Each is opened at the daemon when there is something to say of it."""
        self._numbers = 0
        self._tell_ns = _TELL_NS
        self._turns: deque[tuple[Request, Any, Ending]] = deque()
        """Turns that the daemon did not hear of yet, in the order in which they ended."""
        self._closing: list[Request] = []
        """Over, but not all that the daemon should hear of them before is said."""

    def _may_tell(self, in_tick: bool = False) -> None:
        """A hook or a tick begins that may tell tokens."""
        self._tell_ns = _TELL_IN_TICK_NS if in_tick else _TELL_NS

    def _left(self, session: Session) -> None:
        super()._left(session)
        self._turns.clear()
        self._closing.clear()
        for request in self.requests.values():
            request.opened, request.sent = None, 0

    def _add(self, names: Names, req: Any) -> Request:
        self._numbers += 1
        request = self.requests[names.rid] = Request(self._numbers, names, req, self.epoch)
        return request

    def _open(self, request: Request) -> bool:
        """The daemon knows the request."""
        if request.opened is self.session and self.session is not None:
            return True
        names = request.names
        # Plain numbers: arithmetic of enum's flags takes longer than all the rest here.
        flags = _SESSION * (names.session_id is not None) | _EXTRA_KEY * (names.extra_key is not None)
        flags |= _CACHE_SALT * (names.cache_salt is not None) | _TENANT * bool(self.settings.tenant)
        flags |= _NOT_SAVED * (not names.saved)
        opened = self._push(
            RequestOpen(
                req=request.number,
                attempt=request.attempt,
                flags=flags,  # type: ignore[arg-type]
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
            request.opened = request.heard = self.session
            request.sent = 0
        return opened

    def _tell_tokens(self, request: Request, tokens: Any, upto: int) -> bool:
        """Tells tokens up to `upto`, as far as may be told at once. True: the daemon has all of them."""
        if not self._open(request):
            return False
        session = self.session
        if session is None:
            return False
        if request.sent < upto and self._tell_ns > 0:
            if self.outbox:
                return False
            try:
                self._push_tokens(session, request, tokens, upto)
            except channel.Broken:
                self._leave(CloseReason.BROKEN_PEER)
                return False
        return request.sent >= upto

    def _push_tokens(self, session: Session, request: Request, tokens: Any, upto: int) -> None:
        """Writes tokens up to `upto`, as far as there is room and may be told at once. Raises Broken."""
        parts = tokens if isinstance(tokens, tuple) else (tokens,)
        first, began = 0, time.perf_counter_ns()
        until = began + self._tell_ns
        for part in parts:
            last = min(upto, first + len(part))
            if first <= request.sent < last:
                with memoryview(part) as view:
                    while request.sent < last and self._tell_ns > 0:
                        start = request.sent
                        end = min(last, start + _TELL_AT_ONCE)
                        with view[start - first : end - first] as rest:
                            request.sent += session.end.tx.push_tokens(request.number, start, rest)
                        self._tell_ns = until - time.perf_counter_ns()
                        if request.sent < end:
                            return
            first += len(part)

    def _over(self, request: Request) -> None:
        """The request is over: what the layers above have of it ends."""

    def _close(self, request: Request, ending: Ending | None) -> None:
        """The request is over."""
        if self.requests.get(request.names.rid) is request:
            del self.requests[request.names.rid]
        self._over(request)
        request.req = None
        tokens, request.tokens = request.tokens, None
        if self.session is None:
            return
        if ending is not None and request.names.saved:
            if len(self._turns) < _TURNS:
                self._turns.append((request, tokens, ending))
            else:
                self.counts["turns_dropped"] += 1
        self._closing.append(request)
        self._pump_closing()

    def _has_more_to_say(self, request: Request) -> bool:
        """Whether the layers above have something to say of it, which the daemon would not take once it is closed."""
        return False

    def _pump_closing(self) -> None:
        """The daemon hears of what is over: of turns one after another, as it counts them, and behind their tokens. They
        do not wait in the outbox, where all that must be said would wait behind those."""
        while self._turns:
            request, tokens, ending = self._turns[0]
            if not self._tell_tokens(request, tokens, ending.total_tokens) or not self._push(_turn_of(request, ending)):
                break
            self._turns.popleft()
        if not self._closing or self.session is None:
            return
        untold = {id(request) for request, _, _ in self._turns}
        closing, self._closing = self._closing, []
        for request in closing:
            if id(request) in untold or self._has_more_to_say(request):
                self._closing.append(request)
            elif request.heard is self.session:
                self._must(RequestClose(request.number))


def _turn_of(request: Request, ending: Ending) -> TurnFinished:
    cached = min(ending.cached_tokens, ending.prompt_tokens)
    return TurnFinished(
        req=request.number,
        attempt=request.attempt,
        prompt_tokens=ending.prompt_tokens,
        total_tokens=ending.total_tokens,
        cached_tokens=cached,
        prefilled_tokens=ending.prompt_tokens - cached,
        finish=ending.finish,
    )
