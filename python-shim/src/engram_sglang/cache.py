"""SGLang's cache for hybrid models, which tells the shim what happens: what all releases have in common.

Each release has an adapter with the registered class on top of this: how SGLang says that a state comes
into the tree, that a request is admitted, and that it ended. What the shim does to the cache is in `tree`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ._channel_layout import Finish
from .seam import Ending, Names
from .shim import Shim

log = logging.getLogger(__name__)

CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."

SIGNATURES: dict[str, tuple[str, ...]] = {
    CACHE + "insert": ("params",),
    CACHE + "match_prefix": ("params",),
    CACHE + "evict": ("params",),
    CACHE + "inc_lock_ref": ("node_id", "skip_lock_components"),
    CACHE + "dec_lock_ref": ("node_id", "params"),
    CACHE + "check_hicache_events": (),
    CACHE + "is_backuped": ("node_id",),
    CACHE + "is_root": ("node_id",),
    CACHE + "reset": (),
    CACHE + "release_host_resources": (),
    CACHE + "full_evictable_size": (),
    SCHEDULER + "__init__": (),
    SCHEDULER + "_prefetch_kvcache": ("req",),
    SCHEDULER + "get_next_batch_to_run": ("running_batch", "last_batch"),
    UPDATER + "update_weights_from_disk": ("recv_req",),
    UPDATER + "update_weights_from_distributed": ("recv_req",),
    UPDATER + "update_weights_from_tensor": ("recv_req",),
    UPDATER + "update_weights_from_ipc": ("recv_req",),
    "sglang.srt.mem_cache.base_prefix_cache.InsertParams": ("key", "value", "mamba_value", "prev_prefix_len"),
    "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams": ("key", "req", "cow_mamba"),
    "sglang.srt.mem_cache.base_prefix_cache.EvictParams": ("num_tokens", "mamba_num"),
}

UPDATES = [
    UPDATER + name
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )
]

F = TypeVar("F", bound=Callable[..., Any])

_UNSAVED = ("multimodal_inputs", "positional_embed_overrides", "input_embeds", "lora_id", "session")


def names_of(req: Any, cache_salt: str | None, *unsaved: str) -> Names:
    """What of a request belongs to its namespace, and whether it may be saved: not if one of the fields
    `unsaved`, or of those that all releases have, is set."""
    return Names(
        rid=req.rid,
        session_id=req.session_id,
        extra_key=req.extra_key,
        cache_salt=cache_salt,
        saved=all(getattr(req, name) is None for name in (*_UNSAVED, *unsaved)),
    )


def ending_of(req: Any) -> Ending:
    """How a request ended."""
    kind = type(req.finished_reason).__name__
    finish = {"FINISH_LENGTH": Finish.LENGTH, "FINISH_ABORT": Finish.ABORT}.get(kind, Finish.STOP)
    prompt = len(req.origin_input_ids)
    return Ending(prompt, prompt + len(req.output_ids), int(req.cached_tokens or 0), finish)


def tokens_of(req: Any, count: int) -> Any:
    """The request's tokens, at least `count` of them; in two parts, where one would have to be made."""
    tokens = req.full_untruncated_fill_ids
    return tokens if len(tokens) >= count else (req.origin_input_ids, req.output_ids)


def told(method: F) -> F:
    """A method that reads something off SGLang for the shim: what it meets there never reaches SGLang."""

    @functools.wraps(method)
    def guarded(self: EngramCache, *args: Any) -> None:
        if self.shim is not None:
            self.shim.poke()
        try:
            method(self, *args)
        except Exception:
            if self.shim is not None:
                self.shim._fault(method.__name__)

    return guarded  # type: ignore[return-value]


class EngramCache(UnifiedRadixCache):
    """See the module."""

    def __init__(self, params: Any) -> None:
        self.shim: Shim | None = None
        self._engram_req: Any = None
        self._engram_seen: Any = None
        super().__init__(params)

    def _engram_names(self, req: Any) -> Names:
        """What belongs to the request's namespace in this release."""
        raise NotImplementedError

    # --- Saves ---

    def insert(self, params: Any) -> Any:
        if self.shim is not None:
            self.shim.used()
        result = super().insert(params)
        if self.shim is not None and self._engram_req is not None and params.mamba_value is not None:
            self._engram_inserted(params, result)
        return result

    @told
    def _engram_inserted(self, params: Any, result: Any) -> None:
        req, shim, node = self._engram_req, self.shim, result.last_device_node
        if shim is None or node is None or self.is_root(node) or self._engram_is_short(result):
            return
        boundary = len(params.key)
        old = result.prefix_len >= boundary
        shim.inserted(req, self._engram_names(req), params.key.token_ids, boundary, node, old)

    def _engram_is_short(self, result: Any) -> bool:
        """Whether less than the key came into the tree."""
        return False

    # --- The life of a request ---

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        if params.req is not None:
            self._engram_seen = (params.req, result)
        return result

    @told
    def _engram_queued(self, req: Any, match: Any, device: int, maximum: int) -> None:
        """A request is being queued: `match` is what the device has of it, `device` the boundary of that,
        `maximum` the largest useful one."""
        shim = self.shim
        if shim is None:
            return
        names, tokens = self._engram_names(req), req.full_untruncated_fill_ids
        shim.enqueue(req, names, tokens, maximum, device, max(device, match.full_kv_hit_length))
        if device and not self.is_root(match.last_device_node):
            # A state that is on the device, but perhaps not at the daemon.
            shim.inserted(req, names, tokens, device, match.last_device_node, True)

    @told
    def _engram_over(self, req: Any) -> None:
        shim = self.shim
        if shim is not None and req.finished():
            ending = ending_of(req)
            shim.finished(req, req.rid, tokens_of(req, ending.total_tokens), ending)

    # --- The scheduler's round ---

    def check_hicache_events(self) -> None:
        if self.shim is not None:
            self.shim.tick()

    def has_pending_cache_operations(self) -> bool:
        if self.shim is None:
            return False
        if self.shim.alone:
            self.shim.tick()
        # Several ranks tick together, where the scheduler's round begins.
        return self.shim.is_busy()

    def is_backuped(self, node_id: Any) -> bool:
        # Any anchor will do: the shim looks up by tokens.
        return True

    def get_last_hash_value(self, node_id: Any) -> str | None:
        return None

    def get_prefix_hash_values(self, node_id: Any) -> list[str]:
        return []

    def clear_storage_backend(self) -> bool:
        # 0.5.23 answers success whatever this says.
        log.warning("engram: nothing is cleared: snapshots are deleted through the daemon, not through the server")
        return False

    def reset(self) -> None:
        if self.shim is not None:
            self.shim.reset()
        super().reset()

    def release_host_resources(self) -> None:
        if self.shim is not None:
            self.shim.shutdown()
        super().release_host_resources()
