"""SGLang 0.5.23: the registered cache, and what the shim needs of it.

The gate is the one that SGLang has for caches which fetch asynchronously: `Scheduler.enable_lmcache`, set
on the scheduler once it is built, makes it call `check_hicache_events` in each iteration (the tick),
`prefetch_from_storage` when a request is queued, `check_prefetch_progress` when it is considered, and
`has_pending_cache_operations` when it asks whether it is idle.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams, TreeLock
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ._channel_layout import Finish
from .link import Beat
from .requests import Request
from .shim import Shim
from .seam import Ending, Names, Room

log = logging.getLogger(__name__)

_U = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
_T = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface."
_S = "sglang.srt.managers.scheduler.Scheduler."
_W = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."

SIGNATURES: dict[str, tuple[str, ...]] = {
    _U + "insert": ("params",),
    _U + "match_prefix": ("params",),
    _U + "evict": ("params",),
    _U + "inc_lock_ref": ("node_id", "skip_lock_components"),
    _U + "dec_lock_ref": ("node_id", "params"),
    _U + "checkpoint_into_tree": ("req", "up_to"),
    _U + "on_release": ("req", "checkpointed"),
    _U + "check_hicache_events": (),
    _U + "prefetch_from_storage": ("last_host_node_id", "new_input_tokens", "matched_prefix_tokens"),
    _U + "check_prefetch_progress": ("request",),
    _U + "pop_prefetch_loaded_span": ("request",),
    _U + "finish_storage_prefetch_admission": ("request", "fulfilled_tokens", "reason"),
    _U + "release_aborted_request": ("request",),
    _U + "is_backuped": ("node_id",),
    _U + "reset": (),
    _U + "release_host_resources": (),
    _U + "claim_kv_row": ("req",),
    _T + "match_full_device_prefix": ("key",),
    _T + "get_component_device_value": ("node_id", "component_type"),
    _T + "collect_path_info": ("end_node_ids",),
    _T + "collect_full_device_indices": ("from_node_id", "until_node_id"),
    _S + "__init__": (),
    _S + "_prefetch_kvcache": ("req",),
    _S + "get_next_batch_to_run": ("running_batch", "last_batch"),
    _W + "update_weights_from_disk": ("recv_req",),
    _W + "update_weights_from_distributed": ("recv_req",),
    _W + "update_weights_from_tensor": ("recv_req",),
    _W + "update_weights_from_ipc": ("recv_req",),
    _W + "begin_weight_update": ("recv_req",),
    _W + "end_weight_update": ("recv_req",),
    "sglang.srt.mem_cache.base_prefix_cache.InsertParams": ("key", "value", "mamba_value", "prev_prefix_len"),
    "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams": ("key", "req", "cow_mamba"),
    "sglang.srt.mem_cache.radix_cache.RadixKey": ("token_ids", "extra_key", "cache_salt", "limit"),
}

WEIGHT_HOOKS = {
    "changing": [
        _W + name
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "begin_weight_update",
        )
    ],
    "changed": [
        _W + name
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "end_weight_update",
        )
    ],
}

_MAMBA = (ComponentType.MAMBA,)
# SGLang plans with at most so many new tokens of a request (CLIP_MAX_NEW_TOKENS).
_PLANNED_NEW_TOKENS = 4096


def names_of(req: Any) -> Names:
    """What of a request belongs to its namespace, and whether it may be saved."""
    plain = (
        req.multimodal_inputs is None
        and req.positional_embed_overrides is None
        and req.input_embeds is None
        and req.lora_id is None
        and req.session is None
        and req.beam_group is None
    )
    return Names(
        rid=req.rid,
        session_id=req.session_id,
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
        saved=plain,
    )


def ending_of(req: Any) -> Ending:
    """How a request ended."""
    kind = type(req.finished_reason).__name__
    finish = {"FINISH_LENGTH": Finish.LENGTH, "FINISH_ABORT": Finish.ABORT}.get(kind, Finish.STOP)
    prompt = len(req.origin_input_ids)
    return Ending(prompt, prompt + len(req.output_ids), int(req.cached_tokens or 0), finish)


def tokens_of(req: Any, count: int) -> Any:
    """The request's tokens, at least `count` of them."""
    tokens = req.full_untruncated_fill_ids
    return tokens if len(tokens) >= count else req.origin_input_ids + req.output_ids


