"""How long each hook keeps the scheduler thread, at 8K, 32K and 128K tokens. Run by hand: prints JSON lines."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from conftest import World  # noqa: E402
from daemon import Daemon  # noqa: E402
from engram_sglang import shim as shim_module  # noqa: E402
from engram_sglang.settings import Settings  # noqa: E402
from engram_sglang.timing import Times  # noqa: E402
from test_turns import settle, words  # noqa: E402


def main() -> None:
    if os.environ.get("CLOCK") == "cpu":
        # On a machine that others use: the time that this thread ran, not the time that passed.
        shim_module.time = types.SimpleNamespace(perf_counter_ns=time.thread_time_ns, monotonic=time.monotonic)
    daemon = Daemon(pathlib.Path(os.environ["ENGRAM_BIN"]), pathlib.Path(tempfile.mkdtemp()), ram="1GiB")
    try:
        for tokens in (8192, 32768, 131072):
            w = World(
                settings=Settings(daemon=daemon.target, ring_bytes=256 << 20, retry_ms=50),
                page_size=64, rows=tokens + 16384, context=tokens + 8192, chunk=8192, seed=tokens, overlap=True, lag=1,
            )
            w.until(lambda: w.shim.session is not None, what="attaching")
            for round_ in range(3):
                prompt = words(tokens + round_, tokens)
                w.run(w.request(prompt, new=4), seconds=300)
                settle(w)
                w.flush()
                if round_ == 1:
                    w.shim.times = Times()
                second = w.request(prompt + [1, 2, 3], new=4)
                w.run(second, seconds=300)
                settle(w)
                assert w.admitted_prefix[second.rid] == tokens
                w.flush()
            for hook, row in w.shim.times.snapshot().items():
                print(json.dumps({"tokens": tokens, "hook": hook, **row}), flush=True)
            w.close()
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
