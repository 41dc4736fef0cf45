"""SGLang 0.5.17: the registered cache, and what the shim needs of it.

The gate is the one that SGLang has for a storage backend of its hierarchical cache:
`Scheduler.enable_hicache_storage`, set on the scheduler once it is built, makes it call
`prefetch_from_storage` when a request is queued, `check_prefetch_progress` when it is considered, and
`release_aborted_request` when it is dropped. What this release does not ask a cache for has hooks of its
own: the tick before `get_next_batch_to_run`, what was admitted after `get_new_batch_prefill`, and
`is_fully_idle`, which pumps the tick, as a server that is paused comes by nowhere else.

One more hook mends a fault of this release that would be made durable otherwise, see `_boundary_once`.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from . import cache
from .cache import CACHE, SCHEDULER, UPDATES, EngramCache, told
from .requests import Request
from .seam import Names
from .tree import CacheTree

_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore."
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."

SIGNATURES: dict[str, tuple[str, ...]] = {
    **cache.SIGNATURES,
    CACHE + "cache_finished_req": ("req", "is_insert", "kv_len_to_handle"),
    CACHE + "cache_unfinished_req": ("req", "chunked"),
    CACHE + "prefetch_from_storage": ("req_id", "last_host_node_id", "new_input_tokens"),
    CACHE + "check_prefetch_progress": ("req_id",),
    CACHE + "pop_prefetch_loaded_tokens": ("req_id",),
    CACHE + "release_aborted_request": ("rid",),
    CACHE + "root_node_handle": ("extra_key",),
    _CORE + "node_by_id": ("node_id",),
    _CORE + "get_component_device_value": ("node_id", "component_type"),
    _CORE + "collect_full_device_indices": ("from_node_id", "until_node_id"),
    SCHEDULER + "get_new_batch_prefill": ("running_batch",),
    SCHEDULER + "is_fully_idle": ("for_health_check",),
    _RESULTS + "_mamba_check_track_boundary": ("req", "batch", "result", "i"),
    "sglang.srt.mem_cache.radix_cache.RadixKey": ("token_ids", "extra_key", "limit"),
    "sglang.srt.mem_cache.radix_cache.RadixKey.child_key": ("page_size",),
    "sglang.srt.mem_cache.radix_cache.RadixKey.match": ("other", "page_size"),
}

WEIGHT_HOOKS = {"changing": UPDATES, "changed": UPDATES}


def _tick(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    tree_cache = scheduler.tree_cache
    if isinstance(tree_cache, EngramRadixCache):
        tree_cache.check_hicache_events()
        running = scheduler.running_batch
        if running.batch_is_full and running.is_empty() and scheduler.last_batch is None:
            # This release takes a request that finds no room for a sign that others run, and looks again when one of
            # them ends. It may have been a lock of a save or a restore, and nothing runs: it would never look again.
            running.batch_is_full = False


def _admitted(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    tree_cache = scheduler.tree_cache
    if isinstance(tree_cache, EngramRadixCache):
        batch = result.batch_to_run
        tree_cache.engram_admitted(batch.reqs if batch is not None else ())


def _is_idle(result: bool, scheduler: Any, *args: Any, **kwargs: Any) -> bool | None:
    tree_cache = scheduler.tree_cache
    health = args[0] if args else kwargs.get("for_health_check", False)
    if health or not isinstance(tree_cache, EngramRadixCache):
        return None
    return result and not tree_cache.has_pending_cache_operations()


def _boundary_once(found: tuple[bool, int], processor: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A state left by decoding is looked for once.

    Under overlap SGLang looks how far the step is that runs already, and so finds a boundary with the result of
    the step before it. If that runs alone, as a prefill comes next, it finds the boundary with the step's own
    result again, changes buffers twice, and puts the wrong one into the tree: a state of whoever had it before.
    """
    again = found[0] and req.mamba_last_track_seqlen == found[1]
    if not again or not isinstance(processor.tree_cache, EngramRadixCache):
        return None
    # With one buffer at a time, SGLang keeps nothing of such a request: no state is better than a wrong one.
    return None if processor.server_args.enable_mamba_extra_buffer_lazy() else (False, 0)


