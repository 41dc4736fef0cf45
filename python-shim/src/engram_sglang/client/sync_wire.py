"""HTTP/1.1 for `Client`, over TCP or a Unix socket, with a time for all of an answer: `http.client` writes requests and
reads heads.

An idle connection is kept, and used again while nothing came on it: a daemon that closed it has
nothing more to say. One that breaks all the same before an answer begins is replaced once, for
requests that may be sent twice.
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import threading
from typing import IO, Any

from . import http1
from .call import Answer, Request, Upload, broken
from .deadline import Deadline
from .errors import EngramError, ProtocolError
from .settings import Settings

IDLE_MAX = 8
"""Connections that are kept for later."""


class _Incoming(io.RawIOBase):
    """What comes on a socket, for as long as the deadline lets it."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._line.socket.settimeout(self._line.deadline.left())
        return self._line.socket.recv_into(buffer)


class Line:
    """A connection, and what `http.client` takes for its socket."""

    def __init__(self, settings: Settings, deadline: Deadline) -> None:
        """Connects."""
        self.deadline = deadline
        self.fresh = True
        self.spoiled = False
        """Only a part of a request was sent: no other can follow."""
        address, patience = settings.address, min(deadline.left(), settings.timeout)
        if address.path is None:
            self.socket = socket.create_connection((address.host, address.port), patience)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.socket.settimeout(patience)
                self.socket.connect(address.path)
            except BaseException:
                self.socket.close()
                raise
        # Only a name: it never connects by itself.
        self.http = http.client.HTTPConnection("localhost")
        self.http.auto_open = 0

    def makefile(self, *_: object) -> IO[bytes]:
        # A new one for each answer: `http.client` closes them.
        self.file = io.BufferedReader(_Incoming(self), http1.PIECE)
        return self.file

    def sendall(self, data: bytes) -> None:
        self.socket.settimeout(self.deadline.left())
        self.socket.sendall(data)

    def close(self) -> None:
        # Asked by `http.client` while the body is still to be read.
        pass

    def end(self) -> None:
        self.socket.close()

    def is_quiet(self) -> bool:
        """Nothing came since the last answer: neither an end nor bytes that nobody asked for."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def ask(self, request: Request, settings: Settings) -> http.client.HTTPResponse:
        """Sends a request and reads the head of its answer."""
        link = self.http
        link.sock = self
        link.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in settings.lines(request):
            link.putheader(name, value)
        body = request.body
        link.endheaders(body if isinstance(body, bytes) else None)
        if isinstance(body, Upload):
            self._upload(body)
        return link.getresponse()

    def _upload(self, body: Upload) -> None:
        for piece in body.pieces():
            # Who refuses does not listen to the end: the answer says why.
            self.spoiled = not self.is_quiet()
            if self.spoiled:
                return
            try:
                self.sendall(piece)
            except ConnectionError:
                self.spoiled = True
                return
            self.deadline.renew()


class Response:
    """An answer whose body is still to come."""

    def __init__(self, pool: Pool, line: Line, request: Request, raw: http.client.HTTPResponse) -> None:
        self._pool, self._line, self._request, self._raw = pool, line, request, raw
        headers = http1.plain(raw.headers)
        self.head = Answer(raw.status, headers, headers.get("x-request-id", request.id))
        try:
            self._body = http1.Body(raw.status, raw.headers)
        except BaseException:
            raw.close()
            raise
        self._taken = 0
        self._closed = False

    def piece(self, limit: int | None = None) -> bytes:
        """The next piece of the body; empty: all was read. The deadline begins anew after each, unless there is a
        limit for all of them."""
        try:
            piece = self._piece()
        except Exception as error:
            raise broken(error, self._pool.settings.address, self._request) from error
        self._taken += len(piece)
        if limit is None:
            self._line.deadline.renew()
        elif self._taken > limit:
            raise self.head.strange(f"it is larger than {limit} bytes")
        return piece

    def _piece(self) -> bytes:
        piece = b""
        while not piece and not self._body.over:
            data = self._line.file.read1(http1.PIECE)
            if not data:
                self._body.ended()
            piece = self._body.feed(data)
        return piece

    def whole(self, limit: int) -> Answer:
        """With all of its body."""
        with self:
            return self.head.with_body(b"".join(iter(lambda: self.piece(limit), b"")))

    def wind_up(self) -> None:
        """What matters has come: reads the end of the body, if it comes soon."""
        self._line.deadline = Deadline(http1.END_S)
        try:
            self.piece()
        except EngramError:
            pass

    def close(self) -> None:
        """Keeps the connection if all was read; else ends it, which tells the daemon."""
        if not self._closed:
            self._closed = True
            self._raw.close()
            self._pool.take_back(self._line, self._body.clean and not self._raw.will_close)

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pool:
    """The connections of a client; threads may share it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._closed = False

    def open(self, request: Request) -> Response:
        """Sends a request and reads the head of its answer."""
        while True:
            deadline = Deadline(self.settings.seconds(request))
            line: Line | None = None
            try:
                line = self._line(deadline)
                return Response(self, line, request, line.ask(request, self.settings))
            except BaseException as error:
                if line is not None:
                    line.end()
                    if request.repeatable and not line.fresh and isinstance(error, ConnectionError):
                        self._drop_idle()
                        continue
                if not isinstance(error, (OSError, http.client.HTTPException, ProtocolError)):
                    raise
                raise broken(error, self.settings.address, request) from error

    def _line(self, deadline: Deadline) -> Line:
        while True:
            with self._lock:
                if self._closed:
                    raise ValueError("the client is closed")
                line = self._idle.pop() if self._idle else None
            if line is None:
                return Line(self.settings, deadline)
            if line.is_quiet():
                line.deadline, line.fresh = deadline, False
                return line
            line.end()

    def take_back(self, line: Line, keep: bool) -> None:
        with self._lock:
            keep = keep and not line.spoiled and not self._closed and len(self._idle) < IDLE_MAX
            if keep:
                self._idle.append(line)
        if not keep:
            line.end()

    def _drop_idle(self) -> None:
        # What broke one of them broke all.
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.end()

    def close(self) -> None:
        """Ends what is idle; what is in use ends with its use."""
        with self._lock:
            self._closed = True
        self._drop_idle()
