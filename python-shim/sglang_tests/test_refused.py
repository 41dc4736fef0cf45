"""What cannot be saved exactly is not attached: SGLang's own cache, and the reason in its log."""

from __future__ import annotations

import dataclasses
import logging
import threading
import types
from typing import Any

import pytest
import torch

from conftest import World
from engram_sglang import checks, plugin
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def stock(w: Any, caplog: Any, reason: str, **changes: Any) -> None:
    """The factory gives SGLang's own cache, and says why."""
    ctx = dataclasses.replace(w.ctx, **changes)
    with caplog.at_level(logging.WARNING):
        cache = plugin.factory(ctx)
    assert type(cache) is UnifiedRadixCache
    assert any(reason in r.message for r in caplog.records), [r.message for r in caplog.records]


@pytest.fixture
def bare(seed: int) -> Any:
    return World(armed=False, seed=seed)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("pp_size", 2, "pp_size is 2"),
        ("nnodes", 2, "nnodes is 2"),
        ("dcp_size", 2, "dcp_size is 2"),
        ("enable_int8_mamba_checkpoint", True, "int8 checkpoints"),
        ("enable_unified_memory", True, "unified memory"),
        ("speculative_algorithm", "EAGLE", "speculative decoding"),
        ("disaggregation_mode", "prefill", "disaggregated"),
        ("enable_hisparse", True, "sparse"),
    ],
)
def test_server_of_a_sort_that_is_refused(bare: Any, caplog: Any, name: str, value: Any, reason: str) -> None:
    args = types.SimpleNamespace(**{**vars(bare.args), name: value})
    stock(bare, caplog, reason, server_args=args)


def test_unknown_state_beside_the_known(bare: Any, caplog: Any, monkeypatch: Any) -> None:
    cache = bare.req_pool.mamba_pool.mamba_cache
    monkeypatch.setitem(vars(cache), "something_new", cache.temporal)
    stock(bare, caplog, "something_new")


def test_quantised_scales(bare: Any, caplog: Any, monkeypatch: Any) -> None:
    pool = bare.allocator.get_kvcache().full_kv_pool
    monkeypatch.setattr(pool, "k_scale_buffer", [1], raising=False)
    stock(bare, caplog, "scales")


def test_unknown_kv_pool(bare: Any, caplog: Any, monkeypatch: Any) -> None:
    pool = bare.allocator.get_kvcache()

    class Other(type(pool.full_kv_pool)):  # type: ignore[misc]
        pass

    monkeypatch.setattr(pool.full_kv_pool, "__class__", Other)
    stock(bare, caplog, "attention KV pool of type Other")


