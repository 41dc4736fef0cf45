"""Telling the daemon why this worker will not attach, so that people who look there find the reason.

A thread of its own tries until a daemon has heard it once. Nothing depends on it.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import threading
from typing import Any

from . import __version__
from . import _channel_layout as layout
from .link import LONGEST_RETRY_S, PROTOCOL, dial, token_of
from .settings import Settings

log = logging.getLogger(__name__)

_LAST_CALL_S = 3.0


_last: tuple[threading.Event, threading.Thread] | None = None


def tell(settings: Settings, why: str, model: str, size: int, rank: int) -> None:
    """Starts telling, instead of what was to be told before."""
    global _last
    _stop()
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(over, settings, why, model, size, rank), name="engram-refused", daemon=True)
    _last = over, thread
    thread.start()


@atexit.register
def _stop() -> None:
    """No thread may be inside gRPC while the interpreter goes away."""
    if _last is not None:
        over, thread = _last
        over.set()
        thread.join(_LAST_CALL_S)


def _tell(over: threading.Event, settings: Settings, why: str, model: str, size: int, rank: int) -> None:
    instance, pause = os.urandom(16), max(settings.retry_ms, 10) / 1000
    while not over.is_set():
        try:
            _tell_once(settings, why, model, size, rank, instance)
            return
        except Exception as error:  # whatever gRPC or the system comes up with
            log.debug("engram: no daemon to tell why not: %s", error)
        over.wait(pause)
        pause = min(2 * pause, LONGEST_RETRY_S)


def _tell_once(settings: Settings, why: str, model: str, size: int, rank: int, instance: bytes) -> None:
    from ._pb.engram.v1 import engram_pb2 as pb
    from ._pb.engram.v1 import engram_pb2_grpc as pb_grpc

    request: Any = pb.AttachRequest(
        protocol=PROTOCOL,
        channel_version=layout.VERSION,
        instance=instance,
        shard=pb.Shard(attn_tp_size=size, attn_tp_rank=rank),
        model=pb.ModelIdentity(display_name=model),
        versions={"sglang": importlib.metadata.version("sglang"), "engram-sglang": __version__},
        token=token_of(settings),
        not_attaching=why[:1000],
    )
    with dial(settings) as channel:
        pb_grpc.WorkerStub(channel).Attach(request, timeout=_LAST_CALL_S)
