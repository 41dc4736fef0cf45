"""The way to the daemon, with a daemon that is played: rings are taken late, kept, parked and freed as they may be."""

import concurrent.futures
import gc
import logging
import mmap
import os
import socket
import threading
import time

import grpc
import pytest

from engram_sglang import handshake, link
from engram_sglang._channel_layout import CloseReason
from engram_sglang._pb.engram.v1 import engram_pb2 as pb
from engram_sglang._pb.engram.v1 import engram_pb2_grpc
from engram_sglang.channel import DaemonEnd
from engram_sglang.link import Link, Weights
from engram_sglang.ring import NoRing
from engram_sglang.settings import Settings

LONG = 30
Reason = pb.Refusal.Reason


def until(done, what):
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


class Ring:
    """Memory of a GPU, as far as the link sees it."""

    device_kind, device_uuid, ipc_handle, ipc_offset = 2, b"u" * 16, b"h" * 64, 0
    outlives_peer, fd, no_ipc = False, None, None

    def __init__(self, size):
        self.size, self.open = size, True
        self.window = None

    def carry(self, window):
        assert self.open and window.fd is not None
        self.window = window
        return "carrier"

    def prepare_self_test(self):
        assert self.open

    def check_self_test(self):
        return True

    def close(self):
        self.open = False


class Daemon(engram_pb2_grpc.WorkerServicer, engram_pb2_grpc.AdminServicer):
    """Attaches everybody, or says what it is told to."""

    def __init__(self, folder):
        self.refusal = self.reason = None
        self.mode = self.last_word = handshake.MODE_IPC
        self.modes = self.window = None
        self.silent = False
        self.bell = lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.asked, self.connections, self.over = 0, [], threading.Event()
        self.folder, self.target = folder, f"unix:{folder}/g"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{folder}/fd")
        self.listener.listen()
        self.server = None
        self.shaker = threading.Thread(target=self.shake)
        self.shaker.start()

    def start(self):
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        engram_pb2_grpc.add_WorkerServicer_to_server(self, self.server)
        engram_pb2_grpc.add_AdminServicer_to_server(self, self.server)
        self.server.add_insecure_port(self.target)
        self.server.start()
        return self

    def Status(self, request, context):  # noqa: N802
        return pb.StatusResponse()

    def Attach(self, request, context):  # noqa: N802
        self.asked += 1
        self.modes = list(request.modes)
        if self.refusal is not None:
            return pb.AttachResponse(refusal=pb.Refusal(reason=self.refusal, message="on purpose"))
        attached = pb.Attached(
            session=b"s" * 16, secret=b"k" * 32, boot=b"b" * 16, fd_socket=f"{self.folder}/fd",
            channel_version=link.layout.VERSION, mode=self.mode, heartbeat_ms=100,
        )  # fmt: skip
        return pb.AttachResponse(attached=attached)

    def Session(self, requests, context):  # noqa: N802
        context.add_callback(self.over.set)
        for _ in requests:
            pass
        yield from ()

    def shake(self):
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            try:
                window = handshake.accept(connection, LONG)[1]
                self.window = window is not None
                if window is not None:
                    # As the daemon does.
                    size, test = os.fstat(window).st_size, link.layout.HANDSHAKE_SELF_TEST_BYTES
                    with mmap.mmap(window, size) as memory:
                        memory[:test] = bytes(b ^ 0xFF for b in memory[:test])
                    os.close(window)
                if self.reason is not None:
                    handshake.refuse(connection, Reason.SELF_TEST, self.reason)
                    connection.close()
                    continue
                self.connections.append(connection)
                if self.silent:
                    continue
                end, channel = DaemonEnd.create(b"b" * 16, b"s" * 16)
                bell = self.bell()
                handshake.reply(connection, channel, end.memory.size, bell, self.last_word)
                os.close(channel)
                os.close(bell)
                end.memory.close()
            except (handshake.BadHandshake, OSError):
                connection.close()

    def hang_up(self):
        while self.connections:
            self.connections.pop().close()

    def stop(self):
        self.hang_up()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.shaker.join()
        if self.server is not None:
            self.server.stop(None).wait()


@pytest.fixture
def daemon(tmp_path):
    one = Daemon(tmp_path)
    yield one
    one.stop()


@pytest.fixture
def linked(daemon, monkeypatch):
    """Starts a link; `rings` are those that it took."""
    monkeypatch.setattr(link, "LONGEST_RETRY_S", 0.05)
    monkeypatch.setattr(link, "_AFTER_HANGUP_S", 0.1)
    monkeypatch.setattr(link, "_CALL_S", 5.0)
    made = []

    def start(new_ring=None, mode="auto"):
        rings = []

        def take(size):
            rings.append((new_ring or Ring)(size))
            return rings[-1]

        one = Link(Settings(daemon=daemon.target, retry_ms=10, mode=mode), lambda request: None, 1 << 20, take)
        one.weights = Weights(1, b"w" * 32)
        one.rings = rings
        made.append(one)
        one.start()
        return one

    yield start
    for one in made:
        one.stop()

    def ended():
        daemon.hang_up()
        return not any(one._thread.is_alive() for one in made)

    until(ended, "the end of the threads")
    # What closes by itself closes now, and not in the middle of somebody's count of descriptors.
    gc.collect()
    assert not any(ring.open for one in made for ring in one.rings)


