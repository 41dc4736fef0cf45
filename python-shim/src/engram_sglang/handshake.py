"""The socket for descriptors, as proto/engram/v1/channel.toml specifies it under [handshake].

The worker says who it is and hands over its window, if it has one; the daemon answers with the channel, its doorbell
and the transfer mode. The connection then stays open and silent: its end is the session's.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import _channel_layout as layout
from ._channel_layout import HandshakeReply, HandshakeRequest
from ._codec import DecodeError

MODE_IPC, MODE_ENGINE = 1, 2
"""`TransferMode` of engram.proto."""

__all__ = ["MODE_ENGINE", "MODE_IPC", "BadHandshake", "Passed", "Refused", "accept", "connect", "refuse", "reply", "self_test_pattern"]

_REQUEST_BYTES = layout._HANDSHAKEREQUEST_0.size
# Before the reason's text, whose count is the last of them.
_REPLY_BYTES = layout._HANDSHAKEREPLY_0.size + 4
# Room for one more than is allowed, so that it is seen.
_CONTROL_BYTES = socket.CMSG_SPACE((layout.HANDSHAKE_MAX_DESCRIPTORS + 1) * 4)


class Refused(Exception):
    """The daemon said no: `status` is a Refusal.Reason, `reason` is for people."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{reason} ({status})")
        self.status, self.reason = status, reason


class BadHandshake(Exception):
    """The peer does not keep to the protocol, or went away."""


@dataclass
class Passed:
    """What the daemon handed over. The descriptors are the owner's to close."""

    connection: socket.socket | None
    channel: int
    channel_bytes: int
    doorbell: int
    mode: int
    """MODE_IPC or MODE_ENGINE."""

    def close(self) -> None:
        """Closes all of it, which ends the session."""
        if self.connection is not None:
            self.connection.close()
        _close([self.channel, self.doorbell])

    def take_connection(self) -> socket.socket:
        """The connection is the caller's now. Once."""
        connection, self.connection = self.connection, None
        assert connection is not None, "it is taken once"
        return connection


def self_test_pattern() -> bytes:
    """What the worker writes into the ring's first bytes; the daemon answers with its complement."""
    return bytes((i * 31 + 7) % 256 for i in range(256)) * (layout.HANDSHAKE_SELF_TEST_BYTES // 256)


def connect(
    path: str,
    session: bytes,
    secret: bytes,
    window: int | None,
    timeout: float,
    doubtful: Callable[[socket.socket], None] = socket.socket.close,
) -> Passed:
    """The worker's side, within `timeout` seconds in all. `window` stays the caller's.

    `doubtful` gets the connection where the daemon may have taken the window or the ring, or may still do so, without having
    answered: what becomes of it shows in the connection's end.

    Raises Refused, BadHandshake, or OSError (of which TimeoutError is one).
    """
    descriptors = [] if window is None else [window]
    request = HandshakeRequest(
        layout.HANDSHAKE_MAGIC, layout.VERSION, len(descriptors), session, secret
    ).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    received: list[int] = []
    try:
        end = time.monotonic() + timeout
        connection.settimeout(timeout)
        connection.connect(path)
        _send(connection, request, descriptors)
        answer = _read_reply(connection, received, end)
        if answer.magic == layout.HANDSHAKE_MAGIC and answer.status != 0:
            # Of any version: a daemon that refuses the version says so.
            raise Refused(answer.status, answer.reason)
        _check(answer.magic, answer.version, answer.descriptors, received)
        if len(received) != 2:
            raise BadHandshake(f"{len(received)} descriptors")
        if answer.mode not in (MODE_IPC, MODE_ENGINE):
            raise BadHandshake(f"{answer.mode} is no transfer mode")
        connection.settimeout(None)
        channel, doorbell = received
        return Passed(
            connection,
            channel,
            answer.channel_bytes,
            doorbell,
            answer.mode,
        )
    except Refused:
        _close(received)
        connection.close()
        raise
    except BaseException:
        _close(received)
        doubtful(connection)
        raise


def accept(connection: socket.socket, timeout: float) -> tuple[HandshakeRequest, int | None]:
    """The daemon's side, for tests: the request, and the window if one came."""
    received: list[int] = []
    try:
        data = _read(connection, _REQUEST_BYTES, received, time.monotonic() + timeout)
        try:
            request = HandshakeRequest.decode(data)
        except DecodeError as error:
            raise BadHandshake(str(error)) from None
        _check(request.magic, request.version, request.descriptors, received)
        if len(received) > 1:
            raise BadHandshake("more than one window")
        return request, received[0] if received else None
    except BaseException:
        _close(received)
        raise


def reply(
    connection: socket.socket,
    channel: int,
    channel_bytes: int,
    doorbell: int,
    mode: int = MODE_IPC,
) -> None:
    """The daemon's side, for tests: hands the descriptors over, which stay the caller's."""
    descriptors = [channel, doorbell]
    answer = HandshakeReply(
        layout.HANDSHAKE_MAGIC, layout.VERSION, 0, len(descriptors), channel_bytes, mode, ""
    )
    _send(connection, answer.encode(), descriptors)


def refuse(connection: socket.socket, status: int, reason: str) -> None:
    """The daemon's side, for tests: says no."""
    answer = HandshakeReply(layout.HANDSHAKE_MAGIC, layout.VERSION, status, 0, 0, 0, reason)
    _send(connection, answer.encode(), [])


def _check(magic: int, version: int, descriptors: int, received: Sequence[int]) -> None:
    if magic != layout.HANDSHAKE_MAGIC:
        raise BadHandshake("the peer speaks another protocol")
    if version != layout.VERSION:
        raise BadHandshake(f"channel of version {version}, not {layout.VERSION}")
    if descriptors != len(received):
        raise BadHandshake(f"{len(received)} descriptors came, {descriptors} were said")


def _send(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """All bytes, with the descriptors on the first of them."""
    sent = socket.send_fds(connection, [data], descriptors) if descriptors else 0
    if sent < len(data):
        connection.sendall(data[sent:])


def _read_reply(connection: socket.socket, received: list[int], end: float) -> HandshakeReply:
    data = _read(connection, _REPLY_BYTES, received, end)
    count = int.from_bytes(data[-4:], "little")
    if count > layout.HANDSHAKE_MAX_REASON_BYTES:
        raise BadHandshake(f"a reason of {count} bytes")
    data += _read(connection, count, received, end)
    try:
        return HandshakeReply.decode(data)
    except DecodeError as error:
        raise BadHandshake(str(error)) from None


def _read(connection: socket.socket, size: int, received: list[int], end: float) -> bytes:
    """Exactly `size` bytes; descriptors that come with them are added to `received`."""
    data = b""
    while len(data) < size:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left)
        # Not socket.recv_fds: it drops the flag that keeps descriptors from children.
        part, ancillary, flags, _ = connection.recvmsg(
            size - len(data), _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received += array("i", payload[: len(payload) // 4 * 4])
        if flags & socket.MSG_CTRUNC or len(received) > layout.HANDSHAKE_MAX_DESCRIPTORS:
            raise BadHandshake("too many descriptors")
        if not part:
            raise BadHandshake("the peer went away")
        data += part
    return data


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
