"""HTTP/1.1 answers, as far as `http.client` does not read them for us: how long a body is, and, for asyncio, heads
and chunks."""

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


def chunk_size(line: bytes) -> int:
    """Of the line before a chunk."""
    digits = line.partition(b";")[0].strip()
    if not 1 <= len(digits) <= 15 or not all(it in b"0123456789abcdefABCDEF" for it in digits):
        raise wrong("the size of a chunk")
    return int(digits, 16)