def session_of(one):
    end = time.monotonic() + LONG
    while (session := one.take()) is None:
        assert time.monotonic() < end, f"no session: {one.state} ({one.reason})"
        time.sleep(0.005)
    return session


def leave(session):
    session.end.close(CloseReason.SILENT_PEER)
    session.left.set()


def test_no_ring_before_a_daemon_answers(daemon, linked):
    one = linked()
    until(lambda: "no daemon answers" in one.reason, "the reason")
    assert one.rings == []
    daemon.start()
    leave(session_of(one))
    assert len(one.rings) >= 1


def test_a_ring_is_freed_when_the_daemon_hung_up_and_not_before(daemon, linked):
    daemon.start()
    one = linked()
    leave(session_of(one))
    # The daemon stands still: it neither hangs up nor answers what the worker says.
    second = session_of(one)
    first_ring, second_ring = one.rings
    assert first_ring.open and second_ring is second.ring
    leave(second)
    until(lambda: "still have a staging ring open" in one.reason, "the reason")
    assert [ring.open for ring in one.rings] == [True, True]
    assert one.take() is None
    daemon.connections.pop(0).close()
    third = session_of(one)
    assert [ring.open for ring in one.rings] == [False, True, True]
    leave(third)


def test_the_ring_of_a_handshake_without_an_end_is_not_freed(daemon, linked, monkeypatch):
    monkeypatch.setattr(link, "_CALL_S", 0.5)
    daemon.silent = True
    daemon.start()
    one = linked()
    until(lambda: len(one._parked) == 1, "the first ring is parked")
    daemon.silent = False
    leave(session_of(one))
    assert one.rings[0].open
    daemon.hang_up()
    until(lambda: not one.rings[0].open, "the first ring is freed")


def test_rings_are_freed_after_the_end_of_all_tries(daemon, linked):
    daemon.start()
    one = linked()
    leave(session_of(one))
    until(lambda: one._parked, "parked")
    one.stop()
    until(lambda: one.state == "closed", "the end")
    assert one.rings[0].open
    daemon.hang_up()
    until(lambda: not any(ring.open for ring in one.rings), "all are freed")
    one._thread.join(LONG)
    assert not one._thread.is_alive()


def test_a_daemon_that_cannot_open_the_ring_is_said_once_and_the_ring_kept(daemon, linked, caplog):
    daemon.reason = "CUDA IPC is denied here"
    daemon.start()
    with caplog.at_level(logging.INFO):
        one = linked()
        until(lambda: daemon.asked >= 4, "some tries")
    assert len(one.rings) == 1 and one.rings[0].open
    told = [record for record in caplog.records if "CUDA IPC is denied here" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING]
    daemon.reason = None
    leave(session_of(one))


@pytest.mark.parametrize("reason", [Reason.DEVICE_UNAVAILABLE, Reason.CHANNEL_VERSION, Reason.BAD_GEOMETRY])
def test_a_daemon_that_refuses_is_asked_again_and_said_once(daemon, linked, caplog, reason):
    daemon.refusal = reason
    daemon.start()
    with caplog.at_level(logging.INFO):
        one = linked()
        until(lambda: daemon.asked >= 3, "some tries")
    assert one.state == "refused" and len(one.rings) == 1
    told = [record for record in caplog.records if "on purpose" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING]
    daemon.refusal = None
    leave(session_of(one))


def test_a_full_gpu_is_a_warning(daemon, linked, caplog):
    daemon.start()
    full = [True]

    def ring(size):
        if full:
            raise NoRing("the GPU has no room")
        return Ring(size)

    with caplog.at_level(logging.INFO):
        one = linked(ring)
        until(lambda: one.state == "refused", "the reason")
    told = [record for record in caplog.records if "the GPU has no room" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING]
    full.clear()
    leave(session_of(one))


def pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("bell", "reason"), [(pipe, "no eventfd"), (lambda: os.eventfd(0, os.EFD_CLOEXEC), "the doorbell blocks")]
)
def test_a_doorbell_that_may_stop_who_rings_it_is_not_taken(daemon, linked, bell, reason):
    right, daemon.bell = daemon.bell, bell
    daemon.start()
    one = linked()
    until(lambda: reason in one.reason, "the reason")
    assert one.take() is None
    daemon.hang_up()
    daemon.bell = right

    def attached():
        daemon.hang_up() if len(one._parked) == link._PARKED else None
        return one._session is not None

    until(attached, "a session")
    leave(session_of(one))