class EngramRadixCache(UnifiedRadixCache):
    """SGLang's cache for hybrid models, which tells the shim what happens."""

    def __init__(self, params: Any) -> None:
        self.shim: Shim | None = None
        self._engram_req: Any = None
        self._engram_seen: Any = None
        super().__init__(params)

    # --- Saves ---

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._engram_req = req
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._engram_req = None

    def insert(self, params: Any) -> Any:
        result = super().insert(params)
        req, shim = self._engram_req, self.shim
        if shim is not None and req is not None and params.mamba_value is not None:
            node = result.last_device_node
            if node is not None and not result.rotation_tail_declined and not self.is_root(node):
                boundary = len(params.key)
                shim.inserted(
                    req, names_of(req), params.key.token_ids, boundary, node, result.prefix_len >= boundary
                )
        return result

    # --- The life of a request ---

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        if params.req is not None:
            self._engram_seen = (params.req, result)
        return result

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
        shim = self.shim
        if shim is None or seen is None or seen[0].cache_request_handle != request:
            return
        req, match = seen
        names = names_of(req)
        maximum = len(matched_prefix_tokens or ()) + len(new_input_tokens)
        device, tokens = match.device_prefix_len, req.full_untruncated_fill_ids
        shim.enqueue(req, names, tokens, maximum, device, max(device, match.full_kv_hit_length))
        if device and not self.is_root(match.last_device_node):
            # A state that is on the device, but perhaps not at the daemon.
            shim.inserted(req, names, tokens, device, match.last_device_node, True)

    def check_prefetch_progress(self, request: Any) -> bool:
        return self.shim is None or self.shim.may_admit(request.rid)

    def pop_prefetch_loaded_span(self, request: Any) -> tuple[int, int | None]:
        # What was restored is in the tree: it counts as a hit on the device.
        return 0, None

    def finish_storage_prefetch_admission(self, request: Any, fulfilled_tokens: int, reason: Any) -> None:
        shim = self.shim
        if shim is not None:
            known = shim.requests.get(request.rid)
            if known is not None and known.req is not None:
                shim.admitted(request.rid, known.req.prefix_len)

    def release_aborted_request(self, request: Any) -> None:
        if self.shim is not None:
            self.shim.dropped(request.rid)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._engram_over(req)

    def claim_kv_row(self, req: Any) -> bool:
        claimed = super().claim_kv_row(req)
        if claimed:
            self._engram_over(req)
        return claimed

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
        self.shim.tick()
        return self.shim.is_busy()

    def is_backuped(self, node_id: Any) -> bool:
        # Any anchor will do: the shim looks up by tokens.
        return True

    def get_last_hash_value(self, node_id: Any) -> str | None:
        return None

    def get_prefix_hash_values(self, node_id: Any) -> list[str]:
        return []

    def clear_storage_backend(self) -> bool:
        log.warning("engram: snapshots are deleted through the daemon, not through the server")
        return False

    def reset(self) -> None:
        if self.shim is not None:
            self.shim.reset()
        super().reset()

    def release_host_resources(self) -> None:
        if self.shim is not None:
            self.shim.shutdown()
        super().release_host_resources()


