"""The channel in Python: golden messages, laps, and peers that break the rules.

Against Rust, through shared memory of two processes: tests/channel_python.rs.
"""

import array
import contextlib
import enum
import json
import os
import pathlib
import random
import struct
import threading

import pytest

from engram_sglang import _channel_layout as layout
from engram_sglang import channel
from engram_sglang._codec import DecodeError
from engram_sglang.channel import BadChannel, Broken, DaemonEnd, Memory, WorkerEnd

GOLDEN = json.loads(
    (pathlib.Path(__file__).resolve().parents[2] / "proto/engram/v1/golden.json").read_text()
)
SMALL = layout.MIN_CAPACITY
UP = layout.HEADER_BYTES
CLOSE = layout.RequestClose


@pytest.fixture
def ends():
    """(daemon, worker) over the smallest channel."""
    daemon, fd = DaemonEnd.create(b"b" * 16, b"s" * 16, SMALL, SMALL)
    worker = WorkerEnd.open(fd, daemon.memory.size)
    os.close(fd)
    yield daemon, worker
    daemon.memory.close()
    worker.memory.close()


def forge(end, position, number, length, kind, flags=0, body=b""):
    """Writes a record into `up` as a hostile worker could."""
    at = UP + position
    end.memory.u8[at + 16 : at + 16 + len(body)] = body
    struct.pack_into("<QIHH", end.memory.u8, at, number, length, kind, flags)


def tokens(ids):
    return layout.Tokens(1, 0, ids)


# --- messages ---------------------------------------------------------------------------------------


def plain(value):
    """A field as JSON has it."""
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, enum.IntFlag):
        return int(value)
    if isinstance(value, enum.Enum):
        return value.name.lower()
    return value


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["message"])
def test_golden_messages_are_what_both_languages_mean(row):
    kind = getattr(layout, row["message"])
    body = bytes.fromhex(row["body"])
    message = kind.decode(body)
    assert {name: plain(value) for name, value in message._asdict().items()} == row["fields"]
    assert message.encode() == body
    if row["kind"] is not None:
        assert kind.KIND == row["kind"]
        assert getattr(layout, row["direction"].upper())[row["kind"]] is kind
    for cut in range(len(body)):
        with pytest.raises(DecodeError):
            kind.decode(body[:cut])
    with pytest.raises(DecodeError, match="follow the last field"):
        kind.decode(body + b"\0")


def test_every_message_is_golden():
    assert {row["kind"] for row in GOLDEN} - {None} == {*layout.UP, *layout.DOWN}


def test_arbitrary_bytes_are_a_message_or_an_error():
    chance = random.Random(1)
    kinds = [*layout.UP.values(), *layout.DOWN.values()]
    decoded = 0
    for _ in range(20_000):
        size = chance.randrange(80)
        body = bytes(chance.choice((0, 0, 0, 1, 255)) for _ in range(size))
        kind = chance.choice(kinds)
        with contextlib.suppress(DecodeError):
            assert kind.decode(body).encode() == body
            decoded += 1
    assert decoded > 0


def test_values_outside_a_field_are_refused_both_ways():
    fill = bytearray(layout.Fill(1, layout.Piece.KV, 0, 1, 0, 0).encode())
    for bad in (0, 3, 2**32 - 1):
        struct.pack_into("<I", fill, 8, bad)
        with pytest.raises(DecodeError, match=r"Fill\.piece"):
            layout.Fill.decode(bytes(fill))
    opened = layout.RequestOpen(1, 0, layout.RequestFlags(63), 0, "", "", "", "", "", bytes(32))
    assert layout.RequestOpen.decode(opened.encode()) == opened
    with pytest.raises(DecodeError, match="flags"):
        layout.RequestOpen.decode(opened._replace(flags=64).encode())
    with pytest.raises(DecodeError, match="need_state"):
        layout.Want.decode(layout.Want(1, 2, []).encode())
    for message in (
        opened._replace(adapter=b"short"),
        opened._replace(rid="\ud800"),
        CLOSE(2**64),
        CLOSE(-1),
    ):
        with pytest.raises((ValueError, OverflowError, struct.error)):
            message.encode()


