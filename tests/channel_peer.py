"""The Python side of tests/channel_python.rs: a worker or a daemon in a process of its own.

    channel_peer.py worker|daemon SOCKET GOLDEN

Needs nothing but the standard library and engram_sglang on the path. Exits with 0 if all was as expected.
"""

import array
import json
import os
import pathlib
import socket
import sys
import time

from engram_sglang import _channel_layout as layout
from engram_sglang import channel, handshake

DEADLINE = time.monotonic() + 60
SESSION, SECRET, BOOT = bytes(range(16)), bytes(range(32)), bytes([9]) * 16
# Laps of the golden messages: the areas are small, so that records wrap often.
ROUNDS = 40
UP, DOWN = 64 << 10, 16 << 10


def wait(poll):
    """Polls until there is something."""
    while True:
        found = poll()
        if found:
            return found
        assert time.monotonic() < DEADLINE, f"timeout in {poll}"
        time.sleep(0)


def messages(path, direction, kinds):
    rows = json.loads(pathlib.Path(path).read_text())
    return [kinds[r["kind"]].decode(bytes.fromhex(r["body"])) for r in rows if r["direction"] == direction]


def exchange(end, tx, rx, tokens, bell=None):
    """Says all of `tx` ROUNDS times and hears all of `rx` as often, in any rhythm."""
    out = [message for _ in range(ROUNDS) for message in tx]
    expected = [message for _ in range(ROUNDS) for message in rx]
    heard = 0
    while out or heard < len(expected):
        before = len(out), heard
        while out and end.tx.push(out[0]):
            del out[0]
        if bell is not None and end.tx.take_written():
            channel.ring(bell)
        while heard < len(expected) and (message := end.rx.pop()) is not None:
            assert message == expected[heard], f"{message} is not {expected[heard]}"
            heard += 1
        assert time.monotonic() < DEADLINE, f"timeout: {len(out)} to say, {heard} heard"
        if (len(out), heard) == before:
            time.sleep(0)
    for req, ids in tokens:
        sent = 0
        while sent < len(ids):
            view = memoryview(ids)[sent:] if isinstance(ids, array.array) else ids[sent:]
            sent += end.tx.push_tokens(req, sent, view)
            if bell is not None and end.tx.take_written():
                channel.ring(bell)
            assert time.monotonic() < DEADLINE
            time.sleep(0)


def worker(path, golden):
    ring = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(ring, 1 << 20)
    channel.fcntl.fcntl(ring, channel._F_ADD_SEALS, channel._SEAL_SHRINK)
    pattern = handshake.self_test_pattern()
    os.pwrite(ring, pattern, 0)
    passed = handshake.connect(path, SESSION, SECRET, ring, 60)
    complement = bytes(byte ^ 0xFF for byte in pattern)
    assert os.pread(ring, len(pattern), 0) == complement, "the daemon did not answer in the ring"
    assert passed.mode == handshake.MODE_ENGINE
    end = channel.WorkerEnd.open(passed.channel, passed.channel_bytes)
    assert (end.boot, end.session) == (BOOT, SESSION)
    end.beat()
    ids = list(range(100_000))
    tokens = [(1, array.array("q", ids)), (2, array.array("I", ids)), (3, ids)]
    up, down = messages(golden, "up", layout.UP), messages(golden, "down", layout.DOWN)
    exchange(end, up, down, tokens, passed.doorbell)
    wait(end.peer_beat)
    end.close(layout.CloseReason.DETACHED)
    assert wait(end.peer_closed) == layout.CloseReason.SHUTDOWN
    # The daemon closes the connection, too.
    assert passed.connection.recv(1) == b""
    end.memory.close()
    passed.close()


def daemon(path, golden):
    end, fd = channel.DaemonEnd.create(BOOT, SESSION, UP, DOWN)
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen()
    os.rename(path + ".new", path)
    # The first comer is turned away.
    first = listener.accept()[0]
    request, ring = handshake.accept(first, 60)
    assert request.session == SESSION and request.secret == SECRET and ring is None
    handshake.refuse(first, 10, "später")
    first.close()
    connection = listener.accept()[0]
    request, ring = handshake.accept(connection, 60)
    assert ring is not None
    assert os.pread(ring, layout.HANDSHAKE_SELF_TEST_BYTES, 0) == handshake.self_test_pattern()
    handshake.reply(connection, fd, end.memory.size, bell)
    end.beat()
    up, down = messages(golden, "up", layout.UP), messages(golden, "down", layout.DOWN)
    exchange(end, down, up, [])
    heard = []
    while len(heard) < 100_000:
        tokens = wait(end.rx.pop)
        assert (tokens.req, tokens.offset) == (1, len(heard))
        heard += tokens.ids
    assert heard == list(range(100_000))

    def rung():
        # The last tokens may be heard before the bell that was rung for them.
        try:
            return os.eventfd_read(bell)
        except BlockingIOError:
            return 0

    wait(rung)
    wait(end.peer_beat)
    assert wait(end.peer_closed) == layout.CloseReason.DETACHED
    end.close(layout.CloseReason.SHUTDOWN)
    connection.settimeout(60)
    assert connection.recv(1) == b""


if __name__ == "__main__":
    {"worker": worker, "daemon": daemon}[sys.argv[1]](*sys.argv[2:])
