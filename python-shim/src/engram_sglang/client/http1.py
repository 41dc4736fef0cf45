"""HTTP/1.1 answers from bytes: bodies, which `http.client` takes for whole where they broke off, and, for asyncio,
heads."""

from __future__ import annotations

import http.client
import io

from .errors import ProtocolError

HEAD_MAX = 64 << 10
"""Bytes of a head."""
PIECE = 64 << 10
"""Bytes of a body that are read at a time."""
INTERIM_MAX = 8
"""Heads with a status below 200 before the answer."""
END_S = 1.0
"""How long the end of a body may take, once what matters of it has come."""
TRAILERS_MAX = 100
"""Lines after a body of chunks."""
LINE_MAX = 8 << 10
"""Bytes of one of them, and of the line before a chunk."""

Headers = http.client.HTTPMessage


def wrong(why: str) -> ProtocolError:
    """An answer that is no HTTP."""
    return ProtocolError(f"The answer is no HTTP: {why}", type="protocol")


def head(data: bytes) -> tuple[int, Headers, bool]:
    """Status, headers, and whether the connection stays; from all lines of a head."""
    line, _, rest = data.partition(b"\r\n")
    version, _, more = line.partition(b" ")
    code = more.partition(b" ")[0]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(code) != 3 or not code.isdigit():
        raise wrong("its first line")
    try:
        headers = http.client.parse_headers(io.BytesIO(rest))
    except http.client.HTTPException as error:
        raise wrong(str(error)) from None
    closes = "close" in str(headers.get("Connection", "")).lower() or version == b"HTTP/1.0"
    return int(code), headers, not closes


def plain(headers: Headers) -> dict[str, str]:
    """By names in small letters; of several of one name the last."""
    return {name.lower(): str(value) for name, value in headers.items()}


def length(status: int, headers: Headers) -> int | None:
    """Bytes of the body: -1 for chunks, None for all until the connection ends. What could be read in two ways is
    refused: the next answer would begin somewhere in this one."""
    codings = [str(it).strip().lower() for it in headers.get_all("Transfer-Encoding") or []]
    lengths = {str(it).strip() for it in headers.get_all("Content-Length") or []}
    if status in (204, 304):
        return 0
    if codings:
        if codings != ["chunked"] or lengths:
            raise wrong("how long its body is")
        return -1
    if not lengths:
        return None
    (text, *others) = lengths
    if others or not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise wrong("how long its body is")
    return int(text)


class Body:
    """Takes the bytes behind a head as they come, and gives those that are the body."""

    def __init__(self, status: int, headers: Headers) -> None:
        self._length = length(status, headers)
        self._left = max(self._length or 0, 0)
        self._line = bytearray()
        self._lines = 0
        self._next = self._size if self._length == -1 else self._plain
        self.over = self._length == 0
        """All of it came."""
        self.clean = self.over
        """And nothing behind it, so that another answer can follow."""

    def feed(self, data: bytes) -> bytes:
        """Raises ProtocolError for what is no body."""
        found = []
        while data and not self.over:
            took, data = self._next(data)
            found.append(took)
        self.clean = self.over and not data
        return b"".join(found)

    def ended(self) -> None:
        """No more bytes come. Raises ConnectionError where some are missing."""
        if self._length is not None and not self.over:
            raise ConnectionResetError("the answer broke off")
        self.over = True

    def _plain(self, data: bytes) -> tuple[bytes, bytes]:
        if self._length is None:
            return data, b""
        took = data[:self._left]
        self._left -= len(took)
        self.over = self._left == 0
        return took, data[len(took):]

    def _read_line(self, data: bytes) -> tuple[bytes | None, bytes]:
        """A whole line, or None; and what is behind it."""
        line, end, rest = data.partition(b"\n")
        self._line += line
        if len(self._line) > LINE_MAX:
            raise wrong("a line that never ends")
        if not end:
            return None, b""
        whole = bytes(self._line).removesuffix(b"\r")
        self._line.clear()
        return whole, rest

    def _size(self, data: bytes) -> tuple[bytes, bytes]:
        line, rest = self._read_line(data)
        if line is not None:
            digits = line.partition(b";")[0].strip()
            if not 1 <= len(digits) <= 15 or not all(it in b"0123456789abcdefABCDEF" for it in digits):
                raise wrong("the size of a chunk")
            self._left = int(digits, 16)
            self._next = self._chunk if self._left else self._trailer
        return b"", rest

    def _chunk(self, data: bytes) -> tuple[bytes, bytes]:
        took = data[:self._left]
        self._left -= len(took)
        if self._left == 0:
            self._next = self._behind
        return took, data[len(took):]

    def _behind(self, data: bytes) -> tuple[bytes, bytes]:
        line, rest = self._read_line(data)
        if line:
            raise wrong("the end of a chunk")
        if line is not None:
            self._next = self._size
        return b"", rest

    def _trailer(self, data: bytes) -> tuple[bytes, bytes]:
        # Headers after the body, of which there are none to care for.
        line, rest = self._read_line(data)
        if line is not None:
            self._lines += 1
            self.over = not line
        if self._lines > TRAILERS_MAX:
            raise wrong("its end")
        return b"", rest
