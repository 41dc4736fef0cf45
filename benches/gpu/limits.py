"""What a snapshot is measured against: the shapes that a model's configuration says, and what the disk does by itself."""

from __future__ import annotations

import mmap
import os
import pathlib
import sys
import threading
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from common import drop_caches

MIB = 1 << 20


def shapes(config: dict[str, Any]) -> tuple[list[int], tuple[int, int], tuple[int, int, int], list[int], int, int]:
    """Layers with a state, the shapes of its two tensors, layers with attention, heads, and their width."""
    layers, kind = config["num_hidden_layers"], config["model_type"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if kind == "qwen3_next":
        attention = [n for n in range(layers) if (n + 1) % config["full_attention_interval"] == 0]
        keys, heads, size = config["linear_num_key_heads"] * config["linear_key_head_dim"], config["linear_num_value_heads"], config["linear_value_head_dim"]
        conv, temporal = (2 * keys + heads * size, config["linear_conv_kernel_dim"] - 1), (heads, size, config["linear_key_head_dim"])
        states = [n for n in range(layers) if n not in attention]
    elif kind == "nemotron_h":
        pattern = config["hybrid_override_pattern"]
        states, attention = ([n for n, what in enumerate(pattern) if what == sort] for sort in "M*")
        heads, size, state = config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"]
        conv, temporal = (heads * size + 2 * config["n_groups"] * state, config["conv_kernel"] - 1), (heads, size, state)
    else:
        states, attention = ([n for n, what in enumerate(config["layer_types"]) if what == sort] for sort in ("mamba", "attention"))
        heads, size, state = config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_state"]
        conv, temporal = (heads * size + 2 * config["mamba_n_groups"] * state, config["mamba_d_conv"] - 1), (heads, size, state)
    return states, conv, temporal, attention, config["num_key_value_heads"], width


def plain_disk(folder: pathlib.Path, size: int) -> tuple[float, float]:
    """GB/s of writing and reading one file past the file cache, by eight threads of 4 MiB at a time."""
    path, part, threads = folder / "plain", 4 * MIB, 8
    rates = []
    for flags, call in ((os.O_WRONLY | os.O_CREAT, os.pwritev), (os.O_RDONLY, os.preadv)):
        try:
            file = os.open(path, flags | os.O_DIRECT)
        except OSError:
            file = os.open(path, flags)

        def work(first: int) -> None:
            buffer = mmap.mmap(-1, part)
            for at in range(first * part, size, threads * part):
                call(file, [buffer], at)

        drop_caches()
        began = time.perf_counter()
        workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.fsync(file)
        rates.append(size / (time.perf_counter() - began) / 1e9)
        os.close(file)
    path.unlink()
    return rates[0], rates[1]
