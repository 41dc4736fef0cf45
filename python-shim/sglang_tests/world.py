"""A server of SGLang without a model: its real scheduler methods, cache, allocators and pools on CPU tensors.

Replaced: the forward (`run_batch`), by one that checks and writes known bytes (`oracle`), and everything that
only reports. The device is a queue of work: with `lag` above 0 a forward is done some iterations after it
was launched, and until then what it writes is garbage.

What is different in each release is in `world_0_5_17` and `world_0_5_23`.
"""

from __future__ import annotations

import os
import time
import types
from array import array
from collections import deque
from typing import Any

import torch

from device import Stream, StreamCopier, scribble_rooms
from engram_sglang import plugin
from engram_sglang.pools import describe
from engram_sglang.settings import Settings
from oracle import Bytes, Digests
from quiet import Quiet
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    PageMajorMHATokenToKVPool,
)
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

torch.set_num_threads(1)
scribble_rooms()

# There is no device whose memory could be pinned.
torch.Tensor.pin_memory = lambda self, *a, **k: self  # type: ignore[method-assign]

MAMBA_LAYERS = [0, 1, 3]
ATTENTION_LAYERS = [2, 4]
VOCABULARY = 50_000


class World:
    """One server."""

    # --- What each release has its own way for ---

    CORES: tuple[str, ...] = ("python",)
    """SGLang's tree cores, the default one first."""
    PAGE_MAJOR = False
    """`--enable-page-major-kv-layout` works with pools of one sort each."""
    FLUSHES_WHILE_WAITING = False
    """A server that is paused is flushed though requests wait."""
    FIRST_DECODE_IS_UNTRACKED = False
    """Under overlap, SGLang looks whether a state is due when the step after it is under way already, and so
    never at the one after a prefill."""
    ARGS: dict[str, Any] = {}
    """More arguments of the server."""
    CONTEXT: dict[str, Any] = {}
    """More of what a cache is built from."""
    ROUTES: tuple[str, ...] = ()
    """Names that are off in the scheduler, beside those of all releases."""

    def _policy(self) -> SchedulePolicy:
        raise NotImplementedError

    def _finish_scheduler(self, s: Scheduler, quiet: Quiet) -> Any:
        """The rest of the scheduler, and what processes its results."""
        raise NotImplementedError

    @staticmethod
    def span(req: Req) -> tuple[int, int]:
        """Which tokens a prefill computes."""
        raise NotImplementedError

    @staticmethod
    def tracked_at(req: Req) -> int:
        """The boundary of the state that a prefill leaves."""
        raise NotImplementedError

    @staticmethod
    def places(req: Req) -> tuple[int, int]:
        """The request's row in the table of rows, and its slot."""
        raise NotImplementedError

    @staticmethod
    def namespace(extra_key: str | None = None, cache_salt: str | None = None) -> dict[str, Any]:
        """What a request says of its namespace, as the server's front gives it on."""
        return {"extra_key": extra_key, "cache_salt": cache_salt}

    def updater(self) -> Any:
        """SGLang's weight updater, hooks and all, over a model whose weights are one number."""
        raise NotImplementedError

    # --- What all releases have in common ---

    def __init__(
        self,
        *,
        page_size: int = 1,
        extra_buffer: bool = True,
        page_major: bool = False,
        core: str | None = None,
        slots: int = 40,
        rows: int = 8192,
        context: int = 8192,
        max_running: int = 4,
        chunk: int = 512,
        overlap: bool = False,
        lag: int = 0,
        seed: int = 1,
        settings: Settings | None = None,
        armed: bool = True,
    ) -> None:
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = core or self.CORES[0]
        self.page_size, self.overlap, self.lag = page_size, overlap, lag
        self.extra_buffer = extra_buffer
        self.seed = seed
        args = ServerArgs(
            model_path="dummy",
            page_size=page_size,
            chunked_prefill_size=chunk,
            max_running_requests=max_running,
            disable_overlap_schedule=not overlap,
            mamba_radix_cache_strategy="extra_buffer" if extra_buffer else "no_buffer",
            skip_tokenizer_init=True,
            pp_max_micro_batch_size=max_running,
            device="cpu",
            enable_page_major_kv_layout=page_major,
            **self.ARGS,
        )
        args._mamba_cache_chunk_size = max(64, page_size)
        set_global_server_args_for_scheduler(args)
        self.args = args
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=2, head_dim=16, state_size=8, conv_kernel=4
        )
        self.req_pool = HybridReqToTokenPool(
            size=max_running + 2,
            mamba_size=slots,
            mamba_spec_state_size=max_running + 2,
            max_context_len=context + 8,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=MAMBA_LAYERS),
            mamba_layer_ids=MAMBA_LAYERS,
            enable_mamba_extra_buffer=extra_buffer,
            enable_overlap_schedule=overlap,
            mamba_envelope_layout=page_major,
        )
        kv = HybridLinearKVPool(
            size=rows, dtype=torch.bfloat16, page_size=page_size, head_num=2, head_dim=8,
            full_attention_layer_ids=ATTENTION_LAYERS, device="cpu", mamba_pool=self.req_pool.mamba_pool,
            full_kv_pool_class=PageMajorMHATokenToKVPool if page_major else MHATokenToKVPool,
        )
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(rows, torch.bfloat16, "cpu", kv, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(rows, page_size, torch.bfloat16, "cpu", kv, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.req_pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            enable_mamba_extra_buffer=extra_buffer,
            chunked_prefill_size=chunk,
        )
        self.model = torch.nn.Linear(4, 4)
        with torch.no_grad():
            self.model.weight.fill_(seed)
            self.model.bias.fill_(seed)
        runner = types.SimpleNamespace(
            model=self.model, forward_stream=None, attn_backend=types.SimpleNamespace(), prefill_aware_swa=False
        )
        ctx = TreeCacheBuildContext(
            server_args=args,
            params=params,
            is_hybrid_swa=False,
            is_hybrid_ssm=True,
            enable_hierarchical_cache=False,
            disable_radix_cache=False,
            tp_worker=types.SimpleNamespace(model_runner=runner),
            model_config=types.SimpleNamespace(hf_config={"model_type": "oracle", "layers": 5}),
            tp_size=1,
            tp_rank=0,
            tp_group=None,
            **self.CONTEXT,
        )
        self.ctx = ctx
        self.stream = Stream()
        self.copier = StreamCopier(self.stream)
        self.pools = describe(self.req_pool.mamba_pool, kv, page_size)
        self.bytes = Bytes(self.pools)
        self.digests = Digests(seed)
        self.tree = plugin.adapter().build(ctx)
        self.settings = settings or Settings(daemon="unix:///nonexistent", ring_bytes=8 << 20, retry_ms=50)
        self.shim = plugin.arm(self.tree, ctx, self.pools, self.settings, copier=self.copier) if armed else None
        if self.shim is not None:
            self.scribble_taken(self.shim)
        self.scheduler = self._scheduler(args, max_running, chunk, context)
        # What the hook after the scheduler's own __init__ does.
        self.scheduler.tree_cache = self.tree
        plugin._after_init(None, self.scheduler)
        self.ticks = 0
        self.finished: dict[str, Req] = {}
        self.aborted: list[str] = []
        self.admitted_prefix: dict[str, int] = {}
        self._tail: dict[str, array[int]] = {}
        self.mixed = False
        """Requests go on over a change of weights: what they read is of both."""
        self._numbers = 0

    # --- The scheduler ---

    def _scheduler(self, args: Any, max_running: int, chunk: int, context: int) -> Scheduler:
        s = Scheduler.__new__(Scheduler)
        quiet = Quiet()
        s.server_args = args
        s.tree_cache, s.req_to_token_pool, s.token_to_kv_pool_allocator = self.tree, self.req_pool, self.allocator
        s.page_size, s.max_running_requests = self.page_size, max_running
        s.max_prefill_tokens, s.chunked_prefill_size = 16384, chunk
        s.max_req_input_len = context - 1
        s.max_queued_requests = None
        s.waiting_queue, s.chunked_req, s.last_batch, s.cur_batch_for_debug = [], None, None, None
        s.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        s._engine_paused = False
        s._pending_chunked_abort_req = None
        s.enable_overlap, s.enable_overlap_mlx = self.overlap, False
        s.result_queue = self._results = deque()
        s.spec_algorithm = SpeculativeAlgorithm.from_string(None)
        s.model_config = types.SimpleNamespace(
            is_encoder_decoder=False, vocab_size=VOCABULARY, context_len=context, is_multimodal=False,
            num_key_value_heads=2, self_opened_think_start_ids=None, think_end_id=None, think_end_ids=None,
            hf_text_config=types.SimpleNamespace(mamba_chunk_size=64),
        )
        for name in (
            "enable_hierarchical_cache", "enable_hicache_storage", "enable_hisparse", "enable_lora",
            "enable_lora_overlap_loading", "enable_priority_scheduling", "enable_priority_preemption", "is_hybrid_swa",
            "is_mixed_chunk", "require_mlp_sync", "enable_pdmux", "enable_unified_memory",
            "abort_on_priority_when_disabled", "schedule_low_priority_values_first", "enable_fpm", *self.ROUTES,
        ):
            setattr(s, name, False)
        s.is_hybrid_ssm, s.is_generation = True, True
        for name in (
            "dllm_config", "decode_offload_manager", "prefill_delayer", "min_free_slots_delayer", "lora_drainer",
            "draft_worker", "mm_receiver", "hisparse_coordinator", "rust_server", "truncation_align_size",
        ):
            setattr(s, name, None)
        s.priority_scheduling_preemption_threshold = 10
        s.disaggregation_mode = scheduler_module.DisaggregationMode.NULL
        s.forward_ct = 0
        s.max_prefill_bs = 0
        s.device = "cpu"
        s.tp_worker = self.ctx.tp_worker
        s.policy = self._policy()
        s.grammar_manager = types.SimpleNamespace(
            has_waiting_grammars=lambda: False, grammar_queue=[], clear=lambda: None, abort_requests=lambda r: None
        )
        s.dllm_manager = types.SimpleNamespace(any_staging_reqs=lambda: False, staging_queue=[])
        s.ngram_embedding_manager = types.SimpleNamespace(prepare_for_forward=lambda b, chunked_req=None: b)
        s.load_inquirer = types.SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct=0: 0)
        s.metrics_reporter = quiet
        s.kv_events_publisher = quiet
        s.ipc_channels = quiet
        s.process_batch_result = self._process
        self.processor = self._finish_scheduler(s, quiet)
        return s

    # --- Requests ---

    def request(
        self, tokens: list[int], *, new: int = 4, rid: str | None = None, session: str | None = None,
        extra_key: str | None = None, cache_salt: str | None = None,
    ) -> Req:
        """Puts a request into the waiting queue, as the scheduler does."""
        self._numbers += 1
        req = Req(
            rid or f"r{self._numbers}", "", array("q", tokens), SamplingParams(max_new_tokens=new),
            session_id=session, vocab_size=VOCABULARY, **self.namespace(extra_key, cache_salt),
        )
        req.sampling_params.normalize(None)
        req.logprob_start_len = -1
        self.digests._of.pop(req.rid, None)
        self.scheduler._add_request_to_queue(req)
        return req

    def abort(self, rid: str) -> None:
        self.scheduler.abort_request(AbortReq(rid=rid))

    # --- Forward ---

    def _digest(self, req: Req, upto: int) -> list[int]:
        return self.digests.of(req.rid, req.origin_input_ids + self._tail[req.rid], upto)

    def run_batch(self, batch: ScheduleBatch) -> Any:
        """The forward: queued on the device, its sampled tokens known at once."""
        work, next_tokens = [], []
        cow = None
        if batch.mamba_cow_src_indices is not None:
            cow = (batch.mamba_cow_src_indices.tolist(), batch.mamba_cow_dst_indices.tolist())
        batch.mamba_cow_src_indices = batch.mamba_cow_dst_indices = batch.mamba_clear_indices = None
        extend = batch.forward_mode.is_extend()
        mask = batch.mamba_track_mask.tolist() if batch.mamba_track_mask is not None else None
        track = batch.mamba_track_indices.tolist() if batch.mamba_track_indices is not None else None
        for i, req in enumerate(batch.reqs):
            if extend:
                start, end = self.span(req)
                track_at = self.tracked_at(req)
            else:
                end = int(batch.seq_lens_cpu[i]) if batch.seq_lens_cpu is not None else int(batch.seq_lens[i])
                start, track_at = end - 1, end
            if extend:
                self._tail[req.rid] = array("q", req.output_ids)
            row, slot = self.places(req)
            rows = self.req_pool.req_to_token[row, :end].to(torch.int64).clone()
            digests = list(self._digest(req, end)[: end + 1])
            tracked = None
            if mask is not None and mask[i]:
                tracked = (track[i], track_at)
            if extend:
                self.admitted_prefix.setdefault(req.rid, start)
            work.append((req.rid, start, end, rows, slot, digests, tracked))
            if not extend or end >= len(req.origin_input_ids) + len(req.output_ids):
                next_tokens.append(digests[end] % VOCABULARY)
                # Known to the device; the scheduler hears of it when it looks at the result.
                self._tail[req.rid].append(next_tokens[-1])
            else:
                next_tokens.append(0)
        targets = [(w[4], w[6], w[3][w[1] :]) for w in work]
        if self.lag:
            # Until the forward is through, what it will write is garbage.
            self.stream.put(lambda: self._scribble(targets), self.ticks)
            self.stream.run(self.ticks)
        self.stream.put(lambda: self._forward(work, cow), self.ticks + self.lag)
        self.stream.run(self.ticks)
        return GenerationBatchResult(logits_output=None, next_token_ids=torch.tensor(next_tokens), can_run_cuda_graph=False)

    def _scribble(self, targets: list[Any]) -> None:
        for _, tracked, rows in targets:
            self.bytes.scribble_rows(rows)
            if tracked is not None:
                self.bytes.scribble_state(tracked[0])

    def scribble_taken(self, shim: Any) -> None:
        """Whoever had the rows and the slot that a restore takes still writes to them in what is queued."""
        take = shim.tree.take

        def taken(tokens: int) -> Any:
            result = take(tokens)
            if result is not None and self.lag:
                rows, slot = result
                self.stream.put(lambda: self.bytes.scribble_rows(rows), self.ticks + self.lag)
                self.stream.put(lambda: self.bytes.scribble_state(int(slot)), self.ticks + self.lag)
            return result

        shim.tree.take = taken

    def _forward(self, work: list[Any], cow: Any) -> None:
        for source, target in zip(*(cow or ((), ()))):
            self.bytes.copy_state(source, target)
        for rid, start, end, rows, slot, digests, tracked in work:
            if start and not self.mixed:
                # All of what a prefill reads, and now and then of what decoding does.
                low = 0 if end - start > 1 or end % 16 == 0 else max(0, start - 4)
                wrong = self.bytes.wrong_rows(rows[low:start], digests[low + 1 : start + 1])
                assert wrong == 0, f"{rid}: {wrong} of {start} rows are not its own"
                assert self.bytes.state_is(slot, digests[start]), f"{rid}: the state at {start} is not its own"
            self.bytes.write_rows(rows[start:end], digests[start + 1 : end + 1])
            self.bytes.write_state(slot, digests[end])
            if tracked is not None:
                self.bytes.write_state(tracked[0], digests[tracked[1]])

    # --- Loop ---

    def step(self) -> bool:
        """One iteration of the event loop. False: nothing ran."""
        s = self.scheduler
        self.ticks += 1
        self.copier.tick = self.ticks
        self.stream.run(self.ticks)
        if s._engine_paused:
            return False
        plan = s.get_next_batch_to_run(running_batch=s.running_batch, last_batch=s.last_batch)
        s.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            s.forward_ct += 1
            result = self.run_batch(batch)
            if self.overlap:
                self._results.append((batch.copy(), result))
            else:
                self._process(batch, result)
        if self.overlap and s.last_batch:
            self._process(*self._results.popleft())
        if not batch and not (self.overlap and s.last_batch):
            self.idle()
        s.last_batch = batch
        return bool(batch)

    def _process(self, batch: Any, result: Any) -> None:
        if batch.forward_mode.is_decode():
            self.processor.process_batch_result_decode(batch, result)
        else:
            self.processor.process_batch_result_prefill(batch, result)
        for req in batch.reqs:
            if req.finished():
                self.finished[req.rid] = req

    def idle(self) -> None:
        """What the scheduler checks when nothing runs."""
        if self.scheduler.is_fully_idle():
            self.check()

    def check(self) -> None:
        """SGLang's own accounting: nothing is lost and nothing is held."""
        tree, pool = self.tree, self.req_pool
        rows = self.allocator.available_size() + tree.full_evictable_size() + tree.full_protected_size()
        assert rows == self.allocator.size, f"{rows} of {self.allocator.size} rows"
        slots = pool.mamba_allocator.available_size() + tree.mamba_evictable_size() + tree.mamba_protected_size()
        assert slots == pool.mamba_pool.size, f"{slots} of {pool.mamba_pool.size} slots"
        assert pool.available_size() == pool.size, f"{pool.available_size()} of {pool.size} request rows"
        tree.sanity_check()

    def until(self, done: Any, seconds: float = 20.0, what: str = "") -> None:
        """Goes on until `done()`."""
        end = time.monotonic() + seconds
        while not done():
            if not self.step():
                time.sleep(0.0005)
            assert time.monotonic() < end, f"not within {seconds} s: {what or done}"

    def run(self, *reqs: Req, seconds: float = 20.0) -> None:
        """Goes on until the requests are over and nothing runs."""
        self.until(lambda: all(r.finished() for r in reqs), seconds, "requests")
        for _ in range(3 + self.lag):
            self.step()

    def flush(self) -> None:
        """`/flush_cache`, and bytes of before are gone."""
        assert self.scheduler.flush_cache(empty_cache=False), "the server is busy"
        self.until(lambda: not self.stream.work)
        for tensor in self.pools.state:
            tensor.bytes.zero_()
        for layer in self.pools.kv:
            layer.k.zero_()
            layer.v.zero_()

    def new_weights(self, path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """What loading other weights does."""
        with torch.no_grad():
            self.model.weight.fill_(float(path))
        self.seed = int(path)
        self.digests = Digests(self.seed)
        return True, ""

    def update_weights(self, seed: int, flush: bool = True) -> Any:
        """`/update_weights_from_disk`."""
        request = types.SimpleNamespace(
            model_path=str(seed), load_format=None, recapture_cuda_graph=False, weight_version=None,
            flush_cache=flush, torch_empty_cache=False,
        )
        return self.updater().update_weights_from_disk(request)

    def evict_states(self) -> None:
        """Pressure on slots: every state that nobody holds goes, its KV stays where it can."""
        self.tree.evict(EvictParams(num_tokens=0, mamba_num=self.tree.mamba_evictable_size()))

    def close(self) -> None:
        if self.shim is not None:
            self.tree.release_host_resources()
