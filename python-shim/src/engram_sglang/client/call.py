"""What is asked and how its answer is read, apart from how both travel.

`Client` and `AsyncClient` only move bytes: what they send is a `Request`, made here and in the modules
of the things that are asked for, and what comes back goes through `settle` or a `Source`.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote, urlencode

from .errors import EngramError, ProtocolError, TimedOut, Unreachable, error_in, error_of
from .records import Record

T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)
R = TypeVar("R", bound=Record)

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Upload:
    """A body that is sent as it is read."""

    length: int
    pieces: Callable[[], Iterator[bytes]]


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    method: str
    target: str
    """Path and query, encoded."""
    body: bytes | Upload | None = None
    kind: str = JSON
    accept: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    repeatable: bool = False
    """Asking twice is the same as asking once: it may be sent again when a connection turns out broken."""
    long: bool = False
    """It generates, or moves a whole snapshot: it has the longer of the client's times."""
    patience: float = 0
    """It has at least so many seconds, whatever the client's times."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def length(self) -> int | None:
        """Of the body."""
        return self.body.length if isinstance(self.body, Upload) else None if self.body is None else len(self.body)

    def lines(self, host: str, token: str | None) -> list[tuple[str, str]]:
        """All header lines."""
        lines = [("Host", host), ("Accept", self.accept), ("X-Request-Id", self.id), *self.headers]
        if token is not None:
            lines.append(("Authorization", f"Bearer {token}"))
        if self.length is not None:
            lines += [("Content-Type", self.kind), ("Content-Length", str(self.length))]
        elif self.method not in ("GET", "DELETE"):
            lines.append(("Content-Length", "0"))
        return lines


@dataclass(frozen=True)
class Answer:
    """One HTTP answer, whole, or its head alone."""

    status: int
    headers: Mapping[str, str]
    """Names in small letters."""
    request_id: str
    body: bytes = b""

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    def is_a(self, kind: str) -> bool:
        """Whether its body is declared to be of this kind."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower() == kind

    def with_body(self, body: bytes) -> Answer:
        return dataclasses.replace(self, body=body)

    def json(self) -> Any:
        """Its body; raises ProtocolError when it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise self.strange("it is no JSON") from None

    def strange(self, why: str) -> ProtocolError:
        """The error of an answer that no daemon of this version gives."""
        text = f"The answer is not understood: {why}"
        return ProtocolError(text, status=self.status, type="protocol", request_id=self.request_id)

    def error(self) -> EngramError:
        """The error that it is."""
        retry_after = self.headers.get("retry-after")
        return error_of(self.status, self.body, request_id=self.request_id, retry_after=retry_after)


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request with one JSON answer."""

    request: Request
    read: Callable[[Any], T]
    """From the JSON; raises ProtocolError."""
    accepts: frozenset[int] = frozenset()
    """Statuses that are an answer, too, where it is one to `read`."""

    def settle(self, answer: Answer) -> T:
        """What an answer says, or its error raised."""
        if not answer.good and answer.status not in self.accepts:
            raise answer.error()
        value = answer.json() if answer.good else None
        # Servers of the compatible surface say failure with a good status.
        if isinstance(value, dict) and value.get("success") is False:
            raise answer.error()
        try:
            return self.read(value if answer.good else answer.json())
        except ProtocolError as error:
            if answer.good:
                raise answer.strange(error.message) from None
            raise answer.error() from None


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list."""

    rows: tuple[T, ...]
    total: int
    """Rows of the whole list."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Pages(Generic[T]):
    """A list that is asked for in pages."""

    page: Callable[[int], Call[Page[T]]]
    """The page from this row on."""
    offset: int = 0

    def after(self, offset: int, page: Page[T]) -> int | None:
        """Where the next page begins; None: there is none."""
        end = offset + len(page.rows)
        return end if page.rows and end < page.total else None


class Source(Protocol[S_co]):
    """Makes things of a streamed answer; and says what to ask for, and what when it breaks."""

    def request(self) -> Request:
        """What to send now."""

    def opened(self, answer: Answer) -> None:
        """A good answer begins."""

    def feed(self, piece: bytes) -> Iterable[S_co]:
        """What these bytes complete."""

    def ended(self) -> bool:
        """No more bytes: whether that is the end of all; else the answer is lost. Raises what is wrong with it."""

    @property
    def over(self) -> bool:
        """All has come; bytes after it mean nothing."""

    def lost(self, error: EngramError) -> float:
        """There is no answer any more: how long to wait before asking again; else raises."""


