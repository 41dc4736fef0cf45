"""What is SGLang 0.5.17's own in a `World`."""

from __future__ import annotations

import types
from typing import Any

import torch

import world
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.allocator import paged


_tensor = torch.tensor


def _unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return _tensor(*args, **kwargs)


# See `world`: there is nothing to pin for, and this release asks for it even then.
torch.tensor = _unpinned


class _Kernel:
    """A kernel of the allocator on the CPU: `kernel[grid](arguments)`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Any:
        return self._run


def _extend(prefix: Any, lens: Any, last: Any, pages: Any, out: Any, width: int, page_size: int) -> None:
    # SGLang's own for devices without Triton.
    paged.alloc_extend_naive(prefix, lens, last, pages, out, page_size, out.device)


def _decode(lens: Any, last: Any, pages: Any, out: Any, width: int, page_size: int) -> None:
    fresh = (lens - 1) % page_size == 0
    starts = pages[(torch.cumsum(fresh, 0) - 1).clamp(min=0)] * page_size if bool(fresh.any()) else last
    out.copy_(torch.where(fresh, starts, last + 1))


# In this release the paged allocator asks Triton even where there is no device.
paged.alloc_extend_kernel = _Kernel(_extend)
paged.alloc_decode_kernel = _Kernel(_decode)


class World(world.World):
    """One server."""

    PAGE_MAJOR = True
    FIRST_DECODE_IS_UNTRACKED = True
    ARGS = {"attention_backend": "torch_native"}
    CONTEXT = {"effective_chunked_prefill_size": None}
    ROUTES = ("enable_session_radix_cache", "enable_dynamic_chunking", "enable_decode_hicache")

    def _policy(self) -> SchedulePolicy:
        return SchedulePolicy("fcfs", self.tree, False, False, False)

    def _finish_scheduler(self, s: Scheduler, quiet: Any) -> SchedulerBatchResultProcessor:
        s.new_token_ratio_tracker = NewTokenRatioTracker.from_server_args(self.args)
        s.dp_attn_adapter = types.SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda b, need_sync=None: b)
        s.ps = types.SimpleNamespace(pp_size=1, tp_size=1, tp_rank=0)
        s.ipc_channels = types.SimpleNamespace(
            send_to_tokenizer=types.SimpleNamespace(send_output=lambda out, req=None: self.aborted.append(out.rid))
        )
        s.future_map = quiet
        return SchedulerBatchResultProcessor(
            is_generation=True, disaggregation_mode=s.disaggregation_mode, enable_overlap=self.overlap,
            enable_overlap_mlx=False, server_args=self.args, model_config=s.model_config,
            token_to_kv_pool_allocator=self.allocator, tree_cache=self.tree, hisparse_coordinator=None,
            req_to_token_pool=self.req_pool, decode_offload_manager=None, metrics_collector=quiet,
            metrics_reporter=quiet, draft_worker=None, model_worker=quiet, logprob_result_processor=quiet,
            output_streamer=quiet, abort_request=s.abort_request,
        )

    @staticmethod
    def span(req: Req) -> tuple[int, int]:
        return len(req.prefix_indices), req.extend_range.end

    @staticmethod
    def tracked_at(req: Req) -> int:
        return req.mamba_last_track_seqlen

    @staticmethod
    def places(req: Req) -> tuple[int, int]:
        return req.req_pool_idx, int(req.mamba_pool_idx)

    @staticmethod
    def namespace(extra_key: str | None = None, cache_salt: str | None = None) -> dict[str, Any]:
        # Both become one in this release.
        return {"extra_key": (cache_salt or "") + (extra_key or "") or None}

    def updater(self) -> SchedulerWeightUpdaterManager:
        worker = types.SimpleNamespace(
            update_weights_from_disk=lambda request: self.new_weights(request.model_path)
        )
        return SchedulerWeightUpdaterManager(
            tp_worker=worker, draft_worker=None, tp_cpu_group=None, memory_saver_adapter=None,
            flush_cache=self.scheduler.flush_cache, is_fully_idle=self.scheduler.is_fully_idle,
        )
