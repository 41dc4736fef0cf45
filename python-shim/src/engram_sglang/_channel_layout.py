"""Numbers and messages of the shared-memory channel.

Generated from channel.toml by proto/generate.py. Not for editing.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple, Union

from ._codec import Cursor, bool_, put_str, put_u32s, put_u64s, raw

VERSION = 4
MAGIC = 0x3148434d52474e45
HEADER_BYTES = 4096
UP_CAPACITY = 16777216
DOWN_CAPACITY = 1048576
RECORD_HEAD_BYTES = 16
RECORD_ALIGN = 16
RECORD_SHARE = 4
AREA_ALIGN = 64
MIN_CAPACITY = 4096
MAX_CAPACITY = 1073741824
RUN_ALIGN = 4096

# Offsets in the header.
# u64: `magic`.
HEADER_MAGIC = 0
# u32: `version`.
HEADER_VERSION = 8
# u32: Size of the header.
HEADER_HEADER_BYTES = 12
# u64: Start of the area worker -> daemon.
HEADER_UP_OFFSET = 16
# u64: Its size in bytes.
HEADER_UP_CAPACITY = 24
# u64: Start of the area daemon -> worker.
HEADER_DOWN_OFFSET = 32
# u64: Its size in bytes.
HEADER_DOWN_CAPACITY = 40
# b16: The daemon's start.
HEADER_BOOT = 48
# b16: The session that the channel belongs to.
HEADER_SESSION = 64
# u64: Bytes that the daemon consumed in all; stored by the daemon.
HEADER_UP_TAIL = 128
# u64: Bytes that the worker consumed in all; stored by the worker.
HEADER_DOWN_TAIL = 192
# u64: 1 is added at least every 100 ms while the daemon lives.
HEADER_DAEMON_BEAT = 256
# u32: A CloseReason once the daemon ended the session, else 0.
HEADER_DAEMON_CLOSED = 264
# u64: 1 is added each tick.
HEADER_WORKER_BEAT = 320
# u32: A CloseReason once the worker ended the session, else 0.
HEADER_WORKER_CLOSED = 328

# The socket for descriptors.
HANDSHAKE_MAGIC = 0x3144464d52474e45
HANDSHAKE_SELF_TEST_BYTES = 65536
HANDSHAKE_MAX_REASON_BYTES = 1024
HANDSHAKE_MAX_DESCRIPTORS = 2


class AbortReason(enum.IntEnum):
    """Why the worker gives a save up."""

    # A deeper state of the same request exists.
    SUPERSEDED = 1
    # The state or its KV left the device before they were gathered.
    EVICTED = 2
    # It took too long.
    DEADLINE = 3
    # The weights changed.
    STALE_EPOCH = 4
    # The device refused.
    GATHER_FAILED = 5
    # The worker shuts down or drops the daemon.
    SESSION_END = 6
    # The ring had no room in time.
    NO_ROOM = 7
    # Another rank of the server gave it up.
    OTHER_RANK = 8


class CloseReason(enum.IntEnum):
    """Why a side ended the session."""

    # It ends.
    SHUTDOWN = 1
    # It found an impossible record or word.
    BROKEN_PEER = 2
    # Somebody asked for it.
    DETACHED = 3
    # The same rank attached again.
    REPLACED = 4
    # Nothing was heard of the other side for too long.
    SILENT_PEER = 5
    # It cannot go on.
    FAILED = 6


class DeclineReason(enum.IntEnum):
    """Why the daemon does not want an offered state."""

    # State and KV are stored.
    ALREADY_STORED = 1
    # No memory for it.
    NO_ROOM = 2
    # The weights are unknown, or changed.
    STALE_EPOCH = 3
    # The request is of a sort that is not saved.
    NOT_SAVED = 4
    # The request is not known, or its tokens have a gap or end before the boundary.
    BAD_REQUEST = 5
    # Policy.
    DISABLED = 6
    # A deeper state of the same request came first.
    SUPERSEDED = 7
    # Another rank of the server did not offer it, or gave it up.
    OTHER_RANK = 8


class Finish(enum.IntEnum):
    """How a request ended."""

    # The model ended it, or a stop sequence.
    STOP = 1
    # The limit of tokens.
    LENGTH = 2
    # It was aborted.
    ABORT = 3
    # The server failed it.
    ERROR = 4


class Miss(enum.IntEnum):
    """Why a lookup gave no lease."""

    # No snapshot lies on the request's path.
    NOTHING_STORED = 1
    # The device already has a state as deep as any snapshot.
    DEVICE_AS_DEEP = 2
    # The request is of a sort that is neither saved nor restored.
    NOT_SAVED = 3
    # The gain is below the configured minimum.
    BELOW_MINIMUM = 4
    # Restoring is predicted to take longer than prefill.
    SLOWER_THAN_PREFILL = 5
    # Too much is in flight.
    BUSY = 6
    # RAM has no room for what must come from below.
    NO_ROOM = 7
    # The weights are unknown, or not those of the request's start.
    STALE_EPOCH = 8
    # The request is not known, or its tokens have a gap.
    BAD_REQUEST = 9


class Outcome(enum.IntEnum):
    """How a lease ended."""

    # The request went on from the restored state.
    USED = 1
    # It took too long.
    DEADLINE = 2
    # The request was aborted.
    ABORTED = 3
    # No slot or rows were free.
    NO_DEVICE_ROOM = 4
    # A piece did not come.
    FILL_FAILED = 5
    # Meanwhile the device had a state as deep.
    DEVICE_AS_DEEP = 6
    # The worker shuts down or drops the daemon.
    SESSION_END = 7
    # Another rank of the server gave it up.
    OTHER_RANK = 8


class Piece(enum.IntEnum):
    """The two sorts of pieces that move through the ring."""

    # The recurrent state of all layers at a boundary.
    STATE = 1
    # Attention KV of a run of tokens.
    KV = 2


class RevokeReason(enum.IntEnum):
    """Why the daemon takes a lease back."""

    # It was held too long.
    DEADLINE = 1
    # The daemon ends.
    SHUTDOWN = 2
    # A piece of it went away or was corrupt.
    LOST = 3
    # The weights changed.
    STALE_EPOCH = 4


class Status(enum.IntEnum):
    """How the copy of a piece, or a save, ended."""

    # Done.
    OK = 0
    # No memory for it.
    NO_ROOM = 1
    # The piece went away or was corrupt.
    LOST = 2
    # Given up by either side.
    CANCELLED = 3
    # The message does not fit the lease or the save.
    BAD_REQUEST = 4
    # The copy failed.
    FAILED = 5
    # The weights changed meanwhile.
    STALE_EPOCH = 6
    # Another rank of the server did not bring its shard.
    OTHER_RANK = 7


class Tier(enum.IntEnum):
    """Where bytes lie, fastest first."""

    # Memory of the device, beside the server's pools.
    VRAM = 1
    # The daemon's arena.
    RAM = 2
    # Files.
    DISK = 3
    # An object store.
    REMOTE = 4


class RequestFlags(enum.IntFlag):
    """Which optional parts of a request are there (an absent part is not an empty one), and what
    must not be done.
    """

    # `session_id` was given.
    HAS_SESSION = 1
    # `extra_key` was given.
    HAS_EXTRA_KEY = 2
    # `cache_salt` was given.
    HAS_CACHE_SALT = 4
    # An adapter is used; `adapter` is the digest of its content.
    HAS_ADAPTER = 8
    # `tenant` was given.
    HAS_TENANT = 16
    # Multimodal input or embedding override: neither saved nor restored.
    NOT_SAVED = 32


_HANDSHAKEREQUEST_0 = struct.Struct("<QII16s32s")


class HandshakeRequest(NamedTuple):
    """What the worker says on the socket for descriptors."""

    # `handshake.magic`.
    magic: int
    # Version of the channel.
    version: int
    # Descriptors that come with it: 0 or 1.
    descriptors: int
    # As answered by Attach.
    session: bytes
    # As answered by Attach.
    secret: bytes

    def encode(self) -> bytes:
        """The body's bytes."""
        return _HANDSHAKEREQUEST_0.pack(
            self.magic,
            self.version,
            self.descriptors,
            raw(self.session, 16),
            raw(self.secret, 32),
        )

    @classmethod
    def decode(cls, data: bytes) -> HandshakeRequest:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("HandshakeRequest", data)
        (magic, version, descriptors, session, secret,) = body.fixed("magic", _HANDSHAKEREQUEST_0)
        body.end()
        return cls(
            magic,
            version,
            descriptors,
            session,
            secret,
        )