def check_stream(answer: Answer) -> None:
    """Raises what is wrong with the head of a streamed answer (with its whole body, if it is not one)."""
    if not answer.good:
        raise answer.error()
    if answer.is_a(EVENTS):
        return
    value = answer.json()
    if isinstance(value, dict) and (value.get("success") is False or "error" in value):
        raise answer.error()
    raise answer.strange("it is no stream of events")


def is_stream(answer: Answer) -> bool:
    """Whether the body is to be read as it comes."""
    return answer.good and answer.is_a(EVENTS)


# --- Making requests ------------------------------------------------------------------------------


def path(*parts: str | int) -> str:
    """A path of these parts, each encoded."""
    for part in parts:
        if part == "":
            raise ValueError("a name must not be empty")
    return "".join("/" + quote(str(part), safe="") for part in parts)


def target(base: str, **query: str | int | bool | None) -> str:
    """A path with what is given of a query."""
    given = {name: str(it).lower() if isinstance(it, bool) else it for name, it in query.items() if it is not None}
    return f"{base}?{urlencode(given, quote_via=quote)}" if given else base


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: it for name, it in fields.items() if it is not None}


def dump(body: Mapping[str, Any]) -> bytes:
    """A JSON body; raises ValueError or TypeError for what is none."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def ids(tokens: Iterable[int]) -> list[int]:
    """Token ids of any kind of list, an array too."""
    return [int(token) for token in tokens]


def get(where: str, read: Callable[[Any], T]) -> Call[T]:
    """A question."""
    return Call(Request("GET", where, repeatable=True), read)


def post(where: str, body: Mapping[str, Any], read: Callable[[Any], T], *, repeatable: bool = False,
         long: bool = False) -> Call[T]:
    """An order."""
    return Call(Request("POST", where, dump(body), repeatable=repeatable, long=long), read)


def flat(record: type[R]) -> Callable[[Any], R]:
    """Reads a record that lies beside `success`."""

    def read(value: Any) -> R:
        if isinstance(value, dict):
            value = {name: it for name, it in value.items() if name != "success"}
        return record.read(value)

    return read


def rows(record: type[R], name: str) -> Callable[[Any], Page[R]]:
    """Reads a page whose rows have this name."""

    def read(value: Any) -> Page[R]:
        if not isinstance(value, dict) or not isinstance(value.get(name), list):
            raise ProtocolError(f"`{name}` is no list", type="protocol")
        total = value.get("total", len(value[name]))
        if type(total) is not int:
            raise ProtocolError("`total` is no number", type="protocol")
        found = tuple(record.read(it, f"{name}[{at}]") for at, it in enumerate(value[name]))
        return Page(found, total, {key: it for key, it in value.items() if key not in (name, "total", "success")})

    return read


def in_stream(value: Mapping[str, Any], request_id: str | None) -> EngramError:
    """The error that an event of a stream tells."""
    return error_in(value, status=None, request_id=request_id)


# --- When there is no answer ----------------------------------------------------------------------


def broken_off(answer: Answer) -> Unreachable:
    """The error of a streamed answer that ended too early."""
    text = "The answer broke off"
    return Unreachable(text, type="broken_off", retryable=True, request_id=answer.request_id)


def broken(error: BaseException, place: object, request: Request) -> EngramError:
    """What the failure of a connection is for the caller."""
    if isinstance(error, EngramError):
        error.request_id = error.request_id or request.id
        return error
    # asyncio's is the builtin one only from Python 3.11 on.
    if isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError":
        text = f"{place} does not answer in time; what was asked for may still be done"
        return TimedOut(text, type="client_timeout", retryable=True, request_id=request.id)
    if isinstance(error, OSError):
        text = f"No Engram daemon answers at {place}: {error.strerror or error or type(error).__name__}"
        return Unreachable(text, type="unreachable", retryable=True, request_id=request.id)
    text = f"The answer is not understood: {error or type(error).__name__}"
    return ProtocolError(text, type="protocol", request_id=request.id)
