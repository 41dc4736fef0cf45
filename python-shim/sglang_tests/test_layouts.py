"""Where pools keep their rows, and in pages of how many, is in nothing that is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import World
from engram_sglang import plugin
from engram_sglang._pb.engram.v1 import engram_pb2 as pb
from engram_sglang.pools import describe
from engram_sglang.ranks import Alone
from test_turns import settle, words

page_major = pytest.mark.skipif(not World.PAGE_MAJOR, reason="this release has no page-major pools")

PER_LAYER = {"page_size": 64}
OTHERS = [
    pytest.param({"page_size": 64, "page_major": True}, id="page64-page_major", marks=page_major),
    pytest.param({"page_size": 16, "page_major": True}, id="page16-page_major", marks=page_major),
    pytest.param({"page_size": 1, "page_major": True}, id="page1-page_major", marks=page_major),
    pytest.param({"page_size": 1}, id="page1"),
]


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("other", OTHERS)
def test_what_one_layout_saved_another_restores(
    world: Any, shared_daemon: Any, other: dict[str, Any], back: bool, seed: int
) -> None:
    first, second = (other, PER_LAYER) if back else (PER_LAYER, other)
    w = world(shared_daemon, **first)
    prompt = words(seed, 700)
    one = w.request(prompt, new=8)
    w.run(one)
    settle(w)
    w.close()
    w = world(shared_daemon, **second)
    again = w.request(prompt + list(one.output_ids) + words(seed + 1, 50), new=8)
    # The forward reads all of it, and knows each byte.
    w.run(again)
    assert w.admitted_prefix[again.rid] == 640 and w.shim.counts["tokens_reused"] == 640, w.shim.counts
    settle(w)
    w.check()


def noise(w: World) -> torch.Tensor:
    """SGLang's own buffer of the attention's KV, with something in it."""
    raw = w.allocator.get_kvcache().full_kv_pool._raw
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return raw


def places(w: World, rows: list[int]) -> torch.Tensor:
    """Where in that buffer the bytes of a packed piece are, by SGLang's description of it: pages, and in each one
    K and V of layer after layer."""
    pool = w.allocator.get_kvcache().full_kv_pool
    size, width = w.page_size, pool.head_num * pool.head_dim * pool.store_dtype.itemsize
    found = []
    for side in range(2 * pool.layer_num):
        for row in rows:
            page, slot = divmod(row, size)
            start = (page * 2 * pool.layer_num + side) * size * width + slot * width
            found.append(torch.arange(start, start + width))
    return torch.cat(found)


@page_major
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_packed_rows_are_those_of_the_buffer(page_size: int, seed: int) -> None:
    w = World(armed=False, page_size=page_size, page_major=True, rows=1024, seed=seed)
    raw, pools = noise(w), w.pools
    assert pools.page == page_size and pools.rows == 1024 + page_size
    rows = [0, page_size, 1024 + page_size - 1, 65, 64, 63, 500]
    where, index = places(w, rows), torch.tensor(rows)
    out = torch.zeros(pools.kv_bytes(len(rows)), dtype=torch.uint8)
    pools.gather_kv(index, out)
    assert out.equal(raw[where])

    fresh = torch.randint(0, 256, out.shape, dtype=torch.uint8)
    wanted = raw.clone()
    wanted[where] = fresh
    pools.scatter_kv(fresh, len(rows), 0, index)
    assert raw.equal(wanted), "not these rows, or others too"
    # A part of a piece: its tokens 2, 3 and 4.
    other = [7, 900, 8]
    piece = fresh.view(2 * len(pools.kv), len(rows), -1)[:, 2:5]
    wanted[places(w, other)] = piece.flatten()
    pools.scatter_kv(fresh, len(rows), 2, torch.tensor(other))
    assert raw.equal(wanted), "not these rows, or others too"


@page_major
def test_kv_alone_is_page_major_too(seed: int, monkeypatch: Any) -> None:
    w = World(armed=False, page_size=64, page_major=True, rows=1024, seed=seed)
    monkeypatch.setattr(w.req_pool.mamba_pool, "_raw", None)
    assert describe(w.req_pool.mamba_pool, w.allocator.get_kvcache(), 64).page_major


@page_major
def test_nothing_of_the_buffer_is_copied(seed: int) -> None:
    w = World(armed=False, page_size=64, page_major=True, rows=1024, seed=seed)
    raw = w.allocator.get_kvcache().full_kv_pool._raw
    assert {side.untyped_storage().data_ptr() for side in w.pools.sides()} == {raw.untyped_storage().data_ptr()}


@pytest.mark.parametrize("mode", [{}, pytest.param({"page_major": True}, marks=page_major)], ids=["per_layer", "page_major"])
def test_the_daemon_is_told_the_layout(mode: dict[str, Any], seed: int) -> None:
    w = World(armed=False, page_size=64, seed=seed, **mode)
    told = plugin._description(w.ctx, w.pools, w.model, Alone())
    assert told.layout == (pb.POOL_LAYOUT_PAGE_MAJOR if mode else pb.POOL_LAYOUT_PER_LAYER)
    assert told.page_size == 64 and told.rows == w.allocator.size + 64
    assert [(k.heads, k.k_head_dim, k.v_head_dim) for k in told.kv] == [(2, 8, 8)] * 2
