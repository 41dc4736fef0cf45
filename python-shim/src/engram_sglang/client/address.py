"""Where a daemon is, as the command line takes it: `http://HOST:PORT`, or `unix:/PATH`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Address:
    """A TCP address, or the path of a Unix socket."""

    text: str
    """As it was given, for people."""
    host: str
    port: int
    path: str | None
    """Of a Unix socket; then host and port mean nothing."""
    host_header: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for what is neither."""
        bad = ValueError(f"{text!r} is neither http://HOST:PORT nor unix:/PATH")
        if text.startswith("unix:"):
            path = text[len("unix:"):]
            path = path[2:] if path.startswith("//") else path
            if not path.startswith("/") or "\0" in path:
                raise bad
            return cls(text, "", 0, path, "localhost")
        parts = urlsplit(text)
        if parts.scheme != "http" or not parts.hostname or parts.username is not None:
            raise bad
        if parts.path.strip("/") or parts.query or parts.fragment or not parts.netloc.isascii():
            raise bad
        # `port` raises ValueError by itself where it is no number of a port.
        port = 80 if parts.port is None else parts.port
        return cls(text, parts.hostname, port, None, parts.netloc)

    def __str__(self) -> str:
        return self.text
