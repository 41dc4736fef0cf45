"""What must hold before the shim attaches to a server, and why not if it does not.

Two sorts of checks. `signatures`: what the shim overrides and calls has the parameters that it had in the
tested releases. `refusals`: nothing of this server is of a sort that cannot be saved exactly. Either sort
that fails means SGLang's own cache, and the reason in its log.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any


def signatures(wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Problems of `wanted`: dotted target -> names of its leading parameters, `self` left out."""
    problems = []
    for target, names in wanted.items():
        try:
            found = _resolve(target)
        except (ImportError, AttributeError):
            problems.append(f"{target} is not there")
            continue
        if not callable(found):
            continue
        try:
            parameters = [p.name for p in inspect.signature(found).parameters.values()]
        except (TypeError, ValueError):
            continue
        if parameters[:1] == ["self"]:
            parameters = parameters[1:]
        missing = [name for name in names if name not in parameters]
        if missing:
            problems.append(f"{target} has no parameter {', '.join(missing)}")
    return problems


def _resolve(target: str) -> Any:
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(target)


_GROUPS = ("attn_tp_cache_group", "tp_cache_group")
_MUST_BE_ONE = ("pp_size", "dcp_size", "nnodes", "attn_cp_size")
_MUST_BE_OFF = {
    "enable_int8_mamba_checkpoint": "int8 checkpoints of states",
    "enable_unified_memory": "unified memory",
    "enable_hierarchical_cache": "the hierarchical cache",
    "enable_lmcache": "LMCache",
    "enable_flexkv": "FlexKV",
    "enable_hisparse": "hierarchical sparse attention",
    "enable_linear_replayssm": "replayed states",
    "enable_linear_replayssm_spec": "replayed states",
    "enable_memory_saver": "the memory saver",
    "speculative_algorithm": "speculative decoding",
    "hicache_storage_backend": "another storage backend",
    "dllm_algorithm": "a diffusion model",
    "enable_pdmux": "multiplexed disaggregation",
}


def refusals(ctx: Any) -> list[str]:
    """Why the cache of this server cannot be saved. `ctx`: SGLang's TreeCacheBuildContext."""
    args, params = ctx.server_args, ctx.params
    why = []
    for name in _MUST_BE_ONE:
        value = getattr(args, name, 1)
        if isinstance(value, int) and value > 1:
            why.append(f"{name} is {value}")
    for name, what in _MUST_BE_OFF.items():
        value = getattr(args, name, None)
        if value not in (None, False, "", 0, "null", "none"):
            why.append(f"{what} ({name})")
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        why.append("disaggregated prefill or decode")
    if getattr(params, "pp_size", 1) > 1 and "pp_size" not in str(why):
        why.append("pipeline parallelism")
    if getattr(params, "attn_cp_size", 1) > 1:
        why.append("context parallelism")
    if ctx.tp_size > 1 and all(getattr(params, name, None) is None for name in _GROUPS):
        why.append("tensor parallelism without a group of the ranks")
    if getattr(args, "enable_dp_attention", False) and ctx.tp_size > 1:
        # The weights of all ranks have one name, so that a change of them must come to all in the same iteration.
        if getattr(ctx.tp_group, "cpu_group", None) is None:
            why.append("data-parallel attention without a group of all ranks")
        for name, value in (("enable_dp_attention_local_control_broadcast", True), ("ep_join_mode", "scale")):
            if getattr(args, name, None) == value:
                why.append(f"data-parallel attention whose ranks hear of a change apart ({name})")
    if getattr(params, "is_eagle", False):
        why.append("speculative decoding")
    if any(getattr(params, name, ()) for name in ("mtp_draft_device_pools", "sidecar_draft_device_pools")):
        why.append("pools of a draft model")
    return why + _pools(params)


def _pools(params: Any) -> list[str]:
    why = []
    req_pool, allocator = params.req_to_token_pool, params.token_to_kv_pool_allocator
    for what, pool in (("request pool", req_pool), ("KV allocator", allocator)):
        if "Unified" in type(pool).__name__:
            why.append(f"{what} of type {type(pool).__name__}")
    mamba = getattr(req_pool, "mamba_pool", None)
    if mamba is None:
        return [*why, "no pool of states"]
    if type(mamba).__name__ != "MambaPool":
        why.append(f"state pool of type {type(mamba).__name__}")
    if getattr(req_pool, "mamba_ckpt_pool", None) is not None:
        why.append("int8 checkpoints of states")
    if getattr(mamba, "replayssm_write_pos", None) is not None:
        why.append("replayed states")
    kvcache = allocator.get_kvcache()
    if type(kvcache).__name__ != "HybridLinearKVPool":
        return [*why, f"KV pool of type {type(kvcache).__name__}"]
    inner = kvcache.full_kv_pool
    if type(inner).__name__ not in ("MHATokenToKVPool", "MLATokenToKVPool", "PageMajorMHATokenToKVPool"):
        why.append(f"attention KV pool of type {type(inner).__name__}")
    if getattr(inner, "is_quantized_kv_cache", False):
        why.append("quantised KV with scales")
    for name in ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "index_k_with_scale_buffer"):
        if getattr(inner, name, None) is not None:
            why.append(f"KV with scales ({name})")
            break
    if getattr(inner, "use_hnd", False):
        why.append("KV in the order heads, rows")
    return why