# --- rings ------------------------------------------------------------------------------------------


def test_ends_agree_on_the_header(ends):
    daemon, worker = ends
    assert (worker.boot, worker.session) == (b"b" * 16, b"s" * 16)
    worker.beat()
    daemon.beat()
    daemon.beat()
    assert (daemon.peer_beat(), worker.peer_beat()) == (1, 2)
    assert daemon.peer_closed() is None and worker.peer_closed() is None
    daemon.close(layout.CloseReason.SHUTDOWN)
    worker.close(layout.CloseReason.DETACHED)
    assert worker.peer_closed() is layout.CloseReason.SHUTDOWN
    assert daemon.peer_closed() is layout.CloseReason.DETACHED
    worker.close(4711)
    assert daemon.peer_closed() is layout.CloseReason.BROKEN_PEER


def test_messages_come_out_as_they_went_in_over_many_laps(ends):
    daemon, worker = ends
    chance = random.Random(2)
    said, heard = [], []
    for number in range(5000):
        message = chance.choice((
            CLOSE(number),
            tokens([number] * chance.randrange(240)),
            layout.RequestOpen(
                number, 0, layout.RequestFlags(0), 0, "ü" * chance.randrange(90), "", "", "", "", bytes(32)
            ),
        ))
        if worker.tx.push(message):
            said.append(message)
        for _ in range(chance.randrange(3)):
            if (message := daemon.rx.pop()) is not None:
                heard.append(message)
    while (message := daemon.rx.pop()) is not None:
        heard.append(message)
    assert heard == said
    assert worker.tx.dropped == 5000 - len(said) > 0


def test_a_full_area_refuses_counts_and_takes_again_once_read(ends):
    daemon, worker = ends
    pushed = 0
    while worker.tx.push(CLOSE(pushed)):
        pushed += 1
    assert pushed == SMALL // 32 - 1
    assert not worker.tx.push(CLOSE(0)) and worker.tx.dropped == 2
    assert daemon.rx.pop() == CLOSE(0)
    assert worker.tx.push(CLOSE(pushed))
    assert [daemon.rx.pop() for _ in range(pushed)] == [CLOSE(n) for n in range(1, pushed + 1)]
    assert daemon.rx.pop() is None


