"""What happens in the daemon, as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .call import EVENTS, Answer, Request, check_stream, target
from .errors import EngramError, ProtocolError
from .records import Record
from .sse import SseEvent, SseParser

EVENT_MAX = 1 << 20
"""Bytes of one event."""
SILENCE_S = 45.0
"""The daemon shows a sign of life every 15 seconds; a connection without one for so long is broken."""
PAUSE_S, PAUSE_MAX_S = 0.1, 10.0
"""Before the first try to come back, and before the later ones."""


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """Something that happened. Which fields an event has follows from its name."""

    name: str
    """`saved`, `durable`, `restored`, `evicted`, `deleted`, `turn_finished`, `budget_changed`, `attached`,
    `detached`; or `missed`."""
    id: str | None = None
    """To go on behind it: `events(last_event_id=...)`."""
    at: float | None = None
    """Unix time in seconds."""
    snapshot_id: str | None = None
    conversation_id: str | None = None
    turn_number: int | None = None
    boundary: int | None = None
    reused: int | None = None
    tier: str | None = None
    session: str | None = None
    model_name: str | None = None
    reason: str | None = None
    count: int | None = None
    """Of `missed`: how many events were; None: nobody knows, as after a restart of the daemon."""

    @classmethod
    def of(cls, event: SseEvent) -> Event:
        """Raises ProtocolError."""
        try:
            fields = json.loads(event.data)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ProtocolError("an event is no JSON object", type="protocol")
        # What a later version says of an event must not hide how it is called.
        read = cls.read({**fields, "name": event.event, "id": event.id}, event.event)
        kept = read.extra.keys() | {"name", "id"}
        return replace(read, extra={name: it for name, it in fields.items() if name in kept})


class Watch:
    """Reads events, and comes back where it was when the connection breaks."""

    over = False

    def __init__(
        self, types: Iterable[str] | str | None = None, conversation_id: str | None = None,
        last_event_id: str | None = None, reconnect_for: float = float("inf"),
    ) -> None:
        """Events from now on, or behind `last_event_id`. `reconnect_for`: seconds without a connection until the
        error is raised; 0: at once. The first connection is tried once."""
        self._types = types if types is None or isinstance(types, str) else ",".join(types)
        self._conversation, self._last, self._patience = conversation_id, last_event_id, reconnect_for
        self._lost_at: float | None = None
        self._pause = PAUSE_S
        self._was_open = False
        self._gap = False
        self._parser = SseParser(EVENT_MAX)

    def request(self) -> Request:
        where = target("/v1/events", types=self._types, conversation_id=self._conversation)
        headers = () if self._last is None else (("Last-Event-ID", self._last),)
        return Request("GET", where, accept=EVENTS, headers=headers, repeatable=True, patience=SILENCE_S)

    def opened(self, answer: Answer) -> None:
        check_stream(answer)
        self._parser = SseParser(EVENT_MAX)
        # Where no event has come yet there is no place to come back to.
        self._gap = self._was_open and self._last is None
        self._was_open = True

    def feed(self, piece: bytes) -> list[Event]:
        self._lost_at, self._pause = None, PAUSE_S
        found = [Event(name="missed")] if self._gap else []
        self._gap = False
        for event in self._parser.feed(piece):
            found.append(Event.of(event))
            self._last = event.id or self._last
        return found

    def ended(self) -> bool:
        # The daemon ended, or somebody between: it may come back.
        return False

    def lost(self, error: EngramError) -> float:
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        for_good = not self._was_open or not error.retryable
        if for_good or now - self._lost_at >= self._patience:
            raise error
        pause, self._pause = self._pause, min(self._pause * 2, PAUSE_MAX_S)
        return max(pause, error.retry_after or 0)


def events(
    types: Iterable[str] | str | None = None, conversation_id: str | None = None, *, last_event_id: str | None = None,
    reconnect_for: float = float("inf"),
) -> Watch:
    """What happens from now on, or behind `last_event_id`; all of it, or only events of some names, or of one
    conversation. Entering `with` connects. A broken connection is made again, and what was missed comes then, as
    far as the daemon still has it (else an event `missed` says so), for `reconnect_for` seconds."""
    return Watch(types, conversation_id, last_event_id, reconnect_for)