class Tree:
    """What the shim does to the cache."""

    def __init__(self, cache: EngramRadixCache) -> None:
        self.cache = cache
        self.core = cache.tree_core
        self.page_size = cache.page_size
        self.scheduler: Any = None

    def bind(self, scheduler: Any) -> None:
        """The scheduler is built: its gate is opened for this cache."""
        self.scheduler = scheduler
        scheduler.enable_lmcache = True

    def key(self, request: Request, upto: int) -> Any:
        names = request.names
        return RadixKey(request.tokens[:upto], names.extra_key, cache_salt=names.cache_salt)

    def full_match(self, key: Any) -> tuple[int, int]:
        length, node, _ = self.core.match_full_device_prefix(key)
        return length, node

    def state_match(self, key: Any) -> int:
        return self.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len

    def lock_kv(self, node: int) -> Any:
        try:
            taken = self.cache.inc_lock_ref(node, _MAMBA)
        except KeyError:
            return None
        return TreeLock(node, taken.to_dec_params())

    def unlock(self, lock: Any) -> None:
        self.cache.unlock(lock)

    def rows(self, node: int, start: int) -> tuple[int, int, Any]:
        (path,) = self.core.collect_path_info([node])
        first, above = 0, self.cache.root_node_handle()
        for step in path:
            if step.path_end > start:
                break
            first, above = step.path_end, step.node_id
        return first, path[-1].path_end if path else 0, self.core.collect_full_device_indices(node, above)

    def slot(self, node: int) -> Any:
        try:
            return self.core.get_component_device_value(node, ComponentType.MAMBA)
        except KeyError:
            return None

    def room(self, request: Request) -> Room:
        cache, scheduler = self.cache, self.scheduler
        tokens = cache.token_to_kv_pool_allocator.available_size() + cache.full_evictable_size()
        boundary = request.restore.boundary if request.restore is not None else 0
        tokens -= max(0, len(request.tokens) - boundary) + self.page_size
        if scheduler is None:
            return Room(tokens, 1, True)
        active = self._active(scheduler)
        ratio = scheduler.new_token_ratio_tracker.current
        chunked = scheduler.chunked_req
        for req in active:
            params = req.sampling_params
            left = min(params.max_new_tokens - len(req.output_ids), _PLANNED_NEW_TOKENS)
            tokens -= int(max(0, left) * (1.0 if params.ignore_eos else ratio)) + self.page_size
            if req is chunked:
                tokens -= max(0, len(req.full_untruncated_fill_ids) - req.extend_end)
        return Room(tokens, scheduler.max_running_requests - len(active), not active)

    def _active(self, scheduler: Any) -> list[Any]:
        active = {id(r): r for r in scheduler.running_batch.reqs if not r.finished()}
        last = scheduler.last_batch
        if last is not None:
            active.update({id(r): r for r in last.reqs if not r.finished()})
        if scheduler.chunked_req is not None:
            active[id(scheduler.chunked_req)] = scheduler.chunked_req
        return list(active.values())

    def take(self, tokens: int) -> tuple[Any, Any] | None:
        cache = self.cache
        allocator, slots = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator
        short = tokens - allocator.available_size()
        if short > 0:
            cache.evict(EvictParams(num_tokens=short))
        if slots.available_size() < 1:
            cache.evict(EvictParams(num_tokens=0, mamba_num=1))
        slot = slots.alloc(1)
        if slot is None:
            return None
        rows = allocator.alloc(tokens) if tokens else slot[:0]
        if rows is None:
            slots.free(slot)
            return None
        return rows, slot

    def give(self, rows: Any, slot: Any) -> None:
        if rows.shape[0]:
            self.cache.token_to_kv_pool_allocator.free(rows)
        self.cache.req_to_token_pool.mamba_allocator.free(slot)

    def insert(self, key: Any, have: int, rows: Any, slot: Any) -> int:
        value = rows.new_zeros(have + rows.shape[0])
        value[have:] = rows
        result = self.cache.insert(
            InsertParams(key=key, value=value, mamba_value=slot, prev_prefix_len=have)
        )
        if result.mamba_exist:
            self.cache.req_to_token_pool.mamba_allocator.free(slot)
        return result.last_device_node

    def load(self) -> Beat:
        cache, scheduler = self.cache, self.scheduler
        pool, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
        return Beat(
            slots_free=int(pool.mamba_allocator.available_size()),
            slots_total=int(pool.mamba_pool.size),
            rows_free=int(allocator.available_size()),
            rows_total=int(allocator.size),
            running=len(scheduler.running_batch.reqs) if scheduler is not None else 0,
            waiting=len(scheduler.waiting_queue) if scheduler is not None else 0,
        )


def build(ctx: Any) -> EngramRadixCache:
    """The cache of `ctx`, not attached to a shim yet."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(ctx, cache_class=EngramRadixCache)  # type: ignore[return-value]
