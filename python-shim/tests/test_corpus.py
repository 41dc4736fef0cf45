"""Messages of the channel from the corpus that the Rust half reads, too, and damaged ones.

A file of tests/corpus/channel-*: kind (u16), then body. Both halves take the same bytes and refuse the same.
"""

import pathlib
import random
import struct
import tracemalloc

import pytest

from engram_sglang import _channel_layout as layout
from engram_sglang._codec import DecodeError

CORPUS = pathlib.Path(__file__).resolve().parents[2] / "tests/corpus"
DIRECTIONS = {"channel-up": layout.UP, "channel-down": layout.DOWN}
HANDSHAKE = {"handshake-request": layout.HandshakeRequest, "handshake-reply": layout.HandshakeReply}
WORDS = [0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]
ROUNDS = 4000


def parse(folder, data):
    """The bytes that are written for the message in `data`. Raises DecodeError."""
    if folder in HANDSHAKE:
        return HANDSHAKE[folder].decode(data).encode()
    if len(data) < 2:
        raise DecodeError("no kind")
    (kind,) = struct.unpack_from("<H", data)
    known = DIRECTIONS[folder].get(kind)
    if known is None:
        raise DecodeError("no such kind")
    return struct.pack("<H", kind) + known.decode(data[2:]).encode()


def files(folder, verdict):
    found = sorted((CORPUS / folder / verdict).iterdir())
    assert found
    return found


FOLDERS = [*DIRECTIONS, *HANDSHAKE]


@pytest.mark.parametrize("folder", FOLDERS)
def test_valid_messages_come_back(folder):
    for path in files(folder, "valid"):
        data = path.read_bytes()
        assert parse(folder, data) == data, path.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_hostile_messages_are_refused(folder):
    for path in files(folder, "hostile"):
        with pytest.raises(DecodeError):
            parse(folder, path.read_bytes())


def damaged(rng, seeds):
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(WORDS))
            case _:
                other = rng.choice(seeds)
                data[at:at] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


@pytest.mark.parametrize("folder", FOLDERS)
def test_damaged_messages_are_refused_or_come_back(folder):
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    seeds = [path.read_bytes() for verdict in ("valid", "hostile") for path in files(folder, verdict)]
    tracemalloc.start()
    try:
        for round_ in range(ROUNDS):
            data = rng.randbytes(rng.randrange(64)) if round_ % 4 == 0 else damaged(rng, seeds)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                taken = parse(folder, data)
            except DecodeError:
                taken = data
            _, most = tracemalloc.get_traced_memory()
            assert taken == data, (seed, data)
            assert most - before < 64 * len(data) + (64 << 10), (seed, data)
    finally:
        tracemalloc.stop()
