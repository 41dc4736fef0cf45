"""Prompts that end around the grid on which states lie, and around the chunks in which they are prefilled."""

from __future__ import annotations

from typing import Any

import pytest

from test_turns import settle, words

GRID, CHUNK = 64, 512
MODES = [
    pytest.param({"page_size": 1, "extra_buffer": True}, id="page1-extra"),
    pytest.param({"page_size": 64, "extra_buffer": True}, id="page64-extra"),
    pytest.param({"page_size": 1, "extra_buffer": False}, id="page1-no_buffer"),
    pytest.param({"page_size": 64, "extra_buffer": True, "overlap": True, "lag": 2}, id="page64-overlap"),
]
AROUND_GRID = {k * GRID + d for k in (1, 2, 3, 4, 7, 9) for d in (-1, 0, 1)}
AROUND_CHUNK = {n * CHUNK + d for n in (1, 2, 3) for d in (-1, 0, 1, GRID - 1, GRID, GRID + 1)}
NEW = 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", sorted(AROUND_GRID | AROUND_CHUNK))
def test_prompt_of_this_length_comes_back(
    world: Any, shared_daemon: Any, length: int, mode: dict[str, Any], seed: int
) -> None:
    w = world(shared_daemon, settings={"minimum_tokens": 1}, chunk=CHUNK, **mode)
    first = w.request(words(seed, length), new=NEW)
    w.run(first)
    settle(w)
    w.flush()
    second = w.request(list(first.origin_input_ids) + list(first.output_ids) + words(seed + 1, 5), new=NEW)
    w.run(second)
    if w.extra_buffer:
        # The state of the prompt, or the one that decoding left at a multiple of 256.
        decoded, untracked = (length + NEW - 1) // 256 * 256, length + (w.overlap and w.FIRST_DECODE_IS_UNTRACKED)
        expected = max(length // GRID * GRID, decoded if decoded > untracked else 0)
    else:
        expected = length + NEW - 1
    assert w.admitted_prefix[second.rid] == expected, w.shim.counts
    assert w.shim.counts["tokens_reused"] == expected
    settle(w)
    w.check()
