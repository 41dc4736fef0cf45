"""`exact.py` on several models and configurations at the same time: correctness needs no quiet GPU.

    ENGRAM_BIN=... python tests/gpu/exact_all.py MODELS [LABEL ...]

`MODELS`: the folder of the models' folders. `LABEL`s choose some of `CASES` (all of them by default). Writes
gpu-exact-RELEASE.md and .json, and each run's output as LABEL.log, into $OUT. Needs some 60 GB of GPU memory for all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import OUT, write_results

HERE = pathlib.Path(__file__).resolve().parent
RELEASE = importlib.metadata.version("sglang").split("+")[0]
COMMON = "--context-length 32768 --max-mamba-cache-size 60 --max-running-requests 8 --max-total-tokens 131072 --mem-fraction-static 0.5"
PAGE_64 = "--page-size 64 --mamba-radix-cache-strategy extra_buffer"
NO_BUFFER = "--page-size 1 --mamba-radix-cache-strategy no_buffer --disable-overlap-schedule"
SHORT = (1023, 1024, 1025, 2047, 2048, 2049)
CHUNKS = (8192, 8193, 8447, 8448, 8449, 16384)


class Case(NamedTuple):
    label: str
    model: str
    scale: float
    lengths: tuple[int, ...]
    flags: str
    releases: tuple[str, ...] = ("0.5.17", "0.5.23")


CASES = (
    Case("tiny-granite-page64", "tiny-granite-attn0", 0.03, SHORT, PAGE_64),
    Case("tiny-granite-page1", "tiny-granite-attn0", 0.03, SHORT, NO_BUFFER),
    Case("tiny-granite-page-major", "tiny-granite-attn0", 0.03, SHORT, f"{PAGE_64} --enable-page-major-kv-layout", ("0.5.17",)),
    Case("tiny-qwen3-next", "tiny-qwen3-next", 0.05, SHORT + CHUNKS, PAGE_64),
    Case("tiny-nemotron", "tiny-nemotron", 0.03, SHORT, f"{PAGE_64} --moe-runner-backend triton"),
    # Longer ones overflow with these weights.
    Case("granite-4.0-h-tiny", "granite-4.0-h-tiny", 0.015, SHORT[:3] + CHUNKS[:-1], PAGE_64),
)


def attention(case: Case) -> str:
    """0.5.17's Triton backend wants attention in layer 0."""
    return "fa3" if RELEASE == "0.5.17" and not case.model.endswith("-attn0") else "triton"


def start(case: Case, models: str) -> subprocess.Popen[bytes]:
    out = OUT / case.label
    out.mkdir(exist_ok=True)
    flags = f"--attention-backend {attention(case)} {COMMON} {case.flags}".split()
    command = [sys.executable, str(HERE / "exact.py"), f"{models}/{case.model}", str(case.scale), *map(str, case.lengths), "--", *flags]
    env = dict(os.environ, OUT=str(out), LABEL=case.label, RAM="4GiB", SGLANG_VERSION=RELEASE)
    with open(OUT / f"{case.label}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env)


def row(case: Case, code: int) -> dict[str, Any]:
    found = OUT / case.label / f"gpu-exact-{case.label}.json"
    rows = json.loads(found.read_text()) if found.exists() else {"rows": [], "notes": "no result"}
    compared = [r for r in rows["rows"] if r["logprobs equal"] and r["tokens equal"]]
    return {
        "case": case.label, "result": "ok" if code == 0 else f"FAILED ({code})", "weights": f"±{case.scale}",
        "second turns": len(rows["rows"]), "tokens and logprobs equal": len(compared),
        "cached as promised": sum(r["cached"] == r["warm hit's"] for r in rows["rows"]),
        "pool bytes": rows["notes"].partition(" Flags:")[0], "flags": f"`{case.flags}`",
    }  # fmt: skip


def main() -> None:
    models, labels = sys.argv[1], sys.argv[2:]
    chosen = [c for c in CASES if RELEASE in c.releases and (not labels or c.label in labels)]
    assert chosen, f"nothing to run on SGLang {RELEASE}"
    began = time.monotonic()
    running = [(case, start(case, models)) for case in chosen]
    rows = []
    for case, process in running:
        code = process.wait()
        rows.append(row(case, code))
        print(f"{time.monotonic() - began:.0f} s: {case.label}: {rows[-1]['result']}", flush=True)
        if code:
            print((OUT / f"{case.label}.log").read_text(errors="replace")[-2500:], flush=True)
    write_results(f"gpu-exact-{RELEASE}", rows, f"Exactness on SGLang {RELEASE}",
                  f"Each after a flush, after `kill -9` of SGLang, and after `kill -9` of both with nothing but the disk; {COMMON}.")  # fmt: skip
    sys.exit(any(r["result"] != "ok" for r in rows))


if __name__ == "__main__":
    main()
