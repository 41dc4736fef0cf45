"""Server-Sent Events from bytes, as the HTML standard defines them, and bounded."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ProtocolError


@dataclass(frozen=True)
class SseEvent:
    """One event."""

    event: str
    """`message` where none is named."""
    data: str
    id: str | None
    """None where the event does not give one."""


class SseParser:
    """Takes bytes as they come and gives the events that they complete."""

    def __init__(self, limit: int) -> None:
        """An event of more than `limit` bytes is refused, however many lines it has."""
        self._limit = limit
        self._rest = bytearray()
        self._first = True
        self._after_cr = False
        self._forget()

    def _forget(self) -> None:
        self._event, self._id, self._size = "", None, 0
        self._data: list[str] = []

    _id: str | None

    def feed(self, piece: bytes) -> list[SseEvent]:
        """Raises ProtocolError for an event that is too large, or no UTF-8."""
        if not piece:
            return []
        ends_with_cr = piece.endswith(b"\r")
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_cr = ends_with_cr
        found = []
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        # The end of a line that began in an earlier piece.
        if len(lines) > 1:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += lines.pop()
        for line in lines:
            self._bound(len(line))
            event = self._line(line)
            if event is not None:
                found.append(event)
        self._bound(len(self._rest))
        return found

    def _bound(self, more: int) -> None:
        if self._size + more > self._limit:
            raise ProtocolError(f"an event is larger than {self._limit} bytes", type="protocol")

    def _line(self, line: bytes) -> SseEvent | None:
        if self._first:
            self._first, line = False, line.removeprefix(b"\xef\xbb\xbf")
        self._size += len(line)
        if not line:
            found = SseEvent(self._event or "message", "\n".join(self._data), self._id) if self._data else None
            self._forget()
            return found
        try:
            name, _, value = line.decode().partition(":")
        except UnicodeDecodeError:
            raise ProtocolError("an event is no UTF-8", type="protocol") from None
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None
