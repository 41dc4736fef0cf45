"""A client of the daemon's REST surface, for programs that use a memory beside a model.

`Client` waits, `AsyncClient` is awaited; both have the same methods with the same parameters. Only
Python's own library is needed: nothing of SGLang, and nothing of the shim beside this package.
"""

from .answers import Chat, ChatChunk, Choice, ChunkChoice, Generated, Message, Origin, Tokenized, Usage
from .async_client import AsyncClient
from .async_stream import AsyncStream
from .call import Page
from .conversations import (
    Branch,
    Comparison,
    Conversation,
    ConversationView,
    Parting,
    Policy,
    Side,
    TokenStream,
    TreeNode,
    TreeTurn,
    Turn,
)
from .daemon import Health, Hook, Load, Namespace, Readiness, Refusal, Status, Tier, Worker, Workers
from .errors import (
    AlreadyExists,
    Busy,
    Changed,
    Conflict,
    EngramError,
    InternalError,
    InvalidRequest,
    Mismatch,
    NoAnswerInTime,
    NoSpace,
    NoState,
    NotFound,
    NotImplementedByDaemon,
    ProtocolError,
    QuotaExceeded,
    TimedOut,
    TokensUnknown,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unreachable,
    UpstreamError,
)
from .events import Event
from .portable import Exported, ImportedSnapshot
from .records import Record
from .snapshots import Deleted, RestoredSnapshot, ResumedSnapshot, SavedSnapshot, Snapshot
from .sync_client import Client
from .sync_stream import Stream

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Branch",
    "Busy",
    "Changed",
    "Chat",
    "ChatChunk",
    "Choice",
    "ChunkChoice",
    "Client",
    "Comparison",
    "Conflict",
    "Conversation",
    "ConversationView",
    "Deleted",
    "EngramError",
    "Event",
    "Exported",
    "Generated",
    "Health",
    "Hook",
    "ImportedSnapshot",
    "InternalError",
    "InvalidRequest",
    "Load",
    "Message",
    "Mismatch",
    "Namespace",
    "NoAnswerInTime",
    "NoSpace",
    "NoState",
    "NotFound",
    "NotImplementedByDaemon",
    "Origin",
    "Page",
    "Parting",
    "Policy",
    "ProtocolError",
    "QuotaExceeded",
    "Readiness",
    "Record",
    "Refusal",
    "RestoredSnapshot",
    "ResumedSnapshot",
    "SavedSnapshot",
    "Side",
    "Snapshot",
    "Status",
    "Stream",
    "Tier",
    "TimedOut",
    "TokenStream",
    "Tokenized",
    "TokensUnknown",
    "TooLarge",
    "TreeNode",
    "TreeTurn",
    "Turn",
    "Unauthorized",
    "Unavailable",
    "Unreachable",
    "UpstreamError",
    "Usage",
    "Worker",
    "Workers",
]
