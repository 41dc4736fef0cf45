"""What is SGLang 0.5.23's own in a `World`."""

from __future__ import annotations

import types
from typing import Any

import world
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager


class World(world.World):
    """One server."""

    FLUSHES_WHILE_WAITING = True
    CORES = ("rust", "python")
    ROUTES = ("enable_lmcache", "enable_unified_cache_external_linker", "enable_continuous_input_polling")

    def _policy(self) -> SchedulePolicy:
        return SchedulePolicy("fcfs", self.tree, False, False, False)

    def _finish_scheduler(self, s: Scheduler, quiet: Any) -> SchedulerBatchResultProcessor:
        s.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        s._pause_started_at, s._pause_intervals = None, []
        s.dynamic_chunk_sizer = None
        s.processed_tokens_counter = 0
        s.enable_skip_finishing_decode = self.overlap
        s.beam_coordinator = types.SimpleNamespace(pending_member_rows=lambda b: 0, retire_group=lambda r: None)
        s.dp_attn_adapter = types.SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda b, need_sync=None: b,
            maybe_convert_decode_to_extend=lambda batch, **k: batch,
            drop_sync_wait_carry=lambda: None,
        )
        s.scheduler_stage_metrics = quiet
        s.future_map = quiet
        s.send_abort_output = lambda out, req: self.aborted.append(req.rid)
        s._arm_prefill_decode_interval = lambda batch: None
        s._should_defer_prefill = lambda running: False
        return SchedulerBatchResultProcessor(
            is_generation=True, disaggregation_mode=s.disaggregation_mode, enable_overlap=self.overlap,
            enable_overlap_mlx=False, model_config=s.model_config, token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree, hisparse_coordinator=None, req_to_token_pool=self.req_pool,
            decode_offload_manager=None, metrics_collector=quiet, metrics_reporter=quiet, draft_worker=None,
            model_worker=quiet, logprob_result_processor=quiet, output_streamer=quiet,
            beam_coordinator=s.beam_coordinator, abort_request=s.abort_request,
        )

    @staticmethod
    def span(req: Req) -> tuple[int, int]:
        return req.prefix_len, req.extend_end

    @staticmethod
    def tracked_at(req: Req) -> int:
        return req.kv.mamba_last_track_seqlen

    @staticmethod
    def places(req: Req) -> tuple[int, int]:
        return req.kv.req_pool_idx, int(req.kv.mamba_pool_idx)

    def updater(self) -> SchedulerWeightUpdaterManager:
        updater = types.SimpleNamespace(update_weights_from_disk=self.new_weights)
        runner = types.SimpleNamespace(weight_updater=updater)
        manager = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
        for name, value in {
            "tp_worker": types.SimpleNamespace(weight_update_runners=lambda: [("target", runner)]),
            "draft_worker": None, "memory_saver_adapter": None, "flush_cache": self.scheduler.flush_cache,
            "is_fully_idle": self.scheduler.is_fully_idle, "metrics_collector": None, "offload_tags": set(),
            "stashed_model_static_state": None, "_session": None,
            "scheduler": types.SimpleNamespace(record_weight_version_change=lambda new_version: None),
        }.items():
            setattr(manager, name, value)
        return manager
