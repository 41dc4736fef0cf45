"""SGLang 0.5.23: the registered cache, and what the shim needs of it.

The gate is the one that SGLang has for caches which fetch asynchronously: `Scheduler.enable_lmcache`, set
on the scheduler once it is built, makes it call `check_hicache_events` in each iteration (the tick),
`prefetch_from_storage` when a request is queued, `check_prefetch_progress` when it is considered, and
`has_pending_cache_operations` when it asks whether it is idle.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from . import cache
from .cache import CACHE, UPDATER, UPDATES, EngramCache, told
from .requests import Request
from .seam import Names
from .tree import CacheTree

_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface."

SIGNATURES: dict[str, tuple[str, ...]] = {
    **cache.SIGNATURES,
    CACHE + "checkpoint_into_tree": ("req", "up_to"),
    CACHE + "on_release": ("req", "checkpointed"),
    CACHE + "prefetch_from_storage": ("last_host_node_id", "new_input_tokens", "matched_prefix_tokens"),
    CACHE + "check_prefetch_progress": ("request",),
    CACHE + "pop_prefetch_loaded_span": ("request",),
    CACHE + "finish_storage_prefetch_admission": ("request", "fulfilled_tokens", "reason"),
    CACHE + "release_aborted_request": ("request",),
    CACHE + "claim_kv_row": ("req",),
    _CORE + "match_full_device_prefix": ("key",),
    _CORE + "get_component_device_value": ("node_id", "component_type"),
    _CORE + "collect_path_info": ("end_node_ids",),
    _CORE + "collect_full_device_indices": ("from_node_id", "until_node_id"),
    UPDATER + "begin_weight_update": ("recv_req",),
    UPDATER + "end_weight_update": ("recv_req",),
    "sglang.srt.mem_cache.radix_cache.RadixKey": ("token_ids", "extra_key", "cache_salt", "limit"),
}

# The end of a session of updates finishes the weights: what ran meanwhile had others.
WEIGHT_HOOKS = {
    "changing": [*UPDATES, UPDATER + "begin_weight_update", UPDATER + "end_weight_update"],
    "changed": [*UPDATES, UPDATER + "end_weight_update"],
    "came": [],
}


class EngramRadixCache(EngramCache):
    """SGLang's cache for hybrid models, which tells the shim what happens."""

    def _engram_names(self, req: Any) -> Names:
        return cache.names_of(req, req.cache_salt, "beam_group")

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._engram_req = req
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._engram_req = None

    def _engram_is_short(self, result: Any) -> bool:
        return bool(result.rotation_tail_declined)

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: Any = None,
        prefix_keys: Any = None,
        matched_prefix_tokens: Any = None,
        extra_key: Any = None,
        cache_salt: Any = None,
        storage_hit_end: Any = None,
    ) -> None:
        seen, self._engram_seen = self._engram_seen, None
        if seen is not None and seen[0].cache_request_handle == request:
            req, match = seen
            maximum = len(matched_prefix_tokens or ()) + len(new_input_tokens)
            self._engram_queued(req, match, match.device_prefix_len, maximum)

    def check_prefetch_progress(self, request: Any) -> bool:
        return self.shim is None or self.shim.may_admit(request.rid)

    def pop_prefetch_loaded_span(self, request: Any) -> tuple[int, int | None]:
        # What was restored is in the tree: it counts as a hit on the device.
        return 0, None

    def finish_storage_prefetch_admission(self, request: Any, fulfilled_tokens: int, reason: Any) -> None:
        self._engram_admitted(request.rid)

    @told
    def _engram_admitted(self, rid: str) -> None:
        shim = self.shim
        known = shim.requests.get(rid) if shim is not None else None
        if shim is not None and known is not None and known.req is not None:
            shim.admitted(rid, known.req.prefix_len)

    def release_aborted_request(self, request: Any) -> None:
        shim = self.shim
        known = shim.requests.get(request.rid) if shim is not None else None
        # Another request of that rid may be dropped while this one goes on: its handle is another one, though equal.
        if shim is not None and known is not None and getattr(known.req, "cache_request_handle", None) is request:
            shim.dropped(request.rid, known.req)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._engram_over(req)

    def claim_kv_row(self, req: Any) -> bool:
        claimed = super().claim_kv_row(req)
        if claimed:
            self._engram_over(req)
        return claimed


class Tree(CacheTree):
    """What the shim does to the cache."""

    def bind(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        scheduler.enable_lmcache = True

    def key(self, request: Request, upto: int) -> Any:
        names = request.names
        return RadixKey(request.tokens, names.extra_key, cache_salt=names.cache_salt, limit=upto)

    def full_match(self, key: Any) -> tuple[int, int]:
        length, node, _ = self.core.match_full_device_prefix(key)
        return length, node

    def _boundary(self, found: Any) -> int:
        return found.device_prefix_len  # type: ignore[no-any-return]

    def rows(self, node: int, start: int) -> tuple[int, int, Any] | None:
        try:
            (path,) = self.core.collect_path_info([node])
        except KeyError:
            return None
        first, above = 0, self.cache.root_node_handle()
        for step in path:
            if step.path_end > start:
                break
            first, above = step.path_end, step.node_id
        return first, path[-1].path_end if path else 0, self.core.collect_full_device_indices(node, above)

    def _computed(self, req: Any) -> int:
        return req.extend_end


def build(ctx: Any) -> EngramRadixCache:
    """The cache of `ctx`, not attached to a shim yet."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(ctx, cache_class=EngramRadixCache)  # type: ignore[return-value]
