"""What the shim does to SGLang's cache: what all releases have in common. See `seam.Tree`."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from .cache import EngramCache
from .link import Beat
from .requests import Request
from .seam import Room

# SGLang plans with at most so many new tokens of a request (CLIP_MAX_NEW_TOKENS).
_PLANNED_NEW_TOKENS = 4096
_MAMBA = (ComponentType.MAMBA,)


class CacheTree:
    """See the module."""

    def __init__(self, cache: EngramCache) -> None:
        self.cache = cache
        self.core = cache.tree_core
        self.page_size = cache.page_size
        self.scheduler: Any = None

    # --- What each release has its own way for ---

    def bind(self, scheduler: Any) -> None:
        """The scheduler is built: its gate is opened for this cache."""
        raise NotImplementedError

    def key(self, request: Request, upto: int) -> Any:
        """The key of the request's first `upto` tokens."""
        raise NotImplementedError

    def full_match(self, key: Any) -> tuple[int, int]:
        """How much KV of the key is on the device, and the deepest node of it."""
        raise NotImplementedError

    def _boundary(self, found: Any) -> int:
        """The deepest boundary with a state on the device, of what a match found."""
        raise NotImplementedError

    def rows(self, node: int, start: int) -> tuple[int, int, Any] | None:
        """Row numbers of the node's path, see `seam.Tree`."""
        raise NotImplementedError

    def _computed(self, req: Any) -> int:
        """How many tokens of a request in chunks have KV."""
        raise NotImplementedError

    def state_node(self, key: Any) -> tuple[int, int]:
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        return self._boundary(found), found.last_device_node

    def state_match(self, key: Any) -> int:
        return self._boundary(self.cache.match_prefix(MatchPrefixParams(key=key)))

    # --- Locks ---

    def lock_kv(self, node: int) -> Any:
        try:
            taken = self.cache.inc_lock_ref(node, _MAMBA)
        except KeyError:
            return None
        return node, taken.to_dec_params()

    def unlock(self, lock: Any) -> None:
        self.cache.dec_lock_ref(*lock)

    def slot(self, node: int) -> Any:
        try:
            return self.core.get_component_device_value(node, ComponentType.MAMBA)
        except KeyError:
            return None

    # --- Room ---

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
                tokens -= self._rest(req)
        return Room(tokens, scheduler.max_running_requests - len(active), not active)

    def is_idle(self) -> bool:
        return self.scheduler is None or not self._active(self.scheduler)

    def is_short(self) -> bool:
        cache, scheduler = self.cache, self.scheduler
        if scheduler is None:
            return False
        active, chunked = self._active(scheduler), scheduler.chunked_req
        need = len(active) * self.page_size
        if chunked is not None:
            # A chunk takes whole pages, and may take all that is left.
            need += self._rest(chunked) + self.page_size
        return cache.token_to_kv_pool_allocator.available_size() + cache.full_evictable_size() < need  # type: ignore[no-any-return]

    def _rest(self, req: Any) -> int:
        """What a request in chunks has still to compute."""
        return max(0, len(req.full_untruncated_fill_ids) - self._computed(req))

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
        if slot is not None:
            self.cache.req_to_token_pool.mamba_allocator.free(slot)

    def insert(self, key: Any, have: int, rows: Any, slot: Any) -> int:
        value = rows
        if have:
            value = rows.new_zeros(have + rows.shape[0])
            value[have:] = rows
        # The tree may keep the key, and the request's tokens grow: a copy.
        result = self.cache.insert(
            InsertParams(key=key[:], value=value, mamba_value=slot, prev_prefix_len=have)
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