def test_a_quarter_of_the_area_always_fits_and_more_never(ends):
    daemon, worker = ends
    largest = tokens([5] * ((SMALL // 4 - 32) // 4))
    assert not worker.tx.push(tokens([5] * ((SMALL // 4 - 32) // 4 + 1)))
    for start in range(SMALL // 32):
        for message in (CLOSE(start), largest):
            assert worker.tx.push(message)
            assert daemon.rx.pop() == message


def test_a_record_that_would_cross_the_end_is_preceded_by_a_pad(ends):
    daemon, worker = ends
    for number in range(SMALL // 32 - 1):
        assert worker.tx.push(CLOSE(number)) and daemon.rx.pop() == CLOSE(number)
    message = tokens([1, 2, 3, 4])
    assert worker.tx.push(message)
    head = struct.unpack_from("<QIHH", daemon.memory.u8, UP + SMALL - 32)
    assert head == (SMALL // 32, 16, 0, 0)
    assert daemon.rx.pop() == message


def test_stale_words_are_never_taken_for_a_record(ends):
    daemon, worker = ends
    number = written = 0
    for lap in range(1000):
        message = tokens([lap] * (lap % 50))
        size = len(message.encode()) + 16 + 15 & ~15
        left = SMALL - written % SMALL
        pad = left if size > left else 0
        number += 2 if pad else 1
        written += pad + size
        # All is consumed; the worst that can lie there is what the reader will expect next.
        stale = array.array("Q", [number + 1]) * (SMALL // 8)
        daemon.memory.u8[UP : UP + SMALL] = stale.tobytes()
        assert worker.tx.push(message)
        assert daemon.rx.pop() == message
        assert daemon.rx.pop() is None, f"lap {lap}"


def test_a_record_that_was_not_published_is_not_there(ends):
    daemon, worker = ends
    for number in (0, 2, 2**64 - 1):
        forge(worker, 0, number, 8, CLOSE.KIND, body=struct.pack("<Q", 7))
        assert daemon.rx.pop() is None
    forge(worker, 0, 1, 8, CLOSE.KIND)
    assert daemon.rx.pop() == CLOSE(7)


@pytest.mark.parametrize("code", ["q", "Q", "I", "L", "list"])
def test_token_ids_of_any_sort_are_cut_into_records(ends, code):
    daemon, worker = ends
    ids = list(range(5000))
    source = ids if code == "list" else array.array(code, ids)
    sent, heard = 0, []
    while sent < len(ids):
        rest = source[sent:] if code == "list" else memoryview(source)[sent:]
        written = worker.tx.push_tokens(3, sent, rest)
        assert written > 0 and worker.tx.take_written() and not worker.tx.take_written()
        sent += written
        while (message := daemon.rx.pop()) is not None:
            assert isinstance(message, layout.Tokens if code == "I" else layout.TokensWide)
            assert (message.req, message.offset) == (3, len(heard))
            heard += message.ids
    assert heard == ids
    assert worker.tx.push_tokens(3, 0, []) == 0


@pytest.mark.parametrize(
    "ids",
    [
        [2**64],
        ["x"],
        3,
        b"bytes",
        array.array("h", [1]),
        array.array("d", [1]),
        array.array("i", [-1]),
        memoryview(array.array("q", range(8)))[::2],
    ],
    ids=str,
)
def test_token_ids_of_another_sort_are_refused_and_nothing_is_written(ends, ids):
    daemon, worker = ends
    with pytest.raises((TypeError, ValueError, OverflowError)):
        worker.tx.push_tokens(1, 0, ids)
    assert daemon.rx.pop() is None


@pytest.mark.parametrize("barrier", [channel._no_barrier, channel._lock_barrier])
def test_two_threads(monkeypatch, barrier):
    monkeypatch.setattr(channel, "_barrier", barrier)
    daemon, fd = DaemonEnd.create(bytes(16), bytes(16), 1 << 14, SMALL)
    os.close(fd)
    worker = WorkerEnd(daemon.memory)
    count = 20_000
    failed = []

    def message(number):
        return tokens([number] * (number % 300)) if number % 7 == 0 else CLOSE(number)

    def write():
        try:
            for number in range(count):
                made = message(number)
                while not worker.tx.push(made):
                    pass
        except BaseException as error:  # The reader would wait for ever.
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    for number in range(count):
        while (got := daemon.rx.pop()) is None:
            assert not failed, failed
        assert got == message(number)
    writer.join()
    assert daemon.rx.pop() is None
    daemon.memory.close()


# --- hostile peers ----------------------------------------------------------------------------------


def test_a_tail_that_cannot_be_breaks_the_writer():
    written = SMALL + 63 * 32

    def tail(value):
        daemon, fd = DaemonEnd.create(bytes(16), bytes(16), SMALL, SMALL)
        os.close(fd)
        worker = WorkerEnd(daemon.memory)
        while worker.tx.push(CLOSE(0)):
            pass
        for _ in range(64):
            daemon.rx.pop()
        while worker.tx.push(CLOSE(0)):
            pass
        daemon.memory.u64[layout.HEADER_UP_TAIL >> 3] = value
        try:
            return worker.tx.push(CLOSE(0))
        finally:
            daemon.memory.close()

    assert tail(64 * 32) is False
    assert tail(65 * 32) is True
    for value in (0, 63 * 32, 64 * 32 + 8, 64 * 32 + 1, written + 16, 2**64 - 16, 2**63):
        with pytest.raises(Broken):
            tail(value)


@pytest.mark.parametrize(
    ("length", "kind", "flags"),
    [
        (8, CLOSE.KIND, 1),
        (SMALL // 4 - 15, CLOSE.KIND, 0),
        (SMALL - 16, CLOSE.KIND, 0),
        (2**32 - 1, CLOSE.KIND, 0),
        (SMALL - 16, 0, 0),
        (0, 0, 0),
        (2**32 - 1, 0, 0),
        (8, 13, 0),
        (8, 101, 0),
        (8, 0xFFFF, 0xFFFF),
        (0, CLOSE.KIND, 0),
        (7, CLOSE.KIND, 0),
        (9, CLOSE.KIND, 0),
    ],
)
def test_a_record_that_cannot_be_breaks_the_reader(ends, length, kind, flags):
    daemon, worker = ends
    forge(worker, 0, 1, length, kind, flags)
    for _ in range(2):
        with pytest.raises(Broken):
            daemon.rx.pop()


def test_a_peer_that_scribbles_over_everything_only_breaks_itself():
    chance = random.Random(3)
    broken = 0
    for _ in range(30):
        daemon, fd = DaemonEnd.create(bytes(16), bytes(16), SMALL, SMALL)
        os.close(fd)
        worker = WorkerEnd(daemon.memory)
        for number in range(300):
            word = chance.randrange(daemon.memory.size // 8)
            daemon.memory.u64[word] = chance.choice((chance.getrandbits(64), chance.randrange(64)))
            for step in (
                lambda: worker.tx.push(CLOSE(number)),
                lambda: worker.tx.push_tokens(1, number, [number] * 40),
                lambda: daemon.tx.push(layout.Revoke(1, layout.RevokeReason.LOST)),
                daemon.rx.pop,
                worker.rx.pop,
            ):
                try:
                    step()
                except Broken:
                    broken += 1
            daemon.peer_closed()
        daemon.memory.close()
    assert broken > 0


# --- memory -----------------------------------------------------------------------------------------


def test_headers_that_lie_are_refused(ends):
    daemon, _ = ends
    memory = daemon.memory
    size = memory.size
    good = bytes(memory.u8[:128])
    for offset, code, values in (
        (layout.HEADER_MAGIC, "<Q", (0,)),
        (layout.HEADER_VERSION, "<I", (0, layout.VERSION + 1)),
        (layout.HEADER_HEADER_BYTES, "<I", (0, 64)),
        (layout.HEADER_UP_OFFSET, "<Q", (0, 64, 4097, 8192, size, 2**64 - 64)),
        (layout.HEADER_DOWN_OFFSET, "<Q", (0, 4096 + 64, 8200, size - 4032, 2**63)),
        (layout.HEADER_UP_CAPACITY, "<Q", (0, 64, 4100, 8192, size, 2**64 - 64)),
        (layout.HEADER_DOWN_CAPACITY, "<Q", (0, 4032, 4097, 8192, 2**40)),
    ):
        for value in values:
            struct.pack_into(code, memory.u8, offset, value)
            with pytest.raises(BadChannel):
                WorkerEnd(memory)
            memory.u8[:128] = good
    WorkerEnd(memory)


def test_memory_that_no_channel_needs_is_not_taken():
    daemon, fd = DaemonEnd.create(bytes(16), bytes(16), SMALL, SMALL)
    most = layout.HEADER_BYTES + 2 * layout.MAX_CAPACITY
    with pytest.raises(BadChannel, match="does not have"):
        Memory(fd, most + layout.AREA_ALIGN)
    with pytest.raises(BadChannel, match="shorter"):
        Memory(fd, most)
    daemon.memory.close()
    os.close(fd)


def test_memory_that_could_vanish_is_refused(tmp_path):
    size = 4096 * 3
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, size)
    with pytest.raises(BadChannel, match="sealed"):
        Memory(unsealed, size)
    os.close(unsealed)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, size)
    with pytest.raises((BadChannel, OSError)):
        Memory(plain, size)
    os.close(plain)
    daemon, fd = DaemonEnd.create(bytes(16), bytes(16), SMALL, SMALL)
    for wrong in (size + 4096, 0, -64, size - 8):
        with pytest.raises(BadChannel):
            WorkerEnd.open(fd, wrong)
    with pytest.raises(BadChannel):
        WorkerEnd.open(fd, size - 64)
    os.close(fd)
    daemon.memory.close()
    daemon.memory.close()
    with pytest.raises(ValueError, match="released"):
        daemon.tx.push(layout.Revoke(1, layout.RevokeReason.LOST))


def test_ringing_never_blocks():
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    channel.ring(bell)
    channel.ring(bell)
    assert os.eventfd_read(bell) == 2
    os.eventfd_write(bell, 2**64 - 2)
    channel.ring(bell)
    os.close(bell)
