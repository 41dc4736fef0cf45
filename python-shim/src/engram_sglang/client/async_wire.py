"""HTTP/1.1 for `AsyncClient`: asyncio's streams over TCP or a Unix socket, by the rules of `sync_wire`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from . import http1
from .call import Answer, Request, Upload, broken
from .deadline import Deadline
from .errors import EngramError, ProtocolError
from .settings import Settings
from .sync_wire import IDLE_MAX

T = TypeVar("T")


class Line:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: Deadline) -> None:
        self.reader, self.writer, self.deadline = reader, writer, deadline
        self.fresh = True
        self.spoiled = False
        """Only a part of a request was sent: no other can follow."""

    @classmethod
    async def connect(cls, settings: Settings, deadline: Deadline) -> Line:
        address = settings.address
        if address.path is None:
            opening = asyncio.open_connection(address.host, address.port, limit=http1.HEAD_MAX)
        else:
            opening = asyncio.open_unix_connection(address.path, limit=http1.HEAD_MAX)
        reader, writer = await asyncio.wait_for(opening, min(deadline.left(), settings.timeout))
        return cls(reader, writer, deadline)

    def end(self) -> None:
        # Not `close`: who waits for an answer that nobody reads any more should know it now.
        self.writer.transport.abort()

    async def is_quiet(self) -> bool:
        """Nothing came since the last answer: neither an end nor bytes that nobody asked for."""
        news = asyncio.ensure_future(self.reader.read(1))
        # The loop looks at its sockets in the first round, and wakes the reader in the second.
        for _ in range(3):
            await asyncio.sleep(0)
        if news.done():
            news.exception()
            return False
        news.cancel()
        await asyncio.wait([news])
        return True

    async def within(self, work: Awaitable[T]) -> T:
        return await asyncio.wait_for(work, self.deadline.left())

    async def ask(self, request: Request, settings: Settings) -> tuple[int, http1.Headers, bool]:
        """Sends a request and reads the head of its answer."""
        lines = [f"{request.method} {request.target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in settings.lines(request)]
        for line in lines:
            if "\r" in line or "\n" in line:
                raise ValueError("a header must be one line")
        body = request.body
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (body if isinstance(body, bytes) else b""))
        if isinstance(body, Upload):
            first = await self._upload(body)
        else:
            await self.within(self.writer.drain())
            first = await self.within(self._head())
        for _ in range(http1.INTERIM_MAX):
            status, headers, stays = http1.head(first)
            if status >= 200:
                return status, headers, stays
            first = await self.within(self._head())
        raise http1.wrong("it never begins")

    async def _upload(self, body: Upload) -> bytes:
        """Sends it, and gives the head that comes; if that comes early, the rest is not sent: who refuses does not
        listen to the end."""
        head = asyncio.ensure_future(self._head())
        try:
            for piece in body.pieces():
                # A socket that takes all at once lets nobody else have a turn.
                await asyncio.sleep(0)
                self.spoiled = head.done()
                if self.spoiled:
                    break
                self.writer.write(piece)
                try:
                    await self.within(self.writer.drain())
                except ConnectionError:
                    self.spoiled = True
                    break
                self.deadline.renew()
            return await self.within(head)
        finally:
            if not head.cancel() and not head.cancelled():
                head.exception()

    async def _head(self) -> bytes:
        try:
            return await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise http1.wrong("its head breaks off") from None
            raise ConnectionResetError("the connection ended before an answer") from None
        except asyncio.LimitOverrunError:
            raise http1.wrong("its head is too large") from None


class Response:
    """An answer whose body is still to come."""

    def __init__(
        self, pool: Pool, line: Line, request: Request, status: int, headers: http1.Headers, stays: bool,
    ) -> None:
        self._pool, self._line, self._request, self._stays = pool, line, request, stays
        plain = http1.plain(headers)
        self.head = Answer(status, plain, plain.get("x-request-id", request.id))
        self._body = http1.Body(status, headers)
        self._taken = 0
        self._closed = False

    async def piece(self, limit: int | None = None) -> bytes:
        """The next piece of the body; empty: all was read. The deadline begins anew after each, unless there is a
        limit for all of them."""
        try:
            piece = await self._line.within(self._piece())
        except Exception as error:
            raise broken(error, self._pool.settings.address, self._request) from error
        self._taken += len(piece)
        if limit is None:
            self._line.deadline.renew()
        elif self._taken > limit:
            raise self.head.strange(f"it is larger than {limit} bytes")
        return piece

    async def _piece(self) -> bytes:
        piece = b""
        while not piece and not self._body.over:
            data = await self._line.reader.read(http1.PIECE)
            if not data:
                self._body.ended()
            piece = self._body.feed(data)
        return piece

    async def whole(self, limit: int) -> Answer:
        """With all of its body."""
        async with self:
            found = []
            while piece := await self.piece(limit):
                found.append(piece)
            return self.head.with_body(b"".join(found))

    async def wind_up(self) -> None:
        """What matters has come: reads the end of the body, if it comes soon."""
        self._line.deadline = Deadline(http1.END_S)
        try:
            await self.piece()
        except EngramError:
            pass

    def close(self) -> None:
        """Keeps the connection if all was read; else ends it, which tells the daemon."""
        if not self._closed:
            self._closed = True
            self._pool.take_back(self._line, self._body.clean and self._stays)

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Pool:
    """The connections of a client, all of one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._idle: list[Line] = []
        self._closed = False

    async def open(self, request: Request) -> Response:
        """Sends a request and reads the head of its answer."""
        while True:
            deadline = Deadline(self.settings.seconds(request))
            line: Line | None = None
            try:
                line = await self._line(deadline)
                return Response(self, line, request, *await line.ask(request, self.settings))
            except BaseException as error:
                if line is not None:
                    line.end()
                    if request.repeatable and not line.fresh and isinstance(error, ConnectionError):
                        self._drop_idle()
                        continue
                if not isinstance(error, (OSError, asyncio.TimeoutError, ProtocolError)):
                    raise
                raise broken(error, self.settings.address, request) from error

    async def _line(self, deadline: Deadline) -> Line:
        if self._closed:
            raise ValueError("the client is closed")
        while self._idle:
            line = self._idle.pop()
            quiet = False
            try:
                quiet = await line.is_quiet()
            finally:
                if not quiet:
                    line.end()
            if quiet:
                line.deadline, line.fresh = deadline, False
                return line
        return await Line.connect(self.settings, deadline)

    def take_back(self, line: Line, keep: bool) -> None:
        if keep and not line.spoiled and not self._closed and len(self._idle) < IDLE_MAX:
            self._idle.append(line)
        else:
            line.end()

    def _drop_idle(self) -> None:
        # What broke one of them broke all.
        idle, self._idle = self._idle, []
        for line in idle:
            line.end()

    async def close(self) -> None:
        """Ends what is idle; what is in use ends with its use."""
        self._closed = True
        self._drop_idle()
        # The loop closes their sockets in its next round.
        await asyncio.sleep(0)