_HANDSHAKEREPLY_0 = struct.Struct("<QIIIQI")


class HandshakeReply(NamedTuple):
    """What the daemon answers there."""

    # `handshake.magic`.
    magic: int
    # Version of the channel.
    version: int
    # 0, or a `Refusal.Reason`.
    status: int
    # Descriptors that come with it: 0 or 2.
    descriptors: int
    # Size of the channel's memory.
    channel_bytes: int
    # A `TransferMode` of engram.proto; 0 unless the status is 0.
    mode: int
    # For people: why the status is not 0.
    reason: str

    def encode(self) -> bytes:
        """The body's bytes."""
        return (
            _HANDSHAKEREPLY_0.pack(
                self.magic,
                self.version,
                self.status,
                self.descriptors,
                self.channel_bytes,
                self.mode,
            )
            + put_str(self.reason)
        )

    @classmethod
    def decode(cls, data: bytes) -> HandshakeReply:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("HandshakeReply", data)
        (magic, version, status, descriptors, channel_bytes, mode,) = body.fixed("magic", _HANDSHAKEREPLY_0)
        reason = body.str("reason")
        body.end()
        return cls(
            magic,
            version,
            status,
            descriptors,
            channel_bytes,
            mode,
            reason,
        )


_REQUESTOPEN_0 = struct.Struct("<QIIQ")
_REQUESTOPEN_6 = struct.Struct("<32s")