@pytest.mark.skipif(not World.PAGE_MAJOR, reason="this release has no page-major pools")
def test_page_major_server_is_armed(seed: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENGRAM_DAEMON", "unix:///nonexistent/x.sock")
    cache = plugin.factory(World(armed=False, page_size=64, page_major=True, seed=seed).ctx)
    assert cache.shim is not None and cache.shim.pools.page == 64
    cache.release_host_resources()


def paged(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> torch.Tensor:
    """KV of pages; `order`: which dimensions are which in memory."""
    made = torch.zeros(shape, dtype=torch.bfloat16)
    return made if order is None else made.permute(order)


@pytest.mark.parametrize(
    ("k", "v", "reason"),
    [
        (paged((10, 32, 2, 8)), paged((10, 32, 2, 8)), "pages of 32 rows beside pages of 64"),
        (paged((10, 64, 2, 8)), paged((11, 64, 2, 8)), "K and V are not"),
        (paged((10, 64, 2, 8)), paged((640, 2, 8)), "K and V are not"),
        (paged((10, 1, 64, 2, 8)), paged((10, 1, 64, 2, 8)), "K and V are not"),
        (paged((640, 16)), paged((640, 16)), "K and V are not"),
        (paged((10, 2, 64, 8), (0, 2, 1, 3)), paged((10, 64, 2, 8)), "K of layer 2: the bytes of one entry"),
        (paged((10, 64, 2, 8)), paged((10, 64, 8, 2), (0, 1, 3, 2)), "V of layer 2: the bytes of one entry"),
        (paged((10, 64, 2, 8)), paged((10, 64, 2, 8)), "attention layers of different lengths or layouts"),
        (paged((7, 64, 2, 8)), paged((7, 64, 2, 8)), "attention layers of different lengths or layouts"),
    ],
)
def test_kv_of_a_shape_that_is_not_known(caplog: Any, seed: int, k: torch.Tensor, v: torch.Tensor, reason: str) -> None:
    w = World(armed=False, page_size=64, rows=1024, seed=seed)
    pool = w.allocator.get_kvcache().full_kv_pool
    pool.k_buffer[0], pool.v_buffer[0] = k, v
    stock(w, caplog, reason)


def test_changed_signature(bare: Any, caplog: Any, monkeypatch: Any) -> None:
    problems = checks.signatures({plugin.adapter().CACHE + "insert": ("params", "something_new")})
    assert problems and "something_new" in problems[0]
    monkeypatch.setattr(plugin, "_problems", problems)
    stock(bare, caplog, "something_new")


def test_missing_target() -> None:
    assert checks.signatures({plugin.adapter().CACHE + "no_such_method": ()}) == [
        plugin.adapter().CACHE + "no_such_method is not there"
    ]


def test_this_release_is_as_it_was_tested() -> None:
    assert checks.signatures(plugin.adapter().SIGNATURES) == []


def test_model_without_state_and_cache_off(bare: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        ctx = dataclasses.replace(bare.ctx, disable_radix_cache=True)
        assert type(plugin.factory(ctx)) is UnifiedRadixCache
    assert any("the radix cache is off" in r.message for r in caplog.records)


def test_plain_server_is_armed(bare: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENGRAM_DAEMON", "unix:///nonexistent/x.sock")
    cache = plugin.factory(bare.ctx)
    assert type(cache) is plugin.adapter().EngramRadixCache
    assert cache.shim is not None
    cache.release_host_resources()


def test_dp_attention_whose_ranks_hear_of_a_change_apart(bare: Any, caplog: Any) -> None:
    group = types.SimpleNamespace(cpu_group=None)
    args = types.SimpleNamespace(**{**vars(bare.args), "enable_dp_attention": True})
    params = dataclasses.replace(bare.ctx.params)
    params.attn_tp_cache_group = object()
    ctx = dataclasses.replace(bare.ctx, tp_size=2, tp_group=group, server_args=args, params=params)
    assert checks.refusals(ctx) == ["data-parallel attention without a group of all ranks"]
    group.cpu_group = object()
    assert checks.refusals(ctx) == []
    args.enable_dp_attention_local_control_broadcast = True
    assert "enable_dp_attention_local_control_broadcast" in checks.refusals(ctx)[0]
    args.enable_dp_attention_local_control_broadcast, args.ep_join_mode = False, "scale"
    assert "ep_join_mode" in checks.refusals(ctx)[0]


class Meeting:
    """Another rank beside this one, for which nothing is wrong."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.met: list[Any] = []

    def minimum(self, numbers: list[int]) -> list[int]:
        self.met.append(numbers)
        return numbers

    def gather(self, mine: bytes) -> list[bytes]:
        self.met.append(mine)
        return [mine, b"\1" + mine[1:]]


def test_a_check_that_fails_is_no_reason_to_leave_the_other_ranks_alone(bare: Any, caplog: Any, monkeypatch: Any) -> None:
    meeting = Meeting()
    monkeypatch.setattr(plugin.ranks_module, "of", lambda ctx: meeting)
    monkeypatch.setattr(checks, "refusals", lambda ctx: ctx.nothing)
    stock(bare, caplog, "AttributeError")
    assert meeting.met == [[0]]


def test_a_thread_that_cannot_be_made_is_told_to_the_other_ranks(bare: Any, caplog: Any, monkeypatch: Any) -> None:
    meeting = Meeting()
    monkeypatch.setattr(plugin.ranks_module, "of", lambda ctx: meeting)
    monkeypatch.setattr(plugin, "_tell_why", lambda *args: None)

    def none(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with caplog.at_level(logging.WARNING):
        cache = plugin.factory(bare.ctx)
    assert cache.shim is None
    assert [one[0] for one in meeting.met[:2]] == [1, 0], "it looked well, and then was not"