HOOKS = (
    (_RESULTS + "_mamba_check_track_boundary", _boundary_once, "AFTER"),
    (SCHEDULER + "get_next_batch_to_run", _tick, "BEFORE"),
    (SCHEDULER + "get_new_batch_prefill", _admitted, "AFTER"),
    (SCHEDULER + "is_fully_idle", _is_idle, "AFTER"),
)


class EngramRadixCache(EngramCache):
    """SGLang's cache for hybrid models, which tells the shim what happens."""

    def __init__(self, params: Any) -> None:
        self._engram_considered: set[str] = set()
        super().__init__(params)

    def _engram_names(self, req: Any) -> Names:
        # A salt is part of `extra_key` before a request comes here.
        return cache.names_of(req, None)

    def cache_finished_req(self, req: Any, *args: Any, **kwargs: Any) -> None:
        self._engram_req = req
        try:
            super().cache_finished_req(req, *args, **kwargs)
        finally:
            self._engram_req = None
        self._engram_over(req)

    def cache_unfinished_req(self, req: Any, *args: Any, **kwargs: Any) -> None:
        self._engram_req = req
        try:
            super().cache_unfinished_req(req, *args, **kwargs)
        finally:
            self._engram_req = None

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: Any = None,
        prefix_keys: Any = None,
    ) -> None:
        seen, self._engram_seen = self._engram_seen, None
        if seen is not None and seen[0].rid == req_id:
            req, match = seen
            device = len(match.device_indices)
            self._engram_queued(req, match, device, device + len(new_input_tokens))

    def check_prefetch_progress(self, req_id: str) -> bool:
        if self.shim is None:
            return True
        if not self.shim.may_admit(req_id):
            return False
        self._engram_considered.add(req_id)
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        # What was restored is in the tree: it counts as a hit on the device.
        return 0

    @told
    def engram_admitted(self, reqs: Any) -> None:
        """A round of admissions is over; `reqs` are in its batch."""
        considered, shim = self._engram_considered, self.shim
        if considered and shim is not None:
            for req in reqs:
                # Not a later chunk of one that was admitted before.
                if req.rid in considered:
                    shim.admitted(req.rid, len(req.prefix_indices))
            considered.clear()

    def release_aborted_request(self, rid: str) -> None:
        if self.shim is not None:
            self.shim.dropped(rid)


class Tree(CacheTree):
    """What the shim does to the cache."""

    def __init__(self, cache: EngramRadixCache) -> None:
        super().__init__(cache)
        self._matched: tuple[Any, Any] = (None, None)

    def bind(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        scheduler.enable_hicache_storage = True

    def key(self, request: Request, upto: int) -> Any:
        return RadixKey(request.tokens[:upto], request.names.extra_key)

    def state_match(self, key: Any) -> int:
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        self._matched = (key, found)
        return len(found.device_indices)

    def full_match(self, key: Any) -> tuple[int, int]:
        # Nothing changes the tree between the two questions for one key.
        known, found = self._matched
        self._matched = (None, None)
        if known is not key:
            found = self.cache.match_prefix(MatchPrefixParams(key=key))
        # Matching split the last edge: KV beyond the deepest state is whole nodes.
        node, at = self.core.node_by_id(found.last_device_node), len(found.device_indices)
        while at < found.full_kv_hit_length:
            rest = key[at:]
            child = node.children.get(rest.child_key(self.page_size))
            if child is None or child.component_data[ComponentType.FULL].value is None:
                break
            if child.key.match(rest, page_size=self.page_size) < len(child.key):
                break
            node, at = child, at + len(child.key)
        return at, node.id

    def rows(self, node: int, start: int) -> tuple[int, int, Any]:
        path, at = [], self.core.node_by_id(node)
        while at is not self.core.root_node:
            path.append(at)
            at = at.parent
        first, end, above = 0, 0, at
        for step in reversed(path):
            end += len(step.key)
            if end <= start:
                first, above = end, step
        return first, end, self.core.collect_full_device_indices(node, above.id)

    def _computed(self, req: Any) -> int:
        return req.extend_range.end


def build(ctx: Any) -> EngramRadixCache:
    """The cache of `ctx`, not attached to a shim yet."""
    ctx.params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
    return EngramRadixCache(ctx.params)