class RequestOpen(NamedTuple):
    """A request exists."""

    # The request; unique in the session.
    req: int
    # Counts resubmissions and retractions of it.
    attempt: int
    # Which parts are there.
    flags: RequestFlags
    # Weight epoch at its start.
    epoch: int
    # The server's name of the request.
    rid: str
    # Conversation that the client named.
    session_id: str
    # Part of the namespace.
    tenant: str
    # Part of the namespace.
    extra_key: str
    # Part of the namespace.
    cache_salt: str
    # Part of the namespace: digest of the adapter's content.
    adapter: bytes

    KIND = 1  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return (
            _REQUESTOPEN_0.pack(
                self.req,
                self.attempt,
                self.flags,
                self.epoch,
            )
            + put_str(self.rid)
            + put_str(self.session_id)
            + put_str(self.tenant)
            + put_str(self.extra_key)
            + put_str(self.cache_salt)
            + _REQUESTOPEN_6.pack(
                raw(self.adapter, 32),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> RequestOpen:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("RequestOpen", data)
        (req, attempt, flags, epoch,) = body.fixed("req", _REQUESTOPEN_0)
        rid = body.str("rid")
        session_id = body.str("session_id")
        tenant = body.str("tenant")
        extra_key = body.str("extra_key")
        cache_salt = body.str("cache_salt")
        (adapter,) = body.fixed("adapter", _REQUESTOPEN_6)
        body.end()
        return cls(
            req,
            attempt,
            body.choice("flags", RequestFlags, flags),
            epoch,
            rid,
            session_id,
            tenant,
            extra_key,
            cache_salt,
            adapter,
        )


_TOKENS_0 = struct.Struct("<QI")


class Tokens(NamedTuple):
    """Tokens of a request from `offset` on. A gap poisons the request: it is not saved."""

    # The request.
    req: int
    # Tokens that were sent before.
    offset: int
    # Token ids.
    ids: Sequence[int]

    KIND = 2  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return (
            _TOKENS_0.pack(
                self.req,
                self.offset,
            )
            + put_u32s(self.ids)
        )

    @classmethod
    def decode(cls, data: bytes) -> Tokens:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Tokens", data)
        (req, offset,) = body.fixed("req", _TOKENS_0)
        ids = body.u32s("ids")
        body.end()
        return cls(
            req,
            offset,
            ids,
        )


_TOKENSWIDE_0 = struct.Struct("<QI")


class TokensWide(NamedTuple):
    """The same with ids of 64 bits, as some servers keep them: so that a worker only has to copy
    memory. An id that does not fit into 32 bits poisons the request.
    """

    # The request.
    req: int
    # Tokens that were sent before.
    offset: int
    # Token ids.
    ids: Sequence[int]

    KIND = 12  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return (
            _TOKENSWIDE_0.pack(
                self.req,
                self.offset,
            )
            + put_u64s(self.ids)
        )

    @classmethod
    def decode(cls, data: bytes) -> TokensWide:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("TokensWide", data)
        (req, offset,) = body.fixed("req", _TOKENSWIDE_0)
        ids = body.u64s("ids")
        body.end()
        return cls(
            req,
            offset,
            ids,
        )


_LOOKUP_0 = struct.Struct("<QIIII")


class Lookup(NamedTuple):
    """The longest restorable boundary up to `max_boundary`, please. One answer for each (req,
    attempt).
    """

    # The request.
    req: int
    # Attempt of the request.
    attempt: int
    # Largest useful boundary, in tokens.
    max_boundary: int
    # Boundary of the deepest state that the device has; 0: none.
    device_boundary: int
    # The device has the KV of tokens [0, device_kv).
    device_kv: int

    KIND = 3  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _LOOKUP_0.pack(
            self.req,
            self.attempt,
            self.max_boundary,
            self.device_boundary,
            self.device_kv,
        )

    @classmethod
    def decode(cls, data: bytes) -> Lookup:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Lookup", data)
        (req, attempt, max_boundary, device_boundary, device_kv,) = body.fixed("req", _LOOKUP_0)
        body.end()
        return cls(
            req,
            attempt,
            max_boundary,
            device_boundary,
            device_kv,
        )


_FILL_0 = struct.Struct("<QIIIQQ")


class Fill(NamedTuple):
    """Copy a run of pieces of a leased snapshot into the window."""

    # The lease.
    lease: int
    # State, or KV.
    piece: Piece
    # The first one: 0 for the state; for KV the piece [parts[2 * index], parts[2 * index + 1]).
    index: int
    # How many, at least 1.
    count: int
    # Where in the window the first one is to start, in bytes.
    ring_offset: int
    # From there to the end of the last one.
    bytes: int

    KIND = 4  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _FILL_0.pack(
            self.lease,
            self.piece,
            self.index,
            self.count,
            self.ring_offset,
            self.bytes,
        )

    @classmethod
    def decode(cls, data: bytes) -> Fill:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Fill", data)
        (lease, piece, index, count, ring_offset, bytes,) = body.fixed("lease", _FILL_0)
        body.end()
        return cls(
            lease,
            body.choice("piece", Piece, piece),
            index,
            count,
            ring_offset,
            bytes,
        )


_RELEASE_0 = struct.Struct("<QII")


class Release(NamedTuple):
    """The lease is over."""

    # The lease.
    lease: int
    # How it ended.
    outcome: Outcome
    # Tokens that were really taken from it; 0 unless the outcome is `used`.
    reused: int

    KIND = 5  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _RELEASE_0.pack(
            self.lease,
            self.outcome,
            self.reused,
        )

    @classmethod
    def decode(cls, data: bytes) -> Release:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Release", data)
        (lease, outcome, reused,) = body.fixed("lease", _RELEASE_0)
        body.end()
        return cls(
            lease,
            body.choice("outcome", Outcome, outcome),
            reused,
        )


_OFFER_0 = struct.Struct("<QQIIQ")


class Offer(NamedTuple):
    """A state exists on the device."""

    # The save; unique in the instance and equal on all its ranks.
    save: int
    # The request on whose tokens it lies.
    req: int
    # Attempt of the request.
    attempt: int
    # Boundary of the state, in tokens.
    boundary: int
    # Weight epoch.
    epoch: int

    KIND = 6  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _OFFER_0.pack(
            self.save,
            self.req,
            self.attempt,
            self.boundary,
            self.epoch,
        )

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Offer", data)
        (save, req, attempt, boundary, epoch,) = body.fixed("save", _OFFER_0)
        body.end()
        return cls(
            save,
            req,
            attempt,
            boundary,
            epoch,
        )


_DRAIN_0 = struct.Struct("<QIIIQQ")


class Drain(NamedTuple):
    """A run of wanted pieces lies whole in the window (the events of its copies are done)."""

    # The save.
    save: int
    # State, or KV.
    piece: Piece
    # The first one: 0 for the state; for KV the index of the pair in `Want.parts`.
    index: int
    # How many, at least 1.
    count: int
    # Where in the window the first one starts, in bytes.
    ring_offset: int
    # From there to the end of the last one.
    bytes: int

    KIND = 7  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _DRAIN_0.pack(
            self.save,
            self.piece,
            self.index,
            self.count,
            self.ring_offset,
            self.bytes,
        )

    @classmethod
    def decode(cls, data: bytes) -> Drain:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Drain", data)
        (save, piece, index, count, ring_offset, bytes,) = body.fixed("save", _DRAIN_0)
        body.end()
        return cls(
            save,
            body.choice("piece", Piece, piece),
            index,
            count,
            ring_offset,
            bytes,
        )


_SAVEABORT_0 = struct.Struct("<QI")


class SaveAbort(NamedTuple):
    """The worker gives the save up; what was drained is dropped."""

    # The save.
    save: int
    # Why.
    reason: AbortReason

    KIND = 8  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _SAVEABORT_0.pack(
            self.save,
            self.reason,
        )

    @classmethod
    def decode(cls, data: bytes) -> SaveAbort:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("SaveAbort", data)
        (save, reason,) = body.fixed("save", _SAVEABORT_0)
        body.end()
        return cls(
            save,
            body.choice("reason", AbortReason, reason),
        )


_TURNFINISHED_0 = struct.Struct("<QIIIIII")


class TurnFinished(NamedTuple):
    """The request ended, and all its tokens were sent. Said also when no state was offered."""

    # The request.
    req: int
    # Attempt of the request.
    attempt: int
    # Tokens of the prompt.
    prompt_tokens: int
    # Tokens of prompt and answer.
    total_tokens: int
    # Tokens of the prompt that were not prefilled, restored ones included.
    cached_tokens: int
    # Tokens of the prompt that were prefilled.
    prefilled_tokens: int
    # How it ended.
    finish: Finish

    KIND = 9  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _TURNFINISHED_0.pack(
            self.req,
            self.attempt,
            self.prompt_tokens,
            self.total_tokens,
            self.cached_tokens,
            self.prefilled_tokens,
            self.finish,
        )

    @classmethod
    def decode(cls, data: bytes) -> TurnFinished:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("TurnFinished", data)
        (req, attempt, prompt_tokens, total_tokens, cached_tokens, prefilled_tokens, finish,) = body.fixed("req", _TURNFINISHED_0)
        body.end()
        return cls(
            req,
            attempt,
            prompt_tokens,
            total_tokens,
            cached_tokens,
            prefilled_tokens,
            body.choice("finish", Finish, finish),
        )


_REQUESTCLOSE_0 = struct.Struct("<Q")


class RequestClose(NamedTuple):
    """Nothing more will come for this request but what completes its saves and leases."""

    # The request.
    req: int

    KIND = 10  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _REQUESTCLOSE_0.pack(
            self.req,
        )

    @classmethod
    def decode(cls, data: bytes) -> RequestClose:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("RequestClose", data)
        (req,) = body.fixed("req", _REQUESTCLOSE_0)
        body.end()
        return cls(
            req,
        )


_EPOCH_0 = struct.Struct("<Q32s")


class Epoch(NamedTuple):
    """The weights changed, or are about to."""

    # The new weight epoch.
    epoch: int
    # Digest of the weights; zeros: not known yet, and nothing is saved or restored until it is.
    weights_digest: bytes

    KIND = 11  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _EPOCH_0.pack(
            self.epoch,
            raw(self.weights_digest, 32),
        )

    @classmethod
    def decode(cls, data: bytes) -> Epoch:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Epoch", data)
        (epoch, weights_digest,) = body.fixed("epoch", _EPOCH_0)
        body.end()
        return cls(
            epoch,
            weights_digest,
        )


_LOOKUPRESULT_0 = struct.Struct("<QIQIIIIQ")


class LookupResult(NamedTuple):
    """A lease on a snapshot that is restorable to `boundary`, or a miss. The KV that the device
    lacks is [kv_from, boundary), in the packed pieces `parts`, ascending by their starts; a
    piece may reach beyond either end: scatter only the rows that are needed. Where pieces
    overlap, the later one counts: the end of a piece may be another prompt's.
    """

    # The request.
    req: int
    # Attempt of the request.
    attempt: int
    # The lease; 0: a miss.
    lease: int
    # Boundary of the state, in tokens.
    boundary: int
    # First token whose KV is to be taken from the pieces.
    kv_from: int
    # Lowest tier that bytes come from; none: a miss.
    tier: Tier | None
    # Why it is a miss; none: it is not.
    reason: Miss | None
    # Bytes that will move.
    bytes: int
    # Pieces of KV as pairs [a0, b0, a1, b1, ...] of tokens, half open.
    parts: Sequence[int]

    KIND = 101  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return (
            _LOOKUPRESULT_0.pack(
                self.req,
                self.attempt,
                self.lease,
                self.boundary,
                self.kv_from,
                self.tier or 0,
                self.reason or 0,
                self.bytes,
            )
            + put_u32s(self.parts)
        )

    @classmethod
    def decode(cls, data: bytes) -> LookupResult:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("LookupResult", data)
        (req, attempt, lease, boundary, kv_from, tier, reason, bytes,) = body.fixed("req", _LOOKUPRESULT_0)
        parts = body.u32s("parts")
        body.end()
        return cls(
            req,
            attempt,
            lease,
            boundary,
            kv_from,
            body.optional("tier", Tier, tier),
            body.optional("reason", Miss, reason),
            bytes,
            parts,
        )


_FILLED_0 = struct.Struct("<QIIII")


class Filled(NamedTuple):
    """Answer to Fill. With `ok`, these pieces are in the window."""

    # The lease.
    lease: int
    # As in Fill.
    piece: Piece
    # The first one.
    index: int
    # How many, at least 1.
    count: int
    # How it ended.
    status: Status

    KIND = 102  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _FILLED_0.pack(
            self.lease,
            self.piece,
            self.index,
            self.count,
            self.status,
        )

    @classmethod
    def decode(cls, data: bytes) -> Filled:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Filled", data)
        (lease, piece, index, count, status,) = body.fixed("lease", _FILLED_0)
        body.end()
        return cls(
            lease,
            body.choice("piece", Piece, piece),
            index,
            count,
            body.choice("status", Status, status),
        )


_WANT_0 = struct.Struct("<QI")


class Want(NamedTuple):
    """Answer to an Offer: what the daemon lacks."""

    # The save.
    save: int
    # Whether the state is wanted.
    need_state: bool
    # Wanted pieces of KV as pairs [a0, b0, a1, b1, ...], cut at multiples of block_tokens.
    parts: Sequence[int]

    KIND = 103  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return (
            _WANT_0.pack(
                self.save,
                self.need_state,
            )
            + put_u32s(self.parts)
        )

    @classmethod
    def decode(cls, data: bytes) -> Want:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Want", data)
        (save, need_state,) = body.fixed("save", _WANT_0)
        parts = body.u32s("parts")
        body.end()
        return cls(
            save,
            body.choice("need_state", bool_, need_state),
            parts,
        )


_DECLINE_0 = struct.Struct("<QI")


class Decline(NamedTuple):
    """Answer to an Offer: nothing is wanted, and the save is over."""

    # The save.
    save: int
    # Why.
    reason: DeclineReason

    KIND = 104  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _DECLINE_0.pack(
            self.save,
            self.reason,
        )

    @classmethod
    def decode(cls, data: bytes) -> Decline:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Decline", data)
        (save, reason,) = body.fixed("save", _DECLINE_0)
        body.end()
        return cls(
            save,
            body.choice("reason", DeclineReason, reason),
        )


_DRAINED_0 = struct.Struct("<QIIII")


class Drained(NamedTuple):
    """Answer to Drain: the room of these pieces in the window is the worker's again."""

    # The save.
    save: int
    # As in Drain.
    piece: Piece
    # The first one.
    index: int
    # How many, at least 1.
    count: int
    # How it ended.
    status: Status

    KIND = 105  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _DRAINED_0.pack(
            self.save,
            self.piece,
            self.index,
            self.count,
            self.status,
        )

    @classmethod
    def decode(cls, data: bytes) -> Drained:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Drained", data)
        (save, piece, index, count, status,) = body.fixed("save", _DRAINED_0)
        body.end()
        return cls(
            save,
            body.choice("piece", Piece, piece),
            index,
            count,
            body.choice("status", Status, status),
        )


_SAVED_0 = struct.Struct("<QI16s")


class Saved(NamedTuple):
    """The end of a save. With `ok` the snapshot is visible (in RAM; durable later): the shards of
    all ranks of the instance are in.
    """

    # The save.
    save: int
    # How it ended.
    status: Status
    # The snapshot; zeros unless `ok`.
    snapshot: bytes

    KIND = 106  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _SAVED_0.pack(
            self.save,
            self.status,
            raw(self.snapshot, 16),
        )

    @classmethod
    def decode(cls, data: bytes) -> Saved:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Saved", data)
        (save, status, snapshot,) = body.fixed("save", _SAVED_0)
        body.end()
        return cls(
            save,
            body.choice("status", Status, status),
            snapshot,
        )


_REVOKE_0 = struct.Struct("<QI")


class Revoke(NamedTuple):
    """The daemon takes a lease back. Fills in flight still answer, and the worker still says
    Release.
    """

    # The lease.
    lease: int
    # Why.
    reason: RevokeReason

    KIND = 107  # type: ignore[misc]

    def encode(self) -> bytes:
        """The body's bytes."""
        return _REVOKE_0.pack(
            self.lease,
            self.reason,
        )

    @classmethod
    def decode(cls, data: bytes) -> Revoke:
        """Reads a whole body, or raises DecodeError."""
        body = Cursor("Revoke", data)
        (lease, reason,) = body.fixed("lease", _REVOKE_0)
        body.end()
        return cls(
            lease,
            body.choice("reason", RevokeReason, reason),
        )


Up = Union[
    RequestOpen,
    Tokens,
    Lookup,
    Fill,
    Release,
    Offer,
    Drain,
    SaveAbort,
    TurnFinished,
    RequestClose,
    Epoch,
    TokensWide,
]

# Messages of the worker, by kind.
UP = {
    RequestOpen.KIND: RequestOpen,
    Tokens.KIND: Tokens,
    Lookup.KIND: Lookup,
    Fill.KIND: Fill,
    Release.KIND: Release,
    Offer.KIND: Offer,
    Drain.KIND: Drain,
    SaveAbort.KIND: SaveAbort,
    TurnFinished.KIND: TurnFinished,
    RequestClose.KIND: RequestClose,
    Epoch.KIND: Epoch,
    TokensWide.KIND: TokensWide,
}

Down = Union[
    LookupResult,
    Filled,
    Want,
    Decline,
    Drained,
    Saved,
    Revoke,
]

# Messages of the daemon, by kind.
DOWN = {
    LookupResult.KIND: LookupResult,
    Filled.KIND: Filled,
    Want.KIND: Want,
    Decline.KIND: Decline,
    Drained.KIND: Drained,
    Saved.KIND: Saved,
    Revoke.KIND: Revoke,
}
