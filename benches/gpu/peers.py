"""Second turns side by side on one machine: SGLang alone, with HiCache, with LMCache, and with Engram.

    ENGRAM_BIN=... python benches/gpu/peers.py MODEL [LENGTH ...] [--only NAME,NAME] [--lmcache FOLDER] [-- flags of SGLang]

All servers are started together, with the same flags, and then asked one after another; the others idle. For each length a
cold prompt, a first turn, and second turns of it that differ in their last 100 tokens: as hits of the server's own tree;
after that tree was filled with other prompts (twice; from the host tier); after `kill -9` of SGLang (from RAM, where RAM
outlives it); and from disk, with a cold file cache, after whatever else held the bytes was killed. Each beside three warm
hits of the same server. HiCache keeps its files below `$SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR`, a new folder. Then what Engram's
presence costs a warm hit and a miss: turns taken with the stock server. `FOLDER` has `wheels/` and `stubs/` of LMCache: README.md.
Writes gpu-peers[-$LABEL].md and .json into $OUT.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from common import Steps, arguments, drop_caches, median, ratio, write_results
from systems import EVICT, HITS, Engram, HiCache, LmCache, System

FLAGS = ("--attention-backend triton --page-size 64 --context-length 131072 --max-mamba-cache-size 80 --max-running-requests 16 "
         "--max-total-tokens 200064 --mamba-radix-cache-strategy extra_buffer")  # fmt: skip
LENGTHS = [8192, 8224, 32768, 32800, 130816]
ROUNDS, PAIRS = 2, int(os.environ.get("PAIRS", 30))


def presence(stock: System, engram: System, lengths: list[int]) -> list[dict[str, Any]]:
    """The same requests to both servers by turns, each first as often as the other."""
    rows = []
    for kind, sizes in (("warm hit", lengths), ("miss", [2048, 8192])):
        for n in sizes:
            pairs = []
            for number in range(PAIRS + 2):
                took: dict[str, float] = {}
                for system in (stock, engram) if number % 2 else (engram, stock):
                    took[system.name] = (system.turn(n) if kind == "warm hit" else system.server.generate(system.ids(n), 1))["ms"]
                    time.sleep(0.03)
                pairs.append((took["stock"], took["engram"]))
            rows.append({"": kind, "prompt": n, "stock ms": round(median([a for a, _ in pairs[2:]]), 2), "Engram ms": round(median([b for _, b in pairs[2:]]), 2), **ratio(pairs[2:])})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    own, flags = arguments()
    steps, flags, options = Steps(480), flags or FLAGS.split(), {}
    for name in ("--only", "--lmcache"):
        if name in own:
            at = own.index(name)
            options[name], own = own[at + 1], own[:at] + own[at + 2 :]
    model, lengths = own[0], [int(n) for n in own[1:]] or LENGTHS
    wanted = options.get("--only", "hicache,engram,stock" + (",lmcache" if "--lmcache" in options else "")).split(",")
    make = {
        "hicache": lambda: HiCache(model, flags), "engram": lambda: Engram(model, flags), "stock": lambda: System("stock", model, flags),
        "lmcache": lambda: LmCache(model, flags, pathlib.Path(options["--lmcache"]).resolve()),
    }  # fmt: skip
    systems: list[System] = []
    costs: list[dict[str, Any]] = []
    label = "gpu-peers" + (f"-{os.environ['LABEL']}" if os.environ.get("LABEL") else "")

    def write(show: bool = False) -> None:
        rows = [{k: v for k, v in row.items() if k != "seen"} for system in systems for row in system.rows.values()]
        notes = (f"One machine, one run; all servers resident, one asked at a time. One token out, whole request by HTTP. SGLang {os.environ.get('SGLANG_VERSION', '')}, flags `{' '.join(flags)}`. "
                 f"*evicted*: the device's tree was filled with 2 x {EVICT:,} other tokens, medians of {ROUNDS}; *killed*: after `kill -9` of SGLang, from RAM; *disk*: with a cold file cache, nothing "
                 f"else left; each once beside the median of {HITS} warm hits. LMCache with a shim for one symbol of torch 2.14. Presence: {costs}. Failures: {steps.failures or 'none'}.")  # fmt: skip
        if rows:
            write_results(label, rows, f"Second turns beside others: {pathlib.Path(model).name}", notes, show)

    try:
        with steps.whole():
            for name in wanted:
                with steps.step(f"start {name}"):
                    systems.append(make[name]())
                    systems[-1].server.launch()
            for system in list(systems):
                with steps.step(f"wait for {system.name}"):
                    print(f"{system.name} up in {system.server.wait():.0f} s", flush=True)
            for system in systems:
                with steps.step(f"{system.name}: compile"):
                    system.compile()
                with steps.step(f"{system.name}: cold and warm"):
                    system.measure(lengths)
                write()
            by_name = {system.name: system for system in systems}
            if {"stock", "engram"} <= set(by_name):
                with steps.step("presence of Engram"):
                    known = [n for n in lengths if n in by_name["stock"].turns and n in by_name["engram"].turns]
                    costs += presence(by_name["stock"], by_name["engram"], [n for n in known if n % 8192] or known)
                    by_name["engram"].drain()
                by_name["stock"].end()
                write()
            kept = [system for system in systems if system.restarts]
            for system in kept:
                for _ in range(ROUNDS):
                    with steps.step(f"{system.name}: evicted"):
                        system.evict()
                        system.stored("evicted")
                write()
            for system in kept:
                with steps.step(f"{system.name}: kill -9 of SGLang"):
                    try:
                        system.durable()
                    finally:
                        system.server.kill()
            for system in kept:
                system.server.launch()
            for system in kept:
                with steps.step(f"wait for {system.name}"):
                    print(f"{system.name} up again in {system.server.wait():.0f} s", flush=True)
                    system.compile()
            for what, some in (("killed", [s for s in kept if s.ram]), ("disk", kept)):
                for system in some:
                    with steps.step(f"{system.name}: {what}"):
                        if what == "disk":
                            system.durable()
                            system.lose_ram() if system.ram else drop_caches()
                        system.stored(what)
                    write()
    finally:
        write(show=True)
        for system in systems:
            with contextlib.suppress(Exception):
                system.end()
    steps.end("peers")


if __name__ == "__main__":
    main()
