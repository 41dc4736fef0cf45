"""Rows that SGLang gives to somebody else while a copy from or to them is queued: who gets them next writes after it.

On this device a copy that nothing waits for is done as late as may be.
"""

from __future__ import annotations

from typing import Any

import pytest

from engram_sglang.save import SaveState
from held import Held
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_parts import PATIENCE, PROMPT, at_part, saved
from test_turns import settle, words

SMALL = {"page_size": 64, "rows": 1024, "context": 1024, "slots": 12, "max_running": 1}
STREAMS = {"page_size": 64, "rows": 7040, "context": 7040, "chunk": 2048}


def test_evicted_as_soon_as_they_are_to_be_saved(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings=PATIENCE, **SMALL)
    gather = w.shim.gather_kv
    evicted: list[int] = []

    def gathered(save: Any, runs: list[Any]) -> Any:
        event = gather(save, runs)
        result = w.tree.evict(EvictParams(num_tokens=w.tree.full_evictable_size(), mamba_num=w.tree.mamba_evictable_size()))
        if result.num_tokens_evicted >= 640:
            evicted.append(result.num_tokens_evicted)
        return event

    w.shim.gather_kv = gathered
    prompt = words(seed, 700)
    held = Held(w, SaveState.GATHERING)
    first = w.request(prompt, new=4)
    w.until(lambda: first.finished() and SaveState.GATHERING in held._states(), what="the turn, and its save")
    for _ in range(3):
        w.step()
    held.release()
    w.until(lambda: evicted, what="the copies, and the eviction")
    # It needs most of the rows, and computes at once.
    w.run(w.request(words(seed + 1, 900), new=2))
    settle(w)
    w.shim.gather_kv = gather
    w.flush()
    second = w.request(prompt + list(first.output_ids) + [1, 2, 3], new=4)
    w.run(second)
    assert w.shim.counts["save_ok"] and w.admitted_prefix[second.rid] == 640, w.shim.counts
    settle(w)
    w.check()


@pytest.mark.parametrize("how", ["abort", "flush"])
def test_given_back_while_parts_are_copied_into_them(world: Any, shared_daemon: Any, seed: int, how: str) -> None:
    w = world(shared_daemon, settings=PATIENCE, **STREAMS)
    prompt = words(seed, PROMPT)
    saved(w, prompt)
    hits = at_part(w, 1, lambda restore: None)
    second = w.request(prompt + [1, 2, 3], new=4)
    w.until(lambda: hits, what="a part")
    if how == "flush":
        # What a flush does, of a server that is paused.
        w.scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        w.tree.reset()
        w.req_pool.clear()
        w.allocator.clear()
        w.scheduler.continue_generation(ContinueGenerationReqInput())
    w.abort(second.rid)
    # It needs nearly all rows, in chunks, each of which reads those before.
    other = w.request(words(seed + 1, 6800), new=40)
    w.run(other, seconds=60)
    settle(w)
    w.check()