IPC, ENGINE = handshake.MODE_IPC, handshake.MODE_ENGINE


def windows():
    """Descriptors of windows that this process has open, and mappings of them."""
    gc.collect()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    open_ = sum("engram-window" in os.readlink(path) for path in links if os.path.islink(path))
    with open("/proc/self/maps") as maps:
        return open_, sum("engram-window" in line for line in maps)


@pytest.mark.parametrize(
    ("wish", "can", "chosen", "last_word", "mode"),
    [
        ("auto", [IPC, ENGINE], IPC, IPC, "ipc"),
        ("auto", [IPC, ENGINE], ENGINE, ENGINE, "engine"),
        # The ring turned out to be out of reach.
        ("auto", [IPC, ENGINE], IPC, ENGINE, "engine"),
        ("engine", [ENGINE], ENGINE, ENGINE, "engine"),
        ("ipc", [IPC], IPC, IPC, "ipc"),
    ],
)
def test_the_daemon_chooses_among_the_modes_that_may_be(daemon, linked, wish, can, chosen, last_word, mode):
    daemon.mode, daemon.last_word = chosen, last_word
    before = windows()
    daemon.start()
    one = linked(mode=wish)
    session = session_of(one)
    assert daemon.modes == can and one.mode == mode
    assert session.carrier == (None if mode == "ipc" else "carrier")
    assert (session.ring.window is not None) == (mode == "engine")
    # It is shown even where it is not needed in the end: before that, nobody knows.
    assert daemon.window == (ENGINE in can)
    if mode == "engine":
        with mmap.mmap(session.ring.window.fd, 65536) as memory:
            assert memory[:] == bytes(65536), "the self-test is cleared"
    else:
        until(lambda: windows() <= before, "memory that is not needed is given back")
    leave(session)


def test_a_ring_that_the_daemon_never_had_a_way_to_is_not_parked(daemon, linked):
    daemon.mode = daemon.last_word = ENGINE
    daemon.start()
    one = linked()
    # The daemon stands still, and hangs up on nobody.
    for _ in range(4):
        leave(session_of(one))
    until(lambda: [ring.open for ring in one.rings][:4] == [False] * 4, "the rings are freed")
    assert not one._parked


def test_a_ring_that_it_tried_to_open_is_parked(daemon, linked):
    daemon.last_word = ENGINE
    daemon.start()
    one = linked()
    leave(session_of(one))
    until(lambda: one._parked, "parked")
    assert one.rings[0].open


def test_no_window_stays_open_after_its_session(daemon, linked):
    daemon.mode = daemon.last_word = ENGINE
    before = windows()
    daemon.start()
    one = linked()
    for _ in range(5):
        leave(session_of(one))
    one.stop()
    until(lambda: one.state == "closed", "the end")
    for ring in one.rings:
        ring.window = None
    until(lambda: windows() <= before, "no window is left")


@pytest.mark.parametrize(("wish", "chosen", "last_word"), [("ipc", ENGINE, ENGINE), ("ipc", IPC, ENGINE), ("engine", IPC, IPC)])
def test_a_mode_that_was_not_offered_is_not_taken(daemon, linked, wish, chosen, last_word):
    daemon.mode, daemon.last_word = chosen, last_word
    daemon.start()
    one = linked(mode=wish)
    until(lambda: "mode that this worker does not have" in one.reason, "the reason")
    assert one.take() is None


def test_no_memory_for_the_window_is_said_and_tried_again(daemon, linked, caplog):
    daemon.mode = daemon.last_word = ENGINE
    daemon.start()
    full = [True]

    class Full(Ring):
        def carry(self, window):
            if full:
                raise NoRing("ulimit -l")
            return super().carry(window)

    with caplog.at_level(logging.INFO):
        one = linked(Full)
        until(lambda: daemon.asked >= 3 and one.state == "refused", "the reason")
    assert [r.levelno for r in caplog.records if "ulimit -l" in r.message] == [logging.WARNING]
    assert len(one.rings) == 1 and one.rings[0].open, "the ring is kept"
    full.clear()
    leave(session_of(one))


def test_a_ring_that_cannot_be_exported_leaves_only_engine(daemon, linked):
    daemon.mode = daemon.last_word = ENGINE
    daemon.start()

    class Denied(Ring):
        ipc_handle, no_ipc = b"", "cuIpcGetMemHandle: no (801)"

    one = linked(Denied)
    session = session_of(one)
    assert daemon.modes == [ENGINE] and session.carrier == "carrier"
    leave(session)
    other = linked(Denied, mode="ipc")
    until(lambda: "cuIpcGetMemHandle" in other.reason, "the reason")
