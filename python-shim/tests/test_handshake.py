"""The socket for descriptors, between both Python ends and hostile ones."""

import os
import socket
import threading

import pytest

from engram_sglang import _channel_layout as layout
from engram_sglang import handshake
from engram_sglang._channel_layout import HandshakeReply
from engram_sglang.handshake import BadHandshake, Refused

SESSION, SECRET = b"s" * 16, b"k" * 32
LONG = 30


@pytest.fixture
def meet(tmp_path):
    """Runs `connect` against a daemon that does what it is given with its connection."""
    path = str(tmp_path / "fds")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def run(daemon, ring=None, timeout=LONG):
        failed = []

        def serve():
            connection = listener.accept()[0]
            try:
                daemon(connection)
            except BaseException as error:
                failed.append(error)
            finally:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return handshake.connect(path, SESSION, SECRET, ring, timeout)
        finally:
            thread.join()
            assert not failed

    yield run
    listener.close()


def memory(data: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("mode", [handshake.MODE_IPC, handshake.MODE_ENGINE])
@pytest.mark.parametrize("with_ring", [False, True])
def test_descriptors_change_hands_both_ways(meet, with_ring, mode):
    before = open_descriptors()
    ring = memory(b"ring") if with_ring else None

    def daemon(connection):
        request, received = handshake.accept(connection, LONG)
        assert (request.session, request.secret) == (SESSION, SECRET)
        assert (received is not None) == with_ring
        if received is not None:
            assert os.pread(received, 4, 0) == b"ring"
            os.close(received)
        mine = [memory(b"channel"), memory(b"bell")]
        handshake.reply(connection, mine[0], 4096, mine[1], mode)
        for fd in mine:
            os.close(fd)

    passed = meet(daemon, ring)
    assert os.pread(passed.channel, 9, 0) == b"channel"
    assert os.pread(passed.doorbell, 9, 0) == b"bell"
    assert passed.channel_bytes == 4096
    assert not os.get_inheritable(passed.channel)
    assert passed.mode == mode
    assert passed.connection.recv(1) == b""
    passed.close()
    if ring is not None:
        os.close(ring)
    assert open_descriptors() == before


def test_a_refusal_carries_its_reason(meet):
    def daemon(connection):
        handshake.accept(connection, LONG)
        handshake.refuse(connection, 13, "die Prüfung")

    with pytest.raises(Refused, match="die Prüfung") as refused:
        meet(daemon)
    assert refused.value.status == 13


GOOD = HandshakeReply(layout.HANDSHAKE_MAGIC, layout.VERSION, 0, 2, 4096, handshake.MODE_IPC, "")


@pytest.mark.parametrize(
    ("answer", "descriptors"),
    [
        (GOOD._replace(magic=1), 2),
        (GOOD._replace(version=9), 2),
        (GOOD, 1),
        (GOOD, 3),
        (GOOD._replace(descriptors=0), 0),
        (GOOD._replace(descriptors=1), 1),
        (GOOD._replace(descriptors=3), 3),
        (GOOD._replace(mode=0), 2),
        (GOOD._replace(mode=3), 2),
        (GOOD._replace(descriptors=5), 5),
        (GOOD._replace(reason="x" * 1025), 2),
    ],
)
def test_replies_that_lie_are_errors_and_leak_nothing(meet, answer, descriptors):
    null = os.open(os.devnull, os.O_RDONLY)
    before = open_descriptors()

    def daemon(connection):
        handshake.accept(connection, LONG)
        handshake._send(connection, answer.encode(), [null] * descriptors)

    with pytest.raises(BadHandshake):
        meet(daemon)
    assert open_descriptors() == before
    os.close(null)


def test_a_refusal_of_another_version_gets_through(meet):
    def daemon(connection):
        handshake.accept(connection, LONG)
        answer = GOOD._replace(version=9, status=2, descriptors=0, reason="too old")
        connection.sendall(answer.encode())

    with pytest.raises(Refused, match="too old"):
        meet(daemon)


def test_a_daemon_that_goes_away_or_is_silent_is_an_error(meet, tmp_path):
    with pytest.raises((BadHandshake, OSError)):
        meet(lambda connection: handshake.accept(connection, LONG))
    done = threading.Event()

    def silent(connection):
        handshake.accept(connection, LONG)
        assert connection.recv(1) == b"", "until the worker gives up"
        done.set()

    with pytest.raises(TimeoutError):
        meet(silent, timeout=0.05)
    assert done.is_set()
    with pytest.raises(OSError):
        handshake.connect(str(tmp_path / "nothing"), SESSION, SECRET, None, LONG)
