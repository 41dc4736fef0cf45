"""The kernels that move pieces between pools and ring give the bytes that torch's own index operations give.

Needs torch and Triton; without a GPU, set TRITON_INTERPRET=1. Run as `python tests/gpu/test_moves.py`.
"""

from __future__ import annotations

import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python-shim" / "src"))

import numpy as np
import torch

from engram_sglang.fused import Mover
from engram_sglang.pools import KvLayer, Pools, StateTensor

ROWS = 300
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def sides(widths: list[int], page: int) -> list[torch.Tensor]:
    """K and V of layers: each by itself; or with `page`, in one buffer, `[pages, layer, K|V, page, row]`."""
    both = [width for width in widths for _ in "KV"]
    if not page:
        return [noise(ROWS, width) for width in both]
    pages, entry = -(-ROWS // page), sum(both)
    raw = noise(pages * page * entry)
    starts = [page * sum(both[:n]) for n in range(len(both))]
    return [raw.as_strided((pages, page, width), (page * entry, width, 1), start) for width, start in zip(both, starts)]


def pools(widths: list[int], state: list[tuple[int, int]], slots: int = 7, page_major: bool = False, page: int = 0) -> Pools:
    """`widths`: bytes of a row of each layer; `state`: layers and bytes of a slot of each tensor; `page`: rows of pages
    that are apart."""
    kv, views = [], iter(sides(widths, page))
    for layer, width in enumerate(widths):
        kv.append(KvLayer(layer, 3, 1, width, width, next(views), next(views)))
    tensors = []
    for n, (layers, size) in enumerate(state):
        data = noise(slots, layers, size).permute(1, 0, 2) if page_major else noise(layers, slots, size)
        tensors.append(StateTensor(f"t{n}", 1, tuple(range(layers)), (size,), data, size))
    return Pools(state=tensors, kv=kv, page_size=page or 1, slots=slots, rows=ROWS, page_major=page_major)


def numbered(p: Pools) -> list[torch.Tensor]:
    """Copies of K and V of all layers, in which rows are simply numbered."""
    return [side.reshape(-1, side.shape[-1]).clone() for side in p.sides()]


def check(widths: list[int], state: list[tuple[int, int]], seed: int, page_major: bool = False, page: int = 0) -> None:
    rng = random.Random(seed)
    p = pools(widths, state, page_major=page_major, page=page)
    mover = Mover(p, DEVICE)
    pieces = [64, 1, 17, 40]
    order = torch.tensor(rng.sample(range(ROWS), sum(pieces)), device=DEVICE)
    at, listed, first = 4096, [], 0
    for tokens in pieces:
        listed.append((at, tokens, 0, first, tokens))
        at += -(-p.kv_bytes(tokens) // 4096) * 4096
        first += tokens
    # One piece alone goes another way.
    runs, single = np.array(listed), np.array([(at, 9, 0, 5, 9)])
    at += -(-p.kv_bytes(9) // 4096) * 4096
    block = at
    size = at + -(-p.state_bytes // 4096) * 4096
    slot = torch.tensor([rng.randrange(7)], device=DEVICE)
    plain, fused = torch.zeros(size, dtype=torch.uint8, device=DEVICE), torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    p.save_kv(order, plain, runs)
    p.save_kv(order, plain, single)
    mover.kv(fused, order, single, True)
    p.save_state(slot, plain, block)
    mover.kv(fused, order, runs, True)
    mover.state(fused, slot, block, True)
    assert torch.equal(plain, fused), "gathered bytes differ"
    by_number = numbered(p)
    for place, tokens, _, begin, _ in [*listed, *single.tolist()]:
        wanted = torch.cat([side[order[begin : begin + tokens]].flatten() for side in by_number])
        assert torch.equal(fused[place : place + len(wanted)], wanted), "these are other rows"

    # Back, to other rows and another slot, and only a part of a piece.
    partial = runs.copy()
    partial[:, 2] = np.minimum(3, partial[:, 1] - 1)
    partial[:, 4] -= partial[:, 2]
    rows = torch.tensor(rng.sample(range(ROWS), sum(pieces)), device=DEVICE)
    other = torch.tensor([(int(slot) + 1) % 7], device=DEVICE)
    before = [side.clone() for side in p.sides()] + [t.bytes.clone() for t in p.state]
    by_number = numbered(p)
    for place, tokens, skip, begin, count in partial.tolist():
        for side in by_number:
            piece = fused[place : place + tokens * side.shape[1]].view(tokens, -1)
            side[rows[begin : begin + count]] = piece[skip : skip + count]
            place += tokens * side.shape[1]
    p.restore_kv(fused, partial, rows)
    p.restore_state(fused, block, other)
    wanted = [side.clone() for side in p.sides()] + [t.bytes.clone() for t in p.state]
    for now, old in zip([*p.sides(), *(t.bytes for t in p.state)], before):
        now.copy_(old)
    mover.kv(fused, rows, partial, False)
    mover.state(fused, other, block, False)
    for now, want, old in zip([*p.sides(), *(t.bytes for t in p.state)], wanted, before):
        assert torch.equal(now, want), "scattered bytes differ"
        assert now.numel() == 0 or not torch.equal(now, old), "nothing was scattered"
    assert all(torch.equal(now, want) for now, want in zip(numbered(p), by_number)), "other rows were written"


def main() -> None:
    check([64, 64], [(3, 96), (3, 4096)], 1)
    check([1024], [(2, 19968), (2, 40000)], 2)
    check([256, 64, 32], [(1, 4), (2, 12)], 3)
    check([6], [(2, 10)], 4)
    check([64], [(3, 96), (3, 0)], 5, page_major=True)
    for page in (1, 12, 16, 64):
        check([64, 64], [(3, 96)], page, page_major=True, page=page)
    # Rows that are several columns wide, and that no word divides.
    check([9000, 16], [(1, 64)], 6, page_major=True, page=16)
    check([6, 10, 3], [(1, 4)], 7, page=12)
    if DEVICE.type == "cuda":
        for seed in range(20):
            check([1024] * 4, [(36, 19968), (36, 1 << 20)], seed)
            check([1024] * 4, [(36, 19968), (36, 1 << 20)], seed, page_major=True, page=(1, 16, 64, 128)[seed % 4])
    print("moves: ok on", DEVICE)


if __name__ == "__main__":
    main()
