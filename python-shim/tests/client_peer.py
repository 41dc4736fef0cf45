"""A server on a socket that answers with whatever bytes it is told to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

Script = Callable[[socket.socket, int], bool | None]
"""Gets a connection, whose request was read, and how many requests came before; True: it stays open."""


class Peer:
    """Listens until it is closed."""

    def __init__(self, script: Script, seen: dict[socket.socket, bytes] | None = None) -> None:
        """`seen` gets the last request of each connection."""
        self.script, self.seen = script, {} if seen is None else seen
        self.requests: list[bytes] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while request := read(connection):
                at = len(self.requests)
                self.requests.append(request)
                self.seen[connection] = request
                if not self.script(connection, at):
                    return

    def close(self) -> None:
        # `close` alone wakes nobody.
        for it in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)
            it.close()
        for thread in self._threads:
            thread.join(30)


def read(connection: socket.socket) -> bytes:
    """One request; nothing when there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            while len(body) < int(value):
                body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def answer(value: Any, status: int = 200, more: str = "") -> bytes:
    """An answer as the daemon gives it."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.contextmanager
def peer(script: Script | bytes, seen: dict[socket.socket, bytes] | None = None) -> Iterator[Peer]:
    """One that does this for every request, or sends these bytes and closes."""

    def send(connection: socket.socket, _: int) -> None:
        assert isinstance(script, bytes)
        connection.sendall(script)

    made = Peer(send if isinstance(script, bytes) else script, seen)
    try:
        yield made
    finally:
        made.close()
